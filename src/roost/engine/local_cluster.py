"""Clusters of executor processes on this host: their size, and the times of their tasks.

Spark's master ``local-cluster[EXECUTORS,CORES,MB]`` starts such a cluster. Requests for executors
are those of Spark's own allocation, so they work on a standalone cluster, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from roost.errors import RoostError

POLL_S = 0.1
DEADLINE_S = 60.0


@dataclass(frozen=True)
class TaskTime:
    """One task: its job, its stage and its executor, with seconds of the clock and the JVM."""

    job: int
    stage: int
    executor: str
    run_s: float  # with the time of the Python worker
    cpu_s: float  # of the JVM alone


def spark_home(folder: Path) -> Path:
    """Return a copy of Spark's home, made of links, in which workers of a local cluster write."""
    folder.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (folder / path.name).symlink_to(path)
    return folder


def executors(spark: SparkSession) -> list[str]:
    """Return the registered executors, without the driver."""
    found = _status(spark).executorList(True)
    return [found.apply(k).id() for k in range(found.size()) if found.apply(k).id() != "driver"]


def resize(spark: SparkSession, total: int) -> None:
    """Request or remove executors, and wait until there are ``total``."""
    context: Any = spark.sparkContext
    scala, jvm = context._jsc.sc(), context._jvm.org.apache.spark.api.python.PythonUtils
    surplus = executors(spark)[total:]
    if surplus:
        scala.killExecutors(jvm.toSeq(surplus))
    # Removing lowers the target, too, but by what was registered at that time.
    scala.requestTotalExecutors(total, 0, jvm.toScalaMap({}))
    deadline = time.monotonic() + DEADLINE_S
    while len(executors(spark)) != total:
        if time.monotonic() > deadline:
            raise RoostError(f"the cluster has {len(executors(spark))} executors, not {total}")
        time.sleep(POLL_S)


def task_times(spark: SparkSession, since: float) -> list[TaskTime]:
    """Return the tasks of the jobs that were submitted at or after a time (seconds since 1970)."""
    status, times = _status(spark), []
    jobs = status.jobsList(None)
    for job in (jobs.apply(k) for k in range(jobs.size())):
        if job.submissionTime().get().getTime() < since * 1e3:
            continue
        stages = job.stageIds()
        for stage in (stages.apply(k) for k in range(stages.size())):
            tasks = status.taskList(stage, 0, 1 << 20)
            for task in (tasks.apply(k) for k in range(tasks.size())):
                found = task.taskMetrics().get()
                run_s, cpu_s = found.executorRunTime() / 1e3, found.executorCpuTime() / 1e9
                times.append(TaskTime(job.jobId(), stage, task.executorId(), run_s, cpu_s))
    return times


def _status(spark: SparkSession) -> Any:
    context: Any = spark.sparkContext
    return context._jsc.sc().statusStore()
