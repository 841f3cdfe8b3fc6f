"""Sinks in addition to the Parquet files, which are exactly once.

A sink receives the staged files of a batch before the batch is committed: those with matches, or
those of the dataflow's sink that ``of`` names. If the driver fails in between, the batch runs again
and the sink receives the same rows under the same batch id: delivery is at least once, and
consumers can deduplicate by batch id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from roost.engine.kafka import check_connector
from roost.queries.log import kafka_address

CONSOLE_ROWS = 20
MATCHES = "matches"
TIME_FORMAT = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"  # Spark's default has no microseconds


class CallbackSink:
    """Passes each batch to a Python function: its id, and a table of at most ``rows_max`` rows.

    The function is called as often as the batch needs.
    """

    def __init__(
        self,
        function: Callable[[int, pa.Table], None],
        rows_max: int = 1 << 20,
        of: str = MATCHES,
    ) -> None:
        self.of = of
        self._function = function
        self._rows_max = rows_max

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Call the function for every table of the batch."""
        for path in files:
            for batch in pq.ParquetFile(path).iter_batches(self._rows_max):
                self._function(batch_id, pa.Table.from_batches([batch]))


class ConsoleSink:
    """Prints the first rows of each batch, and their number."""

    def __init__(self, console: Console | None = None, of: str = MATCHES) -> None:
        self.of = of
        self._console = console or Console()

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Print a batch."""
        total = sum(pq.read_metadata(path).num_rows for path in files)
        what = self.of if self.of == MATCHES else f"rows of {self.of}"
        self._console.print(f"batch {batch_id}: {total:,} {what}")
        left = CONSOLE_ROWS
        for path in files:
            for row in next(pq.ParquetFile(path).iter_batches(left), pa.table({})).to_pylist():
                self._console.print(f"  {self._text(row)}", highlight=False, markup=False)
                left -= 1
            if left <= 0:
                break

    def _text(self, row: dict[str, Any]) -> str:
        if self.of == MATCHES:
            return "query {query_id} point {point_id} at {event_time}".format(**row)
        return ", ".join(f"{name} {value}" for name, value in row.items() if name != "batch_id")


class ForeachBatchSink:
    """Passes each batch that has rows to a function as a DataFrame, as ``foreachBatch`` does."""

    def __init__(
        self, spark: SparkSession, function: Callable[[DataFrame, int], None], of: str = MATCHES
    ) -> None:
        self.of = of
        self._spark = spark
        self._function = function

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Call the function."""
        if files:
            self._function(self._spark.read.parquet(*files), batch_id)


class KafkaSink(ForeachBatchSink):
    """Writes rows to a topic as JSON through Spark's connector.

    The key of a message is the query of a match, or the name of the dataflow's sink.
    """

    def __init__(self, spark: SparkSession, address: str, of: str = MATCHES) -> None:
        self._brokers, self._topic = kafka_address(address, "out.topic")
        check_connector(spark)
        super().__init__(spark, self._write, of)

    def _write(self, found: DataFrame, batch_id: int) -> None:
        key = F.col("query_id").cast("string") if self.of == MATCHES else F.lit(self.of)
        value = F.to_json(F.struct(*found.columns), {"timestampFormat": TIME_FORMAT})
        rows = found.select(key.alias("key"), value.alias("value"))
        options = {"kafka.bootstrap.servers": self._brokers, "topic": self._topic}
        rows.write.format("kafka").options(**options).save()
