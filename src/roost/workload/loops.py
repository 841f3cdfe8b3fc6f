"""Compiled loops of the statistics.

The numbers of a partition are one flat array: eight lines with a number per row, then eight lines
with a number per column. The first five lines are of closed rounds, the last five collect the open
round: points, registered queries, terminated queries.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import find_cell

N, Q, R, SPAN, PRE_SPAN, N_NEW, Q_NEW, SPAN_NEW, Q_GONE, SPAN_GONE = range(10)
LINES = 10
# Cells that share one mark "has counts": their counts fill one cache line.
BLOCK_BITS = 4
BLOCK = 1 << BLOCK_BITS


@njit(cache=True, nogil=True)
def count_cells(
    cells: NDArray[np.int32], size: int, counts: NDArray[np.int32], marks: NDArray[np.uint8]
) -> None:  # pragma: no cover - compiled
    """Count points by cell and mark the blocks with points."""
    for i in range(cells.size):
        cell = cells[i]
        if cell < 0 or cell >= size:
            raise IndexError("a cell is outside the grid")
        counts[cell] += 1
        marks[cell >> BLOCK_BITS] = 1


@njit(cache=True, nogil=True)
def take_cells(
    counts: NDArray[np.int32],
    marks: NDArray[np.uint8],
    words: NDArray[np.uint64],
    out_cells: NDArray[np.int32],
    out_counts: NDArray[np.int64],
) -> int:  # pragma: no cover - compiled
    """Write the counted cells in ascending order and reset them to zero.

    ``words`` is a view of ``marks``, eight at a time: most of a grid has no points.
    """
    written = 0
    for word in range(words.size):
        if words[word] == 0:
            continue
        for block in range(8 * word, 8 * word + 8):
            if marks[block] == 0:
                continue
            marks[block] = 0
            for cell in range(block * BLOCK, (block + 1) * BLOCK):
                if counts[cell]:
                    out_cells[written] = cell
                    out_counts[written] = counts[cell]
                    counts[cell] = 0
                    written += 1
    return written


@njit(cache=True, nogil=True)
def collect_cells(
    cells: NDArray[np.int32],
    counts: NDArray[np.int64],
    grid_columns: int,
    bounds: tuple[int, int, int, int],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Add the counts of the cells in a rectangle to the collectors of its rows and columns."""
    column0, row0, column1, row1 = bounds
    at = find_cell(cells, row0 * grid_columns + column0, 0, cells.size)
    while at < cells.size:
        row = cells[at] // grid_columns
        if row >= row1:
            break
        begin = row * grid_columns
        if cells[at] < begin + column0:
            at = find_cell(cells, begin + column0, at, cells.size)
            continue
        inside = np.int64(0)
        end = begin + column1
        while at < cells.size and cells[at] < end:
            columns[N_NEW, cells[at] - begin - column0] += counts[at]
            inside += counts[at]
            at += 1
        rows[N_NEW, row - row0] += inside
        at = find_cell(cells, begin + grid_columns + column0, at, cells.size)


@njit(cache=True, nogil=True)
def count_ranges(
    ranges: NDArray[np.int32],
    sign: float,
    bounds: tuple[int, int, int, int],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Add ranges, clipped to a rectangle, to the lines of starts (0) and spans (1) by axis."""
    column0, row0, column1, row1 = bounds
    row_marks = np.zeros(rows.shape[1] + 1)
    column_marks = np.zeros(columns.shape[1] + 1)
    for i in range(ranges.shape[0]):
        left, right = max(ranges[i, 0], column0), min(ranges[i, 2], column1 - 1)
        low, high = max(ranges[i, 1], row0), min(ranges[i, 3], row1 - 1)
        if left > right or low > high:
            continue
        columns[0, left - column0] += sign
        column_marks[left - column0 + 1] += sign
        column_marks[right - column0 + 1] -= sign
        rows[0, low - row0] += sign
        row_marks[low - row0 + 1] += sign
        row_marks[high - row0 + 1] -= sign
    rows[1] += np.cumsum(row_marks[:-1])
    columns[1] += np.cumsum(column_marks[:-1])


@njit(cache=True, nogil=True)
def change_ranges(
    left: NDArray[np.int32],
    came: NDArray[np.int32],
    received: NDArray[np.bool_],
    bounds: tuple[int, int, int, int],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Collect ranges that left and came; those that came and were not received had left before."""
    count_ranges(left, 1.0, bounds, rows[Q_GONE:], columns[Q_GONE:])
    count_ranges(came[received], 1.0, bounds, rows[Q_NEW:], columns[Q_NEW:])
    count_ranges(came[~received], -1.0, bounds, rows[Q_GONE:], columns[Q_GONE:])


@njit(cache=True, nogil=True)
def close_axis(axis: NDArray[np.float64], fade: float) -> None:  # pragma: no cover - compiled
    """Close a round for one axis, in one pass."""
    points = 0.0
    registered = 0.0
    terminated = 0.0
    for k in range(axis.shape[1]):
        points += axis[N_NEW, k]
        registered += axis[Q_NEW, k]
        terminated += axis[Q_GONE, k]
        axis[N, k] = axis[N, k] * fade + points
        axis[Q, k] += registered - terminated
        axis[R, k] = points + registered
        axis[SPAN, k] += axis[SPAN_NEW, k] - axis[SPAN_GONE, k]
        axis[PRE_SPAN, k] = axis[SPAN_NEW, k]
        axis[N_NEW, k] = 0.0
        axis[Q_NEW, k] = 0.0
        axis[SPAN_NEW, k] = 0.0
        axis[Q_GONE, k] = 0.0
        axis[SPAN_GONE, k] = 0.0


@njit(cache=True, nogil=True)
def close_partition(
    numbers: NDArray[np.float64], rows: int, fade: float
) -> None:  # pragma: no cover - compiled
    """Close a round for a partition, given all its numbers and its number of rows."""
    cut = LINES * rows
    close_axis(numbers[:cut].reshape(LINES, rows), fade)
    close_axis(numbers[cut:].reshape(LINES, numbers.size // LINES - rows), fade)


@njit(cache=True, nogil=True)
def axis_overlap(
    axis: NDArray[np.float64],
) -> tuple[float, float, float]:  # pragma: no cover - compiled
    """Sum the open round: points, queries, and points times the queries over their line."""
    before = points = queries = pairs = 0.0
    for k in range(axis.shape[1]):
        starts = axis[Q, k] - before + axis[Q_NEW, k] - axis[Q_GONE, k]
        before = axis[Q, k]
        spans = axis[SPAN, k] + axis[SPAN_NEW, k] - axis[SPAN_GONE, k]
        points += axis[N_NEW, k]
        queries += starts
        pairs += axis[N_NEW, k] * (starts + spans)
    return points, queries, pairs


@njit(cache=True, nogil=True)
def axis_work(
    axis: NDArray[np.float64],
) -> NDArray[np.float64]:  # pragma: no cover - compiled
    """Sum, up to each line, the objects of the last round times the queries over their line."""
    sums = np.empty(axis.shape[1])
    queries = received = work = 0.0
    for k in range(axis.shape[1]):
        over = axis[Q, k] - queries + axis[SPAN, k]
        work += max((axis[R, k] - received) * over, 0.0)
        queries = axis[Q, k]
        received = axis[R, k]
        sums[k] = work
    return sums
