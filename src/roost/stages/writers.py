"""Output files of a task: matches and dead letters, under names unique to the attempt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.kernel import Pairs
from roost.model.arrays import as_arrow, as_numpy
from roost.model.records import DeadLetter
from roost.model.schemas import DEAD_SCHEMA, PointBlock
from roost.storage.files import Files

ROWS_PER_GROUP = 1 << 20


class TableWriter:
    """Writes tables to a new Parquet file, which is created with the first table."""

    def __init__(self, files: Files, prefix: str, label: str, **options: Any) -> None:
        self._name = files.name(prefix, label, ".parquet")
        self._path = files.path(self._name)
        self._options = options
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Write a table as one row group."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, **self._options)
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))

    def close(self) -> str | None:
        """Flush the file to the disk; returns its name, or None if nothing was written."""
        if self._writer is None:
            return None
        self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return self._name


class MatchWriter:
    """Writes the matches of one machine, in row groups of about ``ROWS_PER_GROUP``."""

    def __init__(
        self, files: Files, prefix: str, machine: int, number: int, schema: pa.Schema
    ) -> None:
        # Identifiers hardly repeat: a dictionary would only cost time. Points do repeat, once for
        # each of their matches, which the fast codec exploits as well.
        self._writer = TableWriter(
            files,
            prefix,
            f"{machine:05d}",
            compression="lz4",
            use_dictionary=["batch_id"],
            write_statistics=["batch_id", "event_time"],
        )
        self._number = number
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, pairs: Pairs, block: PointBlock) -> None:
        """Add a chunk of pairs."""
        slots, rows = pairs.slots, pairs.rows
        columns = [
            as_arrow(np.full(slots.size, self._number, np.int64)),
            pairs.segment.ids_at(slots),
            _taken(block.ids, rows),
            as_arrow(block.time[rows]).cast(self._schema.field("event_time").type),
        ]
        self._waiting.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._rows += slots.size
        if self._rows >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        self._writer.write(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._rows = [], 0

    def close(self) -> str | None:
        """Finish the file; returns its name, or None if there was no match."""
        if self._waiting:
            self._flush()
        return self._writer.close()


def _taken(ids: pa.Array, rows: NDArray[Any]) -> pa.Array:
    """Return some identifiers; numpy is faster for numbers."""
    if pa.types.is_integer(ids.type):
        return as_arrow(as_numpy(ids)[rows])
    return ids.take(as_arrow(rows))


def write_table(files: Files, prefix: str, label: str, table: pa.Table) -> str:
    """Write a table to a new Parquet file; returns its name."""
    writer = TableWriter(files, prefix, label, compression="zstd")
    writer.write(table)
    name = writer.close()
    assert name is not None
    return name


def write_dead(
    files: Files, prefix: str, number: int, origin: str, rows: Sequence[DeadLetter], label: str
) -> tuple[str, ...]:
    """Write dead letters to a new file; returns its name, or nothing if there are none."""
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
