"""Reading a source: slices or Arrow batches into blocks of valid points, the rest rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.model.records import DeadLetter
from roost.model.schemas import PointBlock
from roost.model.space import Space
from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Output,
    Report,
    Reports,
    Stage,
    Staged,
    Task,
    Work,
)
from roost.stages.decode import MALFORMED, ROW, PointSchema, decode
from roost.stages.json_lines import read_json_messages
from roost.stages.slices import pieces
from roost.stages.writers import write_dead
from roost.storage.cache import WorkerCache
from roost.storage.files import Files

POINTS = "points"
ROWS_PER_BLOCK = 1 << 18
ROWS_PER_READ = 1 << 20
TIMES_SAMPLED = 1 << 10  # of a block, for the median event time
TIMES_REPORTED = 128  # of a reader, for the median of a batch


def read_blocks(block: Any, columns: Sequence[str], cache: WorkerCache) -> Iterator[pa.Table]:
    """Read a group of slices, or a record batch of a DataFrame, in tables of bounded size."""
    if isinstance(block, pa.RecordBatch):
        yield pa.Table.from_batches([block])
        return
    if isinstance(block, pa.Table):
        yield block
        return
    for item in block:
        for part in pieces(item, ROWS_PER_READ):
            table = part.read(columns, cache)
            for start in range(0, table.num_rows, ROWS_PER_BLOCK):
                yield table.slice(start, ROWS_PER_BLOCK)


def messages_of(block: pa.RecordBatch, column: str) -> list[bytes | None]:
    """Return the JSON messages of a column of bytes, as Kafka has them, or of text."""
    found: list[bytes | None] = block.column(column).cast(pa.binary()).to_pylist()
    return found


@dataclass(frozen=True)
class ReadingTask(Task):
    """How the machines of a batch read."""

    prefix: str
    number: int
    points: PointSchema
    space: Space
    attributes: tuple[str, ...]  # that some stage reads
    late_before: int | None  # event time; older points are too late; None accepts all
    json_column: str | None  # holds each point as JSON text, as in a Kafka message
    dead: Files

    def build(self, machine: int, cache: WorkerCache) -> ReadingWork:
        """Build one machine's work."""
        return ReadingWork(self, machine, cache)


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Oldest, median and newest event time of the valid points; None without any.

    The median is that of a sample: at most ``TIMES_SAMPLED`` times of each block, evenly spaced.
    """

    oldest: int | None = None
    median: int | None = None
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class ReadingValue:
    """Files of rejected rows, and event times of the others.

    ``sampled`` are at most ``TIMES_REPORTED`` of them, evenly spaced in ascending order.
    """

    dead: tuple[str, ...]
    times: ReadTimes
    sampled: NDArray[np.int64]


class ReadingWork(Work):
    """Reads one machine's share of a batch."""

    def __init__(self, task: ReadingTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._machine = machine
        self._cache = cache
        self._rows = 0
        self._dead: list[DeadLetter] = []
        self._limits: list[int] = []  # oldest and newest time of each block
        self._sampled: list[NDArray[np.int64]] = []

    def process(self, port: str, block: Any) -> Iterator[Output]:
        """Read a group of slices, or a record batch of a DataFrame."""
        task = self._task
        for table in self._tables(block):
            self._rows += table.num_rows
            found, dead = decode(table, task.points, task.space, task.attributes, task.late_before)
            self._dead += dead
            if found.size:
                self._note_times(found)
                yield POINTS, found

    def _tables(self, block: Any) -> Iterator[pa.Table]:
        task, points = self._task, self._task.points
        if task.json_column is not None and isinstance(block, pa.RecordBatch):
            types = {name: points.attributes.field(name).type for name in task.attributes}
            exact = {name for name, kind in types.items() if not pa.types.is_floating(kind)}
            exact.add(points.point_id or ROW)
            yield read_json_messages(messages_of(block, task.json_column), exact)
            return
        # The row number costs next to nothing, and a rejected row cannot be traced without it.
        own = [points.x, points.y, points.time, points.point_id or ROW, ROW]
        columns = list(dict.fromkeys([*own, *task.attributes, MALFORMED]))
        yield from read_blocks(block, columns, self._cache)

    def _note_times(self, block: PointBlock) -> None:
        self._limits += [int(block.time.min()), int(block.time.max())]
        # An exact median takes 0.5 ms of an ordered block and 3 ms of a shuffled one, this 0.1 ms.
        self._sampled.append(block.time[:: -(-block.size // TIMES_SAMPLED)])

    def report(self) -> Report:
        """Write the rejected rows; report them, and the range of event times."""
        task = self._task
        label = f"r{self._machine:05d}"
        dead = write_dead(task.dead, task.prefix, task.number, "point", self._dead, label)
        times = ReadTimes()
        sampled = np.empty(0, np.int64)
        if self._limits:
            known = np.sort(np.concatenate(self._sampled))
            median = int(np.median(known))
            places = np.linspace(0, known.size - 1, min(known.size, TIMES_REPORTED))
            sampled = known[places.round().astype(np.int64)]
            times = ReadTimes(min(self._limits), median, max(self._limits))
        counts = {"rows": self._rows, "dead": len(self._dead)}
        return Report(ReadingValue(dead, times, sampled), counts)


@dataclass
class ReadingStage(Stage):
    """Reads the source of the run, and publishes the dead letters of the batch.

    Its result is the batch's oldest, median and newest event time.
    """

    name = "reading"
    outputs = (POINTS,)
    kinds = ("dead",)

    points: PointSchema
    space: Space
    dead: Files  # where dead letters are staged
    # Event time before which points are too late, given the newest one of earlier batches.
    watermark: Callable[[int | None], int | None] = lambda reached: None
    json_column: str | None = None  # holds each point as JSON text

    def prepare(self, batch: Batch) -> ReadingTask:
        """Return the task of a batch."""
        return ReadingTask(
            batch.prefix,
            batch.number,
            self.points,
            self.space,
            batch.attributes,
            self.watermark(batch.reached),
            self.json_column,
            self.dead,
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Add up what was read; write the requests that log replay refused."""
        mine = reports[self.name]
        refused = write_dead(
            self.dead, batch.prefix, batch.number, "request", batch.refused, "requests"
        )
        names = [name for report in mine for name in report.value.dead]
        times: list[ReadTimes] = [report.value.times for report in mine]
        oldest = min((t.oldest for t in times if t.oldest is not None), default=None)
        newest = max((t.newest for t in times if t.newest is not None), default=None)
        median = _median(mine)
        return Outcome(
            {"dead": [Staged(name) for name in [*names, *refused]]},
            metrics={
                "rows": sum(int(report.counts["rows"]) for report in mine),
                "dead_points": sum(int(report.counts["dead"]) for report in mine),
                "dead_requests": len(batch.refused),
                "time_max": newest,
                "time_median": median,
            },
            result=ReadTimes(oldest, median, newest),
        )


def _median(reports: Sequence[Report]) -> int | None:
    """Return the time that half of a batch's points have reached, from the readers' samples."""
    found = [(r.value.sampled, r.counts["rows"] - r.counts["dead"]) for r in reports]
    found = [(times, points) for times, points in found if times.size]
    if not found:
        return None
    times = np.concatenate([times for times, _ in found])
    weights = np.concatenate([np.full(t.size, points / t.size) for t, points in found])
    order = np.argsort(times, kind="stable")
    sums = np.cumsum(weights[order])
    return int(times[order[np.searchsorted(sums, sums[-1] / 2.0 - 1e-9)]])
