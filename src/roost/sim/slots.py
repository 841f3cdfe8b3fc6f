"""Slots of a plan, and the distribution of a round's points to them.

A slot is one machine's share of one partition. Every partition has one slot per owner, also without
points, because its queries are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.balance.plan import Plan
from roost.workload.cells import CellCounts


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

    def by_slot(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum a value per entry by slot."""
        slots = np.repeat(np.arange(len(self.machine)), np.diff(self.starts))
        return np.bincount(slots, values, len(self.machine)).astype(np.float64)

    def by_machine(self, values: NDArray[np.float64], machines: int) -> NDArray[np.float64]:
        """Sum a value per entry by machine."""
        owners = np.repeat(self.machine, np.diff(self.starts))
        return np.bincount(owners, values, machines).astype(np.float64)


class PlanSlots:
    """Partition of each cell, the slots of a plan, and the number of slots each machine holds."""

    def __init__(self, plan: Plan) -> None:
        table = np.zeros((plan.rows, plan.columns), np.int32)
        for number, p in enumerate(plan.partitions):
            table[p.row0 : p.row1, p.column0 : p.column1] = number
        self._table = table.reshape(-1)
        self._owners = np.array([len(p.machines) for p in plan.partitions])
        self._machine = np.array([m for p in plan.partitions for m in p.machines], np.int64)
        self._partition = np.repeat(np.arange(len(self._owners)), self._owners)
        self.held = np.bincount(self._machine, minlength=plan.machines).astype(np.float64)

    def shares(
        self, values: NDArray[np.float64], cells: NDArray[np.int32] | None = None
    ) -> NDArray[np.float64]:
        """Sum a value per cell by machine; owners of a shared partition have equal parts.

        Without ``cells``, there is a value for every cell.
        """
        table = self._table if cells is None else self._table[cells]
        each = np.bincount(table, values, len(self._owners)) / self._owners
        return np.bincount(self._machine, each[self._partition], len(self.held)).astype(np.float64)

    def distribute(self, points: CellCounts, turn: int) -> SlotPoints:
        """Distribute the points of cells; owners of a shared cell alternate.

        The owner of the remainder of a cell's points differs by cell and turn.
        """
        number = self._table[points.cells]
        order = np.argsort(number, kind="stable")
        cells, counts = points.cells[order], points.counts[order]
        bounds = np.searchsorted(number[order], np.arange(len(self._owners) + 1))
        if self._owners.max() == 1:
            return SlotPoints(cells, counts, bounds, self._machine, self._partition)
        parts: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []
        for k, owners in enumerate(self._owners.tolist()):
            own = slice(bounds[k], bounds[k + 1])
            for owner in range(owners):
                extra = (owner - cells[own] - turn) % owners < counts[own] % owners
                share = counts[own] // owners + extra
                parts.append((cells[own][share > 0], share[share > 0]))
        starts = np.cumsum([0, *(len(part) for part, _ in parts)])
        part_cells, part_counts = (np.concatenate(column) for column in zip(*parts, strict=True))
        return SlotPoints(part_cells, part_counts, starts, self._machine, self._partition)
