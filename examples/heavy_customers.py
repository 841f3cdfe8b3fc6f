"""Report customers whose calls are long: hourly averages, updated every minute.

A Map computes the duration of each call, an Aggregate its average per caller over windows of 3,600
seconds that begin every 60, and a Filter retains averages above a threshold. This is the query of
figure 22 of the StreamCloud paper.

Run it with ``python examples/heavy_customers.py [FOLDER]``, or with
``roost run --flow examples/heavy_customers.py:flow``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq

from roost import Dataflow, Pipeline, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# 4,000 seconds of calls. The generator's columns are those of table II of the paper.
CALLS = "generate:calls,rows=20000,rate=5,seed=7,callers=2000"
TIME = "timestamp[us, tz=UTC]"
THRESHOLD_S = 300

flow = Dataflow("heavy customers")
calls = flow.source(
    "calls", {"src": "string", "start": TIME, "end": TIME}, time="start", path=CALLS
)
duration_s = (pc.field("end") - pc.field("start")).cast("int64").cast("double") / 1e6
durations = calls.map({"src": pc.field("src"), "duration": duration_s}, name="durations")
averages = durations.aggregate(
    {"calls": "count", "mean": "avg(duration)"}, by="src", size=3600, advance=60, name="averages"
)
averages.filter(f"mean > {THRESHOLD_S}", name="above").sink("heavy")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of heavy customers of all windows."""
    config = RunConfig(out={"dir": out}, engine={"batch_rows": 5_000})
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        pipeline.run()
    heavy = pq.read_table(out / "heavy").sort_by([("start", "ascending"), ("mean", "descending")])
    print(f"{heavy.num_rows:,} averages above {THRESHOLD_S} s")
    for row in heavy.slice(0, 5).to_pylist():
        print(f"{row['start']:%H:%M}  {row['src']}  {row['calls']} calls, mean {row['mean']:.0f} s")
    return heavy.num_rows


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/heavy_customers"))
