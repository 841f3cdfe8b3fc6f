"""A run without Spark: accepts requests and replays Roost's own sources on any executor."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from roost.errors import ConfigError, SourceError
from roost.model.choices import Strategy
from roost.model.records import Request, request_record
from roost.model.settings import RunConfig, with_settings
from roost.model.space import Space
from roost.queries.guard_state import GuardState, stamp
from roost.queries.log import QueryLog, open_log
from roost.runtime.assembly import Hooks, Sampled, StreamShape, assemble
from roost.runtime.executor import Executor, SliceInputs
from roost.runtime.loop import BatchLoop, Sink
from roost.runtime.records import Commit, commit_of, last_intent
from roost.runtime.report import build_report
from roost.stages.contract import Stage
from roost.stages.decode import PointSchema
from roost.stages.point_files import read_requests
from roost.stages.schema import point_schema, space_for
from roost.stages.slices import Slice
from roost.stages.sources import Source, open_source
from roost.storage.agreement import agreed
from roost.storage.inputs import add_inputs, seen_inputs
from roost.storage.lock import RunLock
from roost.storage.private import state_folder
from roost.storage.store import Store

POLL_S = 0.2
IDLE_S = 0.002


def requests_table(requests: Iterable[Request]) -> pa.Table:
    """Return requests as a block of the query log."""
    records = [request_record(request) for request in requests]
    # Arrow itself would use the columns of the first record only, and drop another shape's fields.
    names = dict.fromkeys(name for record in records for name in record)
    return pa.table({name: [record.get(name) for record in records] for name in names})


class BasePipeline(ABC):
    """Continuous spatial queries over a stream of points, on some executor.

    :class:`roost.Pipeline` runs on Spark, :class:`roost.testing.InProcessPipeline` in one process.

    Points come from ``source``, if not from the configuration. ``on_batch`` is called after each
    batch with its commit; :class:`roost.runtime.assembly.Hooks` lists the other ``hooks``.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        source: Source | None = None,
        on_batch: Callable[[Commit], None] = lambda commit: None,
        **hooks: Any,
    ) -> None:
        self.config = config
        self.source = source
        self._on_batch = on_batch
        self._hooks = Hooks(**hooks)
        self._stopping = False
        self._opening = threading.RLock()  # other threads may send requests
        self._lock: RunLock | None = None
        self._store: Store | None = None
        self._log: QueryLog | None = None
        self._loop: BatchLoop | None = None
        self._guard_seen: tuple[tuple[Any, ...], GuardState | None] | None = None

    def __enter__(self) -> Self:
        """Use the pipeline in a ``with`` block."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Release the state directory."""
        for resource in (self._store, self._log):
            if resource is not None:
                resource.close()
        if self._lock is not None:
            self._lock.release()

    @property
    @abstractmethod
    def executor(self) -> Executor:
        """What runs the tasks."""

    @property
    def default_strategy(self) -> Strategy:
        """Strategy of a run that configures none."""
        return Strategy.REPLICATED

    @property
    def store(self) -> Store:
        """The durable state, opened when first needed."""
        with self._opening:
            if self._store is None:
                self._store = Store(self.config.out.state_dir, locked=self._lock is not None)
            return self._store

    @property
    def log(self) -> QueryLog:
        """The query log, opened when first needed."""
        with self._opening:
            if self._log is None:
                self._log = open_log(self.config.queries.log, self.config.out.state_dir)
            return self._log

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of the run; empty before it begins."""
        return () if self._loop is None else self._loop.stages

    def request(self, *requests: Request) -> int:
        """Register or terminate queries; returns the log position after them.

        Raises :class:`RequestError` if a user is blocked; then none of the requests is made.
        """
        guard = self._current_guard()
        if guard is not None:
            guard.reject_blocked(request.user_id for request in requests)
        return self.log.append(requests_table(requests))

    def _current_guard(self) -> GuardState | None:
        """Return the guard of the run, or the recorded one, read again only after a change."""
        if self._loop is not None and self._loop.guard is not None:
            return self._loop.guard
        now = stamp(self.store)
        if self._guard_seen is None or self._guard_seen[0] != now:
            self._guard_seen = (now, GuardState.preview(self.store))
        return self._guard_seen[1]

    def stop(self) -> None:
        """End :meth:`run` after the current batch."""
        self._stopping = True

    def report(self) -> dict[str, Any]:
        """Sum up all batches of the state directory."""
        with self.store.view() as view:
            return build_report(view)

    def run(self) -> dict[str, Any]:
        """Replay the configured points until they end (or without end) and report.

        Raises :class:`StateError`, before any change, if another run uses the state directory.
        """
        config = self.config
        if config.points.path is None:
            raise ConfigError("points.path", None, "a file, a folder, generate:… or kafka://…")
        self._take_lock()
        self._load_requests()
        source = self.source or open_source(
            config.points.path,
            config.points.format,
            config.points.time,
            self.store,
            config.points.speed,
            self._hooks.clock,
        )
        self.source = source
        points = point_schema(source.schema, config, numbered=True)
        self._replay(source, self._assemble(points, source, None))
        return self.report()

    def _take_lock(self) -> None:
        """Take the run lock before anything is written."""
        if self._lock is None:
            self._lock = RunLock(state_folder(self.config.out.state_dir))

    def _assemble(
        self, points: PointSchema, sample: Sampled | None, json_column: str | None
    ) -> BatchLoop:
        shape = StreamShape(points, self._space(points, sample), sample, json_column)
        hooks = replace(self._hooks, sinks=[*self._hooks.sinks, *self._configured_sinks()])
        self._loop = assemble(
            self.config, self.store, self.log, self.executor, shape, hooks, self.default_strategy
        )
        return self._loop

    def _space(self, points: PointSchema, source: Sampled | None) -> Space:
        config, sample, known = self.config, None, agreed(self.store)
        if config.space.bounds is None and known is not None:
            # Only the bounds were guessed; every other setting must still agree.
            config = with_settings(config, {"space.bounds": Space.from_json(known["space"]).bounds})
        elif config.space.bounds is None and source is not None:
            sample = source.sample([points.x, points.y])
        return space_for(config, points, sample)

    def _configured_sinks(self) -> Sequence[Sink]:
        """Return the sinks that the configuration names."""
        return []

    def _load_requests(self) -> None:
        """Append the configured file of requests to the log, once for each state directory."""
        if self.config.queries.path is None:
            return
        path = Path(self.config.queries.path)
        if not path.exists():
            raise SourceError(f"no requests at {path}: there is no such file")
        stat = path.stat()
        tag = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if tag in seen_inputs(self.store):
            return
        table = read_requests(path)
        if table.num_rows:
            self.log.append(table, tag=tag)
        add_inputs(self.store, [], [tag])

    def _replay(self, source: Source, loop: BatchLoop) -> None:
        number, offset = self._resume(source, loop)
        while not self._stopping:
            slices = source.take(offset, self.config.engine.batch_rows)
            if not slices:
                if source.ended(offset) and not source.poll():
                    if self.config.engine.available_now or not source.grows:
                        return
                    time.sleep(POLL_S)
                else:
                    time.sleep(IDLE_S)
                continue
            number, offset = self._run_batch(loop, number, offset, slices)

    def _resume(self, source: Source, loop: BatchLoop) -> tuple[int, int]:
        """Repeat a batch that was begun and not committed; returns the next batch and offset."""
        last = last_intent(self.store)
        if last is None:
            return 0, 0
        start, stop = int(last.offsets["start"]), int(last.offsets["stop"])
        if commit_of(self.store, last.batch_id) is None:
            slices = source.again(start, stop)
            found = sum(item.rows for item in slices)
            if found != stop - start:
                raise SourceError(
                    f"batch {last.batch_id} read rows {start} to {stop}, but the points now have "
                    f"only {start + found}: were files removed?"
                )
            return self._run_batch(loop, last.batch_id, start, slices)
        return last.batch_id + 1, stop

    def _run_batch(
        self, loop: BatchLoop, number: int, start: int, slices: Sequence[Slice]
    ) -> tuple[int, int]:
        """Run a batch; returns the number and the offset of the next one."""
        stop = start + sum(item.rows for item in slices)
        self._on_batch(loop.run(number, {"start": start, "stop": stop}, SliceInputs(slices)))
        return number + 1, stop
