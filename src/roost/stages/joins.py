"""Joins: pairs of points that are near each other in place and time, found batch by batch.

The new points of each machine are joined with the points of the window near them, whichever machine
and plan wrote them, and with the other machines' new points. Segments are files that any task may
map, so nothing has to be copied across the borders of partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from roost.model.arrays import as_arrow
from roost.stages.contract import Batch, MapExecutor, Outcome, Reports, Stage, Staged
from roost.stages.writers import TableWriter
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.window import JoinSpec, Live, join_schema, join_segment
from roost.window.view import WindowFiles, WindowView

GROUPS_PER_SLOT = 2
Value = TypeVar("Value")


def deal(items: Sequence[Value], groups: int, load: Callable[[Value], int]) -> list[list[Value]]:
    """Divide items into at most ``groups`` groups: the largest first, each to the least loaded."""
    dealt: list[list[Value]] = [[] for _ in range(min(groups, len(items)))]
    loads = [0] * len(dealt)
    for item in sorted(items, key=load, reverse=True):
        least = loads.index(min(loads))
        dealt[least].append(item)
        loads[least] += load(item)
    return dealt


class _Side(NamedTuple):
    """One side of a join: a segment file, and which of its points are live."""

    file: str
    live: Live
    points: int


class _FilePair(NamedTuple):
    """A file of the batch, and a file of the window to join it with."""

    new: _Side
    other: _Side
    same_batch: bool


@dataclass(frozen=True)
class _JoinTask:
    """Joins a group of file pairs; writes one file."""

    spec: JoinSpec
    prefix: str
    number: int
    staging: Files
    id_type: pa.DataType
    time_type: pa.DataType
    window: Files
    retained: frozenset[int]

    def __call__(self, group: Sequence[_FilePair], cache: WorkerCache) -> str | None:
        segments = WindowFiles(self.window, cache)
        segments.retain(self.retained)
        writer = TableWriter(self.staging, self.prefix, "pairs", compression="lz4")
        for new, other, same_batch in group:
            found = join_segment(
                segments.segment(new.file),
                new.live,
                segments.segment(other.file),
                other.live,
                self.spec,
                same_batch=same_batch,
                same_segment=new.file == other.file,
            )
            for batch in found:
                if batch.num_rows:
                    writer.write(self._finished(batch))
        return writer.close()

    def _finished(self, batch: pa.RecordBatch) -> pa.Table:
        columns = {"batch_id": as_arrow(np.full(batch.num_rows, self.number, np.int64))}
        for name in join_schema(self.id_type).names:
            column = batch.column(name)
            columns[name] = column.cast(self.time_type) if name.endswith("_time") else column
        return pa.table(columns)


@dataclass
class JoinStage(Stage):
    """Joins the new points of each batch with the window, in tasks of its own."""

    name = "joins"
    kinds = ("pairs",)

    spec: JoinSpec
    window: WindowFiles
    staging: Files
    id_type: pa.DataType  # of the points
    time_type: pa.DataType

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Join the points of the batch with the window of the batch."""
        view: WindowView = batch.outcomes["window"].result
        pairs = list(self._pairs(batch.number, view))
        tasks = GROUPS_PER_SLOT * executor.slots
        groups = deal(pairs, tasks, lambda pair: pair.new.points + pair.other.points)
        task = _JoinTask(
            self.spec,
            batch.prefix,
            batch.number,
            self.staging,
            self.id_type,
            self.time_type,
            self.window.files,
            view.batch_ids,
        )
        names = executor.map(task, groups) if groups else []
        return Outcome({"pairs": [Staged(name) for name in names if name is not None]})

    def _pairs(self, number: int, view: WindowView) -> Iterator[_FilePair]:
        sides = [
            (batch.batch_id == number, _Side(file.file, live, file.points))
            for batch in view.live()
            for file, live in zip(batch.files, view.lives(batch, self.window), strict=True)
        ]
        for new in (side for is_new, side in sides if is_new):
            for same_batch, other in sides:
                yield _FilePair(new, other, same_batch)
