"""A second kind of stage: counts points by key, in two levels, and a third that checks both.

Uses only :mod:`roost.stages.contract`, as a user would. Each reading task counts its
points (:class:`PartialCounts`), an exchange by key brings the counts together
(:class:`KeyTotals`), and another exchange compares totals with partial counts (:class:`KeyCheck`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.model.schemas import PointBlock
from roost.stages.contract import (
    Batch,
    Job,
    MapExecutor,
    Outcome,
    Output,
    Report,
    Reports,
    Stage,
    Staged,
)
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.private import private_folder
from roost.storage.store import Fact, View

COUNTS, TOTALS = "key counts", "key totals"  # ports
BY_KEY, BY_CHECK = "key", "check"  # routings
NO_KEY = -1


def counted(keys: Mapping[int, int]) -> pa.Table:
    """Return counts as a block."""
    order = sorted(keys)
    rows = [keys[key] for key in order]
    return pa.table({"key": pa.array(order, pa.int64()), "rows": pa.array(rows, pa.int64())})


def add_counts(keys: Counter[int], block: pa.Table) -> None:
    """Add a block to counts."""
    for key, rows in zip(block["key"].to_pylist(), block["rows"].to_pylist(), strict=True):
        keys[key] += rows


@dataclass(frozen=True)
class KeyRouting:
    """Routes a row by the hash of its key."""

    epoch: int
    machines: int
    factor: int = 0x9E3779B97F4A7C15
    local: ClassVar[bool] = False

    def machines_of(self, keys: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the machine of each key."""
        mixed = keys.astype(np.uint64) * np.uint64(self.factor)
        return (mixed >> np.uint64(32)) % np.uint64(self.machines)

    def split(
        self, port: str, block: pa.Table, cache: WorkerCache
    ) -> Iterator[tuple[int, pa.Table]]:
        """Divide counts by machine."""
        found = self.machines_of(block["key"].to_numpy())
        for machine in np.unique(found).tolist():
            yield machine, block.filter(pa.array(found == machine))


@dataclass(frozen=True)
class KeyTable:
    """Epochs of a key routing: ``machines`` has the number of machines of each."""

    name: str
    machines: tuple[int, ...]
    factor: int = KeyRouting.factor
    records: None = None  # in the store

    @property
    def epoch(self) -> int:
        """Epoch of the batches to come."""
        return len(self.machines) - 1

    def at(self, epoch: int) -> KeyRouting:
        """Return the routing of an epoch."""
        return KeyRouting(epoch, self.machines[epoch], self.factor)

    def size_of(self, machines: int) -> None:
        """Keep the number of machines in every layout."""


# --------------------------------------------------------------------------- partial counts


@dataclass(frozen=True)
class PartialCountsTask:
    """Counts the points of a reader, and for which machine they are."""

    key: str
    routing: KeyRouting

    def build(self, machine: int, cache: WorkerCache) -> PartialCountsWork:
        return PartialCountsWork(self)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> None:
        """Ignore marks."""


class PartialCountsWork:
    def __init__(self, task: PartialCountsTask) -> None:
        self._task = task
        self._keys: Counter[int] = Counter()

    def process(self, port: str, block: PointBlock) -> Iterable[Output]:
        self._keys.update(block.attributes[self._task.key].fill_null(NO_KEY).to_pylist())
        return ()

    def finish(self, marks: None) -> Iterator[Output]:
        yield COUNTS, counted(self._keys)

    def report(self) -> Report:
        """Mark how many rows each machine of the totals must receive of this reader."""
        keys = np.array(sorted(self._keys), np.int64)
        rows = [self._keys[key] for key in keys.tolist()]
        machines = self._task.routing.machines
        sent = np.bincount(self._task.routing.machines_of(keys).astype(int), rows, machines)
        return Report(counts={"rows": sum(rows)}, mark=[int(number) for number in sent])


class PartialCounts(Stage):
    """First level: counts points by an attribute in the reading task."""

    name = "partial counts"
    inputs = ("points",)
    outputs = (COUNTS,)

    def __init__(self, key: str) -> None:
        self.key = key

    def attributes(self, queries: Any) -> Iterable[str]:
        return (self.key,)

    def prepare(self, batch: Batch) -> PartialCountsTask:
        routing = batch.routings[BY_KEY]
        assert isinstance(routing, KeyRouting)
        return PartialCountsTask(self.key, routing)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        rows = sum(int(report.counts["rows"]) for report in reports[self.name])
        return Outcome(metrics={"counted_by_readers": rows}, result=rows)


# --------------------------------------------------------------------------- totals


@dataclass(frozen=True)
class KeyTotalsTask:
    prefix: str
    files: Files
    output: Files

    def build(self, machine: int, cache: WorkerCache) -> KeyTotalsWork:
        return KeyTotalsWork(self, machine)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> list[int]:
        """Add up what the readers sent to each machine."""
        return [sum(sent) for sent in zip(*marks[PartialCounts.name], strict=True)]


@dataclass(frozen=True, slots=True)
class KeyTotalsValue:
    """Name of the state file and of the output file; None where the machine has no key."""

    file: str | None
    output: str | None


class KeyTotalsWork:
    def __init__(self, task: KeyTotalsTask, machine: int) -> None:
        self._task = task
        self._machine = machine
        self._keys: Counter[int] = Counter()
        self._value = KeyTotalsValue(None, None)

    def process(self, port: str, block: pa.Table) -> Iterable[Output]:
        add_counts(self._keys, block)
        return ()

    def finish(self, marks: list[int]) -> Iterator[Output]:
        expected = marks[self._machine] if marks else 0
        if self._keys.total() != expected:
            raise RuntimeError(
                f"machine {self._machine} counted {self._keys.total()} rows instead of {expected}"
            )
        totals = counted(self._keys)
        if totals.num_rows:
            self._value = self._write(totals)
        yield TOTALS, totals

    def _write(self, totals: pa.Table) -> KeyTotalsValue:
        task, label = self._task, f"{self._machine:05d}"
        file = task.files.name(task.prefix, label, ".counts")
        task.files.write(file, arrays_of(totals), durable=False)
        output = task.output.name(task.prefix, label, ".parquet")
        pq.write_table(totals, task.output.path(output))
        return KeyTotalsValue(file, output)

    def report(self) -> Report:
        rows = self._keys.total()
        return Report(self._value, {"rows": rows, "keys": len(self._keys)}, mark=rows)


def arrays_of(totals: pa.Table) -> dict[str, NDArray[np.int64]]:
    return {name: totals[name].to_numpy() for name in totals.column_names}


def read_totals(files: Files, names: Iterable[str]) -> Counter[int]:
    """Add up files."""
    found: Counter[int] = Counter()
    for name in names:
        arrays = files.map(name)
        add_counts(found, pa.table({key: array.copy() for key, array in arrays.items()}))
    return found


@dataclass(frozen=True)
class MergeFiles:
    """The background job: merges files into one."""

    files: Files

    def __call__(self, names: Sequence[str], cache: WorkerCache, prefix: str) -> str:
        name = self.files.name(prefix, "merged", ".counts")
        merged = counted(read_totals(self.files, names))
        self.files.write(name, arrays_of(merged), durable=False)
        return name


@dataclass
class KeyTotals(Stage):
    """Second level: adds up the counts of each key; one file per machine and batch.

    Parameters
    ----------
    folder
        Where the counts of all batches are, as state files.
    output
        Where the counts of a batch are staged.
    machines
        Number of machines in each epoch of the routing.
    files_max
        Files above which the job merges them.
    """

    name = "key totals"
    inputs = (COUNTS,)
    outputs = (TOTALS,)
    routing = BY_KEY
    marks = (PartialCounts.name,)
    kinds = ("totals",)
    table: ClassVar[str] = "key totals"

    folder: Path
    output: Files
    machines: tuple[int, ...] = (3,)
    files_max: int = 4
    rows: int = field(init=False, default=0)
    names: tuple[str, ...] = field(init=False, default=())

    @property
    def files(self) -> Files:
        return Files(str(self.folder))

    def routing_table(self) -> KeyTable:
        return KeyTable(BY_KEY, self.machines)

    def open(self, view: View) -> None:
        private_folder(self.folder)
        self.rows = view.get(self.table, "rows") or 0
        self.names = tuple(view.get(self.table, "files") or ())

    def prepare(self, batch: Batch) -> KeyTotalsTask:
        return KeyTotalsTask(batch.prefix, self.files, self.output)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        mine = reports[self.name]
        rows = sum(int(report.counts["rows"]) for report in mine)
        assert rows == batch.outcomes[PartialCounts.name].result
        values = [(report.machine, report.value) for report in mine if report.value.file]
        after = self.rows + rows, (*self.names, *(value.file for _, value in values))
        return Outcome(
            {"totals": [Staged(value.output, machine) for machine, value in values]},
            self._facts(*after),
            {"counted": rows, "keys": sum(int(report.counts["keys"]) for report in mine)},
            result=after,
        )

    def _facts(self, rows: int, names: Sequence[str]) -> list[Fact]:
        return [Fact(self.table, "rows", rows), Fact(self.table, "files", list(names))]

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        self.rows, self.names = outcome.result

    def cleanup(self) -> None:
        """Delete unlisted files, except those of a job that may be running."""
        self.files.delete("batch-", keep=self.names)
        newest = max((name for name in self.names if name.startswith("job-")), default="")
        for name in self.files.names("job-"):
            if name < newest and name not in self.names:
                self.files.delete(name)

    def job(self) -> Job | None:
        if len(self.names) <= self.files_max:
            return None
        return Job(MergeFiles(self.files), [self.names], partial(self._merged, self.names))

    def _merged(self, inputs: Sequence[str], results: Sequence[str]) -> Outcome:
        rest = [name for name in self.names if name not in inputs]
        return Outcome(facts=self._facts(self.rows, [*results, *rest]))

    def discard(self, prefix: str) -> None:
        self.files.delete(prefix)

    def state(self) -> tuple[int, tuple[str, ...]]:
        return self.rows, self.names


# --------------------------------------------------------------------------- check


@dataclass(frozen=True)
class KeyCheckTask:
    def build(self, machine: int, cache: WorkerCache) -> KeyCheckWork:
        return KeyCheckWork()

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
        """Return the rows of all readers and those of all totals."""
        return sum(map(sum, marks[PartialCounts.name])), sum(marks[KeyTotals.name])


class KeyCheckWork:
    def __init__(self) -> None:
        self._ports: dict[str, Counter[int]] = {COUNTS: Counter(), TOTALS: Counter()}

    def process(self, port: str, block: pa.Table) -> Iterable[Output]:
        add_counts(self._ports[port], block)
        return ()

    def finish(self, marks: tuple[int, int]) -> Iterable[Output]:
        read, added = marks
        if read != added or self._ports[COUNTS] != self._ports[TOTALS]:
            raise RuntimeError(f"totals of {added} rows differ from counts of {read}")
        return ()

    def report(self) -> Report:
        return Report(counts={"rows": self._ports[TOTALS].total()})


@dataclass
class KeyCheck(Stage):
    """Third level, behind another routing: compares the totals with the partial counts.

    The partial counts are made two levels earlier: their blocks and marks pass through the level
    between.
    """

    name = "key check"
    inputs = (TOTALS, COUNTS)
    routing = BY_CHECK
    marks = (PartialCounts.name, KeyTotals.name)

    machines: int = 2

    def routing_table(self) -> KeyTable:
        return KeyTable(BY_CHECK, (self.machines,), factor=0xC2B2AE3D27D4EB4F)

    def prepare(self, batch: Batch) -> KeyCheckTask:
        return KeyCheckTask()

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        rows = sum(int(report.counts["rows"]) for report in reports[self.name])
        return Outcome(metrics={"checked_rows": rows})
