"""Points from a Kafka topic, through Spark's connector: a message is one point as a JSON object.

Spark tracks the offsets of the stream. Bounds and costs are estimated before the stream starts,
from a sample that an ordinary batch query reads from the topic.

Message keys, headers and other formats are not read: pass a streaming DataFrame that decodes them
to :meth:`roost.Pipeline.start`.
"""

from __future__ import annotations

import socket

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from roost.errors import SourceError
from roost.model.columns import convert
from roost.stages.json_lines import read_json_messages

VALUE = "value"
CONNECT_TIMEOUT_S = 10.0
SAMPLE_MESSAGES = 50_000  # all pass through the driver's heap
# The connector's defaults (500 records, 1 MiB) cause too many fetches of small messages.
FETCH = {"kafka.max.poll.records": "10000", "kafka.max.partition.fetch.bytes": "8388608"}


def check_brokers(brokers: str) -> None:
    """Check that a broker is reachable; Spark itself retries for minutes."""
    failure = ""
    for broker in brokers.split(","):
        host, _, port = broker.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            failure = f"{broker}: {error}"
        else:
            return
    raise SourceError(f"no Kafka broker is reachable: {failure}")


def check_connector(spark: SparkSession) -> None:
    """Raise :class:`SourceError` unless the session has the Kafka connector."""
    options = {"kafka.bootstrap.servers": "unused:0", "subscribe": "unused"}
    try:
        spark.read.format("kafka").options(**options).load()
    except AnalysisException as error:
        raise SourceError(
            "this Spark session has no Kafka connector: let Roost create the session, or add the "
            "connector to its spark.jars"
        ) from error


class Topic:
    """A topic of points; ``brokers`` are the bootstrap servers, ``host:port,…``."""

    def __init__(self, spark: SparkSession, brokers: str, name: str) -> None:
        check_connector(spark)
        check_brokers(brokers)
        self.name = name
        self._spark = spark
        self._options = {
            "kafka.bootstrap.servers": brokers,
            "subscribe": name,
            "startingOffsets": "earliest",
            **FETCH,
        }

    def stream(self, batch_rows: int) -> DataFrame:
        """Stream the message values, ``batch_rows`` per batch; fails if messages were deleted."""
        limits = {"maxOffsetsPerTrigger": str(batch_rows), "failOnDataLoss": "true"}
        reader = self._spark.readStream.format("kafka").options(**self._options, **limits)
        return reader.load().select(VALUE)

    def sample(self, columns: list[str]) -> pa.Table:
        """Read numeric columns of existing messages; values that are not numbers are null."""
        reader = self._spark.read.format("kafka").options(**self._options)
        try:
            values = reader.load().select(VALUE).limit(SAMPLE_MESSAGES).toArrow()[VALUE]
        except (PySparkException, Py4JJavaError) as error:
            raise self.unreadable(error) from error
        table = read_json_messages(values.to_pylist(), ())
        numbers = {
            name: convert(table[name], pa.float64())[0]
            if name in table.column_names
            else pa.nulls(table.num_rows, pa.float64())
            for name in columns
        }
        return pa.table(numbers)

    def unreadable(self, error: Exception) -> SourceError:
        """Return an error with the root cause that Spark reports."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        causes = [line for line in lines if line.startswith("Caused by: ")]
        cause = causes[-1].removeprefix("Caused by: ") if causes else lines[0]
        return SourceError(f"topic {self.name} cannot be read: {cause}")
