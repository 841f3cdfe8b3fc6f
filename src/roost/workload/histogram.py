"""Euler histogram: exact counts of the queries over any rectangle of cells.

Four numbers per cell count the queries whose low-left, low-right, high-left and high-right corner
lies in that cell. A query misses a rectangle if it ends before it or starts after it along an
axis, so by inclusion and exclusion four prefix sums count the queries that do not miss it. Adding
a query changes four numbers, however large it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import frozen

# Corners by (column, row) of a range: low-left, low-right, high-left, high-right.
CORNERS = 4


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
def sum_from_corner(
    values: NDArray[np.int32], sums: NDArray[Any]
) -> None:  # pragma: no cover - compiled
    """Compute prefix sums of a table; row and column 0 of the sums stay zero."""
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
    """Counts the queries over any rectangle of cells of a grid, exactly.

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
        self._current = True
        self._per_cell: NDArray[np.float64] | None = None

    def add(self, ranges: NDArray[np.int32], sign: int = 1) -> None:
        """Add queries by their inclusive ranges of cells, or remove them with sign -1."""
        _mark(ranges, sign, self._corners)
        self._current, self._per_cell = False, None

    def sums(self) -> NDArray[np.int32]:
        """Return the current prefix sums of the four corners, for compiled loops."""
        if not self._current:
            for corner in range(CORNERS):
                sum_from_corner(self._corners[corner], self._sums[corner])
            self._current = True
        return self._sums

    def count(self, column0: int, row0: int, column1: int, row1: int) -> int:
        """Count the queries that overlap a half-open rectangle of cells."""
        return int(self.count_many(np.array([[column0, row0, column1, row1]]))[0])

    def count_many(self, rects: NDArray[Any]) -> NDArray[np.int64]:
        """Count the queries over several rectangles, rows of ``column0, row0, column1, row1``."""
        counts = np.zeros(len(rects), np.int64)
        _count_many(np.ascontiguousarray(rects, np.int64), self.sums(), counts)
        return counts

    def per_cell(self) -> NDArray[np.float64]:
        """Count the queries over each cell, as a table of rows by columns that must not change."""
        if self._per_cell is None:
            sums = self.sums()
            over = sums[0, 1:, 1:].astype(np.float64)
            over -= sums[1, 1:, :-1]
            over -= sums[2, :-1, 1:]
            over += sums[3, :-1, :-1]
            self._per_cell = frozen(over)
        return self._per_cell

    @property
    def nbytes(self) -> int:
        """Size of the corners and their sums in bytes."""
        return int(self._corners.nbytes + self._sums.nbytes)
