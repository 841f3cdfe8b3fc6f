"""Batches as Spark jobs: one job per batch, one Spark stage per level.

Slices go through the RDD API: such a job needs no query planning and no extra copy, which takes a
third of the time of the same job as a DataFrame. A streaming DataFrame stays a DataFrame: its rows
are decoded in ``mapInArrow`` and its blocks shuffled by ``repartitionById``. Both run the same task
code, :func:`roost.runtime.part.run_part`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.sql import DataFrame

from roost.engine import worker
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import Executor, SliceInputs, collected
from roost.stages.contract import Report, Task
from roost.storage.cache import WorkerCache

Value = TypeVar("Value")

JOB_ATTEMPTS = 4  # as many as Spark makes of a task
INDETERMINATE = "indeterminate"
"""Part of the message of a job that failed because a repeated task wrote other blocks."""


@dataclass(frozen=True)
class FrameInputs:
    """The rows of a micro-batch of a streaming DataFrame."""

    frame: DataFrame

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[FrameInputs, tuple[int, ...]]:
        """Use one reader per partition of the DataFrame, or per machine of a replicated plan."""
        if machines is not None:
            return FrameInputs(self.frame.repartition(machines)), tuple(range(machines))
        partitions = self.frame._jdf.queryExecution().toRdd().getNumPartitions()
        return self, tuple(range(partitions))


def _same(part: int) -> int:
    return part


class SparkExecutor:
    """Runs batches on a Spark context.

    Parameters
    ----------
    context
        Where tasks run.
    """

    rows_per_task = 4096

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._background = ThreadPoolExecutor(1, "roost-job")

    @property
    def slots(self) -> int:
        """Number of tasks that run at the same time."""
        return self._context.defaultParallelism

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run a batch; returns one report per stage and machine."""
        if isinstance(inputs, SliceInputs):
            return collected(chain, self._run_slices(inputs, chain, tasks))
        return collected(chain, self._run_frame(inputs, chain, tasks))

    def _run_slices(
        self, inputs: SliceInputs, chain: Chain, tasks: Mapping[str, Task]
    ) -> list[Report]:
        groups = self._context.parallelize(inputs.groups, len(inputs.groups))
        items = groups.mapPartitionsWithIndex(partial(worker.run_slices, chain, tasks))
        for level in range(1, chain.levels):
            placed = items.partitionBy(len(chain.parts(level)), _same)
            run = partial(worker.run_items, chain, tasks, level)
            items = placed.mapPartitionsWithIndex(run)
        return [item for _, item in items.collect() if isinstance(item, Report)]

    def _run_frame(
        self, inputs: FrameInputs, chain: Chain, tasks: Mapping[str, Task]
    ) -> list[Report]:
        """Run a batch of a DataFrame, again if blocks of the exchange are lost in mid-batch.

        Spark compares what a repeated task writes with what it wrote before. That differs, if only
        in the times of the reports, and Spark fails the job where other tasks are done already.
        """
        for _ in range(JOB_ATTEMPTS - 1):
            try:
                return self._run_frame_once(inputs, chain, tasks)
            except Py4JJavaError as error:
                if INDETERMINATE not in str(error.java_exception.getMessage()):
                    raise
        return self._run_frame_once(inputs, chain, tasks)

    def _run_frame_once(
        self, inputs: FrameInputs, chain: Chain, tasks: Mapping[str, Task]
    ) -> list[Report]:
        items = inputs.frame.mapInArrow(partial(worker.run_rows, chain, tasks), worker.ROUTED)
        for level in range(1, chain.levels):
            placed = items.repartitionById(len(chain.parts(level)), "part")
            run = partial(worker.run_packed, chain, tasks, level)
            items = placed.mapInArrow(run, worker.ROUTED)
        return [pickle.loads(row["item"]) for row in items.collect()]

    def map(self, call: Callable[[Any, WorkerCache], Value], items: Sequence[Any]) -> list[Value]:
        """Run a function on every item, each in a task of its own."""
        run = partial(worker.run_call, call)
        return self._context.parallelize(items, len(items)).mapPartitions(run).collect()

    def submit(
        self, call: Callable[[Any, WorkerCache], Value], items: Sequence[Any]
    ) -> Future[list[Value]]:
        """Run a function on every item beside the batches."""
        return self._background.submit(self.map, call, items)
