"""What runs inside Spark's Python workers: decode, route, pack, match, write.

Everything here is reached by name from the driver, so a worker imports this module once and keeps
its state (mapped segments, routers) from task to task and batch to batch. A task leaves files
under names that no other attempt uses; only what the driver hears of from a successful attempt is
ever published.
"""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.balance import Plan, Router
from roost.engine.decode import (
    MALFORMED,
    ROW,
    DeadRow,
    PointSchema,
    block_schema,
    decode,
    pack_block,
    take_rows,
    unpack_block,
)
from roost.engine.slices import Slice, pieces
from roost.kernel import Index, Pairs
from roost.kernel.arrays import as_arrow, as_numpy
from roost.kernel.cells import locate_cells
from roost.model import DEAD_SCHEMA, PointBlock, match_schema
from roost.space import Space
from roost.state.queries import open_index
from roost.state.store import SegmentRef

ROWS_PER_BLOCK = 1 << 18
ROWS_PER_READ = 1 << 20
ROWS_PER_GROUP = 1 << 20
INDEXES_KEPT = 2

# Workers collect garbage after every task; what is loaded by now will stay, so leave it out.
gc.collect()
gc.freeze()


@dataclass(frozen=True)
class BatchTask:
    """All that a worker must know of a batch."""

    batch_id: int
    space: Space
    plan: Plan
    segment_folder: str
    segments: tuple[SegmentRef, ...]
    points: PointSchema
    wanted: tuple[str, ...]
    query_id_type: pa.DataType
    match_folder: str | None  # None counts matches and writes none
    dead_folder: str


@dataclass
class MachineResult:
    """What one machine did in a batch."""

    machine: int
    points: int = 0
    checks: int = 0
    matches: int = 0
    busy_s: float = 0.0
    rows: int = 0
    dead: int = 0
    match_files: list[str] = field(default_factory=list)
    dead_files: list[str] = field(default_factory=list)


@lru_cache(maxsize=INDEXES_KEPT)
def _index(folder: str, segments: tuple[SegmentRef, ...], space: Space) -> Index:
    return open_index(Path(folder), segments, space)


@lru_cache(maxsize=2)
def _router(plan: Plan) -> Router:
    return Router(plan)


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


class BlockReader:
    """Slices or tables into decoded blocks, counting rows and keeping the dead."""

    def __init__(self, task: BatchTask) -> None:
        self._task = task
        self.rows = 0
        self.dead: list[DeadRow] = []

    def columns(self) -> list[str]:
        """Columns to ask a slice for."""
        points = self._task.points
        # The row's number costs next to nothing, and a dead letter without it cannot be traced.
        own = [points.x, points.y, points.time, points.point_id or ROW, ROW]
        return list(dict.fromkeys([*own, *self._task.wanted, MALFORMED]))

    def blocks(self, tables: Iterable[pa.Table]) -> Iterator[PointBlock]:
        """Decode tables."""
        task = self._task
        for table in tables:
            self.rows += table.num_rows
            block, dead = decode(table, task.points, task.space, task.wanted)
            if dead:
                self.dead += dead
            if block.size:
                yield block

    def tables(self, slices: Iterable[Slice]) -> Iterator[pa.Table]:
        """Read slices, a block's worth of rows at a time."""
        columns = self.columns()
        for item in slices:
            for part in pieces(item, ROWS_PER_READ):
                table = part.read(columns)
                for start in range(0, table.num_rows, ROWS_PER_BLOCK):
                    yield table.slice(start, ROWS_PER_BLOCK)

    def finish(self, result: MachineResult, tag: str) -> None:
        """Write the dead letters and add what was read to a result."""
        task = self._task
        result.rows += self.rows
        result.dead += len(self.dead)
        result.dead_files += write_dead(task.dead_folder, task.batch_id, "point", self.dead, tag)


def match_blocks(
    task: BatchTask, machine: int, blocks: Iterable[PointBlock], result: MachineResult
) -> None:
    """Match blocks with the batch's queries and write what comes of it."""
    index = _index(task.segment_folder, task.segments, task.space)
    checks = index.checks
    writer = MatchWriter(task, machine) if task.match_folder is not None else None
    for block in blocks:
        result.points += block.size
        for pairs in index.match(block):
            result.matches += pairs.slots.size
            if writer is not None:
                writer.add(pairs, block)
    result.checks = index.checks - checks
    if writer is not None:
        result.match_files = writer.close()


def read_and_match(
    task: BatchTask, machine: int, slices: Iterable[Sequence[Slice]]
) -> Iterator[MachineResult]:
    """Task of a replicated plan: whoever reads a point may match it, so nothing is shuffled."""
    started = time.process_time()
    result = MachineResult(machine)
    reader = BlockReader(task)
    tables = (table for group in slices for table in reader.tables(group))
    match_blocks(task, machine, reader.blocks(tables), result)
    reader.finish(result, f"{machine:05d}")
    result.busy_s = time.process_time() - started
    yield result


def route_blocks(task: BatchTask, blocks: Iterable[PointBlock]) -> Iterator[tuple[int, bytes]]:
    """Pack the points of each machine into one block."""
    grid = task.space.grid
    router = _router(task.plan)
    schema = block_schema(task.points, task.wanted)
    for block in blocks:
        cells = locate_cells(block.x, block.y, grid.edges_x, grid.edges_y)
        machine = router.machines_of(cells)
        order = np.argsort(machine.astype(np.int16), kind="stable")
        borders = np.searchsorted(machine[order], np.arange(task.plan.machines + 1))
        for number in range(task.plan.machines):
            rows = order[borders[number] : borders[number + 1]]
            if rows.size:
                yield number, pack_block(take_rows(block, rows), schema)


def read_and_route(
    task: BatchTask, part: int, slices: Iterable[Sequence[Slice]]
) -> Iterator[tuple[int, bytes | MachineResult]]:
    """First task of a partitioned plan; its own figures travel to machine 0 as well."""
    reader = BlockReader(task)
    tables = (table for group in slices for table in reader.tables(group))
    yield from route_blocks(task, reader.blocks(tables))
    figures = MachineResult(0)
    reader.finish(figures, f"r{part:05d}")
    yield 0, figures


def match_routed(
    task: BatchTask, machine: int, items: Iterable[tuple[int, bytes | MachineResult]]
) -> Iterator[MachineResult]:
    """Second task of a partitioned plan: match what was routed to this machine."""
    started = time.process_time()
    result = MachineResult(machine)

    def blocks() -> Iterator[PointBlock]:
        for _, item in items:
            if isinstance(item, MachineResult):
                result.rows += item.rows
                result.dead += item.dead
                result.dead_files += item.dead_files
            else:
                yield unpack_block(item)

    match_blocks(task, machine, blocks(), result)
    result.busy_s = time.process_time() - started
    yield result
