"""Validates a dataflow, and resolves names, types and units.

Everything that a user can get wrong is refused here, before anything runs, with the operator and
the column in the message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import cloudpickle
import pyarrow as pa

from roost.dataflow.division import Division
from roost.dataflow.expressions import expression_schema
from roost.dataflow.functions import Function, resolve_function
from roost.dataflow.operators import (
    Aggregate,
    Filter,
    Join,
    Map,
    Operator,
    Port,
    Product,
    Sink,
    Source,
    SourceKind,
    Union,
    Window,
    WindowBy,
)
from roost.errors import ConfigError, DataflowError, PredicateError
from roost.model.columns import VIEWS, decoded_type
from roost.model.records import TIME_LIMIT
from roost.model.schemas import TIMESTAMP, is_text, time_type_of
from roost.predicate import check, parse
from roost.predicate.pairs import PairPredicate

CLOCK_TIME = "event_time"
"""Time column of a source that has none."""
BATCH_ID = "batch_id"  # the first column of results
OWN_COLUMNS = frozenset(
    f"__{name}"
    for name in ("time", "order", "bucket", "pane", "cut", "tuples", "roost_row", "roost_malformed")
)
"""Columns that stages add to tuples."""
_PARTS = re.compile(r"__\d+\.")  # beginning of the columns of partial results


@dataclass(frozen=True)
class StreamSchema:
    """Columns of a stream, one of which is the event time."""

    columns: pa.Schema
    time: str

    @property
    def time_type(self) -> pa.DataType:
        """Type of event times."""
        return self.columns.field(self.time).type

    @property
    def unit(self) -> int:
        """Length of a second in event time; 1 if event times are integers."""
        return 1_000_000 if self.time_type == TIMESTAMP else 1


@dataclass(frozen=True)
class Node:
    """An operator with everything resolved."""

    operator: Operator
    number: int  # in the order of the graph; breaks ties between tuples of different operators
    inputs: tuple[StreamSchema, ...]
    output: StreamSchema | None  # the same for all outputs; None for a sink
    functions: tuple[Function, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()  # key columns by input; none for a Product
    size: int | None = None  # in units of event time, or tuples
    advance: int | None = None

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.operator.name

    @property
    def ordered(self) -> bool:
        """Whether the results depend on the order of tuples."""
        operator = self.operator
        if isinstance(operator, Aggregate | Join) and operator.window.by is WindowBy.TUPLES:
            return True
        return any(function.ordered for function in self.functions)

    @property
    def mirrored(self) -> bool:
        """Whether both sides of a Join are the same tuples with the same keys: sent once."""
        inputs = self.operator.inputs
        return (
            isinstance(self.operator, Join) and inputs[0] == inputs[1] and len(set(self.keys)) == 1
        )

    def reads(self, side: int) -> tuple[str, ...]:
        """Return the columns of an input that a stateful operator reads."""
        columns = self.inputs[side].columns.names
        if not isinstance(self.operator, Aggregate):
            return tuple(columns)
        used = {*self.keys[0], *(name for f in self.functions for name in f.columns)}
        return tuple(name for name in columns if name in used)


def _unpickle(name: str, nodes: bytes, division: Division | None) -> FlowGraph:
    return FlowGraph(name, cloudpickle.loads(nodes), division)


@dataclass(frozen=True)
class FlowGraph:
    """A valid dataflow; each node comes after those that it reads.

    Without a ``division``, a stage begins at every source and stateful operator.
    """

    name: str
    nodes: tuple[Node, ...]
    division: Division | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle functions of the user by value: workers cannot import where they come from."""
        return _unpickle, (self.name, self._pickled, self.division)

    @cached_property
    def _pickled(self) -> bytes:
        return bytes(cloudpickle.dumps(self.nodes))

    @property
    def by_name(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def stages(self) -> Division:
        """The division into stages."""
        if self.division is not None:
            return self.division
        nodes = (n for n in self.nodes if isinstance(n.operator, Source) or n.operator.stateful)
        return Division(frozenset(node.name for node in nodes))

    @cached_property
    def ordered(self) -> frozenset[str]:
        """The nodes whose output needs the tuple order, since a later result depends on it."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            for output in range(node.operator.outputs):
                for reader, _ in self.readers_of(node.name, output):
                    passes = not isinstance(reader.operator, Aggregate) and reader.name in found
                    if reader.ordered or passes:
                        found.add(node.name)
        return frozenset(found)

    def needs_order(self, node: Node) -> bool:
        """Return whether a stateful operator reads the order of its input."""
        passes = not isinstance(node.operator, Aggregate) and node.name in self.ordered
        return node.ordered or passes

    def readers_of(self, name: str, output: int = 0) -> list[tuple[Node, int]]:
        """Return the nodes that read an output, each with the number of its input."""
        return [
            (node, k)
            for node in self.nodes
            for k, port in enumerate(node.operator.inputs)
            if port == Port(name, output)
        ]


def resolve(
    name: str, operators: Sequence[Operator], own: Mapping[SourceKind, StreamSchema] | None = None
) -> FlowGraph:
    """Validate operators; ``own`` has the schemas of the run's points and matches.

    Raises :class:`DataflowError` with the operator, the column and what is accepted.
    """
    nodes: dict[str, Node] = {}
    for operator in _sorted(operators):
        inputs = []
        for port in operator.inputs:
            found = nodes[port.node].output
            assert found is not None
            inputs.append(found)
        node = nodes[operator.name] = _resolved(operator, len(nodes), tuple(inputs), own or {})
        _check_columns(node)
    if not any(isinstance(operator, Sink) for operator in operators):
        raise DataflowError(name, "a dataflow needs at least one sink")
    return FlowGraph(name, tuple(nodes.values()))


def _sorted(operators: Sequence[Operator]) -> list[Operator]:
    """Return operators so that each comes after those that it reads."""
    by_name: dict[str, Operator] = {}
    for operator in operators:
        if operator.name in by_name:
            raise DataflowError(operator.name, "duplicate name; names of operators are unique")
        by_name[operator.name] = operator
    for operator in operators:
        _check_inputs(operator, by_name)
    done: dict[str, Operator] = {}
    while len(done) < len(by_name):
        ready = [
            operator
            for operator in operators
            if operator.name not in done and all(port.node in done for port in operator.inputs)
        ]
        if not ready:
            rest = [operator.name for operator in operators if operator.name not in done]
            raise DataflowError(rest[0], f"the operators {', '.join(rest)} form a cycle")
        done[ready[0].name] = ready[0]
    return list(done.values())


def _check_inputs(operator: Operator, by_name: Mapping[str, Operator]) -> None:
    expected = 0 if isinstance(operator, Source) else 1
    expected = 2 if isinstance(operator, Join | Product) else expected
    count = len(operator.inputs)
    if count != expected and not (isinstance(operator, Union) and count):
        raise DataflowError(operator.name, f"expected {expected} input streams, got {count}")
    for port in operator.inputs:
        known = by_name.get(port.node)
        if known is None or not 0 <= port.output < known.outputs:
            raise DataflowError(operator.name, f"reads {port.node!r}, which has no such output")


def _resolved(
    operator: Operator,
    number: int,
    inputs: tuple[StreamSchema, ...],
    own: Mapping[SourceKind, StreamSchema],
) -> Node:
    match operator:
        case Source():
            return Node(operator, number, inputs, _source(operator, own))
        case Map():
            return Node(operator, number, inputs, _map(operator, inputs[0]))
        case Filter():
            for predicate in operator.predicates:
                _check_predicate(operator.name, predicate, inputs[0].columns)
            return Node(operator, number, inputs, inputs[0])
        case Union():
            for other in inputs[1:]:
                # Columns are read by name, so their order does not matter.
                different = set(other.columns) ^ set(inputs[0].columns)
                if different or other.time != inputs[0].time:
                    problem = f"streams of different schemas: {_text(inputs[0])} and {_text(other)}"
                    column = min((field.name for field in different), default=other.time)
                    raise DataflowError(operator.name, problem, column)
            return Node(operator, number, inputs, inputs[0])
        case Aggregate():
            return _aggregate(operator, number, inputs)
        case Join() | Product():
            return _pairs(operator, number, inputs)
    return Node(operator, number, inputs, None)


def _check_columns(node: Node) -> None:
    """Refuse columns that Arrow cannot select rows of, or that would be confused with Roost's own.

    These are the columns that Roost adds to tuples and results.
    """
    result = isinstance(node.operator, Sink)
    stream = node.inputs[0] if result else node.output
    for field in () if stream is None else stream.columns:
        name = field.name
        if field.type in VIEWS:
            problem = f"a column of type {field.type}; expected {VIEWS[field.type]}"
            raise DataflowError(node.name, problem, name)
        if name in OWN_COLUMNS or _PARTS.match(name) or (result and name == BATCH_ID):
            problem = "a column of this name is Roost's own: compute one with another name in a Map"
            raise DataflowError(node.name, problem, name)


def _text(stream: StreamSchema) -> str:
    columns = ", ".join(f"{field.name} {field.type}" for field in stream.columns)
    return f"({columns}; time {stream.time})"


def _source(source: Source, own: Mapping[SourceKind, StreamSchema]) -> StreamSchema:
    if source.kind is not SourceKind.RECORDS:
        if source.kind not in own:
            raise DataflowError(source.name, f"this run has no {source.kind.value}")
        return own[source.kind]
    assert source.schema is not None
    # Dictionaries and views only save space.
    fields = [field.with_type(decoded_type(field.type)) for field in source.schema]
    if len({field.name for field in fields}) < len(fields) or not fields:
        raise DataflowError(source.name, "expected at least one column, and different names")
    if source.time is None:
        if CLOCK_TIME in source.schema.names:
            raise DataflowError(source.name, "name it as the time column", CLOCK_TIME)
        return StreamSchema(pa.schema([*fields, (CLOCK_TIME, TIMESTAMP)]), CLOCK_TIME)
    if source.time not in source.schema.names:
        known = ", ".join(source.schema.names)
        raise DataflowError(source.name, f"unknown column (known: {known})", source.time)
    place = source.schema.get_field_index(source.time)
    try:
        type_ = time_type_of(fields[place].type, source.time)
    except ConfigError as error:
        raise DataflowError(source.name, f"expected {error.expected}", source.time) from None
    fields[place] = pa.field(source.time, type_)
    return StreamSchema(pa.schema(fields), source.time)


def _map(operator: Map, stream: StreamSchema) -> StreamSchema:
    if operator.function is None:
        if operator.schema is not None:
            raise DataflowError(
                operator.name, "a schema is for a function; cast expressions instead"
            )
        columns = expression_schema(operator.name, operator.columns, stream.columns)
    elif operator.schema is None:
        raise DataflowError(operator.name, "a function needs the schema of what it returns")
    else:
        columns = operator.schema
        _check_pickles(operator.name, operator.function)
    if stream.time in columns.names:
        problem = "Map keeps the event time of its input: leave the time column out"
        raise DataflowError(operator.name, problem, stream.time)
    return _timed(operator.name, stream.columns.field(stream.time), columns)


def _timed(operator: str, time: pa.Field, columns: Sequence[pa.Field] | pa.Schema) -> StreamSchema:
    fields = [time, *columns]
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise DataflowError(operator, "two result columns have this name", name)
    return StreamSchema(pa.schema(fields), time.name)


def _check_pickles(operator: str, function: Any, column: str | None = None) -> None:
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        problem = f"{function!r} does not pickle ({error}); workers need a copy of it"
        raise DataflowError(operator, problem, column) from None


def _check_predicate(operator: str, text: str, columns: pa.Schema) -> None:
    try:
        check(parse(text), columns)
    except PredicateError as error:
        raise DataflowError(operator, f"predicate {text!r}: {error}") from None


def _check_key(operator: str, column: str, columns: pa.Schema) -> None:
    if column not in columns.names:
        raise DataflowError(operator, f"unknown column (known: {', '.join(columns.names)})", column)
    type_ = columns.field(column).type
    if _key_type(type_) is None:
        kinds = "an integer other than uint64, text, a boolean, a timestamp or a date"
        problem = f"a key must be {kinds}, not {type_}"
        raise DataflowError(operator, problem, column)


def _key_type(type_: pa.DataType) -> pa.DataType | None:
    """Return the type by which keys are compared; none if values of a type are no keys."""
    if pa.types.is_integer(type_) and type_ != pa.uint64():
        return pa.int64()
    if is_text(type_):
        return pa.string()
    if pa.types.is_boolean(type_) or pa.types.is_timestamp(type_) or pa.types.is_date32(type_):
        return type_
    return None


def _aggregate(operator: Aggregate, number: int, inputs: tuple[StreamSchema, ...]) -> Node:
    name, (stream,) = operator.name, inputs
    for column in operator.by:
        _check_key(name, column, stream.columns)
        if column == stream.time:
            raise DataflowError(name, "the event time cannot be a key", column)
    size, advance = _extent(name, operator.window, stream.unit)
    advance = size if advance is None else advance
    functions = tuple(
        resolve_function(name, column, given, stream.columns)
        for column, given in operator.functions.items()
    )
    if not functions:
        raise DataflowError(name, "expected at least one function")
    for function in functions:
        if function.user is not None:
            _check_pickles(name, function.user, function.name)
        if function.kind == "whole" and operator.window.by is WindowBy.FOREVER:
            problem = "whole needs all rows of a window, which without end has no bound"
            raise DataflowError(name, problem, function.name)
    keys = [stream.columns.field(column) for column in operator.by]
    results = [pa.field(function.name, function.type) for function in functions]
    output = _timed(name, stream.columns.field(stream.time), [*keys, *results])
    return Node(operator, number, inputs, output, functions, (operator.by,), size, advance)


def _extent(name: str, window: Window, unit: int) -> tuple[int | None, int | None]:
    """Return size and advance in units of event time, or tuples."""
    ticks: list[int | None] = []
    units = 1 if window.by is WindowBy.TUPLES else unit
    for label, value in (("size", window.size), ("advance", window.advance)):
        if value is None:
            ticks.append(None)
            continue
        usable = isinstance(value, Real) and math.isfinite(value) and value is not True
        exact = float(value) * units if usable else 0.0
        # 1.000001 seconds are not quite a whole number of microseconds in binary.
        whole = math.isclose(exact, round(exact), rel_tol=1e-12)
        if not (whole and 0 < round(exact) < TIME_LIMIT):
            problem = f"{label} of {value!r}; expected a whole number of units from 1 to 2**62"
            raise DataflowError(name, problem)
        ticks.append(round(exact))
    size, advance = ticks
    if window.by is WindowBy.FOREVER:
        if size is not None:
            raise DataflowError(name, "a window forever has an advance and no size")
        if advance is None:
            raise DataflowError(name, "a window forever needs an advance")
        return None, advance
    if size is None:
        raise DataflowError(name, f"a window by {window.by} needs a size")
    if advance is not None and advance > size:
        raise DataflowError(name, f"advance {window.advance} is greater than size {window.size}")
    return size, advance


def _pairs(operator: Join | Product, number: int, inputs: tuple[StreamSchema, ...]) -> Node:
    name, (left, right), window = operator.name, inputs, operator.window
    if left.time_type != right.time_type:
        problem = f"event times of types {left.time_type} and {right.time_type}; expected one type"
        raise DataflowError(name, problem)
    if window.by is WindowBy.FOREVER:
        raise DataflowError(name, "expected a window by time or tuples")
    per = operator.per if isinstance(operator, Join) else None
    if per not in (None, "key") or (per is not None and window.by is not WindowBy.TUPLES):
        raise DataflowError(name, "per='key' is for windows by tuples")
    if window.by is WindowBy.TUPLES and per is None:
        hint = "use per='key'" if isinstance(operator, Join) else "a Product has time windows only"
        raise DataflowError(name, f"a window of tuples over the whole stream; {hint}")
    size, _ = _extent(name, window, left.unit)
    try:
        condition = PairPredicate(operator.condition, left.columns, right.columns)
    except PredicateError as error:
        raise DataflowError(name, f"condition {operator.condition!r}: {error}") from None
    keys: tuple[tuple[str, ...], ...] = ()
    if isinstance(operator, Join):
        keys = _join_keys(name, condition, left, right)
    sides = (("left_", left), ("right_", right))
    columns = [f.with_name(prefix + f.name) for prefix, side in sides for f in side.columns]
    output = _timed(name, left.columns.field(left.time), columns)
    return Node(operator, number, inputs, output, keys=keys, size=size)


def _join_keys(
    name: str, condition: PairPredicate, left: StreamSchema, right: StreamSchema
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    usable = []
    found = condition.equalities()
    for a, b in found:
        types = [_key_type(left.columns.field(a).type), _key_type(right.columns.field(b).type)]
        if types[0] is not None and types[0] == types[1]:  # others are further conditions
            usable.append((a, b))
    if not usable:
        problem = "a Join needs an equality such as left.a = right.b; without one use a Product"
        if found:
            a, b = found[0]
            types = [left.columns.field(a).type, right.columns.field(b).type]
            problem += f"; {types[0]} = {types[1]} is no equality of keys"
        raise DataflowError(name, problem, found[0][0] if found else None)
    return tuple(a for a, _ in usable), tuple(b for _, b in usable)
