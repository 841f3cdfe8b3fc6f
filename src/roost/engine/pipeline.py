"""The pipeline on Spark.

:class:`Pipeline` runs batches from Roost's own sources (:meth:`Pipeline.run`) or from any streaming
DataFrame (:meth:`Pipeline.start`), and runs snapshot queries on the window.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from roost.balance.strategies import default_strategy
from roost.engine.executor import FrameInputs, SparkExecutor
from roost.engine.kafka import VALUE, Topic
from roost.engine.request_stream import append_batch
from roost.engine.session import check_session, make_session
from roost.engine.sinks import ConsoleSink, KafkaSink
from roost.engine.snapshot import Snapshots
from roost.errors import SourceError
from roost.model.choices import Strategy
from roost.model.records import Box, Circle, Instant, Polygon
from roost.model.settings import RunConfig
from roost.queries.guard_state import GuardState
from roost.queries.log import QueryLog, kafka_address, open_log
from roost.runtime.loop import Sink
from roost.runtime.pipeline import BasePipeline
from roost.stages.schema import message_schema, point_schema
from roost.storage.private import CHECKPOINTS, private_folder
from roost.window import parse_aggregates
from roost.window.snapshot import SnapshotQuery


class _StoppedError(Exception):
    """A batch that Spark began after the pipeline was stopped."""


class Pipeline(BasePipeline):
    """Continuous spatial queries over a stream of points.

    Parameters
    ----------
    config
        Settings of the run.
    spark
        Session to use; made from the configuration if there is none.
    **hooks
        Source, sinks, callbacks, clock and seed: see
        :class:`roost.runtime.pipeline.BasePipeline`.

    Examples
    --------
    >>> from roost import Box, Pipeline, Query, RunConfig
    >>> config = RunConfig(points="points.parquet", available_now=True)  # doctest: +SKIP
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the state directory; a session that was passed in stays open."""
        if self._snapshots is not None:
            self._snapshots.close()
        for log in self._request_logs:
            log.close()
        super().__exit__(kind, error, trace)

    @property
    def spark(self) -> SparkSession:
        """The Spark session, started when first needed."""
        if self._spark is None:
            kafka = self.config.out.sink == "kafka" or (self.config.points.path or "").startswith(
                "kafka:"
            )
            self._spark = make_session(
                self.config.engine.master,
                self.config.engine.spark,
                kafka=kafka,
                encrypt=self.config.engine.encrypt,
            )
        return self._spark

    @property
    def executor(self) -> SparkExecutor:
        """What runs the tasks."""
        if self._executor is None:
            self._executor = SparkExecutor(self.spark.sparkContext)
        return self._executor

    @property
    def default_strategy(self) -> Strategy:
        """Strategy of a run that names none."""
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
        question = SnapshotQuery(shape, where, since, until, spec, nearest)
        return self.snapshots.frame(question)

    @property
    def snapshots(self) -> Snapshots:
        """Runs snapshot queries on the window; threads may share it."""
        with self._opening:
            if self._snapshots is None:
                self._snapshots = Snapshots(self.config.out.state_dir, self.spark)
            return self._snapshots

    def run(self) -> dict[str, Any]:
        """Replay the configured points until they end (or without end) and report.

        Raises
        ------
        StateError
            If another run uses the state directory; nothing has been changed then.
        """
        if not (self.config.points.path or "").startswith("kafka:"):
            return super().run()
        self._take_lock()
        self._run_kafka()
        return self.report()

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

        self._take_lock()
        self._load_requests()
        if json_column is None:
            columns = to_arrow_schema(frame.schema, timezone="UTC")
        else:
            columns = message_schema(self.config)
        points = point_schema(columns, self.config, numbered=False)
        loop = self._assemble(points, topic, json_column)

        def each(batch: DataFrame, batch_id: int) -> None:
            with self._busy:
                if self._stopping:
                    raise _StoppedError  # returning would tell Spark that the batch is done
                try:
                    self._on_batch(loop.run(batch_id, {}, FrameInputs(batch)))
                except BaseException as error:
                    self._failure = error
                    raise

        writer = frame.writeStream.foreachBatch(each).option(
            "checkpointLocation", str(private_folder(self.store.folder / "checkpoint"))
        )
        if self.config.engine.available_now:
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
        log = open_log(self.config.queries.log, self.config.out.state_dir)

        def guard() -> GuardState | None:
            return None if self._loop is None else self._loop.guard

        def each(batch: DataFrame, batch_id: int) -> None:
            append_batch(batch, log, guard(), f"{name}:{batch_id}")

        writer = frame.writeStream.foreachBatch(each).option(
            "checkpointLocation", str(private_folder(self.store.folder / f"{CHECKPOINTS}{name}"))
        )
        if self.config.engine.available_now:
            writer = writer.trigger(availableNow=True)
        self._request_logs.append(log)
        return writer.start()

    def _run_kafka(self) -> None:
        assert self.config.points.path is not None
        topic = Topic(self.spark, *kafka_address(self.config.points.path, "points.path"))
        query = self._start(topic.stream(self.config.engine.batch_rows), VALUE, topic)
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

    def _configured_sinks(self) -> Sequence[Sink]:
        """Return the sink that the configuration names, unless it is Roost's own Parquet."""
        if self.config.out.sink == "console":
            return [ConsoleSink()]
        if self.config.out.sink == "kafka":
            assert self.config.out.topic is not None
            return [KafkaSink(self.spark, self.config.out.topic)]
        return []
