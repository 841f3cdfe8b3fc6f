"""Dataflows on Spark: the rows of the interpreter, over files and a stream, and with matching."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from flow_graphs import make_case
from flow_runs import FlowRun, RandomMoves, key_of, plain, rows_of, run_case, units
from roost import Box, Dataflow, Pipeline, Query, RunConfig
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.loading import load_flow
from roost.dataflow.operators import Sink
from roost.dataflow.schema import resolve
from roost.testing import InProcessPipeline, check_states

pytestmark = pytest.mark.spark

FLOW = """
import pyarrow as pa

from roost import Dataflow

SCHEMA = {"k": "int64", "s": "string", "v": "int64", "t": "int64"}
MADE = pa.schema([("k", pa.int64()), ("s", pa.string()), ("v", pa.int64())])


def shifted(rows):  # workers cannot import this file
    if 13 in rows.column("v").to_pylist():
        raise ValueError("13")
    values = [value + len(MADE) for value in rows.column("v").to_pylist()]
    return pa.RecordBatch.from_arrays([rows.column("k"), rows.column("s"), values], schema=MADE)


flow = Dataflow("all operators")
a = flow.source("a", SCHEMA, time="t").map(shifted, schema=MADE, name="shifted")
b = flow.source("b", SCHEMA, time="t")
sums = a.aggregate({"n": "count", "v": "sum(v)", "top": "max(v)"}, by="k", size=20, advance=5)
sums.sink("sliding")
sums.filter("n > 3").aggregate({"windows": "count"}, by="n", size=40).sink("nested")
rows = a.aggregate({"v": "sum(v)", "end": "last(v)"}, by="s", window="tuples", size=4, advance=2)
rows.sink("rows")
a.join(b, "left.k = right.k and left.v < right.v", size=3).sink("joined")
a.product(b, "(left.v + right.v) mod 7 = 0", size=2).sink("product")
"""


def counted(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(key_of(plain(row)) for row in rows)


def results(out: Path, flow: Dataflow) -> dict[str, Counter[str]]:
    found = {}
    for sink in (o.name for o in flow.operators if isinstance(o, Sink)):
        files = sorted((out / sink).glob("*.parquet"))
        found[sink] = counted([row for file in files for row in rows_of(pq.read_table(file))])
    return found


def records(seed: int, rows: int = 120) -> list[dict[str, Any]]:
    """Return rows in the order of event time."""
    return [
        {"k": (n * seed) % 5, "s": "xyz"[n % 3], "v": (n * 7 + seed) % 23, "t": n // 2}
        for n in range(rows)
    ]


@pytest.mark.parametrize(
    "layout",
    [
        "auto",
        "operator_cloud",
        pytest.param("operator_set", marks=pytest.mark.full),
        pytest.param("query_cloud", marks=pytest.mark.full),
    ],
)
def test_all_operators_over_files(layout: str, spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "operators_on_spark.py"
    path.write_text(FLOW)
    flow = load_flow(f"{path}:flow")
    graph = resolve(flow.name, flow.operators)
    rows = {"a": records(3), "b": records(11)}
    paths = {}
    for name, mine in rows.items():
        paths[name] = str(tmp_path / f"{name}.parquet")
        pq.write_table(pa.Table.from_pylist(mine), paths[name])
    config = RunConfig(
        out={"dir": tmp_path / "out"},
        engine={"batch_rows": 50},
        dataflow={"machines": 3, "sources": paths, "layout": layout},
    )
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        report = pipeline.run()
        check_states(pipeline)
    oracle = Interpreter(graph)
    oracle.batch(rows, 0.0, list(rows))
    expected = {sink: counted(mine) for sink, mine in oracle.results.items()}
    assert all(expected.values())
    assert results(tmp_path / "out", flow) == expected
    assert report["batches"] == 3
    totals = report["dataflow"]
    assert totals["sources"] == {"a": 120, "b": 120}
    assert totals["sinks"] == {sink: mine.total() for sink, mine in expected.items()}
    failed = Counter((dead.operator, dead.reason) for dead in oracle.dead)
    assert failed[("shifted", "function_failed")] > 0
    found = {(o, r): n for o, reasons in totals["dead"].items() for r, n in reasons.items()}
    assert found == failed


def streamed() -> Dataflow:
    flow = Dataflow("stream")
    schema = {"k": "int64", "v": "double", "at": "timestamp[us, tz=UTC]"}
    calls = flow.source("calls", schema, time="at")
    calls.aggregate({"n": "count", "v": "sum(v)"}, by="k", size=4, advance=2).sink("sums")
    calls.join(calls, "left.k = right.k and left.v < right.v", size=2).sink("joined")
    return flow


@pytest.mark.parametrize("as_json", [False, True], ids=["columns", "JSON"])
def test_a_streaming_source(spark: SparkSession, tmp_path: Path, as_json: bool) -> None:
    flow = streamed()
    oracle = Interpreter(resolve(flow.name, flow.operators))
    folder = tmp_path / "calls"
    folder.mkdir()
    for batch in range(3):
        rows = [
            {"k": n % 3, "v": n % 7 / 4, "at": (batch * 20 + n) * 250_000, "more": n}
            for n in range(20)
        ]
        oracle.batch({"calls": rows}, float(batch))
        table = pa.Table.from_pylist(rows)
        times = table["at"].cast(pa.timestamp("us", "UTC"))
        file = folder / f"{batch}.parquet"
        pq.write_table(table.set_column(2, "at", times), file)
        os.utime(file, (1_000_000_000 + batch,) * 2)  # Spark reads older files first
    frame = spark.readStream.schema(spark.read.parquet(str(folder)).schema)
    frame = frame.option("maxFilesPerTrigger", 1).parquet(str(folder))
    if as_json:
        frame = frame.selectExpr("to_json(struct(*)) as value")
    config = RunConfig(
        out={"dir": tmp_path / "out"}, engine={"available_now": True}, dataflow={"machines": 2}
    )
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        column = "value" if as_json else None
        pipeline.start(frame, source="calls", json_column=column).awaitTermination()
        report = pipeline.report()
        check_states(pipeline)
    assert report["batches"] == 3
    assert report["dataflow"]["sources"] == {"calls": 60}
    expected = {sink: counted(mine) for sink, mine in oracle.results.items()}
    assert all(expected.values())
    assert results(tmp_path / "out", flow) == expected


def matched() -> Dataflow:
    flow = Dataflow("matches")
    by_query = flow.matches().aggregate(
        {"n": "count", "value": "sum(value)"}, by="query_id", size=0.05
    )
    by_query.sink("by_query")
    flow.points().filter("value < 10").sink("cheap")
    return flow


def test_matching_and_a_dataflow_in_one_run(spark: SparkSession, tmp_path: Path) -> None:
    found = {}
    for kind in ("spark", "process"):
        flow, out = matched(), tmp_path / kind
        config = RunConfig(
            points={"path": "generate:rows=2000,rate=10000,seed=3"},
            engine={"batch_rows": 700, "strategy": "uniform", "machines": 2},
            out={"dir": out},
        )
        made = Pipeline(config, spark=spark, flow=flow) if kind == "spark" else None
        with made or InProcessPipeline(config, flow=flow) as pipeline:
            pipeline.request(
                Query("north", Box(-180, 0, 180, 90)), Query("west", Box(-180, -90, 0, 90))
            )
            report = pipeline.run()
        assert report["matches"] > 0
        found[kind] = results(out, flow)
        counts = [json.loads(row)["n"] for row in found[kind]["by_query"].elements()]
        assert sum(counts) == report["matches"]
        assert report["dataflow"]["sources"] == {"matches": report["matches"], "points": 2000}
    assert found["spark"] == found["process"]
    assert all(found["spark"].values())


# --------------------------------------------------------------------------- random graphs


GRAPHS = 20
COVERED = {
    "state moves", "window moves", "moves with open windows", "other number of machines",
    "out-of-order", "diamond", "aggregate of aggregate", "join", "product",
}  # fmt: skip


def test_random_graphs_with_moves(spark: SparkSession, tmp_path: Path) -> None:
    """They give the interpreter's rows while their buckets move and drivers restart."""
    covered: Counter[str] = Counter()
    graphs = 0
    for case in map(make_case, itertools.count()):
        stateful = sum(operator.stateful for operator in case.flow.operators)
        # Each batch is a job, and each exchange a level of it: small cases show as much.
        if len(case.batches) > 3 or not 0 < stateful < 3 or len(units(case)) > 1:
            continue
        chance = random.Random(case.seed)
        moves = RandomMoves(chance, 2)
        run = FlowRun(case.flow, tmp_path / str(case.seed), policies=moves.policies(case.flow))
        run.pipeline = partial(Pipeline, spark=spark)
        run_case(case, run, chance)
        covered += moves.covered + Counter(case.features)
        graphs += 1
        if graphs == GRAPHS:
            break
    missing = {name for name in COVERED if not covered[name]}
    assert not missing, (missing, covered)
