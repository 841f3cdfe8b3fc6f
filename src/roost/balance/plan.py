"""A plan: every cell in one partition, every partition with a machine, as an immutable value.

A partition may have several machines. Each of them then knows all its queries and each point of
it is dealt to exactly one of them: that is how a hot cell is relieved that no split can relieve,
and, with one partition for the whole space, it is replication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.errors import ConfigError

MACHINES_MAX = 1 << 15


@dataclass(frozen=True, slots=True)
class Partition:
    """A rectangle of cells ``[column0, column1) x [row0, row1)``.

    ``parents`` are the partitions that it was made from, whose stored data it may still need.
    """

    partition_id: int
    column0: int
    row0: int
    column1: int
    row1: int
    machines: tuple[int, ...]
    parents: tuple[int, ...] = ()

    @property
    def cells(self) -> int:
        """Area in cells."""
        return (self.column1 - self.column0) * (self.row1 - self.row0)


@dataclass(frozen=True)
class Plan:
    """Immutable: cell to partition to machine(s), with an epoch number.

    ``next_id`` is above every partition id that was ever used in the state directory, so that a
    new partition is never taken for an old one.
    """

    epoch: int
    columns: int
    rows: int
    machines: int
    partitions: tuple[Partition, ...]
    next_id: int

    def __post_init__(self) -> None:
        """Refuse machine counts that cannot be routed to."""
        if not 1 <= self.machines <= MACHINES_MAX:
            takes = f"a number from 1 to {MACHINES_MAX}"
            raise ConfigError("engine.machines", self.machines, takes)

    def check_invariants(self) -> None:
        """Invariant 1: every cell in exactly one partition, every partition with a machine."""
        covered = np.zeros((self.rows, self.columns), np.int32)
        for p in self.partitions:
            assert p.machines, f"partition {p.partition_id} has no machine"
            assert len(set(p.machines)) == len(p.machines), "a machine twice in one partition"
            assert all(0 <= m < self.machines for m in p.machines), "an unknown machine"
            assert 0 <= p.column0 < p.column1 <= self.columns, "columns beyond the grid"
            assert 0 <= p.row0 < p.row1 <= self.rows, "rows beyond the grid"
            covered[p.row0 : p.row1, p.column0 : p.column1] += 1
        assert bool(np.all(covered == 1)), "a cell with no partition, or with two"
        ids = [p.partition_id for p in self.partitions]
        assert len(set(ids)) == len(ids), "a partition id twice"
        assert max(ids) < self.next_id, "a partition id that may be given out again"

    @property
    def fully_replicated(self) -> bool:
        """Whether any machine may take any point, so that points need not move at all."""
        return all(len(p.machines) == self.machines for p in self.partitions)

    def of_machine(self, machine: int) -> tuple[Partition, ...]:
        """Partitions that a machine has a part in."""
        return tuple(p for p in self.partitions if machine in p.machines)

    def renumbered(self, epoch: int, first_id: int) -> Plan:
        """Return the same layout under another epoch, with partition ids from a number up."""
        partitions = tuple(
            replace(p, partition_id=p.partition_id + first_id, parents=()) for p in self.partitions
        )
        return replace(self, epoch=epoch, partitions=partitions, next_id=self.next_id + first_id)

    def overlapping(self, column0: int, row0: int, column1: int, row1: int) -> Iterator[Partition]:
        """Partitions that a closed range of cells touches."""
        for p in self.partitions:
            wide = p.column0 <= column1 and column0 < p.column1
            if wide and p.row0 <= row1 and row0 < p.row1:
                yield p

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state directory."""
        return {
            "epoch": self.epoch,
            "columns": self.columns,
            "rows": self.rows,
            "machines": self.machines,
            "next_id": self.next_id,
            "partitions": [
                [
                    p.partition_id,
                    p.column0,
                    p.row0,
                    p.column1,
                    p.row1,
                    list(p.machines),
                    list(p.parents),
                ]
                for p in self.partitions
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Inverse of :meth:`to_json`."""
        partitions = tuple(
            Partition(number, column0, row0, column1, row1, tuple(machines), tuple(parents))
            for number, column0, row0, column1, row1, machines, parents in data["partitions"]
        )
        sizes = (data["epoch"], data["columns"], data["rows"], data["machines"])
        return cls(*sizes, partitions, data["next_id"])


class Router:
    """A plan unrolled for routing: two array look-ups a point."""

    def __init__(self, plan: Plan) -> None:
        table = np.zeros((plan.rows, plan.columns), np.int32)
        counts = []
        owners: list[int] = []
        starts = []
        for number, p in enumerate(plan.partitions):
            table[p.row0 : p.row1, p.column0 : p.column1] = number
            starts.append(len(owners))
            counts.append(len(p.machines))
            owners.extend(p.machines)
        self._partition = table.reshape(-1)
        self._starts = np.asarray(starts, np.int32)
        self._counts = np.asarray(counts, np.int32)
        self._owners = np.asarray(owners, np.int32)

    def places_of(self, cells: NDArray[np.int32]) -> NDArray[np.int32]:
        """Place of each cell's partition in the plan."""
        places: NDArray[np.int32] = self._partition[cells]
        return places

    def machines_of(self, cells: NDArray[np.int32], first: int = 0) -> NDArray[np.int32]:
        """Machine of each point by its cell; shared partitions deal points out in turn."""
        partition = self.places_of(cells)
        counts = self._counts[partition]
        turn = (np.arange(first, first + cells.size) % counts).astype(np.int32)
        machines: NDArray[np.int32] = self._owners[self._starts[partition] + turn]
        return machines
