"""Joins: pairs of points that are near each other in place and time, found batch by batch.

The new points of each machine are joined with the window: with all that is stored of it near them,
whichever machine and plan it was written under, and with the other machines' new points. Segments
are files that any task may map, so nothing has to be copied across the borders of partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Reports,
    Stage,
    Staged,
)
from roost.stages.writers import flush_file
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.window import JoinSpec, Live, join_schema, join_segment
from roost.window.view import WindowBatch, WindowFiles, WindowView

GROUPS_PER_SLOT = 2
Value = TypeVar("Value")


def deal(items: Sequence[Value], groups: int, load: Callable[[Value], int]) -> list[list[Value]]:
    """Deal items to so many groups at most, the largest first, each to the least loaded one."""
    dealt: list[list[Value]] = [[] for _ in range(min(groups, len(items)))]
    loads = [0] * len(dealt)
    for item in sorted(items, key=load, reverse=True):
        least = loads.index(min(loads))
        dealt[least].append(item)
        loads[least] += load(item)
    return dealt


@dataclass(frozen=True, slots=True)
class _Half:
    """A segment file and what of it is live."""

    file: str
    live: Live
    points: int


_Pair = tuple[_Half, _Half, bool]


@dataclass(frozen=True)
class _JoinTask:
    """Joins some pairs of files; writes one file."""

    spec: JoinSpec
    prefix: str
    number: int
    staging: Files
    id_type: pa.DataType
    time_type: pa.DataType
    window: Files
    retained: frozenset[int]

    def __call__(self, group: Sequence[_Pair], cache: WorkerCache) -> str | None:
        segments = WindowFiles(self.window, cache)
        segments.retain(self.retained)
        name = self.staging.name(self.prefix, "pairs", ".parquet")
        path = self.staging.path(name)
        writer: pq.ParquetWriter | None = None
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
                if not batch.num_rows:
                    continue
                table = self._finished(batch)
                if writer is None:
                    writer = pq.ParquetWriter(path, table.schema, compression="lz4")
                writer.write_table(table)
        if writer is None:
            return None
        writer.close()
        flush_file(path)
        return name

    def _finished(self, batch: pa.RecordBatch) -> pa.Table:
        schema = join_schema(self.id_type)
        columns: dict[str, pa.Array] = {
            "batch_id": pa.array(np.full(batch.num_rows, self.number, np.int64))
        }
        for name in schema.names:
            column = batch.column(name)
            columns[name] = column.cast(self.time_type) if name.endswith("_time") else column
        return pa.table(columns)


@dataclass
class JoinStage(Stage):
    """Joins the new points of each batch with the window, in tasks of its own.

    Parameters
    ----------
    spec
        Which points are joined.
    window
        Where points are.
    staging
        Where pairs are staged.
    id_type, time_type
        Types of the points' identifiers and times.
    """

    name = "joins"
    kinds = ("pairs",)

    spec: JoinSpec
    window: WindowFiles
    staging: Files
    id_type: pa.DataType
    time_type: pa.DataType

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Join the points of the batch with the window of the batch."""
        view: WindowView = batch.outcomes["window"].result
        pairs = list(self._pairs(batch.number, view))
        groups = deal(pairs, GROUPS_PER_SLOT * executor.slots, lambda p: p[0].points + p[1].points)
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

    def _pairs(self, number: int, view: WindowView) -> Iterator[_Pair]:
        halves = {batch.batch_id: self._halves(view, batch) for batch in view.live()}
        for new in halves.get(number, ()):
            for other_number, others in halves.items():
                for other in others:
                    yield new, other, other_number == number

    def _halves(self, view: WindowView, batch: WindowBatch) -> list[_Half]:
        lives = view.lives(batch, self.window)
        return [
            _Half(file.file, live, file.points)
            for file, live in zip(batch.files, lives, strict=True)
        ]
