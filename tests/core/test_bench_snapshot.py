"""Window, queries and metrics of the snapshot benchmark; DuckDB's results against brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost import bench
from roost.bench import snapshot
from roost.bench.cases import Pickups
from roost.bench.common import UnequalResults
from roost.bench.snapshot import Contender
from roost.cli import build_parser
from roost.model.records import Box, Circle
from roost.model.space import haversine_m
from roost.window.snapshot import SnapshotQuery

BOUNDS = (-74.3, 40.5, -73.5, 41.0)


def pickups(count: int = 900) -> Pickups:
    rng = np.random.default_rng(11)
    times = np.sort(rng.integers(0, 10**12, count))
    stamps = pa.chunked_array([pa.array(times, pa.timestamp("us", tz="UTC"))])
    # Few digits, so that points share places and lie on the borders of boxes.
    lon, lat = rng.normal(-73.95, 0.05, count).round(3), rng.normal(40.75, 0.05, count).round(3)
    return Pickups(stamps, lon, lat, "test")


def brute(points: pa.Table, query: SnapshotQuery) -> np.ndarray:
    """Return identifiers in a box, or the smallest distances to a place."""
    lon, lat = points["lon"].to_numpy(), points["lat"].to_numpy()
    shape = query.shape
    if isinstance(shape, Circle):
        return np.sort(haversine_m(shape.cx, shape.cy, lon, lat))[: query.nearest]
    assert isinstance(shape, Box)
    inside = (lon >= shape.x0) & (lon <= shape.x1) & (lat >= shape.y0) & (lat <= shape.y1)
    return points["id"].to_numpy()[inside]


@pytest.mark.parametrize("count", [1, 300, 900, 901, 2_500])
def test_points_are_thinned_out_or_repeated_in_event_order(count: int) -> None:
    source = pickups()
    points = snapshot.windowed_points(source, count)
    assert points.num_rows == count
    assert points["id"].to_pylist() == list(range(count))
    times = points["event_time"].cast(pa.int64()).to_numpy()
    assert np.all(np.diff(times) >= 0)
    known = set(zip(source.lon.tolist(), source.lat.tolist(), strict=True))
    places = list(zip(points["lon"].to_pylist(), points["lat"].to_pylist(), strict=True))
    assert set(places) <= known
    if count > 900:
        assert places[900:] == places[: count - 900]
        assert times[900] > times[899]


def test_both_layouts_hold_each_batch_in_a_file_of_its_own(tmp_path: Path) -> None:
    points = snapshot.windowed_points(pickups(), 900)
    layouts = snapshot.write_layouts(points, 400, tmp_path / "parquet")
    assert set(layouts) == {"plain", "sorted"}
    for name, folder in layouts.items():
        batches = [pq.read_table(path) for path in sorted(folder.iterdir())]
        assert [batch.num_rows for batch in batches] == [400, 400, 100]
        for number, batch in enumerate(batches):
            if name == "sorted":
                lon = batch["lon"].to_numpy()
                assert np.all(np.diff(lon) >= 0)
                batch = batch.sort_by("id")
            assert batch.equals(points.slice(number * 400, 400))
    first = min(layouts["sorted"].iterdir())
    assert pq.read_metadata(first).row_group(0).column(2).statistics.has_min_max


@pytest.mark.parametrize("seed", range(3))
def test_queries_cover_their_share_of_the_space_around_points(seed: int) -> None:
    points = snapshot.windowed_points(pickups(), 900)
    drawn = snapshot.draw_queries(points, BOUNDS, 20, np.random.default_rng(seed))
    assert drawn == snapshot.draw_queries(points, BOUNDS, 20, np.random.default_rng(seed))
    places = np.column_stack([points["lon"].to_numpy(), points["lat"].to_numpy()])
    whole = (BOUNDS[2] - BOUNDS[0]) * (BOUNDS[3] - BOUNDS[1])
    for name, queries in drawn.items():
        assert len(queries) == 20
        for query in queries:
            shape = query.shape
            if isinstance(shape, Circle):
                assert name == snapshot.NEAREST and query.nearest == 10
                assert math.isinf(shape.radius)
                centre = np.array([shape.cx, shape.cy])
            else:
                assert isinstance(shape, Box)
                area = (shape.x1 - shape.x0) * (shape.y1 - shape.y0)
                assert area / whole == pytest.approx(snapshot.SHARES[name])
                centre = np.array([shape.x0 + shape.x1, shape.y0 + shape.y1]) / 2
            assert np.abs(places - centre).max(axis=1).min() < 1e-9
    assert set(snapshot.SMALL) < set(drawn)


@pytest.mark.parametrize("layout", ["plain", "sorted"])
def test_duckdb_returns_what_brute_force_does(tmp_path: Path, layout: str) -> None:
    points = snapshot.windowed_points(pickups(), 900)
    folder = snapshot.write_layouts(points, 400, tmp_path / "parquet")[layout]
    drawn = snapshot.draw_queries(points, BOUNDS, 10, np.random.default_rng(4))
    # A box with points on all four borders.
    drawn["on borders"] = [SnapshotQuery(Box(-73.951, 40.748, -73.9, 40.8))]
    found = 0
    with snapshot.open_duckdb() as connection:
        contender = snapshot.duckdb_contender(connection, layout, folder)
        assert contender.name == f"duckdb_{layout}"
        for query in [one for queries in drawn.values() for one in queries]:
            result, expected = contender.query(query), brute(points, query)
            found += result.num_rows
            if query.nearest is None:
                assert sorted(result["id"].to_pylist()) == expected.tolist()
            else:
                distances = result["distance"].to_numpy()
                assert np.all(np.diff(distances) >= 0)
                assert np.allclose(distances, expected, rtol=0, atol=1e-6)
    assert found > 1_000


def returning(name: str, table: pa.Table) -> Contender:
    return Contender(name, lambda query: table)


def ids(*values: int) -> pa.Table:
    return pa.table({"id": pa.array(values, pa.int64())})


def test_times_become_percentiles_and_tidying_is_not_timed() -> None:
    now, tidied = [0.0], []

    def delayed(name: str, seconds: float) -> Contender:
        count = [0]

        def result(query: SnapshotQuery) -> pa.Table:
            count[0] += 1
            now[0] += seconds * count[0]
            return ids(3, 1) if count[0] == 1 else ids(*range(4))

        def tidy() -> None:
            now[0] += 100.0
            tidied.append(name)

        return Contender(name, result, tidy)

    contenders = [delayed("a", 1.0), delayed("b", 0.01)]
    queries = {"case": [SnapshotQuery(Box(0, 0, 1, 1))] * 5}
    rows = snapshot.measure(contenders, queries, np.random.default_rng(1), lambda: now[0])
    assert [(row["case"], row["contender"]) for row in rows] == [("case", "a"), ("case", "b")]
    for row, scale in zip(rows, (1_000.0, 10.0), strict=True):
        assert row["p50_ms"] == pytest.approx(3 * scale)
        assert row["p95_ms"] == pytest.approx(4.8 * scale)  # between the 4th and 5th of 5
        assert row["rows"] == pytest.approx((2 + 4 * 4) / 5)
        assert row["questions"] == 5
    assert sorted(tidied) == ["a"] * 5 + ["b"] * 5
    assert set(tidied[::2]) == {"a", "b"}, "no contender is always the first"


def test_different_results_end_the_benchmark() -> None:
    assert snapshot.check_same("q", {"a": ids(1, 2), "b": ids(2, 1)}) == 2
    assert snapshot.check_same("q", {"a": ids(), "b": ids()}) == 0
    for other in (ids(1), ids(1, 3), ids(1, 1, 2), ids()):
        with pytest.raises(UnequalResults, match=r"q: a has 2 rows, b has \d"):
            snapshot.check_same("q", {"a": ids(1, 2), "b": other})
    queries = {"case": [SnapshotQuery(Box(0, 0, 1, 1))]}
    with pytest.raises(UnequalResults, match="case, query 0"):
        contenders = [returning("a", ids(1)), returning("b", ids(1)), returning("c", ids(2))]
        snapshot.measure(contenders, queries, np.random.default_rng(1))


def near(*pairs: tuple[int, float]) -> pa.Table:
    numbers, distances = zip(*pairs, strict=True)
    return pa.table({"id": pa.array(numbers), "distance": pa.array(distances)})


def test_nearest_points_are_compared_by_distance() -> None:
    one = near((1, 0.0), (2, 5.0), (3, 7.0))
    tied = near((1, 0.0), (2, 5.0 + 1e-9), (9, 7.0))
    assert snapshot.check_same("q", {"a": one, "b": tied}) == 3
    for other in (near((1, 0.0), (2, 5.0), (3, 7.1)), near((1, 0.0), (2, 5.0))):
        with pytest.raises(UnequalResults, match="distance"):
            snapshot.check_same("q", {"a": one, "b": other})


def test_the_summary_takes_the_faster_layout_on_the_small_ranges() -> None:
    metrics = {
        "range 0.01 %": {"roost": 10.0, "roost_frame": 50.0, "plain": 90.0, "sorted": 40.0},
        "range 1 %": {"roost": 20.0, "roost_frame": 40.0, "plain": 180.0, "sorted": 400.0},
        "range 25 %": {"roost": 1e9, "roost_frame": 1e9, "plain": 1.0, "sorted": 1.0},
    }
    for case, job in (("range 0.01 %", 20.0), ("range 1 %", 90.0), ("range 25 %", 1e9)):
        metrics[case]["roost_job"] = job
    rows = []
    for case, of in metrics.items():
        for name, value in of.items():
            rivals = ("spark_sql_", "duckdb_") if name in ("plain", "sorted") else ("",)
            for rival in rivals:
                scale = 0.1 if rival == "duckdb_" else 1.0
                row = {"case": case, "contender": rival + name, "p50_ms": value * scale}
                rows.append({**row, "p95_ms": 2 * value})
    summary = snapshot.summarise(rows)
    assert summary["ratio_vs_spark_sql"] == pytest.approx(math.sqrt(4.0 * 9.0))
    assert summary["ratio_vs_duckdb"] == pytest.approx(math.sqrt(0.4 * 0.9))
    assert summary["job_ratio_vs_spark_sql"] == pytest.approx(math.sqrt(2.0 * 2.0))
    assert summary["frame_ratio_vs_spark_sql"] == pytest.approx(math.sqrt(0.8 * 4.5))
    json.dumps(summary, allow_nan=False)


def test_the_command_line_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "--help"])
    printed = capsys.readouterr().out
    assert "snapshot" in bench.NAMES
    assert all(name in printed for name in bench.NAMES)
