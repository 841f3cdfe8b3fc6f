"""Cells of the matching index: a quadtree of fine cells, addressed by Morton codes.

The index has its own grid, finer than the grid of the plan, so the partitioning of the space never
affects matching speed. Level 0 has ``SIDE`` cells per side; a cell of level ``l`` is a square of
``2**l`` fine cells. Sorting points by Morton code makes the points of any cell of any level
contiguous, so each posting list is fetched once per block and stays in the L1 cache while its
points are tested.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import Floats, frozen
from roost.model.space import Rect, axis_edges

# Inside compiled code every integer is an int64, whatever its type outside.
Whole = int | np.int64

BITS = 12
SIDE = 1 << BITS
LEVELS = BITS + 1

# A position inside a cell has 16 bits. Points never get the two extreme values, which mean "the
# query extends beyond this cell on that side".
QUANT_LOW = -32768
QUANT_HIGH = 32767
QUANT_STEPS = 65533.0


class IndexGrid(NamedTuple):
    """Edges of the fine cells of the index."""

    edges_x: Floats
    edges_y: Floats

    @classmethod
    @lru_cache(maxsize=8)
    def over(cls, bounds: Rect) -> IndexGrid:
        """Build the index grid of a rectangle, once in a process; it is not changed."""
        return cls(axis_edges(bounds.x0, bounds.x1, SIDE), axis_edges(bounds.y0, bounds.y1, SIDE))


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def locate(value: float, edges: Floats) -> int:
    """Return the cell of a coordinate on one axis; the outer cells are unbounded."""
    last = edges.size - 2
    low = edges[0]
    guess = (value - low) * ((last + 1) / (edges[last + 1] - low))
    cell = int(min(max(guess, 0.0), float(last)))
    # The product may be off by one cell; the edges decide.
    if cell > 0 and value < edges[cell]:
        cell -= 1
    elif cell < last and value >= edges[cell + 1]:
        cell += 1
    return cell


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def spread(v: Whole) -> Whole:
    """Insert a zero bit between the bits of a number of at most 16 bits."""
    v = (v | (v << 8)) & 0x00FF00FF
    v = (v | (v << 4)) & 0x0F0F0F0F
    v = (v | (v << 2)) & 0x33333333
    return (v | (v << 1)) & 0x55555555


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def morton(column: Whole, row: Whole) -> Whole:
    """Interleave a column and a row."""
    return spread(column) | (spread(row) << 1)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def squeeze(v: Whole) -> Whole:
    """Undo :func:`spread`."""
    v &= 0x55555555
    v = (v | (v >> 1)) & 0x33333333
    v = (v | (v >> 2)) & 0x0F0F0F0F
    v = (v | (v >> 4)) & 0x00FF00FF
    return (v | (v >> 8)) & 0x0000FFFF


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def posting_key(level: Whole, cell: Whole, item: Whole) -> np.uint64:
    """Combine level, Morton code and item; sorting the keys orders the postings."""
    head = (np.uint64(level) << np.uint64(24)) | np.uint64(cell)
    return (head << np.uint64(32)) | np.uint64(item)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def quantise(value: float, edges: Floats, cell: Whole, level: Whole) -> np.int16:
    """Return the 16-bit position of a coordinate inside a cell, monotone in the coordinate.

    Different positions order the coordinates; where positions are equal, the caller must compare
    the coordinates themselves.
    """
    low = edges[cell << level]
    high = edges[(cell + 1) << level]
    steps = (value - low) * (QUANT_STEPS / (high - low))
    return np.int16(int(min(max(steps, 0.0), QUANT_STEPS)) + QUANT_LOW + 1)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def sort_codes(codes: NDArray[np.uint32], order: NDArray[np.int32]) -> None:
    """Fill ``order`` with the stable permutation that sorts 24-bit codes (two radix passes)."""
    n = codes.size
    digits = 1 << BITS
    mask = digits - 1
    counts = np.zeros((2, digits + 1), np.int64)
    for i in range(n):
        code = codes[i]
        counts[0, (code & mask) + 1] += 1
        counts[1, (code >> BITS) + 1] += 1
    for d in range(digits):
        counts[0, d + 1] += counts[0, d]
        counts[1, d + 1] += counts[1, d]
    first = np.empty(n, np.int32)
    for i in range(n):
        d = codes[i] & mask
        first[counts[0, d]] = i
        counts[0, d] += 1
    for k in range(n):
        i = first[k]
        d = codes[i] >> BITS
        order[counts[1, d]] = i
        counts[1, d] += 1


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def code_points(
    x: Floats, y: Floats, edges_x: Floats, edges_y: Floats, codes: NDArray[np.uint32]
) -> None:
    """Compute the Morton code of the fine cell of each point."""
    for i in range(x.size):
        codes[i] = morton(locate(x[i], edges_x), locate(y[i], edges_y))


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def all_within(x: Floats, y: Floats, x0: float, y0: float, x1: float, y1: float) -> bool:
    """Return whether every point is a number inside a closed rectangle, in one pass."""
    good = 0
    for i in range(x.size):
        good += (x0 <= x[i]) & (x[i] <= x1) & (y0 <= y[i]) & (y[i] <= y1)
    return good == x.size


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def locate_cells(x: Floats, y: Floats, edges_x: Floats, edges_y: Floats) -> NDArray[np.int32]:
    """Return the row-major cell of each point in any grid; compiled form of ``Grid.locate``."""
    columns = edges_x.size - 1
    cells = np.empty(x.size, np.int32)
    for i in range(x.size):
        cells[i] = locate(y[i], edges_y) * columns + locate(x[i], edges_x)
    return cells


class SortedPoints(NamedTuple):
    """Points of a block in Morton order; ``order[k]`` is the block row of the k-th point."""

    x: Floats
    y: Floats
    codes: NDArray[np.uint32]
    order: NDArray[np.int32]


def sort_points(x: Floats, y: Floats, grid: IndexGrid) -> SortedPoints:
    """Sort points by the Morton codes of their cells."""
    codes = np.empty(x.size, np.uint32)
    order = np.empty(x.size, np.int32)
    code_points(frozen(x), frozen(y), grid.edges_x, grid.edges_y, codes)
    sort_codes(codes, order)
    return SortedPoints(x[order], y[order], codes[order], order)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def find_cell(cells: NDArray[np.integer], cell: Whole, start: Whole, stop: Whole) -> Whole:
    """Return the first index in ``cells[start:stop]`` (ascending) that is not below ``cell``.

    Gallops from ``start``: points and cells have the same order, so the result is near.
    """
    step = 1
    low = start
    high = start
    while high < stop and cells[high] < cell:
        low = high + 1
        high += step
        step *= 2
    high = min(high, stop)
    while low < high:
        middle = (low + high) >> 1
        if cells[middle] < cell:
            low = middle + 1
        else:
            high = middle
    return low
