"""Standing synopsis queries report what the rows say, when they are due, exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import RunConfig
from roost.errors import ConfigError
from roost.model.settings import load_config
from roost.runtime.executor import InProcessExecutor
from roost.synopsis import SynopsisResult
from roost.synopsis.queries import read_scope
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.standing import _has_left
from roost.testing import InProcessPipeline
from roost.testing.pipeline import check_states
from synopsis_tables import FEATURES, Rows, make_table

TABLE = make_table(8, 2_400).sort_by("event_time")
BATCH = 200
DAY = 86_400
STEPS = ("intent", "apply", "run", "after", "deliver", "commit", "publish", "cleanup", "round")
QUERIES = [
    {"name": "all", "query": "count"},
    {"name": "daily", "query": "mean", "feature": "temp", "emit": 7 * DAY},
    {"name": "alert", "query": "mean", "feature": "wind", "emit": "change", "last": 2 * DAY},
    {"name": "spread", "query": "quantiles", "feature": "wind", "ranks": [0.1, 0.9], "emit": DAY},
    {"name": "soon", "query": "forecast", "feature": "wind", "ahead": 6 * 3600, "emit": 9 * DAY},
]


class Killed(Exception):
    pass


def config(folder: Path, points: Path, queries: Any = QUERIES, **synopsis: Any) -> RunConfig:
    given = {"features": FEATURES, "bins": 16, "learn_rows": 500, "fold_files": 3}
    return RunConfig(
        points={"path": str(points)},
        space={"bounds": (-180, -90, 180, 90)},
        engine={"machines": 2, "available_now": True, "batch_rows": BATCH},
        synopsis={**given, "queries": queries, **synopsis},
        out={"dir": folder / "out", "sink": "count"},
    )


def run(settings: RunConfig, **hooks: Any) -> None:
    with InProcessPipeline(settings, executor=InProcessExecutor(2), **hooks) as pipeline:
        pipeline.run()
        check_states(pipeline)


def results(settings: RunConfig, name: str) -> list[dict[str, Any]]:
    files = sorted((settings.out.dir / "synopsis").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [row for row in rows if row["name"] == name]


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.parquet"
    pq.write_table(TABLE, path)
    return path


def check_results(settings: RunConfig) -> None:
    batches = TABLE.num_rows // BATCH
    rows = Rows(TABLE)
    counted = results(settings, "all")
    assert [row["batch_id"] for row in counted] == list(range(batches))
    assert [row["value"] for row in counted] == [BATCH * (n + 1) for n in range(batches)]
    reached = [int(row["event_time"].timestamp() * 1e6) for row in counted]
    time = rows.column("event_time")
    for n, now in enumerate(reached):
        assert time[BATCH * n] <= now <= time[BATCH * (n + 1) - 1]
    # A query with a period reports in the first batch of each.
    periods = [now // (7 * DAY * 1_000_000) for now in reached]
    first = [n for n, period in enumerate(periods) if n == 0 or period != periods[n - 1]]
    daily = results(settings, "daily")
    assert [row["batch_id"] for row in daily] == first and 3 < len(first) < batches
    temp = rows.column("temp")
    for row in daily:
        true = np.nanmean(temp[: BATCH * (row["batch_id"] + 1)])
        assert row["low"] <= true <= row["high"] and row["value"] == pytest.approx(true)
    # One that reports changes reports if its value is outside of what it reported last.
    wind = rows.column("wind")
    alerts = {row["batch_id"]: row for row in results(settings, "alert")}
    assert 1 < len(alerts) < batches
    last = None
    for n, now in enumerate(reached):
        seen = slice(0, BATCH * (n + 1))
        recent = wind[seen][time[seen] >= now - 2 * DAY * 1_000_000]
        if n in alerts:
            own = alerts[n]
            assert own["low"] - 1e-9 <= recent.mean() <= own["high"] + 1e-9
            outside = last is None or not last["low"] <= own["value"] <= last["high"]
            assert outside, "reported although nothing changed"
            last = own
        else:
            assert last["low"] - 1e-3 <= recent.mean() <= last["high"] + 1e-3
    spread = results(settings, "spread")
    assert [row["item"] for row in spread[:2]] == ["0", "1"]
    assert len(spread) % 2 == 0 and spread[0]["value"] < spread[1]["value"]
    forecasts = results(settings, "soon")
    assert forecasts[-1]["kind"] == "probable" and forecasts[-1]["low"] < forecasts[-1]["high"]


def test_standing_queries_report_when_they_are_due(tmp_path: Path, points: Path) -> None:
    settings = config(tmp_path, points)
    run(settings)
    check_results(settings)
    before = sorted((settings.out.dir / "synopsis").iterdir())
    run(settings)  # nothing new
    assert sorted((settings.out.dir / "synopsis").iterdir()) == before


@pytest.mark.parametrize("step", STEPS)
def test_results_are_written_exactly_once(step: str, tmp_path: Path, points: Path) -> None:
    settings = config(tmp_path, points)
    left = {2, 7}

    def kill(at: str, batch: int) -> None:
        if at == step and batch in left:
            left.discard(batch)
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            run(settings, on_step=kill)
    run(settings)
    check_results(settings)


def test_another_query_of_the_same_name_begins_anew(tmp_path: Path, points: Path) -> None:
    one = {"name": "a", "query": "mean", "feature": "fixed", "emit": "change"}
    settings = config(tmp_path, points, [one])

    def stop(at: str, batch: int) -> None:
        if (at, batch) == ("intent", 6):
            raise Killed

    with pytest.raises(Killed):
        run(settings, on_step=stop)
    assert [row["batch_id"] for row in results(settings, "a")] == [0], "it never changes"
    run(config(tmp_path, points, [{**one, "scope": {"hours": [0, 12]}}]))
    assert [row["batch_id"] for row in results(settings, "a")] == [0, 6]


def test_results_equal_those_of_a_reader(tmp_path: Path, points: Path) -> None:
    """Also of queries that prune files, before and after folds."""
    scope = {"circle": [10.0, 50.0, 30_000.0], "predicate": "temp > 12"}
    settings = config(tmp_path, points, [{"name": "near", "query": "count", "scope": scope}])
    expected = []

    def read(at: str, batch: int) -> None:
        if at == "publish":
            reader = SynopsisReader(settings.out.state_dir)
            expected.append(reader.query("count", scope=read_scope(scope)).result)
            reader.close()

    run(settings, on_step=read)
    found = [(row["value"], row["low"], row["high"]) for row in results(settings, "near")]
    assert found == [(own.value, own.low, own.high) for own in expected]
    assert len(found) == TABLE.num_rows // BATCH


WRONG = [
    ({"query": "count"}, r"synopsis.queries.name: got None"),
    ({"name": "a"}, r"synopsis.queries: a: query: got None"),
    ({"name": "a", "query": "mena", "feature": "temp"}, r"queries: a: query: got 'mena'"),
    ({"name": "a", "query": "mean", "feature": "tmp"}, r"queries: a: feature: got 'tmp'"),
    ({"name": "a", "query": "mean", "feature": "kind"}, r"queries: a: feature.*a number"),
    ({"name": "a", "query": "mean", "featur": "temp"}, r"queries: a: mean: featur"),
    ({"name": "a", "query": "select"}, r"queries: a: query: got 'select', expected a query whose"),
    ({"name": "a", "query": "count", "emit": "hourly"}, r"queries: a: emit: got 'hourly'"),
    ({"name": "a", "query": "count", "emit": 0}, r"queries: a: emit: got 0"),
    ({"name": "a", "query": "count", "last": -1}, r"queries: a: last: got -1"),
    ({"name": "a", "query": "count", "scope": {"predicate": "tmp > 1"}}, r"queries: a: .*tmp"),
    ({"name": "a", "query": "count", "scope": {"box": [1]}}, r"queries: a: scope.box"),
    (
        {"name": "a", "query": "count", "last": 5, "scope": {"since": 0}},
        r"queries: a: last: got 5, expected either last or since",
    ),
]


@pytest.mark.parametrize(("query", "message"), WRONG)
def test_wrong_queries_are_refused_before_the_run(
    query: dict[str, Any], message: str, tmp_path: Path, points: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(tmp_path, points, [query]))
    assert not list((tmp_path / "out").glob("synopsis/*.parquet"))


def test_queries_are_a_list_of_tables_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "roost.toml"
    path.write_text(
        '[synopsis]\nfeatures = ["temp"]\n\n[[synopsis.queries]]\nname = "afternoons"\n'
        'query = "mean"\nfeature = "temp"\nemit = 3600\nscope = { hours = [14, 17] }\n'
    )
    (query,) = load_config(path).synopsis.queries
    assert query["name"] == "afternoons" and query["scope"] == {"hours": [14, 17]}
    with pytest.raises(ConfigError, match=r"synopsis\.features, too"):
        RunConfig(synopsis={"queries": [{"name": "a", "query": "count"}]})
    with pytest.raises(ConfigError, match=r"queries\.name: got 'a', expected a name for each"):
        RunConfig(synopsis={"features": ["temp"], "queries": [{"name": "a"}, {"name": "a"}]})


def test_a_run_without_points_reports_nothing(tmp_path: Path) -> None:
    path = tmp_path / "points.parquet"
    broken = TABLE.slice(0, 50).set_column(0, "lon", pa.array([None] * 50, pa.float64()))
    pq.write_table(broken, path)
    settings = config(tmp_path, path)
    run(settings)
    assert not results(settings, "all")


def test_a_value_that_appears_or_vanishes_has_left_its_bounds() -> None:
    none, one = SynopsisResult(None, None, None, 0), SynopsisResult(1.0, 0.5, 1.5, 3)
    reported = {id(r): [[None, r.value, r.low, r.high]] for r in (none, one)}
    assert _has_left([(None, none)], reported[id(one)])
    assert _has_left([(None, one)], reported[id(none)])
    assert not _has_left([(None, none)], reported[id(none)])
    assert not _has_left([(None, one)], reported[id(one)])
