"""One micro-batch, exactly once.

The steps, in this order, each of them safe to die after::

    intent     plan epoch, query-log position and points are written down, once
    fold       the query log is folded up to that position
    match      tasks leave staged files under names of their own
    answer     standing queries and joins are answered from the window as it will be
    deliver    other sinks are given the staged files
    commit     one row says which staged files are the batch, and its figures
    publish    those files get their final names
    forget     leftovers and versions that no batch can need are deleted
    balance    at the end of a round: one row says what was decided, with the next plan if any

A batch that finds its intent repeats it; one that finds its commit only publishes. So a batch
leaves its matches in the sink once, and the same matches however often it runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from roost.balance import Plan
from roost.engine.balancer import Balancer
from roost.engine.decode import DeadRow, PointSchema
from roost.engine.messages import BatchTask, MachineResult, WindowTask
from roost.engine.sinks import Sink
from roost.engine.writers import write_dead
from roost.predicate import parse
from roost.space import Space
from roost.state.guard_keeper import GuardKeeper
from roost.state.queries import QuerySet
from roost.state.querylog import QueryLog
from roost.state.store import Commit, Intent, SegmentRef, Store
from roost.state.windows import WindowKeeper, WindowView

STAGING = "_staging"
MACHINE_FIGURES = ("machine", "points", "checks", "matches", "busy_s", "rows", "dead", "load_s")

# Runs the batch's tasks on Spark and brings back what each machine did.
Job = Callable[[BatchTask], list[MachineResult]]


class Answerer(Protocol):
    """Tells something of the window after every batch."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Folders of the output that its files go to."""

    def write(
        self, batch_id: int, refs: Sequence[SegmentRef], view: WindowView, now: int | None
    ) -> dict[str, list[str]]:
        """Stage files for a batch, by kind; told the queries, the window and the event time."""


@dataclass
class BatchRunner:
    """Runs batches against one state directory.

    Parameters
    ----------
    store, log, queries
        The durable state.
    space, points
        Where points are and which columns they have.
    query_id_type
        Type of query identifiers.
    out
        Folder for ``matches`` and ``dead``.
    keep_matches
        Whether matches are written at all, or only counted.
    publish_matches
        Whether they stay as Parquet, or are for the sinks only.
    epoch
        Plan of the batches to come.
    balancer
        What changes it while the stream runs; None leaves it as it is.
    sinks
        Further sinks.
    windows
        The window that the batches fill; None keeps none.
    keeper
        The guard, which obeys operators before each batch; None where there is none.
    answerers
        What tells, after every batch, more of the window than single matches.
    on_step
        Called with the name of each step just before it begins, and with ``end``.
    """

    store: Store
    log: QueryLog
    queries: QuerySet
    space: Space
    points: PointSchema
    query_id_type: pa.DataType
    out: Path
    epoch: int
    balancer: Balancer | None = None
    keep_matches: bool = True
    publish_matches: bool = True
    sinks: Sequence[Sink] = ()
    windows: WindowKeeper | None = None
    keeper: GuardKeeper | None = None
    answerers: Sequence[Answerer] = ()
    on_step: Callable[[str, int], None] = lambda step, batch_id: None
    clock: Callable[[], float] = time.perf_counter
    _kept_from: int = -1
    _reached: int | None = None
    _plans: dict[int, Plan] = field(default_factory=dict)
    _wanted: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the folders and finish what a dead driver began."""
        for folder in self._staging():
            folder.mkdir(parents=True, exist_ok=True)
        last = self.store.last_commit()
        if last is not None:
            self._publish(last)
        self._clear_staging()
        self._reached = self.store.reached()

    def run(self, batch_id: int, offsets: dict[str, Any], job: Job) -> Commit:
        """Run a batch, or finish it, or find that it has happened."""
        done = self.store.commit(batch_id)
        if done is not None:
            self._publish(done)
            return done
        started = self.clock()
        if self.keeper is not None:
            self.keeper.obey(self.log)
        self.on_step("intent", batch_id)
        intent = self.store.put_intent(Intent(batch_id, self.epoch, self.log.end(), offsets))
        self.on_step("fold", batch_id)
        version = self.queries.advance(intent.position)
        self.on_step("match", batch_id)
        results = job(self._task(intent, version.segments))
        refused = self._refused(intent)
        self.on_step("answer", batch_id)
        window = self._preview(intent, results)
        answered = self._answers(intent, version.segments, window, results)
        self.on_step("deliver", batch_id)
        staged = [path for result in results for path in result.match_files]
        for sink in self.sinks:
            sink.deliver(batch_id, staged)
        commit = self._commit_of(intent, results, refused, answered, self.clock() - started)
        self.on_step("commit", batch_id)
        self._put_commit(commit, window)
        self.on_step("publish", batch_id)
        self._publish(commit)
        self.on_step("forget", batch_id)
        self._forget(intent)
        self.on_step("balance", batch_id)
        self._balance(intent, results)
        self.on_step("end", batch_id)
        return commit

    def _preview(self, intent: Intent, results: Sequence[MachineResult]) -> WindowView | None:
        """Return the window as it will be when the batch is committed."""
        if self.windows is None:
            return None
        ordered = sorted(results, key=lambda result: result.machine)
        files = [result.window for result in ordered if result.window is not None]
        return self.windows.preview(intent.batch_id, self._plan(intent.epoch), files)

    def _answers(
        self,
        intent: Intent,
        segments: tuple[SegmentRef, ...],
        window: WindowView | None,
        results: Sequence[MachineResult],
    ) -> dict[str, list[str]]:
        """Have the window's questions answered; returns staged files by kind."""
        files: dict[str, list[str]] = {}
        if window is not None:
            times = [self._reached, _newest(results)]
            now = max((time for time in times if time is not None), default=None)
            for answerer in self.answerers:
                files |= answerer.write(intent.batch_id, segments, window, now)
        return files

    def _put_commit(self, commit: Commit, window: WindowView | None) -> None:
        """Write the commit, and in the same transaction what it does to the window."""
        newest = commit.figures["time_max"]
        if newest is not None and (self._reached is None or newest > self._reached):
            self._reached = newest
        if self.windows is None or window is None:
            self.store.put_commit(commit)
            return
        self.store.put_commit(commit, self.windows.change(window))
        self.windows.committed(window)

    def _plan(self, epoch: int) -> Plan:
        if epoch not in self._plans:
            self._plans = {epoch: Plan.from_json(self.store.plan(epoch))}
        return self._plans[epoch]

    def _balance(self, intent: Intent, results: list[MachineResult]) -> None:
        if self.balancer is None or intent.epoch != self.epoch:
            return  # what a plan that is no longer used did says nothing about this one
        after = self.balancer.after_batch(intent.batch_id, self._plan(intent.epoch), results)
        if after is not None:
            self.epoch = after.epoch

    def _task(self, intent: Intent, segments: tuple[SegmentRef, ...]) -> BatchTask:
        task = BatchTask(
            batch_id=intent.batch_id,
            space=self.space,
            plan=self._plan(intent.epoch),
            segment_folder=str(self.store.segment_folder),
            segments=segments,
            points=self.points,
            wanted=self._attributes(segments),
            query_id_type=self.query_id_type,
            match_folder=str(self.out / "matches" / STAGING) if self.keep_matches else None,
            dead_folder=str(self.out / "dead" / STAGING),
        )
        if self.windows is not None:
            late = self.windows.spec.watermark(self._reached)
            window = WindowTask(
                str(self.windows.folder),
                self.windows.stored,
                self.windows.aliases,
                self.windows.view.oldest,
            )
            task = replace(task, window=window, late_before=late)
        adaptive = self.balancer is not None and intent.epoch == self.epoch
        return self.balancer.prepared(task) if self.balancer and adaptive else task

    def _attributes(self, segments: tuple[SegmentRef, ...]) -> tuple[str, ...]:
        """Attributes that some predicate of these segments, or the window, asks for."""
        for ref in segments:
            if ref.file not in self._wanted:
                texts = self.queries.predicates(ref.file)
                names = (name for text in texts for name in parse(text).attributes())
                self._wanted[ref.file] = frozenset(names)
        live = {ref.file for ref in segments}
        self._wanted = {file: names for file, names in self._wanted.items() if file in live}
        kept = () if self.windows is None else self.windows.stored
        return tuple(sorted(frozenset(kept).union(*self._wanted.values())))

    def _refused(self, intent: Intent) -> list[DeadRow]:
        """Find the requests refused since the batch before this one."""
        before = self.store.intent(intent.batch_id - 1)
        after = 0 if before is None else before.position
        refused = self.queries.refused_between(after, intent.position)
        return [DeadRow(r.position, r.reason, r.detail, r.record) for r in refused]

    def _commit_of(
        self,
        intent: Intent,
        results: list[MachineResult],
        refused: list[DeadRow],
        answered: dict[str, list[str]],
        seconds: float,
    ) -> Commit:
        batch_id = intent.batch_id
        files: list[tuple[str, str]] = []
        for result in results:
            if self.publish_matches:
                final = f"matches/batch-{batch_id:010d}-{result.machine:05d}.parquet"
                files += [(self._relative(path), final) for path in result.match_files]
        dead_files = [path for result in results for path in result.dead_files]
        folder = str(self.out / "dead" / STAGING)
        dead_files += write_dead(folder, batch_id, "request", refused, "requests")
        for kind, paths in {"dead": dead_files, **answered}.items():
            for number, path in enumerate(paths):
                final = f"{kind}/batch-{batch_id:010d}-{number:05d}.parquet"
                files.append((self._relative(path), final))
        machines = [
            {name: getattr(result, name) for name in MACHINE_FIGURES}
            for result in sorted(results, key=lambda result: result.machine)
        ]
        figures = {
            "rows": sum(result.rows for result in results),
            "points": sum(result.points for result in results),
            "matches": sum(result.matches for result in results),
            "checks": sum(result.checks for result in results),
            "dead_points": sum(result.dead for result in results),
            "dead_requests": len(refused),
            "loaded_queries": sum(result.loaded_queries for result in results),
            "loaded_bytes": sum(result.loaded_bytes for result in results),
            "load_s": sum(result.load_s for result in results),
            "route_s": sum(result.route_s for result in results),
            "time_max": _newest(results),
            "seconds": seconds,
            "epoch": intent.epoch,
            "position": intent.position,
            "machines": machines,
        }
        return Commit(batch_id, tuple(files), figures)

    def _relative(self, path: str) -> str:
        return str(Path(path).relative_to(self.out))

    def _publish(self, commit: Commit) -> None:
        """Give staged files their final names; those that have them already are left alone."""
        for staged, final in commit.files:
            source = self.out / staged
            if source.exists():
                os.replace(source, self.out / final)

    def _forget(self, intent: Intent) -> None:
        self._clear_staging()
        if self.windows is not None:
            self.windows.sweep()
        if intent.position > self._kept_from:
            self.store.drop_versions_before(intent.position)
            self._kept_from = intent.position

    def _clear_staging(self) -> None:
        """Delete what failed attempts left; no batch is running now."""
        for folder in self._staging():
            for path in folder.iterdir():
                path.unlink(missing_ok=True)

    def _staging(self) -> list[Path]:
        kinds = [kind for answerer in self.answerers for kind in answerer.kinds]
        return [self.out / kind / STAGING for kind in ("matches", "dead", *kinds)]


def _newest(results: Iterable[MachineResult]) -> int | None:
    """Newest event time of a batch."""
    return max((r.time_max for r in results if r.time_max is not None), default=None)
