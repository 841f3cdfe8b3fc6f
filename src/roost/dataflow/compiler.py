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
``auto``
    as ``operator_set``, but operators whose tuples are together already share a subquery

Its cost is ``alpha * channels + beta * rate * hops``: connections between machines, and how often a
tuple is sent. On a path of ``s`` stateful operators among ``l``, with ``N`` machines divided
evenly, there are ``s*N*(N-1)``, ``(l-1)*(N/l)**2`` and ``s*(N/(s+1))**2`` channels. Graphs that are
no path are counted edge by edge. Nothing here runs a dataflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from roost.dataflow.buckets import BUCKETS, GRID
from roost.dataflow.colocation import separate, together
from roost.dataflow.operators import Aggregate, Join, Product, Sink, Source, Window, WindowBy
from roost.dataflow.schema import FlowGraph, Node
from roost.model.choices import LayoutName

PREFIX = "(prefix)"


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
    exchanges: tuple[tuple[str, str], ...] = ()  # by the first operators of both sides


@dataclass(frozen=True)
class LayoutCosts:
    """Weights of a layout's cost, and the rate of the input, in tuples per batch.

    With weights in processor seconds, so is the cost of a batch.
    """

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
        return f"forever, every {window.advance:.15g}"
    assert window.size is not None
    text = f"{window.by} {window.size:.15g}"
    return text if window.advance in (None, window.size) else f"{text} by {window.advance:.15g}"


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
    model: LayoutCosts | None = None,
) -> tuple[Layout, ...]:
    """Compare the layouts of a dataflow on some machines.

    ``costs`` are processor seconds per tuple by operator, from a sample run; without them machines
    are divided evenly.
    """
    return (
        _query_cloud(graph, machines, model),
        _operator_cloud(graph, machines, costs, model),
        _operator_set(graph, machines, costs, model),
        _auto(graph, machines, costs, model),
    )


def cheapest(graph: FlowGraph, machines: int, model: LayoutCosts) -> LayoutName:
    """Return the layout by which ``auto`` divides a dataflow.

    ``query_cloud`` has the hops of ``operator_set`` and more channels, so the choice is between
    few channels and few hops.
    """
    _, apart, _, joined = layouts(graph, machines, model=model)
    assert apart.cost is not None and joined.cost is not None
    return LayoutName.OPERATOR_CLOUD if apart.cost < joined.cost else LayoutName.OPERATOR_SET


def fewest_channels(graph: FlowGraph, machines: int) -> LayoutName:
    """Return the layout that :func:`cheapest` returns if sending a tuple costs nothing."""
    return cheapest(graph, machines, LayoutCosts(1.0, 0.0))


def split_machines(
    machines: int,
    costs: Iterable[float],
    least: int = 1,
    fixed: Iterable[float] | None = None,
    parts: Iterable[int] | None = None,
) -> tuple[int, ...]:
    """Divide machines by cost, some at least for each: another one goes where most is left to do.

    This minimises the load of the busiest machine. ``fixed`` is the part of each cost that every
    machine pays. Work that consists of some number of equal ``parts`` is divided into whole ones; 0
    is any number. Without any cost, all are alike.

    Examples
    --------
    >>> split_machines(90, [1.0, 1.0, 1.0]), split_machines(6, [1.0, 0.1, 3.0])
    ((30, 30, 30), (2, 1, 3))
    >>> split_machines(9, [9.0, 1.0], parts=[4, 0])
    (4, 5)
    """
    given = list(costs)
    given = given if any(given) else [1.0] * len(given)
    same = [0.0] * len(given) if fixed is None else list(fixed)
    whole = [0] * len(given) if parts is None else list(parts)
    found = [least] * len(given)
    for _ in range(machines - sum(found) if given else 0):
        load = [
            s + (cost - s) * busiest_share(n, of)
            for s, cost, n, of in zip(same, given, found, whole, strict=True)
        ]
        # Without a part for another machine, the busiest one remains as busy as it is.
        usable = [k for k in range(len(given)) if not whole[k] or found[k] < whole[k]]
        busiest = max(usable or range(len(given)), key=lambda k: (load[k], -k))
        found[busiest] += 1
    return tuple(found)


def busiest_share(machines: int, parts: int) -> float:
    """Return the share of the busiest of some machines in work of equal parts; 0 is any number.

    Examples
    --------
    >>> busiest_share(4, 0), busiest_share(4, 6), busiest_share(46, 256)
    (0.25, 0.3333333333333333, 0.0234375)
    """
    return 1.0 / machines if parts == 0 else -(-parts // machines) / parts


def _query_cloud(graph: FlowGraph, machines: int, model: LayoutCosts | None) -> Layout:
    stateful = [node.name for node in graph.nodes if node.operator.stateful]
    edges = {(name, node.name) for node in graph.nodes for name, _ in node.operator.inputs}
    hops = _longest([n.name for n in graph.nodes], edges, set(stateful))
    fan_out = machines - 1 if stateful else 0
    channels = len(stateful) * machines * (machines - 1)
    operators = (n.name for n in graph.nodes if not isinstance(n.operator, Sink))
    unit = Unit(tuple(operators), machines)
    exchanges = tuple((name, sub.name) for sub in subqueries(graph) for name in sub.inputs)
    return _layout(LayoutName.QUERY_CLOUD, (unit,), hops, fan_out, channels, model, exchanges)


def _operator_cloud(
    graph: FlowGraph, machines: int, costs: Mapping[str, float] | None, model: LayoutCosts | None
) -> Layout:
    starts = separate(graph)
    home: dict[str, str] = {}  # the unit of each operator
    for node in graph.nodes:
        if not isinstance(node.operator, Sink):
            home[node.name] = node.name
            if node.name not in starts:
                home[node.name] = home[node.operator.inputs[0].node]
    members = {start: [n for n, unit in home.items() if unit == start] for start in starts}
    edges = {
        (home[port.node], node.name)
        for node in graph.nodes
        if node.name in starts
        for port in node.operator.inputs
    }
    split = split_machines(machines, [_cost(members[name], costs) for name in starts])
    units = {n: Unit(tuple(members[n]), k) for n, k in zip(starts, split, strict=True)}
    return _divided(LayoutName.OPERATOR_CLOUD, units, edges, model)


def _operator_set(
    graph: FlowGraph, machines: int, costs: Mapping[str, float] | None, model: LayoutCosts | None
) -> Layout:
    found = subqueries(graph)
    split = split_machines(machines, [_cost(sub.operators, costs) for sub in found])
    units = {sub.name: Unit(sub.operators, count) for sub, count in zip(found, split, strict=True)}
    edges = {(name, sub.name) for sub in found for name in sub.inputs}
    return _divided(LayoutName.OPERATOR_SET, units, edges, model)


def _auto(
    graph: FlowGraph, machines: int, costs: Mapping[str, float] | None, model: LayoutCosts | None
) -> Layout:
    shared = together(graph)
    found = subqueries(graph)
    root = {sub.name: shared[sub.name].root if sub.name in shared else sub.name for sub in found}
    members: dict[str, list[str]] = {}
    for sub in found:
        members.setdefault(root[sub.name], []).extend(sub.operators)
    split = split_machines(machines, [_cost(set(names), costs) for names in members.values()])
    units = {
        name: Unit(tuple(dict.fromkeys(operators)), count)
        for (name, operators), count in zip(members.items(), split, strict=True)
    }
    sent = (sub for sub in found if sub.name not in shared or shared[sub.name].sent)
    edges = {(root[name], root[sub.name]) for sub in sent for name in sub.inputs}
    return _divided(LayoutName.AUTO, units, edges, model)


def _cost(operators: Iterable[str], costs: Mapping[str, float] | None) -> float:
    return 1.0 if not costs else sum(costs.get(name, 0.0) for name in operators)


def _divided(
    name: LayoutName,
    units: Mapping[str, Unit],
    edges: Iterable[tuple[str, str]],
    model: LayoutCosts | None,
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
    fan_out = max(targets.values(), default=0)
    order = list(units)
    exchanges = tuple(sorted(edges, key=lambda edge: (order.index(edge[1]), order.index(edge[0]))))
    return _layout(name, tuple(units.values()), hops, fan_out, channels, model, exchanges)


def _longest(names: Iterable[str], edges: Iterable[tuple[str, str]], counted: set[str]) -> int:
    """Return the largest number of counted names on a path."""
    before: dict[str, list[str]] = {}
    for start, stop in edges:
        before.setdefault(stop, []).append(start)

    @cache
    def length(name: str) -> int:
        longest = max((length(start) for start in before.get(name, ())), default=0)
        return longest + (name in counted)

    return max(map(length, names), default=0)


def _layout(
    name: LayoutName,
    units: tuple[Unit, ...],
    hops: int,
    fan_out: int,
    channels: int,
    model: LayoutCosts | None,
    exchanges: tuple[tuple[str, str], ...],
) -> Layout:
    cost = None if model is None else model.cost(channels, hops)
    return Layout(name, units, hops, fan_out, channels, cost, exchanges)
