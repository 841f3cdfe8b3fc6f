"""Streaming DataFrames with configured column names: the matches of brute force, each once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import (
    Case,
    Outcome,
    as_time,
    check_figures,
    config_for,
    expected,
    outcome,
    point_table,
    random_case,
    settle,
)
from pyspark.sql import DataFrame, SparkSession

from roost import Box, Pipeline, Query, RunConfig
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.runtime.records import Commit

pytestmark = pytest.mark.spark

FILES = 3
# Column names of a user, set in the configuration.
NAMES = {"x": "east", "y": "north", "event_time": "seen", "id": "key"}
NAMES |= {"lon": NAMES["x"], "lat": NAMES["y"]}
STATIC = [Strategy.REPLICATED, Strategy.UNIFORM]


def write_files(case: Case, folder: Path, first: int = 0, files: int = FILES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    share = -(-len(case.points) // files)
    for number in range(files):
        table = point_table(case, case.points[number * share : (number + 1) * share])
        table = table.rename_columns([NAMES.get(name, name) for name in table.column_names])
        path = folder / f"{first + number}.parquet"
        pq.write_table(table, path)
        # Spark reads older files first.
        os.utime(path, (1_000_000_000 + first + number,) * 2)


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    schema = spark.read.parquet(str(folder)).schema
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder))


def settings(case: Case, folder: Path, **more: Any) -> RunConfig:
    named = {
        "points.path": None,
        "points.x": "east",
        "points.y": "north",
        "points.time": "seen",
        "points.id": "key",
    }
    return config_for(case, folder, **named, **more)


def run(spark: SparkSession, config: RunConfig, frame: DataFrame, **hooks: Any) -> Outcome:
    with Pipeline(config, spark=spark, **hooks) as pipeline:
        pipeline.start(frame).awaitTermination()
        return outcome(config.out.dir, pipeline.report())


def check(case: Case, result: Outcome) -> None:
    assert result.matches == expected(case)
    assert result.refused("request") == settle(case.requests)[1]
    check_figures(result, len(case.points))


KINDS = {
    "plane": {},
    "city, texts": {"lonlat": True, "text_ids": True},
    "integer times": {"timestamps": False},
}


@pytest.mark.parametrize("strategy", STATIC)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_equals_brute_force(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, kind: str
) -> None:
    case = random_case(51, 200, 40, **KINDS[kind])
    write_files(case, tmp_path / "points")
    config = settings(case, tmp_path, **{"engine.strategy": strategy, "engine.machines": 3})
    result = run(spark, config, stream(spark, tmp_path / "points"))
    check(case, result)
    assert result.report["batches"] == FILES


@pytest.mark.parametrize("strategy", STATIC)
def test_a_restart_adds_nothing_and_new_files_add_their_matches(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    case = random_case(52, 160, 30)
    half = Case(case.points[:80], case.requests)
    rest = Case(case.points[80:], case.requests)
    write_files(half, tmp_path / "points", files=2)
    config = settings(case, tmp_path, **{"engine.strategy": strategy, "engine.machines": 2})
    first = run(spark, config, stream(spark, tmp_path / "points"))
    check(half, first)
    again = run(spark, config, stream(spark, tmp_path / "points"))
    assert (again.matches, again.dead) == (first.matches, first.dead)
    assert again.report == first.report
    write_files(rest, tmp_path / "points", first=2, files=2)
    check(case, run(spark, config, stream(spark, tmp_path / "points")))


def test_invalid_rows_of_a_stream_are_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    case = random_case(53, 120, 20, lonlat=True)
    faults: dict[int, tuple[dict[str, Any], str]] = {
        5: ({"x": float("nan")}, "not_finite"),
        40: ({"y": -91.0}, "latitude_out_of_range"),
        80: ({"time": None}, "null_time"),
        110: ({}, "null_id"),
    }
    for row, (fields, reason) in faults.items():
        case.points[row].update(**fields, expect=reason)
    write_files(case, tmp_path / "points")
    for strategy in STATIC:
        config = settings(
            case, tmp_path / strategy, **{"engine.strategy": strategy, "engine.machines": 3}
        )
        result = run(spark, config, stream(spark, tmp_path / "points"))
        check(case, result)
        dead = [d["reason"] for d in result.dead if d["origin"] == "point"]
        assert sorted(dead) == sorted(reason for _, reason in faults.values())


def test_requests_between_batches_of_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    case = Case(random_case(54, 90, 1).points, [])
    write_files(case, tmp_path / "points")
    everywhere = Box(-2e9, -2e9, 2e9, 2e9)

    def after(commit: Commit) -> None:
        pipeline.request(Query(f"q{commit.batch_id}", everywhere))

    config = settings(case, tmp_path, **{"queries.path": None, "engine.machines": 2})
    with Pipeline(config, spark=spark, on_batch=after) as pipeline:
        pipeline.start(stream(spark, tmp_path / "points")).awaitTermination()
        result = outcome(config.out.dir, pipeline.report())
    found: dict[str, list[int]] = {}
    for query, point, _ in result.matches:
        found.setdefault(query, []).append(point)
    assert found == {"q0": [*range(30, 90)], "q1": [*range(60, 90)]}
    check_figures(result, 90)


def test_streams_end_with_their_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    case = random_case(55, 90, 10)
    write_files(case, tmp_path / "points")
    config = settings(case, tmp_path, **{"engine.available_now": False, "engine.machines": 2})
    columns = ("'terminate' op", "'none' query_id", "'ann' user_id")
    requests = spark.readStream.format("rate").load().selectExpr(*columns)
    done = threading.Event()

    def after(commit: Commit) -> None:
        if commit.batch_id + 1 == FILES:
            done.set()

    with Pipeline(config, spark=spark, on_batch=after) as pipeline:
        queries = [pipeline.start(stream(spark, tmp_path / "points"))]
        queries.append(pipeline.take_requests(requests))
        assert done.wait(60)
    assert [query.isActive for query in queries] == [False, False]
    assert outcome(config.out.dir, {}).matches == expected(case)


def test_a_stream_of_columns_that_spark_computes(spark: SparkSession, tmp_path: Path) -> None:
    """Columns of other types, which Spark parses from text."""
    folder = tmp_path / "points"
    folder.mkdir()
    day = "2014-04-01 00:00:"
    text = f"a;1.5;2;{day}00\nb;9;9;{day}01\nc;3;3;{day}02"
    (folder / "points.txt").write_text(text, encoding="utf-8")
    frame = spark.readStream.text(str(folder)).selectExpr(
        "split(value, ';')[0] AS id",
        "CAST(split(value, ';')[1] AS DECIMAL(8, 3)) AS x",
        "CAST(split(value, ';')[2] AS INT) AS y",
        "CAST(split(value, ';')[3] AS TIMESTAMP) AS event_time",
    )
    case = Case([], [])
    config = config_for(
        case, tmp_path, **{"points.path": None, "queries.path": None, "engine.machines": 2}
    )
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.request(Query("q", Box(1.5, 2, 3, 3)))
        pipeline.start(frame).awaitTermination()
        result = outcome(config.out.dir, pipeline.report())
    assert [(q, p) for q, p, _ in result.matches] == [("q", "a"), ("q", "c")]
    times = [time for _, _, time in result.matches]
    assert times[1] - times[0] == 2_000_000
    [path, *_] = (config.out.dir / "matches").glob("*.parquet")
    stored = pq.ParquetFile(path).read()
    assert stored.schema.field("event_time").type == pa.timestamp("us", "UTC")
    assert as_time(stored["event_time"][0].as_py()) in times


def test_a_stream_without_identifiers_is_rejected(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.readStream.format("rate").load()
    frame = frame.selectExpr("timestamp AS event_time", "1D AS x", "2D AS y")
    config = config_for(Case([], []), tmp_path, **{"points.path": None, "queries.path": None})
    with (
        Pipeline(config, spark=spark) as pipeline,
        pytest.raises(ConfigError, match=r"points\.id"),
    ):
        pipeline.start(frame)


@pytest.mark.parametrize("strategy", STATIC)
def test_batches_of_a_stream_report_the_time_of_reading_and_routing(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    case = random_case(55, 300, 20)
    write_files(case, tmp_path / "points")
    config = settings(case, tmp_path, **{"engine.strategy": strategy, "engine.machines": 3})
    commits: list[Commit] = []
    check(case, run(spark, config, stream(spark, tmp_path / "points"), on_batch=commits.append))
    assert len(commits) == FILES
    for commit in commits:
        figures, stages = commit.figures, commit.figures["stages"]
        assert stages["reading"]["seconds"] > 0 and stages["matching"]["seconds"] > 0
        assert stages["reading"]["rows_out"] == stages["matching"]["rows_in"] == figures["points"]
        if strategy is Strategy.UNIFORM:
            assert stages["reading"]["bytes_out"] > 0
            assert 0 < figures["route_s"] <= stages["reading"]["seconds"]
        else:  # any machine may match any point: no exchange
            assert (stages["reading"]["bytes_out"], figures["route_s"]) == (0, 0)
