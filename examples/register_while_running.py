"""Register and terminate queries during a run.

A request is appended to the query log at once and takes effect with the next batch. A request with
a time (``at``) takes effect exactly at that event time, independent of batch boundaries.

Run it with ``python examples/register_while_running.py [FOLDER]``, with a new folder.
"""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from roost import Circle, Pipeline, Query, RunConfig, Terminate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from roost.runtime.records import Commit

# The generator emits 10,000 points per second of event time, from START on.
START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
POINTS = "generate:rows=200000,rate=10000,seed=7"
TOKYO = Circle(139.69, 35.69, 50_000.0)
DELHI = Circle(77.21, 28.63, 50_000.0)


def main(out: Path, spark: SparkSession | None = None) -> dict[str, list[int]]:
    """Return the batches with matches, by query."""

    def between_batches(commit: Commit) -> None:
        print(f"batch {commit.batch_id}: {commit.figures['matches']} matches")
        if commit.batch_id == 0:
            pipeline.request(Query("delhi", DELHI, user_id="ann"))
        if commit.batch_id == 1:
            pipeline.request(Terminate("tokyo"))

    config = RunConfig(points={"path": POINTS}, out={"dir": out}, engine={"batch_rows": 50_000})
    with Pipeline(config, spark=spark, on_batch=between_batches) as pipeline:
        pipeline.request(
            Query("tokyo", TOKYO),
            Query("tokyo, from second 12 on", TOKYO, at=START + dt.timedelta(seconds=12)),
        )
        pipeline.run()
    table = pq.read_table(out / "matches", columns=["query_id", "batch_id"])
    batches: dict[str, set[int]] = {}
    for row in table.group_by(["query_id", "batch_id"]).aggregate([]).to_pylist():
        batches.setdefault(row["query_id"], set()).add(row["batch_id"])
    for name in sorted(batches):
        print(f"{name}: batches {sorted(batches[name])}")
    return {name: sorted(found) for name, found in batches.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/register_while_running"))
