"""Query the last ten seconds of a stream: after every batch, and ad hoc.

A window holds the most recent points. A standing query with ``aggregate`` or ``nearest`` has a
result after every batch, computed from the points that arrived since the query was registered. A
snapshot query reads the current window, and its result names the batch that the window belongs to.

Run it with ``python examples/recent_points.py [FOLDER]``, with a new folder.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq

from roost import Circle, Pipeline, Query, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from roost.runtime.records import Commit

# The generator emits 10,000 points per second of event time, so a batch covers five seconds.
POINTS = "generate:rows=200000,rate=10000,seed=7"
TOKYO = Circle(139.69, 35.69, 50_000.0)
DELHI = Circle(77.21, 28.63, 50_000.0)


def main(out: Path, spark: SparkSession | None = None) -> dict[str, dict[int, int]]:
    """Return the number of points near Tokyo after each batch, by query."""
    snapshots: dict[int, int] = {}

    def between_batches(commit: Commit) -> None:
        now = pipeline.snapshot(TOKYO, aggregate="count, avg(value)").first()
        assert now is not None
        print(f"batch {now['at_batch']}: {now['count']} near Tokyo, mean {now['avg(value)']:.1f}")
        snapshots[now["at_batch"]] = now["count"]
        if commit.batch_id == 1:
            pipeline.request(Query("from batch 2 on", TOKYO, aggregate="count"))

    config = RunConfig(
        points={"path": POINTS},
        out={"dir": out},
        engine={"batch_rows": 50_000},
        window={"kind": "time", "length": 10},
    )
    with Pipeline(config, spark=spark, on_batch=between_batches) as pipeline:
        pipeline.request(
            Query("from the start", TOKYO, aggregate="count, avg(value), max(value)"),
            Query("nearest to delhi", DELHI, nearest=3),
        )
        pipeline.run()
        around = Circle(DELHI.cx, DELHI.cy, math.inf)
        for row in pipeline.snapshot(around, where="value > 60", nearest=3).collect():
            print(f"{row['distance']:8,.0f} m  {row['id']} with {row['value']:.1f}")
    table = pq.read_table(out / "aggregates")
    counts: dict[str, dict[int, int]] = {"snapshot": snapshots}
    for row in table.filter(pc.equal(table["name"], "count")).to_pylist():
        counts.setdefault(row["query_id"], {})[row["batch_id"]] = int(row["number"])
    for name, by_batch in counts.items():
        print(f"{name}: {dict(sorted(by_batch.items()))}")
    return counts


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/recent_points"))
