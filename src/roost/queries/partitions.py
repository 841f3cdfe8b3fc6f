"""Queries by cell: the queries of a partition, and a histogram of all live queries.

Queries are mapped files that every machine can read, so they are not copied when a partition moves:
its new machine reads the lists of its cells (:mod:`roost.kernel.preload`). The statistics of a
partition are computed from the queries whose range overlaps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition
from roost.kernel import Segment, slots_near, unpack
from roost.kernel.cells import IndexGrid
from roost.model.records import TIME_MAX
from roost.model.space import Space
from roost.queries.live import LiveSegment, load_ended
from roost.queries.versions import SegmentRef
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.workload import EulerHistogram, query_ranges

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
    """Slots and inclusive cell ranges of a segment or a part of it, one row for each shape."""

    owners: NDArray[np.int64]
    ranges: NDArray[np.int32]
    live_until: NDArray[np.int64] | None
    created: NDArray[np.int64] | None  # log positions; None if they are not stored
    by_end: NDArray[np.int64] | None = None  # rows in the order of ``live_until``


def _mapped(files: Files, cache: WorkerCache, file: str) -> Segment:
    return cache.get("query segment", (files, file), lambda: unpack(files.map(file, sparse=True)))


def _part(
    files: Files, cache: WorkerCache, file: str, partition: Partition, space: Space
) -> _Shapes:
    key = (files, file, partition, space)
    return cache.get("query part", key, lambda: _cut(_mapped(files, cache, file), partition, space))


def _cut(segment: Segment, partition: Partition, space: Space) -> _Shapes:
    x0, y0, x1, y1 = bounds_of(partition, space)
    near = slots_near(segment, np.array([[x0, y0, x1, y1]]), IndexGrid.over(space.bounds))
    found = [(np.empty(0, np.int64), np.empty((0, 4), np.int32))]
    for start in range(0, near.size, SLOTS_AT_ONCE):
        owners, bounds = segment.bounds(space, near[start : start + SLOTS_AT_ONCE])
        # The edges of a cell decide which cell a coordinate is in, so this is exact.
        across = (bounds[:, 2] >= x0) & (bounds[:, 0] < x1)
        rows = np.flatnonzero(across & (bounds[:, 3] >= y0) & (bounds[:, 1] < y1))
        rows = rows[np.argsort(owners[rows], kind="stable")]  # circles came last
        found.append((owners[rows], query_ranges(space.grid, bounds[rows])))
    owners, ranges = (np.concatenate(column) for column in zip(*found, strict=True))
    until, created = (
        None if column is None else column[owners]
        for column in (segment.live_until, segment.created_position)
    )
    by_end = None if until is None else np.argsort(until, kind="stable")
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
    area = replace(partition, machines=(), parents=())
    found, received = [np.empty((0, 4), np.int32)], [np.empty(0, np.bool_)]
    for ref in refs:
        part = _part(files, cache, ref.file, area, space)
        new = np.zeros(part.owners.size, np.bool_)
        if since is not None and part.created is not None:
            new = part.created >= since
        ranges = part.ranges
        if part.live_until is not None or ref.ended is not None:
            until = part.live_until
            if until is None:
                until = np.full(part.owners.size, TIME_MAX)
            slots, ends = load_ended(files, ref)
            live = (until > now) & ~np.isin(part.owners, slots[ends <= now])
            ranges, new = ranges[live], new[live]
        found.append(ranges)
        received.append(new)
    return LiveRanges(np.concatenate(found), np.concatenate(received))


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
    area = replace(partition, machines=(), parents=())
    old, new = ({ref.file: ref for ref in refs} for refs in (before.refs, after.refs))
    left, came = [np.empty((0, 4), np.int32)], [np.empty((0, 4), np.int32)]
    received = [np.empty(0, np.bool_)]
    for file in old.keys() | new.keys():
        part = _part(files, cache, file, area, space)
        then, ended = (_ended(files, cache, refs.get(file), part) for refs in (old, new))
        rows = None  # all of them
        if file in old and file in new:
            rows = _doubtful(part, then, ended, before.now, after.now)
            if not rows.size:
                continue
        was = _live(part, then, rows, before.now) & (file in old)
        now = _live(part, ended, rows, after.now) & (file in new)
        ranges = part.ranges if rows is None else part.ranges[rows]
        left.append(ranges[was & ~now])
        came.append(ranges[now & ~was])
        recent = np.zeros(now.size, np.bool_)
        if rows is None and part.created is not None:
            recent = part.created >= since
        received.append(recent[now & ~was])
    return LiveChanges(np.concatenate(left), np.concatenate(came), np.concatenate(received))


class _Ended(NamedTuple):
    """Rows of terminated queries, ascending, and the event times of termination."""

    rows: NDArray[np.int64]
    until: NDArray[np.int64]

    def missing(self, other: _Ended) -> NDArray[np.int64]:
        """Return the rows that another version lacks, or has with another time."""
        if not other.rows.size:
            return self.rows
        at = np.minimum(np.searchsorted(other.rows, self.rows), other.rows.size - 1)
        rows: NDArray[np.int64] = self.rows[
            (other.rows[at] != self.rows) | (other.until[at] != self.until)
        ]
        return rows


def _ended(files: Files, cache: WorkerCache, ref: SegmentRef | None, part: _Shapes) -> _Ended:
    if ref is None or ref.ended is None:
        return _Ended(np.empty(0, np.int64), np.empty(0, np.int64))
    slots, until = cache.get("ended", (files, ref.ended), partial(_sorted_ended, files, ref))
    first = np.searchsorted(part.owners, slots, side="left")
    counts = np.searchsorted(part.owners, slots, side="right") - first
    before = np.cumsum(counts) - counts
    rows = np.repeat(first - before, counts) + np.arange(counts.sum())
    return _Ended(rows, np.repeat(until, counts))


def _sorted_ended(files: Files, ref: SegmentRef) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    slots, until = load_ended(files, ref)
    order = np.argsort(slots)
    return slots[order], until[order]


def _doubtful(part: _Shapes, old: _Ended, new: _Ended, then: int, now: int) -> NDArray[np.int64]:
    """Return the rows of a segment that may have become live, or have ceased to be."""
    first, last = min(then, now), max(then, now)
    found = [old.missing(new), new.missing(old)]
    found.append(new.rows[(new.until > first) & (new.until <= last)])
    if part.by_end is not None and first < last:
        assert part.live_until is not None
        ends = np.searchsorted(part.live_until, [first, last], side="right", sorter=part.by_end)
        found.append(part.by_end[ends[0] : ends[1]])
    return np.unique(np.concatenate(found))


def _live(
    part: _Shapes, ended: _Ended, rows: NDArray[np.int64] | None, now: int
) -> NDArray[np.bool_]:
    """Return which rows are live at an event time."""
    live = np.ones(part.owners.size if rows is None else rows.size, np.bool_)
    if part.live_until is not None:
        live &= (part.live_until if rows is None else part.live_until[rows]) > now
    gone = ended.rows[ended.until <= now]
    live[gone if rows is None else np.isin(rows, gone)] = False
    return live


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
        shapes = _Shapes(owners, query_ranges(self._space.grid, bounds), None, None)
        return shapes, np.zeros(segment.size, np.bool_)

    def _count(self, shapes: _Shapes, before: NDArray[np.bool_], live: NDArray[np.bool_]) -> None:
        for sign, changed in ((1, live & ~before), (-1, before & ~live)):
            if changed.any():
                self._histogram.add(shapes.ranges[changed[shapes.owners]], sign)
