"""A skewed stream while its cluster grows: Roost, and Spark with its fixed partitions.

Both compute the median duration of calls by caller, which cannot be merged from partial results, so
the tuples of a key meet in one task. They process the first half of the files on one executor and
the second half on three, of one core each, and continue from their state in between. Spark fixes
the partitions of a query's state in its first batch. So it runs once with as many partitions as it
has executors then, and once with as many as it will have. Roost gets more machines at the restart,
and moves buckets as it finds the skew.

Executors beyond the host's cores share them. So beside the time of a batch there is the processor
time of the busiest task of the stateful stage, which does not depend on that, and its share: the
batch cannot be shorter on any cluster.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from roost.bench.call_contest import check_equal, results
from roost.bench.calls import OUT, TYPES, CallCase, write_calls
from roost.bench.common import Row
from roost.bench.streams import BatchTimes
from roost.dataflow.flow import Dataflow
from roost.engine.baselines import streaming
from roost.engine.local_cluster import TaskTime, executors, resize, spark_home, task_times
from roost.engine.pipeline import Pipeline
from roost.engine.session import make_session
from roost.model.settings import RunConfig
from roost.runtime.flow_rounds import FLOW_ROUNDS
from roost.storage.store import Store

BEFORE, AFTER = 1, 3  # executors
EXECUTOR_MB = 1024
OPERATOR = "medians"
LATER = "later"


@dataclass(frozen=True)
class GrowthCase(CallCase):
    """A query on calls whose second half arrives after the cluster has grown."""

    settled: int = 3  # last batches of each half, which are measured


def case_of(quick: bool) -> GrowthCase:
    """Return the case: the busiest of 1,000 callers makes a fifth of the calls."""
    batch = 10_000 if quick else 100_000
    batches = 10 if quick else 24
    calls = f"rate={batch / 10},callers=1000,skew=zipf:1.25"
    return GrowthCase(
        "median duration by caller", "", calls, batch * batches, batch, "src", 30, 30,
        settled=3 if quick else 4,
    )  # fmt: skip


class Median:
    """The exact median of a column, as Spark's ``percentile(duration, 0.5)``."""

    columns = ("duration",)
    type = pa.float64()

    def whole(self, durations: pa.Array) -> float:
        """Return the median of a window."""
        return float(pc.quantile(durations, 0.5)[0].as_py())


def growth_flow(case: GrowthCase, calls: Path) -> Dataflow:
    """Return the query as a dataflow."""
    assert case.by is not None
    flow = Dataflow(case.name)
    schema = {name: TYPES[name] for name in case.columns}
    stream = flow.source("calls", schema, time="start", path=str(calls))
    duration_s = (pc.field("end") - pc.field("start")).cast("int64").cast("double") / 1e6
    durations = stream.map({case.by: pc.field(case.by), "duration": duration_s})
    functions = {"calls": "count", "mean": Median()}
    durations.aggregate(functions, by=case.by, size=case.size_s, name=OPERATOR).sink(OUT)
    return flow


# --------------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Half:
    """One half of a run: batches in order, and what its settled batches measured."""

    batch_s: Sequence[float]
    settled: int
    # Processor seconds of each task of the stateful stage, by batch.
    tasks: Sequence[Sequence[float]]
    executor_s: Mapping[str, float]  # seconds in which an executor was occupied

    def describe(self, batch_rows: int) -> Row:
        """Return metrics of the settled batches, and the time of each batch."""
        return {
            "batch_s": list(self.batch_s),
            "rows_per_s": batch_rows / median(self.batch_s[-self.settled :]),
            "busiest_task_s": median(max(times) for times in self.tasks),
            "busiest_task_share": share(self.tasks),
            "busiest_executor_share": share([list(self.executor_s.values())]),
        }


def share(groups: Sequence[Sequence[float]]) -> float:
    """Return the part of the time that falls on the busiest of each group.

    Examples
    --------
    >>> share([[1.0, 2.0, 1.0], [4.0, 0.0, 0.0]])
    0.75
    """
    total = sum(map(sum, groups))
    return sum(map(max, groups)) / total if total else math.nan


def by_executor(times: Iterable[TaskTime]) -> dict[str, float]:
    """Return the seconds of all tasks of each executor."""
    found: dict[str, float] = defaultdict(float)
    for task in times:
        found[task.executor] += task.run_s
    return dict(found)


def stateful_tasks(times: Sequence[TaskTime]) -> list[list[float]]:
    """Return processor seconds of the tasks of each job's last stage, which has the state."""
    stages: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for task in times:
        stages[task.job][task.stage].append(task.cpu_s)
    return [found[max(found)] for found in stages.values()]


# --------------------------------------------------------------------------- the two systems


Run = Callable[[int, int], Half]  # number of batches, executors


def roost_run(spark: Any, case: GrowthCase, calls: Path, out: Path) -> Run:
    """Return how Roost runs a half of the files that are there."""

    def run(batches: int, machines: int) -> Half:
        config = RunConfig(
            out={"dir": out},
            engine={"batch_rows": case.batch_rows, "available_now": True},
            dataflow={"machines": machines, "round": 0.0},
        )
        times = BatchTimes(time.time)
        hooks: dict[str, Any] = {"on_step": times.on_step, "on_batch": times.on_batch}
        flow = growth_flow(case, calls)
        with Pipeline(config, spark=spark, flow=flow, **hooks) as pipeline:
            pipeline.run()
            busy = busy_machines(pipeline.store)
        assert len(times.commits) == batches, "a batch is a file"
        # A batch in which the bucket map changed has no load by the new map.
        tasks = [busy[commit.batch_id] for commit in times.commits if commit.batch_id in busy]
        since = times.steps[-case.settled]["intent"]
        return Half(
            times.between("intent", "end"),
            case.settled,
            tasks[-case.settled :],
            by_executor(task_times(spark, since)),
        )

    return run


def busy_machines(store: Store) -> dict[int, list[float]]:
    """Return the processor seconds of the operator's machines in each round, by its last batch."""
    rounds = (body for _, body in store.items(FLOW_ROUNDS))
    found = ((body["batch_id"], body.get(f"balance {OPERATOR}")) for body in rounds)
    return {batch: shown["busy_s"] for batch, shown in found if shown is not None}


def spark_run(spark: Any, case: GrowthCase, calls: Path, out: Path, partitions: int | None) -> Run:
    """Return how Spark runs; by default with as many partitions as executors, each time."""

    def run(batches: int, machines: int) -> Half:
        session = streaming.session_of(spark, "memory", partitions or machines)
        frame = streaming.read_files(session, calls, case.columns)
        assert case.by is not None
        query = streaming.aggregated(
            frame, case.by, case.size_s, case.advance_s, 0, None, "percentile(duration, 0.5)"
        )
        ran = streaming.run_to_end(query, out / OUT, out / "checkpoint")
        assert len(ran.times) == batches, "a batch is a file"
        tasks = task_times(spark, ran.times[-case.settled][0])
        lasted = [seconds for _, seconds in ran.times]
        return Half(lasted, case.settled, stateful_tasks(tasks), by_executor(tasks))

    return run


# --------------------------------------------------------------------------- the cluster


def grow(case: GrowthCase) -> list[Row]:
    """Measure the case on a cluster of its own: a row for each system."""
    with tempfile.TemporaryDirectory(prefix="roost-growth-") as name:
        # Another process: a driver's JVM has one home, and workers of a cluster write into it.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(on_cluster, case, Path(name)).result()


def on_cluster(case: GrowthCase, folder: Path) -> list[Row]:
    """Run all systems in turn on a local cluster that grows; in a process without Spark."""
    os.environ["SPARK_HOME"] = str(spark_home(folder / "home"))
    spark = make_session(f"local-cluster[{AFTER},1,{EXECUTOR_MB}]")
    try:
        resize(spark, AFTER)
        rows = measure(spark, case, folder, partial(resize, spark))
        assert len(executors(spark)) == AFTER, "the cluster lost an executor"
        return rows
    finally:
        spark.stop()


def measure(spark: Any, case: GrowthCase, folder: Path, resize: Callable[[int], None]) -> list[Row]:
    """Run all systems on one executor, then on all; results must be equal."""
    calls = write_calls(case, folder)
    files = sorted(calls.iterdir())
    half = len(files) // 2
    later = folder / LATER
    later.mkdir()
    for path in files[half:]:
        path.rename(later / path.name)
    runs: dict[str, Run] = {
        "roost": roost_run(spark, case, calls, folder / "roost"),
        "spark": spark_run(spark, case, calls, folder / "spark", None),
        "spark_foreseen": spark_run(spark, case, calls, folder / "spark_foreseen", AFTER),
    }
    resize(BEFORE)
    before = {name: run(half, BEFORE) for name, run in runs.items()}
    resize(AFTER)
    for path in sorted(later.iterdir()):
        path.rename(calls / path.name)
    after = {name: run(len(files) - half, AFTER) for name, run in runs.items()}
    expected = results(case, folder / "roost" / OUT)
    for name in runs:
        check_equal(case, expected, results(case, folder / name / OUT), name)
    return [
        row_of(case, name, before[name], after[name]) | {"results": expected.num_rows}
        for name in runs
    ]


def row_of(case: GrowthCase, system: str, before: Half, after: Half) -> Row:
    """Return the row of a system: metrics before and after growing, and their ratio."""
    halves = {"before": before.describe(case.batch_rows), "after": after.describe(case.batch_rows)}
    return {
        "part": "growth", "case": f"{case.name}, {system}", "system": system, "rows": case.rows,
        "batch_rows": case.batch_rows, "machines": AFTER,
        "per_s": halves["after"]["rows_per_s"],
        "busiest_task_share": halves["after"]["busiest_task_share"], **halves,
        "ratio": halves["after"]["rows_per_s"] / halves["before"]["rows_per_s"],
    }  # fmt: skip


def summary_of(rows: Iterable[Row]) -> Row:
    """Return what growing changed, by system: throughput, and the busiest task of a batch."""
    return {
        row["system"]: {
            "rows_per_s_after_over_before": row["ratio"],
            "busiest_task_s_after_over_before": (
                row["after"]["busiest_task_s"] / row["before"]["busiest_task_s"]
            ),
            "busiest_task_share": row["busiest_task_share"],
            "busiest_executor_share": row["after"]["busiest_executor_share"],
        }
        for row in rows
        if row["part"] == "growth"
    }
