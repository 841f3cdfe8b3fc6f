"""Counts of points and queries by cell: the input of all statistics.

A machine counts the cells of its points into a dense table that it keeps between batches, and
extracts only the cells it touched. The size of its report therefore depends on the number of cells
with points, not on the size of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.model.space import Grid, locate_axis
from roost.workload.loops import BLOCK, count_cells, mark_corners, sum_up, take_cells


@dataclass(frozen=True, eq=False)
class CellCounts:
    """Points per cell, for cells with points.

    Parameters
    ----------
    cells
        Row-major cell numbers, strictly ascending.
    counts
        Points of each.
    """

    cells: NDArray[np.int32]
    counts: NDArray[np.int64]

    @property
    def points(self) -> int:
        """Total number of points."""
        return int(self.counts.sum())

    def dense(self, size: int) -> NDArray[np.float64]:
        """Return the points of the first ``size`` cells, zeros included."""
        table = np.zeros(size)
        table[self.cells] = self.counts
        return table

    @classmethod
    def joined(cls, parts: Iterable[CellCounts]) -> CellCounts:
        """Sum several counts.

        Examples
        --------
        >>> one = CellCounts(np.array([2, 5], np.int32), np.array([1, 1]))
        >>> two = CellCounts(np.array([5, 7], np.int32), np.array([3, 4]))
        >>> CellCounts.joined([one, two]).counts.tolist()
        [1, 4, 4]
        """
        kept = [part for part in parts if part.cells.size]
        if not kept:
            return cls(np.empty(0, np.int32), np.empty(0, np.int64))
        cells = np.concatenate([part.cells for part in kept])
        counts = np.concatenate([part.counts for part in kept])
        # The parts are sorted runs, which a stable sort merges.
        order = np.argsort(cells, kind="stable")
        cells = cells[order]
        first = np.flatnonzero(np.concatenate([[True], cells[1:] != cells[:-1]]))
        return cls(cells[first], np.add.reduceat(counts[order], first))


class CellCounter:
    """Counts points by cell, batch after batch, without touching cells without points.

    Parameters
    ----------
    size
        Number of cells of the grid.

    Examples
    --------
    >>> counter = CellCounter(100)
    >>> counter.add(np.array([7, 3, 7], np.int32))
    >>> taken = counter.take()
    >>> taken.cells.tolist(), taken.counts.tolist()
    ([3, 7], [1, 2])
    """

    def __init__(self, size: int) -> None:
        words = -(-size // (8 * BLOCK))
        self._size = size
        # The operating system allocates pages of zeros only when they are written.
        self._counts = np.zeros(words * 8 * BLOCK, np.int32)
        self._marks = np.zeros(words * 8, np.uint8)
        self._words = self._marks.view(np.uint64)
        self._points = 0

    def add(self, cells: NDArray[np.int32]) -> None:
        """Count the cell of each point."""
        self._points += cells.size
        count_cells(cells, self._size, self._counts, self._marks)

    def take(self) -> CellCounts:
        """Return the counts since the last call, and reset them."""
        most = min(self._points, int(np.count_nonzero(self._marks)) * BLOCK)
        cells = np.empty(most, np.int32)
        counts = np.empty(most, np.int64)
        taken = take_cells(self._counts, self._marks, self._words, cells, counts)
        self._points = 0
        return CellCounts(cells[:taken].copy(), counts[:taken].copy())


def query_ranges(grid: Grid, boxes: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the cells that boxes touch, as inclusive ``column0, row0, column1, row1``.

    Examples
    --------
    >>> from roost.model.space import Rect
    >>> grid = Grid(Rect(0, 0, 10, 10), 10, 10)
    >>> query_ranges(grid, np.array([[2.5, 0.0, 4.0, 99.0]])).tolist()
    [[2, 0, 4, 9]]
    """
    ranges = np.empty((boxes.shape[0], 4), np.int32)
    for k, edges in enumerate((grid.edges_x, grid.edges_y, grid.edges_x, grid.edges_y)):
        ranges[:, k] = locate_axis(boxes[:, k], edges)
    return ranges


def overlap_counts(
    columns: int,
    rows: int,
    ranges: NDArray[np.int32],
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Count the queries over each cell, as a table of rows by columns.

    Parameters
    ----------
    columns, rows
        Size of the grid.
    ranges
        Inclusive ranges of cells, clipped to the grid.
    weights
        Weight of each query; 1 by default.

    Examples
    --------
    >>> overlap_counts(3, 2, np.array([[0, 0, 1, 1], [1, 0, 2, 0]], np.int32)).tolist()
    [[1.0, 2.0, 1.0], [1.0, 1.0, 0.0]]
    """
    marks = np.zeros((rows + 1, columns + 1))
    mark_corners(ranges, np.empty(0) if weights is None else weights, marks)
    sum_up(marks)
    counts: NDArray[np.float64] = np.ascontiguousarray(marks[:-1, :-1])
    return counts
