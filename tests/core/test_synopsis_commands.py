"""Synopsis queries from Python, JSON and the command line."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from roost import Circle, RunConfig
from roost.cli import main
from roost.errors import ConfigError
from roost.synopsis import (
    BoundKind,
    Scope,
    SynopsisResult,
    build,
    contrast,
    learn_bins,
    mean,
    outliers,
)
from roost.synopsis.queries import read_query, result_json, run_query
from roost.synopsis.spec import SynopsisSpec
from roost.testing import InProcessPipeline
from synopsis_tables import FEATURES, START_US, Rows, make_table

TABLE = make_table(5, 1_500)
SPEC = SynopsisSpec.of(TABLE.schema, FEATURES, bins=16)
WHOLE = build(TABLE, SPEC, learn_bins(TABLE, SPEC))
EAST = Scope(Circle(11.0, 49.0, 50_000.0))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    pq.write_table(TABLE, folder / "points.parquet")
    config = RunConfig(
        points={"path": str(folder / "points.parquet")},
        engine={"available_now": True, "batch_rows": 300},
        synopsis={"features": FEATURES, "learn_rows": 600},
        out={"dir": folder / "out", "sink": "count"},
    )
    with InProcessPipeline(config) as pipeline:
        pipeline.run()
        assert pipeline.synopsis.query("count").result.value == TABLE.num_rows
    return config.out.state_dir


def roost(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_query_in_json_equals_the_one_in_python() -> None:
    data: dict[str, Any] = {
        "query": "mean",
        "feature": "temp",
        "scope": {
            "circle": [11.0, 49.0, 50_000],
            "since": "2024-01-05",
            "hours": [6, 18],
            "predicate": "wind > 2",
        },
    }
    since = dt.datetime(2024, 1, 5, tzinfo=dt.UTC)
    scope = Scope(EAST.shape, since, hours=(6, 18), predicate="wind > 2")
    found = run_query(WHOLE, *read_query(data))
    assert found == mean(WHOLE, "temp", scope) and found.value is not None
    text = json.dumps(result_json(found))
    assert json.loads(text)["kind"] == BoundKind.GUARANTEED.value


@pytest.mark.parametrize(
    ("data", "name", "expected"),
    [
        ({"query": "quantiles", "feature": "temp", "ranks": "0.1, 0.9"}, "ranks", [0.1, 0.9]),
        ({"query": "quantiles", "feature": "temp", "ranks": 0.5}, "ranks", [0.5]),
        ({"query": "regress", "target": "temp", "features": "wind, rain"}, "features",
         ["wind", "rain"]),
        ({"query": "forecast", "feature": "temp", "at": "2024-01-20T06:00Z"}, "at",
         dt.datetime(2024, 1, 20, 6, tzinfo=dt.UTC)),
    ],
)  # fmt: skip
def test_times_and_lists_may_be_texts(data: dict[str, Any], name: str, expected: Any) -> None:
    query, arguments = read_query(data)
    assert arguments[name] == expected
    run_query(WHOLE, query, arguments)


def test_contrasts_and_outliers_are_json(state: Path) -> None:
    name, arguments = read_query(
        {
            "query": "contrast",
            "statistic": "mean",
            "feature": "temp",
            "scope": {"circle": [11.0, 49.0, 50_000]},
            "other": {"since": START_US + 86_400_000_000},
        }
    )
    found = run_query(WHOLE, name, arguments)
    other = Scope(since=START_US + 86_400_000_000)
    assert found.value == mean(WHOLE, "temp", EAST).minus(mean(WHOLE, "temp", other)).value
    expected = outliers(WHOLE, "wind", 0.1)
    assert expected is not None
    data = result_json(run_query(WHOLE, "outliers", {"feature": "wind", "share": 0.1}))
    assert data["count"]["value"] == expected.count.value
    assert contrast.__name__ == name


def test_a_regression_is_json() -> None:
    query = {"query": "regress", "target": "temp", "features": "wind"}
    found = run_query(WHOLE, *read_query(query))
    data = json.loads(json.dumps(result_json(found)))
    slope = found.coefficients["wind"]
    assert data["coefficients"]["wind"]["low"] == slope.low
    assert data["r2"] == found.r2 and not [name for name in data if name[0] == "_"]


def test_a_contrast_has_the_confidence_of_both_results() -> None:
    until = START_US + 20 * 86_400_000_000
    own = {"feature": "temp", "at": "2024-01-21"}
    scopes = {"scope": {"until": until}, "other": {"until": until - 86_400_000_000}}
    contrast_json = {"query": "contrast", "statistic": "forecast", **own, **scopes}
    found = run_query(WHOLE, *read_query(contrast_json))
    one, two = (
        run_query(WHOLE, *read_query({"query": "forecast", **own, "scope": scope}))
        for scope in scopes.values()
    )
    assert found.value == one.value - two.value
    assert found.low == one.low - two.high and found.high == one.high - two.low
    assert found.kind is BoundKind.PROBABLE
    assert found.confidence == pytest.approx(one.confidence + two.confidence - 1.0)
    assert one.minus(SynopsisResult(1.0, 1.0, 1.0, 1)).confidence == one.confidence


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"feature": "temp"}, "query: got None"),
        ({"query": "men"}, "query: got 'men', expected 'mean'"),
        ({"query": "mean"}, "mean: feature: got None, expected a value"),
        ({"query": "mean", "feature": "t"}, "feature: got 't', expected one of temp"),
        ({"query": "count", "depth": 2}, "count: depth: got 2, expected one of scope"),
        ({"query": "count", "scope": 5}, "scope: got 5, expected an object"),
        ({"query": "count", "scope": {"circle": [1, 2]}}, "scope.circle: got [1, 2], expected 3"),
        ({"query": "count", "scope": {"ring": 2}}, "scope.ring: got 2, expected one of box"),
        (
            {"query": "count", "scope": {"since": "soon"}},
            "scope.since: got 'soon', expected an ISO",
        ),
        ({"query": "count", "scope": {"hours": [1.5, 3]}}, "hours: got (1.5, 3), expected whole"),
        ({"query": "quantiles", "feature": "temp", "ranks": "x"}, "quantiles: ranks: got 'x'"),
        ({"query": "quantiles", "feature": "temp", "ranks": [0.5, "x"]}, "a list of numbers"),
        ({"query": "density", "feature": "temp", "points": 1, "bandwidth": "x"}, "bandwidth: got"),
        ({"query": "outliers", "feature": "temp", "share": "x"}, "share: got 'x', expected a num"),
        ({"query": "regress", "target": "temp", "features": 5}, "features: got 5, expected a list"),
        ({"query": "forecast", "feature": "temp", "at": "soon"}, "at: got 'soon', expected an ISO"),
        ({"query": "synthesize", "seed": 0.5}, "seed: got 0.5, expected a whole number"),
        ({"query": "contains", "values": "x"}, "values: got 'x', expected values by column"),
        (
            {"query": "count", "scope": {"box": [0, 0, 1, 1], "polygon": "x"}},
            "scope: got ['box', 'polygon'], expected one shape",
        ),
        ({"query": "contrast", "scope": {}, "other": {}}, "statistic: got '', expected one of"),
        (
            {"query": "contrast", "statistic": "select", "scope": {}, "other": {}},
            "statistic: got 'select', expected one of count, mean, stddev, correlation",
        ),
        ({"query": "count", "scope": {"predicate": 5}}, "scope.predicate: got 5, expected a text"),
        ({"query": "count", "scope": {"since": True}}, "scope.since: got True, expected an ISO"),
        (
            {"query": "density", "feature": "temp", "points": "1,nan", "bandwidth": 1},
            "points: got nan, expected finite numbers",
        ),
        (
            {"query": "contrast", "statistic": "mean", "scope": {}, "other": {}},
            "mean: feature: got None",
        ),
    ],
)
def test_wrong_queries_name_what_is_wrong(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_query(WHOLE, *read_query(data))
    assert message in str(raised.value)


def test_the_command_line_queries_a_state(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Rows(TABLE)
    scope = Scope(Circle(11.0, 49.0, 50_000.0), hours=(6, 18))
    expected = float(rows.inside(scope).sum())
    flags = ("--circle", "11,49,50000", "--hours", "6,18")
    code, out, _ = roost(capsys, "synopsis", state, "count", *flags, "--json")
    found = json.loads(out)
    assert code == 0 and found["batch"] == 4
    assert found["result"]["low"] <= expected <= found["result"]["high"]
    code, out, _ = roost(capsys, "synopsis", state, "quantiles", "feature=temp", "ranks=[0.1,0.9]")
    assert code == 0 and "guaranteed" in out and "as of batch 4" in out
    query = json.dumps({"query": "count", "scope": {"hours": [6, 18]}})
    code, out, _ = roost(capsys, "synopsis", state, query, "--json")
    assert json.loads(out)["result"]["value"] > expected
    code, out, _ = roost(capsys, "synopsis", state, "count", "--until", "2023-01-01", "--explain")
    assert code == 0 and "0 read" in out and "pruned" in out
    code, out, _ = roost(capsys, "inspect", state)
    assert f"synopsis   {TABLE.num_rows:,} points" in out


def test_the_command_line_prints_results_of_several_values(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # in narrow tables names are cut
    code, out, _ = roost(capsys, "synopsis", state, "regress", "target=temp", "features=wind,level")
    lines = out.splitlines()
    assert code == 0 and "target temp, r2 0." in lines[-1] and lines[-1].endswith("as of batch 4")
    assert all(any(name in line for line in lines) for name in ("intercept", "coefficients.level"))
    code, out, _ = roost(capsys, "synopsis", state, "outliers", "feature=temp", "share=0.1")
    assert code == 0 and "count" in out and out.splitlines()[-1].startswith("low ")
    code, out, _ = roost(
        capsys, "synopsis", state, "outliers", "feature=temp", "share=0.1", "--until", "2020-01-01"
    )
    assert (code, out) == (0, "no result as of batch 4\n")


def test_wrong_commands_name_what_is_wrong(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = roost(capsys, "synopsis", state, "mean", "feature")
    assert code == 2 and "NAME=VALUE" in err
    code, _, err = roost(capsys, "synopsis", state, "mean", "feature=temp", "--circle", "1,2")
    assert code == 2 and "--circle" in err
    code, _, err = roost(capsys, "synopsis", state, "{bad", "--hours", "1,2")
    assert code == 2 and "JSON object" in err
    code, _, err = roost(capsys, "synopsis", state, "mean", "feture=temp", "--explain")
    assert code == 2 and "mean: feture" in err
    missing = tmp_path / "missing" / "map.png"
    code, _, err = roost(
        capsys, "synopsis", state, "map", "feature=temp", "bits=4", "--out", missing
    )
    assert code == 2 and "--out" in err and "a file that can be written" in err
    code, _, err = roost(capsys, "synopsis", tmp_path, "count")
    assert code != 0 and "not a state directory" in err


def test_the_command_line_draws_pictures(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("synopsis", state, "map", "feature=temp", "bits=8")
    out = tmp_path / "map.png"
    code, _, _ = roost(capsys, *words, "--out", out)
    assert code == 0 and out.read_bytes().startswith(b"\x89PNG")
    code, printed, _ = roost(capsys, *words, "--json")
    assert code == 0 and json.loads(printed)["result"]["cells"]
    code, _, err = roost(capsys, *words)
    assert code == 2 and "--out: got None, expected a .png file" in err
    code, _, err = roost(capsys, "synopsis", state, "count", "--out", out)
    assert code == 2 and "the queries chart, map, select and synthesize only" in err


def test_parts_and_synthetic_rows_are_queries(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = ("--circle", "11,49,50000", "--hours", "6,18")
    inside = Rows(TABLE).inside(Scope(EAST.shape, hours=(6, 18))).sum()
    out = tmp_path / "part.parquet"
    assert roost(capsys, "synopsis", state, "select", *scope, "--out", out)[0] == 0
    records = pq.read_table(out)
    assert sum(records["rows_sure"].to_pylist()) <= inside <= sum(records["rows"].to_pylist())
    words = ("synopsis", state, "synthesize", "share=2", "seed=4", *scope)
    code, printed, _ = roost(capsys, *words, "--json")
    drawn = json.loads(printed)["result"]
    assert code == 0 and abs(len(drawn) - 2 * inside) < 0.2 * inside
    times = [dt.datetime.fromisoformat(row["event_time"]) for row in drawn]
    assert all(6 <= time.hour < 18 for time in times) and times == sorted(times)
    code, _, err = roost(capsys, *words)
    assert code == 2 and "--out: got None, expected a .parquet file" in err
