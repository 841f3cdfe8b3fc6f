"""Slots of a plan, and the distribution of a round's points to them.

A slot is one machine's share of one partition. Every partition has one slot per owner, also without
points, because its queries are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.balance.plan import Plan


@dataclass(frozen=True, eq=False)
class SlotPoints:
    """Points by slot and cell: entries ``starts[k]:starts[k + 1]`` belong to slot ``k``.

    ``machine`` and ``partition`` are those of each slot; a partition's number is its index in the
    plan. Cells ascend within a slot.
    """

    cells: NDArray[np.int32]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    machine: NDArray[np.int64]
    partition: NDArray[np.int64]

    def slot(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the cells and counts of a slot."""
        part = slice(self.starts[number], self.starts[number + 1])
        return self.cells[part], self.counts[part]

    def machine_of_entries(self) -> NDArray[np.int64]:
        """Return the machine of each entry."""
        return np.repeat(self.machine, np.diff(self.starts))

    def by_machine(self, values: NDArray[np.float64], machines: int) -> NDArray[np.float64]:
        """Sum a value per entry by machine."""
        sums = np.bincount(self.machine_of_entries(), weights=values, minlength=machines)
        return sums.astype(np.float64)


class PlanSlots:
    """Partition of each cell, and the slots of a plan."""

    def __init__(self, plan: Plan) -> None:
        table = np.zeros((plan.rows, plan.columns), np.int32)
        for number, p in enumerate(plan.partitions):
            table[p.row0 : p.row1, p.column0 : p.column1] = number
        self.table: NDArray[np.int32] = table.reshape(-1)
        self._owners = [p.machines for p in plan.partitions]
        sizes = np.array([len(owners) for owners in self._owners])
        self._shared = np.flatnonzero(sizes > 1)
        self._machine = np.array([m for owners in self._owners for m in owners], np.int64)
        self._partition = np.repeat(np.arange(len(sizes)), sizes)

    def partitions_held(self, machines: int) -> NDArray[np.float64]:
        """Return the number of partitions of each machine."""
        return np.bincount(self._machine, minlength=machines).astype(np.float64)

    def shares(self, values: NDArray[np.float64], machines: int) -> NDArray[np.float64]:
        """Sum a value per cell by machine; owners of a shared partition have equal parts."""
        by_partition = np.bincount(self.table, weights=values, minlength=len(self._owners))
        each = by_partition / [len(owners) for owners in self._owners]
        sums = np.bincount(self._machine, weights=each[self._partition], minlength=machines)
        return sums.astype(np.float64)

    def distribute(self, points: NDArray[np.int64], turn: int) -> SlotPoints:
        """Distribute the points of all cells, row-major; owners of a shared cell alternate."""
        cells = np.flatnonzero(points).astype(np.int32)
        number = self.table[cells]
        order = np.argsort(number, kind="stable")
        cells = cells[order]
        counts = points[cells]
        bounds = np.searchsorted(number[order], np.arange(len(self._owners) + 1))
        if len(self._shared) == 0:
            return SlotPoints(cells, counts, bounds, self._machine, self._partition)
        parts: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
        for k, owners in enumerate(self._owners):
            own = slice(bounds[k], bounds[k + 1])
            parts.extend(_shares(cells[own], counts[own], len(owners), turn))
        starts = np.cumsum([0, *(len(part) for part, _ in parts)])
        return SlotPoints(
            np.concatenate([part for part, _ in parts]),
            np.concatenate([count for _, count in parts]),
            starts,
            self._machine,
            self._partition,
        )


def _shares(
    cells: NDArray[np.int32], counts: NDArray[np.int64], owners: int, turn: int
) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Divide counts among owners; the owner of the remainder differs by cell and turn."""
    if owners == 1:
        return [(cells, counts)]
    shares = []
    for k in range(owners):
        share = counts // owners + ((k - cells - turn) % owners < counts % owners)
        kept = share > 0
        shares.append((cells[kept], share[kept].astype(np.int64)))
    return shares
