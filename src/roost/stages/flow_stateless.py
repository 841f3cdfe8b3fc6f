"""Stages of stateless operators, which exist in the layout ``operator_cloud`` only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from roost.dataflow.blocks import ORDER, TIME
from roost.dataflow.buckets import bucket_of
from roost.dataflow.schema import FlowGraph, Node
from roost.errors import StateError
from roost.model.schemas import is_text
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
    RECEIVING,
    Emitter,
    FlowBatch,
    FlowSettings,
    FlowValue,
    count_rejected,
    flow_files,
    flow_metrics,
)
from roost.stages.flow_routing import (
    PackedTuples,
    inputs_of,
    maps_of,
    pieces,
    ports_of,
    stage_of,
    unpacked,
)
from roost.storage.cache import WorkerCache
from roost.storage.store import Fact, View


@dataclass(frozen=True)
class EvenRouting:
    """Deals tuples evenly, by their values: a repeated task deals them the same way."""

    epoch: int
    machines: int

    local = False

    def split(
        self, port: str, block: pa.Table, cache: WorkerCache
    ) -> Iterator[tuple[int, PackedTuples]]:
        """Divide tuples by machine."""
        columns = [ORDER] if ORDER in block.column_names else _hashed(block.schema)
        hashed = [block[TIME], *(block[name] for name in columns)]
        machines = bucket_of(hashed, block.num_rows, self.machines)
        order = np.argsort(machines, kind="stable")
        borders = np.searchsorted(machines[order], np.arange(self.machines + 1)).tolist()
        yield from pieces(block, order, borders)


def _hashed(schema: pa.Schema) -> list[str]:
    """Return the columns that have a hash."""
    return [f.name for f in schema if pa.types.is_primitive(f.type) or is_text(f.type)]


@dataclass
class EvenTable:
    """How many machines a stateless stage has, by epoch."""

    name: str
    node: Node
    view: View
    epoch: int
    size_of: Callable[[int], int] = lambda machines: machines

    @property
    def records(self) -> str:
        """Table of the numbers."""
        return maps_of(self.node.name)

    def at(self, epoch: int) -> EvenRouting:
        """Return the routing of an epoch."""
        body = self.view.get(self.records, epoch)
        if body is None:
            raise StateError(f"the state has no machines of {self.node.name!r}, epoch {epoch}")
        return EvenRouting(epoch, body["machines"])

    def fact(self, epoch: int, machines: int) -> Fact:
        """Return the row of an epoch."""
        return Fact(self.records, epoch, {"machines": machines})


@dataclass(frozen=True)
class StatelessTask(Task):
    """A stateless operator on machines of its own."""

    batch: FlowBatch
    node: str

    def build(self, machine: int, cache: WorkerCache) -> StatelessWork:
        """Build one machine's work."""
        return StatelessWork(self, machine)


class StatelessWork(Work):
    """One machine's share of a stateless operator."""

    def __init__(self, task: StatelessTask, machine: int) -> None:
        self._emitter = Emitter(task.batch, task.node, machine)
        self._receiving = 0.0

    def process(self, port: str, block: PackedTuples) -> Iterator[Output]:
        """Yield what the operator makes of a block."""
        started = time.process_time()
        table = unpacked([block])
        self._receiving += time.process_time() - started
        yield from self._emitter.apply(table)

    def finish(self, marks: Any) -> Iterator[Output]:
        """Yield what was aggregated before the exchange."""
        yield from self._emitter.flush()

    def report(self) -> Report:
        """Report the files."""
        sinks, dead = self._emitter.close()
        rejected = count_rejected(self._emitter.rejected)
        value = FlowValue(sinks, dead, written=dict(self._emitter.written), rejected=rejected)
        return Report(value, {RECEIVING: self._receiving})


@dataclass
class StatelessStage(Stage):
    """Runs a stateless operator; it has no state."""

    graph: FlowGraph
    node: Node
    table: EvenTable
    shared: FlowSettings

    def __post_init__(self) -> None:
        """Derive names and ports from the graph."""
        name = self.node.name
        self.name = self.routing = stage_of(name)
        self.inputs = inputs_of(self.graph, name)
        self.outputs = tuple(ports_of(self.graph, name).values())
        self.kinds = self.shared.kinds(self.graph, name)

    def routing_table(self) -> EvenTable:
        """Return how tuples are dealt."""
        return self.table

    def prepare(self, batch: Batch) -> StatelessTask:
        """Return the task of a batch."""
        return StatelessTask(self.shared.batch(self.graph, batch), self.node.name)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Collect the files."""
        mine = reports[self.name]
        return Outcome(flow_files(mine), metrics=flow_metrics(mine))
