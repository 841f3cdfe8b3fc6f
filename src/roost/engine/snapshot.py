"""Snapshot queries: ad-hoc queries on the window, run as Spark jobs or, if small, in this process.

A query becomes scans of segment files (:mod:`roost.window.snapshot`), which are distributed over a
few tasks, and the tasks' results are merged. A Spark task costs tens of milliseconds, many times
the scan of a few zones of mapped files, so a query of few points runs in the calling process.

A lease pins the files of the queried batch, so queries may run beside the stream, in other threads
or processes. The guard refuses queries of blocked users. An admitted one is appended to the command
log, and the run counts it with its next batch.

Large results do not pass through the driver: tasks write them to files in the state directory,
which the DataFrame reads and :meth:`Snapshots.close` deletes.
"""

from __future__ import annotations

import base64
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import RDD, TaskContext
from pyspark.sql import DataFrame, SparkSession

from roost.engine.worker import CACHE
from roost.errors import StateError
from roost.queries.admission import Rules
from roost.queries.guard_state import GuardReader
from roost.queries.rules import rules_of
from roost.queries.snapshots import check_snapshot
from roost.stages.joins import deal
from roost.storage.agreement import agreed
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.private import private_file, private_folder
from roost.storage.store import Store
from roost.window import State
from roost.window.snapshot import (
    Columns,
    SegmentScan,
    SnapshotQuery,
    add_batch,
    free_name,
    merge_results,
    plan_scans,
    run_scans,
)
from roost.window.view import WindowFiles, WindowView, lease_view, window_files

POINTS_PER_TASK = 500_000
POINTS_HERE = 200_000
RESULT_BYTES_MAX = 1 << 20  # of one task; a larger result is written to a file
PROPERTY = "roost.snapshot"
RESULTS_KEPT_S = 86_400.0  # of processes that did not close
LARGE_KEPT = 16  # large results of DataFrames
ROW_NUMBER = "point_id"  # column of identifiers if the source has none


@dataclass(frozen=True)
class SnapshotResult:
    """Points, or one row of aggregates, of the window after batch ``batch_id``.

    Large tables are memory-mapped.
    """

    batch_id: int
    table: pa.Table


@dataclass(frozen=True)
class _Job:
    """A snapshot query with what its tasks need; ``groups`` has the scans of each task."""

    query: SnapshotQuery
    columns: Columns
    batch_id: int
    folder: str
    inline_max: int
    window: Files
    retained: frozenset[int]
    for_spark: bool
    groups: tuple[tuple[SegmentScan, ...], ...]

    def run(self, task: int, cache: WorkerCache) -> State | pa.Table | str:
        """Return the result of a task, or the path of its file."""
        files = WindowFiles(self.window, cache)
        files.retain(self.retained)
        result = run_scans(self.query, self.columns, self.groups[task], files)
        if isinstance(result, State) or self.query.nearest is not None:
            return result
        return self._write(result) if result.nbytes > self.inline_max else result

    def _write(self, result: pa.Table) -> str:
        folder = Path(self.folder)
        private_folder(folder.parent)
        private_folder(folder)
        table = add_batch(result, self.columns, self.batch_id)
        if self.for_spark:  # Spark does not read Arrow files
            path = private_file(folder / f"{uuid.uuid4().hex}.parquet")
            # The file is read once: a dictionary costs more than it saves.
            pq.write_table(_spark_types(table), path, compression="lz4", use_dictionary=False)
            return str(path)
        path = private_file(folder / f"{uuid.uuid4().hex}.arrow")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return str(path)


class Snapshots:
    """Runs snapshot queries on the window of a state directory; threads may share it.

    The stream may run in another process. Queries that are likely to read fewer than
    ``points_here`` points run without a job.
    """

    def __init__(self, folder: Path, spark: SparkSession, points_here: int = POINTS_HERE) -> None:
        if not (folder / "state.db").exists():
            raise StateError(f"{folder} is not a state directory: it has no state.db")
        self._spark = spark
        self._store = Store(folder, durable=False)
        self._guard = GuardReader(self._store)
        self._points_here = points_here
        self._cache = WorkerCache()
        self._lock = threading.Lock()
        self._large: list[list[str]] = []
        self._cores = spark.sparkContext.defaultParallelism
        self._jobs: dict[int, RDD[State | pa.Table | str]] = {}
        self._known: tuple[Rules, Columns] | None = None
        results = self._store.folder / "answers"
        self._results = results / uuid.uuid4().hex
        for path in results.iterdir() if results.exists() else ():
            if path.stat().st_mtime < time.time() - RESULTS_KEPT_S:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Close the state directory and delete large results."""
        self._store.close()
        shutil.rmtree(self._results, ignore_errors=True)

    def run(self, query: SnapshotQuery) -> SnapshotResult:
        """Query the window of the newest batch.

        Raises :class:`RequestError` for an invalid query or a blocked user, :class:`ConfigError`
        for an aggregate that does not fit, and :class:`StateError` if there is no window.
        """
        batch_id, small, files = self._run(query, for_spark=False)
        large = [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in files]
        for path in files:
            Path(path).unlink()  # the mapping keeps the data
        return SnapshotResult(batch_id, pa.concat_tables([small, *large]))

    def frame(self, query: SnapshotQuery) -> DataFrame:
        """Query the window of the newest batch; returns a DataFrame.

        The column ``at_batch`` and its metadata hold the number of the batch. Only the newest large
        results can still be read.
        """
        batch_id, small, files = self._run(query, for_spark=True)
        frame = self._spark.createDataFrame(_spark_types(small))
        if files:
            frame = frame.union(self._spark.read.parquet(*files))
            self._delete_old(files)
        return frame.withMetadata(small.column_names[0], {"batch_id": batch_id})

    def _run(self, query: SnapshotQuery, *, for_spark: bool) -> tuple[int, pa.Table, list[str]]:
        """Return the batch, the merged small results and the files of the large ones."""
        with self._lock:
            self._guard.reject_blocked([query.user_id])
        with self._pinned() as view:
            batch_id = view.batch_id
            if batch_id is None:
                raise StateError(f"the window in {self._store.folder} has no batch yet")
            with self._lock:
                rules, columns = self._schema(view)
            check_snapshot(query, rules)
            with self._lock:
                self._guard.count_snapshot(query.user_id)
            window = window_files(self._store)
            scans = plan_scans(view, WindowFiles(window, self._cache), rules.space, query)
            points = sum(scan.likely for scan in scans)
            tasks = min(self._cores, 1 + points // POINTS_PER_TASK)
            job = _Job(
                query,
                columns,
                batch_id,
                str(self._results),
                RESULT_BYTES_MAX,
                window,
                view.batch_ids,
                for_spark,
                tuple(map(tuple, deal(scans, tasks, lambda scan: scan.likely))),
            )
            results = self._run_job(job, points)
        small = [result for result in results if not isinstance(result, str)]
        large = [result for result in results if isinstance(result, str)]
        return batch_id, merge_results(query, columns, small, batch_id), large

    @contextmanager
    def _pinned(self) -> Iterator[WindowView]:
        """Pin the window; the lock serialises the use of the store's connection."""
        with self._lock:
            pin, view = lease_view(self._store)
        try:
            yield view
        finally:
            with self._lock:
                self._store.leases.release(pin)

    def _delete_old(self, files: list[str]) -> None:
        """Delete the oldest large results, which otherwise fill the disk."""
        with self._lock:
            self._large.append(files)
            old = self._large[:-LARGE_KEPT]
            self._large = self._large[-LARGE_KEPT:]
        for path in (path for paths in old for path in paths):
            Path(path).unlink(missing_ok=True)

    def _schema(self, view: WindowView) -> tuple[Rules, Columns]:
        if self._known is None:
            meta = agreed(self._store)
            assert meta is not None, "a window without settings"
            x, y, time, point_id = meta["points"]
            rules = replace(rules_of(self._store), attributes=view.attributes)
            names = (x, y, time, point_id or free_name(ROW_NUMBER, view.attributes.names))
            types = (rules.point_id_type, rules.time_type)
            self._known = rules, Columns(*names, *types, view.attributes)
        return self._known

    def _run_job(self, job: _Job, points: int) -> list[State | pa.Table | str]:
        tasks = len(job.groups)
        if not tasks or points < self._points_here:
            return [job.run(task, self._cache) for task in range(tasks)]
        context = self._spark.sparkContext
        if tasks not in self._jobs:
            numbers = context.parallelize(range(tasks), tasks)
            self._jobs[tasks] = numbers.mapPartitionsWithIndex(_run_task)
        context.setLocalProperty(PROPERTY, base64.b64encode(pickle.dumps(job)).decode())
        try:
            return self._jobs[tasks].collect()
        finally:
            context.setLocalProperty(PROPERTY, "")


def _run_task(task: int, nothing: Iterable[int]) -> Iterator[State | pa.Table | str]:
    """Run the job in the task's properties.

    A job in the function's closure would need a new RDD, which costs as much as a small query.
    """
    context = TaskContext.get()
    assert context is not None
    text = context.getLocalProperty(PROPERTY)
    assert text is not None
    job: _Job = pickle.loads(base64.b64decode(text))
    yield job.run(task, CACHE)


_SPARK_TYPES = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}


def _spark_types(table: pa.Table) -> pa.Table:
    """Cast columns of types that Spark lacks to the next larger type that it has."""
    fields = []
    for field in table.schema:
        kind = _SPARK_TYPES.get(field.type, field.type)
        if pa.types.is_timestamp(kind):
            kind = pa.timestamp("us", kind.tz)
        fields.append(field.with_type(kind))
    return table.cast(pa.schema(fields), safe=False)
