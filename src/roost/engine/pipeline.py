"""The pipeline on Spark.

:class:`Pipeline` runs batches from Roost's own sources (:meth:`Pipeline.run`) or from any streaming
DataFrame (:meth:`Pipeline.start`), and runs snapshot queries on the window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from roost.balance.strategies import default_strategy
from roost.dataflow.operators import Source
from roost.engine.executor import FrameInputs, SparkExecutor
from roost.engine.kafka import VALUE, Topic
from roost.engine.request_stream import append_batch
from roost.engine.session import check_session, make_session
from roost.engine.sinks import ConsoleSink, KafkaSink
from roost.engine.snapshot import Snapshots
from roost.errors import DataflowError, SourceError
from roost.model.choices import Strategy
from roost.model.records import Box, Circle, Instant, Polygon
from roost.model.settings import RunConfig
from roost.queries.log import QueryLog, kafka_address, open_log
from roost.runtime.loop import BatchLoop, Sink
from roost.runtime.pipeline import BasePipeline
from roost.stages.flow_routing import stage_of
from roost.stages.reading import ReadingStage
from roost.stages.schema import message_schema, point_schema
from roost.storage.private import CHECKPOINTS, private_folder
from roost.window import parse_aggregates
from roost.window.snapshot import SnapshotQuery


class _StoppedError(Exception):
    """Rejects a batch that Spark starts after the pipeline was stopped."""


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
        self._busy = threading.Lock()
        self._failure: BaseException | None = None
        self._snapshots: Snapshots | None = None
        self._request_logs: list[QueryLog] = []

    def __exit__(self, *failure: object) -> None:
        """Cancel running jobs and close the state directory; the Spark session stays open."""
        if self._executor is not None:
            self._executor.close()
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
            kafka = self.config.out.sink == "kafka" or self._reads_kafka
            self._spark = make_session(
                engine.master, engine.spark, kafka=kafka, encrypt=engine.encrypt
            )
        return self._spark

    @property
    def _reads_kafka(self) -> bool:
        paths = [self.config.points.path, *(self._path_of(source) for source in self._records)]
        return any((path or "").startswith("kafka:") for path in paths)

    @property
    def executor(self) -> SparkExecutor:
        """Runs the tasks."""
        if self._executor is None:
            self._executor = SparkExecutor(self.spark.sparkContext)
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
    ) -> DataFrame:
        """Query the current window; may be called while the stream runs.

        Returns the points in the shape, with all columns that the window stores, or one row of
        aggregates, such as ``count, avg(fare)``. ``where`` is a condition on the attributes, as in
        queries; event times are in ``[since, until)``. ``nearest`` limits the result to so many
        points, nearest to the centre of a circle, whose radius may be infinite. The column
        ``at_batch`` and its metadata hold the number of the batch whose window was read.
        """
        spec = None if aggregate is None else parse_aggregates(aggregate)
        query = SnapshotQuery(shape, where, since, until, spec, nearest)
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
        if not self._reads_kafka:
            return super().run()
        self._run_kafka()
        return self.report()

    def start(
        self, frame: DataFrame, *, source: str | None = None, json_column: str | None = None
    ) -> StreamingQuery:
        """Run on a streaming DataFrame; returns Spark's handle of the query.

        The DataFrame has the x, y, time and id columns that the settings name. With a ``source`` it
        has the records of that source of the dataflow, with the columns of its schema; the run then
        has no other source and no points. ``json_column`` has each point or record as JSON text.
        """
        if source is not None:
            return self._start_records(frame, source, json_column)
        return self._start(frame, json_column, None)

    def _start_records(
        self, frame: DataFrame, name: str, json_column: str | None
    ) -> StreamingQuery:
        """Run the dataflow on the records of its only source."""
        source = self._only_source(name)
        self._check_no_queries()
        assert source.schema is not None
        columns = source.schema.names if json_column is None else [json_column]
        missing = [column for column in columns if column not in frame.columns]
        if missing:
            known = ", ".join(frame.columns)
            problem = f"the DataFrame has no such column (known: {known})"
            raise DataflowError(name, problem, missing[0])
        self._take_lock()
        loop = self._assemble(None, None, json_column)
        return self._each(frame.select(*columns), loop, stage_of(name))

    def _only_source(self, name: str) -> Source:
        """Return a source of the dataflow, if nothing else is read."""
        found = [source for source in self._records if source.name == name]
        if not found:
            known = ", ".join(source.name for source in self._records) or "none"
            raise DataflowError(name, f"no such source of records in the dataflow (known: {known})")
        others = [source.name for source in self._records if source.name != name]
        if self.config.points.path is not None or (self.flow and self.flow.reads_points):
            others.append("points")
        if others:
            problem = f"a stream must be the only source of its run, which also reads {others[0]}"
            raise DataflowError(name, problem)
        return found[0]

    def _start(
        self, frame: DataFrame, json_column: str | None, topic: Topic | None
    ) -> StreamingQuery:
        from pyspark.sql.pandas.types import to_arrow_schema  # loads pandas

        if self._records:
            problem = "a stream of points must be the only source of its run"
            raise DataflowError(self._records[0].name, problem)
        self._take_lock()
        self._load_requests()
        if json_column is None:
            columns = to_arrow_schema(frame.schema, timezone="UTC")
        else:
            columns = message_schema(self.config)
        points = point_schema(columns, self.config, numbered=False)
        loop = self._assemble(points, topic, json_column)
        return self._each(frame, loop, ReadingStage.name)

    def _each(self, frame: DataFrame, loop: BatchLoop, stage: str) -> StreamingQuery:
        """Start a query whose micro-batches a stage reads."""

        def each(batch: DataFrame, batch_id: int) -> None:
            with self._busy:
                if self._stopping:
                    raise _StoppedError  # after a return, Spark would record the batch as done
                try:
                    self._on_batch(loop.run(batch_id, {}, FrameInputs(batch, stage)))
                except BaseException as error:
                    self._failure = error
                    raise

        return self._started(frame, each, "checkpoint")

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
        return writer.start()

    def _run_kafka(self) -> None:
        path = self.config.points.path
        if path is not None and path.startswith("kafka:"):
            self._take_lock()
            topic = Topic(self.spark, *kafka_address(path, "points.path"))
            start = partial(self._start, json_column=VALUE, topic=topic)
        else:
            paths = {source.name: self._path_of(source) or "" for source in self._records}
            name = next(name for name in paths if paths[name].startswith("kafka:"))
            self._only_source(name)
            self._take_lock()
            topic = Topic(self.spark, *kafka_address(paths[name], f"dataflow.sources.{name}"))
            start = partial(self._start_records, name=name, json_column=VALUE)
        query = start(topic.stream(self.config.engine.batch_rows))
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
                pass  # wait for the current batch
            query.stop()

    def _configured_sinks(self, kinds: Sequence[str]) -> Sequence[Sink]:
        """Return the configured sink, unless it is Parquet, which the batch loop writes."""
        out = self.config.out
        if out.sink == "console":
            return [ConsoleSink(of=kind) for kind in kinds]
        if out.sink == "kafka":
            assert out.topic is not None
            return [KafkaSink(self.spark, out.topic, kind) for kind in kinds]
        return []
