"""Streaming DataFrames beside other sources of a dataflow: the rows of the interpreter, once."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from test_flow import counted, results

from roost import Box, Dataflow, Pipeline, Query, RunConfig
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.schema import resolve
from roost.errors import DataflowError, SourceError
from roost.runtime.records import Commit
from roost.testing import InProcessPipeline, check_states

pytestmark = pytest.mark.spark

SCHEMA = {"k": "int64", "v": "int64", "t": "int64"}
ROWS, FILES = 60, 3
DEADLINE_S = 60.0


def rows_of(seed: int, rows: int = ROWS) -> list[dict[str, int]]:
    return [{"k": n * seed % 4, "v": n + seed, "t": n} for n in range(rows)]


def write(folder: Path, rows: list[dict[str, int]]) -> Path:
    """Write rows as files, one for each micro-batch."""
    folder.mkdir()
    share = -(-len(rows) // FILES)
    for number in range(FILES):
        path = folder / f"{number}.parquet"
        mine = rows[number * share : (number + 1) * share]
        pq.write_table(pa.Table.from_pylist(mine), path)
        os.utime(path, (1_000_000_000 + number,) * 2)  # Spark reads older files first
    return folder


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    reader = spark.readStream.schema("k long, v long, t long").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder))


def three_inputs(path: Path | None) -> Dataflow:
    flow = Dataflow("three inputs")
    a, b = (flow.source(name, SCHEMA, time="t") for name in "ab")
    file = flow.source("file", SCHEMA, time="t", path=None if path is None else str(path))
    merged = flow.union(a, b, file)
    merged.aggregate({"n": "count", "v": "sum(v)"}, by="k", size=8, advance=4).sink("sums")
    a.join(b, "left.k = right.k", size=2).sink("joined")
    b.join(file, "left.k = right.k and left.v < right.v", size=3).sink("beside")
    return flow


class Failure(Exception):
    """Ends a driver."""


def test_two_streams_and_a_file_with_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    rows = {"a": rows_of(3), "b": rows_of(5), "file": rows_of(7)}
    folders = {name: write(tmp_path / name, mine) for name, mine in rows.items()}
    flow = three_inputs(folders["file"])
    config = RunConfig(
        out={"dir": tmp_path / "out"},
        engine={"available_now": True, "batch_rows": 25},
        dataflow={"machines": 2},
    )
    failures = []

    def fail(step: str, number: int) -> None:
        if (step, number) == ("commit", 2) and not failures:
            failures.append(number)
            raise Failure

    def run() -> None:
        with Pipeline(config, spark=spark, flow=flow, on_step=fail) as pipeline:
            for name in "ab":
                pipeline.start(stream(spark, folders[name]), source=name)
            pipeline.wait()
            check_states(pipeline)
            report.update(pipeline.report())

    report: dict[str, Any] = {}
    with pytest.raises(Failure):
        run()
    run()
    assert failures == [2]
    oracle = Interpreter(resolve(flow.name, flow.operators))
    oracle.batch(rows, 0.0)
    expected = {sink: counted(mine) for sink, mine in oracle.results.items()}
    assert all(expected.values())
    assert results(tmp_path / "out", flow) == expected
    assert report["dataflow"]["sources"] == dict.fromkeys(rows, ROWS)
    assert report["batches"] >= 2 * FILES, "a micro-batch is a batch"
    first = report["batches"]
    run()
    assert report["batches"] == first, "nothing is read again"


@pytest.mark.parametrize("strategy", ["replicated", "uniform"])
def test_a_stream_beside_matching(spark: SparkSession, tmp_path: Path, strategy: str) -> None:
    folder = write(tmp_path / "calls", rows_of(3))
    found = {}
    for kind in ("spark", "process"):
        flow = Dataflow("both")
        path = str(folder) if kind == "process" else None
        calls = flow.source("calls", SCHEMA, time="t", path=path)
        calls.aggregate({"v": "sum(v)"}, by="k", size=10).sink("sums")
        matches = flow.matches().aggregate({"n": "count"}, by="query_id", size=0.05)
        matches.sink("by_query")
        config = RunConfig(
            points={"path": "generate:rows=2000,rate=10000,seed=3"},
            engine={
                "batch_rows": 700, "strategy": strategy, "machines": 2, "available_now": True,
            },
            out={"dir": tmp_path / kind},
        )  # fmt: skip
        made = Pipeline(config, spark=spark, flow=flow) if kind == "spark" else None
        with made or InProcessPipeline(config, flow=flow) as pipeline:
            pipeline.request(Query("north", Box(-180, 0, 180, 90)))
            if isinstance(pipeline, Pipeline):
                pipeline.start(stream(spark, folder), source="calls")
                pipeline.wait()
            else:
                pipeline.run()
            report = pipeline.report()
        assert report["points"] == 2000 and report["matches"] > 0
        assert report["dataflow"]["sources"]["calls"] == ROWS
        found[kind] = (results(tmp_path / kind, flow), report["matches"])
    assert found["spark"] == found["process"]
    assert all(found["spark"][0].values())


def test_an_idle_stream_closes_windows_without_a_micro_batch(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = {"a": rows_of(3), "b": rows_of(5, 1), "file": rows_of(7, 1)}
    folders = {name: write(tmp_path / name, mine) for name, mine in rows.items()}
    flow = three_inputs(None)
    config = RunConfig(out={"dir": tmp_path / "out"}, dataflow={"machines": 2, "idle": 5.0})
    clock = [0.0]
    commits: list[Commit] = []

    def tick(commit: Commit) -> None:
        commits.append(commit)
        clock[0] = {1: 1.0, FILES: 5.0}.get(len(commits), clock[0])

    hooks: dict[str, Any] = {"on_batch": tick, "wall_clock": lambda: clock[0]}
    with Pipeline(config, spark=spark, flow=flow, **hooks) as pipeline:
        pipeline.start(stream(spark, folders["a"]), source="a")  # the others stay silent
        deadline = time.monotonic() + DEADLINE_S
        while len(commits) <= FILES and time.monotonic() < deadline:
            time.sleep(0.05)
        pipeline.stop()
        pipeline.wait()
    oracle = Interpreter(resolve(flow.name, flow.operators), idle=5.0)
    share = ROWS // FILES
    for number, at in enumerate([0.0, 1.0, 1.0]):
        oracle.batch({"a": rows["a"][number * share : (number + 1) * share]}, at)
    assert not oracle.results["sums"]
    oracle.batch({}, 5.0)
    assert oracle.results["sums"]
    assert len(commits) == FILES + 1
    expected = {sink: counted(mine) for sink, mine in oracle.results.items()}
    assert results(tmp_path / "out", flow) == expected


def test_a_batch_that_was_begun_needs_its_stream(spark: SparkSession, tmp_path: Path) -> None:
    """Else batches of the other streams would wait for it without a message."""
    folders = {name: write(tmp_path / name, rows_of(3)) for name in "ab"}
    flow = three_inputs(None)
    config = RunConfig(
        out={"dir": tmp_path / "out"}, engine={"available_now": True}, dataflow={"machines": 2}
    )

    def fail(step: str, number: int) -> None:
        if step == "commit":
            raise Failure

    def run(name: str, on_step: Any) -> None:
        with Pipeline(config, spark=spark, flow=flow, on_step=on_step) as pipeline:
            pipeline.start(stream(spark, folders[name]), source=name)
            timer = threading.Timer(DEADLINE_S, pipeline.stop)
            timer.start()
            try:
                pipeline.wait()
            finally:
                timer.cancel()

    with pytest.raises(Failure):
        run("b", fail)
    message = "batch 0 was begun with a micro-batch of b, whose stream was not started"
    with pytest.raises(SourceError, match=message):
        run("a", lambda step, number: None)


def test_a_run_of_topics_needs_a_path_for_each_source(spark: SparkSession, tmp_path: Path) -> None:
    """It starts the streams itself: nothing else could start one for this source."""
    topics = {"a": "kafka://127.0.0.1:9/a"}
    config = RunConfig(out={"dir": tmp_path / "out"}, dataflow={"sources": topics})
    with (
        Pipeline(config, spark=spark, flow=three_inputs(None)) as pipeline,
        pytest.raises(DataflowError, match="'b': no path; expected a file, a folder, generate:"),
    ):
        pipeline.run()
    assert not (tmp_path / "out").exists()


def test_streams_that_cannot_run_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    frame = stream(spark, write(tmp_path / "rows", rows_of(3)))
    other = spark.readStream.format("rate").load()
    config = RunConfig(out={"dir": tmp_path / "out"}, engine={"available_now": True})
    matching = three_inputs(None)
    matching.points().sink("points")
    cases: list[tuple[Dataflow, DataFrame, str, str]] = [
        (three_inputs(None), frame, "c", "no such source of records in the dataflow .known: a, b"),
        (three_inputs(None), other, "a", "'a', column 'k': the DataFrame has no such column"),
        (matching, frame, "a", "reads points: set points.path, or start their stream first"),
    ]
    for flow, given, name, message in cases:
        with (
            Pipeline(config, spark=spark, flow=flow) as pipeline,
            pytest.raises(DataflowError, match=message),
        ):
            pipeline.start(given, source=name)
    assert not (tmp_path / "out").exists()
    later: list[tuple[str | None, str]] = [
        ("a", "'a': has a stream already"),
        ("file", "'file': is read from its path"),
        (None, "'points': must be the first stream of its run"),
    ]
    with Pipeline(config, spark=spark, flow=three_inputs(tmp_path / "rows")) as pipeline:
        pipeline.start(frame, source="a")
        for source, message in later:
            with pytest.raises(DataflowError, match=message):
                pipeline.start(frame, source=source)
        pipeline.wait()
        assert Counter(pipeline.report()["dataflow"]["sources"])["file"] == ROWS
