"""Prefetch of posting lists for the cells that a machine has just been assigned.

Segments are memory-mapped, so a list that was never used is still on disk, perhaps of another
host. A machine that is assigned a partition reads its lists before points arrive, so that the cost
can be measured. Lists are in Z-order, so those of a rectangle form a few contiguous runs.
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

# Elements between two reads, which are at most one memory page apart.
STRIDE = 512


@njit(cache=True, nogil=True)
def _within(
    bounds: NDArray[np.float64], grid: IndexGrid
) -> NDArray[np.int64]:  # pragma: no cover - compiled
    """Return the inclusive range of fine cells that each rectangle touches."""
    found = np.empty((bounds.shape[0], 4), np.int64)
    for k in range(bounds.shape[0]):
        for side in range(4):
            edges = grid.edges_x if side % 2 == 0 else grid.edges_y
            found[k, side] = locate(bounds[k, side], edges)
    return found


@njit(cache=True, nogil=True)
def _touch(
    level: int,
    level_start: NDArray[np.int64],
    cells: NDArray[np.uint32],
    starts: NDArray[np.int64],
    within: NDArray[np.int64],
    wide: NDArray[Any],
    narrow: Any,
    seen: NDArray[np.uint8],
) -> tuple[int, np.int64]:  # pragma: no cover - compiled
    """Read the lists of a level's cells that lie in a rectangle; return the number of postings.

    The second result only keeps the compiler from removing the reads.
    """
    first, last = level_start[level], level_start[level + 1]
    postings = 0
    sink = np.int64(0)
    for k in range(within.shape[0]):
        column0, row0 = within[k, 0] >> level, within[k, 1] >> level
        column1, row1 = within[k, 2] >> level, within[k, 3] >> level
        # Morton codes grow with columns and rows, so the corners' codes bound the rectangle's.
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
    """Read the posting lists of some rectangles and return their size in bytes.

    Parameters
    ----------
    index
        Index to read from.
    bounds
        Rows of ``x0, y0, x1, y1``, infinite where a rectangle is unbounded.
    """
    grid = index.grid
    reach = np.clip(
        bounds,
        [grid.edges_x[0], grid.edges_y[0], grid.edges_x[0], grid.edges_y[0]],
        [grid.edges_x[-1], grid.edges_y[-1], grid.edges_x[-1], grid.edges_y[-1]],
    )
    within = _within(reach, grid)
    return sum(
        _read(postings, within)
        for segment in index.segments
        for postings in (segment.box_postings, segment.shape_postings)
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
    lists = (postings.level_start, postings.cells, postings.starts)
    return width * sum(
        _touch(level, *lists, within, wide, narrow, seen)[0] for level in range(LEVELS)
    )
