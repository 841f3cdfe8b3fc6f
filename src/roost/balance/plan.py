"""Plan: assigns every cell to one partition and every partition to machines; immutable.

A partition may have several machines. Each of them then has all its queries, and each of its points
goes to exactly one of them. This relieves a hot cell that no split can relieve; with one partition
for the whole space, it is replication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.errors import ConfigError

MACHINES_MAX = 1 << 15
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_RECT = attrgetter("column0", "row0", "column1", "row1")


@dataclass(frozen=True, slots=True)
class Partition:
    """A rectangle of cells ``[column0, column1) x [row0, row1)``.

    ``parents`` are the partitions it was derived from, whose stored points it may still need.
    """

    partition_id: int
    column0: int
    row0: int
    column1: int
    row1: int
    machines: tuple[int, ...]
    parents: tuple[int, ...] = ()

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """The half-open rectangle ``column0, row0, column1, row1``."""
        return self.column0, self.row0, self.column1, self.row1

    @property
    def cells(self) -> int:
        """Area in cells."""
        return (self.column1 - self.column0) * (self.row1 - self.row0)

    def to_json(self) -> list[Any]:
        """Return JSON data for the state directory."""
        return [self.partition_id, *self.bounds, list(self.machines), list(self.parents)]


def enclosing(partitions: Sequence[Partition]) -> tuple[int, int, int, int]:
    """Return the smallest rectangle that contains all partitions."""
    return (
        min(p.column0 for p in partitions),
        min(p.row0 for p in partitions),
        max(p.column1 for p in partitions),
        max(p.row1 for p in partitions),
    )


@dataclass(frozen=True)
class Plan:
    """Assignment of cells to partitions to machines, with an epoch number.

    ``next_id`` is greater than every partition id ever used in the state directory, so ids are
    never reused.
    """

    epoch: int
    columns: int
    rows: int
    machines: int
    partitions: tuple[Partition, ...]
    next_id: int

    def __post_init__(self) -> None:
        """Validate the number of machines."""
        if not 1 <= self.machines <= MACHINES_MAX:
            takes = f"a number from 1 to {MACHINES_MAX}"
            raise ConfigError("engine.machines", self.machines, takes)

    def check_invariants(self) -> None:
        """Check invariant 1: every cell is in one partition, every partition has a machine."""
        covered = np.zeros((self.rows, self.columns), np.int32)
        for p in self.partitions:
            assert p.machines, f"partition {p.partition_id} has no machine"
            assert len(set(p.machines)) == len(p.machines), "a partition names a machine twice"
            assert all(0 <= m < self.machines for m in p.machines), "a machine is unknown"
            assert 0 <= p.column0 < p.column1 <= self.columns, "columns are outside the grid"
            assert 0 <= p.row0 < p.row1 <= self.rows, "rows are outside the grid"
            covered[p.row0 : p.row1, p.column0 : p.column1] += 1
        assert bool(np.all(covered == 1)), "a cell is in no partition or in two"
        ids = [p.partition_id for p in self.partitions]
        assert len(set(ids)) == len(ids), "a partition id occurs twice"
        assert max(ids) < self.next_id, "a partition id could be reused"

    @property
    def fully_replicated(self) -> bool:
        """Whether any machine may process any point, so that no shuffle is needed."""
        return all(len(p.machines) == self.machines for p in self.partitions)

    @property
    def undivided(self) -> bool:
        """Whether several machines have all queries each."""
        return self.machines > 1 and self.fully_replicated

    def rects(self) -> NDArray[np.int64]:
        """Return the rectangles of the partitions: rows of ``column0, row0, column1, row1``."""
        sides = chain.from_iterable(map(_RECT, self.partitions))
        return np.fromiter(sides, np.int64).reshape(-1, 4)

    def cell_table(self) -> NDArray[np.int32]:
        """Return the index in ``partitions`` of each cell, by row and column."""
        table = np.zeros((self.rows, self.columns), np.int32)
        for place, p in enumerate(self.partitions):
            table[p.row0 : p.row1, p.column0 : p.column1] = place
        return table

    def of_machine(self, machine: int) -> tuple[Partition, ...]:
        """Return the partitions of a machine, including shared ones."""
        return tuple(p for p in self.partitions if machine in p.machines)

    def renumbered(self, epoch: int, first_id: int) -> Plan:
        """Return the same plan with another epoch and partition ids from ``first_id`` up."""
        partitions = tuple(
            replace(p, partition_id=p.partition_id + first_id, parents=()) for p in self.partitions
        )
        return replace(self, epoch=epoch, partitions=partitions, next_id=self.next_id + first_id)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory."""
        return {
            "epoch": self.epoch,
            "columns": self.columns,
            "rows": self.rows,
            "machines": self.machines,
            "next_id": self.next_id,
            "partitions": [p.to_json() for p in self.partitions],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Invert :meth:`to_json`."""
        partitions = tuple(
            Partition(number, column0, row0, column1, row1, tuple(machines), tuple(parents))
            for number, column0, row0, column1, row1, machines, parents in data["partitions"]
        )
        sizes = (data["epoch"], data["columns"], data["rows"], data["machines"])
        return cls(*sizes, partitions, data["next_id"])


class Router:
    """Routes points by a plan, with one array look-up per point unless partitions are shared.

    Only ``shared`` plans need the keys of points.
    """

    def __init__(self, plan: Plan) -> None:
        counts = [len(p.machines) for p in plan.partitions]
        self._partition = plan.cell_table().reshape(-1)
        self._starts = (np.cumsum(counts) - counts).astype(np.int32)
        self._counts = np.asarray(counts, np.uint64)
        self.shared = max(counts) > 1
        self._owners = np.asarray([m for p in plan.partitions for m in p.machines], np.int16)
        if not self.shared:
            self._machines = self._owners[self._partition]

    def places_of(self, cells: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the index in the plan of each cell's partition."""
        places: NDArray[np.int32] = self._partition[cells]
        return places

    def machines_of(
        self, cells: NDArray[np.int32], keys: NDArray[np.uint64] | None
    ) -> NDArray[np.int16]:
        """Return the machine of each point by its cell, and by its key in a shared partition.

        It does not depend on the point's position in a block: blocks may come in another order
        when a task runs again.
        """
        machines: NDArray[np.int16]
        if not self.shared:
            machines = self._machines[cells]
            return machines
        assert keys is not None, "points of a shared partition have no keys"
        partition = self.places_of(cells)
        # Identifiers are often multiples of some number; the product spreads their high bits.
        mixed = (keys * _SPREAD) >> np.uint64(32)
        places = self._starts[partition] + (mixed % self._counts[partition]).astype(np.int32)
        machines = self._owners[places]
        return machines
