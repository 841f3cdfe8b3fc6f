"""Spark SQL's join on cells (``engine.baselines``), as a system of ``roost bench peers``."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

from roost.bench.rivals.protocol import job_of, measure, parser
from roost.engine.baselines.sedona import one_pass
from roost.engine.baselines.spark_sql import CellJoin, session


def main() -> None:
    """Run one job from the command line."""
    job = job_of(parser("Match with Spark SQL's equi-join on cells.").parse_args())
    case = job.case
    spark = session()
    with tempfile.TemporaryDirectory() as scratch:
        join = CellJoin(
            spark, case.queries_path, case.kind, case.side_x, case.side_y, Path(scratch)
        )

        def run(points_path: str, out: Path | None) -> int:
            return one_pass(join.matches(points_path), out)

        notes = "sort-merge join on cells, cached query side"
        measure(job, "spark_sql", f"spark {version('pyspark')}", notes, run)
    spark.stop()


if __name__ == "__main__":
    main()
