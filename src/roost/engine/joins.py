"""Pairs of points that are near each other in place and time, found batch by batch.

The new points of each machine are joined with the window: with all that is stored of it near them,
whichever machine and plan it was written under, and with the other machines' new points. Segments
are files that any task may map, so nothing has to be copied across the borders of partitions.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import SparkContext

from roost.engine.jobs import deal
from roost.engine.writers import flush_file
from roost.state.store import SegmentRef
from roost.state.windows import SEGMENTS, WindowBatch, WindowView
from roost.window import JoinSpec, Live, join_schema, join_segment

PIECES_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class _Half:
    """A segment file and what of it is live."""

    path: str
    live: Live
    points: int


@dataclass(frozen=True)
class _Task:
    """Some pairs of files to join, by a task that leaves one file."""

    spec: JoinSpec
    batch_id: int
    staging: str
    id_type: pa.DataType
    time_type: pa.DataType
    window: str
    oldest: int

    def __call__(self, groups: Iterable[Sequence[tuple[_Half, _Half, bool]]]) -> Iterator[str]:
        SEGMENTS.forget_before(self.window, self.oldest)
        for group in groups:
            yield from self._join(group)

    def _join(self, group: Sequence[tuple[_Half, _Half, bool]]) -> list[str]:
        path = Path(self.staging) / f"batch-{self.batch_id:010d}-{uuid.uuid4().hex}.parquet"
        writer: pq.ParquetWriter | None = None
        for new, other, same_batch in group:
            found = join_segment(
                SEGMENTS.segment(new.path),
                new.live,
                SEGMENTS.segment(other.path),
                other.live,
                self.spec,
                same_batch=same_batch,
                same_segment=new.path == other.path,
            )
            for batch in found:
                if not batch.num_rows:
                    continue
                table = self._finished(batch)
                if writer is None:
                    writer = pq.ParquetWriter(path, table.schema, compression="lz4")
                writer.write_table(table)
        if writer is None:
            return []
        writer.close()
        flush_file(path)
        return [str(path)]

    def _finished(self, batch: pa.RecordBatch) -> pa.Table:
        schema = join_schema(self.id_type)
        columns: dict[str, pa.Array] = {
            "batch_id": pa.array(np.full(batch.num_rows, self.batch_id, np.int64))
        }
        for name in schema.names:
            column = batch.column(name)
            columns[name] = column.cast(self.time_type) if name.endswith("_time") else column
        return pa.table(columns)


@dataclass
class Joins:
    """Joins the new points of each batch with the window.

    Parameters
    ----------
    context
        Runs the tasks.
    spec
        Which points are joined.
    window_folder, staging
        Where points are, and where pairs are left.
    id_type, time_type
        Types of the points' identifiers and times.
    """

    kinds: ClassVar[tuple[str, ...]] = ("pairs",)

    context: SparkContext
    spec: JoinSpec
    window_folder: Path
    staging: Path
    id_type: pa.DataType
    time_type: pa.DataType

    def write(
        self, batch_id: int, refs: Sequence[SegmentRef], view: WindowView, now: int | None
    ) -> dict[str, list[str]]:
        """Join the newest batch of a window; returns the files by kind."""
        pairs = list(self._pairs(batch_id, view))
        if not pairs:
            return {}
        pieces = PIECES_PER_CORE * self.context.defaultParallelism
        groups = deal(pairs, pieces, lambda pair: pair[0].points + pair[1].points)
        types, folder = (self.id_type, self.time_type), str(self.window_folder)
        task = _Task(self.spec, batch_id, str(self.staging), *types, folder, view.oldest)
        files = self.context.parallelize(groups, len(groups)).mapPartitions(task).collect()
        return {"pairs": files}

    def _pairs(self, batch_id: int, view: WindowView) -> Iterator[tuple[_Half, _Half, bool]]:
        halves = {batch.batch_id: self._halves(view, batch) for batch in view.live()}
        for new in halves.get(batch_id, ()):
            for number, others in halves.items():
                for other in others:
                    yield new, other, number == batch_id

    def _halves(self, view: WindowView, batch: WindowBatch) -> list[_Half]:
        lives = view.lives(batch, self.window_folder)
        return [
            _Half(str(self.window_folder / file.file), live, file.points)
            for file, live in zip(batch.files, lives, strict=True)
        ]
