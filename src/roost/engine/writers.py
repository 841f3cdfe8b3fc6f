"""Files that a task leaves: matches and dead letters, each under a name of its own attempt."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.engine.decode import DeadRow
from roost.engine.messages import BatchTask
from roost.kernel import Pairs
from roost.kernel.arrays import as_arrow, as_numpy
from roost.model import DEAD_SCHEMA, PointBlock, match_schema

ROWS_PER_GROUP = 1 << 20


class MatchWriter:
    """Matches of one machine into one Parquet file, opened at the first match."""

    def __init__(self, task: BatchTask, machine: int) -> None:
        assert task.match_folder is not None
        self._schema = match_schema(task.query_id_type, task.points.id_type, task.points.time_type)
        self._batch_id = task.batch_id
        name = f"batch-{task.batch_id:010d}-{machine:05d}-{uuid.uuid4().hex}.parquet"
        self._path = Path(task.match_folder) / name
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, pairs: Pairs, block: PointBlock) -> None:
        """Take a chunk of pairs."""
        slots, rows = pairs.slots, pairs.rows
        if pa.types.is_integer(self._schema.field("query_id").type):
            query_ids = as_arrow(as_numpy(pairs.segment.ids)[slots])
        else:
            query_ids = pairs.segment.ids.take(as_arrow(slots))
        if pa.types.is_integer(block.ids.type):
            point_ids = as_arrow(as_numpy(block.ids)[rows])
        else:
            point_ids = block.ids.take(as_arrow(rows))
        times = as_arrow(block.time[rows]).cast(self._schema.field("event_time").type)
        batch = as_arrow(np.full(slots.size, self._batch_id, np.int64))
        self._waiting.append(
            pa.RecordBatch.from_arrays([batch, query_ids, point_ids, times], schema=self._schema)
        )
        self._rows += slots.size
        if self._rows >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            # Identifiers hardly repeat: a dictionary would only cost time. Points do repeat,
            # once for each of their matches, which the fast codec sees as well.
            self._writer = pq.ParquetWriter(
                self._path,
                self._schema,
                compression="lz4",
                use_dictionary=["batch_id"],
                write_statistics=["batch_id", "event_time"],
            )
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._waiting, self._rows = [], 0

    def close(self) -> list[str]:
        """Finish the file; returns its path, or nothing where there was no match."""
        if self._waiting:
            self._flush()
        if self._writer is None:
            return []
        self._writer.close()
        flush_file(self._path)
        return [str(self._path)]


def flush_file(path: Path) -> None:
    """Make sure that a file's data is on the disk before a commit names it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_dead(
    folder: str, batch_id: int, origin: str, rows: Sequence[DeadRow], tag: str
) -> list[str]:
    """Write dead letters to a new file; returns its path, or nothing where there are none."""
    if not rows:
        return []
    columns: list[Any] = [
        [batch_id] * len(rows),
        [origin] * len(rows),
        [row.position for row in rows],
        [str(row.reason) for row in rows],
        [row.detail for row in rows],
        [row.record for row in rows],
    ]
    path = Path(folder) / f"batch-{batch_id:010d}-{tag}-{uuid.uuid4().hex}.parquet"
    pq.write_table(pa.table(columns, schema=DEAD_SCHEMA), path, compression="zstd")
    flush_file(path)
    return [str(path)]
