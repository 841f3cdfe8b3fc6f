"""Roost and Spark's own streaming queries on the same calls, in one Spark session.

Both read the same files, one in each batch, and write Parquet. Their results must be equal before
anything is timed; then both run in turn. A run is timed from the beginning of its first batch to
the end of its last one. Processor time is that of all processes: driver, JVM and Python workers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.calls import OUT, CallCase, calls_flow, write_calls
from roost.bench.common import CORES, Row, UnequalResults
from roost.bench.streams import BatchTimes
from roost.engine.baselines import streaming
from roost.engine.pipeline import Pipeline
from roost.engine.session import make_session
from roost.errors import RoostError
from roost.model.settings import RunConfig

DRIVER_MEMORY = "6g"  # Spark's state is in the JVM's memory
# Spark adds up doubles in the order of arrival, and computes sines differently.
TOLERANCE = 1e-9
TOLERANCE_M = 1e-3


@dataclass(frozen=True)
class Timed:
    """One run: seconds, processor seconds, and results."""

    seconds: float
    cpu_s: float
    out: Path


def start_session() -> Any:
    """Start Spark with Roost's settings and memory for Spark's own state."""
    return make_session(f"local[{CORES}]", {"spark.driver.memory": DRIVER_MEMORY})


def cpu_seconds() -> float:
    """Return the processor time of this process and all below it, so far."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def compare(spark: Any, case: CallCase, folder: Path, repeats: int) -> Row:
    """Compare the results of a case, then time both systems in turn."""
    calls = write_calls(case, folder)

    def roost(out: Path) -> Timed:
        return run_roost(spark, case, calls, out)

    def spark_with(store: str) -> Callable[[Path], Timed]:
        return lambda out: run_spark(spark, case, calls, out, store)

    tried = {store: spark_with(store)(folder / store) for store in streaming.STORES}
    own = roost(folder / "roost")
    expected = results(case, own.out)
    for store, found in tried.items():
        check_equal(case, expected, results(case, found.out), store)
    store = min(tried, key=lambda name: tried[name].seconds)
    times: dict[str, list[Timed]] = {"roost": [], "spark": []}
    for number in range(repeats):
        for name, system in (("spark", spark_with(store)), ("roost", roost)):
            out = folder / f"{name}-{number}"
            if name == "roost":  # its workers end while Spark's own query runs for long
                shutil.rmtree(system(folder / "warm").out.parent)
            times[name].append(system(out))
            shutil.rmtree(out)
    shutil.rmtree(folder)
    row: Row = {
        "part": "spark", "case": case.name, "key": case.key, "rows": case.rows,
        "batch_rows": case.batch_rows, "results": expected.num_rows, "store": store,
    }  # fmt: skip
    for name, runs in times.items():
        row[f"{name}_rows_per_s"] = case.rows / median(run.seconds for run in runs)
        row[f"{name}_rows_per_cpu_s"] = case.rows / median(run.cpu_s for run in runs)
        row[f"{name}_seconds"] = [run.seconds for run in runs]
    row["ratio"] = row["roost_rows_per_s"] / row["spark_rows_per_s"]
    row["ratio_cpu"] = row["roost_rows_per_cpu_s"] / row["spark_rows_per_cpu_s"]
    return row


def run_roost(spark: Any, case: CallCase, calls: Path, out: Path) -> Timed:
    """Run the dataflow of a case."""
    config = RunConfig(
        out={"dir": out},
        engine={"batch_rows": case.batch_rows, "available_now": True, "machines": CORES},
        dataflow={"lateness": case.lateness_s},
    )
    times = BatchTimes()
    flow = calls_flow(case, calls)
    pipeline = Pipeline(
        config, spark=spark, flow=flow, on_step=times.on_step, on_batch=times.on_batch
    )
    with pipeline:
        before = cpu_seconds()
        pipeline.run()
        used = cpu_seconds() - before
    expected = math.ceil(case.rows / case.batch_rows)
    assert len(times.commits) == expected, "a batch is a file"
    return Timed(times.seconds(), used, out / OUT)


def run_spark(spark: Any, case: CallCase, calls: Path, out: Path, store: str) -> Timed:
    """Run Spark's own query of a case."""
    session = streaming.session_of(spark, store, CORES)
    inputs = [streaming.read_files(session, calls, case.columns) for _ in range(2)]
    if case.by is None:
        query = streaming.joined(inputs[0], inputs[1], case.size_s)
    else:
        query = streaming.aggregated(
            inputs[0], case.by, case.size_s, case.advance_s, case.lateness_s, case.least_mean_s
        )
    before = cpu_seconds()
    ran = streaming.run_to_end(query, out / OUT, out / "checkpoint")
    used = cpu_seconds() - before
    assert ran.rows == case.rows * (2 if case.by is None else 1), "a row is read once by each side"
    return Timed(ran.seconds, used, out / OUT)


def results(case: CallCase, folder: Path) -> pa.Table:
    """Read the results of a run, sorted."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise RoostError(f"a run of {folder.name} wrote no results")
    tables = [pq.read_table(path) for path in files]
    table = pa.concat_tables(
        [one.select(case.results) for one in tables], promote_options="permissive"
    )
    return table.sort_by([(name, "ascending") for name in case.results])


def check_equal(case: CallCase, expected: pa.Table, found: pa.Table, system: str) -> None:
    """Raise if results differ: in their number, a value, or a float by more than the tolerance."""
    if expected.num_rows != found.num_rows:
        counts = f"{expected.num_rows:,} results, {system} {found.num_rows:,}"
        raise UnequalResults(f"{case.name}: Roost has {counts}")
    for name in expected.column_names:
        mine, theirs = expected[name].combine_chunks(), found[name].combine_chunks()
        if pa.types.is_floating(mine.type):
            close = np.isclose(mine, theirs, TOLERANCE, TOLERANCE_M if name == "metres" else 0.0)
            equal = bool(close.all())
        else:
            equal = mine.equals(theirs.cast(mine.type))
        if not equal:
            raise UnequalResults(f"{case.name}: Roost and {system} differ in {name}")


def worst(rows: Sequence[Row], key: str) -> float | None:
    """Return the smallest ratio of the cases that count for a key."""
    return min((row["ratio"] for row in rows if row.get("key") == key), default=None)
