"""A machine's own TrioStat statistics, from batch to batch.

A worker process is not a machine: any of them may run any machine's next task. So the statistics
are a file, written by each batch for the next. When a partition moves, its new machine takes its
part of the old machine's file; when it was split or merged, the statistics are cut or joined. What
leaves the machine is two numbers.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition
from roost.engine.messages import BatchTask, MachineResult, TrioTask
from roost.errors import StateError
from roost.state.partitions import live_ranges
from roost.state.segments import map_arrays, write_arrays
from roost.state.windows import open_window_file
from roost.workload import CellCounts, MachineStats, PartitionStats


def _counts_of(path: Path) -> CellCounts:
    """Points by cell of a file of the window."""
    return open_window_file(path.parent, path.name).counts


def load_statistics(path: Path) -> MachineStats:
    """Read a machine's file."""
    return MachineStats.from_arrays(map_arrays(path))


def keep_statistics(
    task: BatchTask, trio: TrioTask, counts: CellCounts, result: MachineResult
) -> None:
    """Bring a machine's statistics up to this batch, and fill in its two numbers."""
    files = _Files(trio)
    machine = result.machine
    arrived = task.arrivals.get(machine, ())
    folder = Path(task.segment_folder)
    partitions = []
    for partition in task.plan.of_machine(machine):
        ranges = live_ranges(folder, task.segments, partition, task.space, trio.now)
        if partition.partition_id in arrived:
            result.loaded_queries += len(ranges)
        stats = _inherited(files, machine, partition, ranges)
        if trio.close:
            stats.close_round(trio.fade)
        stats.set_queries(ranges)
        partitions.append(stats)
    mine = MachineStats(partitions)
    mine.add_cells(counts, task.plan.columns)
    for name in trio.gone:
        # One file was written by one machine, but its cells may be anybody's by now.
        mine.expire_cells(_counts_of(Path(name)), task.plan.columns)
    path = Path(trio.folder) / f"{task.batch_id:010d}-{machine:05d}-{uuid.uuid4().hex}.trio"
    write_arrays(path, mine.to_arrays(), durable=False)
    result.trio_files = [str(path)]
    # The numbers as they are if the round ends here; the file stays open.
    mine.close_round(trio.fade)
    result.numerator, result.received = mine.numerator(), mine.received()


class _Files:
    """Files of the batch before, each read once."""

    def __init__(self, trio: TrioTask) -> None:
        self._trio = trio
        self._before = {p.partition_id: p for p in trio.before.partitions}
        self._read: dict[int, MachineStats] = {}

    def of(self, partition_id: int, machine: int) -> PartitionStats | None:
        """Statistics of a partition of the plan before, by preference this machine's own."""
        known = self._before.get(partition_id)
        if known is None:
            return None
        owner = machine if machine in known.machines else known.machines[0]
        if owner not in self._read:
            name = self._trio.files.get(owner)
            try:
                self._read[owner] = MachineStats() if name is None else load_statistics(Path(name))
            except StateError:
                self._read[owner] = MachineStats()  # lost with its host: they build up again
        found = self._read[owner].partitions.get(partition_id)
        return None if found is None else PartitionStats.from_array(found.to_array())


def _inherited(
    files: _Files, machine: int, partition: Partition, ranges: NDArray[np.int32]
) -> PartitionStats:
    same = files.of(partition.partition_id, machine)
    if same is not None:
        return same
    known = [files.of(parent, machine) for parent in partition.parents]
    parts = [stats for stats in known if stats is not None]
    if parts and len(parts) == len(known):
        whole = _joined(parts, partition.partition_id, ranges)
        if whole is not None:
            return _restricted(whole, partition)
    return _fresh(partition, ranges)


def _fresh(partition: Partition, ranges: NDArray[np.int32]) -> PartitionStats:
    """Statistics that know the queries and have seen no point; none of the queries is new."""
    p = partition
    stats = PartitionStats(p.partition_id, p.column0, p.row0, p.column1, p.row1)
    stats.set_queries(ranges)
    stats.close_round()
    for axis in (stats.rows, stats.columns):
        axis.r[:] = 0.0
        axis.pre_span[:] = 0.0
    return stats


def _joined(
    parts: list[PartitionStats], partition_id: int, ranges: NDArray[np.int32]
) -> PartitionStats | None:
    """Join parts two by two as they form rectangles; None where they do not."""
    parts = sorted(parts, key=lambda part: (part.row0, part.column0))
    while len(parts) > 1:
        pair = next(
            ((a, b) for a in parts for b in parts if a is not b and _are_neighbours(a, b)), None
        )
        if pair is None:
            return None
        whole = PartitionStats.merged(partition_id, *pair, ranges)
        parts = [part for part in parts if part not in pair] + [whole]
    return parts[0]


def _are_neighbours(first: PartitionStats, second: PartitionStats) -> bool:
    side_by_side = first.row0 == second.row0 and first.row1 == second.row1
    stacked = first.column0 == second.column0 and first.column1 == second.column1
    return (side_by_side and first.column1 == second.column0) or (
        stacked and first.row1 == second.row0
    )


def _restricted(stats: PartitionStats, partition: Partition) -> PartitionStats:
    """Cut off what lies outside a partition, side by side.

    Queries are not counted again here: those that came with this batch must still be found new.
    """
    p, number = partition, partition.partition_id
    if stats.column0 < p.column0:
        stats = stats.cut(True, p.column0, number, number)[1]
    if stats.column1 > p.column1:
        stats = stats.cut(True, p.column1, number, number)[0]
    if stats.row0 < p.row0:
        stats = stats.cut(False, p.row0, number, number)[1]
    if stats.row1 > p.row1:
        stats = stats.cut(False, p.row1, number, number)[0]
    if stats.partition_id != number:
        stats = PartitionStats.from_array(np.concatenate([[number], stats.to_array()[1:]]))
    return stats
