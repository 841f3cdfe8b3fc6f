"""The queries of a partition: all that overlap it, no other, whatever it was made from."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import shapely
from hypothesis import example, given
from hypothesis import strategies as st

from balance_checks import slots_in
from properties import examples
from roost.balance import Partition
from roost.kernel import preload
from roost.model.schemas import request_schema
from roost.model.space import Coordinates, Rect, Space
from roost.queries.admission import Rules
from roost.queries.live import QuerySet, open_index
from roost.queries.log import SqliteQueryLog
from roost.queries.partitions import Counted, QueryCounts, bounds_of, live_changes, live_ranges
from roost.queries.versions import IndexVersion, segment_files
from roost.storage.cache import WorkerCache
from roost.storage.store import Store

SPACE = Space(Rect(0.0, 0.0, 100.0, 100.0), 10, 8, Coordinates.PLANE)
LONLAT = Space(Rect(-180.0, -90.0, 180.0, 90.0), 12, 6, Coordinates.LONLAT)
SCHEMA = request_schema(pa.string(), pa.int64())


class Directory:
    """A state directory with some requests in it."""

    def __init__(self, folder: Path, requests: list[dict[str, Any]], space: Space = SPACE) -> None:
        self.space = space
        self.store = Store(folder)
        self.log = SqliteQueryLog(folder / "queries.db")
        self.queries = QuerySet(self.store, self.log, Rules(space, pa.string(), pa.int64()))
        self.add(requests)

    def close(self) -> None:
        self.store.close()
        self.log.close()

    def add(self, requests: list[dict[str, Any]]) -> None:
        if requests:
            self.log.append(pa.Table.from_pylist(requests, SCHEMA))
        self.queries.advance(self.log.end())

    @property
    def version(self) -> IndexVersion:
        return self.queries.version

    def of(self, partition: Partition) -> list[str]:
        refs, folder = self.version.segments, segment_files(self.store)
        slots = slots_in(folder, WorkerCache(), refs, partition, self.space)
        segments = {ref.file: segment for ref, segment, _ in self.queries.segments}
        return [segments[file].ids[int(k)].as_py() for file in slots for k in slots[file]]

    def live(self, partition: Partition, now: int) -> int:
        refs, folder = self.version.segments, segment_files(self.store)
        return len(live_ranges(folder, WorkerCache(), refs, partition, self.space, now).ranges)


def box(name: str, x0: float, y0: float, x1: float, y1: float, **more: Any) -> dict[str, Any]:
    shape = {"x0": x0, "y0": y0, "x1": x1, "y1": y1}
    return {"op": "register", "query_id": name, "user_id": "u", **shape, **more}


def circle(name: str, cx: float, cy: float, radius: float) -> dict[str, Any]:
    shape = {"cx": cx, "cy": cy, "radius": radius}
    return {"op": "register", "query_id": name, "user_id": "u", **shape}


def polygon(name: str, geometry: shapely.Geometry) -> dict[str, Any]:
    return {"op": "register", "query_id": name, "user_id": "u", "wkt": geometry.wkt}


@pytest.fixture(autouse=True, params=["lists", "all bounds"])
def read_through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the queries of a partition through posting lists, as of large segments, and directly."""
    monkeypatch.setattr("roost.queries.live.ORDERED", 1)  # also small segments
    least = {"lists": 1, "all bounds": 1 << 20}[request.param]
    monkeypatch.setattr("roost.queries.partitions.ORDERED", least)


coordinate = st.one_of(
    st.floats(-30, 130, allow_nan=False),
    st.sampled_from([0.0, 10.0, 12.5, 50.0, 90.0, 100.0]),
)
span = st.floats(0, 60)


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    made = []
    for number in range(draw(st.integers(0, 12))):
        x, y, w, h = draw(coordinate), draw(coordinate), draw(span), draw(span)
        kind = draw(st.sampled_from(["box", "circle", "polygon"]))
        if kind == "box":
            made.append(box(f"q{number}", x, y, x + w, y + h))
        elif kind == "circle":
            made.append(circle(f"q{number}", x, y, w + 0.1))
        else:
            ring = [(x, y), (x + w + 1, y), (x + w / 2, y + h + 1)]
            made.append(polygon(f"q{number}", shapely.Polygon(ring)))
    return made


@st.composite
def rectangles(draw: st.DrawFn, space: Space = SPACE) -> Partition:
    c0 = draw(st.integers(0, space.columns - 1))
    r0 = draw(st.integers(0, space.rows - 1))
    c1 = draw(st.integers(c0 + 1, space.columns))
    r1 = draw(st.integers(r0 + 1, space.rows))
    return Partition(draw(st.integers(1, 10**6)), c0, r0, c1, r1, (0,))


def box_around(request: dict[str, Any]) -> tuple[float, float, float, float]:
    if request.get("wkt"):
        bounds: tuple[float, float, float, float] = shapely.from_wkt(request["wkt"]).bounds
        return bounds
    if request.get("radius"):
        x, y, r = request["cx"], request["cy"], request["radius"] * (1 + 1e-12)
        return x - r, y - r, x + r, y + r
    return request["x0"], request["y0"], request["x1"], request["y1"]


def touches(request: dict[str, Any], partition: Partition, space: Space = SPACE) -> bool:
    """Whether one of the partition's cells holds a point of the bounds, cell by cell."""
    x0, y0, x1, y1 = box_around(request)
    grid = space.grid
    low = int(grid.locate(np.array([x0]), np.array([y0]))[0])
    high = int(grid.locate(np.array([x1]), np.array([y1]))[0])
    (r0, c0), (r1, c1) = divmod(low, grid.columns), divmod(high, grid.columns)
    return any(
        partition.column0 <= column < partition.column1 and partition.row0 <= row < partition.row1
        for column in range(c0, c1 + 1)
        for row in range(r0, r1 + 1)
    )


@given(requests(), rectangles())
@examples(40)
def test_a_partition_has_the_queries_that_overlap_it_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, given_requests: list[Any], partition: Partition
) -> None:
    with closing(Directory(tmp_path_factory.mktemp("state"), given_requests)) as directory:
        expected = {r["query_id"] for r in given_requests if touches(r, partition)}
        assert sorted(directory.of(partition)) == sorted(expected)


def test_queries_that_end_are_no_longer_counted(tmp_path: Path) -> None:
    made = [box(f"q{k}", 10.0 * k, 5, 10.0 * k + 1, 6) for k in range(10)]
    with closing(Directory(tmp_path / "state", made)) as directory:
        left = Partition(1, 0, 0, 5, 8, (0,))
        assert directory.live(left, 0) == 5
        ends = {"op": "terminate", "query_id": "q3", "user_id": "u", "at": 7}
        directory.add([ends, box("late", 1, 1, 2, 2, expires_at=20)])
        assert [directory.live(left, now) for now in (6, 7, 19, 20)] == [6, 5, 5, 4]


def test_a_circle_over_the_antimeridian_is_on_both_sides(tmp_path: Path) -> None:
    far = [circle("far", 179.5, 0.0, 200_000.0)]
    with closing(Directory(tmp_path / "state", far, LONLAT)) as directory:
        west, east = Partition(1, 0, 0, 1, 6, (0,)), Partition(2, 11, 0, 12, 6, (0,))
        middle = Partition(3, 1, 0, 11, 6, (0,))
        found = [directory.of(partition) for partition in (west, east, middle)]
        assert found == [["far"], ["far"], []]


@given(requests(), st.lists(st.integers(0, 11), max_size=4))
@examples(25)
def test_counts_follow_registrations_and_terminations(
    tmp_path_factory: pytest.TempPathFactory, given_requests: list[Any], gone: list[int]
) -> None:
    with closing(Directory(tmp_path_factory.mktemp("state"), [])) as directory:
        counts = QueryCounts(SPACE)
        live: dict[str, Any] = {}
        for number, request in enumerate(given_requests):
            directory.add([request])
            live[request["query_id"]] = request
            if number in gone:
                ends = {"op": "terminate", "query_id": request["query_id"], "user_id": "u", "at": 5}
                directory.add([ends])
                del live[request["query_id"]]
            histogram = counts.update(directory.queries.segments, now=5)
        if not given_requests:
            return
        for partition in (Partition(1, 0, 0, 10, 8, (0,)), Partition(2, 2, 1, 7, 5, (0,))):
            p = partition
            expected = sum(touches(r, partition) for r in live.values())
            assert histogram.count(p.column0, p.row0, p.column1, p.row1) == expected


ENDS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=3)
STEPS = st.tuples(st.sampled_from([0, 0, 4, 8]), ENDS, st.integers(0, 4))


MIXED = [
    circle(f"q{n}", 10.0 * n, 30, 5) if n % 2 else box(f"q{n}", 10.0 * n, 30, 10.0 * n + 5, 35)
    for n in range(8)
]


@given(requests(), st.lists(STEPS, min_size=2, max_size=6))
@example(MIXED, [(8, [], 0), (0, [(n, 1) for n in range(8)], 50)])  # all end at once
@examples(60)
def test_changes_lead_from_each_version_to_the_next(
    tmp_path_factory: pytest.TempPathFactory,
    given_requests: list[Any],
    steps: list[tuple[int, list[tuple[int, int]], int]],
) -> None:
    """Queries are registered, terminate at some time, and time passes or returns."""
    with closing(Directory(tmp_path_factory.mktemp("state"), [])) as directory:
        files, cache = segment_files(directory.store), WorkerCache()
        area, waiting = Partition(2, 0, 0, 9, 7, (0,)), list(given_requests)
        before, rows = Counted((), 0), 0
        known: Counter[tuple[int, ...]] = Counter()
        for count, ends, now in steps:
            came, waiting = waiting[:count], waiting[count:]
            terminated = [
                {"op": "terminate", "query_id": f"q{number}", "user_id": "u", "at": at}
                for number, at in ends
            ]
            directory.add([*came, *terminated])
            after = Counted(directory.version.segments, now)
            args = (area, directory.space)
            changes = live_changes(files, cache, before, after, *args, rows)
            ranges, received = live_ranges(files, cache, after.refs, *args, now, rows)
            left = Counter(map(tuple, changes.left.tolist()))
            assert left <= known
            known = known - left + Counter(map(tuple, changes.came.tolist()))
            assert known == Counter(map(tuple, ranges.tolist()))
            arrived = changes.came[changes.received].tolist()
            assert sorted(arrived) == sorted(ranges[received].tolist())
            before, rows = after, directory.version.rows


@given(requests(), st.lists(rectangles(), min_size=1, max_size=3))
@examples(25)
def test_preloading_reads_the_postings_of_the_cells(
    tmp_path_factory: pytest.TempPathFactory, given_requests: list[Any], given: list[Partition]
) -> None:
    with closing(Directory(tmp_path_factory.mktemp("state"), given_requests)) as directory:
        index = open_index(
            segment_files(directory.store), directory.version.segments, SPACE, WorkerCache()
        )
        bounds = np.array([bounds_of(partition, SPACE) for partition in given])
        size = preload(index, bounds)
        if any(touches(request, partition) for request in given_requests for partition in given):
            assert size > 0
        everywhere = np.array([[-np.inf, -np.inf, np.inf, np.inf]])
        postings = [
            len(lists.slots) * 12 if lists is segment.box_postings else len(lists.postings) * 4
            for _, segment, _ in directory.queries.segments
            for lists in (segment.box_postings, segment.shape_postings)
            if lists is not None
        ]
        assert preload(index, everywhere) == sum(postings) >= size


def test_the_queries_of_a_partition_are_in_few_pages(tmp_path: Path) -> None:
    """Those of a quarter of space need a quarter of the pages, and some for its border."""
    chance, count, in_page = np.random.default_rng(4), 20_000, 64
    corners = np.round(chance.uniform(0, 99.5, (count, 2)), 3).tolist()
    directory = Directory(
        tmp_path, [box(f"q{n}", x, y, x + 0.5, y + 0.5) for n, (x, y) in enumerate(corners)]
    )
    (ref,) = directory.version.segments
    quarter = Partition(1, 0, 0, 5, 4, (0,))
    slots = slots_in(segment_files(directory.store), WorkerCache(), (ref,), quarter, SPACE)[
        ref.file
    ]
    _, _, x1, y1 = bounds_of(quarter, SPACE)
    expected = sum(x < x1 and y < y1 for x, y in corners)
    assert slots.size == expected and (x1, y1) == (50.0, 50.0)
    assert np.unique(slots // in_page).size <= 0.4 * count / in_page
    directory.close()
