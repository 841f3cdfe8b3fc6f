"""Watermarks of the interpreter: which tuples are late, and when windows close.

The watermark of an edge says that no later batch brings a tuple that is older. Each source has one;
that of any other edge is a function of the watermark ``w`` of the operator's input, which is the
minimum over its input edges:

- Map, Filter, Union, Join, Product, Aggregate by tuples: ``w``;
- Aggregate by time: ``open(w)``, the smallest ``k * advance`` with ``k * advance + size > w``: the
  start of the oldest open window;
- Aggregate forever: ``open(w)``, the smallest multiple of the advance that is ``> w``.

A source tuple is late if it is older than its source's watermark after the previous batch. No tuple
that an operator made is late; the interpreter asserts it for every edge.

A source's watermark is the greatest of: its newest event time so far minus the lateness; its
previous watermark; if it is idle, its *floor*. It is +infinity once the source has ended, and
-infinity before the first tuple.

Idle sources
------------
A source is idle if its last accepted tuple (without one: the first batch) is at least ``idle``
seconds of the batch clock ago. Late tuples are not accepted, so a source that brings nothing else
stays idle. An edge is idle if all sources behind it that have not ended are idle, and there is one.

1. *Advance.* Compute each edge from the sources' previous watermarks and new tuples, where a
   minimum ignores idle inputs. If no input is active, it is the minimum of all inputs as usual.
   This gives ``W(e)`` for each edge ``e``.
2. *Floor.* A tuple of a source with event time ``t`` takes some path of operators to an edge ``e``.
   The oldest tuple that can be made from it there has the time ``open(...open(t)...)``, with one
   ``open`` for each Aggregate by time or forever on the path: an Aggregate by time puts it into
   windows from ``open(t)`` on, ``forever`` counts it from ``open(t)`` on, and the others make no
   tuple that is older than their input. This time must not be before ``W(e)``. ``open`` never
   decreases, so the smallest ``t`` follows from its inverse: ``open(t) >= W`` if and only if

   - by time: ``t >= ceil(W / advance) * advance - advance + size``, the end of the last window that
     begins before ``W``;
   - forever: ``t >= ceil(W / advance) * advance - advance``.

   The floor of a source is the greatest such ``t`` over all paths and edges. One pass from the
   sinks to the sources computes it: ``floor(edge)`` is the greatest of ``W(edge)`` and of the
   inverses of ``floor(output)`` of all operators that read the edge. The floor of an active source
   is its watermark.
3. *Raise.* The floor becomes the watermark of an idle source, and all edges are computed again, now
   with the plain minimum of all inputs. Edges with an active source keep ``W(e)``. Edges behind
   idle sources rise to what the floor promises, so windows before a Join close in the batch in
   which the Join ceases to wait for them. Otherwise they would close when the source resumes, and
   emit tuples that are older than the Join's watermark.

So a tuple of a source that resumes is late if and only if a tuple made from it could be older than
a watermark that was already used. If no source is active, no floor is above the source's own
watermark, and nothing advances.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from roost.dataflow.operators import Aggregate, Source, WindowBy
from roost.dataflow.schema import FlowGraph, Node

Time = int | float
"""An event time, or an infinity."""


class Watermarks:
    """The watermarks of a graph."""

    def __init__(self, graph: FlowGraph, lateness: int, idle: float | None) -> None:
        self._graph, self._lateness, self._idle = graph, lateness, idle
        self.sources = [n.name for n in graph.nodes if isinstance(n.operator, Source)]
        self.output: dict[str, Time] = {node.name: -math.inf for node in graph.nodes}
        self.input: dict[str, Time] = dict(self.output)  # the minimum over an operator's inputs
        self._active_at: dict[str, float] = {}  # clock of the last batch with an accepted tuple
        self._ended: set[str] = set()
        self._behind = {name: {name} for name in self.sources}
        for node in graph.nodes:
            for port in node.operator.inputs:
                self._behind.setdefault(node.name, set()).update(self._behind[port.node])

    def advance(
        self, arrived: Mapping[str, list[int]], clock: float, ended: Collection[str]
    ) -> None:
        """Advance all watermarks by the event times of a batch."""
        self._ended.update(ended)
        own: dict[str, Time] = {}
        idle: set[str] = set()
        for name in self.sources:
            if arrived[name] or name not in self._active_at:
                self._active_at[name] = clock
            if name in self._ended:
                own[name] = math.inf
                continue
            newest = max(arrived[name], default=-math.inf)
            own[name] = max(self.output[name], newest - self._lateness)
            if self._idle is not None and clock - self._active_at[name] >= self._idle:
                idle.add(name)
        _, advanced = self._forward(own, idle)
        floors = self._floors(advanced)
        for name in self.sources:
            assert name in idle or floors[name] == own[name], "an active source never waits"
        self.input, self.output = self._forward(floors, set())

    def _forward(
        self, sources: Mapping[str, Time], idle: set[str]
    ) -> tuple[dict[str, Time], dict[str, Time]]:
        """Return the watermarks of the operators' inputs and of all edges."""
        inputs: dict[str, Time] = {}
        edges: dict[str, Time] = {}
        for node in self._graph.nodes:
            name, read = node.name, [port.node for port in node.operator.inputs]
            if not read:
                inputs[name] = edges[name] = sources[name]
                continue
            # Some source behind an active edge has neither ended nor become idle.
            active = [port for port in read if self._behind[port] - self._ended - idle]
            inputs[name] = min(edges[port] for port in (active if idle and active else read))
            edges[name] = opening(node, inputs[name])
        return inputs, edges

    def _floors(self, edges: Mapping[str, Time]) -> dict[str, Time]:
        """Return the smallest event time on each edge that violates no edge's watermark."""
        floors = dict(edges)
        for node in reversed(self._graph.nodes):
            for port in node.operator.inputs:
                floors[port.node] = max(floors[port.node], _admitted(node, floors[node.name]))
        return floors


def opening(node: Node, time: Time) -> Time:
    """Return the oldest event time that a tuple made from tuples from a time on can have."""
    if isinstance(node.operator, Aggregate) and math.isfinite(time):
        if node.operator.window.by is WindowBy.TIME:
            assert node.size is not None and node.advance is not None
            return ((time - node.size) // node.advance + 1) * node.advance
        if node.operator.window.by is WindowBy.FOREVER:
            assert node.advance is not None
            return (time // node.advance + 1) * node.advance
    return time


def _admitted(node: Node, time: Time) -> Time:
    """Return the smallest event time that `opening` does not map before a time."""
    if isinstance(node.operator, Aggregate) and math.isfinite(time):
        if node.operator.window.by is WindowBy.TIME:
            assert node.size is not None and node.advance is not None
            return -(-time // node.advance) * node.advance - node.advance + node.size
        if node.operator.window.by is WindowBy.FOREVER:
            assert node.advance is not None
            return -(-time // node.advance) * node.advance - node.advance
    return time
