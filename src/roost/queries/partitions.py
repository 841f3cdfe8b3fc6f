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
from roost.kernel import Segment, unpack
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


@lru_cache(maxsize=SEGMENTS_CACHED)
def _whole(files: Files, file: str, space: Space) -> tuple[_Shapes, NDArray[np.float64]]:
    """Return the shapes of a segment, and their boxes."""
    segment = unpack(files.map(file))
    owners, bounds = segment.bounds(space)
    return _Shapes(owners, query_ranges(space.grid, bounds), segment.live_until), bounds


@lru_cache(maxsize=PARTS_CACHED)
def _part(files: Files, file: str, partition: Partition, space: Space) -> _Shapes:
    whole, bounds = _whole(files, file, space)
    x0, y0, x1, y1 = bounds_of(partition, space)
    # The edges of a cell decide which cell a coordinate is in, so this is exact.
    across = (bounds[:, 2] >= x0) & (bounds[:, 0] < x1)
    rows = np.flatnonzero(across & (bounds[:, 3] >= y0) & (bounds[:, 1] < y1))
    owners = whole.owners[rows]
    until = None if whole.live_until is None else whole.live_until[owners]
    return _Shapes(owners, whole.ranges[rows], until)


def slots_in(
    files: Files, refs: tuple[SegmentRef, ...], partition: Partition, space: Space
) -> dict[str, NDArray[np.int64]]:
    """Return the slots of each segment in a partition, including terminated ones."""
    area = replace(partition, machines=(), parents=())
    return {ref.file: np.unique(_part(files, ref.file, area, space).owners) for ref in refs}


def live_ranges(
    files: Files, refs: tuple[SegmentRef, ...], partition: Partition, space: Space, now: int
) -> NDArray[np.int32]:
    """Return the cells of the queries in a partition that are live at an event time."""
    area = replace(partition, machines=(), parents=())
    found = [np.empty((0, 4), np.int32)]
    for ref in refs:
        part = _part(files, ref.file, area, space)
        if part.live_until is None and ref.ended is None:
            found.append(part.ranges)
            continue
        until = np.full(part.owners.size, TIME_MAX) if part.live_until is None else part.live_until
        slots, ends = load_ended(files, ref)
        live = (until > now) & ~np.isin(part.owners, slots[ends <= now])
        found.append(part.ranges[live])
    return np.concatenate(found)


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
        shapes = _Shapes(owners, query_ranges(self._space.grid, bounds), None)
        return shapes, np.zeros(segment.size, np.bool_)

    def _count(self, shapes: _Shapes, before: NDArray[np.bool_], live: NDArray[np.bool_]) -> None:
        for sign, changed in ((1, live & ~before), (-1, before & ~live)):
            if changed.any():
                self._histogram.add(shapes.ranges[changed[shapes.owners]], sign)
