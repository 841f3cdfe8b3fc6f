"""AQWA's statistics, the baseline of TrioStat: numbers for every cell of the whole grid.

One number per cell counts points, and an Euler histogram of four more counts queries. They give
the cost of any rectangle, not only of the parts of a partition, but the coordinator must collect
all of them in each round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roost.workload import CellCounts, EulerHistogram
from roost.workload.histogram import CORNERS, sum_from_corner

NUMBERS_PER_CELL = 1 + CORNERS


class AqwaStats:
    """Counts the points and queries of every cell of a grid."""

    def __init__(self, columns: int, rows: int) -> None:
        self.queries = EulerHistogram(columns, rows)
        self.points = np.zeros((rows, columns), np.int32)
        self._sums = np.zeros((rows + 1, columns + 1), np.int64)

    def add_cells(self, counts: CellCounts) -> None:
        """Count points."""
        self.points.reshape(-1)[counts.cells] += counts.counts.astype(np.int32)

    def add_queries(self, ranges: NDArray[np.int32], sign: int = 1) -> None:
        """Count registered queries, or subtract terminated ones with sign -1."""
        self.queries.add(ranges, sign)

    def count_points(self, column0: int, row0: int, column1: int, row1: int) -> int:
        """Count the points of a half-open rectangle of cells."""
        sum_from_corner(self.points, self._sums)
        sums = self._sums
        high = sums[row1, column1] - sums[row1, column0]
        return int(high - sums[row0, column1] + sums[row0, column0])

    def cost(self, column0: int, row0: int, column1: int, row1: int) -> float:
        """Return the cost of a half-open rectangle of cells: its points times its queries."""
        points = self.count_points(column0, row0, column1, row1)
        return float(points) * self.queries.count(column0, row0, column1, row1)

    @property
    def nbytes(self) -> int:
        """Size in bytes: five counters per cell, and five prefix sums."""
        return int(self.points.nbytes + self._sums.nbytes + self.queries.nbytes)

    @property
    def bytes_per_round(self) -> int:
        """Bytes that the machines send each round: all counters."""
        return NUMBERS_PER_CELL * self.points.nbytes
