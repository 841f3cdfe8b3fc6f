"""Sinks for matches, in addition to the Parquet files, which are exactly once.

A sink receives the staged files of a batch before the batch is committed. If the driver fails in
between, the batch runs again and the sink receives the same matches under the same batch id:
delivery is at least once, and consumers can deduplicate by batch id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from roost.engine.kafka import check_connector
from roost.queries.log import kafka_address

CONSOLE_ROWS = 20
TIME_FORMAT = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"  # Spark's default has no microseconds


class CallbackSink:
    """Passes each batch to a Python function: its id, and a table of at most ``rows_max`` matches.

    The function is called as often as the batch needs.
    """

    def __init__(self, function: Callable[[int, pa.Table], None], rows_max: int = 1 << 20) -> None:
        self._function = function
        self._rows_max = rows_max

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Call the function for every table of the batch."""
        for path in files:
            for batch in pq.ParquetFile(path).iter_batches(self._rows_max):
                self._function(batch_id, pa.Table.from_batches([batch]))


class ConsoleSink:
    """Prints the first matches of each batch, and their number."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Print a batch."""
        total = sum(pq.read_metadata(path).num_rows for path in files)
        self._console.print(f"batch {batch_id}: {total:,} matches")
        left = CONSOLE_ROWS
        for path in files:
            for row in next(pq.ParquetFile(path).iter_batches(left), pa.table({})).to_pylist():
                match = "  query {query_id} point {point_id} at {event_time}".format(**row)
                self._console.print(match, highlight=False)
                left -= 1
            if left <= 0:
                break


class ForeachBatchSink:
    """Passes each batch that has matches to a function as a DataFrame, as ``foreachBatch`` does."""

    def __init__(self, spark: SparkSession, function: Callable[[DataFrame, int], None]) -> None:
        self._spark = spark
        self._function = function

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Call the function."""
        if files:
            self._function(self._spark.read.parquet(*files), batch_id)


class KafkaSink(ForeachBatchSink):
    """Writes matches to a topic as JSON, keyed by query, through Spark's connector."""

    def __init__(self, spark: SparkSession, address: str) -> None:
        self._brokers, self._topic = kafka_address(address, "out.topic")
        check_connector(spark)
        super().__init__(spark, self._write)

    def _write(self, matches: DataFrame, batch_id: int) -> None:
        rows = matches.select(
            F.col("query_id").cast("string").alias("key"),
            F.to_json(F.struct(*matches.columns), {"timestampFormat": TIME_FORMAT}).alias("value"),
        )
        options = {"kafka.bootstrap.servers": self._brokers, "topic": self._topic}
        rows.write.format("kafka").options(**options).save()
