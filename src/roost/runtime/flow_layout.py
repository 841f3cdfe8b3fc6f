"""Chooses the layout of a dataflow: its stages, their machines, and the grids of Products.

The choice is recorded when a state directory is made, so a restart repeats it. Machines are divided
by the costs of a sample run, at least one for each stage. By these costs, ``auto`` also decides
whether operators share tasks where there are more machines than cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from roost.dataflow.buckets import BUCKETS, BucketMap
from roost.dataflow.colocation import divide, divisions
from roost.dataflow.compiler import (
    LayoutCosts,
    busiest_share,
    cheapest,
    fewest_channels,
    split_machines,
)
from roost.dataflow.division import Division, Shared
from roost.dataflow.grids import grid_sides, tiled
from roost.dataflow.operators import Product, Source
from roost.dataflow.schema import FlowGraph, Node
from roost.errors import DataflowError
from roost.model.choices import LayoutName
from roost.stages.flow_routing import FLOW, LAYOUT, BucketTable, maps_of, stage_of
from roost.stages.flow_stateless import EvenTable
from roost.storage.store import Fact, Store

SHARING_GAIN = 0.1  # by which sharing tasks must be predicted to be faster; samples vary by as much


@dataclass(frozen=True)
class Sample:
    """What a sample run measured: processor seconds by stage, tuples by input of Products.

    ``fixed`` is the part of the seconds that a machine pays whatever the number of rows.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    tuples: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0

    def scaled(self, rows: float) -> Sample:
        """Return what a batch with another number of rows would cost."""
        if not self.rows:
            return self
        least = {name: self.fixed.get(name, 0.0) for name in self.seconds}
        seconds = {
            name: least[name] + (seconds - least[name]) * rows / self.rows
            for name, seconds in self.seconds.items()
        }
        return replace(self, seconds=seconds, rows=round(rows))


class StageCosts(NamedTuple):
    """What stages cost in a batch, in the same order: all, and what every machine pays of it.

    Stateful stages have a number of buckets, and a machine has whole ones.
    """

    seconds: Sequence[float]
    fixed: Sequence[float]
    buckets: Sequence[int]  # 0 of stages without buckets

    @classmethod
    def of(
        cls,
        sample: Sample,
        graph: FlowGraph,
        members: Iterable[Iterable[str]],
        buckets: int = BUCKETS,
    ) -> StageCosts:
        """Add up the costs of the operators of each stage."""
        groups = [list(names) for names in members]
        stateful = {node.name for node in graph.nodes if node.operator.stateful}
        seconds, fixed = (
            [sum(cost.get(name, 0.0) for name in names) for names in groups]
            for cost in (sample.seconds, sample.fixed)
        )
        parts = [buckets if stateful.intersection(names) else 0 for names in groups]
        return cls(seconds, fixed, parts)

    def split(self, machines: int, least: int = 1) -> tuple[int, ...]:
        """Divide machines among the stages."""
        return split_machines(machines, self.seconds, least, self.fixed, self.buckets)

    def machines(self, split: Sequence[int]) -> list[float]:
        """Return the seconds of the busiest machine of each stage."""
        stages = zip(self.seconds, self.fixed, self.buckets, split, strict=True)
        return [
            fixed + (seconds - fixed) * busiest_share(count, buckets)
            for seconds, fixed, buckets, count in stages
        ]


@dataclass(frozen=True)
class FlowLayout:
    """A dataflow with its stages, and the machines of each stage that an exchange precedes."""

    graph: FlowGraph
    machines: Mapping[str, int]
    tuples: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by input of Products
    name: LayoutName = LayoutName.AUTO
    sample: Sample = field(default_factory=Sample)  # by which machines are divided

    def size_of(self, stage: str, machines: int) -> int:
        """Return the machines of a stage if there are ``machines``, each with a core."""
        return shares(self.graph, self.name, machines, machines, self.sample)[stage]

    def bucket_table(
        self, store: Store, node: Node, buckets: int = BUCKETS, *, keep: bool = False
    ) -> BucketTable | None:
        """Return the bucket maps of a stateful operator; None if it shares those of another.

        State files are sorted by bucket, so the first map decides the number of buckets. Unless it
        is to ``keep`` its machines, a map that was made for another number is replaced.
        """
        if self.graph.stages.root(node.name) != node.name:
            return None
        machines, rates = self.machines[node.name], self.tuples.get(node.name, (1, 1))
        last = store.last(maps_of(node.name))
        buckets = buckets if last is None else len(last[1]["owners"])
        grid = grid_sides(*rates, buckets) if _is_product(node) else None
        even = BucketMap.even(machines, buckets) if grid is None else tiled(machines, grid, *rates)
        size_of = partial(self.size_of, node.name)
        table = BucketTable(stage_of(node.name), self.graph, node, store, 0, grid, size_of)
        if last is None:
            store.record(table.fact(even))
            return table
        known = BucketMap.from_json(*last)
        if known.configured != machines and not keep:
            reason = f"the settings have {machines} machines instead of {known.configured}"
            known = known.resettled(even, reason)
            store.record(table.fact(known))
        table.epoch = known.epoch
        return table

    def even_table(self, store: Store, node: Node, *, keep: bool = False) -> EvenTable:
        """Return how the tuples of a stateless stage are dealt."""
        count = self.machines[node.name]
        last = store.last(maps_of(node.name))
        epoch = 0 if last is None else int(last[0])
        size_of = partial(self.size_of, node.name)
        table = EvenTable(stage_of(node.name), node, store, epoch, size_of)
        if last is None or (last[1]["machines"] != count and not keep):
            table.epoch += last is not None
            store.record(table.fact(table.epoch, count))
        return table


def lay_out(
    store: Store,
    graph: FlowGraph,
    layout: LayoutName,
    machines: int,
    slots: int,
    sample: Callable[[Division], Sample | None] = lambda division: None,
    model: Callable[[FlowGraph], LayoutCosts] | None = None,
    rate: float = 20_000,
    buckets: int = BUCKETS,
) -> FlowLayout:
    """Choose or repeat the layout of a dataflow.

    ``machines`` is the number of machines for each stateful operator, on average. Tasks run on
    ``slots`` cores, one level of stages after the other. ``sample`` runs a sample of a division, if
    its result matters; a batch has ``rate`` rows, and subqueries have ``buckets``. ``model``
    measures what exchanges cost; without it, fewest hops are cheapest.
    """
    known = store.get(FLOW, LAYOUT)
    if known is None:
        apart = layout is LayoutName.AUTO and _apart(graph, machines, model)
        runs = LayoutName.OPERATOR_CLOUD if apart else layout
        measured = layout.divides or machines > slots or any(map(_is_product, graph.nodes))
        choices: list[tuple[float, Division, Sample]] = []
        # Without more machines than cores, tasks that are shared cost no more.
        for division in divisions(graph, runs)[: 2 if machines > slots else 1]:
            found = (sample(division) if measured else None) or Sample()
            found = found.scaled(rate)
            divided = replace(graph, division=division)
            split = shares(divided, runs, machines, slots, found, buckets)
            members = (members_of(divided, stage) for stage in split)
            costs = StageCosts.of(found, divided, members, buckets)
            busiest = max(costs.machines(list(split.values())), default=0.0)
            choices.append((busiest, division, found))
        _, division, found = choices[preferred([busiest for busiest, *_ in choices])]
        known = {
            "shared": {name: list(one) for name, one in division.shared.items()},
            "apart": apart,
            "seconds": {runs.value: dict(found.seconds)},
            "fixed": dict(found.fixed),
            "tuples": dict(found.tuples),
        }
        store.record(Fact(FLOW, LAYOUT, known))
    if layout is LayoutName.AUTO and known["apart"]:
        layout = LayoutName.OPERATOR_CLOUD
    shared = {
        name: Shared(root, tuple(map(tuple, keys)), *sent)
        for name, (root, keys, *sent) in known["shared"].items()
    }
    if shared and layout is not LayoutName.AUTO:
        name, (root, *_) = next(iter(shared.items()))
        problem = (
            f"its state is stored by the buckets of {root!r}, as the layout auto places it; use "
            f"dataflow.layout auto instead of {layout}, or another out.state"
        )
        raise DataflowError(name, problem)
    graph = replace(graph, division=divide(graph, layout, shared))
    recorded = Sample(known["seconds"].get(layout.value, {}), fixed=known.get("fixed", {}))
    split = shares(graph, layout, machines, slots, recorded, buckets)
    tuples = {name: (left, right) for name, (left, right) in known["tuples"].items()}
    return FlowLayout(graph, split, tuples, layout, recorded)


def preferred(busiest: Sequence[float]) -> int:
    """Return which of :func:`roost.dataflow.colocation.divisions` to use, by the busiest machines.

    Where both are predicted to be alike, operators with machines of their own are the safer choice:
    keys are never divided quite evenly, and in shared tasks their imbalances add up.

    Examples
    --------
    >>> preferred([1.0]), preferred([0.85, 1.0]), preferred([0.95, 1.0])
    (0, 0, 1)
    """
    return int(len(busiest) > 1 and busiest[0] > (1.0 - SHARING_GAIN) * busiest[1])


def _is_product(node: Node) -> bool:
    return isinstance(node.operator, Product)


def _apart(
    graph: FlowGraph, machines: int, model: Callable[[FlowGraph], LayoutCosts] | None
) -> bool:
    """Return whether a stage for each operator is the cheapest layout.

    Measuring takes some tenths of a second, and is only needed where few hops cost channels.
    """
    total = machines * (1 + sum(node.operator.stateful for node in graph.nodes))
    if model is None or fewest_channels(graph, total) is not LayoutName.OPERATOR_CLOUD:
        return False
    return cheapest(graph, total, model(graph)) is LayoutName.OPERATOR_CLOUD


def shares(
    graph: FlowGraph,
    layout: LayoutName,
    machines: int,
    slots: int,
    sample: Sample,
    buckets: int = BUCKETS,
) -> dict[str, int]:
    """Return the machines of each stage that an exchange precedes.

    There are ``machines`` for each stateful operator. In ``query_cloud`` every stage has all of
    them; else they are divided by what the stages cost in a sample. As levels run one after the
    other, a stage with fewer machines than cores would leave some idle: ``auto`` avoids that.
    """
    stages = exchanged(graph)
    stateful = sum(node.operator.stateful for node in graph.nodes)
    total = max(machines * stateful, 1)
    if layout is LayoutName.QUERY_CLOUD:
        return dict.fromkeys(stages, total)
    if layout is LayoutName.AUTO and machines <= slots:
        total = max(machines * len(stages), 1)
    members = (members_of(graph, stage) for stage in stages)
    costs = StageCosts.of(sample, graph, members, buckets)
    least = min(machines, slots) if layout is LayoutName.AUTO else 1
    return dict(zip(stages, costs.split(total, least), strict=True))


def exchanged(graph: FlowGraph) -> list[str]:
    """Return the stages that an exchange precedes."""
    division = graph.stages
    return [
        node.name
        for node in graph.nodes
        if node.name in division.starts
        and not isinstance(node.operator, Source)
        and node.name not in division.shared
    ]


def members_of(graph: FlowGraph, stage: str) -> set[str]:
    """Return the operators that run in the tasks of a stage."""
    found = {stage}
    division = graph.stages
    for node in graph.nodes:
        if node.name in division.shared:
            inside = division.root(node.name) == stage
        else:
            read = {port.node for port in node.operator.inputs}
            inside = node.name not in division.starts and bool(found & read)
        if inside:
            found.add(node.name)
    return found
