"""The stage of a subquery: a stateful operator with the stateless ones after it.

Its tuples arrive through an exchange by the buckets of their keys, or from another subquery in the
same task. Its state is files that any machine can read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from roost.dataflow.aggregate import AggregateWork
from roost.dataflow.blocks import OldState, Ran
from roost.dataflow.buckets import BucketMap
from roost.dataflow.join import SIDES, PairWork
from roost.dataflow.loads import MachineLoad, counted
from roost.dataflow.operators import Aggregate, Source
from roost.dataflow.schema import FlowGraph, Node
from roost.dataflow.state import StateFile, bucket_mask, read_state, write_state
from roost.dataflow.watermarks import Progress
from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Output,
    Report,
    Reports,
    Stage,
    Task,
    Work,
)
from roost.stages.flow import (
    HOT,
    NO_TUPLE,
    RECEIVING,
    Emitter,
    FlowBatch,
    FlowSettings,
    FlowValue,
    count_rejected,
    flow_files,
    flow_metrics,
)
from roost.stages.flow_early import Received
from roost.stages.flow_routing import (
    FLOW,
    BucketTable,
    KeyRouting,
    PackedTuples,
    inputs_of,
    maps_of,
    node_of,
    ports_of,
    stage_of,
    unpacked,
    with_buckets,
)
from roost.stages.flow_share import MachineShare
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, View

STATE = "flow state"  # table of the state files, by operator
SEEN = "flow seen"  # table of the newest event time on any input, by operator
HOT_KEYS = "flow hot keys"  # table of the keys to aggregate before the exchange, by operator
MERGED = "merged"  # in a subquery's choice: batches whose files are merged
TIER = 4  # a file is merged with newer ones unless it is so many times as large
WHOLE = 20_000  # rows of state without end that are rewritten in each batch


@dataclass(frozen=True)
class SubqueryTask(Task):
    """A stateful operator and the stateless ones after it."""

    batch: FlowBatch
    node: str
    buckets: BucketMap
    grid: tuple[int, int] | None
    files: Files
    state: tuple[tuple[StateFile, bool], ...]  # files of the state, and whether to merge each
    before: BucketMap | None  # map of the batch before, if it was another

    def build(self, machine: int, cache: WorkerCache) -> SubqueryWork:
        """Build one machine's work."""
        return SubqueryWork(self, machine, cache)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> Progress:
        """Return the progress after the batch."""
        newest = {}
        for stage, values in marks.items():
            times = [value for value in values if value != NO_TUPLE]
            if times:
                newest[node_of(stage)] = max(times)
        return self.batch.after(newest)


class SubqueryWork(Work):
    """One machine's share of a subquery."""

    def __init__(self, task: SubqueryTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._machine = machine
        self._cache = cache
        self._node = task.batch.graph.by_name[task.node]
        self._inputs: list[list[PackedTuples | pa.Table]] = [[] for _ in self._node.inputs]
        self._emitter = Emitter(task.batch, task.node, machine)
        self._state: StateFile | None = None
        self._seen: int | None = None
        self._load: MachineLoad | None = None
        self._share = MachineShare(self._node, task.buckets, task.grid, machine)
        self._counts: dict[str, float] = {"read_bytes": 0.0, "sent_twice": 0.0, RECEIVING: 0.0}

    def process(self, port: str, block: PackedTuples | pa.Table) -> tuple[()]:
        """Collect tuples: windows and pairs need all of them."""
        side = int(port.rpartition(".")[2])
        if not isinstance(block, PackedTuples):  # no exchange brought it
            keys = self._task.batch.graph.stages.shared[self._task.node].keys[side]
            block = with_buckets(block, keys, self._task.buckets.buckets)
        self._inputs[side].append(block)
        return ()

    def finish(self, marks: Progress) -> Iterator[Output]:
        """Run the operator; yield the tuples that it makes."""
        task, node = self._task, self._node
        started = time.process_time()
        received = self._received()
        self._counts[RECEIVING] = time.process_time() - started
        newest = (one.newest for one in received)
        self._seen = max((time for time in newest if time is not None), default=None)
        before = task.batch.before.input_watermark(node)
        keys = node.keys or ((),) * len(received)
        loads = [one.load(names) for one, names in zip(received, keys, strict=True)]
        self._counts["sent_twice"] = self._share.sent_twice(loads[:1] if node.mirrored else loads)
        ran, old = self._run(received, before, marks.input_watermark(node))
        self._emitter.rejected += ran.rejected
        if ran.output is not None and ran.output.num_rows:
            yield from self._emitter.emit(ran.output)
            yield from self._emitter.flush()
        name = task.files.name(task.batch.prefix, f"{self._machine:05d}", ".state")
        tables = self._share.stored(ran.state)
        self._load = counted(
            loads,
            [*old, tables],
            task.buckets.buckets,
            self._share.cells(),
            node.keys,
            task.batch.number,
            mirrored=node.mirrored,
        )
        if node.mirrored:
            tables = {side: table for side, table in tables.items() if side != "right"}
        buckets = max(task.grid) if task.grid is not None else task.buckets.buckets
        self._state = write_state(task.files, name, tables, buckets, ran.needed_until)

    def _received(self) -> list[Received]:
        """Return the input by side."""
        if self._task.batch.aggregates_before(self._node.name):
            return [Received.with_partials(self._inputs[0], self._node)]
        found = [Received(unpacked(blocks)) for blocks in self._inputs]
        return [found[0]] * 2 if self._node.mirrored else found

    def _run(
        self, received: Sequence[Received], before: int, after: int
    ) -> tuple[Ran, list[Mapping[str, pa.Table]]]:
        """Run the operator; returns also the old state that it does not replace."""
        task, node = self._task, self._node
        ordered = node.name in task.batch.graph.ordered
        share = self._share
        mine = share.belongs if share.divided else None
        work: AggregateWork | PairWork
        if isinstance(node.operator, Aggregate):
            work = AggregateWork(node, ordered, received[0].partials, mine=mine)
        else:
            owned = share.cells()
            cells = [] if owned is None else [tuple(cell) for cell in np.argwhere(owned).tolist()]
            work = PairWork(node, ordered, cells, mine, 0 if task.grid is None else task.grid[1])
        needed = share.buckets()
        mask = bucket_mask(np.concatenate(list(needed.values())))
        old, read = [], []
        for file, merge in task.state:
            tables = {}
            if file.has(mask):
                tables = read_state(task.files, file.name, needed, self._cache)
            if not tables:
                continue
            if share.divided:
                tables = share.readable(tables)
            read.append(tables)
            if node.mirrored:
                tables = {"right": tables["left"], **tables}
            old.append(OldState(tables, merge))
        if task.before is not None:
            self._counts["read_bytes"] = share.read_bytes(task.before, read)
        ran = work.run([one.tuples for one in received], old, before, after)
        return ran, [state.tables for state in old if not state.merge]

    def report(self) -> Report:
        """Report the files."""
        sinks, dead = self._emitter.close()
        state = self._state
        counts = {"state_bytes": 0 if state is None else state.nbytes, **self._counts}
        if self._task.grid is not None:
            rows = (sum(block.num_rows for block in blocks) for blocks in self._inputs)
            counts |= dict(zip(SIDES, rows, strict=True))
        rejected = count_rejected(self._emitter.rejected)
        written = dict(self._emitter.written)
        value = FlowValue(sinks, dead, state, None, written, rejected, self._seen, self._load)
        return Report(value, counts)


@dataclass(frozen=True)
class StateEntry:
    """The state files that one batch wrote."""

    batch: int
    files: tuple[StateFile, ...]

    @property
    def rows(self) -> int:
        """Number of rows of all files."""
        return sum(file.rows for file in self.files)

    def to_json(self) -> Any:
        """Return the entry as JSON."""
        return [self.batch, [file.to_json() for file in self.files]]

    @classmethod
    def from_json(cls, data: Any) -> StateEntry:
        """Invert :meth:`to_json`."""
        return cls(data[0], tuple(StateFile(*file) for file in data[1]))


@dataclass
class SubqueryStage(Stage):
    """Runs a subquery; its state is the list of live state files, and its bucket map."""

    graph: FlowGraph
    node: Node
    table: BucketTable | None  # None if it shares the bucket map of another stage
    files: Files
    shared: FlowSettings
    entries: tuple[StateEntry, ...] = field(init=False, default=())
    seen: int | None = field(init=False, default=None)  # newest event time on any input
    hot: tuple[int, ...] = field(init=False, default=())  # keys to aggregate before the exchange

    def __post_init__(self) -> None:
        """Derive names and ports from the graph."""
        name = self.node.name
        self.name = stage_of(name)
        self.inputs = inputs_of(self.graph, name)
        self.outputs = tuple(ports_of(self.graph, name).values())
        self.buckets = stage_of(self.graph.stages.root(name))  # routing with its bucket map
        if self.graph.stages.receives(name):
            self.routing = self.buckets
            self.within = self.buckets if self.buckets != self.name else None
        sources = (n.name for n in self.graph.nodes if isinstance(n.operator, Source))
        self.marks = tuple(stage_of(source) for source in sources)
        self.kinds = self.shared.kinds(self.graph, name)

    def routing_table(self) -> BucketTable | None:
        """Return the bucket maps, if it has its own."""
        return self.table

    def open(self, view: View) -> None:
        """Read the list of state files, and the number of the newest bucket map."""
        found = view.get(STATE, self.node.name) or []
        self.entries = tuple(map(StateEntry.from_json, found))
        self.seen = view.get(SEEN, self.node.name)
        self.hot = tuple(view.get(HOT_KEYS, self.node.name) or ())
        if self.table is not None:
            last = view.last(maps_of(self.node.name))
            self.table.epoch = 0 if last is None else last[0]

    def intend(self) -> dict[str, list[int]]:
        """Return the hot keys, and the batches whose files this batch merges into its own."""
        return {MERGED: self._to_merge(), HOT: list(self.hot)}

    def _to_merge(self) -> list[int]:
        """Choose batches whose files to merge.

        Files of windows that end soon are deleted before many of them exist. State without end has
        one row per key only if it is merged; a large one is too expensive to rewrite in each batch.
        """
        small = self.node.size is None and sum(entry.rows for entry in self.entries) < WHOLE
        if len(self.entries) < TIER and not small:
            return []
        merged: list[int] = []
        rows = 0
        for entry in reversed(self.entries):
            if rows and entry.rows >= TIER * rows:
                break
            merged.append(entry.batch)
            rows += entry.rows
        return sorted(merged)

    def prepare(self, batch: Batch) -> SubqueryTask:
        """Return the task of a batch."""
        routing = batch.routings[self.buckets]
        assert isinstance(routing, KeyRouting)
        merged = set(batch.choices[self.name][MERGED])
        state = tuple((f, e.batch in merged) for e in self.entries for f in e.files)
        flow = self.shared.batch(self.graph, batch)
        last = batch.before[self.buckets]
        assert isinstance(last, KeyRouting)
        before = last.map if last.map.owners != routing.map.owners else None
        return SubqueryTask(
            flow, self.node.name, routing.map, routing.grid, self.files, state, before
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """List the new files; drop merged ones and those that no open window needs.

        Old owners of moved buckets whose last window has closed leave the bucket map.
        """
        mine = reports[self.name]
        progress: Progress = batch.outcomes[FLOW].result
        watermark = progress.input_watermark(self.node)
        merged = set(batch.choices[self.name][MERGED])
        new = tuple(report.value.state for report in mine if report.value.state is not None)
        entries = []
        for entry in (*self.entries, StateEntry(batch.number, new)):
            files = tuple(f for f in entry.files if f.needed_until > watermark)
            if files and entry.batch not in merged:
                entries.append(StateEntry(entry.batch, files))
        facts = [Fact(STATE, self.node.name, [entry.to_json() for entry in entries])]
        times = (self.seen, *(report.value.seen for report in mine))
        seen = max((time for time in times if time is not None), default=None)
        facts.append(Fact(SEEN, self.node.name, seen))
        epoch = self.epoch
        if self.table is not None:
            newest = self.table.current.completed(watermark)
            if newest is not None:
                facts.append(self.table.fact(newest))
                epoch = newest.epoch
        live = [file for entry in entries for file in entry.files]
        state = {
            "files": len(live),
            "rows": sum(file.rows for file in live),
            "bytes": sum(file.nbytes for file in live),
        }
        moved = {
            name: total
            for name in ("read_bytes", "sent_twice")
            if (total := sum(report.counts[name] for report in mine))
        }
        more = {"moved": {self.node.name: moved}} if moved else {}
        metrics = flow_metrics(mine, state={self.node.name: state}, **more)
        loads = [(report.value.load, report.seconds) for report in mine]
        result = tuple(entries), seen, epoch
        return Outcome(flow_files(mine), facts, metrics, observed=loads, result=result)

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue with the files of the batch."""
        self.entries, self.seen, epoch = outcome.result
        if self.table is not None:
            self.table.epoch = epoch

    def cleanup(self) -> None:
        """Delete files that are not listed."""
        self.files.delete("", keep={f.name for entry in self.entries for f in entry.files})

    def state(self) -> Any:
        """Return state files, newest event time, hot keys and the number of the bucket map."""
        return self.entries, self.seen, self.hot, self.epoch

    @property
    def epoch(self) -> int | None:
        """Epoch of its own bucket map."""
        return None if self.table is None else self.table.epoch
