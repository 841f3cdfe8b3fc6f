"""A driver process that kills itself, or an executor, at a chosen moment.

``python crash_driver.py SPEC.json...`` continues the pipeline of each :class:`Spec`. Requests
arrive while it runs, each block once for all processes: after a batch is committed, and between the
intent and the replay of the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from roost import Pipeline, RunConfig
from roost.engine.session import make_session
from roost.model.choices import Strategy
from roost.model.space import Coordinates, Rect
from roost.runtime import records
from roost.runtime.records import Commit

STAGED = "staged"
POLL_S = 0.002

Blocks = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Spec:
    """What to run and when to kill the process.

    ``kill`` is (batch, step), the step being one of those of a batch, ``run+N`` for N
    milliseconds into the tasks, or ``run+staged`` for the moment its first file appears.
    ``requests`` has blocks of requests: ``start``, ``after-K`` (logged after the commit of batch
    K) and ``during-K`` (logged after its intent, before the log is applied).
    ``kill_executors`` lists batches in which a busy executor is killed.
    """

    points: str
    out: str
    strategy: str
    machines: int
    batch_rows: int
    bounds: list[float]
    requests: Blocks = field(default_factory=dict)
    streaming: bool = False
    kill: tuple[int, str] | None = None
    master: str = "local[2]"
    kill_executors: tuple[int, ...] = ()
    flow: str | None = None  # FILE.py:NAME
    round: float = 15.0
    cache: str | None = None
    exchange: str = "always"  # tests of a plan need it, although the queries would fit into memory

    def to_file(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


def read_spec(path: str) -> Spec:
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    return Spec(**{**data, "kill": data["kill"] and tuple(data["kill"])})


def config_of(spec: Spec) -> RunConfig:
    return RunConfig(
        points={"path": spec.points},
        space={"bounds": Rect(*spec.bounds), "grid": (20, 10), "coordinates": Coordinates.PLANE},
        engine={
            "strategy": Strategy(spec.strategy),
            "machines": spec.machines,
            "batch_rows": spec.batch_rows,
            "available_now": True,
            "cache": spec.cache,
        },
        queries={"id_type": "text"},
        balance={"round": spec.round, "exchange": spec.exchange},
        dataflow={"flow": spec.flow, "machines": 3},
        out={"dir": Path(spec.out)},
    )


def block_of(requests: list[dict[str, Any]]) -> pa.Table:
    names = dict.fromkeys(name for request in requests for name in request)
    return pa.table({name: [request.get(name) for request in requests] for name in names})


class Run:
    """One process of the driver."""

    def __init__(self, spec: Spec, kill: Callable[[], None]) -> None:
        self.spec = spec
        self._kill = kill
        self.pipeline: Pipeline | None = None
        self.killed_executors: list[str] = []
        self.steps: list[tuple[int, str]] = []

    def log(self, name: str) -> None:
        """Log a block of requests, unless an earlier process did."""
        assert self.pipeline is not None
        if name in self.spec.requests:
            self.pipeline.log.append(block_of(self.spec.requests[name]), tag=name)

    def on_batch(self, commit: Commit) -> None:
        self.log(f"after-{commit.batch_id}")

    def on_step(self, step: str, batch_id: int) -> None:
        self.steps.append((batch_id, step))
        if step == "apply":
            self.log(f"during-{batch_id}")
        if step == "run" and batch_id in self.spec.kill_executors:
            threading.Thread(target=self._kill_executor, daemon=True).start()
        if self.spec.kill is None or self.spec.kill[0] != batch_id:
            return
        chosen, _, moment = self.spec.kill[1].partition("+")
        if chosen != step:
            return
        if not moment:
            self._kill()
        elif moment == STAGED:
            threading.Thread(target=self._kill_when_staged, daemon=True).start()
        else:
            threading.Timer(int(moment) / 1_000, self._kill).start()

    def _kill_when_staged(self) -> None:
        staging = Path(self.spec.out) / "matches" / "_staging"
        while not any(staging.iterdir()):
            time.sleep(POLL_S)
        self._kill()

    def _kill_executor(self) -> None:
        """Kill an executor that is running a task."""
        assert self.pipeline is not None
        spark, pids = self.pipeline.spark, executor_pids()
        while True:
            for executor in executors(spark):
                if executor.activeTasks() > 0 and executor.id() in pids:
                    os.kill(pids[executor.id()], signal.SIGKILL)
                    self.killed_executors.append(executor.id())
                    return

    def go(self, spark: SparkSession) -> dict[str, Any]:
        config = config_of(self.spec)
        with Pipeline(
            config, spark=spark, on_batch=self.on_batch, on_step=self.on_step
        ) as pipeline:
            self.pipeline = pipeline
            self.log("start")
            # Requests that a process did not log because it was killed after the commit.
            for commit in records.commits(pipeline.store):
                self.on_batch(commit)
            if not self.spec.streaming:
                return pipeline.run()
            query = pipeline.start(stream_of(spark, self.spec))
            query.awaitTermination()
            return pipeline.report()


def stream_of(spark: SparkSession, spec: Spec) -> DataFrame:
    """Stream a folder with Spark's file source, one file per batch."""
    schema = spark.read.parquet(spec.points).schema
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(spec.points)


def executors(spark: SparkSession) -> list[Any]:
    """Return Spark's summaries of its executors."""
    found = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return [found.apply(place) for place in range(found.size())]


def lost_tasks(spark: SparkSession) -> int:
    """Return the number of repeated tasks and stages."""
    tracker = spark.sparkContext.statusTracker()
    jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(None)))
    stages = [tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds]
    return sum(stage.numFailedTasks + stage.currentAttemptId for stage in stages if stage)


def executor_pids() -> dict[str, int]:
    """Return the process ids of this driver's executors, by executor id."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        words = _words(process)
        if any("CoarseGrainedExecutorBackend" in word for word in words):
            found[words[words.index("--executor-id") + 1]] = process.pid
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def tagged_processes(name: str, value: str) -> Iterator[psutil.Process]:
    """Return processes that inherited an environment variable, orphans included."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                yield process
        except psutil.Error:
            continue


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    specs = [read_spec(path) for path in sys.argv[1:]]
    folder = Path(specs[0].out).parent / "spark"
    settings = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # Report the active executor without delay.
        "spark.ui.liveUpdate.period": "0",
    }
    spark = make_session(specs[0].master, settings)
    for spec in specs:
        run = Run(spec, kill_myself)
        report = run.go(spark)
        killed, lost = run.killed_executors, lost_tasks(spark)
        print(json.dumps({"report": report, "killed": killed, "lost_tasks": lost}))
    spark.stop()


if __name__ == "__main__":
    main()
