"""One machine's share of a batch under a partitioned plan.

Points come as packed blocks and are gathered until there are enough of them to be worth a pass
over the index. On the way the machine notes what the balancer wants to know; TrioStat's
statistics stay here, in a file of the machine's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan, Router
from roost.engine.decode import block_schema, unpack_blocks
from roost.engine.machine_stats import keep_statistics
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.window_writer import WindowWriter
from roost.engine.writers import MatchWriter
from roost.kernel import Index, preload
from roost.model import PointBlock
from roost.space import Space
from roost.state.partitions import bounds_of
from roost.state.queries import open_index
from roost.state.store import SegmentRef
from roost.workload import CellCounter

ROWS_PER_MATCH = 1 << 18
BYTES_PER_ROW = 36  # of a packed point without attributes
INDEXES_KEPT = 2

# Points and, where they were routed, their cells.
Block = tuple[PointBlock, NDArray[np.int32] | None]


@lru_cache(maxsize=INDEXES_KEPT)
def _index(folder: str, segments: tuple[SegmentRef, ...], space: Space) -> Index:
    return open_index(Path(folder), segments, space)


def index_of(task: BatchTask) -> Index:
    """Open the queries of a batch; a worker keeps them mapped from task to task."""
    return _index(task.segment_folder, task.segments, task.space)


@lru_cache(maxsize=2)
def router_of(plan: Plan) -> Router:
    """Unrolled plan; a worker keeps it from task to task."""
    return Router(plan)


@lru_cache(maxsize=1)
def _counter(cells: int) -> CellCounter:
    return CellCounter(cells)


def match_blocks(task: BatchTask, blocks: Iterable[PointBlock], result: MachineResult) -> None:
    """Match blocks with the queries of the batch and write what comes of it."""
    _match(task, ((block, None) for block in blocks), result)


def _match(task: BatchTask, blocks: Iterable[Block], result: MachineResult) -> None:
    index = index_of(task)
    checks = index.checks
    writer = MatchWriter(task, result.machine) if task.match_folder is not None else None
    window = None
    if task.window is not None:
        window = WindowWriter(task, task.window, result.machine, router_of(task.plan))
    for block, cells in blocks:
        result.points += block.size
        oldest, newest = int(block.time.min()), int(block.time.max())
        result.time_min = oldest if result.time_min is None else min(result.time_min, oldest)
        result.time_max = newest if result.time_max is None else max(result.time_max, newest)
        if window is not None:
            window.add(block, cells)
        for pairs in index.match(block):
            if pairs.segment.wants is not None:
                assert window is not None, "who wants something of the window needs one"
                pairs = window.take_standing(pairs)
            result.matches += pairs.slots.size
            if writer is not None and pairs.slots.size:
                writer.add(pairs, block)
    result.checks = index.checks - checks
    if writer is not None:
        result.match_files = writer.close()
    if window is not None:
        result.window = window.close()


def match_packed(task: BatchTask, packed: Iterable[bytes], result: MachineResult) -> None:
    """Match what was routed to a machine, and note what the balancer wants to know."""
    _load_arrivals(task, result)
    gathered = _gathered(packed, block_schema(task.points, task.wanted))
    if not task.count_cells and task.trio is None:
        _match(task, gathered, result)
        return
    counter = _counter(task.plan.columns * task.plan.rows)
    counter.take()  # an attempt that failed may have left something

    def counted() -> Iterator[Block]:
        for block, cells in gathered:
            counter.add(cells)
            yield block, cells

    _match(task, counted(), result)
    counts = counter.take()
    if task.count_cells:
        result.cells = counts
    if task.trio is not None:
        keep_statistics(task, task.trio, counts, result)


def _load_arrivals(task: BatchTask, result: MachineResult) -> None:
    """Read the queries of partitions that the machine was given, and measure it."""
    arrived = task.arrivals.get(result.machine, ())
    if arrived:
        started = time.process_time()
        bounds = [
            bounds_of(p, task.space) for p in task.plan.partitions if p.partition_id in arrived
        ]
        result.loaded_bytes = preload(index_of(task), np.asarray(bounds))
        result.loaded_queries = task.arriving.get(result.machine, 0)
        result.load_s = time.process_time() - started


def _gathered(
    packed: Iterable[bytes], schema: pa.Schema
) -> Iterator[tuple[PointBlock, NDArray[np.int32]]]:
    """Join blocks: many points at once share the lists of their cells."""
    waiting: list[bytes] = []
    size = 0
    for item in packed:
        waiting.append(item)
        size += len(item)
        if size >= ROWS_PER_MATCH * BYTES_PER_ROW:
            yield unpack_blocks(waiting, schema)
            waiting, size = [], 0
    if waiting:
        yield unpack_blocks(waiting, schema)
