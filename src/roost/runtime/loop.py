"""One micro-batch, exactly once.

The steps, in this order; the driver may fail before or in any of them::

    intent     record epochs, query-log position, offsets and choices, once
    apply      apply the query log up to that position
    run        tasks write files under names of their own
    after      the stages turn the tasks' reports into outcomes
    deliver    pass staged results to other sinks
    commit     record the outcomes of all stages in one transaction
    publish    give the staged files their final names
    cleanup    delete leftovers, and what no batch can request
    round      at the end of a round: record decisions and the next routing in one transaction

A batch that finds its intent repeats it; one that finds its commit only publishes. So a batch
leaves its results in the output once, and the same results however often it runs.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from roost.model.elastic import DEFAULT_GROUP
from roost.queries.guard_state import LOG as GUARD_LOG
from roost.queries.guard_state import GuardState
from roost.queries.live import QuerySet
from roost.queries.log import QueryLog
from roost.queries.versions import drop_versions
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import Executor, Inputs
from roost.runtime.homes import home_metrics, placed
from roost.runtime.jobs import Jobs
from roost.runtime.operator_placement import OperatorPlacement
from roost.runtime.records import (
    COMMITS,
    INTENTS,
    Commit,
    Intent,
    begin,
    commit_fact,
    commit_of,
    intent,
    last_commit,
    last_round,
    median_reached,
    reached,
)
from roost.runtime.rounds import CommittedBatch, Rounds
from roost.stages.contract import Batch, Reports, RoutingTable, Stage
from roost.stages.flow_routing import stage_of
from roost.stages.routing import SPACE
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, Store
from roost.storage.totals import BATCHES, DATAFLOW, SUMMED, TOTALS, add_batch, add_nested

STAGING = "_staging"
CLEANUP_BATCHES = 64
"""Batches between two deletions of old rows: at most so many rows exceed the history."""


class ResultSink(Protocol):
    """Receives results of a batch: matches, or those of the dataflow's sink that ``of`` names."""

    def deliver(self, batch_id: int, files: Sequence[str]) -> None:
        """Store a batch; must not return before the results are durable."""


def kind_of(sink: ResultSink) -> str:
    """Return the kind of results that a sink receives."""
    return str(getattr(sink, "of", "matches"))


def staging(out: Path, kind: str) -> Files:
    """Return where files of one kind of output are staged."""
    return Files(str(out / kind / STAGING))


@dataclass
class BatchLoop:
    """Runs batches against one state directory.

    Each stage comes after those that produce its inputs. Output stays as Parquet, unless its kind
    is ``only_delivered`` to sinks. ``history`` is how many batches, rounds and plans stay in the
    store, within ``CLEANUP_BATCHES``. ``on_step`` is called with the name of each step just before
    it begins, and with ``end``.
    """

    store: Store
    log: QueryLog | None  # None in a run without matching, which has no queries
    queries: QuerySet | None
    stages: Sequence[Stage]
    executor: Executor
    out: Path
    sinks: Sequence[ResultSink] = ()
    only_delivered: frozenset[str] = frozenset()
    rounds: Sequence[Rounds] = ()  # of all that adapts; executors follow the layouts
    operators: OperatorPlacement | None = None  # if there may be several executor groups
    guard: GuardState | None = None
    history: int = 10_000
    on_step: Callable[[str, int], None] = lambda step, number: None
    clock: Callable[[], float] = time.perf_counter
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        """Create the folders, compute the stages' state, and finish the last batch."""
        found = (stage.routing_table() for stage in self.stages)
        self.tables: dict[str, RoutingTable] = {table.name: table for table in found if table}
        self._staging = {kind: staging(self.out, kind) for s in self.stages for kind in s.kinds}
        for files in self._staging.values():
            Path(files.folder).mkdir(parents=True, exist_ok=True)
        with self.store.view() as view:
            for stage in self.stages:
                stage.open(view)
        last = last_commit(self.store)
        if last is not None:
            self._publish_left()
            self._publish(last)
            self._delete_old_rows(last.batch_id)
        self.jobs = Jobs(self.store, self.executor, self.stages)
        if self.executor.allocator is not None:
            self.executor.allocator.preparations = self._preparations
        self._reached, self._median = reached(self.store), median_reached(self.store)
        self._position = -1
        self._levelled: list[int] = []  # numbers of the rounds when homes were last levelled
        self._clean()

    def run(
        self,
        number: int,
        offsets: Mapping[str, Any],
        inputs: Inputs,
        ended: Sequence[str] = (),
    ) -> Commit:
        """Run a batch; idempotent: a committed batch is only published again.

        ``ended`` names the sources that bring no more rows after it.
        """
        done = commit_of(self.store, number)
        if done is not None:
            self._publish(done)
            return done
        started = self.clock()
        if self.guard is not None and self.log is not None:
            self.guard.apply_commands(self.log)
        self.on_step("intent", number)
        epochs = {name: table.epoch for name, table in self.tables.items()}
        intended = ((stage.name, stage.intend()) for stage in self.stages)
        choices = {name: choice for name, choice in intended if choice is not None}
        position = 0 if self.log is None else self.log.end()
        planned = Intent(number, epochs, position, dict(offsets), choices, list(ended))
        intent = begin(self.store, planned)
        self.on_step("apply", number)
        batch = self._batch(intent)
        self.on_step("run", number)
        reports, homes = self._run_tasks(batch, inputs)
        self.on_step("after", number)
        for stage in self.stages:
            outcome = stage.after(batch, reports, self.executor)
            batch = replace(batch, outcomes={**batch.outcomes, stage.name: outcome})
        files = self._published(batch)
        self.on_step("deliver", number)
        self._deliver(batch)
        metrics = {**self._metrics(intent, batch, reports, self.clock() - started), **homes}
        commit = Commit(number, files, metrics)
        self.on_step("commit", number)
        self._commit(batch, commit)
        self.on_step("publish", number)
        self._publish(commit)
        self.on_step("cleanup", number)
        self._cleanup(intent)
        self.on_step("round", number)
        self._end_round(intent, batch, reports)
        self.on_step("end", number)
        return commit

    def _batch(self, now: Intent) -> Batch:
        """Apply the log up to the batch's position; returns the batch as the stages see it."""
        queries = self.queries
        version = None if queries is None else queries.advance(now.position)
        before = intent(self.store, now.batch_id - 1)
        after = 0 if before is None else before.position
        last = last_round(self.store)
        names = (name for stage in self.stages for name in stage.attributes(version))
        epochs = {name: now.epochs.get(name, table.epoch) for name, table in self.tables.items()}
        old = {} if before is None else before.epochs
        return Batch(
            now.batch_id,
            {name: self.tables[name].at(epoch) for name, epoch in epochs.items()},
            {name: self.tables[name].at(old.get(name, epoch)) for name, epoch in epochs.items()},
            version,
            () if queries is None else queries.refused_between(after, now.position),
            self._reached,
            self._median,
            last is not None and last["batch_id"] == now.batch_id - 1,
            tuple(sorted(set(names))),
            tuple(now.ended),
            now.choices,
        )

    def _run_tasks(self, batch: Batch, inputs: Inputs) -> tuple[Reports, dict[str, Any]]:
        """Run the tasks at their homes; returns reports, and metrics of homes if there are any."""
        prepared = ((stage.name, stage.prepare(batch)) for stage in self.stages)
        tasks = {name: task for name, task in prepared if task is not None}
        working = [stage for stage in self.stages if stage.name in tasks]
        # Where a routed stage runs inside the readers' tasks, these are its machines.
        used = [batch.routings[s.routing] for s in working if s.routing is not None]
        machines = next((routing.machines for routing in used if routing.local), None)
        inputs, readers = inputs.dealt(machines, batch.number, self.executor)
        before = self.placement
        groups = [DEFAULT_GROUP] if self.operators is None else self.operators.groups
        executors = {name: self.executor.executors(name) for name in groups}
        self.placement = replace(before, groups=self._mapping(executors))
        chain = Chain.of(working, batch.routings, readers, self.placement)
        self.placement = self._placed(chain, executors)
        reports = self.executor.run(inputs, chain, tasks, self.placement)
        return reports, home_metrics(chain, before, self.placement, reports)

    def _mapping(self, executors: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the executor group of each stage; one that has no executor now is not used."""
        if self.operators is None:
            return {}
        mapping = self.operators.mapping.items()
        return {stage_of(node): group for node, group in mapping if executors[group]}

    def _placed(self, chain: Chain, executors: Mapping[str, Sequence[str]]) -> Placement:
        """Assign homes; executors that join get machines after a round, if the run has rounds."""
        rounds = [found.number for found in self.rounds]
        level = not rounds or rounds != self._levelled
        self._levelled = rounds
        return placed(self.placement, chain, executors, level=level)

    def _deliver(self, batch: Batch) -> None:
        for sink in self.sinks:
            kind = kind_of(sink)
            files = [
                str(self._staging[kind].path(staged.name))
                for outcome in batch.outcomes.values()
                for staged in outcome.files.get(kind, ())
            ]
            sink.deliver(batch.number, files)

    def _published(self, batch: Batch) -> tuple[tuple[str, str], ...]:
        """Return the staged files with their final names, both relative to the output.

        Raises RuntimeError if two have the same final name: one would replace the other.
        """
        found: list[tuple[str, str]] = []
        numbers: dict[str, int] = defaultdict(int)
        publishers: dict[str, str] = {}
        for stage, outcome in batch.outcomes.items():
            for kind, files in outcome.files.items():
                if kind in self.only_delivered:
                    continue
                for staged in files:
                    number = numbers[kind] if staged.machine is None else staged.machine
                    numbers[kind] += 1
                    final = f"{kind}/{batch.prefix}{number:05d}.parquet"
                    if final in publishers:
                        raise RuntimeError(
                            f"stages {publishers[final]!r} and {stage!r} both publish {final}: "
                            "give each stage a kind of its own, or name no machine in Staged"
                        )
                    publishers[final] = stage
                    found.append((f"{kind}/{STAGING}/{staged.name}", final))
        return tuple(found)

    def _metrics(
        self, intent: Intent, batch: Batch, reports: Reports, seconds: float
    ) -> dict[str, Any]:
        metrics: dict[str, Any] = dict.fromkeys(SUMMED, 0)
        flow: dict[str, Any] = {}  # several stages have metrics of the dataflow
        for outcome in batch.outcomes.values():
            flow = add_nested(flow, outcome.metrics.get(DATAFLOW, {}))
            metrics.update(outcome.metrics)
        if flow:
            metrics[DATAFLOW] = flow
        sums = ("seconds", "rows_in", "rows_out", "bytes_out")
        return {
            **metrics,
            "stages": {
                name: {field: sum(getattr(report, field) for report in mine) for field in sums}
                for name, mine in reports.items()
            },
            "route_s": sum(r.seconds for mine in reports.values() for r in mine if r.bytes_out),
            "seconds": seconds,
            "epoch": intent.epochs.get(SPACE, 0),
            "position": intent.position,
        }

    def _commit(self, batch: Batch, commit: Commit) -> None:
        totals = add_batch(self.store.get(TOTALS, BATCHES) or {}, commit.figures)
        facts = [fact for outcome in batch.outcomes.values() for fact in outcome.facts]
        self.store.record(commit_fact(commit), Fact(TOTALS, BATCHES, totals), *facts)
        self._reached, self._median = totals["time_max"], totals["time_median"]
        for stage in self.stages:
            stage.committed(batch, batch.outcomes[stage.name])

    def _publish(self, commit: Commit) -> None:
        """Rename staged files to their final names, except those already renamed."""
        for staged, final in commit.files:
            source = self.out / staged
            if source.exists():
                os.replace(source, self.out / final)

    def _publish_left(self) -> None:
        """Publish what is still staged of any batch: a host that fails may lose several renames."""
        names = (name for files in self._staging.values() for name in files.names("batch-"))
        for number in sorted({int(name.split("-")[1]) for name in names}):
            done = commit_of(self.store, number)
            if done is not None:
                self._publish(done)

    def _cleanup(self, intent: Intent) -> None:
        self._clean()
        if intent.position > self._position:
            drop_versions(self.store, intent.position)
            self._position = intent.position
        if intent.batch_id % CLEANUP_BATCHES == 0:
            self._delete_old_rows(intent.batch_id)
        self.jobs.step()

    def _clean(self) -> None:
        """Delete the files of failed attempts; no batch is running now."""
        for files in self._staging.values():
            files.delete("")
        for stage in self.stages:
            stage.cleanup()

    def _delete_old_rows(self, batch_id: int) -> None:
        """Delete rows of batches, rounds and epochs that no step after a batch can request."""
        tables = [*(found.records for found in self.rounds), GUARD_LOG]
        newest = {table: self.store.last(table) for table in tables}
        limits = {table: row[0] - self.history for table, row in newest.items() if row}
        limits[COMMITS] = limits[INTENTS] = batch_id - max(self.history, 2)
        done = intent(self.store, batch_id)
        for name, found in self.tables.items():
            if found.records is not None:
                # The next batch compares its routing with that of this one.
                used = found.epoch if done is None else done.epochs.get(name, found.epoch)
                limits[found.records] = min(found.epoch - self.history, used - 1)
        old = [
            (t, key) for t, limit in limits.items() for key, _ in self.store.items(t, upto=limit)
        ]
        self.store.record(*(Fact(table, key, None) for table, key in old))

    def _end_round(self, intent: Intent, batch: Batch, reports: Reports) -> None:
        done = CommittedBatch(intent, batch, reports, self.tables)
        for rounds in self.rounds:
            rounds.after_batch(done)

    def _preparations(self) -> list[Callable[[WorkerCache], None]]:
        """Return what a worker of a new executor should do before its first task."""
        found = (stage.preparation() for stage in self.stages)
        return [one for one in found if one is not None]
