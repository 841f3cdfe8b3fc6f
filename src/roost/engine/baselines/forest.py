"""A random forest of Spark ML, trained on the rows of a Parquet file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.regression import RandomForestRegressor
from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class ForestRun:
    """Error of a forest on other rows, and what its training took."""

    rmse: float
    rows: int
    partitions: int
    load_s: float
    train_s: float


def train_forest(
    spark: SparkSession,
    train: str,
    test: str,
    features: Sequence[str],
    target: str,
    *,
    depth: int,
    seed: int,
) -> ForestRun:
    """Train on one file and test on another; other parameters are Spark's defaults.

    Loading reads the rows into Spark's memory, without those in which something is null.
    """
    vectors = VectorAssembler(inputCols=list(features), outputCol="features")

    def load(path: str) -> tuple[DataFrame, int]:
        rows = spark.read.parquet(path).dropna(subset=[*features, target])
        frame = vectors.transform(rows).select("features", target).cache()
        return frame, frame.count()

    started = time.perf_counter()
    frame, rows = load(train)
    loaded = time.perf_counter()
    forest = RandomForestRegressor(labelCol=target, maxDepth=depth, seed=seed)
    model = forest.fit(frame)
    trained = time.perf_counter()
    tested, _ = load(test)
    evaluator = RegressionEvaluator(labelCol=target, metricName="rmse")
    rmse = float(evaluator.evaluate(model.transform(tested)))
    partitions = frame.rdd.getNumPartitions()
    for cached in (frame, tested):
        cached.unpersist()
    return ForestRun(rmse, rows, partitions, loaded - started, trained - loaded)
