"""Counts of points by cell: the input of all statistics.

A machine counts the cells of its points in a dense table that it reuses for each batch, and
extracts only cells with points. So the size of its report does not depend on the size of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.model.space import Grid, locate_axis
from roost.workload.loops import BLOCK, count_cells, take_cells


@dataclass(frozen=True, eq=False)
class CellCounts:
    """Points per cell, for cells with points; ``cells`` are row-major and strictly ascending."""

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
    def of(cls, table: NDArray[np.int64]) -> CellCounts:
        """Return the cells with points of a table of all cells.

        Examples
        --------
        >>> CellCounts.of(np.array([0, 3, 0, 1])).cells.tolist()
        [1, 3]
        """
        cells = np.flatnonzero(table).astype(np.int32)
        return cls(cells, table[cells])

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
        listed = [cls(np.empty(0, np.int32), np.empty(0, np.int64)), *parts]
        cells = np.concatenate([part.cells for part in listed])
        counts = np.concatenate([part.counts for part in listed])
        # The parts are sorted runs, which a stable sort merges.
        order = np.argsort(cells, kind="stable")
        cells = cells[order]
        first = np.flatnonzero(np.diff(cells, prepend=np.int32(-1)))
        return cls(cells[first], np.add.reduceat(counts[order], first))


class CellCounter:
    """Counts the points of each batch by cell, for a grid of ``size`` cells.

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
        if not self._points:
            return CellCounts(np.empty(0, np.int32), np.empty(0, np.int64))
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
