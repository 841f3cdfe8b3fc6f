"""Spark SQL's cell join behind the benchmark's protocol; the join is ``engine.baselines``'s."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

from roost.bench.rivals.protocol import CORES, measure, read_job
from roost.engine.baselines.spark_sql import CellJoin, session


def main() -> None:
    """Run one job from the command line."""
    job = read_job("Match with Spark SQL's equi-join on cells.")
    case = job.case
    spark = session(CORES)
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as scratch:
        join = CellJoin(
            spark, case.queries_path, case.kind, case.side_x, case.side_y, Path(scratch)
        )

        def run(points_path: str, out: Path | None) -> int:
            if out is None:
                return join.count(points_path)
            join.write(points_path, out)
            return 0

        notes = "sort-merge join on cells, cached query side"
        measure(job, "spark_sql", f"spark {version('pyspark')}", notes, run)
    spark.stop()


if __name__ == "__main__":
    main()
