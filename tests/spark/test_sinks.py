"""Sinks: each receives every match of a batch, with the number of the batch."""

from __future__ import annotations

import io
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import Case, check_figures, config_for, expected, outcome, random_case, read_folder
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

from roost import Pipeline, RunConfig
from roost.engine import pipeline as pipeline_module
from roost.engine.sinks import CONSOLE_ROWS, CallbackSink, ConsoleSink, ForeachBatchSink
from roost.model.settings import with_settings
from roost.runtime import records

pytestmark = pytest.mark.spark

Row = tuple[int, Any, Any]


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(31, 160, 40)


@pytest.fixture
def config(case: Case, tmp_path: Path) -> RunConfig:
    return config_for(case, tmp_path, **{"engine.batch_rows": 50})


def rows_of(table: pa.Table) -> list[Row]:
    return [(row["batch_id"], row["query_id"], row["point_id"]) for row in table.to_pylist()]


def published(config: RunConfig) -> Counter[Row]:
    rows = read_folder(config.out.dir / "matches")
    return Counter((row["batch_id"], row["query_id"], row["point_id"]) for row in rows)


class Received:
    """Matches that a sink received, by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[Row]]] = []

    def table(self, batch_id: int, table: pa.Table) -> None:
        self.calls.append((batch_id, rows_of(table)))

    def frame(self, frame: DataFrame, batch_id: int) -> None:
        rows = [(row["batch_id"], row["query_id"], row["point_id"]) for row in frame.collect()]
        self.calls.append((batch_id, rows))

    def rows(self) -> Counter[Row]:
        return Counter(row for _, rows in self.calls for row in rows)

    def of(self, batch_id: int) -> list[Counter[Row]]:
        return [Counter(rows) for number, rows in self.calls if number == batch_id]


def test_every_sink_receives_the_published_matches(
    spark: SparkSession, case: Case, config: RunConfig
) -> None:
    called, framed = Received(), Received()
    sinks = [CallbackSink(called.table, rows_max=7), ForeachBatchSink(spark, framed.frame)]
    with Pipeline(config, spark=spark, sinks=sinks) as pipeline:
        result = outcome(config.out.dir, pipeline.run())
    assert result.matches == expected(case)
    check_figures(result, len(case.points))
    assert called.rows() == framed.rows() == published(config)
    assert max(published(config).values()) == 1
    for received in (called, framed):
        assert all(row[0] == batch_id for batch_id, rows in received.calls for row in rows)
    assert max(len(rows) for _, rows in called.calls) == 7
    assert [batch_id for batch_id, _ in framed.calls] == [0, 1, 2, 3]


def test_a_foreach_batch_function_can_write_with_spark(
    spark: SparkSession, config: RunConfig, tmp_path: Path
) -> None:
    def write(matches: DataFrame, batch_id: int) -> None:
        matches.coalesce(1).write.mode("overwrite").parquet(str(tmp_path / f"copy/{batch_id}"))

    with Pipeline(config, spark=spark, sinks=[ForeachBatchSink(spark, write)]) as pipeline:
        pipeline.run()
    copied = spark.read.parquet(*(str(path) for path in (tmp_path / "copy").iterdir())).collect()
    rows = Counter((row["batch_id"], row["query_id"], row["point_id"]) for row in copied)
    assert rows == published(config)


def test_count_writes_no_matches_and_counts_them_all(
    spark: SparkSession, case: Case, config: RunConfig
) -> None:
    with Pipeline(with_settings(config, {"out.sink": "count"}), spark=spark) as pipeline:
        report = pipeline.run()
    assert report["matches"] == len(expected(case))
    assert published(config) == Counter()
    assert list((config.out.dir / "matches" / "_staging").iterdir()) == []


def test_count_delivers_to_other_sinks(spark: SparkSession, case: Case, config: RunConfig) -> None:
    received = Received()
    counted = with_settings(config, {"out.sink": "count"})
    with Pipeline(counted, spark=spark, sinks=[CallbackSink(received.table)]) as pipeline:
        pipeline.run()
    assert sorted(row[1:] for row in received.rows().elements()) == [m[:2] for m in expected(case)]
    assert published(config) == Counter()


def test_console_prints_the_first_matches(
    spark: SparkSession, case: Case, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    monkeypatch.setattr(pipeline_module, "ConsoleSink", partial(ConsoleSink, console))
    with Pipeline(with_settings(config, {"out.sink": "console"}), spark=spark) as pipeline:
        report = pipeline.run()
    lines = text.getvalue().splitlines()
    heads = [line for line in lines if line.startswith("batch ")]
    counts = [batch["matches"] for batch in report["per_batch"]]
    assert min(counts) < CONSOLE_ROWS < max(counts)
    assert heads == [f"batch {k}: {count} matches" for k, count in enumerate(counts)]
    assert len(lines) - len(heads) == sum(min(count, CONSOLE_ROWS) for count in counts)
    known = {(f"{query}", f"{point}") for query, point, _ in expected(case)}
    for line in lines:
        if not line.startswith("batch "):
            _, query, _, point, *_ = line.split()
            assert (query, point) in known
    assert published(config) == Counter()


def test_console_prints_the_rows_of_a_dataflow(tmp_path: Path) -> None:
    text = io.StringIO()
    rows = [{"batch_id": 3, "k": k, "name": "{[bold]}"} for k in range(CONSOLE_ROWS + 1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    ConsoleSink(Console(file=text, width=200), "sums").deliver(3, [str(tmp_path / "rows.parquet")])
    head, *printed = text.getvalue().splitlines()
    assert head == f"batch 3: {CONSOLE_ROWS + 1} rows of sums"
    assert printed == [f"  k {k}, name {{[bold]}}" for k in range(CONSOLE_ROWS)]


class Crash(BaseException):
    """Simulates a crash of the driver."""


@pytest.mark.parametrize("step", ["commit", "publish"])
def test_a_repeated_delivery_is_the_same(
    spark: SparkSession, case: Case, config: RunConfig, step: str
) -> None:
    """After a crash behind the delivery, the batch repeats with its number and matches."""
    called, framed = Received(), Received()
    sinks = [CallbackSink(called.table, rows_max=1 << 20), ForeachBatchSink(spark, framed.frame)]

    def crash(name: str, batch_id: int) -> None:
        if (name, batch_id) == (step, 1):
            raise Crash

    with (
        Pipeline(config, spark=spark, sinks=sinks, on_step=crash) as pipeline,
        pytest.raises(Crash),
    ):
        pipeline.run()
    with Pipeline(config, spark=spark, sinks=sinks) as pipeline:
        result = outcome(config.out.dir, pipeline.run())
    assert result.matches == expected(case)
    by_batch: dict[int, Counter[Row]] = {}
    for row in published(config):
        by_batch.setdefault(row[0], Counter())[row] += 1
    times = 2 if step == "commit" else 1
    for batch_id, rows in by_batch.items():
        again = times if batch_id == 1 else 1
        assert framed.of(batch_id) == [rows] * again
        assert sum(called.of(batch_id), Counter()) == Counter({row: again for row in rows})


def test_a_sink_that_fails_stops_the_run_and_loses_nothing(
    spark: SparkSession, case: Case, config: RunConfig
) -> None:
    received = Received()
    broken = [True]

    def take(batch_id: int, table: pa.Table) -> None:
        if broken[0] and batch_id == 2:
            raise OSError("the other side is gone")
        received.table(batch_id, table)

    with Pipeline(config, spark=spark, sinks=[CallbackSink(take)]) as pipeline:
        with pytest.raises(OSError, match="the other side is gone"):
            pipeline.run()
        assert len(records.commits(pipeline.store)) == 2
    broken[0] = False
    with Pipeline(config, spark=spark, sinks=[CallbackSink(take)]) as pipeline:
        pipeline.run()
    assert received.rows() == published(config)
    assert sorted(row[1:] for row in published(config).elements()) == [
        match[:2] for match in expected(case)
    ]
