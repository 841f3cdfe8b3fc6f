"""Points from a Kafka topic, through Spark's connector: a message is one point as a JSON object.

Problem: Spark keeps the offsets of the stream, but bounds and costs are learnt from a sample
before the stream begins. Idea: the topic is read twice, first a part of what it holds already as
an ordinary batch.

It does not read keys, headers or other formats: for those, make a streaming DataFrame of them and
give it to :meth:`roost.Pipeline.start`.
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
ANSWER_S = 10.0
SAMPLE_MESSAGES = 50_000  # of any size, through the driver's heap
# Small messages: the connector's own limits (500 and 1 MiB) make it ask the broker too often.
FETCH = {"kafka.max.poll.records": "10000", "kafka.max.partition.fetch.bytes": "8388608"}


def check_brokers(brokers: str) -> None:
    """Make sure that one of the brokers is there: Spark would go on asking for minutes."""
    told = ""
    for broker in brokers.split(","):
        host, _, port = broker.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except OSError as error:
            told = f"{broker}: {error}"
        else:
            return
    raise SourceError(f"no Kafka broker answers, {told}")


def check_connector(spark: SparkSession) -> None:
    """Make sure that a session has the connector, before a stream or a sink is built on it."""
    options = {"kafka.bootstrap.servers": "unasked:0", "subscribe": "unasked"}
    try:
        spark.read.format("kafka").options(**options).load()
    except AnalysisException as error:
        raise SourceError(
            "this Spark session has no Kafka connector: let Roost make the session, or start it "
            "with the connector among its spark.jars"
        ) from error


class Topic:
    """A topic of points.

    Parameters
    ----------
    spark
        A session with the connector.
    brokers
        Brokers to ask first, ``host:port`` with commas between.
    name
        Name of the topic.
    """

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
        """Values of all messages, so many a batch; messages that are gone end the stream."""
        limits = {"maxOffsetsPerTrigger": str(batch_rows), "failOnDataLoss": "true"}
        reader = self._spark.readStream.format("kafka").options(**self._options, **limits)
        return reader.load().select(VALUE)

    def sample(self, columns: list[str]) -> pa.Table:
        """Numbers of some messages that are there already; what is no number is null."""
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
        """Say why the topic cannot be read: the last cause that Spark names."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        causes = [line for line in lines if line.startswith("Caused by: ")]
        cause = causes[-1].removeprefix("Caused by: ") if causes else lines[0]
        return SourceError(f"topic {self.name} cannot be read: {cause}")
