"""``roost bench load``: how long a million queries take to load, and how much memory.

The clock runs from the request file to the first batch of points matched against it, with the
Spark session already up. Memory is that of the whole tree of processes: driver, JVM, Python
daemon and workers. Shared pages (the mapped index, libraries) are counted once where the system
tells (PSS), and once a process in the larger figure (RSS).
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from roost.bench.cases import Case, CaseSpec, data_dir, load_pickups, make_case
from roost.bench.common import environment, save_lines_plot, write_json
from roost.bench.rivals.protocol import CORES
from roost.bench.streams import BatchTimes, Repeated
from roost.engine.pipeline import Pipeline
from roost.errors import RoostError
from roost.model.records import Box, Query
from roost.model.settings import RunConfig
from roost.model.space import Rect
from roost.runtime.records import Commit

SAMPLE_S = 0.1
ONE_MORE = 20


def tree_memory_mb() -> tuple[float, float]:
    """Memory of this process and all below it: shared pages once, and once a process."""
    pss = rss = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            info = process.memory_full_info()
        except psutil.Error:
            continue
        pss += getattr(info, "pss", info.rss)
        rss += info.rss
    return pss / 1e6, rss / 1e6


def check_permission() -> None:
    """Refuse to measure memory where the system does not let a process read its own."""
    try:
        psutil.Process().memory_full_info()
    except psutil.AccessDenied as error:
        raise RoostError(
            "roost bench load may not read the memory maps of its own processes; "
            "run it where the system permits that"
        ) from error


def _make_case(spec: CaseSpec, folder: Path) -> Case:
    return make_case(spec, load_pickups(data_dir()), folder, None)


class _Sampler(threading.Thread):
    """Memory over time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float, float]] = []
        self.done = threading.Event()
        self.started = time.perf_counter()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_S):
            self.samples.append((time.perf_counter() - self.started, *tree_memory_mb()))


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    check_permission()
    count = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = CaseSpec("load", "boxes", count, points=20_000, write_points=1_000)
        # In a process of its own: what making the queries takes is not what loading them takes.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            case = pool.submit(_make_case, spec, folder / "case").result()
        rows = pq.read_metadata(case.points_path).num_rows
        config = RunConfig(
            points={"path": case.points_path},
            queries={"path": case.queries_path},
            space={"bounds": Rect(*case.bounds)},
            engine={"master": f"local[{CORES}]", "batch_rows": rows, "available_now": True},
            out={"sink": "count", "dir": folder / "out"},
        )
        times = BatchTimes()
        source = Repeated(case.points_path, 1 + ONE_MORE)

        def one_more(commit: Commit) -> None:
            x, y = case.bounds[0], case.bounds[1]
            pipeline.request(Query(count + commit.batch_id, Box(x, y, x + 1e-3, y + 1e-3)))

        pipeline = Pipeline(config, source=source, on_step=times.on_step, on_batch=one_more)
        pipeline.spark.range(1).count()
        sampler = _Sampler()
        sampler.start()
        started = time.perf_counter()
        with pipeline:
            report = pipeline.run()
        sampler.done.set()
        sampler.join()
    return _write(json_path, count, times, started, sampler, report)


def _write(
    json_path: Path,
    count: int,
    times: BatchTimes,
    started: float,
    sampler: _Sampler,
    report: dict[str, Any],
) -> dict[str, Any]:
    pss = max(sample[1] for sample in sampler.samples)
    rss = max(sample[2] for sample in sampler.samples)
    summary = {
        "load_s": times.steps[0]["end"] - started,
        "tree_mb": pss,
        "tree_rss_mb": rss,
        "one_more_ms": float(np.median(times.between("apply", "run")[1:])) * 1e3,
    }
    row = {"case": f"{count} boxes", "system": "roost", "matches": report["matches"], **summary}
    result = {
        "bench": "load",
        "rows": [row],
        "environment": environment(),
        "summary": summary,
    }
    write_json(json_path, result)
    lines = {
        "shared pages once": [(t, pss) for t, pss, _ in sampler.samples],
        "sum of RSS": [(t, rss) for t, _, rss in sampler.samples],
    }
    save_lines_plot(json_path.with_suffix(".png"), "memory of the process tree (MB)", lines)
    return result
