"""``roost bench load``: time and memory that a million queries take to load.

The clock runs from the request file to the first batch of points matched against it, with the
Spark session already up. Memory is that of the process tree: driver, JVM, Python daemon and
workers. PSS counts shared pages (the mapped index, libraries) once, RSS once per process.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil

from roost.bench.cases import CaseSpec, data_dir, make_cases
from roost.bench.common import Measured, Plot
from roost.bench.streams import BatchTimes, Repeated, pipeline_config
from roost.engine.pipeline import Pipeline
from roost.errors import RoostError
from roost.model.records import Box, Query
from roost.runtime.records import Commit

SAMPLE_S = 0.1
ONE_MORE = 20  # batches with one more query each


def tree_memory_mb() -> tuple[float, float]:
    """Return PSS and RSS of this process and its descendants."""
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
    """Refuse to run where the system does not let a process read its own memory maps."""
    try:
        psutil.Process().memory_full_info()
    except psutil.AccessDenied as error:
        raise RoostError(
            "roost bench load may not read the memory maps of its own processes; "
            "run it where the system permits that"
        ) from error


class _Sampler(threading.Thread):
    """Samples time, PSS and RSS."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float, float]] = []
        self.done = threading.Event()
        self.started = time.perf_counter()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_S):
            self.samples.append((time.perf_counter() - self.started, *tree_memory_mb()))


def run(quick: bool) -> Measured:
    """Measure loading, and the time that one more query takes."""
    check_permission()
    count = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = CaseSpec("load", "boxes", count, points=20_000, write_points=1_000)
        # In another process: the memory that making the queries takes is not measured.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            (case,) = pool.submit(make_cases, [spec], folder, data_dir()).result()
        settings = {
            "queries.path": case.queries_path,
            "engine.batch_rows": case.points,
            "out.sink": "count",
        }
        config = pipeline_config(case.points_path, case.bounds, folder / "out", settings)

        def one_more(commit: Commit) -> None:
            x, y = case.bounds[:2]
            pipeline.request(Query(count + commit.batch_id, Box(x, y, x + 1e-3, y + 1e-3)))

        times = BatchTimes()
        source = Repeated(case.points_path, 1 + ONE_MORE)
        pipeline = Pipeline(config, source=source, on_step=times.on_step, on_batch=one_more)
        pipeline.spark.range(1).count()
        sampler = _Sampler()
        sampler.start()
        started = time.perf_counter()
        with pipeline:
            report = pipeline.run()
        sampler.done.set()
        sampler.join()
    summary = {
        "load_s": times.steps[0]["end"] - started,
        "tree_mb": max(pss for _, pss, _ in sampler.samples),
        "tree_rss_mb": max(rss for _, _, rss in sampler.samples),
        "one_more_ms": float(np.median(times.between("apply", "run")[1:])) * 1e3,
    }
    row = {"case": f"{count} boxes", "system": "roost", "matches": report["matches"], **summary}
    lines = {
        "PSS": [(at, pss) for at, pss, _ in sampler.samples],
        "RSS": [(at, rss) for at, _, rss in sampler.samples],
    }
    plot = Plot("", {"memory of the process tree (MB)": lines})
    return Measured([row], summary, {"": plot})
