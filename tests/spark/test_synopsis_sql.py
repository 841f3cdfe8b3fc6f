"""Spark SQL over a synopsis returns what DuckDB and brute force return over records and rows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from roost import Box, RunConfig
from roost.engine.synopsis import FORMAT, register_synopsis
from roost.errors import ConfigError
from roost.synopsis import Scope
from roost.synopsis.tables import TableQuery
from roost.testing import InProcessPipeline
from synopsis_tables import FEATURES, Rows, make_table

pytestmark = pytest.mark.spark

TABLE = make_table(6, 3_000)
PLACES = pa.table({"name": ["west", "east"], "lon": [10.0, 11.0], "lat": [50.0, 49.0]})
QUERIES = {
    "sort": "select * from synopsis order by time_from, x0, y0, rows, temp_low, wind_mean, rain_low"
    ", level_low, kind, wet limit 500",
    "group": "select kind, date_trunc('day', time_from) as day, sum(rows) as n, count(*) as leaves,"
    " sum(rows * wind_mean) / sum(rows) as wind from synopsis group by 1, 2 order by n desc, 1, 2",
    "join": "select p.name, sum(s.rows) as n, min(s.temp_low) as low, max(s.temp_high) as high"
    " from synopsis s join places p on s.x0 <= p.lon and p.lon <= s.x1 and s.y0 <= p.lat"
    " and p.lat <= s.y1 group by p.name having sum(s.rows) > 1 order by p.name",
    "self": "select a.time_from, sum(a.rows * b.rows) as pairs from synopsis a join synopsis b"
    " on a.time_from = b.time_from and a.x0 = b.x0 and a.y0 = b.y0 group by 1 order by 2 desc, 1"
    " limit 100",
}

SYNTHETIC = {
    "sort": "select * from drawn order by event_time, lon, lat, temp, wind limit 300",
    "group": "select kind, count(*) as n, avg(temp) as t, stddev(wind) as w, sum(level) as s"
    " from drawn group by kind having count(*) > 2 order by n desc, kind",
    "join": "select d.kind, count(*) as n, avg(d.temp - s.temp_mean) as warmer from drawn d"
    " join synopsis s on d.event_time >= s.time_from and d.event_time < s.time_until"
    " and d.lon between s.x0 and s.x1 and d.lat between s.y0 and s.y1"
    " group by d.kind order by n desc, d.kind",
}


def config_of(folder: Path) -> RunConfig:
    return RunConfig(
        points={"path": str(folder / "points")},
        engine={"available_now": True, "batch_rows": 400, "machines": 2},
        synopsis={"features": FEATURES, "learn_rows": 600, "fold_files": 4},
        out={"dir": folder / "out", "sink": "count"},
    )


def run(folder: Path, number: int, rows: pa.Table) -> Path:
    """Add a file of points and read it; returns the state directory."""
    (folder / "points").mkdir(exist_ok=True)
    pq.write_table(rows, folder / "points" / f"{number}.parquet")
    config = config_of(folder)
    with InProcessPipeline(config) as pipeline:
        pipeline.run()
    return config.out.state_dir


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("run"), 0, TABLE)


def records_of(state: Path, **options: str) -> pa.Table:
    """Read the records of all tasks in this process."""
    query = TableQuery.from_options({"path": str(state), **options})
    batches = [batch for task in query.plan() for batch in task.read()]
    return pa.Table.from_batches(batches, query.schema())


def same(found: pa.Table, expected: pa.Table) -> None:
    assert found.column_names == expected.column_names
    assert 0 < found.num_rows == expected.num_rows
    for name in found.column_names:
        ours, theirs = found[name], expected[name].cast(found[name].type)
        if pa.types.is_floating(ours.type):
            for a, b in zip(ours.to_pylist(), theirs.to_pylist(), strict=True):
                assert a == b or a == pytest.approx(b, rel=1e-9), name
        else:
            assert ours.to_pylist() == theirs.to_pylist(), name


@pytest.mark.parametrize("query", QUERIES)
def test_sql_over_the_records_equals_duckdb(query: str, state: Path, spark: SparkSession) -> None:
    register_synopsis(spark, state)
    spark.createDataFrame(PLACES).createOrReplaceTempView("places")
    with closing(duckdb.connect()) as other:
        other.execute("set timezone = 'UTC'; set default_null_order = 'nulls_first'")  # as Spark
        other.register("synopsis", records_of(state))
        other.register("places", PLACES)
        expected = other.sql(QUERIES[query]).to_arrow_table()
    same(spark.sql(QUERIES[query]).toArrow(), expected)


@pytest.mark.parametrize("query", SYNTHETIC)
def test_sql_over_synthetic_rows_equals_duckdb(
    query: str, state: Path, spark: SparkSession
) -> None:
    register_synopsis(spark, state)
    options = {"table": "synthetic", "share": "0.7", "seed": "3"}
    register_synopsis(spark, state, "drawn", **options)
    with closing(duckdb.connect()) as other:
        other.execute("set timezone = 'UTC'; set default_null_order = 'nulls_first'")
        other.register("drawn", records_of(state, **options))
        other.register("synopsis", records_of(state))
        expected = other.sql(SYNTHETIC[query]).to_arrow_table()
    same(spark.sql(SYNTHETIC[query]).toArrow(), expected)


def test_groups_equal_brute_force_over_the_rows(state: Path, spark: SparkSession) -> None:
    """Steps are hours, so the rows of an hour are those of its records."""
    register_synopsis(spark, state)
    text = "select hour(time_from) as h, sum(rows), sum(rows_sure) from synopsis group by 1"
    found = {row[0]: (row[1], row[2]) for row in spark.sql(text).collect()}
    hours = Rows(TABLE).column("event_time") // 3_600_000_000 % 24
    counted = np.bincount(hours, minlength=24).tolist()
    assert found == {h: (n, n) for h, n in enumerate(counted) if n}


def test_options_restrict_the_records(state: Path, spark: SparkSession) -> None:
    register_synopsis(spark)
    given = {"box": "9,48,10.5,51", "hours": "6,18", "since": "2024-01-05", "predicate": "wind > 2"}
    frame = spark.read.format(FORMAT).options(**given).load(str(state))
    sure, most = frame.selectExpr("sum(rows_sure)", "sum(rows)").first()
    rows = Rows(TABLE)
    since = 1_704_412_800_000_000
    inside = rows.inside(Scope(Box(9.0, 48.0, 10.5, 51.0), since=since, hours=(6, 18)))
    true = int((inside & (rows.column("wind") > 2.0)).sum())
    assert 0 < sure <= true <= most < TABLE.num_rows


def test_registered_views_read_the_newest_batch(tmp_path: Path, spark: SparkSession) -> None:
    state = run(tmp_path, 0, TABLE.slice(0, 1_000))
    register_synopsis(spark, state, "moving")
    counted = "select sum(rows) from moving"
    assert spark.sql(counted).first()[0] == 1_000
    assert spark.sql("select sum(rows) from moving_files").first()[0] == 1_000
    run(tmp_path, 1, TABLE.slice(1_000, 500))
    register_synopsis(spark, state, "moving")
    assert spark.sql(counted).first()[0] == 1_500
    assert spark.sql("select sum(rows) from moving_files").first()[0] == 1_500
    register_synopsis(spark, state, "added", since_batch=2)
    text = "select file, sum(rows) as n from added group by file order by file"
    listed = "select file, sum(rows) as n from added_files group by file order by file"
    same(spark.sql(text).toArrow(), spark.sql(listed).toArrow())


def test_wrong_options_name_what_is_wrong(state: Path, spark: SparkSession) -> None:
    register_synopsis(spark)
    with pytest.raises(PySparkException, match=r"option.circle: got .*expected 3 numbers"):
        spark.read.format(FORMAT).option("circle", "1,2").load(str(state))
    with pytest.raises(ConfigError, match="table: got 'leaves', expected one of records, "):
        register_synopsis(spark, state, table="leaves")
