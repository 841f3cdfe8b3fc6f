"""Rank geofences by their matches: the three busiest ones of each hour.

The dataflow reads the matches of the same run. The first Aggregate counts them by geofence and
hour; the second one reads the counts of all geofences of an hour and retains the greatest. A Map
then makes one row of each of them.

Run it with ``python examples/busiest_geofences.py [FOLDER]``, or with
``roost run --flow examples/busiest_geofences.py:flow``, which uses the bundled requests.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import Box, Dataflow, Pipeline, Query, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Squares of a hundredth of a degree that cover Manhattan south of the park.
GEOFENCES = [
    Query(f"{row}/{column}", Box(x, y, x + 0.01, y + 0.01))
    for row, y in enumerate(np.arange(40.70, 40.77, 0.01).tolist())
    for column, x in enumerate(np.arange(-74.02, -73.96, 0.01).tolist())
]
HOUR_S = 3600
RANKED = pa.schema([("rank", pa.int64()), ("query_id", pa.string()), ("matches", pa.int64())])


def ranks(hours: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Make a row of each geofence in a list; returns the rows and the input row of each."""
    lists = hours["busiest"]
    lengths = np.asarray(lists.value_lengths())
    ends = np.cumsum(lengths)
    found = lists.flatten()
    rank = np.arange(len(found)) - np.repeat(ends - lengths, lengths) + 1
    columns = [pa.array(rank), found.field("query_id"), found.field("matches")]
    rows = np.repeat(np.arange(len(lists)), lengths)
    return pa.RecordBatch.from_arrays(columns, schema=RANKED), rows


flow = Dataflow("busiest geofences")
counts = flow.matches().aggregate({"matches": "count"}, by="query_id", size=HOUR_S, name="counts")
busiest = counts.aggregate({"busiest": "top(3, matches)"}, size=HOUR_S, name="busiest")
busiest.map(ranks, schema=RANKED, name="ranks").sink("busiest_geofences")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of hours."""
    points = resources.files("roost") / "data" / "sample_points.parquet"
    config = RunConfig(points={"path": points}, out={"dir": out}, engine={"batch_rows": 100_000})
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        if pipeline.log.end() == 0:
            pipeline.request(*GEOFENCES)
        pipeline.run()
    found = pq.read_table(out / "busiest_geofences")
    found = found.sort_by([("event_time", "ascending"), ("rank", "ascending")])
    for row in found.slice(0, 6).to_pylist():
        print(
            f"{row['event_time']:%d %b %H:%M}  {row['rank']}. {row['query_id']}: {row['matches']}"
        )
    return len(set(found["event_time"].to_pylist()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/busiest_geofences"))
