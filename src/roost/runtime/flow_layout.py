"""Chooses the layout of a dataflow: its stages, their machines, and the grids of Products.

The choice is recorded when a state directory is made, so a restart repeats it. Machines of
``operator_set`` and ``operator_cloud`` are divided by the costs of a sample run, at least one each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from roost.dataflow.buckets import BUCKETS, BucketMap
from roost.dataflow.colocation import divide
from roost.dataflow.compiler import CostModel, cheapest, fewest_channels, split_machines
from roost.dataflow.division import Shared
from roost.dataflow.grids import grid_sides, tiled
from roost.dataflow.operators import Product, Source
from roost.dataflow.schema import FlowGraph, Node
from roost.errors import DataflowError
from roost.model.choices import LayoutName
from roost.stages.flow_routing import FLOW, LAYOUT, BucketTable, maps_of, stage_of
from roost.stages.flow_stateless import EvenTable
from roost.storage.store import Fact, Store


@dataclass(frozen=True)
class Sample:
    """What a sample run measured: processor seconds by stage, tuples by input of Products."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    tuples: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlowLayout:
    """A dataflow with its stages, and the machines of each stage that an exchange precedes."""

    graph: FlowGraph
    machines: Mapping[str, int]
    tuples: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by input of Products

    def bucket_table(self, store: Store, node: Node, buckets: int = BUCKETS) -> BucketTable | None:
        """Return the bucket maps of a stateful operator; None if it shares those of another.

        State files are sorted by bucket, so the first map decides the number of buckets.
        """
        if self.graph.stages.root(node.name) != node.name:
            return None
        machines, rates = self.machines[node.name], self.tuples.get(node.name, (1, 1))
        last = store.last(maps_of(node.name))
        buckets = buckets if last is None else len(last[1]["owners"])
        grid = grid_sides(*rates, buckets) if _is_product(node) else None
        even = BucketMap.even(machines, buckets) if grid is None else tiled(machines, grid, *rates)
        table = BucketTable(stage_of(node.name), self.graph, node, store, 0, grid)
        if last is None:
            store.record(table.fact(even))
            return table
        known = BucketMap.from_json(*last)
        if known.configured != machines:
            reason = f"the settings have {machines} machines instead of {known.configured}"
            known = known.resettled(even, reason)
            store.record(table.fact(known))
        table.epoch = known.epoch
        return table

    def even_table(self, store: Store, node: Node) -> EvenTable:
        """Return how the tuples of a stateless stage are dealt."""
        count = self.machines[node.name]
        last = store.last(maps_of(node.name))
        epoch = 0 if last is None else int(last[0])
        if last is None or last[1]["machines"] != count:
            epoch += last is not None
            store.record(Fact(maps_of(node.name), epoch, {"machines": count}))
        return EvenTable(stage_of(node.name), node, store, epoch)


def lay_out(
    store: Store,
    graph: FlowGraph,
    layout: LayoutName,
    machines: int,
    slots: int,
    sample: Callable[[LayoutName], Sample | None] = lambda layout: None,
    model: Callable[[FlowGraph], CostModel] | None = None,
) -> FlowLayout:
    """Choose or repeat the layout of a dataflow.

    ``machines`` is the number of machines for each stateful operator, on average. Tasks run on
    ``slots`` cores, one level of stages after the other. ``sample`` runs a sample, if its result
    matters. ``model`` measures what exchanges cost; without it, fewest hops are cheapest.
    """
    known = store.get(FLOW, LAYOUT)
    if known is None:
        found = None
        apart = layout is LayoutName.AUTO and _apart(graph, machines, model)
        if layout.divides or machines > slots or any(map(_is_product, graph.nodes)):
            found = sample(layout)
        found = found or Sample()
        shared = {} if apart else divide(graph, layout).shared
        known = {
            "shared": {name: [one.root, one.keys] for name, one in shared.items()},
            "apart": apart,
            "seconds": {layout.value: dict(found.seconds)},
            "tuples": dict(found.tuples),
        }
        store.record(Fact(FLOW, LAYOUT, known))
    if layout is LayoutName.AUTO and known["apart"]:
        layout = LayoutName.OPERATOR_CLOUD
    shared = {
        name: Shared(root, tuple(map(tuple, keys)))
        for name, (root, keys) in known["shared"].items()
    }
    if shared and layout is not LayoutName.AUTO:
        name, (root, _) = next(iter(shared.items()))
        problem = (
            f"its state is stored by the buckets of {root!r}, as the layout auto places it; use "
            f"dataflow.layout auto instead of {layout}, or another out.state"
        )
        raise DataflowError(name, problem)
    graph = replace(graph, division=divide(graph, layout, shared))
    split = shares(graph, layout, machines, slots, known["seconds"].get(layout.value, {}))
    tuples = {name: (left, right) for name, (left, right) in known["tuples"].items()}
    return FlowLayout(graph, split, tuples)


def _is_product(node: Node) -> bool:
    return isinstance(node.operator, Product)


def _apart(graph: FlowGraph, machines: int, model: Callable[[FlowGraph], CostModel] | None) -> bool:
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
    seconds: Mapping[str, float],
) -> dict[str, int]:
    """Return the machines of each stage that an exchange precedes.

    There are ``machines`` for each stateful operator. In ``query_cloud`` every stage has all of
    them; else they are divided by the ``seconds`` of the stages. As levels run one after the other,
    a stage with fewer machines than cores would leave some idle: ``auto`` avoids that.
    """
    division = graph.stages
    stages = [
        node.name
        for node in graph.nodes
        if node.name in division.starts
        and not isinstance(node.operator, Source)
        and node.name not in division.shared
    ]
    stateful = sum(node.operator.stateful for node in graph.nodes)
    total = max(machines * stateful, 1)
    if layout is LayoutName.QUERY_CLOUD:
        return dict.fromkeys(stages, total)
    if layout is LayoutName.AUTO:
        total = max(machines * len(stages), 1)
    members = {stage: _members(graph, stage) for stage in stages}
    costs = [sum(seconds.get(name, 0.0) for name in members[stage]) for stage in stages]
    least = min(machines, slots) if layout is LayoutName.AUTO else 1
    return dict(zip(stages, split_machines(total, costs, least), strict=True))


def _members(graph: FlowGraph, stage: str) -> set[str]:
    """Return the operators that run in the tasks of a stage."""
    found = {stage}
    division = graph.stages
    for node in graph.nodes:
        apart = node.name in division.starts and division.root(node.name) == node.name
        if not apart and found & {port.node for port in node.operator.inputs}:
            found.add(node.name)
    return found
