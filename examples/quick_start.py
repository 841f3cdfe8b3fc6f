"""Match the bundled sample of pickups with a few queries and count the matches.

Run it with ``python examples/quick_start.py [FOLDER]``. A second run with the same folder has no
new points, and prints the same counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from roost import Box, Circle, Pipeline, Polygon, Query, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUERIES = (
    Query("midtown", Box(-73.995, 40.745, -73.970, 40.765)),
    Query("jfk", Circle(-73.7781, 40.6413, 1500.0)),
    Query(
        "around the park",
        Polygon(
            "POLYGON ((-73.990 40.768, -73.956 40.812, -73.940 40.803, -73.972 40.756,"
            " -73.990 40.768), (-73.9815 40.7681, -73.9582 40.8005, -73.9494 40.7968,"
            " -73.9730 40.7644, -73.9815 40.7681))"
        ),
    ),
    Query(
        "one base in midtown",
        Box(-73.995, 40.745, -73.970, 40.765),
        user_id="ann",
        predicate="base = 'B02617'",
    ),
)


def main(out: Path, spark: SparkSession | None = None) -> Counter[str]:
    """Match the sample; returns the number of matches of each query."""
    points = resources.files("roost") / "data" / "sample_points.parquet"
    config = RunConfig(
        points={"path": points},
        out={"dir": out},
        engine={"available_now": True, "batch_rows": 200_000},
    )
    with Pipeline(config, spark=spark) as pipeline:
        if pipeline.log.end() == 0:
            pipeline.request(*QUERIES)
        report = pipeline.run()
    print(f"{report['points']:,} points, {report['matches']:,} matches")
    matches = pq.read_table(out / "matches", columns=["query_id"])
    counts = Counter(matches["query_id"].to_pylist())
    for name, count in counts.most_common():
        print(f"{count:8,}  {name}")
    return counts


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/quick_start"))
