"""The public way to write a dataflow: streams with methods that add operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

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
from roost.errors import DataflowError
from roost.model.choices import LayoutName

if TYPE_CHECKING:
    from roost.dataflow.compiler import LayoutCosts
    from roost.dataflow.explain import Explanation
    from roost.dataflow.schema import StreamSchema


class Dataflow:
    """A query over keyed streams, written as if it ran sequentially on one machine.

    Names of operators are unique; operators without a name are numbered. The graph is validated
    as a whole when it is compiled.

    Examples
    --------
    >>> import pyarrow.compute as pc
    >>> flow = Dataflow("heavy customers")
    >>> calls = flow.source(
    ...     "calls", {"caller": "string", "start": "timestamp[us, tz=UTC]", "seconds": "int64"},
    ...     time="start",
    ... )
    >>> means = calls.aggregate({"mean": "avg(seconds)"}, by="caller", size=3600, advance=60)
    >>> means.filter("mean > 300").sink("heavy")
    >>> [operator.name for operator in flow.operators]
    ['calls', 'aggregate-1', 'filter-2', 'heavy']
    """

    def __init__(self, name: str = "flow", operators: Sequence[Operator] = ()) -> None:
        self.name = name
        self.operators: list[Operator] = list(operators)

    def source(
        self,
        name: str,
        schema: pa.Schema | Mapping[str, str | pa.DataType],
        *,
        time: str | None = None,
        path: str | None = None,
    ) -> Stream:
        """Add a source of records.

        ``path`` names files, ``generate:`` or ``kafka://``, as ``points.path`` does. Records
        without a ``time`` column are stamped with the time at which their batch begins.
        """
        if not isinstance(schema, pa.Schema):
            schema = pa.schema([(column, _type(name, column, schema[column])) for column in schema])
        return self.add(Source(name, (), SourceKind.RECORDS, schema, time, path))

    def points(self) -> Stream:
        """Return the points of the run; each is handed over as it is matched."""
        return self._own(SourceKind.POINTS)

    def matches(self) -> Stream:
        """Return the matches of the run, with the attributes of their points."""
        return self._own(SourceKind.MATCHES)

    def _own(self, kind: SourceKind) -> Stream:
        if Source(kind.value, kind=kind) in self.operators:
            return Stream(self, Port(kind.value))
        return self.add(Source(kind.value, kind=kind))

    @property
    def reads_points(self) -> bool:
        """Whether it reads the points or matches of its run."""
        sources = (operator for operator in self.operators if isinstance(operator, Source))
        return any(source.kind is not SourceKind.RECORDS for source in sources)

    def union(self, *streams: Stream, name: str | None = None) -> Stream:
        """Merge streams of the same schema."""
        name = self.named("union", name)
        return self.add(Union(name, tuple(self._port(name, stream) for stream in streams)))

    def _port(self, reader: str, stream: Stream) -> Port:
        """Return the port of a stream that an operator reads."""
        if stream.flow is not self:
            raise DataflowError(reader, f"reads {stream.port.node!r} of another dataflow")
        return stream.port

    def add(self, operator: Operator) -> Stream:
        """Add an operator; returns its first output."""
        self.operators.append(operator)
        return Stream(self, Port(operator.name))

    def explain(
        self,
        machines: int | None = None,
        *,
        costs: Mapping[str, float] | None = None,
        model: LayoutCosts | None = None,
        own: Mapping[SourceKind, StreamSchema] | None = None,
        layout: LayoutName = LayoutName.AUTO,
    ) -> Explanation:
        """Validate the dataflow and explain how it runs; ``print`` the result.

        ``machines`` are by default the cores of this host, divided evenly or by ``costs``:
        processor seconds per tuple by operator. The ``model`` has the weights of a layout's cost;
        without it only hops, fan-out and channels are counted. A dataflow that reads the points or
        matches of a run needs their schemas as ``own``: see
        :func:`roost.stages.flow_source.own_schemas`.
        """
        from roost.dataflow.explain import explain
        from roost.dataflow.schema import resolve

        graph = resolve(self.name, self.operators, own)
        return explain(graph, machines or os.cpu_count() or 1, costs, model, layout)

    def named(self, kind: str, name: str | None) -> str:
        """Return a name for an operator: the given one, or its kind and number."""
        if name is not None:
            return name
        known = {operator.name for operator in self.operators}
        number = len(known)
        while f"{kind}-{number}" in known:
            number += 1
        return f"{kind}-{number}"


def _type(name: str, column: str, given: str | pa.DataType) -> pa.DataType:
    if isinstance(given, pa.DataType):
        return given
    if given == "timestamp[us, tz=UTC]":  # the text of the type, which has no alias
        return pa.timestamp("us", "UTC")
    try:
        return pa.type_for_alias(given)
    except ValueError:
        problem = f"unknown type {given!r}; expected a type such as string, double, int64, bool"
        raise DataflowError(name, problem, column) from None


@dataclass(frozen=True)
class Stream:
    """The output of an operator."""

    flow: Dataflow
    port: Port

    def map(
        self,
        columns: Mapping[str, pc.Expression] | Callable[[pa.RecordBatch], Any],
        *,
        schema: pa.Schema | None = None,
        name: str | None = None,
    ) -> Stream:
        """Compute columns by pyarrow expressions, or rows by a function of a record batch.

        The time column is retained. A function returns a batch of the ``schema``, without the time
        column, with as many rows; or such a batch with any number of rows and the number of the
        input row of each, in ascending order.
        """
        name, inputs = self.flow.named("map", name), (self.port,)
        if callable(columns):
            return self.flow.add(Map(name, inputs, {}, columns, schema))
        return self.flow.add(Map(name, inputs, dict(columns), None, schema))

    def filter(self, predicate: str, *, name: str | None = None) -> Stream:
        """Return the tuples for which a predicate is true."""
        return self.split(predicate, name=name)[0]

    def split(self, *predicates: str, name: str | None = None) -> tuple[Stream, ...]:
        """Return one stream per predicate, and a last one of the tuples for which none is true.

        A tuple goes to the first predicate that is true.
        """
        added = Filter(self.flow.named("filter", name), (self.port,), predicates)
        self.flow.add(added)
        return tuple(Stream(self.flow, Port(added.name, k)) for k in range(added.outputs))

    def aggregate(
        self,
        functions: Mapping[str, Any],
        *,
        by: str | Sequence[str] = (),
        window: str = "time",
        size: float | None = None,
        advance: float | None = None,
        name: str | None = None,
    ) -> Stream:
        """Aggregate windows of tuples, each group by itself.

        ``functions`` has a text, such as ``avg(fare)``, or an object of the user for each result
        column. A ``window`` is by ``time`` or ``tuples``; it advances by its size unless
        ``advance`` is smaller. A window ``forever`` emits changed groups at each multiple of the
        advance.
        """
        name = self.flow.named("aggregate", name)
        keys = (by,) if isinstance(by, str) else tuple(by)
        made = _window(name, window, size, advance)
        return self.flow.add(Aggregate(name, (self.port,), dict(functions), keys, made))

    def join(
        self,
        right: Stream,
        condition: str,
        *,
        window: str = "time",
        size: float,
        per: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Pair tuples of two streams, with at least one ``left.a = right.b``.

        Their event times differ by less than ``size``; a window of ``tuples`` with ``per="key"``
        pairs a tuple with the last ``size`` tuples of the other side that have its key.
        """
        name = self.flow.named("join", name)
        made = _window(name, window, size, None)
        inputs = (self.port, self.flow._port(name, right))
        return self.flow.add(Join(name, inputs, condition, made, per))

    def product(
        self, right: Stream, condition: str, *, size: float, name: str | None = None
    ) -> Stream:
        """Pair tuples of two streams by any condition; event times differ by less than ``size``."""
        name = self.flow.named("product", name)
        made = Window(WindowBy.TIME, size)
        inputs = (self.port, self.flow._port(name, right))
        return self.flow.add(Product(name, inputs, condition, made))

    def sink(self, name: str) -> None:
        """Write the stream to the output folder of this name."""
        self.flow.add(Sink(name, (self.port,)))


def _window(name: str, by: str, size: float | None, advance: float | None) -> Window:
    try:
        return Window(WindowBy(by), size, advance)
    except ValueError:
        expected = ", ".join(WindowBy)
        raise DataflowError(name, f"unknown window {by!r}; expected {expected}") from None
