"""Baseline: item-based recommendations as a batch job over all ratings, in Spark SQL.

The three rounds of the thesis's MapReduce job are one query: fans, pairs of items by user, and the
ten items with most mutual fans for each item. It is generated code without Python, with as many
shuffle partitions as cores and adaptive execution.
"""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F


def recommend(
    spark: SparkSession, ratings: str, out: Path, *, above: int, top: int, cores: int
) -> float:
    """Compute the lists of all items and write them as Parquet; returns the seconds."""
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", str(cores))
    session.conf.set("spark.sql.session.timeZone", "UTC")
    began = time.perf_counter()
    fans = session.read.parquet(ratings).where(F.col("rating") > above)
    fans = fans.select("user", "item").distinct()
    other = fans.withColumnRenamed("item", "other")
    # Each pair is counted once, and both of its directions get the count.
    pairs = fans.join(other, "user").where("item < other").groupBy("item", "other")
    mutual = pairs.agg(F.count(F.lit(1)).alias("fans"))
    back = mutual.select(F.col("other").alias("item"), F.col("item").alias("other"), "fans")
    order = Window.partitionBy("item").orderBy(F.desc("fans"), "other")
    ranked = mutual.unionByName(back).withColumn("rank", F.row_number().over(order))
    ranked.where(F.col("rank") <= top).write.mode("overwrite").parquet(str(out))
    return time.perf_counter() - began
