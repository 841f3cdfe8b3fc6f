"""Dataflows on emulated machines: the parts of :mod:`roost.bench.cluster` with a dataflow.

Machines work concurrently, each on the batches that reach it, so throughput is the input tuples of
a batch over the time of the busiest machine. In ``query_cloud`` a machine runs its part of every
subquery; in the other layouts, one part.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cluster import EmulatedExecutor, PartTime
from roost.dataflow.colocation import divide, divisions
from roost.dataflow.compiler import cheapest
from roost.dataflow.division import Division
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Source
from roost.dataflow.schema import FlowGraph, resolve
from roost.model.arrays import as_arrow
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.runtime.executor import Executor, SliceInputs
from roost.runtime.flow import flow_stages
from roost.runtime.flow_layout import (
    FlowLayout,
    Sample,
    StageCosts,
    exchanged,
    members_of,
    preferred,
)
from roost.runtime.flow_sample import sample_flow
from roost.runtime.loop import BatchLoop
from roost.stages.decode import ROW
from roost.stages.flow_costs import measure_exchange
from roost.stages.flow_routing import stage_of
from roost.stages.slices import Slice, cut
from roost.storage.cache import WorkerCache
from roost.storage.store import Store


@dataclass(frozen=True)
class MemorySlice(Slice):
    """Rows of a table in memory."""

    table: pa.Table = field(default_factory=lambda: pa.table({}))
    first: int = 0  # number of the first row

    def read(self, columns: Sequence[str], cache: WorkerCache) -> pa.Table:
        """Return some columns, with row numbers."""
        rows = self.table.slice(self.start, self.stop - self.start)
        names = [name for name in rows.column_names if name in columns]
        start = self.first + self.start
        numbers = as_arrow(np.arange(start, start + rows.num_rows))
        return rows.select(names).append_column(ROW, numbers)


@dataclass(frozen=True)
class FlowInputs(SliceInputs):
    """Rows of sources, read by a fixed number of machines."""

    readers: int = 1

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[FlowInputs, Mapping[str, Sequence[int]]]:
        """Divide the rows of each source evenly."""
        every = {stage: range(self.readers) for stage in self.slices}
        groups = {
            (stage, machine): group
            for stage, slices in self.slices.items()
            for machine, group in enumerate(cut(slices, self.readers))
        }
        return replace(self, groups=groups), every


class MachineTime(NamedTuple):
    """Processor time of a machine in a batch."""

    work: float
    exchange: float  # dividing, packing, pickling and unpacking blocks

    @property
    def busy(self) -> float:
        """Time in which the machine is not idle."""
        return self.work + self.exchange


class Sampler:
    """Runs a sample of each division of a dataflow once."""

    def __init__(self, flow: Dataflow, rows: pa.Table) -> None:
        self.flow, self._rows = flow, rows
        self._known: list[tuple[Division, Sample]] = []

    def __call__(self, division: Division) -> Sample:
        """Return what the operators of a division cost."""
        for known, found in self._known:
            if known == division:
                return found
        graph = resolve(self.flow.name, self.flow.operators)
        sample = sample_flow(self.flow, slices_of(graph, self._rows), division)
        assert sample is not None
        self._known.append((division, sample))
        return sample


def machines_of(
    sample: Sampler, layout: LayoutName, machines: int, rate: float
) -> tuple[FlowLayout, int, LayoutName]:
    """Place a dataflow on machines by sample runs; returns readers and the layout that runs.

    ``auto`` shares tasks if that leaves the busiest machine clearly less to do.
    """
    flow = sample.flow
    graph = resolve(flow.name, flow.operators)
    if layout is LayoutName.AUTO:
        chosen = cheapest(graph, machines, measure_exchange(graph, rate))
        layout = chosen if chosen is LayoutName.OPERATOR_CLOUD else layout
    if layout is LayoutName.QUERY_CLOUD:
        graph = replace(graph, division=divide(graph, layout))
        return FlowLayout(graph, dict.fromkeys(exchanged(graph), machines)), machines, layout
    choices: list[tuple[float, FlowLayout, int]] = []
    for division in divisions(graph, layout):
        found = sample(division)
        divided = replace(graph, division=division)
        stages = exchanged(divided)
        members = [members_of(divided, stage) for stage in stages]
        reading = set(found.seconds).difference(*members)  # sources are the prefix
        costs = StageCosts.of(found.scaled(rate), divided, [reading, *members])
        split = costs.split(machines)
        placed = FlowLayout(divided, dict(zip(stages, split[1:], strict=True)))
        choices.append((max(costs.machines(split)), placed, split[0]))
    _, placed, readers = choices[preferred([busiest for busiest, *_ in choices])]
    return placed, readers, layout


def slices_of(graph: FlowGraph, rows: pa.Table, first: int = 0) -> dict[str, list[Slice]]:
    """Return rows as the slices of a dataflow's only source."""
    (source,) = (node.name for node in graph.nodes if isinstance(node.operator, Source))
    return {stage_of(source): [MemorySlice(0, rows.num_rows, rows, first)]}


class EmulatedFlow:
    """One layout of a dataflow on a number of emulated machines."""

    def __init__(self, sample: Sampler, layout: LayoutName, machines: int, rate: float) -> None:
        flow = sample.flow
        placed, self.readers, self.layout = machines_of(sample, layout, machines, rate)
        self.machines, self.graph = machines, placed.graph
        self.placed: Mapping[str, int] = placed.machines
        self._folder = Path(tempfile.mkdtemp(prefix="roost-flow-"))
        self._executor = EmulatedExecutor(self.readers)
        config = RunConfig(out={"dir": self._folder})
        self._store = Store(self._folder / "state")
        stages = flow_stages(
            config, self._store, self._executor, flow, {}, lambda: 0.0, layout=placed
        )
        self._loop = BatchLoop(self._store, None, None, stages, self._executor, self._folder)
        self._number = self._read = 0

    def close(self) -> None:
        """Delete state and output."""
        self._store.close()
        shutil.rmtree(self._folder)

    def run(self, rows: pa.Table) -> list[MachineTime]:
        """Run a batch; returns the time of each machine."""
        slices = slices_of(self.graph, rows, self._read)
        offsets = {stage: [self._read, self._read + rows.num_rows] for stage in slices}
        self._loop.run(self._number, offsets, FlowInputs(slices, readers=self.readers))
        self._number += 1
        self._read += rows.num_rows
        times: dict[tuple[str, int], list[PartTime]] = defaultdict(list)
        for (root, machine), part in self._executor.parts.items():
            times["" if self.layout is LayoutName.QUERY_CLOUD else root, machine].append(part)
        return [
            MachineTime(
                sum(part.seconds - part.exchange for part in parts),
                sum(part.exchange + part.pickling for part in parts),
            )
            for parts in times.values()
        ]

    def results(self, sink: str) -> int:
        """Return the number of rows in a sink."""
        files = (self._folder / sink).glob("*.parquet")
        return sum(pq.read_metadata(file).num_rows for file in files)
