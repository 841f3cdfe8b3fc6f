"""Python workers: what they load, and that tasks do not outlive the run that started them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
from pyspark.sql import SparkSession

from roost.engine import worker
from roost.engine.executor import SparkExecutor
from roost.model.space import Coordinates, Rect, Space
from roost.queries.versions import SegmentRef
from roost.stages.matching import MapSegments
from roost.storage.cache import WorkerCache
from roost.storage.files import Files

pytestmark = pytest.mark.spark

TASK_S = 6.0
"""Longer than Spark waits for a cancelled Python worker (``spark.python.task.killTimeout``)."""


class Interrupted(BaseException):
    """Raised in the driver while it waits for tasks, as Ctrl-C would be."""


def write_late(folder: Path, name: str, cache: WorkerCache) -> None:
    """Write a file at the start of a task, and another at its end."""
    (folder / f"{name}-started").touch()
    time.sleep(TASK_S)
    (folder / f"{name}-written").touch()


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def executor(spark: SparkSession) -> Iterator[SparkExecutor]:
    executor = SparkExecutor(spark.sparkContext)
    yield executor
    executor.close()


def test_tasks_of_an_abandoned_run_write_no_file(executor: SparkExecutor, tmp_path: Path) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        if (tmp_path / "batch-started").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted

    background = executor.submit(partial(write_late, tmp_path), ["background"])
    wait_for(tmp_path / "background-started")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(Interrupted):
            executor.map(partial(write_late, tmp_path), ["batch"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    executor.close()
    assert background.exception(timeout=60) is not None
    time.sleep(TASK_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "background-started",
        "batch-started",
    ]


def archives(_: int) -> list[str]:
    """Return the archives of Spark on a worker's module search path."""
    import py4j
    import pyspark

    files = [pyspark.__file__, py4j.__file__]
    return [one for one in [*sys.path, *files] if "pyspark.zip" in one or "py4j-" in one]


def test_workers_load_pyspark_from_files(spark: SparkSession) -> None:
    """Archives have no byte code, so each process would compile them again."""
    assert spark.sparkContext.parallelize([0], 1).map(archives).collect() == [[]]


def test_a_worker_is_prepared_though_files_were_deleted_meanwhile(tmp_path: Path) -> None:
    space = Space(Rect(0.0, 0.0, 1.0, 1.0), coordinates=Coordinates.PLANE)
    gone = MapSegments(Files(str(tmp_path)), (SegmentRef("gone.seg", None, 1),), space, sparse=True)
    assert list(worker.prepare([gone], [0])) == [worker.find_executor()]


def direct_bytes(spark: SparkSession) -> int:
    """Return what the JVM's buffers outside the heap take."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    kind = jvm.java.lang.Class.forName("java.lang.management.BufferPoolMXBean")
    pools = jvm.java.lang.management.ManagementFactory.getPlatformMXBeans(kind)
    return sum(pool.getMemoryUsed() for pool in pools if pool.getName() == "direct")


def test_the_jvm_keeps_no_buffers_of_large_blocks(spark: SparkSession) -> None:
    before = direct_bytes(spark)
    blocks = spark.sparkContext.parallelize([0, 1], 2).map(lambda number: (number, bytes(32 << 20)))
    # The second level receives both blocks from the JVM.
    assert blocks.partitionBy(2).map(lambda pair: len(pair[1])).collect() == [32 << 20] * 2
    assert direct_bytes(spark) - before < 8 << 20
