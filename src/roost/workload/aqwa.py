"""AQWA's statistics, which TrioStat is compared with: numbers for every cell of the whole grid.

One number a cell counts points; four more, an Euler histogram, count queries so that one over
several cells is not counted several times. They know any rectangle, not only cuts of a partition,
but each round all of them have to come together in one place.

The four are how many queries have their low-left, low-right, high-left and high-right corner in
the cell. A query misses a rectangle when it ends before it or starts after it, along one axis or
both, so by inclusion and exclusion four sums over corners count those that do not miss it. A
query changes four numbers, however large it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.workload.cells import CellCounts

# Corners by (column, row) of a range: low-left, low-right, high-left, high-right.
CORNERS = 4
NUMBERS_PER_CELL = 1 + CORNERS


@njit(cache=True, nogil=True)
def _mark(
    ranges: NDArray[np.int32], sign: int, corners: NDArray[np.int32]
) -> None:  # pragma: no cover - compiled
    rows, columns = corners.shape[1], corners.shape[2]
    for i in range(ranges.shape[0]):
        left, right = max(ranges[i, 0], 0), min(ranges[i, 2], columns - 1)
        low, high = max(ranges[i, 1], 0), min(ranges[i, 3], rows - 1)
        if left > right or low > high:
            continue
        corners[0, low, left] += sign
        corners[1, low, right] += sign
        corners[2, high, left] += sign
        corners[3, high, right] += sign


@njit(cache=True, nogil=True)
def _sum_up(values: NDArray[np.int32], sums: NDArray[Any]) -> None:  # pragma: no cover - compiled
    """Sum from the first corner on; line and column 0 of the sums stay zero."""
    for row in range(values.shape[0]):
        line = 0
        for column in range(values.shape[1]):
            line += values[row, column]
            sums[row + 1, column + 1] = sums[row, column + 1] + line


@njit(cache=True, nogil=True)
def _count_many(
    rects: NDArray[np.int64], sums: NDArray[np.int32], out: NDArray[np.int64]
) -> None:  # pragma: no cover - compiled
    for i in range(rects.shape[0]):
        left, low, right, high = rects[i, 0], rects[i, 1], rects[i, 2], rects[i, 3]
        if left < right and low < high:
            out[i] = (
                np.int64(sums[0, high, right])
                - sums[1, high, left]
                - sums[2, low, right]
                + sums[3, low, left]
            )


class EulerHistogram:
    """Counts the queries over any rectangle of cells, exactly.

    Parameters
    ----------
    columns, rows
        Size of the grid.

    Examples
    --------
    >>> histogram = EulerHistogram(10, 10)
    >>> histogram.add(np.array([[2, 2, 5, 3], [0, 0, 9, 9]], np.int32))
    >>> histogram.count(5, 0, 10, 10), histogram.count(6, 0, 10, 10)
    (2, 1)
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self._corners = np.zeros((CORNERS, rows, columns), np.int32)
        self._sums = np.zeros((CORNERS, rows + 1, columns + 1), np.int32)
        self._settled = True

    def add(self, ranges: NDArray[np.int32], sign: int = 1) -> None:
        """Count queries by their inclusive ranges of cells; -1 takes them out again."""
        _mark(ranges, sign, self._corners)
        self._settled = False

    def settle(self) -> NDArray[np.int32]:
        """Bring the sums up to date; counting does so by itself when it must.

        Returns
        -------
        numpy.ndarray
            The sums of the four corners, for compiled code that counts by itself.
        """
        if not self._settled:
            for corner in range(CORNERS):
                _sum_up(self._corners[corner], self._sums[corner])
            self._settled = True
        return self._sums

    def count(self, column0: int, row0: int, column1: int, row1: int) -> int:
        """Count the queries that overlap a half-open rectangle of cells."""
        if column0 >= column1 or row0 >= row1:
            return 0
        self.settle()
        sums = self._sums
        return int(
            int(sums[0, row1, column1])
            - int(sums[1, row1, column0])
            - int(sums[2, row0, column1])
            + int(sums[3, row0, column0])
        )

    def count_many(self, rects: NDArray[Any]) -> NDArray[np.int64]:
        """Do so for several rectangles, rows of ``column0, row0, column1, row1``."""
        self.settle()
        counts = np.zeros(len(rects), np.int64)
        _count_many(np.ascontiguousarray(rects, np.int64), self._sums, counts)
        return counts

    def per_cell(self) -> NDArray[np.float64]:
        """Count the queries over each cell, as a table of rows by columns."""
        self.settle()
        sums = self._sums
        over: NDArray[np.float64] = (
            sums[0, 1:, 1:].astype(np.float64)
            - sums[1, 1:, :-1]
            - sums[2, :-1, 1:]
            + sums[3, :-1, :-1]
        )
        return over

    @property
    def nbytes(self) -> int:
        """Memory of the corners and of their sums."""
        return int(self._corners.nbytes + self._sums.nbytes)


class AqwaStats:
    """Points and queries of every cell of a grid, and the cost of any rectangle.

    Parameters
    ----------
    columns, rows
        Size of the grid.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.queries = EulerHistogram(columns, rows)
        self.points = np.zeros((rows, columns), np.int32)
        self._sums = np.zeros((rows + 1, columns + 1), np.int64)
        self._settled = True

    def add_cells(self, counts: CellCounts) -> None:
        """Count points."""
        self.points.reshape(-1)[counts.cells] += counts.counts.astype(np.int32)
        self._settled = False

    def add_queries(self, ranges: NDArray[np.int32], sign: int = 1) -> None:
        """Count queries that begin, or with -1 take out those that end."""
        self.queries.add(ranges, sign)

    def count_points(self, column0: int, row0: int, column1: int, row1: int) -> int:
        """Count the points of a half-open rectangle of cells."""
        if not self._settled:
            _sum_up(self.points, self._sums)
            self._settled = True
        sums = self._sums
        high = sums[row1, column1] - sums[row1, column0]
        return int(high - sums[row0, column1] + sums[row0, column0])

    def cost(self, column0: int, row0: int, column1: int, row1: int) -> float:
        """Cost of a half-open rectangle of cells: its points times its queries."""
        points = self.count_points(column0, row0, column1, row1)
        return float(points) * self.queries.count(column0, row0, column1, row1)

    @property
    def nbytes(self) -> int:
        """Memory: five numbers a cell to count with, and five to answer from."""
        return int(self.points.nbytes + self._sums.nbytes + self.queries.nbytes)

    @property
    def bytes_per_round(self) -> int:
        """What the machines send each round: every number that they count with."""
        return NUMBERS_PER_CELL * self.points.nbytes
