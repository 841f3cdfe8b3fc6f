"""Spark SQL over a synopsis: the data source ``roost_synopsis``, and temporary views.

Spark creates the reader and its tasks in a Python process of the driver's host; executors open the
files of the state directory themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from roost.synopsis.tables import LISTING, TableQuery

FORMAT = "roost_synopsis"


class SynopsisSource(DataSource):
    """The records of the synopsis in a state directory, or the list of its files."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns, which depend on the features."""
        return from_arrow_schema(TableQuery.from_options(self.options).schema())

    def reader(self, schema: StructType) -> SynopsisTasks:
        """Return the reader."""
        return SynopsisTasks(TableQuery.from_options(self.options))


class SynopsisTasks(DataSourceReader):
    """Reads the parts of the synopsis, each in a task."""

    def __init__(self, query: TableQuery) -> None:
        self._query = query

    def partitions(self) -> list[InputPartition]:
        """Take a lease on the files of the newest batch and divide them."""
        # Spark reads one partition without a value where there is none.
        return [InputPartition(task) for task in self._query.plan()] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part."""
        return iter(()) if partition.value is None else partition.value.read()


def register_synopsis(
    spark: SparkSession, state: str | Path | None = None, view: str = "synopsis", **options: object
) -> None:
    """Register the format ``roost_synopsis``, and temporary views of a state directory.

    ``view`` has the records, or synthetic rows with ``table="synthetic"``, and ``{view}_files`` the
    files. ``options`` are those of the format. Spark
    plans a DataFrame of the format once, so a view stays at the batch that was the newest when it
    was first queried: register it again to read a newer one.

    Examples
    --------
    ``register_synopsis(spark, "out/state", hours="14,17")`` and then
    ``spark.sql("select sum(rows * temp_mean) / sum(rows) from synopsis")``
    """
    spark.dataSource.register(SynopsisSource)
    if state is None:
        return
    given = {"path": str(state), **{name: _text(value) for name, value in options.items()}}
    TableQuery.from_options(given).schema()  # Spark's own errors are long
    listing = {name: given[name] for name in given.keys() - {"share", "seed"}} | {"table": LISTING}
    for name, own in ((view, given), (f"{view}_files", listing)):
        spark.read.format(FORMAT).options(**own).load().createOrReplaceTempView(name)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
