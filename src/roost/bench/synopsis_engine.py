"""The synopsis of a run on Spark, for ``roost bench synopsis``.

The overhead is the time of a batch with the synopsis over that without, while the matches of a
million boxes around the stations are counted. Runs alternate in one session. The processor time of
a machine's delta is measured in this process, without Spark. For recovery, a run of the command
line is killed while it processes a batch, and continued.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import JITTER_SIDES, SEED, SIDE_SHARE, box_requests
from roost.bench.common import CORES, Row
from roost.bench.streams import BatchTimes
from roost.bench.synopsis_cases import FEATURES
from roost.model.schemas import PointBlock
from roost.model.settings import RunConfig
from roost.stages.matching import GATHERED, Gathered
from roost.stages.synopsis import PrefixRouting, SynopsisTask
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Store
from roost.synopsis import SynopsisSpec, learn_bins
from roost.synopsis.catalogue import STATE, TABLE
from roost.synopsis.reader import SynopsisReader
from roost.synopsis.spec import locate
from roost.synopsis.tree import PrefixTree

BOXES, BOXES_QUICK = 1_000_000, 50_000
BATCH_ROWS, BATCH_ROWS_QUICK = 262_144, 65_536
TURNS, TURNS_QUICK = 3, 1
KILL_AFTER = 2  # batches
POLL_S = 0.01
DEADLINE_S = 300.0


def measure_engine(table: pa.Table, quick: bool) -> tuple[Row, Row]:
    """Return the summary of the engine, and the seconds of its batches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        points = folder / "points.parquet"
        pq.write_table(table, points, row_group_size=65_536)
        queries = folder / "queries.parquet"
        pq.write_table(box_requests(_boxes(table, BOXES_QUICK if quick else BOXES)), queries)
        seconds = _alternate(folder, points, queries, quick)
        summary = {"overhead": median(seconds["with"]) / median(seconds["without"])}
        summary["delta_ms"] = measure_delta(table, folder, quick)
        return {**summary, **_recover(folder, points, table.num_rows, quick)}, seconds


def measure_delta(table: pa.Table, folder: Path, quick: bool) -> float:
    """Return the median processor time in which a machine builds and writes its share of a batch.

    Rows are given as columns: reading them is not included.
    """
    rows = (BATCH_ROWS_QUICK if quick else BATCH_ROWS) // CORES
    spec = SynopsisSpec.of(table.schema, FEATURES)
    bins, files = learn_bins(table.slice(0, CORES * rows), spec).prepared(), Files(str(folder))
    x, y = (np.asarray(table[name]) for name in (spec.x, spec.y))
    tree = PrefixTree.even(CORES, spec.place_bits, locate(x, y, spec))
    routing = PrefixRouting(0, tree, spec)
    task = SynopsisTask("delta-", spec, bins, routing, pa.schema([]), files, None)
    times = np.asarray(table[spec.time].cast(pa.int64()))
    seconds = []
    for number, start in enumerate(range(0, table.num_rows - rows + 1, rows)):
        at = slice(start, start + rows)
        features = {name: table[name].chunk(0).slice(start, rows) for name in FEATURES}
        block = PointBlock(x[at], y[at], times[at], pa.nulls(rows), features)
        started = time.process_time()
        work = task.build(0, WorkerCache())
        work.process(GATHERED, Gathered(block, None))
        work.report()
        if number:  # the first one loads code
            seconds.append(time.process_time() - started)
    return 1e3 * median(seconds)


def _boxes(table: pa.Table, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return boxes around stations, as those around pickups in other benchmarks."""
    rng = np.random.default_rng(SEED)
    centres = rng.integers(0, table.num_rows, count)
    corners = []
    for name in ("lon", "lat"):
        values = table[name].to_numpy()
        side = SIDE_SHARE * float(values.max() - values.min())
        at = values[centres] + rng.uniform(-JITTER_SIDES, JITTER_SIDES, count) * side
        corners.append((at - side / 2, at + side / 2))
    (x0, x1), (y0, y1) = corners
    return np.stack([x0, y0, x1, y1], axis=1)


def _config(folder: Path, points: Path, quick: bool, **sections: Any) -> RunConfig:
    engine = {
        "machines": CORES,
        "batch_rows": BATCH_ROWS_QUICK if quick else BATCH_ROWS,
        "available_now": True,
    }
    out = {"dir": folder, "sink": "count"}
    return RunConfig(points={"path": str(points)}, engine=engine, out=out, **sections)


def _alternate(folder: Path, points: Path, queries: Path, quick: bool) -> dict[str, list[float]]:
    """Run with and without the synopsis in turn; returns the seconds of full batches."""
    from roost import Pipeline

    found: dict[str, list[float]] = {"with": [], "without": []}
    spark = None
    for turn in range(1 + (TURNS_QUICK if quick else TURNS)):
        for case, sections in (("without", {}), ("with", {"synopsis": {"features": FEATURES}})):
            requests = {"path": str(queries)}
            out = folder / f"{case}-{turn}"
            config = _config(out, points, quick, queries=requests, **sections)
            times = BatchTimes()
            with Pipeline(
                config, spark=spark, on_step=times.on_step, on_batch=times.on_batch
            ) as pipeline:
                pipeline.run()
                spark = pipeline.spark
            if turn:  # the first turn loads code
                # The first batch chooses the bins; the last one is smaller.
                found[case] += [batch["end"] - batch["intent"] for batch in times.steps[1:-1]]
    return found


def _recover(folder: Path, points: Path, rows: int, quick: bool) -> Row:
    """Kill a run in a batch and continue it; returns the time to the next commit, and errors."""
    out = folder / "killed"
    batch_rows = BATCH_ROWS_QUICK if quick else BATCH_ROWS
    command = [sys.executable, "-m", "roost", "run", "--points", str(points), "--out", str(out)]
    command += ["--synopsis", ",".join(FEATURES), "--sink", "count", "--available-now", "--quiet"]
    command += ["--batch-rows", str(batch_rows), "--machines", str(CORES)]
    first = subprocess.Popen(command, start_new_session=True)
    reached = _wait(out / "state", KILL_AFTER, first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    killed = time.perf_counter()
    second = subprocess.Popen(command)
    _wait(out / "state", reached + 1, second)
    seconds = time.perf_counter() - killed
    if second.wait():
        raise RuntimeError(f"the continued run ended with exit code {second.returncode}")
    with closing(SynopsisReader(out / "state")) as reader:
        counted = int(reader.query("count").result.value)
    return {
        "recovery_s": seconds,
        "lost": max(rows - counted, 0),
        "doubled": max(counted - rows, 0),
    }


def _wait(state: Path, batch: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until a batch is committed; returns the newest one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        if (state / "state.db").exists():
            with closing(Store(state, durable=False)) as store:
                newest = (store.get(TABLE, STATE) or {}).get("batch")
            if newest is not None and newest >= batch:
                return int(newest)
        time.sleep(POLL_S)
    raise RuntimeError(f"batch {batch} was not committed; exit code {process.returncode}")
