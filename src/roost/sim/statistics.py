"""Statistics of the simulated machines, updated when plans and queries change.

Each machine has TrioStat's numbers for its slots: its partitions, and of a shared partition only
its own points. Statistics move, split and merge with their partition. Where that is impossible (a
new sharer, a replan, a crash), they restart empty, with the queries counted again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roost.balance.changes import Change, Merge, Move, Split
from roost.balance.global_index import GlobalIndex
from roost.balance.plan import Partition, Plan
from roost.sim.slots import SlotPoints
from roost.sim.workloads import Ids, QueryTable
from roost.workload.cells import CellCounts
from roost.workload.trio import MachineStats, PartitionStats


class ClusterStatistics:
    """One :class:`MachineStats` per machine, and the index that routes queries to them."""

    def __init__(self, plan: Plan, query_table: QueryTable, fade: float = 0.5) -> None:
        self._query_table = query_table
        self._fade = fade
        self._index = GlobalIndex(plan)
        self._owners = {p.partition_id: p for p in plan.partitions}
        self.machines = [MachineStats() for _ in range(plan.machines)]
        for p in plan.partitions:
            for machine in p.machines:
                bounds = (p.column0, p.row0, p.column1, p.row1)
                self._put(machine, PartitionStats(p.partition_id, *bounds))
        # Initial queries were not received in the first round.
        self.requests(plan, query_table.live_ids(), np.empty(0, np.int64))
        for machine_stats in self.machines:
            machine_stats.close_round(fade)

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Add registered and terminated queries on their machines."""
        for ids, sign in ((new, 1), (gone, -1)):
            ranges = self._query_table.ranges[ids]
            if len(ids) == 0:
                continue
            query, number = self._index.overlaps_many(ranges)
            order = np.argsort(number, kind="stable")
            numbers, starts = np.unique(number[order], return_index=True)
            for k, part in zip(numbers, np.split(query[order], starts[1:]), strict=True):
                p = plan.partitions[k]
                for machine in p.machines:
                    self.machines[machine].partitions[p.partition_id].add_queries(
                        ranges[part], sign
                    )

    def collect(self, plan: Plan, dealt: SlotPoints) -> None:
        """Count the points of a round in their slots, and close the round."""
        owners = zip(dealt.machine.tolist(), dealt.partition.tolist(), strict=True)
        for slot, (machine, number) in enumerate(owners):
            cells, counts = dealt.slot(slot)
            if cells.size:
                stats = self.machines[machine].partitions[plan.partitions[number].partition_id]
                stats.add_cells(CellCounts(cells, counts), plan.columns)
        for machine_stats in self.machines:
            machine_stats.close_round(self._fade)

    def lose(self, machine: int) -> None:
        """Reset the statistics of a machine."""
        held = self.machines[machine].partitions
        self.machines[machine] = MachineStats(self._fresh(self._owners[number]) for number in held)

    def changed(self, after: Plan, changes: Sequence[Change]) -> None:
        """Apply a plan change between two rounds."""
        for change in changes:
            if isinstance(change, Move):
                self._move(change)
            elif isinstance(change, Split):
                self._split(change)
            elif isinstance(change, Merge):
                self._merge(change)
            else:
                self._replace_all(change.partitions)
        self._index = GlobalIndex(after)
        self._owners = {p.partition_id: p for p in after.partitions}

    def _put(self, machine: int, stats: PartitionStats) -> None:
        self.machines[machine].partitions[stats.partition_id] = stats

    def _take(self, partition_id: int) -> dict[int, PartitionStats]:
        """Remove a partition's statistics from all its machines."""
        holders = self._owners[partition_id].machines
        return {m: self.machines[m].partitions.pop(partition_id) for m in holders}

    def _fresh(self, p: Partition | PartitionStats) -> PartitionStats:
        """Return statistics with the queries, as if from earlier rounds, and no points."""
        bounds = (p.column0, p.row0, p.column1, p.row1)
        stats = PartitionStats(p.partition_id, *bounds)
        stats.set_queries(self._query_table.ranges[self._query_table.within(*bounds)])
        stats.close_round(self._fade)
        return stats

    def _give(self, old: dict[int, PartitionStats], machines: tuple[int, ...], sole: bool) -> None:
        """Assign statistics to new owners: their own, or those of the previous sole owner."""
        first = next(iter(old.values()))
        for machine in machines:
            if machine in old:
                self._put(machine, old[machine])
            elif sole and len(machines) == 1:
                self._put(machine, first)
            else:
                self._put(machine, self._fresh(first))

    def _move(self, change: Move) -> None:
        old = self._take(change.partition_id)
        self._give(old, change.machines, len(old) == 1)
        self._owned(change.partition_id, change.machines)

    def _split(self, change: Split) -> None:
        old = self._take(change.partition_id)
        sides: tuple[dict[int, PartitionStats], dict[int, PartitionStats]] = ({}, {})
        for machine, stats in old.items():
            ranges = self._query_table.ranges[self._query_table.within(*stats.bounds)]
            parts = stats.cut(change.vertical, change.at, *change.ids, ranges)
            sides[0][machine], sides[1][machine] = parts
        for side, machines in zip(sides, change.machines, strict=True):
            self._give(side, machines, len(old) == 1)
            self._owned(next(iter(side.values())).partition_id, machines)

    def _merge(self, change: Merge) -> None:
        taken = [self._take(number) for number in change.partition_ids]
        for machine in change.machines:
            whole = self._joined(change.new_id, [old[machine] for old in taken])
            self._put(machine, whole)
        self._owned(change.new_id, change.machines)

    def _owned(self, partition_id: int, machines: tuple[int, ...]) -> None:
        """Record the owners of a partition while changes are applied."""
        p = next(iter(self.machines[m].partitions[partition_id] for m in machines))
        self._owners[partition_id] = Partition(partition_id, *p.bounds, machines)

    def _joined(self, partition_id: int, parts: list[PartitionStats]) -> PartitionStats:
        """Merge adjacent pairs; parts that form a rectangle without such pairs restart."""
        bounds = (
            min(p.column0 for p in parts),
            min(p.row0 for p in parts),
            max(p.column1 for p in parts),
            max(p.row1 for p in parts),
        )
        ranges = self._query_table.ranges[self._query_table.within(*bounds)]
        while len(parts) > 1:
            pair = _neighbours(parts)
            if pair is None:
                return self._fresh(Partition(partition_id, *bounds, (0,)))
            rest = [p for p in parts if p not in pair]
            parts = [*rest, PartitionStats.merged(partition_id, *pair, ranges)]
        return parts[0]

    def _replace_all(self, partitions: Sequence[Partition]) -> None:
        """Keep statistics of unchanged partitions and machines; the others restart."""
        before = self.machines
        self.machines = [MachineStats() for _ in before]
        for p in partitions:
            for machine in p.machines:
                kept = before[machine].partitions.get(p.partition_id)
                self._put(machine, kept if kept is not None else self._fresh(p))


def _neighbours(parts: Sequence[PartitionStats]) -> tuple[PartitionStats, PartitionStats] | None:
    """Return two partitions with a common side, the lower one first."""
    for a in parts:
        for b in parts:
            beside = a.column1 == b.column0 and (a.row0, a.row1) == (b.row0, b.row1)
            below = a.row1 == b.row0 and (a.column0, a.column1) == (b.column0, b.column1)
            if beside or below:
                return a, b
    return None
