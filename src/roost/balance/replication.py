"""When an adaptive strategy divides space: while the queries do not fit into a host's memory.

A plan that divides space needs an exchange, which may cost as much as reading and matching
together. In return a host needs memory for the queries of its own machines only. So as long as all
queries fit into the memory of every host, the plan is replicated: every machine has all queries,
and any load is balanced without an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roost.balance.changes import Replan, overlap_cells
from roost.balance.plan import Plan

# A host that has the whole index in memory reads nothing from the disk. Measured crossover: a host
# that holds 70 % of it is slower than the exchange, one that holds all of it twice as fast.
EXCEEDS = 1.0
# Below EXCEEDS, because a plan that changes back and forth costs more than either.
FITS = 0.8


@dataclass(frozen=True)
class IndexMemory:
    """Bytes of the queries' files, and of files that the fullest host can hold in memory."""

    index_bytes: int
    room_bytes: int
    executors: int  # that reported

    def fits(self, *, replicated: bool) -> bool:
        """Return whether the plan should be replicated; ``replicated`` states whether it is.

        With one executor it does not change: the user chose a strategy that divides space.

        Examples
        --------
        >>> IndexMemory(90, 100, 3).fits(replicated=True)
        True
        >>> IndexMemory(90, 100, 3).fits(replicated=False)
        False
        """
        if replicated:
            return self.index_bytes <= EXCEEDS * self.room_bytes
        return self.executors > 1 and self.index_bytes <= FITS * self.room_bytes

    def __str__(self) -> str:
        """Describe both sizes."""
        return f"{self.index_bytes:,} bytes of queries, room for {self.room_bytes:,} on a host"


def replan(plan: Plan, target: Plan) -> Replan:
    """Return the change to the partitions of another plan of the same grid, under new numbers."""
    partitions = []
    for number, p in enumerate(target.partitions, plan.next_id):
        parents = tuple(old.partition_id for old in plan.partitions if overlap_cells(old, p))
        partitions.append(replace(p, partition_id=number, parents=parents))
    return Replan(tuple(partitions))
