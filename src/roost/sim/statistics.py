"""Statistics of the simulated machines, updated when plans and queries change.

Each machine has TrioStat's numbers for its slots: its partitions, and of a shared partition only
its own points. Statistics move, split and merge with their partition. Where that is impossible (a
new sharer, a replan, a crash), they restart without points, and with all queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Merge, Move, Split, apply_changes
from roost.balance.global_index import GlobalIndex
from roost.balance.plan import Partition, Plan
from roost.model.arrays import Ints
from roost.sim.slots import SlotPoints
from roost.sim.workloads import QueryTable, Ranges
from roost.workload.cells import CellCounts
from roost.workload.trio import MachineStats, PartitionStats


class ClusterStatistics:
    """One :class:`MachineStats` per machine, and the index that routes queries to them."""

    def __init__(self, plan: Plan, query_table: QueryTable, fade: float) -> None:
        self._query_table = query_table
        self._fade = fade
        self._index = GlobalIndex(plan)
        self.machines = [MachineStats() for _ in range(plan.machines)]
        for p in plan.partitions:
            for machine in p.machines:
                self._put(machine, PartitionStats(p.partition_id, *p.bounds))
        # Initial queries were not received in the first round.
        self.requests(query_table.live_ids(), np.empty(0, np.int64))
        self._close_round()

    def requests(self, registered: Ints, terminated: Ints) -> None:
        """Add registered and terminated queries on their machines."""
        for ids, collect in (
            (registered, PartitionStats.add_queries),
            (terminated, PartitionStats.end_queries),
        ):
            if len(ids) == 0:
                continue
            ranges = self._query_table.ranges[ids]
            query, number = self._index.overlaps_many(ranges)
            order = np.argsort(number, kind="stable")
            numbers, starts = np.unique(number[order], return_index=True)
            for k, part in zip(numbers, np.split(query[order], starts[1:]), strict=True):
                p = self._index.plan.partitions[k]
                for machine in p.machines:
                    stats = self.machines[machine].partitions[p.partition_id]
                    collect(stats, ranges[part])

    def collect(self, plan: Plan, points: SlotPoints) -> None:
        """Count the points of a round in their slots, and close the round."""
        owners = zip(points.machine.tolist(), points.partition.tolist(), strict=True)
        for slot, (machine, number) in enumerate(owners):
            cells, counts = points.slot(slot)
            if cells.size:
                stats = self.machines[machine].partitions[plan.partitions[number].partition_id]
                stats.add_cells(CellCounts(cells, counts), plan.columns)
        self._close_round()

    def without(self, ids: Ints, received: NDArray[np.bool_]) -> list[MachineStats]:
        """Return copies without some queries; ``received`` are those of the last round."""
        copies = [MachineStats.from_arrays(stats.to_arrays()) for stats in self.machines]
        for stats in copies:
            stats.hide_queries(self._query_table.ranges[ids], received)
        return copies

    def _close_round(self) -> None:
        for stats in self.machines:
            stats.close_round(self._fade)

    def lose(self, machine: int) -> None:
        """Restart the statistics of a machine."""
        held = self.machines[machine].partitions.values()
        self.machines[machine] = MachineStats(self._restarted(stats) for stats in held)

    def changed(self, changes: Sequence[Change]) -> None:
        """Apply a plan change between two rounds."""
        ranges = self._query_table.live_ranges()
        for change in changes:
            if isinstance(change, Move):
                self._assign(self._remove(change.partition_id), change.machines)
            elif isinstance(change, Split):
                self._split(change, ranges)
            elif isinstance(change, Merge):
                self._merge(change, ranges)
            else:
                self._replace_all(change.partitions)
        self._index = GlobalIndex(apply_changes(self._index.plan, changes))

    def _put(self, machine: int, stats: PartitionStats) -> None:
        self.machines[machine].partitions[stats.partition_id] = stats

    def _remove(self, partition_id: int) -> dict[int, PartitionStats]:
        """Remove a partition's statistics from all its machines; return them by machine."""
        return {
            machine: stats.partitions.pop(partition_id)
            for machine, stats in enumerate(self.machines)
            if partition_id in stats.partitions
        }

    def _restarted(self, p: Partition | PartitionStats) -> PartitionStats:
        """Return statistics of a partition without points, with all its queries."""
        return PartitionStats(p.partition_id, *p.bounds, self._query_table.live_ranges())

    def _assign(self, old: Mapping[int, PartitionStats], machines: Sequence[int]) -> None:
        """Assign statistics to new owners: their own, or those of the previous sole owner."""
        first = next(iter(old.values()))
        for machine in machines:
            if machine in old:
                self._put(machine, old[machine])
            elif len(old) == len(machines) == 1:
                self._put(machine, first)
            else:
                self._put(machine, self._restarted(first))

    def _split(self, change: Split, ranges: Ranges) -> None:
        cuts = {
            machine: stats.cut(change.vertical, change.at, *change.ids, ranges)
            for machine, stats in self._remove(change.partition_id).items()
        }
        for side, machines in enumerate(change.machines):
            self._assign({machine: parts[side] for machine, parts in cuts.items()}, machines)

    def _merge(self, change: Merge, ranges: Ranges) -> None:
        removed = [self._remove(number) for number in change.partition_ids]
        for machine in change.machines:
            parts = [stats[machine] for stats in removed]
            whole = PartitionStats.merged(change.new_id, parts, ranges)
            assert whole is not None, "merged partitions form a rectangle"
            self._put(machine, whole)

    def _replace_all(self, partitions: Sequence[Partition]) -> None:
        """Retain statistics of unchanged partitions and machines; the others restart."""
        before = self.machines
        self.machines = [MachineStats() for _ in before]
        for p in partitions:
            for machine in p.machines:
                known = before[machine].partitions.get(p.partition_id)
                self._put(machine, self._restarted(p) if known is None else known)
