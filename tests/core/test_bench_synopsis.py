"""The parts of ``roost bench synopsis`` that decide what is compared, on a small table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from roost.bench import run_bench
from roost.bench import synopsis as synopsis_bench
from roost.bench.common import Measured
from roost.bench.synopsis import DENSE, _Results, breaks, check_bounds
from roost.bench.synopsis_cases import FEATURES, HOUR_US, Draw, Oracle, RandomQuery, Weather, served
from roost.bench.synopsis_models import _tested, measure_promises
from roost.bench.synopsis_scaling import divide_weather, measure_scaling, spread_of
from roost.bench.synopsis_speed import lookups, opened, rollup_sql, set_queries
from roost.errors import ConfigError
from roost.synopsis import Scope, SetSpec, SynopsisResult, SynopsisSpec, build

HOURS, START = 24 * 30, 1_704_067_200_000_000
SITES = np.array([[-48.0, -22.0], [-47.0, -10.0], [-38.5, -3.7]])


@pytest.fixture(scope="module")
def weather() -> Weather:
    rng = np.random.default_rng(4)
    times = np.repeat(START + np.arange(HOURS) * HOUR_US, len(SITES))
    columns = {"event_time": pa.array(times, pa.timestamp("us", "UTC"))}
    for k, name in enumerate(("lon", "lat")):
        columns[name] = pa.array(np.tile(SITES[:, k], HOURS))
    for name in FEATURES:
        values = np.round(rng.normal(20.0, 5.0, times.size), 1)
        columns[name] = pa.array(values, pa.float32(), mask=rng.random(times.size) < 0.1)
    return Weather(pa.table(columns), SITES, ())


@pytest.fixture(scope="module")
def spec(weather: Weather) -> SynopsisSpec:
    sites = SetSpec.of(weather.table.schema, ["lon", "lat"], period_days=30)
    return SynopsisSpec.of(weather.table.schema, FEATURES, sets=(sites,), **DENSE)


def test_the_reader_has_the_synopsis_and_the_oracles_agree(
    weather: Weather, spec: SynopsisSpec
) -> None:
    synopsis = build(weather.table, spec)
    with served(synopsis) as reader, opened(weather, synopsis) as oracle:
        random = Draw(weather, 3)
        drawn = [random.any() for _ in range(40)]
        truths = [oracle.value(query.sql, query.scope) for query in drawn]
        results = [query.run_on(reader) for query in drawn]
        for query, result in zip(drawn, results, strict=True):
            own = query.run(synopsis)
            assert (result.value, result.low, result.high) == (own.value, own.low, own.high)
        assert check_bounds(drawn, results, truths)[0] == 0
        # Whole buckets of the rollup have the rows of the range.
        bucket = spec.layout.bucket_us
        since = (START // bucket + 1) * bucket
        scope = Scope(since=since, until=since + bucket, hours=(6, 12))
        query = RandomQuery("correlation", ("temp_c", "precip_mm"), scope)
        sql = rollup_sql(query, synopsis.spec)
        ((found,),) = oracle.connection.execute(sql).fetchall()
        assert found == pytest.approx(oracle.value(query.sql, scope), abs=1e-9)
        # No result is left unfinished, which would block the next one.
        assert oracle.connection.sql("select count(*) from weather").to_arrow_table().num_rows == 1
        for name, given in (*lookups("temp_c", scope), *set_queries(SITES[0].tolist(), scope)):
            reader.query(name, **given)


def test_a_bound_that_does_not_hold_is_counted(weather: Weather) -> None:
    result = SynopsisResult(2.0, 1.0, 3.0, 1)
    assert not breaks(result, 3.0) and breaks(result, 3.1) and not breaks(result, None)
    with duckdb.connect() as connection:
        assert Oracle(weather, connection).value("count(*)", Scope()) == HOURS * len(SITES)


def test_probable_bounds_hold_as_often_as_they_claim(weather: Weather, spec: SynopsisSpec) -> None:
    """Of each kind, against the rows; a bound that claims too much is noticed."""
    synopsis = build(weather.table, spec)
    with served(synopsis) as reader, opened(weather, synopsis) as oracle:
        summary, more, _ = measure_promises(reader, weather, oracle, 5, True)
    kinds = {row["kind"]: row for row in more["promises"]}
    assert set(kinds) == {"contains", "cardinality", "frequency", "coefficient", "prediction"}
    assert summary == {"promises_broken": 0}
    assert all(row["results"] >= 30 and row["claimed"] > 0.9 for row in kinds.values())
    assert _tested("any", [(0.95, number % 5 > 0) for number in range(100)])["broken"] == 1
    assert _tested("any", [(0.95, number % 20 > 0) for number in range(100)])["broken"] == 0


def test_one_experiment_adds_to_the_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(quick: bool, only: Sequence[str]) -> Measured:
        more = {"seconds": dict.fromkeys(only, 1.0), only[0]: [2]}
        return Measured([{"row": 1}] if "bounds" in only else [], {only[0]: 3}, {}, more=more)

    monkeypatch.setattr(synopsis_bench, "run", measure)
    path = tmp_path / "found.json"
    for name in ("bounds", "sizes"):
        assert run_bench("synopsis", quick=True, json_path=path, only=[name]) == 0
    found = json.loads(path.read_text())
    assert found["summary"] == {"bounds": 3, "sizes": 3} and found["rows"] == [{"row": 1}]
    assert found["bounds"] == found["sizes"] == [2]
    assert found["seconds"] == {"bounds": 1.0, "sizes": 1.0}
    with pytest.raises(ConfigError, match=r"--only: got 'size'.*sizes, speed"):
        run_bench("synopsis", quick=True, json_path=path, only=["size"])


def test_an_experiment_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    results = _Results()

    def fail() -> None:
        raise ValueError("no disk")

    results.add("one", fail)
    results.add("two", lambda: ({"key": 1.0}, {"table": []}, {}))
    assert results.failed == ["one: ValueError: no disk"] and results.summary == {"key": 1.0}
    assert set(results.more["seconds"]) == {"one", "two"}
    assert "no disk" in capsys.readouterr().err


def test_sketchlets_have_all_rows(weather: Weather, spec: SynopsisSpec) -> None:
    rows, _ = divide_weather(weather.table, spec, build(weather.table, spec).bins)
    for spread in spread_of(rows):
        own = [row for row in rows if row["division"] == spread["division"]]
        assert sum(row["rows"] for row in own) == weather.table.num_rows
        assert spread["rows_per_hour_max"] >= spread["rows_per_hour_mean"] > 0.0


def test_scaling_uses_one_rule_at_a_time() -> None:
    summary, rows, plots = measure_scaling()
    assert 0 < summary["batches_to_stable"] < 20
    assert [row["case"] for row in rows] == ["backlog", "memory", "varying rate"]
    assert rows[2]["machines_max"] > 2 and rows[2]["scale_ins"] > 0
    assert set(plots) == {"-scaling"}
