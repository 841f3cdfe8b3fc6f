"""Queries by cell: the queries of a partition, and a histogram of all live queries.

Queries are mapped files that every machine can read, so they are not copied when a partition moves:
its new machine reads the lists of its cells (:mod:`roost.kernel.preload`). The statistics of a
partition are computed from the queries whose range overlaps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition
from roost.kernel import Segment, slots_near
from roost.kernel.cells import IndexGrid
from roost.model.arrays import Floats, Ints, Mask, frozen
from roost.model.space import Space
from roost.queries.live import ORDERED, LiveSegment, load_ended, open_segment
from roost.queries.versions import SegmentRef
from roost.storage.cache import WorkerCache
from roost.storage.files import Files, read_ahead
from roost.workload import EulerHistogram, query_ranges
from roost.workload.query_loops import changed_rows, cut_boxes, differing_slots, live_rows

NOTHING: Ints = np.empty(0, np.int64)
SLOTS_AT_ONCE = 1 << 16
"""Queries of a partition whose bounds are in memory at the same time."""


def bounds_of(partition: Partition, space: Space) -> tuple[float, float, float, float]:
    """Return the half-open bounds of a partition, infinite at the edge of the grid."""
    grid = space.grid
    x0 = -np.inf if partition.column0 == 0 else float(grid.edges_x[partition.column0])
    y0 = -np.inf if partition.row0 == 0 else float(grid.edges_y[partition.row0])
    x1 = np.inf if partition.column1 == grid.columns else float(grid.edges_x[partition.column1])
    y1 = np.inf if partition.row1 == grid.rows else float(grid.edges_y[partition.row1])
    return x0, y0, x1, y1


class _Shapes(NamedTuple):
    """Slots and inclusive cell ranges of a segment or a part of it, one row for each shape.

    The others are of a part; an array is empty if it is not stored.
    """

    owners: Ints
    ranges: NDArray[np.int32]
    live_until: Ints = NOTHING
    created: Ints = NOTHING  # log positions
    by_end: Ints = NOTHING  # rows in the order of ``live_until``


NO_SHAPES = _Shapes(NOTHING, np.empty((0, 4), np.int32))


def _mapped(files: Files, cache: WorkerCache, file: str) -> Segment:
    def build() -> Segment:
        segment = open_segment(files, file, cache, sparse=True).segment
        if segment.size < ORDERED:
            read_ahead(segment.boxes, np.array([0]), np.array([segment.size]))
        return segment

    return cache.get("query segment", (files, file), build)


def _part(
    files: Files, cache: WorkerCache, file: str, partition: Partition, space: Space
) -> _Shapes:
    segment = _mapped(files, cache, file)
    if _stays(segment):
        return _cut(segment, partition, space)  # read once, and too large to retain
    key = (files, file, partition.bounds, space)
    return cache.get("query part", key, lambda: _cut(segment, partition, space))


def _stays(segment: Segment) -> bool:
    """Return whether only terminations change which of the many queries of a segment are live."""
    return segment.size >= ORDERED and segment.live_until is None


def _part_of(
    files: Files,
    cache: WorkerCache,
    file: str,
    partition: Partition,
    space: Space,
    slots: Ints,
    versions: tuple[Any, ...],
) -> _Shapes:
    """Return a part that has at least some slots, and those whose time ends.

    ``versions`` names the two versions of the segment in which the slots differ.
    """
    segment = _mapped(files, cache, file)
    if not _stays(segment):
        return _part(files, cache, file, partition, space)
    if not slots.size:
        return NO_SHAPES

    def build() -> tuple[Ints, Floats]:
        owners, bounds = segment.bounds(space, slots)
        order = np.argsort(owners, kind="stable")  # circles came last
        return frozen(owners[order]), frozen(bounds[order])

    # All machines of a worker need the same slots of a batch.
    owners, bounds = cache.get("turned bounds", (files, file, space, versions), build)
    area, edges = bounds_of(partition, space), (space.grid.edges_x, space.grid.edges_y)
    rows, ranges = cut_boxes(bounds, np.arange(owners.size), area, edges)
    return _Shapes(owners[rows], ranges)


def _cut(segment: Segment, partition: Partition, space: Space) -> _Shapes:
    area, edges = bounds_of(partition, space), (space.grid.edges_x, space.grid.edges_y)
    if segment.size < ORDERED:
        near = np.arange(segment.size)  # in few pages, of which the partition may have all
    else:
        near = slots_near(segment, np.array([area]), IndexGrid.over(space.bounds))
    if segment.radius is None:
        owners, ranges = cut_boxes(frozen(segment.boxes), near, area, edges)
    else:
        found = [(NOTHING, np.empty((0, 4), np.int32))]
        for start in range(0, near.size, SLOTS_AT_ONCE):
            slots, bounds = segment.bounds(space, near[start : start + SLOTS_AT_ONCE])
            rows, cells = cut_boxes(frozen(bounds), np.arange(slots.size), area, edges)
            order = np.argsort(slots[rows], kind="stable")  # circles came last
            found.append((slots[rows][order], cells[order]))
        owners, ranges = (np.concatenate(column) for column in zip(*found, strict=True))
    until, created = (
        NOTHING if column is None else column[owners]
        for column in (segment.live_until, segment.created_position)
    )
    by_end = np.argsort(until, kind="stable") if until.size else NOTHING
    return _Shapes(owners, ranges, until, created, by_end)


class LiveRanges(NamedTuple):
    """The cells of live queries, and which of them were registered since a log position."""

    ranges: NDArray[np.int32]
    received: NDArray[np.bool_]


def live_ranges(
    files: Files,
    cache: WorkerCache,
    refs: tuple[SegmentRef, ...],
    partition: Partition,
    space: Space,
    now: int,
    since: int | None = None,
) -> LiveRanges:
    """Return the cells of the queries in a partition that are live at an event time.

    Those registered from position ``since`` on are marked as received; None marks none. A query
    without a stored position is old.
    """
    found, received = [np.empty((0, 4), np.int32)], [np.empty(0, np.bool_)]
    for ref in refs:
        part = _part(files, cache, ref.file, partition, space)
        rows = live_rows(part.owners, part.live_until, _ended(files, cache, ref, now), now)
        found.append(part.ranges[rows])
        received.append(_received(part, rows, since))
    return LiveRanges(np.concatenate(found), np.concatenate(received))


def _received(part: _Shapes, rows: Ints, since: int | None) -> Mask:
    """Return which rows were registered since a log position."""
    if since is None or not part.created.size:
        return np.zeros(rows.size, np.bool_)
    received: Mask = part.created[rows] >= since
    return received


class Counted(NamedTuple):
    """The live queries that some statistics count."""

    refs: tuple[SegmentRef, ...]
    now: int  # event time


class LiveChanges(NamedTuple):
    """Cells of queries by which two versions differ; one that changed its file left and came."""

    left: NDArray[np.int32]
    came: NDArray[np.int32]
    received: NDArray[np.bool_]  # those that came and were registered since a position


def live_changes(
    files: Files,
    cache: WorkerCache,
    before: Counted,
    after: Counted,
    partition: Partition,
    space: Space,
    since: int,
) -> LiveChanges:
    """Return how the queries of :func:`live_ranges` differ between two versions.

    The time depends on the changed segments and on what terminated in the others.
    """
    old, new = ({ref.file: ref for ref in refs} for refs in (before.refs, after.refs))
    left, came = [np.empty((0, 4), np.int32)], [np.empty((0, 4), np.int32)]
    received = [np.empty(0, np.bool_)]
    for file in old.keys() | new.keys():
        if file in old and file in new:
            turned = _turned(files, cache, old[file], new[file], before.now, after.now)
            versions = (old[file].ended, new[file].ended, before.now, after.now)
            part = _part_of(files, cache, file, partition, space, turned.slots, versions)
            if not turned.slots.size and (not part.by_end.size or before.now == after.now):
                continue
            rows, live = changed_rows(
                part.owners, part.live_until, part.by_end, *turned, before.now, after.now
            )
            left.append(part.ranges[rows[~live]])
            came.append(part.ranges[rows[live]])
            received.append(np.zeros(len(came[-1]), np.bool_))
            continue
        part = _part(files, cache, file, partition, space)
        ref, now = (old[file], before.now) if file in old else (new[file], after.now)
        rows = live_rows(part.owners, part.live_until, _ended(files, cache, ref, now), now)
        (left if file in old else came).append(part.ranges[rows])
        if file in new:
            received.append(_received(part, rows, since))
    return LiveChanges(np.concatenate(left), np.concatenate(came), np.concatenate(received))


def _ended(files: Files, cache: WorkerCache, ref: SegmentRef, now: int) -> Ints:
    """Return the slots of a segment that were terminated by an event time, ascending."""
    if ref.ended is None:
        return NOTHING

    def build() -> Ints:
        slots, until = load_ended(files, ref)
        return np.sort(slots[until <= now])

    return cache.get("ended", (files, ref.ended, now), build)


class _Turned(NamedTuple):
    """Slots that are terminated in one of two versions only, and those of the second version."""

    slots: Ints
    returned: Mask  # those of the first version
    ended: Ints


def _turned(
    files: Files, cache: WorkerCache, old: SegmentRef, new: SegmentRef, then: int, now: int
) -> _Turned:
    if old.ended is None and new.ended is None:
        return _Turned(NOTHING, np.empty(0, np.bool_), NOTHING)

    def build() -> _Turned:
        ended = _ended(files, cache, new, now)
        return _Turned(*differing_slots(_ended(files, cache, old, then), ended), ended)

    return cache.get("turned", (files, old.ended, new.ended, then, now), build)


class QueryCounts:
    """Histogram of the live queries, which the global planner reads every round.

    Only segments and slots that have changed since the previous round are counted again.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        # By segment file: its shapes, and whether each slot is counted.
        self._counted: dict[str, tuple[_Shapes, NDArray[np.bool_]]] = {}
        self._histogram = EulerHistogram(space.columns, space.rows)

    def update(self, segments: Iterable[LiveSegment], now: int) -> EulerHistogram:
        """Count the queries of these segments that are live at an event time."""
        before, self._counted = self._counted, {}
        for found in segments:
            file, live = found.ref.file, found.live_at(now)
            known = before.pop(file) if file in before else self._uncounted(found.segment)
            shapes, counted = known
            self._count(shapes, counted, live)
            self._counted[file] = shapes, live
        for shapes, counted in before.values():
            self._count(shapes, counted, np.zeros_like(counted))
        return self._histogram

    def _uncounted(self, segment: Segment) -> tuple[_Shapes, NDArray[np.bool_]]:
        owners, bounds = segment.bounds(self._space)
        shapes = _Shapes(owners, query_ranges(self._space.grid, bounds))
        return shapes, np.zeros(segment.size, np.bool_)

    def _count(self, shapes: _Shapes, before: NDArray[np.bool_], live: NDArray[np.bool_]) -> None:
        for sign, changed in ((1, live & ~before), (-1, before & ~live)):
            if changed.any():
                self._histogram.add(shapes.ranges[changed[shapes.owners]], sign)
