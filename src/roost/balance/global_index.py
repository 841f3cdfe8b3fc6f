"""Global index: the partition of a cell, and the partitions that a rectangle of cells overlaps.

A table with one number per cell gives the first in constant time. For the second, partitions are
much larger than cells, so the search steps from border to border instead of visiting every cell.

The papers' ``queryOverlap`` does so, too, but is incorrect: from a visited cell it continues only
right of the partition in the same row and below it in the same column, and it stops at a visited
partition even if it was visited from a cell in another row. The smallest plan with a miss has three
columns and two rows, with one partition in the middle column::

    A B C
    D B E

From A, the search pushes the cells of B (right) and D (below). D is popped first and leads to B in
the *second* row, which leads to E. When B is popped for the first row it counts as visited, so C is
never found. About a third of all divisions of a 4 x 4 grid into rectangles have such a query.

The search here uses *corners*. Clipped to the query, every partition has one first corner, and the
cell left of that corner belongs to exactly one partition (or lies outside the query). So the search
walks once down the query's left side, and down the right border of each partition it finds,
stepping over whole partitions; a partition whose first corner is there is new. Each partition is
found exactly once, from the left, so no set of visited partitions is needed.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.balance.plan import Partition, Plan
from roost.model.arrays import Ints

Places = NDArray[np.int32]


class GlobalIndex:
    """A plan with a table of its cells.

    Examples
    --------
    >>> halves = (Partition(7, 0, 0, 2, 2, (0,)), Partition(8, 2, 0, 4, 2, (1,)))
    >>> index = GlobalIndex(Plan(0, 4, 2, 2, halves, 9))
    >>> index.partition_at(3, 1).partition_id
    8
    >>> [p.partition_id for p in index.query_overlap(1, 0, 2, 0)]
    [7, 8]
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._table = plan.cell_table()
        self._rects = plan.rects()

    def partition_at(self, column: int, row: int) -> Partition:
        """Return the partition of a cell."""
        return self.plan.partitions[int(self._table[row, column])]

    def query_overlap(self, column0: int, row0: int, column1: int, row1: int) -> list[Partition]:
        """Return the partitions that an inclusive range of cells overlaps, each once."""
        ranges = np.array([[column0, row0, column1, row1]], np.int32)
        return [self.plan.partitions[place] for place in self.overlaps_many(ranges)[1]]

    def overlaps_many(self, ranges: NDArray[np.int32]) -> tuple[Places, Places]:
        """Return pairs of query and partition for many inclusive ranges of cells.

        ``ranges`` has rows of ``column0, row0, column1, row1``, within the grid. The pairs are
        indices into ``ranges``, ascending, and into ``plan.partitions``.
        """
        inside = (ranges[:, :2] >= 0) & (ranges[:, :2] <= ranges[:, 2:])
        inside &= ranges[:, 2:] < (self.plan.columns, self.plan.rows)
        assert bool(inside.all()), "a range of cells is outside the grid"
        return find_overlaps(self._table, self._rects, ranges + np.array([0, 0, 1, 1]))


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def find_overlaps(table: Places, old: Ints, rects: Ints) -> tuple[Places, Places]:
    """Return pairs of indices into ``rects`` and ``old`` that overlap, ascending in the first.

    ``old`` covers the grid, and ``table`` has the index in ``old`` of each cell.
    """
    new_at = np.empty(max(2 * rects.shape[0], 16), np.int32)
    old_at = np.empty(new_at.size, np.int32)
    size = 0
    for i in range(rects.shape[0]):
        column0, row0, column1, row1 = rects[i, 0], rects[i, 1], rects[i, 2], rects[i, 3]
        # The partitions found for this rectangle are also the work list: `walked` of them are
        # done; the index before the first stands for the rectangle's own left side.
        begin, walked = size, size - 1
        while walked < size:
            column, row, bottom = column0, row0, row1
            if walked >= begin:
                k = old_at[walked]
                column, row, bottom = old[k, 2], max(old[k, 1], row0), min(old[k, 3], row1)
            walked += 1
            if column >= column1:
                continue
            while row < bottom:
                k = table[row, column]
                if max(old[k, 1], row0) == row:
                    if size == old_at.size:
                        new_at = np.concatenate((new_at, np.empty_like(new_at)))
                        old_at = np.concatenate((old_at, np.empty_like(old_at)))
                    new_at[size] = i
                    old_at[size] = k
                    size += 1
                row = old[k, 3]
    return new_at[:size], old_at[:size]
