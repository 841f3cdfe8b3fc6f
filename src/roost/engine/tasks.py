"""What runs inside Spark's Python workers: decode, route, pack, match, write.

Everything here is reached by name from the driver, so a worker imports this module once and keeps
its state (mapped segments, routers) from task to task and batch to batch. A task leaves files
under names that no other attempt uses; only what the driver hears of from a successful attempt is
ever published.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from roost.engine.decode import (
    MALFORMED,
    ROW,
    DeadRow,
    block_schema,
    decode,
    pack_columns,
    pack_rows,
    take_rows,
)
from roost.engine.machine import match_blocks, match_packed, router_of
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.slices import Slice, pieces
from roost.engine.writers import write_dead
from roost.kernel.cells import locate_cells
from roost.model import PointBlock

ROWS_PER_BLOCK = 1 << 18
ROWS_PER_READ = 1 << 20

# Workers collect garbage after every task; what is loaded by now will stay, so leave it out.
gc.collect()
gc.freeze()


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
            block, dead = decode(table, task.points, task.space, task.wanted, task.late_before)
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


def read_and_match(
    task: BatchTask, machine: int, slices: Iterable[Sequence[Slice]]
) -> Iterator[MachineResult]:
    """Task of a replicated plan: whoever reads a point may match it, so nothing is shuffled."""
    started = time.process_time()
    result = MachineResult(machine)
    reader = BlockReader(task)
    tables = (table for group in slices for table in reader.tables(group))
    match_blocks(task, reader.blocks(tables), result)
    reader.finish(result, f"{machine:05d}")
    result.busy_s = time.process_time() - started
    yield result


def route_blocks(task: BatchTask, blocks: Iterable[PointBlock]) -> Iterator[tuple[int, bytes]]:
    """Pack the points of each machine into one block."""
    grid = task.space.grid
    router = router_of(task.plan)
    schema = block_schema(task.points, task.wanted)
    for block in blocks:
        cells = locate_cells(block.x, block.y, grid.edges_x, grid.edges_y)
        machine = router.machines_of(cells)
        order = np.argsort(machine.astype(np.int16), kind="stable")
        packed = pack_columns(take_rows(block, order), cells[order], schema)
        borders = np.searchsorted(machine[order], np.arange(task.plan.machines + 1)).tolist()
        for number, (start, stop) in enumerate(pairwise(borders)):
            if start < stop:
                yield number, pack_rows(packed, start, stop)


def read_and_route(
    task: BatchTask, part: int, slices: Iterable[Sequence[Slice]]
) -> Iterator[tuple[int, bytes | MachineResult]]:
    """First task of a partitioned plan; its own figures travel to machine 0 as well."""
    started = time.process_time()
    reader = BlockReader(task)
    tables = (table for group in slices for table in reader.tables(group))
    yield from route_blocks(task, reader.blocks(tables))
    figures = MachineResult(0)
    reader.finish(figures, f"r{part:05d}")
    figures.route_s = time.process_time() - started
    yield 0, figures


def match_routed(
    task: BatchTask, machine: int, items: Iterable[tuple[int, bytes | MachineResult]]
) -> Iterator[MachineResult]:
    """Second task of a partitioned plan: match what was routed to this machine."""
    started = time.process_time()
    result = MachineResult(machine)

    def packed() -> Iterator[bytes]:
        for _, item in items:
            if isinstance(item, MachineResult):
                result.rows += item.rows
                result.dead += item.dead
                result.dead_files += item.dead_files
                result.route_s += item.route_s
            else:
                yield item

    match_packed(task, packed(), result)
    result.busy_s = time.process_time() - started
    yield result
