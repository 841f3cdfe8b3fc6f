"""Ask about the last ten seconds of a stream: at every batch, and whenever you like.

A window keeps the points that count now. A standing query with ``aggregate`` or ``nearest`` is
answered after every batch, from the points that came while it was there. A snapshot asks about
whatever the window holds at the moment, and says of which batch its answer is true.

Run it with ``python examples/recent_points.py [FOLDER]``; it takes a fresh folder.
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

# The generator makes 10,000 points a second of event time, so a batch is five seconds.
POINTS = "generate:rows=200000,rate=10000,seed=7"
TOKYO = Circle(139.69, 35.69, 50_000.0)
DELHI = Circle(77.21, 28.63, 50_000.0)


def main(out: Path, spark: SparkSession | None = None) -> dict[str, dict[int, int]]:
    """Return the number of points near Tokyo at each batch, by who counted them."""
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
    for answer in table.filter(pc.equal(table["name"], "count")).to_pylist():
        counts.setdefault(answer["query_id"], {})[answer["batch_id"]] = int(answer["number"])
    for name, by_batch in counts.items():
        print(f"{name}: {dict(sorted(by_batch.items()))}")
    return counts


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/recent_points"))
