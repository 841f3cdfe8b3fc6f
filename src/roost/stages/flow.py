"""What all stages of a dataflow share: settings, emitted tuples, and their common progress.

There is a stage for each source and each subquery. Watermarks of all operators follow from the
newest event times of the sources, which reach every machine as marks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from roost.dataflow.blocks import BUCKET, ORDER, TIME, Rejected
from roost.dataflow.loads import MachineLoad
from roost.dataflow.local import LocalOperators, Target, targets
from roost.dataflow.operators import Sink
from roost.dataflow.schema import BATCH_ID, FlowGraph
from roost.dataflow.state import StateFile
from roost.dataflow.watermarks import Progress
from roost.model.arrays import as_arrow
from roost.model.columns import record_json
from roost.model.records import DeadLetter
from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Output,
    Report,
    Reports,
    Stage,
    Staged,
)
from roost.stages.flow_early import EarlyAggregate
from roost.stages.flow_routing import (
    FLOW,
    ports_of,
    stage_of,
)
from roost.stages.writers import TableWriter, write_dead
from roost.storage.files import Files
from roost.storage.store import Fact, View
from roost.storage.totals import DATAFLOW, add_nested

RECEIVING = "receiving_s"  # count of a report: seconds of unpacking what an exchange brought
HOT = "hot"  # in a subquery's choice: keys to aggregate before the exchange
CLOCK_UNIT = 1_000_000  # event times of the clock are microseconds
NO_TUPLE = "none"
"""Mark of a machine that read no tuple; a mark must not be None."""


# --------------------------------------------------------------------------- what all tasks share


@dataclass(frozen=True)
class FlowBatch:
    """What the tasks of a batch need to know of the dataflow."""

    graph: FlowGraph
    number: int
    prefix: str
    clock: float
    before: Progress
    ended: tuple[str, ...]
    lateness: float
    idle: float | None
    sinks: Mapping[str, Files | None]  # None: only counted
    dead: Files
    hot: Mapping[str, tuple[int, ...]]  # keys to aggregate before the exchange, by operator

    def aggregates_before(self, node: str) -> bool:
        """Return whether tuples of an operator may be aggregated before they are sent."""
        return node in self.graph.stages.partial or node in self.hot

    def after(self, newest: Mapping[str, int]) -> Progress:
        """Return the progress after the batch, given the newest event time of each source."""
        return self.before.after(
            self.graph, newest, self.clock, self.ended, self.lateness, self.idle
        )


@dataclass(frozen=True, slots=True)
class FlowValue:
    """Files that a stage wrote on a machine, and how many rows they have."""

    sinks: Mapping[str, str]
    dead: tuple[str, ...]
    state: StateFile | None = None
    newest: int | None = None  # event time of a source
    written: Mapping[str, int] = field(default_factory=dict)  # rows by sink
    rejected: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by operator, reason
    seen: int | None = None  # newest event time on any input of a subquery
    load: MachineLoad | None = None  # of a subquery


class Emitter:
    """Pushes tuples of a stage through the stateless operators behind its first one."""

    def __init__(self, batch: FlowBatch, node: str, machine: int) -> None:
        self._batch = batch
        self._node = node
        self._label = f"{batch.graph.by_name[node].number:03d}-{machine:05d}"
        self._ports = ports_of(batch.graph, node)
        self._writers: dict[str, TableWriter] = {}
        self.written: Counter[str] = Counter()
        self.rejected: list[Rejected] = []
        self._operators = LocalOperators(batch.graph, self.rejected)
        self._early = {
            target: EarlyAggregate(
                batch.graph.by_name[target.node],
                target.node in batch.graph.stages.partial,
                batch.hot.get(target.node, ()),
            )
            for target in self._ports
            if batch.aggregates_before(target.node)
        }

    def emit(self, table: pa.Table) -> Iterator[Output]:
        """Yield blocks for other stages; write those of sinks."""
        yield from self._sent(self._operators.push(self._node, table))

    def apply(self, table: pa.Table) -> Iterator[Output]:
        """Emit what the stage's first operator, a stateless one, makes of tuples."""
        node = self._batch.graph.by_name[self._node]
        yield from self._sent(self._operators.apply(node, table))

    def flush(self) -> Iterator[Output]:
        """Yield what was aggregated and not sent yet."""
        for target, early in self._early.items():
            yield from ((self._ports[target], block) for block in early.flush())

    def _sent(self, made: Iterable[tuple[Target, pa.Table]]) -> Iterator[Output]:
        for target, rows in made:
            if target not in self._ports:
                self._write(target.node, rows)
                continue
            rows = self._read_by(target, rows)
            blocks = self._early[target].add(rows) if target in self._early else (rows,)
            yield from ((self._ports[target], block) for block in blocks)

    def _read_by(self, target: Target, rows: pa.Table) -> pa.Table:
        """Return the columns that the first operator of another stage reads."""
        graph = self._batch.graph
        node = graph.by_name[target.node]
        own = [TIME, ORDER] if graph.needs_order(node) else [TIME]
        return rows.select([*node.reads(target.input), *own])

    def _write(self, sink: str, rows: pa.Table) -> None:
        batch = self._batch
        self.written[sink] += rows.num_rows
        files = batch.sinks[sink]
        if files is None:
            return
        if sink not in self._writers:
            self._writers[sink] = TableWriter(files, batch.prefix, self._label, compression="zstd")
        rows = rows.select(batch.graph.by_name[sink].inputs[0].columns.names)
        numbers = as_arrow(np.full(rows.num_rows, batch.number, np.int64))
        self._writers[sink].write(rows.add_column(0, BATCH_ID, numbers))

    def close(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the files of the sinks, and those of dead-letter records."""
        sinks = {sink: writer.close() for sink, writer in self._writers.items()}
        by_operator: dict[str, list[DeadLetter]] = {}
        for operator, reason, detail, rows in self.rejected:
            for record in self._record_columns(operator, rows).to_pylist():
                rejected = DeadLetter(-1, reason, detail, record_json(record))
                by_operator.setdefault(operator, []).append(rejected)
        batch = self._batch
        dead: tuple[str, ...] = ()
        for operator, rejects in by_operator.items():
            dead += write_dead(
                batch.dead, batch.prefix, batch.number, operator, rejects, self._label
            )
        return {sink: name for sink, name in sinks.items() if name is not None}, dead

    def _record_columns(self, operator: str, rows: pa.Table) -> pa.Table:
        """Return the columns of dead-letter records; a function does not read the event time."""
        found = rows.select([n for n in rows.column_names if n not in (TIME, ORDER, BUCKET)])
        stream = self._batch.graph.by_name[operator].inputs[0]
        if TIME not in rows.column_names or stream.time in found.column_names:
            return found
        return found.add_column(0, stream.time, rows[TIME].cast(stream.time_type))


def count_rejected(rejected: Iterable[Rejected]) -> dict[str, dict[str, int]]:
    """Return how many rows each operator rejected, by reason."""
    found: dict[str, dict[str, int]] = {}
    for operator, reason, _, rows in rejected:
        reasons = found.setdefault(operator, {})
        reasons[str(reason)] = reasons.get(str(reason), 0) + rows.num_rows
    return found


# --------------------------------------------------------------------------- subqueries


def flow_files(reports: Iterable[Report]) -> dict[str, list[Staged]]:
    """Return the output files of a stage by kind."""
    files: dict[str, list[Staged]] = {}
    for report in reports:
        for sink, name in report.value.sinks.items():
            files.setdefault(sink, []).append(Staged(name))
        files.setdefault("dead", []).extend(Staged(name) for name in report.value.dead)
    return files


def flow_metrics(reports: Iterable[Report], **more: Any) -> dict[str, Any]:
    """Return the metrics of a stage; those of all stages are added up by the batch loop."""
    written: dict[str, Any] = {}
    rejected: dict[str, Any] = {}
    for report in reports:
        written = add_nested(written, report.value.written)
        rejected = add_nested(rejected, report.value.rejected)
    return {DATAFLOW: {"sinks": written, "dead": rejected, **more}}


# --------------------------------------------------------------------------- progress


@dataclass(frozen=True)
class FlowSettings:
    """What all stages of a dataflow share: settings, and where output is staged."""

    lateness: float
    idle: float | None
    sinks: Mapping[str, Files | None]  # None: only counted
    dead: Files

    def kinds(self, graph: FlowGraph, node: str) -> tuple[str, ...]:
        """Return the kinds of output files that a stage writes."""
        found = (t.node for t in targets(graph, node))
        return ("dead", *(n for n in found if isinstance(graph.by_name[n].operator, Sink)))

    def batch(self, graph: FlowGraph, batch: Batch) -> FlowBatch:
        """Return what the tasks of a batch share."""
        choice = batch.choices[FLOW]
        chosen = ((n.name, batch.choices.get(stage_of(n.name))) for n in graph.nodes)
        hot = {name: tuple(own[HOT]) for name, own in chosen if own and own[HOT]}
        return FlowBatch(
            graph,
            batch.number,
            batch.prefix,
            choice["clock"],
            Progress.from_json(choice["progress"]),
            tuple(batch.ended),
            self.lateness,
            self.idle,
            self.sinks,
            self.dead,
            hot,
        )


@dataclass
class ProgressStage(Stage):
    """Follows the event time of all sources, on the driver; the intent has it before the batch."""

    name = FLOW

    graph: FlowGraph
    shared: FlowSettings
    clock: Any  # returns seconds since 1970
    progress: Progress = field(init=False, default_factory=Progress)

    def open(self, view: View) -> None:
        """Read the progress."""
        found = view.get(FLOW, "progress")
        self.progress = Progress() if found is None else Progress.from_json(found)

    def intend(self) -> Any:
        """Return clock and progress."""
        return {"clock": self._now(), "progress": self.progress.to_json()}

    def _now(self) -> float:
        """Return the time. It does not go back: tuples that are stamped with it would be late."""
        return float(max([self.clock(), *self.progress.heard.values()]))

    def due(self) -> bool:
        """Return whether a batch without tuples would close a window: a source became idle."""
        flow = self.shared
        after = self.progress.after(self.graph, {}, self._now(), (), flow.lateness, flow.idle)
        return after.watermarks != self.progress.watermarks and bool(self.progress.watermarks)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Compute the progress after the batch."""
        newest = {}
        for node in self.graph.nodes:
            times = [r.value.newest for r in reports.get(stage_of(node.name), ())]
            known = [time for time in times if time is not None]
            if known:
                newest[node.name] = max(known)
        after = self.shared.batch(self.graph, batch).after(newest)
        fact = Fact(FLOW, "progress", after.to_json())
        metrics = {DATAFLOW: {"watermarks": dict(after.watermarks)}}
        return Outcome(facts=[fact], metrics=metrics, result=after)

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue with the progress of the batch."""
        self.progress = outcome.result

    def state(self) -> Any:
        """Return the progress."""
        return self.progress
