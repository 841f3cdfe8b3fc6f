"""Output files of a task: matches and dead-letter records, under names unique to the attempt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.kernel import Pairs
from roost.model.arrays import as_arrow, as_numpy
from roost.model.schemas import DEAD_SCHEMA, PointBlock
from roost.stages.decode import DeadRow
from roost.storage.files import Files

ROWS_PER_GROUP = 1 << 20


class MatchWriter:
    """Writes the matches of one machine to one Parquet file, opened at the first match.

    Parameters
    ----------
    files, name
        Where the file goes, and its name.
    number
        Number of the batch.
    schema
        Columns of matches.
    """

    def __init__(self, files: Files, name: str, number: int, schema: pa.Schema) -> None:
        self._schema = schema
        self._number = number
        self._name = name
        self._path = files.path(name)
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, pairs: Pairs, block: PointBlock) -> None:
        """Add a chunk of pairs."""
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
        batch = as_arrow(np.full(slots.size, self._number, np.int64))
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

    def close(self) -> str | None:
        """Finish the file; returns its name, or None if there was no match."""
        if self._waiting:
            self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        flush_file(self._path)
        return self._name


def flush_file(path: Path) -> None:
    """Flush a file to the disk before a commit names it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_table(
    files: Files, prefix: str, label: str, table: pa.Table, compression: str = "zstd"
) -> str:
    """Write a table to a new Parquet file; returns its name."""
    name = files.name(prefix, label, ".parquet")
    path = files.path(name)
    pq.write_table(table, path, compression=compression)
    flush_file(path)
    return name


def write_dead(
    files: Files, prefix: str, number: int, origin: str, rows: Sequence[DeadRow], label: str
) -> tuple[str, ...]:
    """Write dead-letter records to a new file; returns its name, or nothing if there are none."""
    if not rows:
        return ()
    columns: list[Any] = [
        [number] * len(rows),
        [origin] * len(rows),
        [row.position for row in rows],
        [str(row.reason) for row in rows],
        [row.detail for row in rows],
        [row.record for row in rows],
    ]
    return (write_table(files, prefix, label, pa.table(columns, schema=DEAD_SCHEMA)),)
