"""Statistics for the balancer: points by cell, or each machine's TrioStat statistics.

Under ``global`` the machines report how many of their points lie in each cell. Under ``swarm``
TrioStat's statistics stay with the machine, which reports two numbers. Any worker process may run a
machine's next task, so the statistics are a file, written by each batch for the next. If a
partition moved, its new machine reads its part of the old machine's file; if it was split or
merged, the statistics are cut or joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition, Plan
from roost.balance.rules import SwarmRules
from roost.balance.swarm import machine_cost
from roost.errors import StateError
from roost.model.records import TIME_MIN
from roost.model.space import Space
from roost.queries.live import QuerySet
from roost.queries.partitions import QueryCounts, live_ranges
from roost.queries.versions import SegmentRef
from roost.stages.contract import Batch, MapExecutor, Outcome, Report, Reports, Stage, Task, Work
from roost.stages.matching import GATHERED, Gathered
from roost.stages.routing import spatial
from roost.stages.window import WindowStage
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, View
from roost.window.view import WindowFiles, batch_of
from roost.workload import CellCounter, CellCounts, EulerHistogram, MachineStats, PartitionStats

FADE = 0.5
STATISTICS = "statistics"


class CountingWork(Work):
    """Counts the points of a machine by cell."""

    def __init__(self, space: Space, loaded_queries: int = 0) -> None:
        self._grid = space.grid
        self._counter = CellCounter(space.grid.cells)
        self._loaded = loaded_queries

    def process(self, port: str, block: Gathered) -> tuple[()]:
        """Count a block."""
        self._counter.add(block.cells_in(self._grid))
        return ()

    def report(self) -> Report:
        """Report the counts."""
        return Report(self._counter.take(), {"loaded_queries": self._loaded})


@dataclass(frozen=True)
class CountingTask(Task):
    """Counts points by cell."""

    space: Space
    arriving: Mapping[int, int]  # number of queries in partitions that are new to each machine

    def build(self, machine: int, cache: WorkerCache) -> CountingWork:
        """Build one machine's work."""
        return CountingWork(self.space, self.arriving.get(machine, 0))


@dataclass
class CellStage(Stage):
    """Statistics of ``global``: the driver sees the points and queries of every cell."""

    name = STATISTICS
    inputs = (GATHERED,)

    queries: QuerySet
    space: Space
    _counts: QueryCounts = field(init=False)

    def __post_init__(self) -> None:
        self._counts = QueryCounts(self.space)

    def histogram(self, now: int) -> EulerHistogram:
        """Count the live queries by cell."""
        return self._counts.update(self.queries.segments, now)

    def prepare(self, batch: Batch) -> CountingTask:
        """Return the task of a batch, with the number of queries that move."""
        routing = spatial(batch.routings)
        moved = routing.arrivals(spatial(batch.before))
        if not moved:
            return CountingTask(self.space, {})
        parts = routing.plan.partitions
        rects = np.array([p.bounds for p in parts])
        now = TIME_MIN if batch.median is None else batch.median
        counts = self.histogram(now).count_many(rects).tolist()
        queries = {p.partition_id: count for p, count in zip(parts, counts, strict=True)}
        arriving = {m: sum(queries[number] for number in found) for m, found in moved.items()}
        return CountingTask(self.space, arriving)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Show the policy the counts of each machine."""
        cells: dict[int, CellCounts] = {r.machine: r.value for r in reports[self.name]}
        return Outcome(metrics=_loaded(reports), observed=cells)


def _loaded(reports: Reports) -> dict[str, int]:
    counts = (int(report.counts["loaded_queries"]) for report in reports[STATISTICS])
    return {"loaded_queries": sum(counts)}


@dataclass(frozen=True)
class TrioTask(Task):
    """How the machines of a batch update TrioStat's statistics."""

    number: int
    plan: Plan
    space: Space
    segments: tuple[SegmentRef, ...]  # files of the live queries
    folder: Files  # of these
    files: Files  # of statistics
    names: Mapping[int, str]  # statistics of the batch before, by machine
    before: Plan  # of the batch before: whose file has a partition that moved
    arrivals: Mapping[int, tuple[int, ...]]  # partitions that are new to each machine
    closes: bool  # whether a round ended with the batch before
    since: int | None  # position of the first request after the batch before; None: there is none
    fade: float  # share of earlier rounds' points that counts when a round is closed
    rules: SwarmRules
    now: int  # event time that most points had reached; queries that ended before do not count
    window: Files | None = None
    gone: tuple[str, ...] = ()  # files of the window whose points have left it since

    def build(self, machine: int, cache: WorkerCache) -> TrioWork:
        """Build one machine's work."""
        return TrioWork(self, machine, cache)


@dataclass(frozen=True, slots=True)
class TrioValue:
    """A machine's file, and the two numbers of the SWARM protocol."""

    file: str
    cost: float
    received: float


class TrioWork(CountingWork):
    """Updates one machine's statistics."""

    def __init__(self, task: TrioTask, machine: int, cache: WorkerCache) -> None:
        super().__init__(task.space)
        self._task = task
        self._machine = machine
        self._cache = cache

    def report(self) -> Report:
        """Write the machine's statistics with this batch; report the file and two numbers."""
        task, machine = self._task, self._machine
        earlier = _Earlier(task)
        arrived = task.arrivals.get(machine, ())
        loaded = 0
        partitions = []
        for partition in task.plan.of_machine(machine):
            ranges, received = live_ranges(
                task.folder, task.segments, partition, task.space, task.now, task.since
            )
            if partition.partition_id in arrived:
                loaded += len(ranges)
            stats = _inherited(earlier, machine, partition, ranges)
            if task.closes:
                stats.close_round(task.fade)
            stats.add_queries(ranges[received])
            stats.set_queries(ranges)
            partitions.append(stats)
        mine = MachineStats(partitions)
        mine.add_cells(self._counter.take(), task.plan.columns)
        for name in task.gone:
            # One machine wrote the file; its cells may belong to any machine now.
            assert task.window is not None
            counts = WindowFiles(task.window, self._cache).segment(name).counts
            mine.expire_cells(counts, task.plan.columns)
        name = task.files.name(f"{task.number:010d}-", f"{machine:05d}", ".trio")
        task.files.write(name, mine.to_arrays(), durable=False)
        # The policy reads the numbers as of the end of a round; in the file the round stays open.
        mine.close_round(task.fade)
        value = TrioValue(name, machine_cost(mine, task.rules), mine.received())
        return Report(value, {"loaded_queries": loaded})


def load_statistics(files: Files, name: str) -> MachineStats:
    """Read a machine's file."""
    return MachineStats.from_arrays(files.map(name))


@dataclass
class TrioStage(Stage):
    """Statistics of ``swarm``: they stay with the machines.

    With a window, they count the points of the window.
    """

    name = STATISTICS
    inputs = (GATHERED,)

    space: Space
    folder: Files  # of the queries
    files: Files  # of statistics
    window: WindowStage | None = None
    rules: SwarmRules = SwarmRules()  # noqa: RUF009 - immutable
    names: dict[int, str] = field(init=False, default_factory=dict)
    first: int | None = field(init=False, default=None)
    # Numbers of requests in the log: at the last batch, and when the open round began.
    rows: int | None = field(init=False, default=None)
    began: int | None = field(init=False, default=None)

    @property
    def fade(self) -> float:
        """Share of earlier rounds' points that counts; 1 if a window decides when they expire."""
        return FADE if self.window is None else 1.0

    def open(self, view: View) -> None:
        """Read which files hold the machines' statistics, and since when they count."""
        row = view.get(STATISTICS, "trio") or {"files": {}, "first": None}
        self.names = {int(machine): name for machine, name in row["files"].items()}
        self.first = row["first"]
        # A state directory of an earlier version lacks these: its queries count as old.
        self.rows, self.began = row.get("rows"), row.get("began")

    def prepare(self, batch: Batch) -> TrioTask:
        """Return the task of a batch."""
        routing, before = spatial(batch.routings), spatial(batch.before)
        first = batch.number if self.first is None else self.first
        gone = () if self.window is None else self.window.gone
        return TrioTask(
            batch.number,
            routing.plan,
            self.space,
            batch.queries.segments,
            self.folder,
            self.files,
            self.names,
            before.plan,
            routing.arrivals(before),
            batch.closes_round,
            self.rows,
            self.fade,
            self.rules,
            TIME_MIN if batch.median is None else batch.median,
            None if self.window is None else self.window.files,
            tuple(name for name in gone if batch_of(name) >= first),
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Record the files; show the policy two numbers of each machine."""
        values: dict[int, TrioValue] = {r.machine: r.value for r in reports[self.name]}
        names = {machine: value.file for machine, value in values.items()}
        first = batch.number if self.first is None else self.first
        rows = batch.queries.rows
        before = rows if self.rows is None else self.rows
        began = before if batch.closes_round or self.began is None else self.began
        files = {str(machine): name for machine, name in names.items()}
        row = {"files": files, "first": first, "rows": rows, "began": began}
        return Outcome(
            facts=[Fact(STATISTICS, "trio", row)],
            metrics=_loaded(reports),
            observed=values,
            result=(names, first, rows, began),
        )

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue from the files of the batch."""
        self.names, self.first, self.rows, self.began = outcome.result

    def cleanup(self) -> None:
        """Delete the files of earlier batches."""
        self.files.delete("", keep=self.names.values())

    def state(self) -> Any:
        """Return the files by machine, the first batch that they count, and two positions."""
        return self.names, self.first, self.rows, self.began


class _Earlier:
    """Statistics of the batch before, each file read once."""

    def __init__(self, task: TrioTask) -> None:
        self._task = task
        self._partitions = {p.partition_id: p for p in task.before.partitions}
        self._read: dict[int, MachineStats] = {}

    def of(self, partition_id: int, machine: int) -> PartitionStats | None:
        """Return a copy of a partition's statistics, preferably those of the same machine."""
        known = self._partitions.get(partition_id)
        if known is None:
            return None
        owner = machine if machine in known.machines else known.machines[0]
        if owner not in self._read:
            self._read[owner] = self._load(owner)
        found = self._read[owner].partitions.get(partition_id)
        return None if found is None else PartitionStats.from_array(found.to_array())

    def _load(self, machine: int) -> MachineStats:
        name = self._task.names.get(machine)
        try:
            return MachineStats() if name is None else load_statistics(self._task.files, name)
        except StateError:
            return MachineStats()  # the file was lost with its host: counts start again


def _inherited(
    earlier: _Earlier, machine: int, partition: Partition, ranges: NDArray[np.int32]
) -> PartitionStats:
    same = earlier.of(partition.partition_id, machine)
    if same is not None:
        return same
    known = [earlier.of(parent, machine) for parent in partition.parents]
    parts = [stats for stats in known if stats is not None]
    if parts and len(parts) == len(known):
        only = parts[0] if len(parts) == 1 else None
        whole = only or PartitionStats.merged(partition.partition_id, parts, ranges)
        if whole is not None:
            return _restricted(whole, partition)
    return PartitionStats(partition.partition_id, *partition.bounds, ranges)


def _restricted(stats: PartitionStats, partition: Partition) -> PartitionStats:
    """Cut off what lies outside a partition.

    Queries are not counted again: those that arrived with this batch must still count as new.
    """
    p, number = partition, partition.partition_id
    sides = ((True, 0, p.column0, p.column1), (False, 1, p.row0, p.row1))
    for vertical, axis, low, high in sides:
        if stats.bounds[axis] < low:
            stats = stats.cut(vertical, low, number, number)[1]
        if stats.bounds[axis + 2] > high:
            stats = stats.cut(vertical, high, number, number)[0]
    if stats.partition_id != number:
        stats = PartitionStats.from_array(np.concatenate([[number], stats.to_array()[1:]]))
    return stats
