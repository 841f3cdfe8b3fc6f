"""Window segments: all points are there, found by box, time and partition, and never copied."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_points import (
    EARTH,
    PLANE,
    TYPES,
    Point,
    block_of,
    cell_of,
    random_places,
    random_points,
    records,
    segment_of,
)

from properties import examples
from roost.model.records import TIME_MAX, TIME_MIN
from roost.model.space import Space
from roost.storage.files import map_arrays, write_arrays
from roost.window import WindowSegment, build
from roost.window.segment import ZONE_ROWS, first_time


@pytest.fixture(scope="module", params=[PLANE, EARTH], ids=["plane", "earth"])
def space(request: pytest.FixtureRequest) -> Space:
    found: Space = request.param
    return found


@pytest.mark.parametrize("text_ids", [False, True])
@pytest.mark.parametrize("count", [0, 1, ZONE_ROWS, 3 * ZONE_ROWS + 1])
def test_a_mapped_segment_has_all_points_and_columns(
    space: Space, count: int, text_ids: bool, tmp_path: Path
) -> None:
    rng = random.Random(count)
    points = random_points(rng, count, space, text_ids=text_ids)
    table, ids = random_places(rng, space)
    cells = np.array([cell_of(point, space) for point in points], np.int32)
    arrays = build(block_of(points), cells, table[cells], ids, space)
    write_arrays(tmp_path / "w.seg", arrays)
    segment = WindowSegment.open(map_arrays(tmp_path / "w.seg"))
    assert segment.size == count and segment.space == space
    assert {name: segment.schema.field(name).type for name in TYPES} == TYPES
    taken = segment.take(np.arange(count))
    columns = {"x": taken.x, "y": taken.y, "time": taken.time, "id": taken.ids}
    table_of = pa.table(columns | taken.attributes)
    wanted = pa.Table.from_pylist(points, table_of.schema)
    assert sorted(table_of.to_pylist(), key=lambda p: p["id"]) == sorted(
        wanted.to_pylist(), key=lambda p: p["id"]
    )


def test_rows_are_sorted_by_partition_and_cells_are_counted(space: Space) -> None:
    rng = random.Random(5)
    points = random_points(rng, 2_000, space)
    table, ids = random_places(rng, space)
    segment = segment_of(points, space, (table, ids))
    by_id = {point["id"]: point for point in points}
    found = []
    for place, number in enumerate(segment.partition_ids.tolist()):
        start, stop = segment.partition_starts[place : place + 2].tolist()
        assert start < stop
        names = segment.take(np.arange(start, stop)).ids.to_pylist()
        assert {ids[table[cell_of(by_id[name], space)]] for name in names} == {number}
        found += names
    assert sorted(found) == sorted(by_id)
    counts: dict[int, int] = {}
    for point in points:
        counts[cell_of(point, space)] = counts.get(cell_of(point, space), 0) + 1
    measured = zip(segment.counts.cells.tolist(), segment.counts.counts.tolist(), strict=True)
    assert list(measured) == sorted(counts.items())


def test_opening_a_segment_copies_nothing(tmp_path: Path) -> None:
    points = random_points(random.Random(1), 5_000, PLANE, text_ids=True)
    cells = np.zeros(len(points), np.int32)
    write_arrays(tmp_path / "w", build(block_of(points), cells, cells, np.array([3]), PLANE))
    arrays = map_arrays(tmp_path / "w")
    segment = WindowSegment.open(arrays)
    assert segment.x is arrays["x"]
    before = pa.total_allocated_bytes()
    buffers = [b for a in (segment.ids, *segment.attributes.values()) for b in a.buffers() if b]
    assert pa.total_allocated_bytes() == before
    start = arrays["columns"].ctypes.data
    assert all(start <= b.address < start + arrays["columns"].nbytes for b in buffers if b.size)


@pytest.fixture(scope="module")
def large(space: Space) -> tuple[list[Point], WindowSegment, dict[int, int]]:
    """Some thousand points, and the partition of each."""
    rng = random.Random(8)
    points = random_points(rng, 4_000, space)
    table, ids = random_places(rng, space)
    segment = segment_of(points, space, (table, ids))
    return points, segment, {p["id"]: int(ids[table[cell_of(p, space)]]) for p in points}


@given(data=st.data())
@examples(70)
def test_rows_in_a_box_are_brute_force(
    space: Space, large: tuple[list[Point], WindowSegment, dict[int, int]], data: st.DataObject
) -> None:
    points, segment, partition = large
    b = space.bounds
    # Corners are coordinates of points as often as not: boxes are closed.
    pick = st.sampled_from(points)
    xs = st.one_of(st.floats(b.x0 - 1, b.x1 + 1), pick.map(lambda p: p["x"]))
    ys = st.one_of(st.floats(b.y0 - 1, b.y1 + 1), pick.map(lambda p: p["y"]))
    x0, x1 = sorted([data.draw(xs), data.draw(xs)])
    y0, y1 = sorted([data.draw(ys), data.draw(ys)])
    after = data.draw(st.none() | st.integers(-55, 55) | st.sampled_from([TIME_MIN, TIME_MAX]))
    numbers = st.sets(st.sampled_from([*sorted(set(partition.values())), -1]))
    wanted = data.draw(st.none() | numbers)
    rows = segment.rows_in((x0, y0, x1, y1), after, wanted)
    assert np.all(np.diff(rows) > 0)
    assert records(segment, rows) == sorted(
        p["id"]
        for p in points
        if x0 <= p["x"] <= x1
        and y0 <= p["y"] <= y1
        and (after is None or p["time"] > after)
        and (wanted is None or partition[p["id"]] in wanted)
    )


def test_an_unbounded_box_has_all_rows_and_an_inverted_one_none(
    large: tuple[list[Point], WindowSegment, dict[int, int]],
) -> None:
    points, segment, _ = large
    assert segment.rows_in((-np.inf, -np.inf, np.inf, np.inf)).size == len(points)
    assert segment.rows_in((5.0, -90.0, -5.0, 90.0)).size == 0


def test_the_first_time_after_another() -> None:
    assert first_time(None) == TIME_MIN
    assert first_time(TIME_MIN - 5) == TIME_MIN
    assert first_time(TIME_MIN) == TIME_MIN + 1
    assert first_time(TIME_MAX) is None
