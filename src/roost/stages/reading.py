"""Reading a source: slices or Arrow batches into blocks of valid points, the rest rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
)
from roost.stages.decode import MALFORMED, ROW, DeadRow, PointSchema, decode
from roost.stages.json_lines import read_json_messages
from roost.stages.slices import Slice, pieces
from roost.stages.writers import write_dead
from roost.storage.cache import WorkerCache
from roost.storage.files import Files

POINTS = "points"
ROWS_PER_BLOCK = 1 << 18
ROWS_PER_READ = 1 << 20
TIMES_SAMPLED = 1 << 10  # of a block, for the median event time


@dataclass(frozen=True)
class ReadingTask:
    """How the machines of a batch read.

    Parameters
    ----------
    prefix, number
        Of the batch.
    points, space
        Which columns are what, and where points may be.
    attributes
        Attributes that some stage reads.
    late_before
        Event time; older points are too late. None accepts all.
    json_column
        Column that holds each point as JSON text, as in a Kafka message; None reads the columns.
    dead
        Where dead-letter records go.
    """

    prefix: str
    number: int
    points: PointSchema
    space: Space
    attributes: tuple[str, ...]
    late_before: int | None
    json_column: str | None
    dead: Files

    def build(self, machine: int, cache: WorkerCache) -> ReadingWork:
        """Build one machine's work."""
        return ReadingWork(self, machine, cache)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> None:
        """Ignore marks."""


class ReadingWork:
    """Reads one machine's share of a batch."""

    def __init__(self, task: ReadingTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._machine = machine
        self._cache = cache
        self._rows = 0
        self._dead: list[DeadRow] = []
        self._times: list[NDArray[np.int64]] = []
        self._oldest: int | None = None
        self._newest: int | None = None

    def process(self, port: str, block: Any) -> Iterator[Output]:
        """Read a group of slices, or a record batch of a DataFrame."""
        task = self._task
        tables = self._read(block) if isinstance(block, list) else [self._table(block)]
        for table in tables:
            self._rows += table.num_rows
            found, dead = decode(table, task.points, task.space, task.attributes, task.late_before)
            self._dead += dead
            if found.size:
                self._note_times(found)
                yield POINTS, found

    def _read(self, slices: Iterable[Slice]) -> Iterator[pa.Table]:
        points = self._task.points
        # The row's number costs next to nothing, and a rejected row cannot be traced without it.
        own = [points.x, points.y, points.time, points.point_id or ROW, ROW]
        columns = list(dict.fromkeys([*own, *self._task.attributes, MALFORMED]))
        for item in slices:
            for part in pieces(item, ROWS_PER_READ):
                table = part.read(columns, self._cache)
                for start in range(0, table.num_rows, ROWS_PER_BLOCK):
                    yield table.slice(start, ROWS_PER_BLOCK)

    def _table(self, batch: pa.RecordBatch | pa.Table) -> pa.Table:
        task = self._task
        if isinstance(batch, pa.Table):
            return batch
        if task.json_column is None:
            return pa.Table.from_batches([batch])
        types = {name: task.points.attributes.field(name).type for name in task.attributes}
        exact = {name for name, kind in types.items() if not pa.types.is_floating(kind)}
        exact.add(task.points.point_id or ROW)
        return read_json_messages(batch.column(task.json_column).to_pylist(), exact)

    def _note_times(self, block: PointBlock) -> None:
        oldest, newest = int(block.time.min()), int(block.time.max())
        self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)
        self._newest = newest if self._newest is None else max(self._newest, newest)
        # To sort all times would take as long as to match some points.
        self._times.append(block.time[:: -(-block.size // TIMES_SAMPLED)])

    def finish(self, marks: None) -> Iterable[Output]:
        """Nothing is left to emit."""
        return ()

    def report(self) -> Report:
        """Write the rejected rows; report them, and the range of event times."""
        task = self._task
        label = f"r{self._machine:05d}"
        dead = write_dead(task.dead, task.prefix, task.number, "point", self._dead, label)
        middle = int(np.median(np.concatenate(self._times))) if self._times else None
        value = ReadingValue(dead, self._oldest, middle, self._newest)
        return Report(value, {"rows": self._rows, "dead": len(self._dead)})


@dataclass(frozen=True, slots=True)
class ReadingValue:
    """Files of rejected rows, and event times of the others; the median is that of a sample."""

    dead: tuple[str, ...]
    time_min: int | None
    time_median: int | None
    time_max: int | None


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Oldest and newest event time of a batch; None where it has no valid point."""

    oldest: int | None
    newest: int | None


@dataclass
class ReadingStage(Stage):
    """Reads the source of the run.

    Parameters
    ----------
    points, space
        Which columns are what, and where points may be.
    dead
        Where dead-letter records are staged.
    watermark
        Event time before which points are too late, given the newest one of earlier batches.
    json_column
        Column that holds points as JSON text.
    """

    name = "reading"
    outputs = (POINTS,)
    kinds = ("dead",)

    points: PointSchema
    space: Space
    dead: Files
    watermark: Callable[[int | None], int | None] = lambda reached: None
    json_column: str | None = None

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
        """Add up what was read."""
        mine = reports[self.name]
        values: list[ReadingValue] = [report.value for report in mine]
        oldest = min((v.time_min for v in values if v.time_min is not None), default=None)
        newest = max((v.time_max for v in values if v.time_max is not None), default=None)
        return Outcome(
            {"dead": [Staged(name) for value in values for name in value.dead]},
            metrics={
                "rows": sum(int(report.counts["rows"]) for report in mine),
                "dead_points": sum(int(report.counts["dead"]) for report in mine),
                "time_max": newest,
            },
            result=ReadTimes(oldest, newest),
        )
