"""Find two calls of one caller within 60 seconds, and the distance between their places.

A stream joined with itself pairs each call with itself, and two calls in both orders. The condition
excludes both: the left call is the earlier one, and callee and end decide between calls that start
at the same time. Event times of a pair differ by *less* than the size of the window, so a window
for "at most 60 seconds" is one tick (a microsecond) longer.

Run it with ``python examples/two_calls.py [FOLDER]``, or with
``roost run --flow examples/two_calls.py:flow``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import Dataflow, Pipeline, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CALLS = "generate:calls,rows=20000,rate=20,seed=7,callers=5000"
TIME = pa.timestamp("us", "UTC")
WITHIN_S = 60
EARTH_RADIUS_M = 6_371_008.8
PAIR = pa.schema(
    [
        ("src", pa.string()),
        ("first", TIME),
        ("second", TIME),
        ("seconds", pa.float64()),
        ("metres", pa.float64()),
    ]
)


def distances(pairs: pa.RecordBatch) -> pa.RecordBatch:
    """Compute the distance of each pair in time and, by the haversine formula, in space."""
    names = ("left_lat", "left_lon", "right_lat", "right_lon")
    lat0, lon0, lat1, lon1 = (np.radians(pairs[name].to_numpy()) for name in names)
    a = np.sin((lat1 - lat0) / 2) ** 2
    a += np.cos(lat0) * np.cos(lat1) * np.sin((lon1 - lon0) / 2) ** 2
    metres = 2 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.minimum(a, 1.0)))
    first, second = pairs["left_start"], pairs["right_start"]
    seconds = (second.cast(pa.int64()).to_numpy() - first.cast(pa.int64()).to_numpy()) / 1e6
    columns = [pairs["left_src"], first, second, pa.array(seconds), pa.array(metres)]
    return pa.RecordBatch.from_arrays(columns, schema=PAIR)


flow = Dataflow("two calls")
calls = flow.source(
    "calls",
    {
        "src": "string",
        "dst": "string",
        "start": TIME,
        "end": TIME,
        "lat": "double",
        "lon": "double",
    },
    time="start",
    path=CALLS,
)
pairs = calls.join(
    calls,
    f"left.src = right.src and abs(left.start - right.start) <= {WITHIN_S}"
    " and (left.start < right.start or left.start = right.start"
    " and (left.dst < right.dst or left.dst = right.dst and left.end < right.end))",
    size=WITHIN_S + 1e-6,
    name="pairs",
)
pairs.map(distances, schema=PAIR, name="distances").sink("two_calls")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of pairs."""
    config = RunConfig(out={"dir": out}, engine={"batch_rows": 5_000})
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        pipeline.run()
    found = pq.read_table(out / "two_calls").sort_by([("metres", "descending")])
    print(f"{found.num_rows:,} pairs")
    for row in found.slice(0, 5).to_pylist():
        print(f"{row['src']}  {row['metres'] / 1000:,.0f} km within {row['seconds']:.0f} s")
    return found.num_rows


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/two_calls"))
