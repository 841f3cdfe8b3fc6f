"""The toy stages on Spark: the same totals over slices and over a streaming DataFrame."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from roost import Pipeline, RunConfig
from roost.model.settings import with_settings
from roost.runtime.records import Commit
from roost.testing import check_states
from stage_scenario import ROWS, Scenario, random_points
from toy_stage import KeyTotals

pytestmark = pytest.mark.spark

BATCHES = 3
STATIC = ["replicated", "uniform"]


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    """Three levels, each with another number of machines."""
    points = random_points(1, BATCHES * ROWS)
    return Scenario(tmp_path, machines=(4,), three_levels=True, points=points)


def pipeline_of(spark: SparkSession, scenario: Scenario, config: RunConfig) -> Pipeline:
    """Return a pipeline that checks states after every batch and waits for its jobs."""

    def on_batch(commit: Commit) -> None:
        check_states(pipeline)
        loop = pipeline._loop
        assert loop is not None
        if loop.jobs._running is not None:
            loop.jobs._running[3].result(timeout=60)

    pipeline = Pipeline(config, spark=spark, more_stages=scenario.stages(), on_batch=on_batch)
    return pipeline


def check(scenario: Scenario) -> None:
    scenario.check()
    assert len(scenario.published("totals")) == 4 * BATCHES
    assert scenario.totals.names[0].startswith("job-"), "a job has merged files"


def exchanged(spark: SparkSession) -> set[str]:
    """Return the files with blocks of exchanges; none where Spark deletes none.

    When blocks are lost, as in ``test_recomputation.py``, Spark removes their host from the list of
    those that store blocks. A local master does not get back on it.
    """
    if spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() == 0:
        return set()
    folder = Path(str(spark.sparkContext.getConf().get("spark.local.dir")))
    return {path.name for path in folder.rglob("shuffle_*")}


@pytest.mark.parametrize("strategy", STATIC)
def test_totals_of_slices(spark: SparkSession, scenario: Scenario, strategy: str) -> None:
    scenario.settings = {"engine.strategy": strategy}
    before = exchanged(spark)
    with pipeline_of(spark, scenario, scenario.config()) as pipeline:
        pipeline.log.append(scenario.requests(), tag="before")
        pipeline.run()
    check(scenario)
    # Blocks are deleted after each batch, without waiting for it.
    limit = time.monotonic() + 60
    while exchanged(spark) - before:
        assert time.monotonic() < limit, exchanged(spark) - before
        time.sleep(0.05)


@pytest.mark.parametrize("strategy", STATIC)
def test_totals_of_a_stream(spark: SparkSession, scenario: Scenario, strategy: str) -> None:
    scenario.settings = {"engine.strategy": strategy}
    folder = scenario.folder / "stream"
    folder.mkdir()
    for number in range(BATCHES):
        path = folder / f"{number}.parquet"
        pq.write_table(scenario.points.slice(number * ROWS, ROWS), path)
        os.utime(path, (1_000_000_000 + number,) * 2)  # Spark reads older files first
    schema = spark.read.parquet(str(folder)).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
    config = with_settings(scenario.config(), {"points.path": None})
    with pipeline_of(spark, scenario, config) as pipeline:
        pipeline.log.append(scenario.requests(), tag="before")
        pipeline.start(frame).awaitTermination()
    assert scenario.committed() == list(range(BATCHES))
    expected = scenario.expected_totals()
    assert scenario.stored_totals() == scenario.published_totals() == expected
    assert scenario.published_matches() == scenario.expected_matches()
    with closing(scenario.store()) as store:
        assert store.get(KeyTotals.table, "rows") == expected.total()
    assert any(name.startswith("job-") for name in scenario.totals.names)
