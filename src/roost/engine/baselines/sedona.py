"""Baseline: the spatial join of Apache Sedona.

Sedona lags some versions behind Spark, so this script imports nothing of Roost. The benchmark runs
it with the Python of an environment that has a Spark version Sedona supports; the jars come from
Maven Central through ``spark.jars.packages``.

The queries are loaded as geometries and cached before timing starts. Each timed pass reads the
point file, builds points and joins with ``ST_Intersects``, which includes borders. The plan is
Sedona's partitioned range join: a KDB-tree over the points partitions space, and an R-tree joins
each partition. On 100 thousand boxes it used a third of the processor time of the broadcast index
join. The numbers of partitions and the indexed side are the best of those
measured. Sedona rebuilds its trees for each job, so their time is part of a pass.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

CORES = 2
PASSES_MAX = 64
WARM_PASSES_MIN = 3
EXTENSIONS = "org.apache.sedona.sql.SedonaSqlExtensions"
# Points are the left side of the join, queries the right.
TUNED = {
    "boxes": {"numpartition": "16", "indexbuildside": "left"},
    "polygons": {"numpartition": "64", "indexbuildside": "right"},
}


def fetch(args: argparse.Namespace) -> None:
    """Download the jars with any version of Spark; fails if they do not exist."""
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.jars.packages", args.packages)
    builder.config("spark.jars.ivy", args.ivy).getOrCreate().stop()


def start(name: str, settings: dict[str, str]) -> SparkSession:
    """Start Spark on two cores with the settings of a join, and those of all joins."""
    common = {
        "spark.driver.maxResultSize": "0",
        "spark.ui.enabled": "false",
        "spark.sql.files.maxPartitionBytes": "4m",
        "spark.sql.files.openCostInBytes": "0",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.session.timeZone": "UTC",
    }
    options: dict[str, Any] = {**common, **settings}
    builder = SparkSession.builder.master(f"local[{CORES}]").appName(name)
    spark = builder.config(map=options).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def session(args: argparse.Namespace) -> SparkSession:
    """Start Spark with Sedona's extensions."""
    settings = {
        "spark.jars.packages": args.packages,
        "spark.jars.ivy": args.ivy,
        "spark.sql.extensions": EXTENSIONS,
        "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
        "spark.kryo.registrator": "org.apache.sedona.core.serde.SedonaKryoRegistrator",
        "spark.kryoserializer.buffer.max": "1g",
        "spark.driver.memory": "8g",
        "spark.sql.shuffle.partitions": "8",
        "spark.sedona.join.gridtype": "kdbtree",
        "spark.sedona.global.indextype": "rtree",
    }
    return start("sedona", settings)


def load_queries(spark: SparkSession, case: dict[str, Any]) -> None:
    """Cache the queries as geometries, in the view ``queries``."""
    shape = "ST_GeomFromWKT(wkt)"
    if case["kind"] == "boxes":
        shape = "ST_PolygonFromEnvelope(x0, y0, x1, y1)"
    frame = spark.read.parquet(case["queries_path"]).selectExpr("query_id", f"{shape} AS shape")
    frame = frame.repartition(4 * CORES).cache()
    frame.count()
    frame.createOrReplaceTempView("queries")


def matches(spark: SparkSession, points_path: str) -> DataFrame:
    """Return the join of a point file with the loaded queries."""
    points = spark.read.parquet(points_path)
    points.selectExpr(
        "id AS point_id", "event_time", "ST_Point(lon, lat) AS at"
    ).createOrReplaceTempView("points")
    return spark.sql(
        "SELECT query_id, point_id, event_time "
        "FROM points JOIN queries ON ST_Intersects(queries.shape, points.at)"
    )


def one_pass(frame: DataFrame, out: Path | None) -> int:
    """Count or write the matches of one pass; returns 0 if it writes."""
    if out is None:
        return frame.count()
    frame.write.parquet(str(out))
    return 0


def measure(spark: SparkSession, args: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, and time whole passes over the case's point file."""
    case = json.loads(args.case.read_text())
    for key, value in TUNED[case["kind"]].items():
        spark.conf.set(f"spark.sedona.join.{key}", value)
    load_queries(spark, case)
    counting = args.mode == "count"
    out = None if counting else args.out
    path = case["points_path"] if counting else case["write_points_path"]
    started, passes = time.perf_counter(), 0
    while passes < WARM_PASSES_MIN or time.perf_counter() - started < case["warm_s"]:
        shutil.rmtree(args.out, ignore_errors=True)
        one_pass(matches(spark, case["warm_points_path"]), out)
        passes += 1
    seconds, passes, found = 0.0, 0, 0
    while passes == 0 or (seconds < case["timed_s"] and passes < PASSES_MAX):
        shutil.rmtree(args.out, ignore_errors=True)
        started = time.perf_counter()
        found = one_pass(matches(spark, path), out)
        seconds += time.perf_counter() - started
        passes += 1
    points = case["points"] if counting else case["write_points"]
    return {
        "system": "sedona",
        "case": case["name"],
        "mode": args.mode,
        "points": points,
        "passes": passes,
        "seconds": seconds,
        "points_per_s": points * passes / seconds,
        "matches": found if counting else spark.read.parquet(str(args.out)).count(),
        "version": f"{args.packages.split(',')[0]} on spark {spark.version}",
        "notes": "partitioned join",
    }


def main() -> None:
    """Run one job, download the jars (``--fetch``) or check that Sedona starts (``--probe``)."""
    parser = argparse.ArgumentParser(description="Match with Apache Sedona.")
    parser.add_argument("--packages", required=True, help="Maven coordinates, comma-separated")
    parser.add_argument("--ivy", required=True, help="folder for the downloaded jars")
    parser.add_argument("--fetch", action="store_true", help="only download the jars")
    parser.add_argument("--probe", action="store_true", help="only check that Sedona starts")
    parser.add_argument("--case", type=Path)
    parser.add_argument("--mode", choices=("count", "write"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.fetch:
        fetch(args)
        return
    spark = session(args)
    try:
        if args.probe:
            spark.sql("SELECT ST_Intersects(ST_Point(0.0, 0.0), ST_Point(0.0, 0.0))").collect()
        else:
            args.json.write_text(json.dumps(measure(spark, args), indent=2) + "\n")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
