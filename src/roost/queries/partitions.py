"""Queries of a partition: those whose range overlaps it.

Queries are mapped files that every machine can read, so they are not copied when a partition moves:
its new machine reads the lists of its cells (:mod:`roost.kernel.preload`). The statistics of a
partition are computed from its queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition
from roost.kernel import Segment, unpack
from roost.model.records import TIME_MAX
from roost.model.space import Space
from roost.queries.live import load_ended
from roost.queries.versions import SegmentRef
from roost.storage.files import Files
from roost.workload import query_ranges

SEGMENTS_KEPT = 16
PARTS_KEPT = 4096


def bounds_of(partition: Partition, space: Space) -> tuple[float, float, float, float]:
    """Return the half-open bounds of a partition, infinite at the edge of the grid."""
    grid = space.grid
    x0 = -np.inf if partition.column0 == 0 else float(grid.edges_x[partition.column0])
    y0 = -np.inf if partition.row0 == 0 else float(grid.edges_y[partition.row0])
    x1 = np.inf if partition.column1 == grid.columns else float(grid.edges_x[partition.column1])
    y1 = np.inf if partition.row1 == grid.rows else float(grid.edges_y[partition.row1])
    return x0, y0, x1, y1


@dataclass(frozen=True, eq=False)
class _Whole:
    """A segment with the box and the inclusive cell range of each shape."""

    segment: Segment
    owners: NDArray[np.int64]
    bounds: NDArray[np.float64]
    ranges: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Part:
    """Slots and ranges of a segment in a partition, one row for each shape."""

    owners: NDArray[np.int64]
    ranges: NDArray[np.int32]
    live_until: NDArray[np.int64] | None


@lru_cache(maxsize=SEGMENTS_KEPT)
def _whole(files: Files, file: str, space: Space) -> _Whole:
    segment = unpack(files.map(file))
    owners, bounds = segment.bounds(space)
    return _Whole(segment, owners, bounds, query_ranges(space.grid, bounds))


@lru_cache(maxsize=PARTS_KEPT)
def _part(files: Files, file: str, partition: Partition, space: Space) -> _Part:
    whole = _whole(files, file, space)
    x0, y0, x1, y1 = bounds_of(partition, space)
    # The edges of a cell decide which cell a coordinate is in, so this is exact.
    across = (whole.bounds[:, 2] >= x0) & (whole.bounds[:, 0] < x1)
    rows = np.flatnonzero(across & (whole.bounds[:, 3] >= y0) & (whole.bounds[:, 1] < y1))
    owners = whole.owners[rows]
    until = whole.segment.live_until
    return _Part(owners, whole.ranges[rows], None if until is None else until[owners])


def slots_in(
    files: Files, refs: tuple[SegmentRef, ...], partition: Partition, space: Space
) -> dict[str, NDArray[np.int64]]:
    """Return the slots of each segment in a partition, including terminated ones."""
    place = replace(partition, machines=(), parents=())
    return {ref.file: np.unique(_part(files, ref.file, place, space).owners) for ref in refs}


def live_ranges(
    files: Files, refs: tuple[SegmentRef, ...], partition: Partition, space: Space, now: int
) -> NDArray[np.int32]:
    """Return the cells of the queries in a partition that are live at an event time."""
    place = replace(partition, machines=(), parents=())
    found = [np.empty((0, 4), np.int32)]
    for ref in refs:
        part = _part(files, ref.file, place, space)
        if part.live_until is None and ref.ended is None:
            found.append(part.ranges)
            continue
        until = np.full(part.owners.size, TIME_MAX) if part.live_until is None else part.live_until
        slots, ends = load_ended(files, ref)
        live = (until > now) & ~np.isin(part.owners, slots[ends <= now])
        found.append(part.ranges[live])
    return np.concatenate(found)
