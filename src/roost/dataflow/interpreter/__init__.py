"""The sequential interpreter: what a dataflow means, one tuple at a time.

It is the oracle of the engine. It shares no code with it but the user's functions, and prefers the
obvious way to the fast one. It holds all state in memory and is fed batch by batch.

Tuples and order
----------------
A row is a dict in the types of its stream; event times and all other times are whole numbers of
their unit. The order of a source tuple is (event time, number of the source, row number). The order
of a tuple that an operator made is (event time, number of the operator, key, order of its input
tuples, index among the outputs of one input). Filter and Union pass tuples on as they are.

Time
----
:mod:`roost.dataflow.interpreter.watermarks` defines the watermarks, and which tuples are late. They
are computed once per batch, before any operator runs. A time window emits in the first batch after
which the watermark of its input has reached its end; ``forever`` emits at a multiple of the advance
once the watermark has reached it. Tuple windows and Joins by tuples process a tuple once the
watermark is greater than its event time. Joins and Products by time emit a pair with its second
tuple. So what a batch emits does not depend on the order of its rows.

Failures
--------
Tuples with a null in a key column (once for each input of an operator) and rows for which a Map
fails become dead-letter records. If ``partial`` fails for a row alone, the Aggregate rejects this
row; if ``merge``, ``finish`` or ``whole`` fails, there is one record, with the event time and the
key, instead of the result of the window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import acero

from roost.dataflow.interpreter.conditions import compile_condition
from roost.dataflow.interpreter.functions import FunctionFailed, check_partial, evaluate, plain
from roost.dataflow.interpreter.watermarks import Time, Watermarks, opening
from roost.dataflow.operators import (
    Aggregate,
    Filter,
    Join,
    Map,
    Product,
    Sink,
    Source,
    SourceKind,
    Union,
    WindowBy,
)
from roost.dataflow.schema import FlowGraph, Node
from roost.errors import DataflowError

Row = dict[str, Any]
Key = tuple[Any, ...]


class Tuple(NamedTuple):
    """A row of a stream; ``order`` begins with the event time."""

    order: tuple[Any, ...]
    row: Row

    @property
    def time(self) -> int:
        """The event time."""
        return int(self.order[0])


class Dead(NamedTuple):
    """A dead-letter record."""

    operator: str  # or source
    reason: str
    row: Row


class Interpreter:
    """Runs a dataflow on batches of rows.

    ``lateness`` is in units of event time, ``idle`` in seconds of the batches' clock. ``results``
    has the rows of each sink, those of a batch in tuple order; ``dead`` the dead-letter records;
    ``watermarks`` that of each source and operator after the last batch.
    """

    def __init__(self, graph: FlowGraph, lateness: int = 0, idle: float | None = None) -> None:
        self.results: dict[str, list[Row]] = {
            node.name: [] for node in graph.nodes if isinstance(node.operator, Sink)
        }
        self.dead: list[Dead] = []
        self._graph = graph
        self._watermarks = Watermarks(graph, lateness, idle)
        self._rows = dict.fromkeys(self._watermarks.sources, 0)
        self._runners = {node.name: _runner(node, self) for node in graph.nodes}

    @property
    def watermarks(self) -> dict[str, Time]:
        """The watermark of what each source and operator emits."""
        return dict(self._watermarks.output)

    def batch(
        self,
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        clock: float,
        ended: Collection[str] = (),
    ) -> None:
        """Process rows of sources, in stable row order; ``ended`` names those without more rows.

        Event times, and any other times, may be whole numbers of their unit.
        """
        streams: dict[str, list[list[Tuple]]] = {}
        for name in self._watermarks.sources:
            streams[name] = [self._read(self._graph.by_name[name], rows.get(name, ()), clock)]
        before = self._watermarks.output
        inputs_before = self._watermarks.input
        arrived = {name: [found.time for found in streams[name][0]] for name in streams}
        self._watermarks.advance(arrived, clock, ended)
        for node in self._graph.nodes:
            name = node.name
            if not isinstance(node.operator, Source):
                inputs = [streams[port.node][port.output] for port in node.operator.inputs]
                span = _Span(inputs_before[name], self._watermarks.input[name])
                streams[name] = self._runners[name].run(inputs, span)
            for made in (made for stream in streams[name] for made in stream):
                assert made.time >= before[name], f"{name} made a late tuple: {made}"

    def _read(self, node: Node, rows: Sequence[Mapping[str, Any]], clock: float) -> list[Tuple]:
        assert node.output is not None and isinstance(node.operator, Source)
        schema, found = node.output, []
        for given in rows:
            values = dict(given)
            if node.operator.kind is SourceKind.RECORDS and node.operator.time is None:
                values[schema.time] = round(clock * schema.unit)
            row = {
                field.name: plain(values.get(field.name), field.type) for field in schema.columns
            }
            number, time = self._rows[node.name], row[schema.time]
            self._rows[node.name] += 1
            if time is None:
                self.dead.append(Dead(node.name, "null_time", row))
            elif abs(time) >= 2**62:
                self.dead.append(Dead(node.name, "wrong_type", row))
            elif time < self._watermarks.output[node.name]:
                self.dead.append(Dead(node.name, "late", row))
            else:
                found.append(Tuple((time, node.number, number), row))
        return found


# --------------------------------------------------------------------------- operators


@dataclass(frozen=True)
class _Span:
    """Watermarks of an operator's input before and after a batch."""

    before: Time
    after: Time


class _Runner:
    """Runs one operator; subclasses hold its state."""

    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        self.node = node
        self.name = node.name
        self.dead = interpreter.dead

    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        """Process the tuples of a batch; returns the tuples of each output."""
        raise NotImplementedError

    def reject(self, reason: str, row: Row) -> None:
        """Write a dead-letter record."""
        self.dead.append(Dead(self.name, reason, row))

    def make(self, time: int, key: Key, inputs: tuple[Any, ...], index: int, row: Row) -> Tuple:
        """Return a tuple of this operator; its row has all columns but the event time."""
        assert self.node.output is not None
        ordered = tuple(x.encode() if isinstance(x, str) else x for x in key)
        row = {self.node.output.time: time, **row}
        return Tuple((time, self.node.number, ordered, inputs, index), row)

    def keyed(self, tuples: Iterable[Tuple], side: int = 0) -> list[tuple[Key, Tuple]]:
        """Return tuples with their keys; tuples with a null in the key are rejected."""
        found = []
        for given in tuples:
            key = tuple(given.row[column] for column in self.node.keys[side])
            if None in key:
                self.reject("null_key", given.row)
            else:
                found.append((key, given))
        return found


class _Map(_Runner):
    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        found = []
        for given in inputs[0]:
            try:
                rows = self._call(given.row)
            except FunctionFailed:
                self.reject("function_failed", given.row)
                continue
            found += [
                self.make(given.time, (), given.order, index, row) for index, row in enumerate(rows)
            ]
        return [found]

    def _call(self, row: Row) -> list[Row]:
        operator = self.node.operator
        assert isinstance(operator, Map)
        batch = pa.RecordBatch.from_pylist([row], self.node.inputs[0].columns)
        try:
            if operator.function is None:
                result = _project(batch, operator)
            else:
                result = operator.function(batch)
        except Exception as error:
            raise FunctionFailed(self.name) from error
        if operator.function is not None:
            result = self._checked(result, operator.schema)
        columns = [result.column(k) for k in range(result.num_columns)]
        return [
            {
                name: plain(column[k])
                for name, column in zip(result.schema.names, columns, strict=True)
            }
            for k in range(result.num_rows)
        ]

    def _checked(self, result: Any, schema: pa.Schema) -> pa.RecordBatch:
        """Return the batch that a function returned for one row."""
        numbers: Any = None
        if isinstance(result, tuple) and len(result) == 2:
            result, numbers = result
            numbers = [int(number) for number in _as_list(numbers)]
        if not isinstance(result, pa.RecordBatch) or not result.schema.equals(schema):
            found = getattr(result, "schema", type(result).__name__)
            raise DataflowError(self.name, f"the function returned {found}, expected {schema}")
        if (numbers is None and result.num_rows != 1) or (
            numbers is not None and numbers != [0] * result.num_rows
        ):
            problem = "the function returned another number of rows, or wrong numbers of input rows"
            raise DataflowError(self.name, problem)
        return result


def _as_list(values: Any) -> list[Any]:
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values)


def _project(batch: pa.RecordBatch, operator: Map) -> pa.RecordBatch:
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration(
                "table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch]))
            ),
            acero.Declaration(
                "project",
                acero.ProjectNodeOptions(list(operator.columns.values()), list(operator.columns)),
            ),
        ]
    )
    return plan.to_table(use_threads=False)


class _Filter(_Runner):
    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        super().__init__(node, interpreter)
        assert isinstance(node.operator, Filter)
        schema = node.inputs[0].columns
        self._conditions = [compile_condition(text, schema) for text in node.operator.predicates]

    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        outputs: list[list[Tuple]] = [[] for _ in range(self.node.operator.outputs)]
        for given in inputs[0]:
            true = [k for k, condition in enumerate(self._conditions) if condition(given.row)]
            outputs[true[0] if true else -1].append(given)
        return outputs


class _Union(_Runner):
    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        return [[given for stream in inputs for given in stream]]


class _Sink(_Runner):
    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        super().__init__(node, interpreter)
        self._rows = interpreter.results[node.name]

    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        self._rows += [given.row for given in _sorted(inputs[0])]
        return []


# --------------------------------------------------------------------------- aggregates


class _Aggregate(_Runner):
    """Base of the window kinds."""

    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        super().__init__(node, interpreter)
        assert isinstance(node.operator, Aggregate) and node.advance is not None
        self.by = node.operator.by
        self.advance = node.advance
        self.size = node.size or 0
        self.groups: dict[Key, list[Tuple]] = {}  # tuples by key

    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        for key, given in self.keyed(inputs[0]):
            try:
                for function in self.node.functions:
                    check_partial(function, given.row, self.node.inputs[0].columns)
            except FunctionFailed:
                self.reject("function_failed", given.row)
                continue
            self.groups.setdefault(key, []).append(given)
        found = []
        for key in self.groups:
            self.groups[key] = _sorted(self.groups[key])
            found += self.emit(key, span)
        return [found]

    def emit(self, key: Key, span: _Span) -> list[Tuple]:
        """Return the results of a group that a batch completes."""
        raise NotImplementedError

    def result(
        self, key: Key, window: list[Tuple], time: int, inputs: tuple[Any, ...] = ()
    ) -> list[Tuple]:
        """Return the tuple of a window; none if a function of the user fails."""
        columns = dict(zip(self.by, key, strict=True))
        rows, schema = [given.row for given in window], self.node.inputs[0].columns
        row = dict(columns)
        try:
            for function in self.node.functions:
                row[function.name] = evaluate(self.name, function, rows, schema)
        except FunctionFailed:
            self.reject("function_failed", {self.node.inputs[0].time: time, **columns})
            return []
        return [self.make(time, key, inputs, 0, row)]


class _TimeWindows(_Aggregate):
    def emit(self, key: Key, span: _Span) -> list[Tuple]:
        first, end = opening(self.node, span.before), opening(self.node, span.after)
        windows: dict[int, list[Tuple]] = {}
        for given in self.groups[key]:
            start = given.time // self.advance * self.advance  # the last window that has it
            while start + self.size > given.time:
                windows.setdefault(start, []).append(given)
                start -= self.advance
        # What is only in windows that are now closed is not needed again.
        self.groups[key] = [
            given for given in self.groups[key] if given.time // self.advance * self.advance >= end
        ]
        return [
            made
            for start in sorted(windows)
            if first <= start < end
            for made in self.result(key, windows[start], start)
        ]


class _TupleWindows(_Aggregate):
    def emit(self, key: Key, span: _Span) -> list[Tuple]:
        found = []
        while len(self.groups[key]) >= self.size:
            window = self.groups[key][: self.size]
            last = window[-1]
            if last.time >= span.after:  # an earlier tuple may still come
                break
            found += self.result(key, window, last.time, last.order)
            del self.groups[key][: self.advance]
        return found


class _Forever(_Aggregate):
    def emit(self, key: Key, span: _Span) -> list[Tuple]:
        tuples = self.groups[key]
        ends = sorted({(given.time // self.advance + 1) * self.advance for given in tuples})
        return [
            made
            for end in ends
            if span.before < end <= span.after
            for made in self.result(key, [x for x in tuples if x.time < end], end)
        ]


# --------------------------------------------------------------------------- pairs


class _Pairs(_Runner):
    """Base of Join and Product."""

    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        super().__init__(node, interpreter)
        assert isinstance(node.operator, Join | Product) and node.size is not None
        self.size = node.size
        left, right = node.inputs
        self.condition = compile_condition(node.operator.condition, left.columns, right.columns)

    def read(self, inputs: list[list[Tuple]]) -> list[list[tuple[Key, Tuple]]]:
        """Return both sides' tuples with their keys; a Product has none."""
        if not self.node.keys:
            return [[((), given) for given in side] for side in inputs]
        return [self.keyed(inputs[side], side) for side in (0, 1)]

    def pair(self, key: Key, left: Tuple, right: Tuple) -> list[Tuple]:
        """Return the tuple of a pair; none if the condition is not true."""
        if not self.condition(left.row, right.row):
            return []
        row = {f"left_{name}": value for name, value in left.row.items()}
        row |= {f"right_{name}": value for name, value in right.row.items()}
        return [self.make(max(left.time, right.time), key, (left.order, right.order), 0, row)]


class _TimePairs(_Pairs):
    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        super().__init__(node, interpreter)
        self._earlier: list[list[tuple[Key, Tuple]]] = [[], []]

    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        left_old, right_old = self._earlier
        left_new, right_new = self.read(inputs)
        found = []
        for lefts, rights in (
            (left_new, right_old), (left_old, right_new), (left_new, right_new),
        ):  # fmt: skip
            for left_key, left in lefts:
                for right_key, right in rights:
                    near = abs(left.time - right.time) < self.size
                    if near and left_key == right_key:
                        found += self.pair(left_key, left, right)
        # Later tuples of either side have at least the time of the watermark.
        self._earlier = [
            [item for item in side if item[1].time + self.size > span.after]
            for side in (left_old + left_new, right_old + right_new)
        ]
        return [found]


class _TuplePairs(_Pairs):
    def __init__(self, node: Node, interpreter: Interpreter) -> None:
        super().__init__(node, interpreter)
        self._waiting: list[tuple[Tuple, int, Key]] = []  # with the side, 0 for left
        self._passed: dict[tuple[int, Key], list[Tuple]] = {}  # by side and key

    def run(self, inputs: list[list[Tuple]], span: _Span) -> list[list[Tuple]]:
        for side, tuples in enumerate(self.read(inputs)):
            self._waiting += [(given, side, key) for key, given in tuples]
        # The left side is first among equals: a tuple that is on both sides meets itself once.
        self._waiting.sort(key=lambda item: (item[0].order, item[1]))
        ready = [item for item in self._waiting if item[0].time < span.after]
        self._waiting = [item for item in self._waiting if item[0].time >= span.after]
        found = []
        for given, side, key in ready:
            for other in self._passed.get((1 - side, key), [])[-self.size :]:
                left, right = (given, other) if side == 0 else (other, given)
                found += self.pair(key, left, right)
            self._passed.setdefault((side, key), []).append(given)
        return [found]


# --------------------------------------------------------------------------- construction


def _sorted(tuples: Iterable[Tuple]) -> list[Tuple]:
    return sorted(tuples, key=lambda given: given.order)


def _runner(node: Node, interpreter: Interpreter) -> _Runner:
    operator = node.operator
    kinds: dict[type, type[_Runner]] = {
        Source: _Runner, Map: _Map, Filter: _Filter, Union: _Union, Sink: _Sink,
    }  # fmt: skip
    if isinstance(operator, Aggregate):
        aggregates: dict[WindowBy, type[_Runner]] = {
            WindowBy.TIME: _TimeWindows,
            WindowBy.TUPLES: _TupleWindows,
            WindowBy.FOREVER: _Forever,
        }
        return aggregates[operator.window.by](node, interpreter)
    if isinstance(operator, Join | Product):
        by_tuples = operator.window.by is WindowBy.TUPLES
        return (_TuplePairs if by_tuples else _TimePairs)(node, interpreter)
    return kinds[type(operator)](node, interpreter)
