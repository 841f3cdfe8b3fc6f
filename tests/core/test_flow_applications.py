"""The applications of dataflows, compared with brute force and with DuckDB.

The oracles are written from the text of the queries: windows ``[k * advance, k * advance + size)``,
pairs of two different calls, each once.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import Dataflow, RunConfig
from roost.dataflow.operators import Source
from roost.stages.sources import parse_generator
from roost.storage.cache import WorkerCache
from roost.testing import InProcessPipeline
from roost.testing.oracle import haversine

ROOT = Path(__file__).resolve().parents[2]
SECOND = 1_000_000  # event times are microseconds
MINUTE, HOUR = 60 * SECOND, 3_600 * SECOND
COLUMNS = ["src", "dst", "start", "end", "district", "lat", "lon"]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def integers(table: pa.Table) -> pa.Table:
    """Return a table with times as integers."""
    times = [pa.types.is_timestamp(field.type) for field in table.schema]
    types = [
        pa.int64() if is_time else f.type for is_time, f in zip(times, table.schema, strict=True)
    ]
    return table.cast(pa.schema(list(zip(table.column_names, types, strict=True))))


def generated(path: str, columns: list[str] = COLUMNS) -> pa.Table:
    source = parse_generator(path, lambda: 0.0)
    rows = source.total()
    assert rows is not None
    return integers(source.again(0, rows)[0].read(columns, WorkerCache()))


def run(
    name: str, path: str, out: Path, batch_rows: int, machines: int, lateness: float = 0.0
) -> pa.Table:
    """Run an example over generated calls in this process; returns the rows of its only sink."""
    flow = load(name).flow
    operators = [
        replace(operator, path=path) if isinstance(operator, Source) else operator
        for operator in flow.operators
    ]
    config = RunConfig(
        out={"dir": out},
        engine={"batch_rows": batch_rows},
        dataflow={"machines": machines, "lateness": lateness},
    )
    with InProcessPipeline(config, flow=Dataflow(flow.name, operators)) as pipeline:
        pipeline.run()
    assert not (out / "dead").exists() or not list((out / "dead").glob("*.parquet"))
    return integers(pq.read_table(out / flow.operators[-1].name))


def means(table: pa.Table, key: str) -> dict[tuple[int, Any], tuple[int, float]]:
    """Return number of calls and mean duration by window and key; each once."""
    rows = {(r["start"], r[key]): (r["calls"], r["mean"]) for r in table.to_pylist()}
    assert len(rows) == table.num_rows
    return rows


def windowed(calls: pa.Table, key: str, size: int, advance: int) -> dict[Any, tuple[int, float]]:
    """Compute the same by brute force: each call is added to all its windows."""
    groups: dict[tuple[int, Any], list[float]] = {}
    for call in calls.to_pylist():
        begin = call["start"] // advance * advance
        while begin > call["start"] - size:
            seconds = (call["end"] - call["start"]) / SECOND
            groups.setdefault((begin, call[key]), []).append(seconds)
            begin -= advance
    return {place: (len(found), math.fsum(found) / len(found)) for place, found in groups.items()}


def windowed_sql(
    calls: pa.Table, key: str, size: int, advance: int
) -> dict[Any, tuple[int, float]]:
    """Compute the same with DuckDB: calls joined with all windows."""
    query = f"""
        with windows as (
            select unnest(range((select min(start) // {advance} * {advance} - {size} from calls),
                (select max(start) + 1 from calls), {advance})) as begin)
        select begin, {key}, count(*), avg(("end" - start) / {SECOND}.0)
        from windows join calls on start >= begin and start < begin + {size}
        group by all"""
    rows = connected(calls=calls).execute(query).fetchall()
    return {(begin, value): (count, mean) for begin, value, count, mean in rows}


def connected(**tables: pa.Table) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for name, table in tables.items():
        connection.register(name, table)
    return connection


def assert_equal_means(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for place, (count, mean) in expected.items():
        assert found[place] == (count, pytest.approx(mean, rel=1e-9)), place


# (path, batch_rows, machines, lateness): in order, out of order, whole seconds, a single batch
STREAMS = {
    "in order": ("rows=1500,rate=0.4,seed=3,callers=40,districts=5", 400, 3, 0.0),
    "out of order": (
        "rows=1200,rate=0.5,seed=4,callers=25,districts=7,disorder=300",
        170,
        2,
        300.0,
    ),
    "whole seconds": ("rows=900,rate=1,seed=5,callers=30,districts=3,skew=uniform", 250, 1, 0.0),
    "one batch": ("rows=700,rate=7,seed=6,callers=3,districts=2,skew=zipf:1.3", 10_000, 4, 0.0),
}
Streams = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
Oracles = pytest.mark.parametrize("oracle", [windowed, windowed_sql], ids=["brute force", "duckdb"])


@Streams
@Oracles
def test_heavy_customers(stream: Any, oracle: Callable[..., Any], tmp_path: Path) -> None:
    options, *rest = stream
    path = f"generate:calls,{options}"
    found = means(run("heavy_customers", path, tmp_path, *rest), "src")
    everyone = oracle(generated(path), "src", HOUR, MINUTE)
    expected = {place: row for place, row in everyone.items() if row[1] > 300}
    if "callers=3," not in options:
        assert 0 < len(expected) < len(everyone)
    assert_equal_means(found, expected)


@Streams
@Oracles
def test_calls_by_district(stream: Any, oracle: Callable[..., Any], tmp_path: Path) -> None:
    options, *rest = stream
    path = f"generate:calls,{options}"
    found = means(run("calls_by_district", path, tmp_path, *rest), "district")
    assert_equal_means(found, oracle(generated(path), "district", MINUTE, 10 * SECOND))


def within_a_minute(calls: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """Pair all calls by brute force: caller, earlier and later start, and the distance."""
    found: Counter[tuple[Any, ...]] = Counter()
    for number, one in enumerate(calls):
        for other in calls[:number]:
            if one["src"] == other["src"] and abs(one["start"] - other["start"]) <= 60 * SECOND:
                metres = haversine(one["lon"], one["lat"], other["lon"], other["lat"])
                times = sorted([one["start"], other["start"]])
                found[one["src"], *times, round(metres, 3)] += 1
    return found


PAIRS = {
    **STREAMS,
    # Most calls end exactly when another one starts.
    "capped": ("rows=500,rate=1,seed=9,callers=20,duration=300,longest=50", 130, 2, 0.0),
    "same ticks": ("rows=600,rate=5e6,seed=7,callers=40,districts=9", 150, 2, 0.0),
    "long calls": (
        "rows=600,rate=1,seed=8,callers=20,duration=300,longest=50,disorder=9",
        90,
        3,
        9.0,
    ),
}


@pytest.mark.parametrize("stream", PAIRS.values(), ids=PAIRS)
def test_two_calls_of_one_caller(stream: Any, tmp_path: Path) -> None:
    options, *rest = stream
    path = f"generate:calls,{options}"
    rows = run("two_calls", path, tmp_path, *rest).to_pylist()
    calls = generated(path)
    expected = within_a_minute(calls.to_pylist())
    found = Counter((r["src"], r["first"], r["second"], round(r["metres"], 3)) for r in rows)
    assert found == expected and found
    assert all(r["start"] == r["second"] for r in rows)  # the later of the two event times
    assert all(r["seconds"] == (r["second"] - r["first"]) / SECOND for r in rows)
    query = f"""
        select a.src, least(a.start, b.start), greatest(a.start, b.start), count(*)
        from numbered a join numbered b on a.src = b.src and a.row < b.row
            and abs(a.start - b.start) <= {60 * SECOND}
        group by all"""
    numbered = calls.append_column("row", pa.array(range(calls.num_rows)))
    by_sql = {tuple(r[:3]): r[3] for r in connected(numbered=numbered).execute(query).fetchall()}
    assert Counter((r["src"], r["first"], r["second"]) for r in rows) == by_sql


def test_the_minute_of_two_calls_includes_its_end(tmp_path: Path) -> None:
    path = "generate:calls,rows=300,rate=1,seed=1,callers=2"
    rows = run("two_calls", path, tmp_path, 100, 2).to_pylist()
    assert max(r["seconds"] for r in rows) == 60.0
    starts = [r["start"] for r in generated(path).to_pylist()]
    assert starts[60] - starts[0] == 60 * SECOND


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["start"] < other["start"] < one["end"] or other["start"] < one["start"] < other["end"]
    )


def call_of(row: dict[str, Any], prefix: str = "") -> tuple[Any, ...]:
    return tuple(row[prefix + name] for name in ("start", "src", "dst", "end"))


@pytest.mark.parametrize("stream", ["capped", "same ticks", "long calls"])
def test_overlapping_calls(stream: str, tmp_path: Path) -> None:
    options, *rest = PAIRS[stream]
    path = f"generate:calls,{options}" + ("" if "longest" in options else ",longest=600")
    rows = run("overlapping_calls", path, tmp_path, *rest).to_pylist()
    found = Counter((call_of(r, "left_"), call_of(r, "right_")) for r in rows)
    table = generated(path)
    calls = table.to_pylist()
    expected: Counter[Any] = Counter()
    for number, one in enumerate(calls):
        for other in calls[:number]:
            common = {one["src"], one["dst"]} & {other["src"], other["dst"]}
            if common and overlap(one, other):
                first, second = sorted([call_of(one), call_of(other)])
                expected[first, second] += 1
    assert found == expected and found
    assert all(r["start"] == r["right_start"] for r in rows)
    query = """
        select count(*) from numbered a join numbered b on a.row < b.row
            and (a.src in (b.src, b.dst) or a.dst in (b.src, b.dst))
            and (a.start < b.start and b.start < a.end or b.start < a.start and a.start < b.end)"""
    numbered = table.append_column("row", pa.array(range(table.num_rows)))
    assert connected(numbered=numbered).execute(query).fetchone() == (len(rows),)


@pytest.mark.parametrize(
    ("rows", "batch_rows", "machines"), [(20_000, 7_000, 3), (6_000, 6_000, 1)]
)
def test_busiest_geofences(rows: int, batch_rows: int, machines: int, tmp_path: Path) -> None:
    example = load("busiest_geofences")
    sample = pq.read_table(ROOT / "src" / "roost" / "data" / "sample_points.parquet").slice(0, rows)
    pq.write_table(sample, tmp_path / "points.parquet")
    config = RunConfig(
        points={"path": tmp_path / "points.parquet"},
        out={"dir": tmp_path / "out"},
        engine={"batch_rows": batch_rows},
        dataflow={"machines": machines},
    )
    with InProcessPipeline(config, flow=example.flow) as pipeline:
        pipeline.request(*example.GEOFENCES)
        pipeline.run()
    table = integers(pq.read_table(tmp_path / "out" / "busiest_geofences"))
    found = {(r["event_time"], r["rank"]): (r["query_id"], r["matches"]) for r in table.to_pylist()}
    assert len(found) == table.num_rows

    hours: dict[int, Counter[str]] = {}
    points = integers(sample)
    for point in points.to_pylist():
        for fence in example.GEOFENCES:
            box, lon, lat = fence.shape, point["lon"], point["lat"]
            if box.x0 <= lon <= box.x1 and box.y0 <= lat <= box.y1:
                hour = point["event_time"] // HOUR * HOUR
                hours.setdefault(hour, Counter())[fence.query_id] += 1
    expected = {}
    for hour, counts in hours.items():
        busiest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
        expected |= {(hour, rank): item for rank, item in enumerate(busiest, 1)}
    assert found == expected

    fences = pa.table(
        {"query_id": [q.query_id for q in example.GEOFENCES]}
        | {
            name: [getattr(q.shape, name) for q in example.GEOFENCES]
            for name in ("x0", "y0", "x1", "y1")
        }
    )
    query = f"""
        with counts as (
            select event_time // {HOUR} * {HOUR} as hour, query_id, count(*) as matches
            from points join fences on lon between x0 and x1 and lat between y0 and y1 group by all)
        select hour, row_number() over (partition by hour order by matches desc, query_id) as rank,
            query_id, matches from counts qualify rank <= 3"""
    ranked = connected(points=points, fences=fences).execute(query).fetchall()
    assert found == {(hour, rank): (name, matches) for hour, rank, name, matches in ranked}
