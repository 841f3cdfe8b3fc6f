"""The pipeline on Spark.

:class:`Pipeline` runs batches from Roost's own sources (:meth:`Pipeline.run`) or from any streaming
DataFrame (:meth:`Pipeline.start`), and runs snapshot queries on the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from roost.balance.strategies import default_strategy
from roost.engine.executor import SparkExecutor
from roost.engine.executors import SparkAllocator, allocation_settings, is_elastic
from roost.engine.kafka import VALUE, Topic
from roost.engine.request_stream import append_batch
from roost.engine.session import check_session, make_session
from roost.engine.sinks import ConsoleSink, KafkaSink
from roost.engine.snapshot import Snapshots
from roost.engine.streams import Streams
from roost.errors import DataflowError, SourceError
from roost.model.choices import Strategy
from roost.model.records import Box, Circle, Instant, Polygon
from roost.model.settings import RunConfig
from roost.queries.log import QueryLog, kafka_address, open_log
from roost.runtime.group_rounds import GroupRounds
from roost.runtime.loop import ResultSink
from roost.runtime.pipeline import BasePipeline
from roost.stages.decode import PointSchema
from roost.stages.flow_routing import stage_of
from roost.stages.flow_source import SourceStage
from roost.stages.reading import ReadingStage
from roost.stages.schema import message_schema, point_schema
from roost.storage.private import CHECKPOINTS, private_folder
from roost.window import parse_aggregates
from roost.window.snapshot import SnapshotQuery

KAFKA = "kafka:"  # begins the path of a topic
POINTS = "points"


class Pipeline(BasePipeline):
    """Continuous spatial queries over a stream of points.

    The Spark session is created from the configuration by default. ``hooks`` are source, sinks,
    callbacks, clock and seed: see :class:`roost.runtime.pipeline.BasePipeline`.

    Examples
    --------
    >>> from roost import Box, Pipeline, Query, RunConfig
    >>> config = RunConfig(points={"path": "points.parquet"})
    >>> with Pipeline(config) as pipeline:  # doctest: +SKIP
    ...     pipeline.request(Query("centre", Box(-74.0, 40.7, -73.9, 40.8)))
    ...     report = pipeline.run()
    """

    def __init__(
        self, config: RunConfig, *, spark: SparkSession | None = None, **hooks: Any
    ) -> None:
        super().__init__(config, **hooks)
        if config.engine.encrypt and spark is not None:
            check_session(spark)
        self._spark = spark
        self._executor: SparkExecutor | None = None
        self._allocator: SparkAllocator | None = None
        self._streams: Streams | None = None
        self._read_topics: dict[str, Topic] = {}  # by query
        self._snapshots: Snapshots | None = None
        self._request_logs: list[QueryLog] = []
        self._queries: list[StreamingQuery] = []

    def __exit__(self, *failure: object) -> None:
        """Stop streams, cancel running jobs and close the state; the session stays open."""
        if self._queries:
            self.stop()
        if self._executor is not None:
            self._executor.close()
        if self._allocator is not None:
            self._allocator.close()
        if self._queries:
            # An exception in a call to the JVM leaves the connection of this thread in use.
            stopping = Thread(target=self._stop_queries)
            stopping.start()
            stopping.join()
        if self._streams is not None:
            self._streams.join()
        if self._snapshots is not None:
            self._snapshots.close()
        for log in self._request_logs:
            log.close()
        super().__exit__(*failure)

    @property
    def spark(self) -> SparkSession:
        """The Spark session, started when first needed."""
        if self._spark is None:
            engine = self.config.engine
            kafka = self.config.out.sink == "kafka" or bool(self._topics)
            settings = engine.spark
            if self.config.elastic.max is not None:
                elastic = self.config.elastic
                allocation = allocation_settings(elastic.rules, groups=bool(elastic.groups))
                settings = {**allocation, **engine.spark}
            self._spark = make_session(engine.master, settings, kafka=kafka, encrypt=engine.encrypt)
        return self._spark

    @property
    def executor(self) -> SparkExecutor:
        """Runs the tasks."""
        if self._executor is None:
            context = self.spark.sparkContext
            groups = () if context._jsc.isLocal() else self.config.elastic.other_groups
            self._executor = SparkExecutor(context, groups)
            if self.config.elastic.max is not None and is_elastic(self._executor):
                self._allocator = SparkAllocator(self._executor)
                self._executor.allocator = self._allocator
        return self._executor

    @property
    def default_strategy(self) -> Strategy:
        """Strategy of a run whose settings name none."""
        return default_strategy(self.spark.sparkContext.master or "")

    def snapshot(
        self,
        shape: Box | Circle | Polygon | None = None,
        *,
        where: str | None = None,
        since: Instant | None = None,
        until: Instant | None = None,
        aggregate: str | None = None,
        nearest: int | None = None,
        user_id: str = "local",
    ) -> DataFrame:
        """Query the current window; may be called while the stream runs.

        Returns the points in the shape, with all columns that the window stores, or one row of
        aggregates, such as ``count, avg(fare)``. ``where`` is a condition on the attributes, as in
        queries; event times are in ``[since, until)``. ``nearest`` limits the result to so many
        points, nearest to the centre of a circle, whose radius may be infinite. The column
        ``at_batch`` and its metadata hold the number of the batch whose window was read. The guard
        counts the query for the user, and raises :class:`RequestError` if the user is blocked.
        """
        spec = None if aggregate is None else parse_aggregates(aggregate)
        query = SnapshotQuery(shape, where, since, until, spec, nearest, user_id)
        return self.snapshots.frame(query)

    @property
    def snapshots(self) -> Snapshots:
        """Runs snapshot queries on the window; threads may share it."""
        with self._opening:
            if self._snapshots is None:
                self._snapshots = Snapshots(self.config.out.state_dir, self.spark)
            return self._snapshots

    def run(self) -> dict[str, Any]:
        """Replay the configured points until they end or :meth:`stop`; returns the report."""
        if not self._topics:
            return super().run()
        for source in self._records:
            self._required_path(source)
        self._take_lock()
        self._start_topics()
        self.wait()
        return self.report()

    def start(
        self, frame: DataFrame, *, source: str | None = None, json_column: str | None = None
    ) -> StreamingQuery:
        """Run on a streaming DataFrame; returns Spark's handle of the query.

        The DataFrame has the x, y, time and id columns that the settings name. With a ``source`` it
        has the records of that source of the dataflow, with the columns of its schema.
        ``json_column`` has each point or record as JSON text. Sources with a path, and points with
        one, are read beside it; each source without a path needs a stream of its own. The stream
        of points is the first one.
        """
        return self._start(frame, source, json_column, None)

    def wait(self) -> None:
        """Wait until all streams and other sources have ended, or :meth:`stop`; raises failures."""
        if self._streams is None:
            return
        try:
            self._streams.wait()
        except StreamingQueryException as error:
            failed = [q for q in self._streams.queries.values() if q.exception() is not None]
            topics = [self._read_topics[q.id] for q in failed if q.id in self._read_topics]
            if topics:
                raise topics[0].unreadable(error) from error
            raise

    def _start(
        self, frame: DataFrame, name: str | None, json_column: str | None, topic: Topic | None
    ) -> StreamingQuery:
        if name is not None:
            frame = self._columns_of(frame, name, json_column)
        stage = ReadingStage.name if name is None else stage_of(name)
        first = self._streams is None
        if self._streams is None:
            self._streams = self._open_streams(frame, name, json_column, topic)
        streams = self._streams
        if stage in streams.queries:
            raise DataflowError(name or POINTS, "has a stream already")
        if stage not in streams.feed.streams:
            where = "is read from its path" if name else "must be the first stream of its run"
            raise DataflowError(name or POINTS, where)
        checkpoint = "checkpoint"
        if name is not None:
            reader = next(one for one in self.stages if one.name == stage)
            assert isinstance(reader, SourceStage)
            reader.json_column = json_column
            checkpoint = f"{CHECKPOINTS}flow-{reader.node.number:03d}"
        start = partial(self._started, frame, checkpoint=checkpoint)
        query = streams.add(stage, start)
        if topic is not None:
            self._read_topics[query.id] = topic
        if first:
            self._start_topics()
        return query

    def _columns_of(self, frame: DataFrame, name: str, json_column: str | None) -> DataFrame:
        """Return the columns of a source of the dataflow."""
        found = [source for source in self._records if source.name == name]
        if not found:
            known = ", ".join(source.name for source in self._records) or "none"
            raise DataflowError(name, f"no such source of records in the dataflow (known: {known})")
        assert found[0].schema is not None
        columns = found[0].schema.names if json_column is None else [json_column]
        missing = [column for column in columns if column not in frame.columns]
        if missing:
            known = ", ".join(frame.columns)
            problem = f"the DataFrame has no such column (known: {known})"
            raise DataflowError(name, problem, missing[0])
        return frame.select(*columns)

    def _open_streams(
        self, frame: DataFrame, name: str | None, json_column: str | None, topic: Topic | None
    ) -> Streams:
        """Open what the run reads beside its first stream, and assemble its stages."""
        config = self.config
        if name is not None and (config.points.path or "").startswith(KAFKA):
            raise DataflowError(name, "the stream of points must be the first of its run")
        if name is not None and config.points.path is None:
            if self.flow is not None and self.flow.reads_points:
                problem = "the dataflow reads points: set points.path, or start their stream first"
                raise DataflowError(name, problem)
            self._check_no_queries()
        else:
            self._check_names()
        self._take_lock()
        self._load_requests()
        paths = {source: self._path_of(source) for source in self._records if source.name != name}
        own = [one for one, path in paths.items() if path and not path.startswith(KAFKA)]
        sources = self._flow_sources(own)
        streams = [s for s in (stage_of(one.name) for one in self._records) if s not in sources]
        if name is None:
            streams.append(ReadingStage.name)
            points: PointSchema | None = self._points_of(frame, json_column)
            loop = self._assemble(points, topic, json_column)
        else:
            points = self._open_points(sources)
            loop = self._assemble(points, self.source, None)
        feed = self._make_feed(sources, loop, streams)
        idle = self.flow is not None and config.dataflow.idle is not None
        found = Streams(
            feed, lambda: self._stopping, available_now=config.engine.available_now, idle=idle
        )
        for rounds in loop.rounds:
            if isinstance(rounds, GroupRounds):
                rounds.waiting = found.waiting
        return found

    def _points_of(self, frame: DataFrame, json_column: str | None) -> PointSchema:
        """Return the schema of the points of a stream."""
        from pyspark.sql.pandas.types import to_arrow_schema  # loads pandas

        if json_column is None:
            columns = to_arrow_schema(frame.schema, timezone="UTC")
        else:
            columns = message_schema(self.config)
        return point_schema(columns, self.config, numbered=False)

    def take_requests(self, frame: DataFrame, *, name: str = "requests") -> StreamingQuery:
        """Read requests from a streaming DataFrame; returns Spark's handle of the query.

        The DataFrame has the columns of requests: ``op``, ``query_id``, ``user_id`` and those of
        shapes. Each stream of requests needs its own ``name``, which names its checkpoint.
        """
        missing = {"op", "query_id", "user_id"} - set(frame.columns)
        if missing:
            raise SourceError(f"requests without the columns {', '.join(sorted(missing))}")
        # A separate connection: batches must not see requests before they are committed.
        log = open_log(self.config.queries.log, self.config.out.state_dir)

        def each(batch: DataFrame, batch_id: int) -> None:
            guard = None if self._loop is None else self._loop.guard
            append_batch(batch, log, guard, f"{name}:{batch_id}")

        self._request_logs.append(log)
        return self._started(frame, each, f"{CHECKPOINTS}{name}")

    def _started(
        self, frame: DataFrame, each: Callable[[DataFrame, int], None], checkpoint: str
    ) -> StreamingQuery:
        """Start a query that calls ``each`` for every micro-batch."""
        folder = private_folder(self.store.folder / checkpoint)
        writer = frame.writeStream.foreachBatch(each).option("checkpointLocation", str(folder))
        if self.config.engine.available_now:
            writer = writer.trigger(availableNow=True)
        query = writer.start()
        self._queries.append(query)
        return query

    def _stop_queries(self) -> None:
        """Stop the streams, after their micro-batches."""
        for query in self._queries:
            query.stop()

    @property
    def _topics(self) -> dict[str | None, str]:
        """The topics that the settings name: the points', and those of sources by name."""
        paths: dict[str | None, str | None] = {None: self.config.points.path}
        paths |= {source.name: self._path_of(source) for source in self._records}
        return {name: path for name, path in paths.items() if path and path.startswith(KAFKA)}

    def _start_topics(self) -> None:
        """Start the streams of the topics that have none yet."""
        for name, path in self._topics.items():
            stage = ReadingStage.name if name is None else stage_of(name)
            if self._streams is None or stage not in self._streams.queries:
                setting = "points.path" if name is None else f"dataflow.sources.{name}"
                topic = Topic(self.spark, *kafka_address(path, setting))
                self._start(topic.stream(self.config.engine.batch_rows), name, VALUE, topic)

    def _configured_sinks(self, kinds: Sequence[str]) -> Sequence[ResultSink]:
        """Return the configured sink, unless it is Parquet, which the batch loop writes."""
        out = self.config.out
        if out.sink == "console":
            return [ConsoleSink(of=kind) for kind in kinds]
        if out.sink == "kafka":
            assert out.topic is not None
            return [KafkaSink(self.spark, out.topic, kind) for kind in kinds]
        return []
