"""The workloads and the protocol of ``roost bench peers``, and its systems without Spark."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from roost.bench import cases, peers
from roost.bench.cases import Case, CaseSpec, Pickups
from roost.bench.rivals import duckdb_rival, environment, protocol, strtree
from roost.bench.rivals.protocol import RivalJob
from roost.testing.oracle import brute_force

SPEC = CaseSpec("tiny", "boxes", 300, points=800, write_points=200, warm_points=50)


def pickups(count: int = 1_000) -> Pickups:
    rng = np.random.default_rng(5)
    times = np.sort(rng.integers(0, 10**12, count))
    stamps = pa.chunked_array([pa.array(times, pa.timestamp("us", tz="UTC"))])
    return Pickups(stamps, rng.normal(0, 1, count).round(2), rng.normal(9, 2, count), "test")


def tiny(folder: Path, spec: CaseSpec = SPEC) -> Case:
    return cases.make_case(spec, pickups(), folder, None)


def wide(case: Case) -> Case:
    """Enlarge the boxes and put points on their borders, so that there are matches."""
    queries = pq.read_table(case.queries_path)
    x0, y0 = queries["x0"].to_numpy(), queries["y0"].to_numpy()
    boxes = cases.box_requests(np.column_stack([x0, y0, x0 + 0.5, y0 + 0.5]))
    pq.write_table(boxes, case.queries_path)
    points = pq.read_table(case.points_path)
    lon, lat = points["lon"].to_numpy().copy(), points["lat"].to_numpy().copy()
    lon[:100], lat[:100] = x0[:100] + 0.5, y0[:100]
    columns = {"lon": lon, "lat": lat}
    for name, values in columns.items():
        points = points.set_column(points.schema.get_field_index(name), name, pa.array(values))
    pq.write_table(points, case.points_path, row_group_size=100)
    return replace(case, side_x=0.5, side_y=0.5)


def brute(case: Case) -> list[tuple[int, int]]:
    points = [
        {"id": row["id"], "x": row["lon"], "y": row["lat"], "time": 0}
        for row in pq.read_table(case.points_path).to_pylist()
    ]
    return brute_force(points, pq.read_table(case.queries_path).to_pylist(), lonlat=True)


def written(out: Path) -> list[tuple[int, int]]:
    table = pa.concat_tables([pq.read_table(path) for path in protocol.match_files(out)])
    pairs = zip(table["query_id"].to_pylist(), table["point_id"].to_pylist(), strict=True)
    return sorted(pairs)


def test_points_have_event_order_unique_ids_and_row_groups(tmp_path: Path) -> None:
    case = tiny(tmp_path)
    table = pq.read_table(case.points_path)
    assert table.num_rows == case.points == 800
    assert table.schema.field("event_time").type == pa.timestamp("us", tz="UTC")
    assert table["event_time"].to_pylist() == sorted(table["event_time"].to_pylist())
    source = pickups()
    ids = table["id"].to_numpy()
    assert len(np.unique(ids)) == 800
    assert np.array_equal(source.lon[ids], table["lon"].to_numpy())
    meta = pq.read_metadata(case.points_path)
    assert meta.num_row_groups == cases.ROW_GROUPS_MIN
    assert meta.row_group(0).column(2).compression == "UNCOMPRESSED"


def test_boxes_have_the_documented_side_and_are_near_points(tmp_path: Path) -> None:
    case, source = tiny(tmp_path), pickups()
    queries = pq.read_table(case.queries_path)
    boxes = np.column_stack([queries[name].to_numpy() for name in ("x0", "y0", "x1", "y1")])
    x0, y0, x1, y1 = case.bounds
    assert np.mean(source.lon < x0) == pytest.approx(0.001, abs=0.001)
    assert np.allclose(boxes[:, 2] - boxes[:, 0], 0.0016 * (x1 - x0))
    assert np.allclose(boxes[:, 3] - boxes[:, 1], 0.0016 * (y1 - y0))
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    side = np.array([case.side_x, case.side_y])
    places = np.column_stack([source.lon, source.lat])
    away = np.abs(centre[:, None, :] - places[None, :, :]) / side
    assert np.all(away.max(axis=2).min(axis=1) <= cases.JITTER_SIDES + 1e-9)


def test_a_case_is_deterministic_and_reads_back(tmp_path: Path) -> None:
    first, second = tiny(tmp_path / "a"), tiny(tmp_path / "b")
    assert pq.read_table(first.queries_path).equals(pq.read_table(second.queries_path))
    assert Case.load(tmp_path / "a" / "case.json") == first


def test_the_bundled_sample_replaces_the_full_data(tmp_path: Path) -> None:
    spec = CaseSpec("polygons", "polygons", 0, points=1_000, write_points=100)
    (case,) = cases.make_cases((spec,), tmp_path, None)
    assert case.points == 1_000
    assert case.queries == cases.STAND_IN_POLYGONS
    assert case.data == "bundled sample"
    inside, _ = strtree_count(case)
    assert inside > 500


def strtree_count(case: Case) -> tuple[int, int]:
    job = RivalJob(case, "count", Path("unused"), Path("unused"))
    strtree.load(job)
    groups = pq.read_metadata(case.points_path).num_row_groups
    counts = [strtree.match_row_group(case.points_path, group, None) for group in range(groups)]
    return sum(counts), groups


def test_strtree_equals_brute_force_counted_and_written(tmp_path: Path) -> None:
    case = wide(tiny(tmp_path))
    expected = brute(case)
    assert len(expected) > 1_000
    found, groups = strtree_count(case)
    assert found == len(expected)
    out = tmp_path / "out"
    out.mkdir()
    for group in range(groups):
        strtree.match_row_group(case.points_path, group, out)
    assert written(out) == expected


def test_duckdb_equals_brute_force_counted_and_written(tmp_path: Path) -> None:
    case = wide(tiny(tmp_path))
    expected = brute(case)
    job = RivalJob(case, "count", tmp_path / "out", tmp_path / "result.json")
    with duckdb_rival.connect(needs_spatial=False) as connection:
        duckdb_rival.load_boxes(connection, case)
        assert duckdb_rival.one_pass(connection, job, case.points_path, None) == len(expected)
        duckdb_rival.one_pass(connection, job, case.points_path, job.out)
    assert written(job.out) == expected


def test_passes_are_repeated_for_the_timed_seconds(tmp_path: Path) -> None:
    case = tiny(tmp_path)
    now = [0.0]
    seen: list[str] = []

    def one_pass(path: str, out: Path | None) -> int:
        seen.append(path)
        now[0] += 1.5
        return 7

    job = RivalJob(case, "count", tmp_path / "out", tmp_path / "result.json")
    result = protocol.measure(job, "fake", "1", "", one_pass, lambda: now[0])
    assert seen.count(case.warm_points_path) == 4  # 5 s of warm-up at 1.5 s a pass
    assert seen.count(case.points_path) == result["passes"] == 3
    assert result["points_per_s"] == pytest.approx(case.points * 3 / 4.5)
    assert json.loads(job.json_path.read_text())["matches"] == 7


def test_passes_with_different_matches_are_refused(tmp_path: Path) -> None:
    case = tiny(tmp_path)
    counts = iter(range(1_000))
    job = RivalJob(case, "count", tmp_path / "out", tmp_path / "result.json")
    clock = iter(np.arange(0.0, 1_000.0))
    with pytest.raises(AssertionError, match="different matches"):
        protocol.measure(
            job, "fake", "1", "", lambda path, out: next(counts), lambda: float(next(clock))
        )


def row(case: str, system: str, rate: float | None, **more: object) -> peers.Row:
    skipped = None if rate is not None else "because"
    base = {"case": case, "mode": "count", "system": system, "points": 10, "matches": 5}
    return {**base, "points_per_s": rate, "skipped": skipped, **more}


def test_different_matches_end_the_benchmark() -> None:
    same = [row("a", "roost", 1.0), row("a", "duckdb", 2.0), row("b", "duckdb", 2.0, matches=9)]
    peers.check_equal(same)
    peers.check_equal([*same, row("a", "sedona", None, matches=None)])
    with pytest.raises(peers.UnequalMatches, match="strtree has 6"):
        peers.check_equal([*same, row("a", "strtree", 1.0, matches=6)])
    with pytest.raises(peers.UnequalMatches, match="digest"):
        peers.check_equal([row("a", "roost", 1.0, digest="x"), row("a", "duckdb", 1.0, digest="y")])


def test_the_summary_takes_the_worst_counted_case() -> None:
    rows = [
        row("a", "roost", 100.0), row("a", "kernel", 60.0), row("a", "duckdb", 10.0),
        row("b", "roost", 80.0), row("b", "kernel", 100.0), row("b", "duckdb", 4.0),
        row("b", "roost", 1.0, mode="write"), row("a", "sedona", None), row("b", "sedona", None),
    ]  # fmt: skip
    summary = peers.summarise(rows)
    assert summary["ratio_vs_duckdb"] == pytest.approx(10.0)
    assert summary["b"]["ratio_vs_duckdb"] == pytest.approx(20.0)
    assert summary["kernel_efficiency"] == pytest.approx(0.4)
    assert summary["ratio_vs_sedona"] is None


def test_the_digest_depends_on_rows_but_not_on_their_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    table = pa.table({
        "query_id": rng.integers(0, 50, 400),
        "point_id": rng.integers(0, 50, 400),
        "event_time": pa.array(rng.integers(0, 10**9, 400), pa.timestamp("us", tz="UTC")),
    })  # fmt: skip
    shuffled = table.take(pa.array(rng.permutation(400)))
    swapped = table.set_column(0, "query_id", table["point_id"])
    swapped = swapped.set_column(1, "point_id", table["query_id"])
    doubled = pa.concat_tables([table, table.slice(0, 1)])
    digests = []
    for k, one in enumerate([table, shuffled, swapped, doubled]):
        (tmp_path / str(k)).mkdir()
        half = one.num_rows // 2 + k
        pq.write_table(one.slice(0, half), tmp_path / str(k) / "a.parquet")
        pq.write_table(one.slice(half), tmp_path / str(k) / "b.parquet")
        digests.append(peers.digest(tmp_path / str(k)))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_system_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    case = tiny(tmp_path / "case")
    code = "import sys; sys.exit('out of memory')"
    failing = peers.System("fails", lambda: [sys.executable, "-c", code])
    silent = peers.System("silent", lambda: [sys.executable, "-c", "pass"])
    absent = peers.System("absent", unavailable)
    reasons = ((failing, "out of memory"), (silent, "no result"), (absent, "no such thing"))
    for system, reason in reasons:
        command = peers.prepare([system], ["boxes"])[system.command]
        found = peers.run_one(case, "count", system, command, tmp_path)
        assert found["points_per_s"] is None
        assert reason in found["skipped"]
    required = peers.System("absent", unavailable, required=True)
    with pytest.raises(peers.RoostError, match="absent failed"):
        peers.run_one(case, "count", required, environment.Unavailable("no network"), tmp_path)


def unavailable() -> list[str]:
    raise environment.Unavailable("no such thing")


def test_the_error_line_prefers_a_missing_jar() -> None:
    text = "start\n\t:: unresolved dependency: org#thing;1.0: not found\nRuntimeError: x\n"
    assert "org#thing" in environment.error_line(text)
    assert environment.error_line("a\n_x.ParserException: no\n\nLINE 1: b\n  ^\n").endswith("no")
    assert environment.error_line("a\nb\n\n") == "b"


def test_time_zones_and_units_of_written_times_do_not_matter(tmp_path: Path) -> None:
    micro = pa.array([1_000_000, 2_000_000], pa.timestamp("us", tz="UTC"))
    for name, times in (("a", micro), ("b", pc.cast(micro, pa.timestamp("ms", tz="UTC")))):
        (tmp_path / name).mkdir()
        table = pa.table({"query_id": [1, 2], "point_id": [3, 4], "event_time": times})
        pq.write_table(table, tmp_path / name / "part.parquet")
    assert peers.digest(tmp_path / "a") == peers.digest(tmp_path / "b")
