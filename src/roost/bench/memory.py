"""``roost bench memory``: strategies on a real cluster whose hosts have little memory.

Three workers run on one machine, each with a memory limit and its own copy of the queries (see
:mod:`roost.bench.hosts`). The load is uniform, so every strategy is balanced. Under ``replicated``
every host reads the whole index, until it does not fit into a host's memory any more; under the
others a host reads the queries of its own machines (figure 6.5 of the dissertation).

Two cores serve three hosts and the driver, so rates are lower than on three hosts; all strategies
share that.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import SIDE_SHARE, box_requests, point_table
from roost.bench.common import Line, Measured, Plot, Row
from roost.bench.hosts import LimitedHost, limited_hosts, reason_against
from roost.bench.streams import BatchTimes, pipeline_config
from roost.engine.pipeline import Pipeline
from roost.engine.session import SETTINGS
from roost.engine.standalone import Host, StandaloneCluster
from roost.model.choices import Strategy
from roost.model.settings import RunConfig
from roost.queries.versions import SEGMENTS

Value = TypeVar("Value")

HOSTS = 3
BOUNDS = (0.0, 0.0, 10.0, 10.0)
SIDE = SIDE_SHARE * (BOUNDS[2] - BOUNDS[0])  # of a query, as in the dissertation
ROUND_S = 15  # of event time; a batch each
WARM = 8  # batches that are not measured: they read the index, and the JVMs compile
BATCHES_MAX = 40
PLACED = (Strategy.SWARM, Strategy.GLOBAL)
STRATEGIES = (Strategy.REPLICATED, Strategy.HISTORY, *PLACED)
# Runs are short. The optimizing compiler of the JVMs would use a third of the cores meanwhile.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1"
EXECUTOR = {
    "spark.driver.extraJavaOptions": f"{SETTINGS['spark.driver.extraJavaOptions']} {JAVA_OPTIONS}",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.memory": "480m",
    "spark.executor.cores": "1",
    "spark.cores.max": str(HOSTS),
}


@dataclass(frozen=True)
class MemorySize:
    """What a run measures; limits and numbers of queries go together."""

    queries: tuple[int, ...]
    # Of a host: its JVMs and Python take 700 to 850. A third of the largest index has to fit beside
    # them, the whole must not.
    limit_mb: int
    least: int  # batches of the largest index; those of smaller ones are shorter, and vary more
    # Of a batch: a sixteenth of what the engine takes by default, so that Spark's fixed cost of a
    # job is a small part of it, and the memory of a host suffices.
    batch_rows: int = 1_000_000

    def batches(self, queries: int) -> int:
        """Return how many batches are measured."""
        return min(self.least * max(self.queries) // queries, BATCHES_MAX)


FULL = MemorySize((1_000_000, 4_000_000, 16_000_000), 1800, 12)
QUICK = MemorySize((1_000_000, 8_000_000), 1300, 8)


class _Prepared(Exception):
    """The state of a case is complete."""


def make_files(size: MemorySize, queries: int, folder: Path) -> None:
    """Write uniform points and boxes."""
    random = np.random.default_rng(queries)
    rows = size.batch_rows * (1 + WARM + size.batches(queries))
    at = random.uniform(BOUNDS[0], BOUNDS[2], (rows, 2))
    ids = np.arange(rows)
    times = pa.array(ids * (ROUND_S * 1_000_000) // size.batch_rows, pa.timestamp("us", "UTC"))
    pq.write_table(point_table(ids, times, *at.T), folder / "points.parquet", compression="none")
    low = random.uniform(BOUNDS[0], BOUNDS[2] - SIDE, (queries, 2))
    boxes = box_requests(np.hstack([low, low + SIDE]))
    pq.write_table(boxes, folder / "queries.parquet", compression="none")


def config_of(folder: Path, out: Path, size: MemorySize, **settings: object) -> RunConfig:
    """Return the settings of a run."""
    given = {
        "queries.path": folder / "queries.parquet",
        "space.coordinates": "plane",
        "engine.batch_rows": size.batch_rows,
        "balance.round": ROUND_S,
        "out.sink": "count",
    }
    return pipeline_config(str(folder / "points.parquet"), BOUNDS, out, {**given, **settings})


def prepare(folder: Path, size: MemorySize, queries: int) -> None:
    """Register the queries, and run a first batch, in a state that every run copies."""
    make_files(size, queries, folder)

    def on_step(step: str, number: int) -> None:
        if step == "end":
            raise _Prepared

    config = config_of(folder, folder / "prepared", size)
    with suppress(_Prepared), Pipeline(config, on_step=on_step) as pipeline:
        pipeline.run()


def copy_state(prepared: Path, out: Path) -> None:
    """Copy a state; its immutable segments are linked."""

    def copied(source: str, target: str) -> str:
        if Path(source).parent.name == SEGMENTS:
            os.link(source, target)
            return target
        return shutil.copy2(source, target)

    shutil.copytree(prepared, out, copy_function=copied)


def measure(folder: Path, size: MemorySize, queries: int, strategy: Strategy) -> Row:
    """Run one strategy on a cluster of its own."""
    out = folder / strategy.value
    copy_state(folder / "prepared", out)
    segments = out / "state" / SEGMENTS
    limit = size.limit_mb << 20
    try:
        with limited_hosts(HOSTS, limit, segments, folder) as hosts:
            workers = [Host(1, 512, host.prefix) for host in hosts]
            with StandaloneCluster(workers, folder / f"cluster-{strategy}") as cluster:
                return _measure(folder, size, queries, strategy, hosts, cluster.url)
    finally:
        shutil.rmtree(out)


def _measure(
    folder: Path,
    size: MemorySize,
    queries: int,
    strategy: Strategy,
    hosts: Sequence[LimitedHost],
    master: str,
) -> Row:
    out = folder / strategy.value
    config = config_of(
        folder, out, size,
        **{"engine.master": master, "engine.machines": HOSTS, "engine.strategy": strategy},
        **{"engine.spark": EXECUTOR},
    )  # fmt: skip
    times = BatchTimes(time.perf_counter)
    faults: list[int] = []

    def on_step(step: str, number: int) -> None:
        times.on_step(step, number)
        if step == "intent" and len(times.steps) == WARM + 1:
            faults.extend(host.statistics()["pgmajfault"] for host in hosts)

    with Pipeline(config, on_step=on_step, on_batch=times.on_batch) as pipeline:
        pipeline.run()
        seconds = times.between("intent", "end")[WARM:]
        found = [
            {
                "resident_bytes": host.resident_bytes(),
                "major_faults": host.statistics()["pgmajfault"] - before,
                "rss_bytes": host.statistics()["rss"],
            }
            for host, before in zip(hosts, faults, strict=True)
        ]
    index = sum(path.stat().st_size for path in (out / "state" / SEGMENTS).iterdir())
    private = max(host["rss_bytes"] for host in found)
    measured = [commit.figures["stages"] for commit in times.commits[WARM:]]
    task_s = {
        name: float(np.median([m[name]["seconds"] for m in measured])) for name in measured[0]
    }
    return {
        "case": f"{queries:,} boxes", "system": strategy.value, "queries": queries,
        "index_bytes": index, "limit_bytes": size.limit_mb << 20,
        "fits": index + private <= size.limit_mb << 20,
        "matches": sum(commit.figures["matches"] for commit in times.commits),
        "points_per_s": size.batch_rows / float(np.median(seconds)),
        "p95_batch_s": float(np.percentile(seconds, 95)),
        "task_s": task_s,  # processor seconds of a batch in Python, by stage
        "resident_bytes": max(host["resident_bytes"] for host in found),
        "major_faults": max(host["major_faults"] for host in found),
        "hosts": found,
    }  # fmt: skip


def run(quick: bool) -> Measured:
    """Measure every strategy on every number of queries."""
    reason = reason_against()
    if reason is not None:
        return Measured([], {"skipped": reason}, {})
    size = QUICK if quick else FULL
    rows: list[Row] = []
    failed: list[str] = []
    for queries in size.queries:
        with tempfile.TemporaryDirectory(prefix="roost-memory-") as name:
            folder = Path(name)
            _apart(prepare, folder, size, queries)
            for strategy in STRATEGIES:
                try:
                    rows.append(_apart(measure, folder, size, queries, strategy))
                except Exception as error:  # a host that runs out of memory may end the run
                    reason = _reason(str(error))
                    rows.append({"case": f"{queries:,} boxes", "queries": queries,
                                 "system": strategy.value, "error": reason})  # fmt: skip
                    if strategy is not Strategy.REPLICATED:
                        failed.append(f"{strategy} with {queries:,} boxes: {reason}")
    summary = {**summary_of(rows), "failed": failed} if failed else summary_of(rows)
    lines: dict[str, Line] = {
        strategy.value: [(r["index_bytes"] / 1e6, r["points_per_s"]) for r in _of(rows, strategy)]
        for strategy in STRATEGIES
    }
    plot = Plot("", {"points per second over the size of the index (MB)": lines}, log=True)
    table = {
        "case": ("case", "s"), "system": ("system", "s"), "points/s": ("points_per_s", ",.0f"),
        "p95 (s)": ("p95_batch_s", ".2f"), "index": ("index_bytes", ",d"),
        "resident": ("resident_bytes", ",d"), "major faults": ("major_faults", ",d"),
    }  # fmt: skip
    return Measured(rows, summary, {"": plot}, table)


def _reason(text: str) -> str:
    """Return the first line that names an error of Python or a lost executor, or the first."""
    lines = text.splitlines() or [""]
    named = (line for line in lines if "Error:" in line or "ExecutorLostFailure" in line)
    return next(named, lines[0]).strip()


def _apart(call: Callable[..., Value], *args: object) -> Value:
    """Call a function in a process of its own: a driver's JVM serves one cluster."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_with_text, call, *args).result()


def _with_text(call: Callable[..., Value], *args: object) -> Value:
    """Call a function; errors of the JVM cannot be sent to another process, their text can."""
    try:
        return call(*args)
    except Exception as error:
        raise RuntimeError(str(error)) from None


def _of(rows: Sequence[Row], strategy: Strategy) -> list[Row]:
    return [row for row in rows if row["system"] == strategy.value and "error" not in row]


def summary_of(rows: Sequence[Row]) -> Row:
    """Return the worse of ``swarm`` and ``global`` against ``replicated``, by size of the index."""
    replicated = {row["queries"]: row for row in _of(rows, Strategy.REPLICATED)}
    placed = [row for strategy in PLACED for row in _of(rows, strategy)]
    ratios = [
        (row["queries"], replicated[row["queries"]]["fits"],
         row["points_per_s"] / replicated[row["queries"]]["points_per_s"])
        for row in placed if row["queries"] in replicated
    ]  # fmt: skip
    beyond = max((queries for queries, fits, _ in ratios if not fits), default=None)
    largest = max((row["queries"] for row in placed), default=None)
    shares = [r["resident_bytes"] / r["index_bytes"] for r in placed if r["queries"] == largest]
    return {
        "ratio_vs_replicated_beyond_memory": min(
            (ratio for queries, _, ratio in ratios if queries == beyond), default=None
        ),
        "ratio_vs_replicated_within_memory": min(
            (ratio for _, fits, ratio in ratios if fits), default=None
        ),
        "bytes_per_host_ratio": max(shares, default=None),
        "queries_beyond_memory": beyond,
    }
