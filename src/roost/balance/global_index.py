"""Global index: the partition of a cell, and the partitions that a query overlaps.

A table with one number per cell gives the first in constant time. For the second, partitions are
much larger than cells, so the search steps from border to border instead of visiting every cell.

The papers' ``queryOverlap`` does so, too, but is incorrect. From a visited cell it continues only
right of the partition in the same row and below it in the same column, and it stops at any visited
partition, even if it visited it from a cell in another row. The smallest plan with a miss is three
columns by two rows, where the middle column is one partition::

    A B C
    D B E

From A, the cells of B (right) and D (below) are pushed on the stack. D is popped first and leads to
B in the *second* row, which leads to E. When B is popped for the first row it counts as visited, so
C is never reached. A queue instead of the stack moves the error to other plans. About a third of
all divisions of a 4 x 4 grid into rectangles have a query with a miss, nearly all of them made by
splits alone.

The search here uses *corners*. Clipped to the query, every partition has one first corner, and the
cell left of that corner belongs to exactly one partition (or lies outside the query). So the search
walks once down the query's left side, and down the right border of each partition it finds,
stepping over whole partitions; a partition whose first corner is there is new. Each partition is
found exactly once, from the left, so no set of visited partitions is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.balance.changes import Change, apply_changes
from roost.balance.plan import Partition, Plan

Ints = NDArray[np.int32]


class GlobalIndex:
    """A plan with a table of its cells; immutable, see :meth:`updated`.

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
        self._slots = {p.partition_id: slot for slot, p in enumerate(plan.partitions)}
        self._table = np.zeros((plan.rows, plan.columns), np.int32)
        for slot, p in enumerate(plan.partitions):
            self._table[p.row0 : p.row1, p.column0 : p.column1] = slot
        self._number_partitions()

    def _number_partitions(self) -> None:
        """Compute borders and plan index of each slot; a slot is stable while plans change."""
        self._borders = np.zeros((max(self._slots.values()) + 1, 4), np.int32)
        self._numbers = np.zeros(self._borders.shape[0], np.int32)
        slots = [self._slots[p.partition_id] for p in self.plan.partitions]
        sides = [(p.column0, p.row0, p.column1, p.row1) for p in self.plan.partitions]
        self._borders[slots] = sides
        self._numbers[slots] = np.arange(len(slots))

    def partition_at(self, column: int, row: int) -> Partition:
        """Return the partition of a cell."""
        return self.plan.partitions[int(self._numbers[self._table[row, column]])]

    def query_overlap(self, column0: int, row0: int, column1: int, row1: int) -> list[Partition]:
        """Return the partitions that an inclusive range of cells overlaps, each once."""
        ranges = np.array([[column0, row0, column1, row1]], np.int32)
        return [self.plan.partitions[number] for number in self.overlaps_many(ranges)[1]]

    def overlaps_many(self, ranges: Ints) -> tuple[Ints, Ints]:
        """Return pairs of query and partition for many inclusive ranges of cells.

        Parameters
        ----------
        ranges
            Rows of ``column0, row0, column1, row1``, within the grid.

        Returns
        -------
        tuple
            Indices into ``ranges``, ascending, and into ``plan.partitions``.
        """
        plan = self.plan
        inside = (ranges[:, :2] >= 0) & (ranges[:, :2] <= ranges[:, 2:])
        inside &= ranges[:, 2:] < (plan.columns, plan.rows)
        assert bool(inside.all()), "a range of cells is outside the grid"
        queries, slots = _overlaps(self._table, self._borders, ranges)
        return queries, self._numbers[slots]

    def updated(self, changes: Sequence[Change]) -> GlobalIndex:
        """Return the index of the next plan; only cells whose partition changed are written.

        Raises
        ------
        ValueError
            As :func:`~roost.balance.changes.apply_changes` does.
        """
        plan = apply_changes(self.plan, changes)
        after = {p.partition_id for p in plan.partitions}
        slots = {number: slot for number, slot in self._slots.items() if number in after}
        taken = set(slots.values())
        free = (slot for slot in itertools.count() if slot not in taken)
        index = GlobalIndex.__new__(GlobalIndex)
        index.plan = plan
        index._slots = slots
        index._table = self._table.copy()
        for p in plan.partitions:
            if p.partition_id not in self._slots:
                slots[p.partition_id] = slot = next(free)
                index._table[p.row0 : p.row1, p.column0 : p.column1] = slot
        index._number_partitions()
        return index


@njit(cache=True, nogil=True)
def _overlaps(
    table: Ints, borders: Ints, ranges: Ints
) -> tuple[Ints, Ints]:  # pragma: no cover - compiled
    queries = np.empty(max(2 * ranges.shape[0], 16), np.int32)
    slots = np.empty(queries.size, np.int32)
    size = 0
    for query in range(ranges.shape[0]):
        column0, row0, column1, row1 = ranges[query]
        # The partitions found for this query are also the work list: `walked` of them are done;
        # the index before the first stands for the query's own left side.
        begin, walked = size, size - 1
        while walked < size:
            column, row, bottom = column0, row0, row1
            if walked >= begin:
                border = borders[slots[walked]]
                column, row = border[2], max(border[1], row0)
                bottom = min(border[3] - 1, row1)
            walked += 1
            if column > column1:
                continue
            while row <= bottom:
                slot = table[row, column]
                if max(borders[slot, 1], row0) == row:
                    if size == slots.size:
                        queries = np.concatenate((queries, np.empty_like(queries)))
                        slots = np.concatenate((slots, np.empty_like(slots)))
                    queries[size] = query
                    slots[size] = slot
                    size += 1
                row = borders[slot, 3]
    return queries[:size], slots[:size]
