"""The entry points of Spark's Python workers.

A worker retains only the state of imported modules from task to task. So this module holds the one
cache that tasks receive, and no other module of Roost holds state. It is imported by the daemon
that workers are forked from, and reached by name from the driver.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from roost.runtime.chain import Chain
from roost.runtime.part import SOURCE, Item, Parcel, run_part
from roost.stages.contract import Task
from roost.storage.cache import WorkerCache

CACHE = WorkerCache()
ROUTED = "part int, item binary"


def _executor() -> str:
    """Return a name of the executor: its host, and the daemon that forked this worker."""
    return f"{os.uname().nodename}:{os.getppid()}"


def _run(
    chain: Chain, tasks: Mapping[str, Task], level: int, part: int, items: Iterable[Item]
) -> Iterator[tuple[int, Item]]:
    return run_part(chain, tasks, level, part, items, CACHE, _executor())


def run_slices(
    chain: Chain, tasks: Mapping[str, Task], part: int, groups: Iterable[Any]
) -> Iterator[tuple[int, Item]]:
    """Run a part of the first level on groups of slices."""
    stage, machine = chain.parts(0)[part]
    return _run(chain, tasks, 0, part, (Parcel(stage, machine, SOURCE, g) for g in groups))


def run_items(
    chain: Chain, tasks: Mapping[str, Task], level: int, part: int, items: Iterable[Any]
) -> Iterator[tuple[int, Item]]:
    """Run a part of a later level on what was sent to it."""
    return _run(chain, tasks, level, part, (item for _, item in items))


def run_rows(
    chain: Chain, tasks: Mapping[str, Task], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run a part of the first level on the rows of a DataFrame."""
    part = _partition()
    stage, machine = chain.parts(0)[part]
    parcels = (Parcel(stage, machine, SOURCE, batch) for batch in batches)
    return _packed(_run(chain, tasks, 0, part, parcels))


def run_packed(
    chain: Chain, tasks: Mapping[str, Task], level: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run a part of a later level on the items of a DataFrame."""
    items = (pickle.loads(item.as_buffer()) for batch in batches for item in batch.column("item"))
    return _packed(_run(chain, tasks, level, _partition(), items))


def _packed(items: Iterator[tuple[int, Item]]) -> Iterator[pa.RecordBatch]:
    for part, item in items:
        columns = [pa.array([part], pa.int32()), pa.array([pickle.dumps(item, 5)], pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, ["part", "item"])


def _partition() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def run_call(call: Callable[[Any, WorkerCache], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Run a function on the items of a task."""
    return (call(item, CACHE) for item in items)
