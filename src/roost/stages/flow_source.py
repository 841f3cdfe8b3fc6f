"""Sources of a dataflow: records that tasks read, and the points and matches of the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from roost.dataflow.blocks import ORDER, TIME
from roost.dataflow.operators import Source, SourceKind
from roost.dataflow.order import integer_bytes, key_bytes, made_order
from roost.dataflow.schema import FlowGraph, Node, StreamSchema
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import one_array, times_as_int
from roost.model.records import TIME_LIMIT, DeadLetter, Reason
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
from roost.stages.decode import (
    MALFORMED,
    ROW,
    PointSchema,
    RowFaults,
    malformed,
    nulls,
    rejected,
    typed_column,
)
from roost.stages.flow import (
    CLOCK_UNIT,
    NO_TUPLE,
    Emitter,
    FlowBatch,
    FlowSettings,
    FlowValue,
    count_rejected,
    flow_files,
    flow_metrics,
)
from roost.stages.flow_routing import ports_of, stage_of
from roost.stages.json_lines import read_json_messages
from roost.stages.matching import GATHERED, PAIRS, Gathered, PairChunk
from roost.stages.reading import messages_of, read_blocks
from roost.stages.writers import write_dead
from roost.storage.cache import WorkerCache
from roost.storage.totals import add_nested

QUERY_ID = "query_id"
PORTS = {
    SourceKind.RECORDS: (),
    SourceKind.POINTS: (GATHERED,),
    SourceKind.MATCHES: (PAIRS,),
}
"""Ports of matching that a source reads."""


def own_schemas(points: PointSchema, query_id: pa.DataType) -> dict[SourceKind, StreamSchema]:
    """Return the schemas of the points and matches of a run.

    A match has the identifier of its query and the columns of its point.
    """
    fields = [
        pa.field(f.name, points.time_type) if f.name == points.time else f
        for f in points.attributes
    ]
    of_points = StreamSchema(pa.schema(fields), points.time)
    matched = [pa.field(QUERY_ID, query_id), *(f for f in fields if f.name != QUERY_ID)]
    of_matches = StreamSchema(pa.schema(matched), points.time)
    return {SourceKind.POINTS: of_points, SourceKind.MATCHES: of_matches}


@dataclass(frozen=True)
class SourceTask(Task):
    """How the machines of a batch read a source."""

    batch: FlowBatch
    node: str
    late_before: int
    json_column: str | None = None  # of a stream: holds each record as JSON text

    def build(self, machine: int, cache: WorkerCache) -> SourceWork:
        """Build one machine's work."""
        return SourceWork(self, machine, cache)


class SourceWork(Work):
    """Reads one machine's share of a source."""

    def __init__(self, task: SourceTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._cache = cache
        self._machine = machine
        self._node = task.batch.graph.by_name[task.node]
        self._emitter = Emitter(task.batch, task.node, machine)
        self._dead: list[DeadLetter] = []
        self._newest: int | None = None
        self._rows = 0

    def process(self, port: str, block: Any) -> Iterator[Output]:
        """Read a group of slices, a record batch, or what matching passes on."""
        for table in self._tables(block):
            self._rows += table.num_rows
            tuples, dead = self._decode(table)
            self._dead += dead
            if tuples.num_rows:
                newest = int(as_numpy(one_array(tuples[TIME])).max())
                self._newest = newest if self._newest is None else max(newest, self._newest)
                yield from self._emitter.emit(tuples)

    def finish(self, marks: Any) -> Iterator[Output]:
        """Yield what was aggregated before the exchange."""
        yield from self._emitter.flush()

    def _tables(self, block: Any) -> Iterator[pa.Table]:
        assert self._node.output is not None
        schema = self._node.output.columns
        if isinstance(block, Gathered):
            yield pa.table({name: block.block.attributes[name] for name in schema.names})
        elif isinstance(block, PairChunk):
            yield from _matches(block, schema)
        elif self._task.json_column is not None and isinstance(block, pa.RecordBatch):
            exact = {field.name for field in schema if not pa.types.is_floating(field.type)}
            yield read_json_messages(messages_of(block, self._task.json_column), exact)
        else:
            yield from read_blocks(block, [*schema.names, ROW, MALFORMED], self._cache)

    def _decode(self, table: pa.Table) -> tuple[pa.Table, list[DeadLetter]]:
        """Divide rows into tuples and rejected rows."""
        task, stream, operator = self._task, self._node.output, self._node.operator
        assert stream is not None and isinstance(operator, Source)
        faults = RowFaults(table.num_rows)
        malformed(table, faults)
        columns: dict[str, pa.Array] = {}
        for field in stream.columns:
            if (
                operator.kind is SourceKind.RECORDS
                and operator.time is None
                and field.name == stream.time
            ):
                ticks = np.full(table.num_rows, round(task.batch.clock * CLOCK_UNIT), np.int64)
                columns[field.name] = as_arrow(ticks).cast(field.type)
            elif field.name in table.column_names or field.name == stream.time:
                columns[field.name] = typed_column(table, field.name, field.type, faults)
            else:
                columns[field.name] = pa.nulls(table.num_rows, field.type)
        time = columns[stream.time]
        faults.mark(nulls(time), Reason.NULL_TIME, f"{stream.time} is null")
        times = times_as_int(time)
        far = (times <= -TIME_LIMIT) | (times >= TIME_LIMIT)
        faults.mark(far, Reason.WRONG_TYPE, f"{stream.time} is not between -2**62 and 2**62")
        faults.mark(times < task.late_before, Reason.LATE, f"{stream.time} is before the watermark")
        tuples = pa.table(columns).append_column(TIME, as_arrow(times))
        if task.node in task.batch.graph.ordered:
            tuples = tuples.append_column(ORDER, self._order(table, columns))
        if not faults.reasons:
            return tuples, []
        return tuples.filter(pa.array(faults.good)), rejected(table, faults)

    def _order(self, table: pa.Table, columns: dict[str, pa.Array]) -> pa.Array:
        """Return the order of rows: by row number or, without stable numbers, by content."""
        if ROW in table.column_names:
            parts = [integer_bytes(as_numpy(one_array(table[ROW])))]
        else:
            parts = [key_bytes(columns.values(), table.num_rows, nullable=True)]
        return made_order(self._node.number, parts, table.num_rows)

    def report(self) -> Report:
        """Report files and the newest event time, which reaches every machine as a mark."""
        batch = self._task.batch
        label = f"{self._node.number:03d}-r{self._machine:05d}"
        sinks, dead = self._emitter.close()
        dead += write_dead(
            batch.dead, batch.prefix, batch.number, self._node.name, self._dead, label
        )
        counts = {"rows": self._rows, "dead": len(self._dead)}
        mark = NO_TUPLE if self._newest is None else self._newest
        rejected = count_rejected(self._emitter.rejected)
        if self._dead:
            reasons = dict(Counter(str(record.reason) for record in self._dead))
            rejected = add_nested(rejected, {self._node.name: reasons})
        written = dict(self._emitter.written)
        value = FlowValue(sinks, dead, None, self._newest, written, rejected)
        return Report(value, counts, mark)


def _matches(chunk: PairChunk, schema: pa.Schema) -> Iterator[pa.Table]:
    """Return pairs as matches; those of standing queries have window results instead."""
    pairs, rows, slots = chunk.pairs, chunk.pairs.rows, chunk.pairs.slots
    if pairs.segment.outputs is not None:
        single = pairs.segment.outputs[slots] < 0
        rows, slots = rows[single], slots[single]
    if slots.size:
        index = as_arrow(rows.astype(np.int64))
        columns = {name: chunk.block.attributes[name].take(index) for name in schema.names[1:]}
        yield pa.table({QUERY_ID: pairs.segment.ids_at(slots), **columns})


@dataclass
class SourceStage(Stage):
    """Reads a source of records, or the points and matches of the run inside matching's tasks."""

    graph: FlowGraph
    node: Node
    shared: FlowSettings
    json_column: str | None = None  # of its stream, which is known when the stream starts

    def __post_init__(self) -> None:
        """Derive names and ports from the graph."""
        assert isinstance(self.node.operator, Source)
        self.name = stage_of(self.node.name)
        self.inputs = PORTS[self.node.operator.kind]
        self.outputs = tuple(ports_of(self.graph, self.node.name).values())
        self.kinds = self.shared.kinds(self.graph, self.node.name)

    def attributes(self, queries: Any) -> Iterable[str]:
        """Return the attributes of the points that the dataflow reads."""
        assert self.node.output is not None
        names = self.node.output.columns.names if self.inputs else []
        return [name for name in names if name != QUERY_ID]

    def prepare(self, batch: Batch) -> SourceTask:
        """Return the task of a batch."""
        flow = self.shared.batch(self.graph, batch)
        late = flow.before.watermark(self.node.name)
        return SourceTask(flow, self.node.name, late, self.json_column)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Add up what was read."""
        mine = reports[self.name]
        rows = sum(int(report.counts["rows"]) for report in mine)
        metrics = flow_metrics(mine, sources={self.node.name: rows})
        return Outcome(flow_files(mine), metrics=metrics)
