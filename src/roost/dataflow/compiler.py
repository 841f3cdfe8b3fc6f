"""Divides a dataflow into subqueries, and compares the layouts of a dataflow on machines.

A *subquery* is a stateful operator with the stateless ones after it, up to the next stateful one.
Reading the sources, with the stateless operators before the first stateful ones, is a subquery of
its own: the *prefix*. A *layout* says which operators share machines:

``query_cloud``
    every machine runs the whole query; an exchange before each stateful operator
``operator_cloud``
    each operator has machines of its own
``operator_set``
    each subquery has machines of its own

Its cost is ``alpha * channels + beta * rate * hops``: connections between machines, and how often a
tuple is sent. On a path of ``s`` stateful operators among ``l``, with ``N`` machines divided
evenly, there are ``s*N*(N-1)``, ``(l-1)*(N/l)**2`` and ``s*(N/(s+1))**2`` channels. Graphs that are
no path are counted edge by edge. Nothing here runs a dataflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from roost.dataflow.buckets import BUCKETS, GRID
from roost.dataflow.operators import Aggregate, Join, Product, Sink, Source, Window, WindowBy
from roost.dataflow.schema import FlowGraph, Node

PREFIX = "(prefix)"


class LayoutName(StrEnum):
    """Which operators share machines."""

    QUERY_CLOUD = "query_cloud"
    OPERATOR_CLOUD = "operator_cloud"
    OPERATOR_SET = "operator_set"


RUNS = LayoutName.OPERATOR_SET
"""The layout that Roost runs."""


@dataclass(frozen=True)
class Subquery:
    """Operators that run in the same tasks; ``inputs`` are the subqueries that it reads."""

    name: str  # its stateful operator, or PREFIX
    operators: tuple[str, ...]  # in the order of the graph; sources and sinks, too
    inputs: tuple[str, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()  # key columns by input; none for the prefix, a Product
    buckets: int = 0
    grid: tuple[int, int] | None = None  # of a Product: left by right buckets
    window: str | None = None
    state: str | None = None


@dataclass(frozen=True)
class Unit:
    """Operators that share machines in a layout."""

    operators: tuple[str, ...]
    machines: int


@dataclass(frozen=True)
class Layout:
    """What a layout costs; without weights of the cost model, ``cost`` is None."""

    name: LayoutName
    units: tuple[Unit, ...]
    hops: int  # exchanges on the longest path of a tuple
    fan_out: int  # largest number of machines that a machine sends to
    channels: int  # connections between machines
    cost: float | None = None


@dataclass(frozen=True)
class CostModel:
    """Weights of a layout's cost, and the rate of the input in tuples per second."""

    alpha: float  # of a channel
    beta: float  # of sending a tuple
    rate: float = 1.0

    def cost(self, channels: int, hops: int) -> float:
        """Return the cost of a layout."""
        return self.alpha * channels + self.beta * self.rate * hops


def subqueries(graph: FlowGraph) -> tuple[Subquery, ...]:
    """Divide a dataflow into the prefix and one subquery per stateful operator.

    A stateless operator behind several subqueries, such as a Union, belongs to each of them: their
    tasks push their own tuples through it.
    """
    followers = {node.name: _stateless_after(graph, node) for node in graph.nodes}
    sources = [node for node in graph.nodes if isinstance(node.operator, Source)]
    heads: dict[str, list[Node]] = {PREFIX: sources}
    heads |= {node.name: [node] for node in graph.nodes if node.operator.stateful}
    members = {
        name: {node.name for node in nodes} | {f for node in nodes for f in followers[node.name]}
        for name, nodes in heads.items()
    }
    found = []
    for name, nodes in heads.items():
        operators = tuple(node.name for node in graph.nodes if node.name in members[name])
        if name == PREFIX:
            found.append(Subquery(name, operators))
            continue
        (node,) = nodes
        read = {port.node for port in node.operator.inputs}
        inputs = tuple(other for other in heads if read & members[other])
        found.append(_stateful(node, operators, inputs))
    return tuple(found)


def _stateless_after(graph: FlowGraph, node: Node) -> set[str]:
    """Return the stateless operators and sinks that a node's tuples reach within its task."""
    found: set[str] = set()
    for output in range(node.operator.outputs):
        for reader, _ in graph.readers_of(node.name, output):
            if not reader.operator.stateful:
                found |= {reader.name} | _stateless_after(graph, reader)
    return found


def _stateful(node: Node, operators: tuple[str, ...], inputs: tuple[str, ...]) -> Subquery:
    operator = node.operator
    assert isinstance(operator, Aggregate | Join | Product)
    grid = GRID if isinstance(operator, Product) else None
    return Subquery(
        node.name,
        operators,
        inputs,
        node.keys,
        BUCKETS if grid is None else grid[0] * grid[1],
        grid,
        window_text(operator.window),
        _state(node),
    )


def window_text(window: Window) -> str:
    """Return a window as text, in the units in which it was written."""
    if window.by is WindowBy.FOREVER:
        return f"forever, every {window.advance:g}"
    assert window.size is not None
    text = f"{window.by} {window.size:g}"
    return text if window.advance in (None, window.size) else f"{text} by {window.advance:g}"


def _state(node: Node) -> str:
    """Return what a stateful operator stores."""
    operator = node.operator
    if isinstance(operator, Join | Product):
        return "tuples of both sides"
    assert isinstance(operator, Aggregate)
    if operator.window.by is WindowBy.TUPLES or not all(f.mergeable for f in node.functions):
        return "tuples"
    return "one row per key" if operator.window.by is WindowBy.FOREVER else "panes"


# --------------------------------------------------------------------------- layouts


def layouts(
    graph: FlowGraph,
    machines: int,
    costs: Mapping[str, float] | None = None,
    model: CostModel | None = None,
) -> tuple[Layout, ...]:
    """Compare the layouts of a dataflow on some machines.

    ``costs`` are processor seconds per tuple by operator, from a sample run; without them machines
    are divided evenly.
    """
    return (
        _query_cloud(graph, machines, model),
        _operator_cloud(graph, machines, costs, model),
        _operator_set(graph, machines, costs, model),
    )


def split_machines(machines: int, costs: Iterable[float]) -> tuple[int, ...]:
    """Divide machines by cost, at least one each: a further one goes where most is left to do.

    Examples
    --------
    >>> split_machines(90, [1.0, 1.0, 1.0]), split_machines(6, [1.0, 0.1, 3.0])
    ((30, 30, 30), (1, 1, 4))
    """
    given = list(costs)
    found = [1] * len(given)
    for _ in range(machines - len(given) if given else 0):
        busiest = max(range(len(given)), key=lambda k: (given[k] / found[k], -k))
        found[busiest] += 1
    return tuple(found)


def _query_cloud(graph: FlowGraph, machines: int, model: CostModel | None) -> Layout:
    stateful = [node.name for node in graph.nodes if node.operator.stateful]
    edges = {(name, node.name) for node in graph.nodes for name, _ in node.operator.inputs}
    hops = _longest([n.name for n in graph.nodes], edges, set(stateful))
    fan_out = machines - 1 if stateful else 0
    channels = len(stateful) * machines * (machines - 1)
    unit = Unit(tuple(_operators(graph)), machines)
    return _layout(LayoutName.QUERY_CLOUD, (unit,), hops, fan_out, channels, model)


def _operator_cloud(
    graph: FlowGraph, machines: int, costs: Mapping[str, float] | None, model: CostModel | None
) -> Layout:
    units = _operators(graph)
    edges = {
        (port.node, node.name)
        for node in graph.nodes
        for port in node.operator.inputs
        if port.node in units and node.name in units
    }
    split = split_machines(machines, [_cost([name], costs) for name in units])
    found = [Unit((name,), count) for name, count in zip(units, split, strict=True)]
    return _divided(LayoutName.OPERATOR_CLOUD, dict(zip(units, found, strict=True)), edges, model)


def _operator_set(
    graph: FlowGraph, machines: int, costs: Mapping[str, float] | None, model: CostModel | None
) -> Layout:
    found = subqueries(graph)
    split = split_machines(machines, [_cost(sub.operators, costs) for sub in found])
    units = {sub.name: Unit(sub.operators, count) for sub, count in zip(found, split, strict=True)}
    edges = {(name, sub.name) for sub in found for name in sub.inputs}
    return _divided(LayoutName.OPERATOR_SET, units, edges, model)


def _operators(graph: FlowGraph) -> list[str]:
    """Return the operators that need machines: no sinks, and only some sources.

    A source is read where its tuples are first processed, unless that is a stateful operator, to
    which they must be sent.
    """
    found = []
    for node in graph.nodes:
        readers = [reader for reader, _ in graph.readers_of(node.name)]
        if isinstance(node.operator, Source):
            only_sinks = all(isinstance(reader.operator, Sink) for reader in readers)
            if only_sinks or any(reader.operator.stateful for reader in readers):
                found.append(node.name)
        elif not isinstance(node.operator, Sink):
            found.append(node.name)
    return found


def _cost(operators: Iterable[str], costs: Mapping[str, float] | None) -> float:
    return 1.0 if costs is None else sum(costs.get(name, 0.0) for name in operators)


def _divided(
    name: LayoutName,
    units: Mapping[str, Unit],
    edges: Iterable[tuple[str, str]],
    model: CostModel | None,
) -> Layout:
    """Return a layout whose units have machines of their own, connected along the edges."""
    edges = sorted(edges)
    targets: dict[str, int] = {}
    for start, stop in edges:
        targets[start] = targets.get(start, 0) + units[stop].machines
    channels = sum(units[start].machines * count for start, count in targets.items())
    hops = _longest(list(units), edges, set(units)) if units else 0
    # The first unit of a path is where the tuples are read: it costs no hop.
    hops = max(hops - 1, 0)
    return _layout(
        name, tuple(units.values()), hops, max(targets.values(), default=0), channels, model
    )


def _longest(names: Iterable[str], edges: Iterable[tuple[str, str]], counted: set[str]) -> int:
    """Return the largest number of counted names on a path; names are in topological order."""
    before: dict[str, list[str]] = {}
    for start, stop in edges:
        before.setdefault(stop, []).append(start)
    length: dict[str, int] = {}
    for name in names:
        longest = max((length[start] for start in before.get(name, ())), default=0)
        length[name] = longest + (name in counted)
    return max(length.values(), default=0)


def _layout(
    name: LayoutName,
    units: tuple[Unit, ...],
    hops: int,
    fan_out: int,
    channels: int,
    model: CostModel | None,
) -> Layout:
    cost = None if model is None else model.cost(channels, hops)
    return Layout(name, units, hops, fan_out, channels, cost)
