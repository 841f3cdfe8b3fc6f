"""Count calls and average their duration by district, over 60 seconds, every 10 seconds.

The start of a call is its event time. The source displaces starts by up to 20 seconds, so calls
arrive out of order; with ``dataflow.lateness`` at 20 seconds, none of them is late.

Run it with ``python examples/calls_by_district.py [FOLDER]``, or with
``roost run --flow examples/calls_by_district.py:flow``.
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

DISORDER_S = 20
CALLS = f"generate:calls,rows=20000,rate=100,seed=7,districts=12,disorder={DISORDER_S}"
TIME = "timestamp[us, tz=UTC]"

flow = Dataflow("calls by district")
calls = flow.source(
    "calls", {"district": "int64", "start": TIME, "end": TIME}, time="start", path=CALLS
)
duration_s = (pc.field("end") - pc.field("start")).cast("int64").cast("double") / 1e6
durations = calls.map({"district": pc.field("district"), "duration": duration_s}, name="durations")
durations.aggregate(
    {"calls": "count", "mean": "avg(duration)"}, by="district", size=60, advance=10, name="minutes"
).sink("districts")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of results: one for each window and district that has calls."""
    config = RunConfig(
        out={"dir": out}, engine={"batch_rows": 5_000}, dataflow={"lateness": DISORDER_S}
    )
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        pipeline.run()
    results = pq.read_table(out / "districts").sort_by([("start", "ascending")])
    print(f"{results.num_rows:,} results")
    for row in results.slice(results.num_rows // 2, 5).to_pylist():
        print(
            f"{row['start']:%H:%M:%S}  district {row['district']:2}  {row['calls']} calls, "
            f"mean {row['mean']:.0f} s"
        )
    return results.num_rows


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/calls_by_district"))
