"""Roost and its kernel alone, as systems of ``roost bench peers``.

``roost`` is the whole pipeline on Spark, with intents, commits and metrics as in production; it
streams the file of points repeatedly, in batches of the default size. ``kernel`` is the matching
index alone, in one process and one thread, on columns in memory. The difference between the two is
the cost of Spark, decoding, routing and the batch protocol.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import __version__
from roost.bench.common import CORES, Row
from roost.bench.rivals.protocol import (
    PASSES_MAX,
    RivalJob,
    job_of,
    measure,
    parser,
    save_result,
    written_rows,
)
from roost.bench.streams import BatchTimes, Repeated, admit, pipeline_config
from roost.engine.pipeline import Pipeline
from roost.kernel import Index
from roost.model.choices import Strategy
from roost.model.schemas import PointBlock
from roost.model.settings import RunConfig, with_settings
from roost.model.space import Rect, Space
from roost.runtime.records import Commit
from roost.stages.reading import ROWS_PER_BLOCK

ENDLESS = 1 << 20  # passes; stopped by the clock


def run_roost(job: RivalJob, strategy: Strategy) -> Row:
    """Measure the pipeline."""
    case = job.case
    settings = {
        "queries.path": case.queries_path,
        "engine.strategy": strategy,
        "engine.machines": CORES,
        "out.sink": "count" if job.mode == "count" else "parquet",
    }
    if job.mode == "write":
        settings["engine.batch_rows"] = job.points  # one batch per pass, as other systems do
    config = pipeline_config(job.points_path, case.bounds, job.out, settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        endless = Repeated(case.warm_points_path, ENDLESS)
        first, warm = _stream(config, folder / "warm", endless, stop_after_s=case.warm_s)
        last = warm.commits[-1].figures
        passes = math.ceil(case.timed_s * last["points"] / last["seconds"] / job.points)
        passes = min(max(passes, 1), PASSES_MAX)
        _, timed = _stream(config, folder / "out", Repeated(job.points_path, passes), first)
        matches, rest = divmod(sum(c.figures["matches"] for c in timed.commits), passes)
        assert rest == 0, "two passes over one file found different matches"
        if job.mode == "write":
            assert matches * passes == written_rows(folder / "out" / "matches")
            # The benchmark compares the matches of one pass with those of other systems.
            shutil.rmtree(job.out, ignore_errors=True)
            _stream(config, job.out, Repeated(job.points_path, 1), first)
    version = f"roost {__version__}, pyspark {first.spark.version}"
    notes = f"{CORES} machines, batches of {config.engine.batch_rows:,}"
    system = f"roost-{strategy.value}"
    return save_result(job, system, version, notes, passes, timed.seconds(), matches)


def _stream(
    config: RunConfig,
    out: Path,
    source: Repeated,
    first: Pipeline | None = None,
    stop_after_s: float = math.inf,
) -> tuple[Pipeline, BatchTimes]:
    """Run a pipeline, in the Spark session of the first one."""
    times = BatchTimes()

    def on_batch(commit: Commit) -> None:
        times.on_batch(commit)
        if times.seconds() > stop_after_s:
            pipeline.stop()

    pipeline = Pipeline(
        with_settings(config, {"out.dir": out}),
        spark=None if first is None else first.spark,
        source=source,
        on_step=times.on_step,
        on_batch=on_batch,
    )
    with pipeline:
        pipeline.run()
    return pipeline, times


def run_kernel(job: RivalJob) -> Row:
    """Measure the kernel; reading the points is not timed."""
    space = Space(Rect(*job.case.bounds))
    with tempfile.TemporaryDirectory() as folder:
        index = Index(space, admit(Path(folder), space, pq.read_table(job.case.queries_path)))
    blocks = {path: _blocks(path) for path in (job.points_path, job.case.warm_points_path)}

    def one_pass(points_path: str, out: Path | None) -> int:
        found = (index.match(block) for block in blocks[points_path])
        return sum(pairs.slots.size for block_pairs in found for pairs in block_pairs)

    matches = one_pass(job.points_path, None)
    notes = f"one thread, {index.checks / max(matches, 1):.2f} checks per match"
    return measure(job, "kernel", f"roost {__version__}", notes, one_pass)


def _blocks(points_path: str) -> list[PointBlock]:
    table = pq.read_table(points_path, columns=["lon", "lat"])
    x, y = (np.ascontiguousarray(table[name].to_numpy()) for name in ("lon", "lat"))
    parts = [slice(k, k + ROWS_PER_BLOCK) for k in range(0, x.size, ROWS_PER_BLOCK)]
    return [PointBlock(x[p], y[p], np.zeros(x[p].size, np.int64), pa.nulls(0), {}) for p in parts]


def main() -> None:
    """Run one job from the command line."""
    made = parser("Match with Roost, or with its kernel alone.")
    made.add_argument("--system", choices=("roost", "kernel"), required=True)
    made.add_argument("--strategy", type=Strategy, default=Strategy.REPLICATED)
    arguments = made.parse_args()
    job = job_of(arguments)
    if arguments.system == "kernel":
        run_kernel(job)
    else:
        run_roost(job, arguments.strategy)


if __name__ == "__main__":
    main()
