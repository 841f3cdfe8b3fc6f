"""Read ahead what a machine will need of an index: the posting lists of the cells it was given.

Segments are mapped, so a list that was never used is still on the disk, perhaps of another host.
A machine that is given a part of space reads its lists before points come, and can say what that
took. Lists lie along a curve, so those of a rectangle are a few runs of neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.boxes import BoxPostings
from roost.kernel.cells import LEVELS, IndexGrid, find_cell, locate, morton, squeeze
from roost.kernel.index import Index
from roost.kernel.shapes import ShapePostings

# Elements between two that are read: never more than a page of memory apart.
STRIDE = 512


@njit(cache=True, nogil=True)
def _within(
    bounds: NDArray[np.float64], edges_x: NDArray[np.float64], edges_y: NDArray[np.float64]
) -> NDArray[np.int64]:  # pragma: no cover - compiled
    """Fine cells that rectangles touch, inclusive."""
    found = np.empty((bounds.shape[0], 4), np.int64)
    for k in range(bounds.shape[0]):
        found[k, 0] = locate(bounds[k, 0], edges_x)
        found[k, 1] = locate(bounds[k, 1], edges_y)
        found[k, 2] = locate(bounds[k, 2], edges_x)
        found[k, 3] = locate(bounds[k, 3], edges_y)
    return found


@njit(cache=True, nogil=True)
def _touch(
    level: int,
    first: int,
    last: int,
    cells: NDArray[np.uint32],
    starts: NDArray[np.int64],
    within: NDArray[np.int64],
    wide: NDArray[Any],
    narrow: Any,
    seen: NDArray[np.uint8],
) -> tuple[int, np.int64]:  # pragma: no cover - compiled
    """Read the lists of a level's cells that lie in some rectangle; returns how many postings."""
    postings = 0
    sink = np.int64(0)
    for k in range(within.shape[0]):
        column0, row0 = within[k, 0] >> level, within[k, 1] >> level
        column1, row1 = within[k, 2] >> level, within[k, 3] >> level
        # Codes grow with columns and with rows, so the corners' codes enclose the rectangle's.
        at = find_cell(cells, morton(column0, row0), first, last)
        top = morton(column1, row1)
        while at < last and cells[at] <= top:
            column, row = squeeze(cells[at]), squeeze(cells[at] >> 1)
            if column0 <= column <= column1 and row0 <= row <= row1 and not seen[at]:
                seen[at] = 1
                begin, end = starts[at], starts[at + 1]
                for place in range(begin, end, STRIDE):
                    sink ^= np.int64(wide[place])
                    for values in narrow:
                        sink ^= np.int64(values[place])
                postings += end - begin
            at += 1
    return postings, sink


def preload(index: Index, bounds: NDArray[np.float64]) -> int:
    """Read the lists of some rectangles ``x0, y0, x1, y1``; returns their size in bytes.

    Parameters
    ----------
    index
        Whose lists.
    bounds
        Rows of coordinates, which may be infinite where a rectangle has no end.
    """
    grid: IndexGrid = index.grid
    reach = np.clip(
        bounds,
        [grid.edges_x[0], grid.edges_y[0], grid.edges_x[0], grid.edges_y[0]],
        [grid.edges_x[-1], grid.edges_y[-1], grid.edges_x[-1], grid.edges_y[-1]],
    )
    within = _within(reach, grid.edges_x, grid.edges_y)
    return sum(
        _read(postings, within)
        for member in index.members
        for postings in (member.segment.box_postings, member.segment.shape_postings)
        if postings is not None
    )


def _read(postings: BoxPostings | ShapePostings, within: NDArray[np.int64]) -> int:
    seen = np.zeros(postings.cells.size, np.uint8)
    wide: NDArray[Any]
    narrow: tuple[NDArray[Any], ...]
    if isinstance(postings, BoxPostings):
        wide = postings.slots
        narrow = (postings.low_x, postings.high_x, postings.low_y, postings.high_y)
        width = wide.itemsize + sum(values.itemsize for values in narrow)
    else:
        wide = postings.postings
        narrow = (wide, wide, wide, wide)
        width = wide.itemsize
    size = 0
    for level in range(LEVELS):
        first, last = int(postings.level_start[level]), int(postings.level_start[level + 1])
        if first < last:
            cells, starts = postings.cells, postings.starts
            count, _ = _touch(level, first, last, cells, starts, within, wide, narrow, seen)
            size += count * width
    return size
