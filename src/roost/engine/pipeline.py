"""The pipeline: one state directory, one source of points, one loop of batches.

:class:`Pipeline` is what users hold. It puts the parts together from a :class:`RunConfig`, takes
requests, and runs batches from Roost's own sources (:meth:`Pipeline.run`) or from any streaming
DataFrame (:meth:`Pipeline.start`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from roost.balance.strategies import default_strategy
from roost.config import RunConfig, check_together
from roost.engine.batch import STAGING, Answerer, BatchRunner
from roost.engine.decode import PointSchema
from roost.engine.files import read_requests
from roost.engine.jobs import run_frame, run_slices
from roost.engine.joins import Joins
from roost.engine.kafka import VALUE, Topic, kafka_address
from roost.engine.planning import Sampled, ensure_plan, make_balancer
from roost.engine.report import build_report
from roost.engine.request_stream import append_batch
from roost.engine.schema import (
    aliases_of,
    message_schema,
    point_schema,
    space_for,
    time_unit,
    window_attributes,
)
from roost.engine.session import check_session, make_session
from roost.engine.sinks import ConsoleSink, KafkaSink, Sink
from roost.engine.snapshot import Snapshots
from roost.engine.sources import AnySlice, Source, open_source
from roost.engine.standing import StandingAnswers
from roost.errors import ConfigError, SourceError
from roost.model import (
    TIME_MIN,
    Box,
    Circle,
    Instant,
    Polygon,
    Request,
    id_type_of,
    request_record,
)
from roost.space import Space
from roost.state.admission import Rules
from roost.state.guard_keeper import GuardKeeper
from roost.state.lock import RunLock
from roost.state.private import CHECKPOINTS, private_folder, state_folder
from roost.state.queries import QuerySet
from roost.state.querylog import QueryLog, SqliteQueryLog
from roost.state.snapshot import Question
from roost.state.store import Commit, Intent, Store
from roost.state.windows import WindowKeeper
from roost.window import parse_aggregates

POLL_S = 0.2
IDLE_S = 0.002

OnBatch = Callable[[Commit], None]
OnStep = Callable[[str, int], None]


def open_log(config: RunConfig) -> QueryLog:
    """Query log of a configuration: SQLite in the state directory, or a Kafka topic."""
    if config.query_log is None:
        return SqliteQueryLog(state_folder(config.state_folder) / "queries.db")
    from roost.state.kafka_log import KafkaQueryLog  # an optional extra

    return KafkaQueryLog(*kafka_address(config.query_log, "queries.log"))


def give_back_memory() -> None:
    """Return what loading queries needed to the system, before workers need it."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it, or needs it
        ctypes.CDLL(None).malloc_trim(0)


def requests_table(requests: Iterable[Request]) -> pa.Table:
    """Make a block for the query log."""
    records = [request_record(request) for request in requests]
    # Arrow would take the columns of the first record alone, and drop another shape's fields.
    names = dict.fromkeys(name for record in records for name in record)
    return pa.table({name: [record.get(name) for record in records] for name in names})


class _StoppedError(Exception):
    """A batch that Spark began after the pipeline was told to stop."""


class Pipeline:
    """Continuous spatial queries over a stream of points.

    Parameters
    ----------
    config
        Settings of the run.
    spark
        Session to use; made from the configuration where there is none.
    source
        Where points come from, if not from the configuration.
    sinks
        Further sinks, beside the one that the configuration names.
    on_batch
        Called after each batch with what it came to.
    on_step
        Called before each step of a batch, see :mod:`roost.engine.batch`.
    clock
        Seconds, to time batches.
    seed
        Where the guard's chance comes from; drawn, and kept secret, where there is none.

    Examples
    --------
    >>> from roost import Box, Pipeline, Query, RunConfig
    >>> config = RunConfig(points="points.parquet", available_now=True)  # doctest: +SKIP
    >>> with Pipeline(config) as pipeline:  # doctest: +SKIP
    ...     pipeline.request(Query("centre", Box(-74.0, 40.7, -73.9, 40.8)))
    ...     report = pipeline.run()
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        spark: SparkSession | None = None,
        source: Source | None = None,
        sinks: Sequence[Sink] = (),
        on_batch: OnBatch = lambda commit: None,
        on_step: OnStep = lambda step, batch_id: None,
        clock: Callable[[], float] = time.perf_counter,
        seed: int | None = None,
    ) -> None:
        check_together(config)
        if config.encrypt and spark is not None:
            check_session(spark)
        self.config = config
        self._spark = spark
        self._sinks = list(sinks)
        self._on_batch = on_batch
        self._on_step = on_step
        self._clock = clock
        self._seed = seed
        self._stopping = False
        self._busy = threading.Lock()
        self._failure: BaseException | None = None
        self._lock: RunLock | None = None
        self.store = Store(config.state_folder)
        self.log = open_log(config)
        self.source = source
        self._snapshots: Snapshots | None = None
        self._keeper: GuardKeeper | None = None
        self._seen_guard: tuple[tuple[int, int, int], GuardKeeper | None] | None = None
        self._request_logs: list[QueryLog] = []

    def __enter__(self) -> Pipeline:
        """Use the pipeline in a ``with`` block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the state; a session that was passed in stays open."""
        if self._snapshots is not None:
            self._snapshots.close()
        self.store.close()
        for log in (self.log, *self._request_logs):
            log.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def spark(self) -> SparkSession:
        """The Spark session, started when first needed."""
        if self._spark is None:
            kafka = self.config.sink == "kafka" or (self.config.points or "").startswith("kafka:")
            self._spark = make_session(
                self.config.master, self.config.spark, kafka=kafka, encrypt=self.config.encrypt
            )
        return self._spark

    def request(self, *requests: Request) -> int:
        """Register or terminate queries; returns the log position after them.

        Raises
        ------
        RequestError
            If one of the users is blocked; then none of the requests is made.
        """
        keeper = self._keeper or self._onlooker()
        if keeper is not None:
            keeper.refuse(request.user_id for request in requests)
        return self.log.append(requests_table(requests))

    def _onlooker(self) -> GuardKeeper | None:
        """Return the guard as it was left, read again only where it may have changed."""
        stamp = self.store.guard.stamp()
        if self._seen_guard is None or self._seen_guard[0] != stamp:
            self._seen_guard = (stamp, GuardKeeper.onlooking(self.store))
        return self._seen_guard[1]

    def stop(self) -> None:
        """End :meth:`run` after the batch that is under way."""
        self._stopping = True

    def report(self) -> dict[str, Any]:
        """Sum up all batches of the state directory."""
        return build_report(self.store.commits(), self.store.rounds())

    def snapshot(
        self,
        shape: Box | Circle | Polygon | None = None,
        *,
        where: str | None = None,
        since: Instant | None = None,
        until: Instant | None = None,
        aggregate: str | None = None,
        nearest: int | None = None,
    ) -> DataFrame:
        """Ask about the window as it is now; may be called while the stream runs.

        Parameters
        ----------
        shape
            Where to look; None looks everywhere.
        where
            Condition on the attributes, as in queries.
        since, until
            Only points whose event time is in ``[since, until)``.
        aggregate
            Aggregates of the points, instead of the points, such as ``count, avg(fare)``.
        nearest
            Only so many points, nearest to the centre of the shape, which then is a circle; with
            an infinite radius wherever they are.

        Returns
        -------
        pyspark.sql.DataFrame
            Points with all columns that the window keeps, or one row of aggregates. The column
            ``at_batch`` has the batch of which the answer is true; so has its metadata, where
            there is no row.
        """
        spec = None if aggregate is None else parse_aggregates(aggregate)
        question = Question(shape, where, since, until, spec, nearest)
        return self.snapshots.frame(question)

    @property
    def snapshots(self) -> Snapshots:
        """What answers questions about the window."""
        if self._snapshots is None:
            self._snapshots = Snapshots(self.store.folder, self.spark)
        return self._snapshots

    # -- Roost's own sources

    def run(self) -> dict[str, Any]:
        """Replay the configured points until they end (or without end) and report."""
        config = self.config
        if config.points is None:
            raise ConfigError("points.path", None, "a file, a folder, generate:… or kafka://…")
        self._load_requests()
        if config.points.startswith("kafka:"):
            self._run_kafka()
            return self.report()
        source = self.source or open_source(
            config.points, config.format, config.time, self.store, config.speed, self._clock
        )
        self.source = source
        points = point_schema(source.schema, config, numbered=True)
        space = self._space(points, source)
        runner = self._prepare(points, space, source)
        self._loop(source, runner)
        return self.report()

    def _loop(self, source: Source, runner: BatchRunner) -> None:
        batch_id, offset = self._resume(source, runner)
        while not self._stopping:
            slices = source.take(offset, self.config.batch_rows)
            if not slices:
                if source.ended(offset) and not source.poll():
                    if self.config.available_now or not source.grows:
                        return
                    time.sleep(POLL_S)
                else:
                    time.sleep(IDLE_S)
                continue
            stop = offset + sum(item.rows for item in slices)
            self._batch(runner, batch_id, slices, {"start": offset, "stop": stop})
            batch_id, offset = batch_id + 1, stop

    def _resume(self, source: Source, runner: BatchRunner) -> tuple[int, int]:
        """Next batch and offset, after repeating a batch that was begun and not committed."""
        last = self.store.last_intent()
        if last is None:
            return 0, 0
        start, stop = int(last.offsets["start"]), int(last.offsets["stop"])
        if self.store.commit(last.batch_id) is None:
            slices = self._again(source, last)
            self._batch(runner, last.batch_id, slices, {"start": start, "stop": stop})
        return last.batch_id + 1, stop

    @staticmethod
    def _again(source: Source, intent: Intent) -> list[AnySlice]:
        start, stop = int(intent.offsets["start"]), int(intent.offsets["stop"])
        slices = source.again(start, stop)
        found = sum(item.rows for item in slices)
        if found != stop - start:
            raise SourceError(
                f"batch {intent.batch_id} took rows {start} to {stop}, but the points now have "
                f"only {start + found}: were files removed?"
            )
        return slices

    def _batch(
        self,
        runner: BatchRunner,
        batch_id: int,
        slices: Sequence[AnySlice],
        offsets: dict[str, Any],
    ) -> None:
        job = partial(run_slices, self.spark.sparkContext, slices)
        self._on_batch(runner.run(batch_id, offsets, job))

    # -- streaming DataFrames

    def start(self, frame: DataFrame, *, json_column: str | None = None) -> StreamingQuery:
        """Run on a streaming DataFrame; returns Spark's handle of the query.

        Parameters
        ----------
        frame
            A streaming DataFrame with the named x, y, time and id columns.
        json_column
            Column that holds each point as JSON text instead.
        """
        return self._start(frame, json_column, None)

    def _start(
        self, frame: DataFrame, json_column: str | None, topic: Topic | None
    ) -> StreamingQuery:
        from pyspark.sql.pandas.types import to_arrow_schema  # loads pandas

        self._load_requests()
        if json_column is None:
            columns = to_arrow_schema(frame.schema, timezone="UTC")
        else:
            columns = message_schema(self.config)
        points = point_schema(columns, self.config, numbered=False)
        space = self._space(points, topic)
        runner = self._prepare(points, space, topic)

        def each(batch: DataFrame, batch_id: int) -> None:
            job = partial(run_frame, batch, json_column)
            with self._busy:
                if self._stopping:
                    raise _StoppedError  # to return would be to say that the batch has happened
                try:
                    self._on_batch(runner.run(batch_id, {}, job))
                except BaseException as error:
                    self._failure = error
                    raise

        writer = frame.writeStream.foreachBatch(each).option(
            "checkpointLocation", str(private_folder(self.store.folder / "checkpoint"))
        )
        if self.config.available_now:
            writer = writer.trigger(availableNow=True)
        return writer.start()

    def take_requests(self, frame: DataFrame, *, name: str = "requests") -> StreamingQuery:
        """Take requests from a streaming DataFrame; returns Spark's handle of the query.

        Parameters
        ----------
        frame
            A streaming DataFrame with the columns of requests: ``op``, ``query_id``, ``user_id``
            and those of shapes.
        name
            Of the stream; each has a checkpoint of its own.
        """
        missing = {"op", "query_id", "user_id"} - set(frame.columns)
        if missing:
            raise SourceError(f"requests without the columns {', '.join(sorted(missing))}")
        # A connection of its own: what is not committed yet must not be seen by a batch.
        log = open_log(self.config)

        def each(batch: DataFrame, batch_id: int) -> None:
            append_batch(batch, log, self._keeper, f"{name}:{batch_id}")

        writer = frame.writeStream.foreachBatch(each).option(
            "checkpointLocation", str(private_folder(self.store.folder / f"{CHECKPOINTS}{name}"))
        )
        if self.config.available_now:
            writer = writer.trigger(availableNow=True)
        self._request_logs.append(log)
        return writer.start()

    def _run_kafka(self) -> None:
        assert self.config.points is not None
        topic = Topic(self.spark, *kafka_address(self.config.points, "points.path"))
        query = self._start(topic.stream(self.config.batch_rows), VALUE, topic)
        try:
            while not self._stopping and not query.awaitTermination(1):
                pass
        except StreamingQueryException as error:
            if self._failure is not None:
                raise self._failure from None
            if not self._stopping:
                raise topic.unreadable(error) from error
        finally:
            with self._busy:
                pass  # the batch that is under way
            query.stop()

    # -- putting the parts together

    def _space(self, points: PointSchema, source: Sampled | None) -> Space:
        config, sample, kept = self.config, None, self.store.meta()
        if config.bounds is None and kept is not None:
            # Only the bounds were guessed; every other setting must still agree.
            config = replace(config, bounds=Space.from_json(kept["space"]).bounds)
        elif config.bounds is None and source is not None:
            sample = source.sample([points.x, points.y])
        return space_for(config, points, sample)

    def _query_id_type(self) -> pa.DataType:
        kept = self.store.meta()
        if kept is not None:
            return pa.int64() if kept["query_id_type"] == "int64" else pa.string()
        if self.config.query_id_type is not None:
            return pa.int64() if self.config.query_id_type == "int" else pa.string()
        first = next(iter(self.log.read(0, min(1, self.log.end()))), None)
        if first is None or "query_id" not in first.column_names:
            return pa.string()
        try:
            return id_type_of(first.schema.field("query_id").type, "query_id")
        except ConfigError:
            return pa.string()  # anybody may have sent it: a request, not the run, is refused

    def _prepare(self, points: PointSchema, space: Space, source: Sampled | None) -> BatchRunner:
        if self._lock is None:
            self._lock = RunLock(self.store.folder)
        config = self.config
        id_type = self._query_id_type()
        self.store.agree(
            {
                "space": space.to_json(),
                "query_id_type": str(id_type),
                "points": [points.x, points.y, points.time, points.point_id],
                "types": [str(points.id_type), str(points.time_type)],
                "attributes": [[f.name, str(f.type)] for f in points.attributes],
                "polygon_vertices_max": config.polygon_vertices_max,
                **self._window_meta(points),
            }
        )
        spec = config.window_spec(time_unit(points))
        windows = None
        if spec is not None:
            kept = window_attributes(config, points)
            windows = WindowKeeper(self.store, spec, kept, aliases_of(points, kept))
        keeper = GuardKeeper.load(self.store)
        rules = Rules(
            space,
            id_type,
            points.time_type,
            points.attributes,
            config.polygon_vertices_max,
            spec is not None,
            None if windows is None else windows.attributes,
            points.id_type,
            config.guard or keeper is not None,
        )
        queries = QuerySet(self.store, self.log, rules, keeper=keeper)
        pending = self.store.last_intent()
        if pending is not None:
            # A batch that was begun and never folded needs the version of its own position.
            queries.advance(max(pending.position, queries.version.position))
        if keeper is not None:
            keeper.obey(self.log)
        queries.advance(max(self.log.end(), queries.version.position))
        if keeper is None and config.guard:
            # What is there before the stream begins was not sent to make a hotspot in it.
            seed = secrets.randbits(63) if self._seed is None else self._seed
            keeper = GuardKeeper.begin(self.store, seed, config.guard_users_max)
            queries.keeper = keeper
        if keeper is not None:
            reached = self.store.reached()
            keeper.now = TIME_MIN if reached is None else reached
        self._keeper = keeper
        give_back_memory()
        strategy = config.strategy or default_strategy(self.spark.sparkContext.master or "")
        machines = config.machines or self.spark.sparkContext.defaultParallelism
        epoch = ensure_plan(self.store, strategy, machines, space, queries, points, source)
        balancer = make_balancer(
            config, self.store, strategy, space, queries, points, windows, keeper, self._clock
        )
        return BatchRunner(
            store=self.store,
            log=self.log,
            queries=queries,
            space=space,
            points=points,
            query_id_type=id_type,
            out=config.out.absolute(),
            epoch=epoch,
            balancer=balancer,
            keeper=keeper,
            windows=windows,
            answerers=self._answerers(points, id_type, windows),
            keep_matches=config.sink != "count" or bool(self._sinks),
            publish_matches=config.sink == "parquet",
            sinks=[*self._sinks, *self._configured_sinks()],
            on_step=self._on_step,
            clock=self._clock,
        )

    def _window_meta(self, points: PointSchema) -> dict[str, Any]:
        """Name the settings of the window that its points depend on, if there is one."""
        spec = self.config.window_spec(time_unit(points))
        if spec is None:
            return {}
        join = self.config.join_spec(time_unit(points))
        return {
            "join": None if join is None else join.to_json(),
            "window": spec.to_json(),
            "window_attributes": window_attributes(self.config, points).names,
        }

    def _answerers(
        self, points: PointSchema, query_id_type: pa.DataType, windows: WindowKeeper | None
    ) -> list[Answerer]:
        """Make what tells more of the window than single matches."""
        config = self.config
        if windows is None or config.sink == "count":
            return []
        out, types = config.out.absolute(), (points.id_type, points.time_type)
        staging = {kind: out / kind / STAGING for kind in (*StandingAnswers.kinds, *Joins.kinds)}
        queries = self.store.segment_folder
        found: list[Answerer] = [
            StandingAnswers(queries, windows.folder, staging, query_id_type, *types)
        ]
        spec = config.join_spec(time_unit(points))
        if spec is not None:
            spec.check(windows.attributes)
            context = self.spark.sparkContext
            found.append(Joins(context, spec, windows.folder, staging["pairs"], *types))
        return found

    def _configured_sinks(self) -> list[Sink]:
        if self.config.sink == "console":
            return [ConsoleSink()]
        if self.config.sink == "kafka":
            assert self.config.sink_topic is not None
            return [KafkaSink(self.spark, self.config.sink_topic)]
        return []

    def _load_requests(self) -> None:
        """Append the configured file of requests to the log, once for each state directory."""
        if self.config.queries is None:
            return
        path = Path(self.config.queries)
        if not path.exists():
            raise SourceError(f"no requests at {path}: there is no such file")
        stat = path.stat()
        tag = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if tag in self.store.seen_files():
            return
        table = read_requests(path)
        if table.num_rows:
            self.log.append(table, tag=tag)
        self.store.add_files([], [tag])
