"""Batches as Spark jobs: one job per batch, one Spark stage per level.

Jobs use the RDD API, which needs no query planning and no extra copy. Only the first level of a
streaming DataFrame differs: ``mapInArrow`` runs it on the DataFrame's rows. The items between two
levels are frames (:mod:`roost.engine.worker`) that the JVM shuffles without decoding them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread, local
from typing import Any, TypeVar, cast

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import RDD, SparkContext
from pyspark.core.rdd import PipelinedRDD
from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame

from roost.engine import worker
from roost.errors import ConfigError
from roost.model.elastic import DEFAULT_GROUP, GroupRules
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import Allocator, Executor, SliceInputs, collected
from roost.stages.contract import Report, Task
from roost.stages.reading import ReadingStage
from roost.storage.cache import WorkerCache

Value = TypeVar("Value")

DEFAULT_PROFILE = 0  # of the default group
JOB_ATTEMPTS = 4  # Spark's default for tasks
WATCH_S = 1.0  # between two looks at the executors of groups during a batch
ABSENT_S = 60.0  # without any executor, after which a batch does not use a group
INDETERMINATE = "indeterminate"
"""Part of the message of a job that Spark fails because a repeated task may differ."""


@dataclass(frozen=True)
class FrameInputs:
    """The rows of a micro-batch of a streaming DataFrame, and what other stages read."""

    frame: DataFrame
    stage: str  # that reads them
    beside: SliceInputs

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[FrameInputs, Mapping[str, Sequence[int]]]:
        """Use one reader per partition of the DataFrame, or per machine of a replicated plan."""
        beside, readers = self.beside.dealt(machines, number, executor)
        frame = self.frame
        if machines is not None and self.stage == ReadingStage.name:
            frame = frame.repartition(machines)
        else:
            machines = frame._jdf.queryExecution().toRdd().getNumPartitions()
        dealt = FrameInputs(frame, self.stage, beside)
        return dealt, {**readers, self.stage: range(machines)}


class SparkExecutor:
    """Runs batches on a Spark context; each of the ``groups`` is a resource profile of Spark."""

    rows_per_task = 4096
    allocator: Allocator | None = None

    def __init__(self, context: SparkContext, groups: Sequence[GroupRules] = ()) -> None:
        self._context = self.context = context
        self.leaving: set[str] = set()  # executors that were released: no machine gets one as home
        self._jvm: Any = context._jvm
        self._tag = f"roost-{uuid.uuid4().hex}"
        self._thread = local()
        self._background = ThreadPoolExecutor(1, "roost-job")
        self._cluster = not context._jsc.isLocal()
        # Objects of the JVM that pinned partitions share: each call creates one partition.
        self._locations: dict[str, Any] = {}  # by executor
        self._singles: dict[int, Any] = {}
        self._profiles = {group.name: self._profile(group) for group in groups}
        self._profile_of: dict[str, int] = {}  # by executor

    def _profile(self, group: GroupRules) -> Any:
        """Return a group as a resource profile."""
        resource = self._jvm.org.apache.spark.resource
        request = resource.ExecutorResourceRequests().cores(group.cores).memory(group.memory)
        profile = resource.ResourceProfileBuilder().require(request).build()
        try:
            self._context._jsc.sc().resourceProfileManager().addResourceProfile(profile)
        except Py4JJavaError as error:
            expected = f"a group that Spark accepts: {error.java_exception.getMessage()}"
            raise ConfigError("elastic.groups", group.name, expected) from None
        return profile

    def profile_id(self, group: str) -> int:
        """Return Spark's number of a group's resource profile."""
        return DEFAULT_PROFILE if group == DEFAULT_GROUP else int(self._profiles[group].id())

    def close(self) -> None:
        """Cancel running jobs: their tasks must not write files after the run has ended."""
        self._cancel()
        self._background.shutdown()
        if hasattr(self._thread, "tagged") and self._context._jsc is not None:
            self._context.removeJobTag(self._tag)

    def _cancel(self) -> None:
        """Cancel running jobs, from a thread that has its own connection to the JVM.

        An exception in a call to the JVM leaves the connection of the calling thread in use.
        """
        if self._context._jsc is not None:  # else the context is stopped
            cancel = Thread(target=self._context.cancelJobsWithTag, args=(self._tag,))
            cancel.start()
            cancel.join()

    @contextmanager
    def _cancelled_on_exit(self) -> Iterator[None]:
        """Tag the jobs of this thread, and cancel them if the driver stops waiting for them.

        A thread is tagged once, since each call to the JVM delays the batch by about a millisecond.
        Job groups are not used: a streaming query sets its own.
        """
        if not hasattr(self._thread, "tagged"):
            self._context.addJobTag(self._tag)
            self._context.setInterruptOnCancel(True)
            self._thread.tagged = True
        try:
            yield
        except Py4JJavaError:
            raise  # Spark has cancelled the other tasks of a job that failed
        except BaseException:
            vars(self._thread).clear()  # the connection that set the tag stays in use
            self._cancel()
            raise

    @property
    def slots(self) -> int:
        """Number of tasks of the default group that run at the same time."""
        if self._profiles and self.allocator is not None:
            return max(len(self.executors()) * self.allocator.slots, 1)
        return self._context.defaultParallelism

    def executors(self, group: str = DEFAULT_GROUP) -> Sequence[str]:
        """Return the registered executors of a group; a local master has only the driver."""
        if not self._cluster:
            return ("driver",)
        return [name for name in self.registered(group) if name not in self.leaving]

    def registered(self, group: str = DEFAULT_GROUP) -> Sequence[str]:
        """Return the names of all executors of a group."""
        text: str = self._context._jsc.sc().getExecutorIds().mkString(" ")
        if not self._profiles:
            return text.split()
        wanted = self.profile_id(group)
        return [name for name in text.split() if self._profile_id_of(name) == wanted]

    def _profile_id_of(self, name: str) -> int | None:
        """Return the number of an executor's profile; None if Spark does not know it any more."""
        if name not in self._profile_of:
            try:
                found = self._context._jsc.sc().statusStore().executorSummary(name)
            except Py4JJavaError:
                return None
            self._profile_of[name] = int(found.resourceProfileId())
        return self._profile_of[name]

    def warm(
        self,
        name: str,
        tasks: int,
        calls: Sequence[Callable[[WorkerCache], None]] = (),
        group: str = DEFAULT_GROUP,
    ) -> bool:
        """Run calls in tasks of an executor of a group; returns whether one of them ran there."""
        items = self._context.parallelize(range(tasks), tasks)
        self._in_group(items._jrdd.rdd(), group)
        rdd = self._placed(items, [name] * tasks)
        with self._cancelled_on_exit():
            return name in rdd.mapPartitions(partial(worker.prepare, calls)).collect()

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run a batch; returns one report per stage and machine.

        If Spark loses blocks of a DataFrame that it takes for indeterminate, the job fails and
        runs again. If a group has no executor for a while, the default group runs the batch again.
        """
        attempts = 0
        with self._cancelled_on_exit(), self._watched(chain) as absent:
            while True:
                attempts += 1
                try:
                    return collected(chain, self._run(inputs, chain, tasks, placement, absent))
                except Py4JJavaError as error:
                    again = absent or INDETERMINATE in str(error.java_exception.getMessage())
                    if not again or attempts == JOB_ATTEMPTS:
                        raise

    @contextmanager
    def _watched(self, chain: Chain) -> Iterator[set[str]]:
        """Cancel the jobs if a group has no executor for a while; yields the names of such groups.

        Spark would wait for one without limit.
        """
        absent: set[str] = set()
        groups = {node.group for node in chain.nodes} - {DEFAULT_GROUP}
        ended = Event()

        def watch() -> None:
            waited = dict.fromkeys(groups, 0.0)
            while not absent and not ended.wait(WATCH_S):
                for group in groups:
                    waited[group] = 0.0 if self.registered(group) else waited[group] + WATCH_S
                absent.update(group for group in groups if waited[group] >= ABSENT_S)
            if absent:
                self._context.cancelJobsWithTag(self._tag)

        watcher = Thread(target=watch, name="roost-groups", daemon=True)
        if groups:
            watcher.start()
        try:
            yield absent
        finally:
            ended.set()
            if groups:
                watcher.join()

    def _run(
        self,
        inputs: Any,
        chain: Chain,
        tasks: Mapping[str, Task],
        placement: Placement,
        absent: Collection[str],
    ) -> list[Report]:
        slices = inputs if isinstance(inputs, SliceInputs) else inputs.beside
        parts = [part for part in chain.parts[0] if part in slices.groups]
        groups = [slices.groups[part] for part in parts]
        if slices is inputs and chain.levels == 1:
            read = self._context.parallelize(groups, len(groups))
            return read.mapPartitionsWithIndex(partial(worker.read_last, chain, tasks)).collect()
        pairs = None
        if groups:
            read = self._context.parallelize(groups, len(groups))
            numbers = [chain.numbers[part] for part in parts]
            pairs = self._pairs(read, partial(worker.run_slices, chain, tasks, numbers))
        if slices is not inputs:
            numbers = [chain.numbers[part] for part in chain.parts[0] if part not in slices.groups]
            run = partial(worker.run_rows, chain, tasks, numbers)
            rows = self._frame_pairs(inputs.frame, run)
            pairs = rows if pairs is None else rows.union(pairs)
        assert pairs is not None
        for level in range(1, chain.levels):
            count = len(chain.parts[level])
            pairs = pairs.partitionBy(self._jvm.PythonPartitioner(count, 0))
            group = DEFAULT_GROUP if chain.group(level) in absent else chain.group(level)
            items = self._items(pairs, placement.homes_of(chain, level), group)
            if level + 1 == chain.levels:
                last = partial(worker.run_last, chain, tasks, level)
                reports = items.mapPartitionsWithIndex(last).collect()
                if slices is inputs:
                    self._delete_blocks(pairs)
                return reports
            pairs = self._pairs(items, partial(worker.run_items, chain, tasks, level))
        return self._items(pairs).collect()

    def _delete_blocks(self, pairs: Any) -> None:
        """Delete the blocks of all exchanges before a JavaPairRDD, without waiting for it.

        Spark does so when the driver's JVM collects garbage, which may be half an hour later: they
        would fill the disk, and the page cache of a small host.
        """
        pairs.rdd().cleanShuffleDependencies(False)

    def _pairs(self, inputs: RDD[Any], run: Callable[[int, Iterable[Any]], Iterator[bytes]]) -> Any:
        """Run a function on each partition; returns its frames as a JavaPairRDD."""
        frames = cast("PipelinedRDD[Any, bytes]", inputs.mapPartitionsWithIndex(run))
        frames._bypass_serializer = True
        return self._jvm.PairwiseRDD(frames._jrdd.rdd()).asJavaPairRDD()

    def _frame_pairs(self, frame: DataFrame, run: Callable[[Iterator[Any]], Iterator[Any]]) -> Any:
        """Run a function on each partition of a DataFrame; returns its rows as a JavaPairRDD."""
        encoders = self._jvm.org.apache.spark.sql.Encoders
        pair = encoders.tuple(encoders.LONG(), encoders.BINARY())
        rows = getattr(frame.mapInArrow(run, worker.ROUTED)._jdf, "as")(pair).rdd()
        tag = self._jvm.scala.reflect.ClassTag.AnyRef()
        return self._jvm.org.apache.spark.api.java.JavaPairRDD.fromRDD(rows, tag, tag)

    def _items(
        self, pairs: Any, homes: Sequence[str | None] = (), group: str = DEFAULT_GROUP
    ) -> RDD[Any]:
        """Return the unpickled values of a JavaPairRDD, whose partitions prefer to run at homes.

        Their stage runs on the executors of a group.
        """
        items = self._jvm.PythonRDD.valueOfPair(pairs)
        self._in_group(items.rdd(), group)
        if any(homes):
            items = self._pinned(items.rdd(), homes)
        return RDD(items, self._context, CPickleSerializer())

    def _in_group(self, items: Any, group: str) -> Any:
        """Let the Spark stage of an RDD of the JVM run on a group; returns the RDD."""
        if group == DEFAULT_GROUP:
            return items
        return items.withResources(self._profiles[group])

    def _pinned(self, items: Any, homes: Sequence[str | None]) -> Any:
        """Return an RDD as a JavaRDD whose partitions prefer to run at their homes.

        No function of Spark takes locations for the partitions of a shuffle. ``coalesce`` to as
        many partitions moves nothing, and each of its partitions names a preferred location, so
        they are replaced.
        """
        none = self._jvm.scala.Option.empty()
        pinned = items.coalesce(len(homes), False, none, None)
        partitions = pinned.partitions()  # the array itself
        create = self._jvm.org.apache.spark.rdd.CoalescedRDDPartition
        for number, home in enumerate(homes):
            location = none if home is None else self._location(home) or none
            partitions[number] = create(number, items, self._single(number), location)
        return pinned.toJavaRDD()

    def _location(self, executor: str) -> Any:
        """Return an executor as Spark names preferred locations; None if Spark has lost it."""
        if executor not in self._locations:
            try:
                found = self._context._jsc.sc().statusStore().executorSummary(executor)
            except Py4JJavaError:
                return None
            host = found.hostPort().rpartition(":")[0]
            self._locations[executor] = self._jvm.scala.Option.apply(f"executor_{host}_{executor}")
        return self._locations[executor]

    def _single(self, number: int) -> Any:
        """Return an array of the JVM with one number."""
        if number not in self._singles:
            self._singles[number] = self._context._gateway.new_array(self._jvm.int, 1)  # type: ignore[union-attr]
            self._singles[number][0] = number
        return self._singles[number]

    def map(
        self,
        call: Callable[[Any, WorkerCache], Value],
        items: Sequence[Any],
        places: Sequence[str | None] = (),
    ) -> list[Value]:
        """Run a function on every item, each in a task of its own."""
        run = partial(worker.run_call, call)
        with self._cancelled_on_exit():
            rdd: RDD[Any] = self._context.parallelize(items, len(items))
            if self._cluster and any(places):
                rdd = self._placed(rdd, places)
            return rdd.mapPartitions(run).collect()

    def _placed(self, items: RDD[Any], places: Sequence[str | None]) -> RDD[Any]:
        """Return an RDD whose partitions prefer to run at executors."""
        pinned = self._pinned(items._jrdd.rdd(), places)
        return RDD(pinned, self._context, items._jrdd_deserializer)

    def submit(
        self, call: Callable[[Any, WorkerCache], Value], items: Sequence[Any]
    ) -> Future[list[Value]]:
        """Run a function on every item beside the batches."""
        return self._background.submit(self.map, call, items)
