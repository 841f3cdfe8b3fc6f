"""Spark's own streaming queries return what dataflows do, so that both can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from roost.bench import growth, operators, recommend
from roost.bench.call_contest import (
    check_equal,
    compare,
    results,
    run_roost,
    run_spark,
)
from roost.bench.calls import CallCase, write_calls
from roost.bench.common import UnequalResults
from roost.engine.baselines import streaming

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SMALL = {
    "tumbling": CallCase("t", "k", "rate=50,districts=5", 4_000, 2_000, "district", 10, 10),
    "sliding": CallCase(
        "s", "k", "rate=1,callers=40", 5_000, 2_500, "src", 3600, 60, 0, operators.HEAVY_S // 3
    ),
    "disorder": CallCase(
        "d", "k", "rate=50,districts=5,disorder=20", 4_000, 2_000, "district", 60, 10, 20
    ),
    "join": CallCase("j", "k", "rate=20,callers=300", 4_000, 2_000),
}


@pytest.mark.parametrize("name", SMALL)
def test_roost_and_spark_return_the_same(name: str, spark: SparkSession, tmp_path: Path) -> None:
    case = SMALL[name]
    calls = write_calls(case, tmp_path)
    own = results(case, run_roost(spark, case, calls, tmp_path / "roost").out)
    store = list(streaming.STORES)[list(SMALL).index(name) % len(streaming.STORES)]
    theirs = results(case, run_spark(spark, case, calls, tmp_path / "spark", store).out)
    assert own.num_rows > 30
    check_equal(case, own, theirs, store)


@pytest.mark.parametrize(
    "name",
    [name if name == "tumbling" else pytest.param(name, marks=pytest.mark.full) for name in SMALL],
)
def test_both_systems_are_timed(name: str, spark: SparkSession, tmp_path: Path) -> None:
    row = compare(spark, SMALL[name], tmp_path / "case", 1)
    assert row["results"] > 30
    assert row["ratio"] > 0 and row["spark_rows_per_cpu_s"] > 0


def test_another_window_is_found_out(spark: SparkSession, tmp_path: Path) -> None:
    case = SMALL["tumbling"]
    calls = write_calls(case, tmp_path)
    right = run_roost(spark, case, calls, tmp_path / "right")
    wrong = run_roost(spark, replace(case, size_s=20), calls, tmp_path / "wrong")
    with pytest.raises(UnequalResults):
        check_equal(case, results(case, right.out), results(case, wrong.out), "the other")


def test_both_continue_when_the_cluster_has_grown(spark: SparkSession, tmp_path: Path) -> None:
    calls = "rate=100,callers=20,skew=zipf:1.5"
    case = growth.GrowthCase("g", "", calls, 6_000, 1_000, "src", 10, 10, settled=2)
    sizes: list[int] = []
    rows = growth.measure(spark, case, tmp_path, sizes.append)
    assert sizes == [growth.BEFORE, growth.AFTER]
    assert all(row["results"] > 30 for row in rows), "windows of both halves are closed"
    shares = {row["system"]: row["after"]["busiest_task_share"] for row in rows}
    assert shares["spark"] == 1.0, "its first batch fixed one partition"
    assert all(1 / 3 <= shares[name] < 1.0 for name in ("roost", "spark_foreseen"))
    for half in (row[when] for row in rows for when in ("before", "after")):
        assert half["rows_per_s"] > 0 and half["busiest_task_s"] > 0


def test_recommendations_equal_those_of_the_batch_job(spark: SparkSession, tmp_path: Path) -> None:
    size = recommend.RatingsSize(1_500, 400, 150, 40, 20, 1)
    row = recommend.compare(spark, size, 2, tmp_path)
    assert row["ratings"] == 3_000 and 30 < row["lists"] <= 40
    assert row["ratio"] == row["batch_s"] / row["incremental_s"] > 0.0
    assert row["ratings_per_s"] > 0.0
