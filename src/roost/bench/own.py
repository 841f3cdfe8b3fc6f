"""Roost and its bare kernel, by the protocol that every measured system follows.

``roost``: the whole pipeline on Spark, local on two cores, with intents, commits and figures as in
production; the point file is streamed again and again, cut into batches of the default size.
``kernel``: the matching index alone, in one process and one thread, over columns that are already
in memory. What Roost loses against it is what Spark, decoding, routing and bookkeeping cost.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import __version__
from roost.bench.cases import Case
from roost.bench.rivals.protocol import (
    CORES,
    PASSES_MAX,
    Job,
    Result,
    job_of,
    parser,
    written_rows,
)
from roost.bench.streams import BatchTimes, Repeated
from roost.engine.pipeline import Pipeline
from roost.kernel import Index
from roost.model.choices import Strategy
from roost.model.schemas import TIMESTAMP, PointBlock
from roost.model.settings import RunConfig, with_settings
from roost.model.space import Rect, Space
from roost.queries.admission import Rules
from roost.queries.live import QuerySet
from roost.queries.log import SqliteQueryLog
from roost.runtime.records import Commit
from roost.stages.reading import ROWS_PER_BLOCK
from roost.storage.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENDLESS = 1 << 20  # passes; stopped by the clock


def run_roost(job: Job, strategy: Strategy, machines: int) -> Result:
    """Measure the pipeline."""
    case = job.case
    config = RunConfig(
        points={"path": job.points_path},
        queries={"path": case.queries_path},
        space={"bounds": Rect(*case.bounds)},
        engine={
            "strategy": strategy,
            "machines": machines,
            "master": f"local[{CORES}]",
            "available_now": True,
        },
        out={"sink": "count" if job.mode == "count" else "parquet"},
    )
    if job.mode == "write":
        # One pass is one batch, as for the rivals.
        config = with_settings(config, {"engine.batch_rows": job.points})
    with tempfile.TemporaryDirectory() as folder:
        endless = Repeated(case.warm_points_path, ENDLESS)
        spark, warm = _stream(config, Path(folder) / "warm", endless, stop_after_s=case.warm_s)
        last = warm.commits[-1].figures
        passes = math.ceil(case.timed_s * last["points"] / last["seconds"] / job.points)
        passes = min(max(passes, 1), PASSES_MAX)
        out = Path(folder) / "out"
        _, timed = _stream(config, out, Repeated(job.points_path, passes), spark)
        seconds = timed.seconds()
        total = sum(commit.figures["matches"] for commit in timed.commits)
        if job.mode == "write":
            assert total == written_rows(out / "matches")
            # One pass stays for the benchmark to compare with the other systems.
            shutil.rmtree(job.out, ignore_errors=True)
            _stream(config, job.out, Repeated(job.points_path, 1), spark)
        assert total % passes == 0, "two passes over one file found different matches"
        return Result(
            f"roost-{strategy.value}",
            case.name,
            job.mode,
            job.points,
            passes,
            seconds,
            job.points * passes / seconds,
            total // passes,
            f"roost {__version__}, pyspark {spark.version}",
            f"{machines} machines, batches of {config.engine.batch_rows:,}",
        )


def _stream(
    config: RunConfig,
    out: Path,
    source: Repeated,
    spark: SparkSession | None = None,
    stop_after_s: float = math.inf,
) -> tuple[SparkSession, BatchTimes]:
    times = BatchTimes()

    def on_batch(commit: Commit) -> None:
        times.on_batch(commit)
        if times.seconds() > stop_after_s:
            pipeline.stop()

    pipeline = Pipeline(
        with_settings(config, {"out.dir": out}),
        spark=spark,
        source=source,
        on_step=times.on_step,
        on_batch=on_batch,
    )
    with pipeline:
        pipeline.run()
        return pipeline.spark, times


def load_index(case: Case, folder: Path) -> Index:
    """Index the queries of a case, through the same log and admission as a run."""
    store, log = Store(folder), SqliteQueryLog(folder / "queries.db")
    log.append(pq.read_table(case.queries_path))
    space = Space(Rect(*case.bounds))
    queries = QuerySet(store, log, Rules(space, pa.int64(), TIMESTAMP))
    queries.advance(log.end())
    return Index(space, [(segment, ended) for _, segment, ended in queries.segments()])


def run_kernel(job: Job) -> Result:
    """Measure the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        index = load_index(job.case, Path(folder))
    table = pq.read_table(job.points_path, columns=["lon", "lat"])
    x, y = (np.ascontiguousarray(table[name].to_numpy()) for name in ("lon", "lat"))
    ids, times = pa.nulls(0), np.zeros(x.size, np.int64)

    def one_pass() -> int:
        matches = 0
        for start in range(0, x.size, ROWS_PER_BLOCK):
            part = slice(start, start + ROWS_PER_BLOCK)
            block = PointBlock(x[part], y[part], times[part], ids, {})
            matches += sum(pairs.slots.size for pairs in index.match(block))
        return matches

    matches = one_pass()
    checks = index.checks
    seconds, passes = 0.0, 0
    while seconds < job.case.timed_s and passes < PASSES_MAX:
        started = time.perf_counter()
        assert one_pass() == matches
        seconds += time.perf_counter() - started
        passes += 1
    notes = f"one thread, {checks / max(matches, 1):.2f} checks per match"
    return Result(
        "kernel",
        job.case.name,
        job.mode,
        x.size,
        passes,
        seconds,
        x.size * passes / seconds,
        matches,
        f"roost {__version__}",
        notes,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run one job from the command line."""
    made = parser("Match with Roost, or with its kernel alone.")
    made.add_argument("--system", choices=("roost", "kernel"), required=True)
    made.add_argument("--strategy", type=Strategy, default=Strategy.REPLICATED)
    made.add_argument("--machines", type=int, default=CORES)
    arguments: argparse.Namespace = made.parse_args(argv)
    job = job_of(arguments)
    if arguments.system == "kernel":
        result = run_kernel(job)
    else:
        result = run_roost(job, arguments.strategy, arguments.machines)
    job.json_path.write_text(json.dumps(asdict(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
