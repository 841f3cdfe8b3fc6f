"""A batch as a Spark job, in its two forms.

Roost's own sources go through the RDD API: a job of slices needs no query planning and no extra
copy, which takes a third of the time of the same job as a DataFrame. A foreign streaming
DataFrame stays a DataFrame: its rows are decoded in ``mapInArrow``, packed into one block a
machine, and shuffled by ``repartitionById``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa
from pyspark import SparkContext, TaskContext
from pyspark.sql import DataFrame

from roost.engine.decode import ROW
from roost.engine.json_lines import read_json_messages
from roost.engine.machine import match_blocks
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.slices import Slice, cut
from roost.engine.tasks import (
    BlockReader,
    match_routed,
    read_and_match,
    read_and_route,
    route_blocks,
)

Item = TypeVar("Item")
ROWS_PER_TASK_MIN = 4096
_ROUTED = "machine int, block binary"
_RESULT = "result binary"
_REPORT = b"R"  # first byte of a block that carries figures, not points
_POINTS = b"P"


def _same(machine: int) -> int:
    return machine


def deal(items: Sequence[Item], tasks: int, load: Callable[[Item], int]) -> list[list[Item]]:
    """Deal items to so many tasks at most, the largest first, each to the one with the least."""
    groups: list[list[Item]] = [[] for _ in range(min(tasks, len(items)))]
    loads = [0] * len(groups)
    for item in sorted(items, key=load, reverse=True):
        least = loads.index(min(loads))
        groups[least].append(item)
        loads[least] += load(item)
    return groups


def _machines_used(slices: Sequence[Slice], task: BatchTask) -> list[int]:
    """Machines of a replicated batch: as many as it has work for, taking turns.

    Any machine may take any point, and launching a task costs more than matching a few thousand.
    """
    machines = task.plan.machines
    rows = sum(item.rows for item in slices)
    count = min(machines, max(1, rows // ROWS_PER_TASK_MIN))
    first = task.batch_id * count
    return [(first + k) % machines for k in range(count)]


def _read_as(
    task: BatchTask, machines: list[int], part: int, slices: Iterator[Sequence[Slice]]
) -> Iterator[MachineResult]:
    return read_and_match(task, machines[part], slices)


def run_slices(
    context: SparkContext, slices: Sequence[Slice], task: BatchTask
) -> list[MachineResult]:
    """Run a batch of slices."""
    machines = task.plan.machines
    if task.plan.fully_replicated:
        used = _machines_used(slices, task)
        groups = context.parallelize(cut(slices, len(used)), len(used))
        results = groups.mapPartitionsWithIndex(partial(_read_as, task, used)).collect()
        idle = (machine for machine in range(machines) if machine not in used)
        return results + [MachineResult(machine) for machine in idle]
    parts = context.defaultParallelism
    groups = context.parallelize(cut(slices, parts), parts)
    routed = groups.mapPartitionsWithIndex(partial(read_and_route, task))
    placed = routed.partitionBy(machines, _same)
    return placed.mapPartitionsWithIndex(partial(match_routed, task)).collect()


def run_frame(frame: DataFrame, json_column: str | None, task: BatchTask) -> list[MachineResult]:
    """Run a batch of a foreign DataFrame.

    Parameters
    ----------
    frame
        The batch's rows.
    json_column
        Column that holds each point as JSON text, as in a Kafka message; None takes the columns.
    task
        What to do with them.
    """
    if task.plan.fully_replicated:
        spread = frame.repartition(task.plan.machines)
        done = spread.mapInArrow(partial(_match_rows, task, json_column), _RESULT)
    else:
        routed = frame.mapInArrow(partial(_route_rows, task, json_column), _ROUTED)
        placed = routed.repartitionById(task.plan.machines, "machine")
        done = placed.mapInArrow(partial(_match_packed, task), _RESULT)
    return [pickle.loads(bytes(row["result"])) for row in done.collect()]


def _tables(
    batches: Iterator[pa.RecordBatch], json_column: str | None, task: BatchTask
) -> Iterator[pa.Table]:
    types = {name: task.points.attributes.field(name).type for name in task.wanted}
    exact = {name for name, kind in types.items() if not pa.types.is_floating(kind)}
    exact.add(task.points.point_id or ROW)
    for batch in batches:
        if json_column is None:
            yield pa.Table.from_batches([batch])
        else:
            yield read_json_messages(batch.column(json_column).to_pylist(), exact)


def _result_batch(result: MachineResult) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"result": pa.array([pickle.dumps(result)], pa.binary())})


def _match_rows(
    task: BatchTask, json_column: str | None, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    started = time.process_time()
    context = TaskContext.get()
    assert context is not None
    result = MachineResult(context.partitionId())
    reader = BlockReader(task)
    blocks = reader.blocks(_tables(batches, json_column, task))
    match_blocks(task, blocks, result)
    reader.finish(result, f"{result.machine:05d}")
    result.busy_s = time.process_time() - started
    yield _result_batch(result)


def _routed_batch(machine: int, block: bytes) -> pa.RecordBatch:
    columns = [pa.array([machine], pa.int32()), pa.array([block], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, ["machine", "block"])


def _route_rows(
    task: BatchTask, json_column: str | None, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    reader = BlockReader(task)
    for machine, block in route_blocks(task, reader.blocks(_tables(batches, json_column, task))):
        yield _routed_batch(machine, _POINTS + block)
    figures = MachineResult(0)
    reader.finish(figures, f"r{context.partitionId():05d}")
    yield _routed_batch(0, _REPORT + pickle.dumps(figures))


def _match_packed(task: BatchTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None

    def items() -> Iterator[tuple[int, bytes | MachineResult]]:
        for batch in batches:
            for machine, block in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                if block[:1] == _REPORT:
                    yield machine, pickle.loads(block[1:])
                else:
                    yield machine, block[1:]

    for result in match_routed(task, context.partitionId(), items()):
        yield _result_batch(result)
