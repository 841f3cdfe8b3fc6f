"""The entry points of Spark's Python workers.

A worker retains only the state of imported modules from task to task. So this module holds the one
cache that tasks receive, and no other module of Roost holds state. It is imported by the daemon
that workers are forked from, and reached by name from the driver.

The functions that run a part of a level return its items as pairs of frames: the number of the next
part and the pickled item.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from roost.errors import StateError
from roost.runtime.chain import Chain
from roost.runtime.part import SOURCE, Item, Parcel, run_part
from roost.stages.contract import Task
from roost.storage.cache import WorkerCache
from roost.storage.memory import file_memory

ROUTED = "part long, item binary"


def find_executor() -> str:
    """Return Spark's name of the executor that started this process; empty if it is unknown.

    Spark does not tell workers. An executor's JVM starts the daemon, which forks the workers, and
    has its name on the command line. The JVM of a local master has none.
    """
    process = os.getpid()
    with contextlib.suppress(OSError, ValueError):  # only Linux has /proc
        for _ in range(2):
            status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
            process = int(status.rpartition(")")[2].split()[1])
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if b"--executor-id" in words:
                return words[words.index(b"--executor-id") + 1].decode()
    return ""


def local_folder() -> Path | None:
    """Return a folder of the executor, which Spark deletes with it; a local master has none."""
    if not find_executor():
        return None
    return Path(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])


CACHE = WorkerCache(local_folder, file_memory)


def prepare(calls: Sequence[Callable[[WorkerCache], None]], items: Iterable[Any]) -> Iterator[str]:
    """Prepare the worker for its first task; returns the name of its executor."""
    for _ in items:
        pass
    for call in calls:
        # What is mapped here may have been deleted meanwhile; the batch opens what it needs.
        with contextlib.suppress(OSError, StateError):
            call(CACHE)
    yield CACHE.get("executor", os.getpid(), find_executor)


def _run(
    chain: Chain, tasks: Mapping[str, Task], level: int, part: int, items: Iterable[Item]
) -> Iterator[tuple[int, Item]]:
    # Workers collect garbage after every task; what tasks imported stays, as in the daemon.
    CACHE.get("frozen", len(sys.modules), gc.freeze)
    executor = CACHE.get("executor", os.getpid(), find_executor)
    return run_part(chain, tasks, level, part, items, CACHE, executor)


def _read(
    chain: Chain, tasks: Mapping[str, Task], part: int, inputs: Iterable[Any]
) -> Iterator[tuple[int, Item]]:
    stage, machine = chain.parts[0][part]
    parcels = (Parcel(stage, machine, SOURCE, block) for block in inputs)
    return _run(chain, tasks, 0, part, parcels)


def _framed(items: Iterator[tuple[int, Item]]) -> Iterator[bytes]:
    for target, item in items:
        yield struct.pack("!q", target)
        yield pickle.dumps(item, 5)


def run_slices(
    chain: Chain, tasks: Mapping[str, Task], parts: Sequence[int], task: int, groups: Iterable[Any]
) -> Iterator[bytes]:
    """Run one of some parts of the first level on groups of slices."""
    return _framed(_read(chain, tasks, parts[task], groups))


def run_rows(
    chain: Chain,
    tasks: Mapping[str, Task],
    parts: Sequence[int],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Run one of some parts of the first level on the rows of a DataFrame."""
    context = TaskContext.get()
    assert context is not None
    # Also of a union, because the DataFrame's partitions are the first ones.
    for target, item in _read(chain, tasks, parts[context.partitionId()], batches):
        columns = [pa.array([target], pa.int64()), pa.array([pickle.dumps(item, 5)], pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, ["part", "item"])


def run_items(
    chain: Chain, tasks: Mapping[str, Task], level: int, part: int, items: Iterable[Item]
) -> Iterator[bytes]:
    """Run a part of a later level on the items sent to it."""
    return _framed(_run(chain, tasks, level, part, items))


def read_last(
    chain: Chain, tasks: Mapping[str, Task], part: int, groups: Iterable[Any]
) -> Iterator[Any]:
    """Run a part of the only level on groups of slices; returns its reports."""
    return (item for _, item in _read(chain, tasks, part, groups))


def run_last(
    chain: Chain, tasks: Mapping[str, Task], level: int, part: int, items: Iterable[Item]
) -> Iterator[Any]:
    """Run a part of the last level on the items sent to it; returns reports."""
    return (item for _, item in _run(chain, tasks, level, part, items))


def run_call(call: Callable[[Any, WorkerCache], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Run a function on the items of a task."""
    return (call(item, CACHE) for item in items)
