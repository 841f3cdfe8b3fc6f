"""Questions about the window, answered by Spark jobs, or at once where they are small.

A question is cut into parts (:mod:`roost.window.snapshot`), the parts are dealt to a few tasks, and
what the tasks bring back is merged. To run even one task takes Spark tens of milliseconds, many
times as long as to look into a few zones of a few mapped files. So a question about few points is
answered by the process that asks it, in the same way.

The files of the batch that the answer is about are held until it is there, so a question may be
asked while the stream runs, from another thread or another process. A large answer does not pass
through the driver: tasks leave it in files beside the state, which are read by whoever reads the
DataFrame, and deleted when the pipeline is closed.
"""

from __future__ import annotations

import base64
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
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
from roost.window.view import WindowFiles, WindowView, lease_view, read_view, window_files

POINTS_PER_TASK = 500_000
POINTS_HERE = 200_000
ANSWER_BYTES_MAX = 1 << 20  # of a task's answer; a larger one is left in a file
QUESTION = "roost.question"
ANSWERS_KEPT_S = 86_400.0  # after the last one, for a process that died
LARGE_KEPT = 16  # large answers of DataFrames
ROW_NUMBER = "point_id"  # what points are called by where their source has no identifiers


@dataclass(frozen=True)
class Answer:
    """What a question came to.

    Parameters
    ----------
    batch_id
        The batch of which it is true: the window was that of this batch.
    table
        Points, or one row of aggregates; large parts are mapped, not read.
    parts
        Segment files that were looked into.
    """

    batch_id: int
    table: pa.Table
    parts: int


@dataclass(frozen=True)
class _Asked:
    """What a task must know of a question."""

    question: SnapshotQuery
    columns: Columns
    batch_id: int
    folder: str
    inline_max: int
    window: Files
    retained: frozenset[int]
    for_spark: bool
    groups: tuple[tuple[SegmentScan, ...], ...]

    def answer(self, task: int, cache: WorkerCache) -> Iterator[State | bytes | str]:
        """Answer from the parts of one task."""
        files = WindowFiles(self.window, cache)
        files.retain(self.retained)
        answer = run_scans(self.question, self.columns, self.groups[task], files)
        if isinstance(answer, State):
            yield answer
        elif self.question.nearest is None and answer.nbytes > self.inline_max:
            yield self._leave(answer)
        else:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, answer.schema) as writer:
                writer.write_table(answer)
            yield sink.getvalue().to_pybytes()

    def _leave(self, answer: pa.Table) -> str:
        folder = Path(self.folder)
        private_folder(folder.parent)
        private_folder(folder)
        table = add_batch(answer, self.columns, self.batch_id)
        if self.for_spark:  # which does not read Arrow's own files
            table = _spark_types(table)
            path = private_file(folder / f"{uuid.uuid4().hex}.parquet")
            # Who reads this reads it once: a dictionary would take longer than it saves.
            pq.write_table(table, path, compression="lz4", use_dictionary=False)
            return str(path)
        path = private_file(folder / f"{uuid.uuid4().hex}.arrow")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return str(path)


class Snapshots:
    """Answers questions about the window of a state directory.

    Parameters
    ----------
    folder
        The state directory; whoever runs the stream may be another process.
    spark
        Session that runs the jobs.
    points_here
        Questions that are likely to look at fewer points are answered without a job.
    """

    def __init__(self, folder: Path, spark: SparkSession, points_here: int = POINTS_HERE) -> None:
        if not (folder / "state.db").exists():
            raise StateError(f"{folder} is not a state directory: it has no state.db")
        self._spark = spark
        self._store = Store(folder, durable=False)
        self._points_here = points_here
        self._cache = WorkerCache()
        self._lock = threading.Lock()
        self._large: list[list[str]] = []
        self._cores = spark.sparkContext.defaultParallelism
        self._jobs: dict[int, RDD[State | bytes | str]] = {}
        self._known: tuple[Rules, Columns] | None = None
        answers = self._store.folder / "answers"
        self._answers = answers / uuid.uuid4().hex
        for path in answers.iterdir() if answers.exists() else ():
            if path.stat().st_mtime < time.time() - ANSWERS_KEPT_S:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Release the state, and delete large answers."""
        self._store.close()
        shutil.rmtree(self._answers, ignore_errors=True)

    def ask(self, question: SnapshotQuery) -> Answer:
        """Answer a question about the window of the newest batch, as Arrow tables.

        Raises
        ------
        RequestError, ConfigError
            If the question makes no sense.
        StateError
            If there is no window.
        """
        batch_id, small, files, parts = self._ask(question, for_spark=False)
        large = [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in files]
        for path in files:
            Path(path).unlink()  # what is mapped stays as long as somebody has it
        return Answer(batch_id, pa.concat_tables([small, *large]), parts)

    def _ask(
        self, question: SnapshotQuery, *, for_spark: bool
    ) -> tuple[int, pa.Table, list[str], int]:
        with self._pinned() as view:
            batch_id = view.batch_id
            if batch_id is None:
                raise StateError(f"the window in {self._store.folder} is of no batch yet")
            with self._lock:
                rules, columns = self._schema(view)
            check_snapshot(question, rules)
            files = window_files(self._store)
            parts = plan_scans(view, WindowFiles(files, self._cache), rules.space, question)
            where = str(self._answers)
            limits = (where, ANSWER_BYTES_MAX, files, view.batch_ids)
            groups = self._dealt(parts)
            asked = _Asked(question, columns, batch_id, *limits, for_spark, groups)
            answers = self._run(asked)
        small = [_read(answer) for answer in answers if not isinstance(answer, str)]
        large = [answer for answer in answers if isinstance(answer, str)]
        return batch_id, merge_results(question, columns, small, batch_id), large, len(parts)

    @contextmanager
    def _pinned(self) -> Iterator[WindowView]:
        """Pin the window; several threads may ask, but one connection is for one at a time."""
        with self._lock:
            pin, view = lease_view(self._store)
        try:
            yield view
        finally:
            with self._lock:
                self._store.leases.release(pin)

    def view(self) -> WindowView:
        """Return the window of the newest batch: its batches, files and extent."""
        with self._lock:
            return read_view(self._store)

    def frame(self, question: SnapshotQuery) -> DataFrame:
        """Answer a question as a DataFrame.

        Column ``at_batch`` has the batch of which the answer is true. Where there is no row to say
        so, the column's metadata does. Only the newest large answers can still be read.
        """
        batch_id, small, files, _ = self._ask(question, for_spark=True)
        frame = self._spark.createDataFrame(_spark_types(small))
        if files:
            frame = frame.union(self._spark.read.parquet(*files))
            self._forget(files)
        return frame.withMetadata(small.column_names[0], {"batch_id": batch_id})

    def _forget(self, files: list[str]) -> None:
        """Delete the oldest large answers: somebody who asks without end would fill the disk."""
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

    def _dealt(self, parts: Sequence[SegmentScan]) -> tuple[tuple[SegmentScan, ...], ...]:
        tasks = min(self._cores, 1 + sum(part.likely for part in parts) // POINTS_PER_TASK)
        return tuple(tuple(group) for group in deal(parts, tasks, lambda part: part.likely))

    def _run(self, asked: _Asked) -> list[State | bytes | str]:
        tasks = len(asked.groups)
        points = sum(part.likely for group in asked.groups for part in group)
        if not tasks or points < self._points_here:
            return [answer for task in range(tasks) for answer in asked.answer(task, self._cache)]
        context = self._spark.sparkContext
        if tasks not in self._jobs:
            numbers = context.parallelize(range(tasks), tasks)
            self._jobs[tasks] = numbers.mapPartitionsWithIndex(_answer_task)
        text = base64.b64encode(pickle.dumps(asked)).decode()
        context.setLocalProperty(QUESTION, text)
        try:
            return self._jobs[tasks].collect()
        finally:
            context.setLocalProperty(QUESTION, "")


def _answer_task(task: int, nothing: Iterable[int]) -> Iterator[State | bytes | str]:
    """Read the question from the task's properties.

    A question that was put into the function would need a new RDD, which takes as long to set up
    as a small question takes to answer.
    """
    context = TaskContext.get()
    assert context is not None
    text = context.getLocalProperty(QUESTION)
    assert text is not None
    asked: _Asked = pickle.loads(base64.b64decode(text))
    return asked.answer(task, CACHE)


def _read(answer: State | bytes) -> State | pa.Table:
    if isinstance(answer, State):
        return answer
    return pa.ipc.open_stream(pa.py_buffer(answer)).read_all()


def _spark_types(table: pa.Table) -> pa.Table:
    """Cast columns of types that Spark does not have to the next larger one that it has."""
    fields = [field.with_type(_spark_type(field.type)) for field in table.schema]
    return table.cast(pa.schema(fields), safe=False)


def _spark_type(kind: pa.DataType) -> pa.DataType:
    if kind in _SPARK_TYPES:
        return _SPARK_TYPES[kind]
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return kind


_SPARK_TYPES = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}
