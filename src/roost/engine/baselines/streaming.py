"""Baseline: Spark's own streaming queries, windowed aggregation and stream-stream join, tuned.

Both write Parquet in append mode, as Roost does. Tuning: as many shuffle partitions as cores; the
faster of Spark's two state stores, which the caller chooses by trying both; RocksDB with changelog
checkpoints; checkpoint files written without the temporary copy; all in generated code, without
Python. The join has the bounds on event time from which Spark derives when to drop state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

STATE = "org.apache.spark.sql.execution.streaming.state"
STORES = {
    "rocksdb": f"{STATE}.RocksDBStateStoreProvider",
    "memory": f"{STATE}.HDFSBackedStateStoreProvider",
}
CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing"
EARTH_RADIUS_M = 6_371_008.8


@dataclass(frozen=True)
class StreamRun:
    """What one run of a query measured."""

    seconds: float  # from the first batch's beginning to the last one's end
    batches: int
    rows: int
    # Beginning (seconds since 1970) and duration of each batch with rows.
    times: tuple[tuple[float, float], ...] = ()


def session_of(spark: SparkSession, store: str, cores: int) -> SparkSession:
    """Return a session with the settings of streaming queries, on the same Spark context."""
    made = spark.newSession()
    settings = {
        "spark.sql.shuffle.partitions": cores,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": STORES[store],
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": (
            f"{CHECKPOINTS}.FileSystemBasedCheckpointFileManager"
        ),
        "spark.sql.streaming.numRecentProgressUpdates": 10_000,
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }
    for name, value in settings.items():
        made.conf.set(name, str(value))
    return made


def read_files(spark: SparkSession, folder: Path, columns: Sequence[str]) -> DataFrame:
    """Stream the files of a folder, one in each batch, in the order of their names."""
    schema = spark.read.parquet(str(folder)).schema
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder)).select(*columns)


def aggregated(
    calls: DataFrame,
    by: str,
    size_s: int,
    advance_s: int,
    lateness_s: int,
    least_s: int | None,
    mean: str = "avg(duration)",
) -> DataFrame:
    """Return number and average duration of calls by window and key; ``mean`` is the average."""
    duration = (F.unix_micros("end") - F.unix_micros("start")) / F.lit(1e6)
    window = F.window("start", f"{size_s} seconds", f"{advance_s} seconds")
    if advance_s == size_s:
        window = F.window("start", f"{size_s} seconds")
    found = (
        calls.withWatermark("start", f"{lateness_s} seconds")
        .select(by, "start", duration.alias("duration"))
        .groupBy(window.alias("window"), by)
        .agg(F.count("*").alias("calls"), F.expr(mean).alias("mean"))
        .select(F.col("window.start").alias("start"), by, "calls", "mean")
    )
    return found if least_s is None else found.where(F.col("mean") > least_s)


def joined(left: DataFrame, right: DataFrame, within_s: int) -> DataFrame:
    """Return pairs of calls of one caller within some seconds, and their distance."""
    sides = [
        calls.select(*(F.col(name).alias(f"{side}_{name}") for name in calls.columns))
        .withWatermark(f"{side}_start", "0 seconds")
        .alias(side)
        for side, calls in (("l", left), ("r", right))
    ]
    condition = (
        "l_src = r_src AND r_start >= l_start"
        f" AND r_start <= l_start + INTERVAL {within_s} SECONDS"
        " AND (l_start < r_start OR l_start = r_start"
        " AND (l_dst < r_dst OR l_dst = r_dst AND l_end < r_end))"
    )
    half = "pow(sin((radians(r_lat) - radians(l_lat)) / 2), 2) + cos(radians(l_lat))"
    half += " * cos(radians(r_lat)) * pow(sin((radians(r_lon) - radians(l_lon)) / 2), 2)"
    metres = f"2 * {EARTH_RADIUS_M}D * asin(sqrt(least({half}, 1D)))"
    return (
        sides[0]
        .join(sides[1], F.expr(condition))
        .selectExpr("l_src AS src", "l_start AS first", "r_start AS second", f"{metres} AS metres")
    )


def run_to_end(results: DataFrame, out: Path, checkpoint: Path) -> StreamRun:
    """Run a query on all files that there are; it writes Parquet."""
    writer = results.writeStream.format("parquet").outputMode("append")
    writer = writer.option("path", str(out)).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return measured(query)


def measured(query: StreamingQuery) -> StreamRun:
    """Return what a query that has ended measured."""
    steps = [progress for progress in query.recentProgress if progress["durationMs"]]
    times = [datetime.fromisoformat(step["timestamp"]).timestamp() for step in steps]
    end = max(t + step["batchDuration"] / 1e3 for t, step in zip(times, steps, strict=True))
    rows = [int(step["numInputRows"]) for step in steps]
    lasted = [step["batchDuration"] / 1e3 for step in steps]
    with_rows = tuple((t, s) for t, s, n in zip(times, lasted, rows, strict=True) if n)
    return StreamRun(end - min(times), len(steps), sum(rows), with_rows)
