"""Event-time progress of a dataflow: watermarks of all operators, as a function of the sources.

A watermark says that no older tuple will come. That of a source is its newest event time minus the
lateness; that of an operator follows from its inputs, so it needs no message of its own: every
machine computes the watermarks of the whole graph from the newest event times of the sources,
which reach it as marks. A source tuple is late if it is older than its source's watermark after
the batch before.

A source that was silent for a while (by the clock of the batches) is *idle* and holds no operator
back: its watermark rises to the oldest event time from which it can make no tuple that is older
than the watermarks of the operators behind it, given the other sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roost.dataflow.operators import Aggregate, Source, WindowBy
from roost.dataflow.schema import FlowGraph, Node
from roost.model.records import TIME_MAX, TIME_MIN


@dataclass(frozen=True)
class Progress:
    """How far a dataflow is after a batch; ``TIME_MIN`` before any tuple, ``TIME_MAX`` at the end.

    ``newest`` and ``heard`` are the newest event time of each source and the clock of the last
    batch in which it brought a tuple; ``watermarks`` are those of each operator's output.
    """

    newest: Mapping[str, int] = field(default_factory=dict)
    heard: Mapping[str, float] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    watermarks: Mapping[str, int] = field(default_factory=dict)

    def watermark(self, node: str) -> int:
        """Return the watermark of an operator's output."""
        return self.watermarks.get(node, TIME_MIN)

    def input_watermark(self, node: Node) -> int:
        """Return the watermark up to which an operator has all its input.

        Union, Join and Product pass theirs on, so it is the watermark of their output.
        """
        if len(node.operator.inputs) > 1:
            return self.watermark(node.name)
        return self.watermark(node.operator.inputs[0].node)

    def after(
        self,
        graph: FlowGraph,
        newest: Mapping[str, int],
        clock: float,
        ended: Iterable[str] = (),
        lateness: float = 0.0,
        idle: float | None = None,
    ) -> Progress:
        """Return the progress after a batch, given the newest event time of each source in it.

        ``lateness`` is in seconds, or the unit of event times that are integers; ``idle`` is in
        seconds of the clock.
        """
        times, heard = dict(self.newest), dict(self.heard)
        sources = [node for node in graph.nodes if isinstance(node.operator, Source)]
        over = self.ended | {node.name for node in sources if node.name in ended}
        marks: dict[str, int] = {}
        for node in sources:
            name = node.name
            assert node.output is not None
            if name in newest:
                times[name] = max(newest[name], times.get(name, TIME_MIN))
            if name in newest or name not in heard:
                heard[name] = clock
            slack = round(lateness * node.output.unit)
            own = max(times[name] - slack, TIME_MIN) if name in times else TIME_MIN
            marks[name] = TIME_MAX if name in over else max(own, self.watermark(name))
        silent = {
            name
            for name, last in heard.items()
            if idle is not None and clock - last >= idle and name not in over
        }
        if silent:
            rising = _outputs(graph, marks, silent)
            oldest = _oldest_inputs(graph, rising)
            marks |= {name: max(marks[name], oldest[name]) for name in silent}
        return Progress(times, heard, over, _outputs(graph, marks, set()))

    def to_json(self) -> Any:
        """Return the progress as JSON."""
        return {
            "newest": dict(self.newest),
            "heard": dict(self.heard),
            "ended": sorted(self.ended),
            "watermarks": dict(self.watermarks),
        }

    @classmethod
    def from_json(cls, data: Any) -> Progress:
        """Invert :meth:`to_json`."""
        return cls(data["newest"], data["heard"], frozenset(data["ended"]), data["watermarks"])


def _outputs(graph: FlowGraph, sources: Mapping[str, int], silent: set[str]) -> dict[str, int]:
    """Return the watermark of each node; an input behind which all sources are idle is ignored.

    An input that has ended does not make another one's idleness the end of the stream.
    """
    marks: dict[str, int] = {}
    quiet = set(silent)
    for node in graph.nodes:
        inputs = [port.node for port in node.operator.inputs]
        if not inputs:
            marks[node.name] = sources[node.name]
            continue
        active = [name for name in inputs if name not in quiet and marks[name] < TIME_MAX]
        if not active and quiet.intersection(inputs):
            quiet.add(node.name)
        marks[node.name] = _passed_on(node, min(marks[name] for name in active or inputs))
    return marks


def _oldest_inputs(graph: FlowGraph, marks: Mapping[str, int]) -> dict[str, int]:
    """Return the oldest event time of each node's output that makes no tuple older than a mark."""
    oldest: dict[str, int] = {}
    for node in reversed(graph.nodes):
        needs = [
            _oldest_input(reader, oldest[reader.name])
            for output in range(node.operator.outputs)
            for reader, _ in graph.readers_of(node.name, output)
        ]
        oldest[node.name] = max([marks[node.name], *needs])
    return oldest


def _passed_on(node: Node, watermark: int) -> int:
    """Return the oldest event time of results to come, given the watermark of the input."""
    operator = node.operator
    if not isinstance(operator, Aggregate) or watermark in (TIME_MIN, TIME_MAX):
        return watermark
    if operator.window.by is WindowBy.TIME:
        assert node.size is not None and node.advance is not None
        return ((watermark - node.size) // node.advance + 1) * node.advance
    if operator.window.by is WindowBy.FOREVER:
        assert node.advance is not None
        return (watermark // node.advance + 1) * node.advance
    return watermark


def _oldest_input(node: Node, oldest: int) -> int:
    """Return the oldest event time of an input that makes no result older than ``oldest``."""
    operator = node.operator
    if not isinstance(operator, Aggregate) or oldest in (TIME_MIN, TIME_MAX):
        return oldest
    if operator.window.by is WindowBy.TUPLES:
        return oldest
    assert node.advance is not None
    return (-(-oldest // node.advance) - 1) * node.advance + (node.size or 0)
