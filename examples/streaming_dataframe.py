"""Match the rows of any streaming DataFrame.

This example reads a folder with Spark's file source; Kafka, Delta and other sources work in the
same way. Spark stores the stream's offsets in its checkpoint, and Roost stores all other state, so
that each match is written exactly once.

Run it with ``python examples/streaming_dataframe.py [FOLDER]``.
"""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import Box, Pipeline, Query, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)
FILES, ROWS = 3, 10_000


def write_points(folder: Path) -> None:
    """Write files of vehicle positions on a square of 100 by 100 units."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    for number in range(FILES):
        time = [START + dt.timedelta(seconds=number * ROWS + k) for k in range(ROWS)]
        columns = {
            "vehicle": [f"v{k:05d}" for k in range(ROWS)],
            "seen_at": pa.array(time, pa.timestamp("us", "UTC")),
            "x": rng.uniform(0.0, 100.0, ROWS),
            "y": rng.uniform(0.0, 100.0, ROWS),
            "speed_kmh": rng.uniform(0.0, 130.0, ROWS),
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of matches."""
    write_points(out / "points")
    config = RunConfig(
        points={"time": "seen_at", "id": "vehicle"},
        space={"bounds": (0, 0, 100, 100)},
        out={"dir": out},
        engine={"available_now": True},
    )
    with Pipeline(config, spark=spark) as pipeline:
        if pipeline.log.end() == 0:
            pipeline.request(
                Query("yard", Box(10.0, 10.0, 20.0, 20.0)),
                Query("too fast", Box(0.0, 40.0, 100.0, 60.0), predicate="speed_kmh > 120"),
            )
        columns = "vehicle string, seen_at timestamp, x double, y double, speed_kmh double"
        reader = pipeline.spark.readStream.schema(columns).option("maxFilesPerTrigger", 1)
        stream = pipeline.start(reader.parquet(str((out / "points").absolute())))
        stream.awaitTermination()
        report = pipeline.report()
    print(f"{report['points']:,} points in {report['batches']} batches")
    print(f"{report['matches']:,} matches")
    return int(report["matches"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/streaming_dataframe"))
