"""A run without Spark: accepts requests and replays Roost's own sources on any executor."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Source, SourceKind
from roost.errors import ConfigError, DataflowError, SourceError
from roost.model.choices import Strategy
from roost.model.records import Request, request_record
from roost.model.settings import RunConfig, with_settings
from roost.model.space import Space
from roost.queries.guard_state import GuardReader
from roost.queries.log import QueryLog, open_log
from roost.runtime.assembly import Hooks, StreamShape, assemble
from roost.runtime.executor import Executor
from roost.runtime.feed import Feed
from roost.runtime.flow import sinks_of
from roost.runtime.flow_layout import Sample
from roost.runtime.group_rounds import GroupRounds
from roost.runtime.loop import BatchLoop, ResultSink, kind_of
from roost.runtime.records import Commit
from roost.runtime.report import build_report
from roost.runtime.sampled import Sampled
from roost.stages.contract import Stage
from roost.stages.decode import PointSchema
from roost.stages.flow_routing import stage_of
from roost.stages.point_files import read_requests
from roost.stages.reading import ReadingStage
from roost.stages.schema import point_schema, space_for
from roost.stages.sources import RowSource, open_source
from roost.storage.agreement import agreed
from roost.storage.inputs import add_inputs, seen_inputs
from roost.storage.lock import RunLock
from roost.storage.private import state_folder
from roost.storage.store import Store
from roost.synopsis.reader import SynopsisReader

POLL_S = 0.2
IDLE_S = 0.002


def requests_table(requests: Iterable[Request]) -> pa.Table:
    """Return requests as a block of the query log."""
    records = [request_record(request) for request in requests]
    # Arrow itself would use the columns of the first record only, and drop another shape's fields.
    names = dict.fromkeys(name for record in records for name in record)
    return pa.table({name: [record.get(name) for record in records] for name in names})


def _configured_flow(config: RunConfig) -> Dataflow | None:
    """Load the dataflow that the settings name."""
    if config.dataflow.flow is None:
        return None
    from roost.dataflow.loading import load_flow

    return load_flow(config.dataflow.flow)


class BasePipeline(ABC):
    """Continuous spatial queries over a stream of points, on some executor.

    :class:`roost.Pipeline` runs on Spark, :class:`roost.testing.InProcessPipeline` in one process.

    Points come from ``source`` and the dataflow from ``flow``, if not from the configuration. A run
    has points to match, a dataflow, or both. ``on_batch`` is called after each batch with its
    commit; :class:`roost.runtime.assembly.Hooks` lists the other ``hooks``.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        source: RowSource | None = None,
        flow: Dataflow | None = None,
        on_batch: Callable[[Commit], None] = lambda commit: None,
        **hooks: Any,
    ) -> None:
        self.config = config
        self.source = source
        self.flow = _configured_flow(config) if flow is None else flow
        self._check_source_paths()
        self._on_batch = on_batch
        self._hooks = Hooks(**hooks)
        self._stopping = False
        self._opening = threading.RLock()  # other threads may send requests
        self._lock: RunLock | None = None
        self._store: Store | None = None
        self._log: QueryLog | None = None
        self._reader: SynopsisReader | None = None
        self._loop: BatchLoop | None = None
        self._guard_reader: GuardReader | None = None

    def __enter__(self) -> Self:
        """Use the pipeline in a ``with`` block."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Release the state directory."""
        for resource in (self._reader, self._store, self._log):
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
    def _guard(self) -> GuardReader:
        """Reads the recorded guard."""
        with self._opening:
            if self._guard_reader is None:
                self._guard_reader = GuardReader(self.store)
            return self._guard_reader

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of the run; empty before it begins."""
        return () if self._loop is None else self._loop.stages

    def request(self, *requests: Request) -> int:
        """Register or terminate queries; returns the log position after them.

        Raises :class:`RequestError` if a user is blocked; then none of the requests is made.
        """
        users = [request.user_id for request in requests]
        if self._loop is not None and self._loop.guard is not None:
            self._loop.guard.reject_blocked(users)
        else:
            self._guard.reject_blocked(users)
        return self.log.append(requests_table(requests))

    @property
    def synopsis(self) -> SynopsisReader:
        """Queries the synopsis of all points so far; threads may share it.

        Raises :class:`StateError` if the run has none, or has not begun.
        """
        with self._opening:
            if self._reader is None:
                self._reader = SynopsisReader(self.config.out.state_dir)
            return self._reader

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
        if config.points.path is None and self.flow is None:
            raise ConfigError("points.path", None, "a file, a folder, generate:… or kafka://…")
        if config.points.path is None:
            self._check_no_queries()
        else:
            self._check_names()
        self._take_lock()
        self._load_requests()
        sources = self._flow_sources(self._records)
        self._hooks = replace(self._hooks, sample=partial(self._sample, dict(sources)))
        points = self._open_points(sources)
        self._replay(self._make_feed(sources, self._assemble(points, self.source, None)))
        return self.report()

    def _open_points(self, sources: dict[str, RowSource]) -> PointSchema | None:
        """Add the configured points to the sources, if there are any; returns their schema."""
        points = self.config.points
        if points.path is None:
            return None
        self.source = self.source or self._open(points.path, points.time)
        sources[ReadingStage.name] = self.source
        return point_schema(self.source.schema, self.config, numbered=True)

    def _open(self, path: str, time: str, name: str = "") -> RowSource:
        points = self.config.points
        form, speed, clock = points.format, points.speed, self._hooks.clock
        return open_source(path, form, time, self.store, speed, clock, name)

    @property
    def _records(self) -> list[Source]:
        """The sources of records that the dataflow reads."""
        operators = [] if self.flow is None else self.flow.operators
        sources = (operator for operator in operators if isinstance(operator, Source))
        return [source for source in sources if source.kind is SourceKind.RECORDS]

    def _check_source_paths(self) -> None:
        known = [source.name for source in self._records]
        for name, path in self.config.dataflow.sources.items():
            if name not in known:
                expected = f"a source of the dataflow: {', '.join(known) or 'it has none'}"
                raise ConfigError(f"dataflow.sources.{name}", path, expected)

    def _check_no_queries(self) -> None:
        """Refuse requests in a run without points, which would never match."""
        path = self.config.queries.path
        if path is not None:
            raise ConfigError("queries.path", path, "points.path, too: queries match points")

    def _check_names(self) -> None:
        """Refuse sources of records with the names that points and matches of the run have."""
        for source in self._records:
            if source.name in (SourceKind.POINTS, SourceKind.MATCHES):
                problem = "a run with points has a source of this name itself: choose another name"
                raise DataflowError(source.name, problem)

    def _path_of(self, source: Source) -> str | None:
        return self.config.dataflow.sources.get(source.name, source.path)

    def _required_path(self, source: Source) -> str:
        path = self._path_of(source)
        if path is None:
            expected = "a file, a folder, generate:… or kafka://…, here or in --source"
            raise DataflowError(source.name, f"no path; expected {expected}")
        return path

    def _flow_sources(self, records: Iterable[Source]) -> dict[str, RowSource]:
        """Open sources of records that the dataflow reads, by stage."""
        sources = {}
        for source in records:
            path = self._required_path(source)
            if path.startswith("kafka:"):
                problem = "a topic needs Spark"
                raise DataflowError(source.name, problem)
            opened = self._open(path, source.time or "", source.name)
            sources[stage_of(source.name)] = opened
        return sources

    def _sample(self, sources: Mapping[str, RowSource], division: Division) -> Sample | None:
        """Run some rows of the dataflow's sources."""
        from roost.runtime.flow_sample import first_rows, sample_flow

        assert self.flow is not None
        rows = self.config.engine.batch_rows
        slices = {stage: first_rows(source, rows) for stage, source in sources.items()}
        return sample_flow(self.flow, slices, division, self._hooks.wall_clock)

    def _take_lock(self) -> None:
        """Take the run lock before anything is written."""
        if self._lock is None:
            self._lock = RunLock(state_folder(self.config.out.state_dir))

    def _assemble(
        self, points: PointSchema | None, sample: Sampled | None, json_column: str | None
    ) -> BatchLoop:
        shape = None
        if points is not None:
            shape = StreamShape(points, self._space(points, sample), sample, json_column)
        kinds = [] if points is None else ["matches"]
        kinds += sinks_of(self.flow)
        sinks = [*self._hooks.sinks, *self._configured_sinks(kinds)]
        unknown = next((kind for kind in map(kind_of, sinks) if kind not in kinds), None)
        if unknown is not None:
            raise ConfigError("sinks", unknown, f"a result of the run: {', '.join(kinds)}")
        hooks = replace(self._hooks, sinks=sinks)
        self._loop = assemble(
            self.config,
            self.store,
            self.log,
            self.executor,
            shape,
            hooks,
            self.default_strategy,
            self.flow,
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

    def _configured_sinks(self, kinds: Sequence[str]) -> Sequence[ResultSink]:
        """Return the sinks that the configuration names, for these kinds of results."""
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

    def _make_feed(
        self, sources: Mapping[str, RowSource], loop: BatchLoop, streams: Sequence[str] = ()
    ) -> Feed:
        engine = self.config.engine
        for rounds in loop.rounds:
            if isinstance(rounds, GroupRounds):
                rounds.sources, rounds.streams = sources, streams
        final = self.flow is not None and not engine.available_now
        return Feed(loop, sources, streams, engine.batch_rows, final, self._on_batch)

    def _replay(self, feed: Feed) -> None:
        grows = any(source.grows for source in feed.sources.values())
        while not self._stopping:
            if feed.step():
                continue
            if not feed.exhausted:
                time.sleep(IDLE_S)
            elif self.config.engine.available_now or not grows:
                return
            else:
                time.sleep(POLL_S)
