"""Divides a dataflow into stages, by layout.

``operator_set`` and ``query_cloud`` have an exchange before every stateful operator, and
``operator_cloud`` before every operator. ``auto`` omits those before operators whose tuples are
together already, and aggregates before an exchange where partial results can be merged.

Tuples with the same key are together if all of them come from one stateful operator, and the
columns by which its own tuples were sent are, unchanged, among the key. If the sides of a Join come
from two operators with as many exchanges before them, one adopts the bucket map of the other, and
both run in the same tasks: then the Join needs no exchange either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow.compute as pc

from roost.dataflow.division import Division, Shared
from roost.dataflow.operators import (
    Aggregate,
    Filter,
    Join,
    Map,
    Sink,
    Source,
    SourceKind,
    Union,
    WindowBy,
)
from roost.dataflow.schema import FlowGraph, Node
from roost.model.choices import LayoutName

EARLY = frozenset(
    ["count", "sum", "avg", "min", "max", "stddev", "distinct", "first", "last", "top"]
)
"""Functions that are aggregated before an exchange.

Their results do not depend on how tuples are divided into partial results (``stddev``: up to
rounding). Those of ``quantile`` do, so they would vary with the number of machines; a ``merge`` of
the user may raise for a part of a window, where it would not for the whole.
"""


class _Located(NamedTuple):
    """Tuples that are on the machine of a root's bucket; columns that have each of its keys."""

    root: str
    columns: tuple[frozenset[str], ...]


def divide(
    graph: FlowGraph, layout: LayoutName, shared: Mapping[str, Shared] | None = None
) -> Division:
    """Divide a dataflow; ``shared`` replaces what ``auto`` would choose, to continue with it."""
    starts = {n.name for n in graph.nodes if isinstance(n.operator, Source) or n.operator.stateful}
    if layout is LayoutName.OPERATOR_CLOUD:
        return Division(frozenset(separate(graph)))
    if layout is not LayoutName.AUTO:
        return Division(frozenset(starts))
    shared = together(graph) if shared is None else shared
    found = Division(frozenset(starts), shared)
    early = (n.name for n in graph.nodes if aggregates_early(n) and found.receives(n.name))
    return replace(found, partial=frozenset(early))


def divisions(graph: FlowGraph, layout: LayoutName) -> list[Division]:
    """Return the divisions among which a layout chooses by measured cost.

    An operator that shares tasks saves an exchange, but it is on as many machines as the other one,
    and each of them pays what the operator costs without any tuple.
    """
    found = divide(graph, layout)
    return [found, divide(graph, layout, {})] if found.shared else [found]


def separate(graph: FlowGraph) -> list[str]:
    """Return the operators that have machines of their own if each has: all but sinks.

    A source is read where its tuples are first processed, if that is one stateless operator.
    """
    found: list[str] = []
    joined: set[str] = set()
    for node in graph.nodes:
        if isinstance(node.operator, Sink) or node.name in joined:
            continue
        found.append(node.name)
        readers = [reader for reader, _ in graph.readers_of(node.name)]
        if isinstance(node.operator, Source) and len(readers) == 1:
            (reader,) = readers
            if isinstance(reader.operator, Map | Filter):
                joined.add(reader.name)
    return found


def aggregates_early(node: Node) -> bool:
    """Return whether the tuples of an operator can be aggregated before they are sent."""
    operator = node.operator
    if not isinstance(operator, Aggregate) or operator.window.by is WindowBy.TUPLES:
        return False
    return all(function.kind in EARLY for function in node.functions)


def together(graph: FlowGraph) -> dict[str, Shared]:
    """Return the stateful operators whose tuples are together already, or may be."""
    located: dict[str, _Located | None] = {}  # by operator: its output
    shared: dict[str, Shared] = {}
    depths: dict[str, int] = {}  # by operator: exchanges before its output
    sources = [node.operator for node in graph.nodes if isinstance(node.operator, Source)]
    # How many exchanges precede points and matches of the run depends on their plan.
    comparable = all(source.kind is SourceKind.RECORDS for source in sources)
    for node in graph.nodes:
        read = [port.node for port in node.operator.inputs]
        if isinstance(node.operator, Join) and comparable:
            _adopt(graph, node, depths, located, shared)
        inputs = [located[name] for name in read]
        depths[node.name] = max((depths[name] for name in read), default=0)
        depths[node.name] += node.operator.stateful
        match node.operator:
            case Map():
                located[node.name] = _mapped(node, inputs[0])
            case Filter():
                located[node.name] = inputs[0]
            case Union():
                located[node.name] = _both(inputs)
            case Aggregate() | Join():
                found = _shared(node, inputs)
                if found is not None:
                    shared[node.name] = found
                    depths[node.name] = depths[found.root]
                located[node.name] = _made(node, found or Shared(node.name, node.keys))
            case _:
                located[node.name] = None
    return shared


def _mapped(node: Node, given: _Located | None) -> _Located | None:
    """Return where the columns of a Map have a root's keys; a function may change any of them."""
    assert isinstance(node.operator, Map)
    if given is None or node.operator.function is not None:
        return None
    same = {  # the names under which the Map returns a column unchanged
        name: {new for new, text in node.operator.columns.items() if text.equals(pc.field(name))}
        for name in node.inputs[0].columns.names
    }
    same[node.inputs[0].time] |= {node.inputs[0].time}
    columns = tuple(frozenset[str]().union(*(same[n] for n in names)) for names in given.columns)
    return _Located(given.root, columns) if all(columns) else None


def _both(inputs: Iterable[_Located | None]) -> _Located | None:
    """Return where streams that are merged have a root's keys."""
    first, *others = inputs
    for other in others:
        if first is None or other is None or other.root != first.root:
            return None
        pairs = zip(first.columns, other.columns, strict=True)
        first = _Located(first.root, tuple(a & b for a, b in pairs))
    return first if first is not None and all(first.columns) else None


def _shared(node: Node, inputs: list[_Located | None]) -> Shared | None:
    """Return the bucket map that a stateful operator can share, if any."""
    first = inputs[0]
    if first is None or any(other is None or other.root != first.root for other in inputs):
        return None
    known = [other.columns for other in inputs if other is not None]
    places = []
    for number in range(len(first.columns)):
        # Keys of both sides are equal place by place.
        for place in range(len(node.keys[0])):
            if all(keys[place] in of[number] for keys, of in zip(node.keys, known, strict=True)):
                places.append(place)
                break
        else:
            return None
    return Shared(first.root, tuple(tuple(keys[p] for p in places) for keys in node.keys))


def _adopt(
    graph: FlowGraph,
    node: Node,
    depths: Mapping[str, int],
    located: dict[str, _Located | None],
    shared: dict[str, Shared],
) -> None:
    """Let the root of one side of a Join adopt the bucket map of the other's, if that is possible.

    Its tuples are then sent by those of its keys that the Join compares with the other's keys.
    """
    first, second = (located[port.node] for port in node.operator.inputs)
    if first is None or second is None or first.root == second.root:
        return
    if depths[first.root] != depths[second.root]:
        return
    pairs = list(zip(*node.keys, strict=True))
    for kept, other, keys in (
        (first, second, pairs),
        (second, first, [(b, a) for a, b in pairs]),
    ):
        places = [_place(columns, other, keys) for columns in kept.columns]
        found = [place for place in places if place is not None]
        if len(found) == len(places):
            _adopt_map(other.root, kept.root, found, located, shared)
            own = graph.by_name[other.root].keys
            shared[other.root] = Shared(kept.root, _at(own, found), sent=True)
            return


def _place(columns: frozenset[str], other: _Located, keys: Sequence[tuple[str, str]]) -> int | None:
    """Return the number of the other side's key that a Join compares with one of some columns."""
    compared = {theirs for mine, theirs in keys if mine in columns}
    return next((k for k, found in enumerate(other.columns) if found & compared), None)


def _at(keys: Sequence[Sequence[str]], places: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(columns[place] for place in places) for columns in keys)


def _adopt_map(
    old: str,
    new: str,
    places: Sequence[int],
    located: dict[str, _Located | None],
    shared: dict[str, Shared],
) -> None:
    """Move all that is with an operator to another root; ``places`` are the keys it is sent by."""
    for name, one in located.items():
        if one is not None and one.root == old:
            located[name] = _Located(new, tuple(one.columns[place] for place in places))
    for name, own in shared.items():
        if own.root == old:
            shared[name] = own._replace(root=new, keys=_at(own.keys, places))


def _made(node: Node, sent: Shared) -> _Located | None:
    """Return where the results of a stateful operator have the keys by which it was reached.

    An operator without a key has one bucket, so nothing behind it would run in parallel.
    """
    if not sent.keys[0]:
        return None
    if isinstance(node.operator, Aggregate):
        return _Located(sent.root, tuple(frozenset([key]) for key in sent.keys[0]))
    pairs = zip(*sent.keys, strict=True)
    return _Located(sent.root, tuple(frozenset([f"left_{a}", f"right_{b}"]) for a, b in pairs))
