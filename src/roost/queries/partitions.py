"""Queries by cell: the queries of a partition, and a histogram of all live queries.

Queries are mapped files that every machine can read, so they are not copied when a partition moves:
its new machine reads the lists of its cells (:mod:`roost.kernel.preload`). The statistics of a
partition are computed from the queries whose range overlaps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
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
from roost.storage.files import Files
from roost.workload import EulerHistogram, query_ranges

SEGMENTS_CACHED = 16
PARTS_CACHED = 4096


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


@lru_cache(maxsize=SEGMENTS_CACHED)
def _mapped(files: Files, file: str) -> Segment:
    return unpack(files.map(file, sparse=True))


@lru_cache(maxsize=PARTS_CACHED)
def _part(files: Files, file: str, partition: Partition, space: Space) -> _Shapes:
    segment = _mapped(files, file)
    x0, y0, x1, y1 = bounds_of(partition, space)
    near = slots_near(segment, np.array([[x0, y0, x1, y1]]), IndexGrid.over(space.bounds))
    owners, bounds = segment.bounds(space, near)
    # The edges of a cell decide which cell a coordinate is in, so this is exact.
    across = (bounds[:, 2] >= x0) & (bounds[:, 0] < x1)
    rows = np.flatnonzero(across & (bounds[:, 3] >= y0) & (bounds[:, 1] < y1))
    owners = owners[rows]
    until, created = (
        None if column is None else column[owners]
        for column in (segment.live_until, segment.created_position)
    )
    return _Shapes(owners, query_ranges(space.grid, bounds[rows]), until, created)


class LiveRanges(NamedTuple):
    """The cells of live queries, and which of them were registered since a log position."""

    ranges: NDArray[np.int32]
    received: NDArray[np.bool_]


def live_ranges(
    files: Files,
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
        part = _part(files, ref.file, area, space)
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
