"""Statistics for the balancer: points by cell, or each machine's TrioStat statistics.

Under ``global`` the machines report how many of their points lie in each cell. Under ``swarm``
TrioStat's statistics stay with the machine, which reports two numbers. Any worker of an executor
may run a machine's next task, so the statistics are a file in a folder of the executor, written by
each batch for the next under a name of its own: a task that runs again starts from the same file.
Queries are updated by what changed between two batches.

The first batch of a round also writes it to the state directory, as a checkpoint. A worker
that does not find the file of the batch before starts from the checkpoint and counts the queries
from the index. If a partition moved, its new machine reads its part of the old machine's file,
which the policy has had copied to the state directory; if it was split or merged, the statistics
are cut or joined.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
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
from roost.queries.partitions import Counted, QueryCounts, live_changes, live_ranges
from roost.queries.versions import SegmentRef
from roost.stages.contract import Batch, MapExecutor, Outcome, Report, Reports, Stage, Task, Work
from roost.stages.matching import GATHERED, Gathered
from roost.stages.resident import Key, Resident, capacity_for
from roost.stages.routing import spatial
from roost.stages.window import WindowStage
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, View
from roost.window.view import WindowFiles, batch_of
from roost.workload import CellCounter, CellCounts, EulerHistogram, MachineStats, PartitionStats

Arrays = dict[str, NDArray[Any]]
FADE = 0.5
STATISTICS = "statistics"


class CountingWork(Work):
    """Counts the points of a machine by cell."""

    def __init__(self, space: Space, cache: WorkerCache, loaded_queries: int = 0) -> None:
        self._grid = space.grid
        cells = space.grid.cells
        # A table of all cells; a task that failed may have left counts in it.
        self._counter = cache.get("counter", cells, lambda: CellCounter(cells))
        self._counter.take()
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
        return CountingWork(self.space, cache, self.arriving.get(machine, 0))


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

    def prepare(self, batch: Batch) -> CountingTask | None:
        """Return the task of a batch, with the number of queries that move.

        None while every machine has all queries: no decision needs the counts.
        """
        routing = spatial(batch.routings)
        if routing.plan.undivided:
            return None
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
        if self.name not in reports:
            return Outcome()
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
    files: Files  # of checkpoints
    names: Mapping[int, str]  # statistics of the batch before, by machine
    checkpoints: Mapping[int, str]  # statistics of an earlier batch
    before: Plan  # of the batch before: whose file has a partition that moved
    arrivals: Mapping[int, tuple[int, ...]]  # partitions that are new to each machine
    closes: bool  # whether a round ended with the batch before
    since: int | None  # position of the first request after the batch before; None: there is none
    counted: Counted | None  # queries in the statistics of the batch before
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
    checkpoint: bool = True  # whether the file is in the state directory


class TrioWork(CountingWork):
    """Updates one machine's statistics."""

    def __init__(self, task: TrioTask, machine: int, cache: WorkerCache) -> None:
        super().__init__(task.space, cache)
        self._task = task
        self._machine = machine
        self._cache = cache
        self._earlier = _Earlier(task, cache)

    def report(self) -> Report:
        """Write the machine's statistics with this batch; report the file and two numbers."""
        task, earlier = self._task, self._earlier
        arrived = task.arrivals.get(self._machine, ())
        loaded = 0
        partitions = []
        for partition in task.plan.of_machine(self._machine):
            stats = None
            if partition.partition_id not in arrived:
                stats = self._continued(partition)
            if stats is None:
                stats, queries = self._recounted(partition)
                loaded += queries if partition.partition_id in arrived else 0
            partitions.append(stats)
        mine = MachineStats(partitions)
        mine.add_cells(self._counter.take(), task.plan.columns)
        for name in task.gone:
            # One machine wrote the file; its cells may belong to any machine now.
            assert task.window is not None
            counts = WindowFiles(task.window, self._cache).segment(name).counts
            mine.expire_cells(counts, task.plan.columns)
        # Each batch is subtracted when it leaves a window, so none may be lost before. A task that
        # did not find its file may run at another executor than the next one.
        windowed = task.window is not None
        lasting = task.closes or windowed or earlier.lost or not task.names
        name, lasting = self._write(mine.to_arrays(), lasting)
        # The policy reads the numbers as of the end of a round; in the file the round stays open.
        mine.close_round(task.fade)
        value = TrioValue(name, machine_cost(mine, task.rules), mine.received(), lasting)
        return Report(value, {"loaded_queries": loaded, "restarted": float(earlier.lost)})

    def _continued(self, partition: Partition) -> PartitionStats | None:
        """Update the statistics of the batch before by what changed, if they are there."""
        task = self._task
        if task.counted is None or task.since is None:
            return None
        stats = self._earlier.of(partition.partition_id, self._machine)
        if stats is None or self._earlier.lost:
            return None
        now = Counted(task.segments, task.now)
        try:
            changes = live_changes(
                task.folder, self._cache, task.counted, now, partition, task.space, task.since
            )
        except StateError:
            return None  # files of the version before are gone
        if task.closes:
            stats.close_round(task.fade)
        stats.change_queries(*changes)
        return stats

    def _recounted(self, partition: Partition) -> tuple[PartitionStats, int]:
        """Return earlier statistics with all queries counted again, and the number of queries."""
        task = self._task
        ranges, received = live_ranges(
            task.folder, self._cache, task.segments, partition, task.space, task.now, task.since
        )
        stats = _inherited(self._earlier, self._machine, partition, ranges)
        if task.closes:
            stats.close_round(task.fade)
        stats.add_queries(ranges[received])
        stats.set_queries(ranges)
        return stats, len(ranges)

    def _write(self, arrays: Arrays, lasting: bool) -> tuple[str, bool]:
        """Write the executor's file, and perhaps a checkpoint; returns the name and whether."""
        task, values = self._task, arrays["trio"]
        key = Key(self._machine, task.number, capacity_for(values.size), os.urandom(16).hex())
        name = f"batch-{key.batch:010d}-{key.machine:05d}-{key.capacity}-{key.attempt}.trio"
        with suppress(OSError):  # the disk is full
            resident_of(task.files, self._cache).write(key, values)
            if not lasting:
                return name, False
        task.files.write(name, arrays, durable=False)
        return name, True


def key_of(name: str) -> Key | None:
    """Return what names the statistics in the executor's file; None for those of version 0.1."""
    parts = name.removesuffix(".trio").split("-")
    if len(parts) != 5:
        return None
    _, batch, machine, capacity, attempt = parts
    return Key(int(machine), int(batch), int(capacity), attempt)


def resident_of(files: Files, cache: WorkerCache) -> Resident:
    """Return the files of a run in the executor's folder, or else in the state directory."""

    def build() -> Resident:
        run = hashlib.sha256(files.folder.encode()).hexdigest()[:16]
        folder = cache.folder(f"trio-{run}")
        return Resident(files.folder if folder is None else str(folder), cache)

    return cache.get("resident folder", files, build)


def read_resident(files: Files, name: str, cache: WorkerCache) -> NDArray[np.float64] | None:
    """Return statistics from the executor's file, if they are there."""
    key = key_of(name)
    return None if key is None else resident_of(files, cache).read(key)


def copy_resident(files: Files, name: str, cache: WorkerCache) -> bool:
    """Copy statistics from the executor's file to the state directory, if they are there."""
    values = read_resident(files, name, cache)
    if values is not None:
        files.write(name, {"trio": values}, durable=False)
    return values is not None


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
    files: Files  # of checkpoints
    window: WindowStage | None = None
    rules: SwarmRules = SwarmRules()  # noqa: RUF009 - immutable
    saved: Saved = field(init=False, default_factory=lambda: Saved())
    # Where the machines ran in the last batch, and how to get at what they left there.
    _places: dict[int, str] = field(init=False, default_factory=dict)
    _executor: MapExecutor | None = field(init=False, default=None)
    _cache: WorkerCache = field(init=False, default_factory=WorkerCache)

    @property
    def fade(self) -> float:
        """Share of earlier rounds' points that counts; 1 if a window decides when they expire."""
        return FADE if self.window is None else 1.0

    def open(self, view: View) -> None:
        """Read which files hold the machines' statistics, and since when they count."""
        row = view.get(STATISTICS, "trio")
        self.saved = Saved() if row is None else Saved.from_json(row)

    def prepare(self, batch: Batch) -> TrioTask | None:
        """Return the task of a batch; None while every machine has all queries."""
        routing, before = spatial(batch.routings), spatial(batch.before)
        if routing.plan.undivided:
            return None
        first = batch.number if self.saved.first is None else self.saved.first
        gone = () if self.window is None else self.window.gone
        return TrioTask(
            batch.number,
            routing.plan,
            self.space,
            batch.queries.segments,
            self.folder,
            self.files,
            self.saved.names,
            self.saved.checkpoints,
            before.plan,
            routing.arrivals(before),
            batch.closes_round,
            self.saved.rows,
            self.saved.counted,
            self.fade,
            self.rules,
            TIME_MIN if batch.median is None else batch.median,
            None if self.window is None else self.window.files,
            tuple(name for name in gone if batch_of(name) >= first),
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Record the files; show the policy two numbers of each machine."""
        if self.name not in reports:  # what was counted before the plan was replicated is old
            return Outcome(facts=[Fact(STATISTICS, "trio", Saved().to_json())], result=Saved())
        values: dict[int, TrioValue] = {r.machine: r.value for r in reports[self.name]}
        self._places = {r.machine: r.executor for r in reports[self.name]}
        self._executor = executor
        rows = batch.queries.rows
        before = rows if self.saved.rows is None else self.saved.rows
        lasting = {m: value.file for m, value in values.items() if value.checkpoint}
        earlier = {m: name for m, name in self.saved.checkpoints.items() if m in values}
        saved = Saved(
            {machine: value.file for machine, value in values.items()},
            earlier | lasting,
            batch.number if self.saved.first is None else self.saved.first,
            rows,
            before if batch.closes_round or self.saved.began is None else self.saved.began,
            Counted(batch.queries.segments, TIME_MIN if batch.median is None else batch.median),
        )
        restarted = sum(int(report.counts["restarted"]) for report in reports[self.name])
        return Outcome(
            facts=[Fact(STATISTICS, "trio", saved.to_json())],
            metrics={**_loaded(reports), "statistics_restarted": restarted},
            observed=values,
            result=saved,
        )

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue from the files of the batch."""
        self.saved = outcome.result

    def cleanup(self) -> None:
        """Delete the files of earlier batches."""
        self.files.delete(
            "batch-", keep={*self.saved.names.values(), *self.saved.checkpoints.values()}
        )

    def fetch(self, machines: Collection[int]) -> None:
        """Have the executors copy the statistics of some machines to the state directory."""
        names = {m: self.saved.names[m] for m in machines if m in self.saved.names}
        away = [m for m, name in names.items() if not self.files.path(name).exists()]
        if away and not any(self._places.get(m) for m in away):
            # There is one executor, whose folder is the state directory.
            away = [m for m in away if not copy_resident(self.files, names[m], self._cache)]
        if away and self._executor is not None:
            call, places = partial(copy_resident, self.files), [self._places.get(m) for m in away]
            self._executor.map(call, [names[m] for m in away], places)

    def statistics(self, machine: int) -> MachineStats:
        """Return the statistics of a machine: the checkpoint if those of its batch are lost."""
        self.fetch([machine])
        for files in (self.saved.names, self.saved.checkpoints):
            with suppress(StateError, KeyError):
                return load_statistics(self.files, files[machine])
        return MachineStats()

    def state(self) -> Any:
        """Return what the next batch continues from."""
        return self.saved


@dataclass(frozen=True)
class Saved:
    """What the next batch continues from."""

    names: Mapping[int, str] = field(default_factory=dict)  # files of the last batch, by machine
    checkpoints: Mapping[int, str] = field(default_factory=dict)  # in the state directory
    first: int | None = None  # batch that they count
    # Numbers of requests in the log: at the last batch, and when the open round began.
    rows: int | None = None
    began: int | None = None
    counted: Counted | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fact."""
        counted = self.counted
        return {
            "files": {str(machine): name for machine, name in self.names.items()},
            "checkpoints": {str(machine): name for machine, name in self.checkpoints.items()},
            "first": self.first,
            "rows": self.rows,
            "began": self.began,
            "now": None if counted is None else counted.now,
            "segments": [] if counted is None else [astuple(ref) for ref in counted.refs],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Saved:
        """Invert :meth:`to_json`; rows of earlier versions lack some fields."""
        names, checkpoints = (
            {int(machine): name for machine, name in row[key].items()}
            for key in ("files", "checkpoints" if "checkpoints" in row else "files")
        )
        counted = None
        if row.get("now") is not None:
            counted = Counted(tuple(SegmentRef(*ref) for ref in row["segments"]), row["now"])
        return cls(names, checkpoints, row["first"], row.get("rows"), row.get("began"), counted)


class _Earlier:
    """Statistics of the batch before, each file read once.

    ``lost`` says that a file was not found, and that the checkpoint replaced it.
    """

    def __init__(self, task: TrioTask, cache: WorkerCache) -> None:
        self._task = task
        self._cache = cache
        self._partitions = {p.partition_id: p for p in task.before.partitions}
        self._read: dict[int, MachineStats] = {}
        self.lost = False

    def of(self, partition_id: int, machine: int) -> PartitionStats | None:
        """Return a partition's statistics, preferably those of the same machine.

        Of each, the caller either changes them, or derives those of other partitions.
        """
        known = self._partitions.get(partition_id)
        if known is None:
            return None
        owner = machine if machine in known.machines else known.machines[0]
        if owner not in self._read:
            self._read[owner] = self._load(owner)
        return self._read[owner].partitions.get(partition_id)

    def _load(self, machine: int) -> MachineStats:
        task = self._task
        name = task.names.get(machine)
        if name is None:
            return MachineStats()
        values = read_resident(task.files, name, self._cache)
        if values is not None:
            return MachineStats.from_arrays({"trio": values})
        with suppress(StateError):
            return load_statistics(task.files, name)
        self.lost = True
        with suppress(StateError, KeyError):
            return load_statistics(task.files, task.checkpoints[machine])
        return MachineStats()


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
