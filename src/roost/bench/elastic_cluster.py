"""The parts of ``roost bench elastic`` with real executors, on a standalone cluster of this host.

*Overhead*: two drivers with their own executors, one of fixed size and one whose manager may choose
that size only. They process the same rows in turn. Processor seconds are those of the driver, its
JVM, its executors and their workers.

*Arrival*: a paced stream whose load rises above one executor and falls again, without and with a
spare. Times count from the end of the batch that brought the decision. The first task of an
executor counts in a batch whose layout has a machine for it, as soon as each executor has a task.

A driver is a process of its own: ``python -m roost.bench.elastic_cluster``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from roost import Dataflow, Pipeline, RunConfig
from roost.bench.common import Row
from roost.engine.executors import allocation_settings
from roost.engine.session import make_session
from roost.engine.standalone import Host, StandaloneCluster
from roost.model.elastic import ElasticRules
from roost.runtime.chain import Chain
from roost.runtime.group_rounds import GROUP_ROUNDS
from roost.runtime.records import Commit

HOST = Host(1, 700)
EXECUTOR = {"spark.executor.memory": "512m", "spark.executor.cores": "1"}
SIDE = 8.0
BOXES = [
    {"query_id": k, "x0": k % 6, "y0": k // 6, "x1": k % 6 + 2.5, "y1": k // 6 + 1.5}
    for k in range(24)
]
# Overhead.
SIZE, PAIRS = 2, 7
BATCH_ROWS, BATCHES, WARM_BATCHES = 100_000, 30, 6
ROUND_S = 2.0
# Arrival: seconds at a low, a high and a low rate, in points per second.
RATES = ((40, 8), (220, 30), (40, 26))
# So that the host, which is shared with the driver, is not the limit.
RULES = {"lower": 0.15, "target": 0.3, "upper": 0.4, "round": 3.0}
DELAYED_S = 1.0  # by which a batch takes longer than the median
WORK_S = 0.002  # of processor time for a point
KEYS, WINDOW = 2_000, 20
POLL_S = 0.05  # more often, the driver would need a core that executors start on


def run_cluster() -> tuple[list[Row], Row]:
    """Measure both parts; returns rows, and their part of the summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with StandaloneCluster([HOST] * (2 * SIZE), folder / "cluster") as cluster:
            costs = overhead(folder, cluster.url)
            cold = arrival(folder / "cold", cluster.url, 0)
            warm = arrival(folder / "warm", cluster.url, 1)
    return [costs, cold, warm], {
        "elastic_overhead": costs["overhead"],
        "first_task_s": cold["first_task_s"],
        "first_task_spare_s": warm["first_task_s"],
        "lost": cold["lost"] + warm["lost"],
        "doubled": cold["doubled"] + warm["doubled"],
    }


@contextmanager
def driver(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a driver process, which reads a command in each line; it ends with its input."""
    command = [sys.executable, "-m", "roost.bench.elastic_cluster", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            assert running.stdin is not None
            running.stdin.close()


def ask(running: subprocess.Popen[str], command: str) -> Any:
    """Send a command; returns the result."""
    assert running.stdin is not None and running.stdout is not None
    running.stdin.write(command + "\n")
    running.stdin.flush()
    return json.loads(running.stdout.readline())


# --------------------------------------------------------------------------- overhead


def overhead(folder: Path, master: str) -> Row:
    """Run both drivers in turn; the first pair warms them up."""
    pairs = []
    arguments = [str(folder), master]
    with driver("static", *arguments) as static, driver("elastic", *arguments) as elastic:
        for number in range(PAIRS + 1):
            order = [static, elastic] if number % 2 else [elastic, static]
            found = {one: float(ask(one, str(number))) for one in order}
            pairs.append((found[static], found[elastic]))
    pairs = pairs[1:]
    ratios = [mine / fixed for fixed, mine in pairs]
    return {
        "part": "overhead",
        "case": f"{SIZE} executors",
        "overhead": median(ratios) - 1.0,
        "overheads": [ratio - 1.0 for ratio in ratios],
        "static_s": median(fixed for fixed, _ in pairs),
        "elastic_s": median(mine for _, mine in pairs),
        "batch_rows": BATCH_ROWS,
        "batches": BATCHES - WARM_BATCHES,
        "round_s": ROUND_S,
    }


def serve_overhead(kind: str, folder: Path, master: str) -> None:
    """Run the rows for each line of input; print processor seconds per batch."""
    settings = {**EXECUTOR, "spark.cores.max": str(SIZE)}
    rules: Row = {}
    if kind == "elastic":
        rules = {"min": SIZE, "max": SIZE, "batch_seconds": 60.0, "round": ROUND_S}
        settings |= allocation_settings(ElasticRules(min=SIZE, max=SIZE))
    spark = make_session(master, settings)
    app = spark.sparkContext.applicationId
    for line in sys.stdin:
        config = RunConfig(
            points={"path": f"generate:rows={BATCHES * BATCH_ROWS},seed=5"},
            engine={
                "available_now": True,
                "batch_rows": BATCH_ROWS,
                "strategy": "global",
                **({} if rules else {"machines": SIZE}),
            },
            elastic=rules,
            out={"dir": folder / kind / line.strip(), "sink": "count"},
        )
        used: dict[int, float] = {}

        def note(commit: Commit, used: dict[int, float] = used) -> None:
            if commit.batch_id + 1 in (WARM_BATCHES, BATCHES):
                used[commit.batch_id + 1] = processor_seconds(app)

        with Pipeline(config, spark=spark, on_batch=note) as pipeline:
            boxes = [{**box, "op": "register", "user_id": "a"} for box in on_earth(BOXES)]
            pipeline.log.append(pa.Table.from_pylist(boxes))
            pipeline.run()
        spent = (used[BATCHES] - used[WARM_BATCHES]) / (BATCHES - WARM_BATCHES)
        print(json.dumps(spent), flush=True)
    spark.stop()


def on_earth(boxes: Sequence[Row]) -> list[Row]:
    """Return boxes in degrees."""
    scale = {"x": (360.0 / SIDE, -180.0), "y": (180.0 / SIDE, -90.0)}
    return [
        {
            name: value if name == "query_id" else value * scale[name[0]][0] + scale[name[0]][1]
            for name, value in box.items()
        }
        for box in boxes
    ]


def processor_seconds(app: str) -> float:
    """Return the processor seconds of this driver and of its executors, with all children."""
    mine = psutil.Process()
    found = {mine, *mine.children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if app in process.cmdline():
                found |= {process, *process.children(recursive=True)}
    seconds = 0.0
    for process in found:
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


# --------------------------------------------------------------------------- arrival


def arrival(folder: Path, master: str, spares: int) -> Row:
    """Let the load rise and fall; returns the times of an executor, and what was lost."""
    folder.mkdir()
    rows = write_points(folder)
    with driver("arrival", str(folder), master, str(spares)) as running:
        found = ask(running, "run")
    return {
        "part": "executors",
        "case": "with a spare" if spares else "without a spare",
        **found,
        **compared(folder, rows),
    }


def write_points(folder: Path) -> pa.Table:
    """Write the stream."""
    rates = [rate for rate, seconds in RATES for _ in range(seconds)]
    times = np.repeat(np.arange(len(rates)), rates)
    random = np.random.default_rng(4)
    xy = random.uniform(0, SIDE, (times.size, 2))
    ids = np.arange(times.size)
    table = pa.table({"id": ids, "x": xy[:, 0], "y": xy[:, 1], "event_time": times})
    pq.write_table(table, folder / "points.parquet")
    return table


def work(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Use as much processor time for each row as a costly function would."""
    until = time.process_time() + WORK_S * rows.num_rows
    while time.process_time() < until:
        pass
    ids = rows["id"].to_numpy()
    return pa.record_batch({"id": rows["id"], "k": pa.array(ids * 7919 % KEYS)})


def work_flow() -> Dataflow:
    """Return the dataflow of the stream."""
    flow = Dataflow("work")
    schema = pa.schema({"id": pa.int64(), "k": pa.int64()})
    rows = flow.points().map(work, schema=schema, name="work")
    sums = rows.aggregate({"n": "count", "s": "sum(id)"}, by="k", size=WINDOW, name="totals")
    sums.sink("sums")
    return flow


class Timeline:
    """Notes when an executor that arrives, or leaves, reaches each state."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.up: dict[str, float] = {}
        self.down: dict[str, float] = {}
        self.commits: list[Commit] = []
        self._machines = 1  # of the batch that runs, as many as executors of the layout
        self._ended = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)

    def start(self) -> None:
        """Note what executors do; the pipeline has begun."""
        executor = self._pipeline.executor
        run = executor.run

        def noting(inputs: Any, chain: Chain, *more: Any) -> Any:
            (matching,) = (node for node in chain.nodes if node.name == "matching")
            self._machines = len(matching.machines)
            return run(inputs, chain, *more)

        executor.run = noting  # type: ignore[method-assign, assignment]
        self._poller.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._poller.join()

    def on_batch(self, commit: Commit) -> None:
        """Note the first batch that read the state of buckets that moved."""
        self.commits.append(commit)
        moved = commit.figures.get("dataflow", {}).get("moved", {})
        nbytes = sum(one.get("read_bytes", 0) for one in moved.values())
        if nbytes and "decision" in self.up and "buckets" not in self.up:
            self.up |= {"buckets": time.monotonic(), "bucket_bytes": nbytes}

    def on_step(self, step: str, number: int) -> None:
        """Note decisions, at the end of their batch."""
        if step != "end":
            return
        if not self._poller.is_alive() and not self._ended.is_set():
            self.start()
        last = self._pipeline.store.last(GROUP_ROUNDS)
        decision = "" if last is None else last[1]["decision"]
        if decision == "Provision":
            self.up.setdefault("decision", time.monotonic())
        elif decision == "Release" and "decision" in self.up:
            self.down.setdefault("decision", time.monotonic())

    def _poll(self) -> None:
        executor = self._pipeline.executor
        allocator = self._pipeline._allocator
        assert allocator is not None
        known = set(executor.registered())
        tasks = executor.context._jsc.sc().taskScheduler()
        while not self._ended.wait(POLL_S):
            now, names = time.monotonic(), set(executor.registered())
            if self._machines > 1 and "decision" in self.up and "first_task" not in self.up:
                counts = tasks.runningTasksByExecutors().values().mkString(" ").split()
                if sum(count != "0" for count in counts) >= self._machines:
                    self.up["first_task"] = now
            if "decision" in self.up and names - known:
                self.up.setdefault("registered", now)
                if any(allocator.is_warm(name) for name in names - known):
                    self.up.setdefault("warm", now)
            elif "decision" not in self.up:
                known = names
            if executor.leaving:
                self.down.setdefault("decommissioned", now)
            if "decommissioned" in self.down and not executor.leaving & names:
                self.down.setdefault("gone", now)

    def row(self) -> Row:
        """Return seconds from the decisions."""
        found: Row = {"bucket_bytes": self.up.pop("bucket_bytes", None)}
        for name in ("registered", "warm", "first_task", "buckets"):
            found[f"{name}_s"] = _since(self.up, name)
        for name in ("decommissioned", "gone"):
            found[f"{name}_s"] = _since(self.down, name)
        seconds = [commit.figures["seconds"] for commit in self.commits]
        usual = median(seconds)
        found["batches"], found["batch_s"], found["batch_max_s"] = len(seconds), usual, max(seconds)
        found["batches_delayed"] = sum(one > usual + DELAYED_S for one in seconds)
        return found


def _since(times: dict[str, float], name: str) -> float | None:
    return times[name] - times["decision"] if name in times else None


def serve_arrival(folder: Path, master: str, spares: int) -> None:
    """Run the stream, and print the times."""
    sys.stdin.readline()
    config = RunConfig(
        points={"path": str(folder / "points.parquet"), "speed": 1.0},
        space={"bounds": (0, 0, SIDE, SIDE), "grid": (8, 8), "coordinates": "plane"},
        engine={
            "master": master,
            "strategy": "global",
            "spark": {**EXECUTOR, "spark.cores.max": "4"},
        },
        queries={"id_type": "int"},
        elastic={**RULES, "max": 2, "spares": spares},
        out={"dir": folder / "out"},
    )
    hooks: Row = {}
    pipeline = Pipeline(
        config,
        flow=work_flow(),
        on_batch=lambda commit: hooks["timeline"].on_batch(commit),
        on_step=lambda step, number: hooks["timeline"].on_step(step, number),
    )
    timeline = hooks["timeline"] = Timeline(pipeline)
    boxes = [{"op": "register", "user_id": "a", **box} for box in BOXES]
    with pipeline:
        pipeline.log.append(pa.Table.from_pylist(boxes))
        report = pipeline.run()
        timeline.stop()
    executors = report["executors"]
    more = {"decisions": executors["decisions"], "executor_hours": executors["hours"]}
    print(json.dumps({**timeline.row(), **more}), flush=True)


def compared(folder: Path, points: pa.Table) -> Row:
    """Count results that are missing, and those that are there twice or should not be."""
    x, y, ids = (points[name].to_numpy() for name in ("x", "y", "id"))
    expected: Counter[tuple[int, ...]] = Counter()
    for box in BOXES:
        inside = (x >= box["x0"]) & (x <= box["x1"]) & (y >= box["y0"]) & (y <= box["y1"])
        expected.update((int(box["query_id"]), one) for one in ids[inside].tolist())
    windows = points["event_time"].to_numpy() // WINDOW * WINDOW
    groups, at = np.unique(np.stack([windows, ids * 7919 % KEYS]), axis=1, return_inverse=True)
    counts, sums = np.bincount(at.ravel()), np.bincount(at.ravel(), ids).astype(np.int64)
    rows = zip(*groups.tolist(), counts.tolist(), sums.tolist(), strict=True)
    expected.update(tuple(row) for row in rows)
    found = Counter(
        tuple(int(row[name]) for name in names)
        for kind, names in (
            ("matches", ("query_id", "point_id")),
            ("sums", ("event_time", "k", "n", "s")),
        )
        for path in sorted((folder / "out" / kind).glob("*.parquet"))
        for row in pq.ParquetFile(path).read(columns=list(names)).to_pylist()
    )
    return {
        "lost": (expected - found).total(),
        "doubled": (found - expected).total(),
        "results": expected.total(),
    }


def main() -> None:
    """Be a driver."""
    kind, folder, master, *more = sys.argv[1:]
    if kind == "arrival":
        serve_arrival(Path(folder), master, int(more[0]))
    else:
        serve_overhead(kind, Path(folder), master)


if __name__ == "__main__":
    main()
