"""Random dataflows with random streams, for tests that compare an engine with the interpreter.

``make_case(seed)`` returns a valid dataflow, batches that feed it, and the features that it covers.
Streams have few keys, small numbers, nulls, NaN and floats with short binary fractions, whose sums
are exact. Columns with ``approx`` in their name hold estimates of the engine, and no operator
computes with them. The user's functions are local, so cloudpickle copies them by value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from roost.dataflow.flow import Dataflow, Stream
from roost.dataflow.operators import Aggregate, Filter, Join, Product, Union, WindowBy
from roost.dataflow.schema import FlowGraph, resolve

TIMESTAMP = "timestamp[us, tz=UTC]"
TYPES = {"int": pa.int64(), "text": pa.string(), "float": pa.float64(), "bool": pa.bool_()}
STANDARD = (("k", "int"), ("s", "text"), ("v", "int"), ("x", "float"))
ROWS_MAX = 200  # estimated rows of a stream
FEATURES = frozenset(
    ["aggregate of aggregate", "clock", "diamond", "early end", "empty batch", "expression failure",
     "filter", "forever", "function map", "idle", "join", "join of aggregates", "late",
     "null key", "null time", "out-of-order", "partial failure", "product", "self-join",
     "several sinks", "sliding window", "timestamp", "top", "tuple join", "tuple window", "union",
     "user function", "user function failure", "map failure"]
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """The rows of each source, the clock, and the sources that end with the batch."""

    rows: dict[str, list[dict[str, Any]]]
    clock: float
    ended: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A dataflow and its input."""

    seed: int
    flow: Dataflow
    graph: FlowGraph
    batches: list[Batch]
    lateness: int  # in units of event time
    idle: float | None
    features: set[str]


def make_case(
    seed: int,
    *,
    failures: bool = True,
    idle: bool = True,
    late: bool = True,
    slow: bool = False,
) -> Case:
    """Return a random case; without ``failures`` no function raises.

    Where event time is ``slow``, windows are open over several of more batches.
    """
    source = random.Random(seed)
    builder = _Builder(source, failures)
    for _ in range(source.randint(1, 3)):
        builder.add_source()
    for _ in range(source.randint(2, 7)):
        builder.add_operator()
    builder.add_sinks()
    graph = resolve(f"case {seed}", builder.flow.operators)
    feed = _Feed(source, builder, idle, late, slow)
    batches = feed.make()
    features = builder.features | feed.features | _graph_features(graph)
    assert features <= FEATURES, features - FEATURES
    return Case(seed, builder.flow, graph, batches, feed.lateness, feed.idle, features)


# --------------------------------------------------------------------------- graphs


@dataclass(frozen=True)
class _Made:
    """A stream with its columns and the number of rows that it may have."""

    stream: Stream
    time: str
    columns: tuple[tuple[str, str], ...]  # name and kind; without the time column
    rows: float

    def named(self, *kinds: str) -> list[str]:
        return [name for name, kind in self.columns if kind in kinds]


class _Builder:
    """Adds random operators to a flow."""

    def __init__(self, source: random.Random, failures: bool) -> None:
        self.random = source
        self.failures = failures
        self.flow = Dataflow(f"random {source.randrange(1000)}")
        self.unit = source.choice([1, 1, 1_000_000])
        self.features: set[str] = set() if self.unit == 1 else {"timestamp"}
        self.sources: dict[str, _Made] = {}
        self.streams: list[_Made] = []
        self.read: set[Any] = set()
        self.count = 0

    def add_source(self) -> None:
        name = f"source{len(self.sources)}"
        columns = self.random.choice([STANDARD, STANDARD, STANDARD[:1] + STANDARD[2:3]])
        columns += (("b", "bool"),) if self.chance(0.2) else ()
        types: dict[str, Any] = {column: TYPES[kind] for column, kind in columns}
        if self.unit > 1 and self.chance(0.2):
            self.features.add("clock")
            stream, time = self.flow.source(name, types), "event_time"
        else:
            time = self.random.choice(["t", "t", "t", "at"])
            types = {time: "int64" if self.unit == 1 else TIMESTAMP, **types}
            stream = self.flow.source(name, types, time=time)
        made = _Made(stream, time, columns, 30)
        self.sources[name] = made
        self.streams.append(made)

    def add_operator(self) -> None:
        add: Callable[[_Made], None] = self.random.choice(
            [self.add_map, self.add_function, self.add_filter, self.add_union]
            + [self.add_aggregate] * 4 + [self.add_join] * 3 + [self.add_product]
        )  # fmt: skip
        add(self.any_stream())

    def add_sinks(self) -> None:
        unread = [made for made in self.streams if made.stream.port not in self.read]
        chosen = [made for made in unread if self.chance(0.7)] or unread[-1:]
        for number, made in enumerate(chosen):
            made.stream.sink(f"sink{number}")

    # ----------------------------------------------------------------- choices

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def any_stream(self, rows_max: float = math.inf) -> _Made:
        """Return a stream, a recent one more often."""
        usable = [made for made in self.streams if made.rows <= rows_max] or self.streams[:1]
        places = (self.random.randrange(len(usable)) for _ in range(2))
        return usable[max(places)]

    def add(
        self, stream: Stream, time: str, columns: Sequence[tuple[str, str]], rows: float,
        *inputs: _Made,
    ) -> None:  # fmt: skip
        self.read |= {made.stream.port for made in inputs}
        self.streams.append(_Made(stream, time, tuple(columns), rows))

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    # ----------------------------------------------------------------- stateless operators

    def add_map(self, given: _Made, columns: Sequence[tuple[str, str]] | None = None) -> None:
        """Map to standard columns, by expressions."""
        chosen = {}
        for name, kind in self.standard(given) if columns is None else columns:
            chosen[name] = self.expression(given, kind)
        kinds = [(name, kind) for name, kind in STANDARD if name in chosen]
        stream = given.stream.map(chosen, name=self.name("map"))
        self.add(stream, given.time, kinds, given.rows, given)

    def standard(self, given: _Made) -> list[tuple[str, str]]:
        """Return the standard columns that a stream has values for."""
        return [(name, kind) for name, kind in STANDARD if given.named(kind)] or [("k", "int")]

    def expression(self, given: _Made, kind: str) -> pc.Expression:
        names = given.named(kind)
        if not names:
            return pc.scalar(pa.scalar(1, TYPES[kind]))
        column = pc.field(self.random.choice(names))
        if kind == "int" and self.failures and self.chance(0.04):
            self.features.add("expression failure")
            return pc.divide_checked(pc.scalar(12), column)
        match kind:
            case "int":
                return self.random.choice([column, column, column + 1, column * -2])
            case "float":
                return self.random.choice([column, column * 2.0, column - 0.25])
            case "text":
                return self.random.choice([column, column, pc.utf8_upper(column)])
        return column

    def add_function(self, given: _Made) -> None:
        """Map by a function: one row, or zero to three, for each row."""
        columns = [(name, kind) for name, kind in given.columns if kind in TYPES]
        if not columns:
            return
        self.features.add("function map")
        schema = pa.schema([(name, TYPES[kind]) for name, kind in columns])
        numbers = given.named("int")
        number = self.random.choice(numbers) if numbers else None
        fails = self.failures and number is not None and self.chance(0.3)
        if fails:
            self.features.add("map failure")
        several = number is not None and self.chance(0.6)
        function = _map_function(schema, number, several, 5 if fails else None)
        stream = given.stream.map(function, schema=schema, name=self.name("map"))
        self.add(stream, given.time, columns, given.rows * (1.3 if several else 1), given)

    def add_filter(self, given: _Made) -> None:
        predicates = [self.predicate(given) for _ in range(self.random.randint(1, 2))]
        outputs = given.stream.split(*predicates, name=self.name("filter"))
        for output in self.random.sample(outputs, self.random.randint(1, len(outputs))):
            self.add(output, given.time, given.columns, given.rows * 0.6, given)

    def predicate(self, given: _Made) -> str:
        texts = []
        for name in given.named("int"):
            texts += [f"{name} > 2", f"{name} in (1, 2, 5)", f"{name} mod 2 = 0", f"{name} is null",
                      f"not ({name} between 1 and 4)", f"abs({name} - 4) < 2.5"]  # fmt: skip
            texts += [f"{name} + {other} > 4" for other in given.named("int", "float")]
            texts += [f"{name} < {other} * 2" for other in given.named("int", "float")]
        texts += [f"{name} = 'a' or {name} > 'b'" for name in given.named("text")]
        texts += [f"{name} < 0.5" for name in given.named("float")]
        texts += [f"not {name}" for name in given.named("bool")]
        if not texts:
            return f"{given.time} is not null"
        chosen = self.random.sample(texts, min(len(texts), self.random.choice([1, 1, 2])))
        return self.random.choice([" and ", " or "]).join(f"({text})" for text in chosen)

    def add_union(self, given: _Made) -> None:
        """Merge streams, mapped to the columns that all have."""
        others = [made for made in self.streams if made.time == given.time and made.rows < 60]
        chosen = [given, *self.random.sample(others, min(len(others), self.random.randint(1, 2)))]
        common = [c for c in STANDARD if all(c in self.standard(made) for made in chosen)]
        if not common:
            return
        mapped = []
        for made in chosen:
            # A clock's event time is the last column, and the first after a Map.
            if made.columns != tuple(common) or made.time == "event_time":
                self.add_map(made, common)
                made = self.streams[-1]
            mapped.append(made)
        stream = self.flow.union(*[made.stream for made in mapped], name=self.name("union"))
        rows = sum(made.rows for made in mapped)
        self.add(stream, given.time, common, rows, *mapped)

    # ----------------------------------------------------------------- stateful operators

    def length(self, longest: int) -> int:
        return self.random.randint(1, longest)

    def add_aggregate(self, given: _Made) -> None:
        keys = given.named("int", "text", "bool")
        by = self.random.sample(keys, min(len(keys), self.random.choice([0, 1, 1, 1, 2])))
        window = self.random.choice(["time"] * 4 + ["tuples"] * 2 + ["forever"])
        size: int | None = self.length(4 if window == "tuples" else 8)
        advance = self.length(size or 1)
        rows = given.rows
        if window == "forever":
            size, advance = None, self.length(6)
        elif window == "time":
            rows = given.rows * (size or 1) / advance
            advance = (size or 1) if rows > ROWS_MAX else advance
        functions, columns = self.functions(given, window, by)
        stream = given.stream.aggregate(
            functions, by=by, window=window, size=size, advance=advance, name=self.name("aggregate")
        )
        kinds = [(name, dict(given.columns)[name]) for name in by]
        self.add(stream, given.time, [*kinds, *columns], min(rows, ROWS_MAX), given)

    def functions(
        self, given: _Made, window: str, by: Sequence[str]
    ) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Return some functions by result column, and the kinds of these columns."""
        found: list[tuple[str, Any, str]] = [("n", "count", "int")]
        numbers, values = given.named("int", "float"), given.named(*TYPES)
        kind_of = dict(given.columns)
        for name in self.random.sample(numbers, min(len(numbers), 2)):
            result = kind_of[name]
            found += [("total", f"sum({name})", result), ("mean", f"avg({name})", "float"),
                      ("approx_spread", f"stddev({name})", "other"),
                      ("approx_median", f"quantile({name}, 0.5)", "other"),
                      ("best", f"top({self.length(3)}, {name})", "other")]  # fmt: skip
        for name in self.random.sample(values, min(len(values), 2)):
            kind = kind_of[name]
            found += [("low", f"min({name})", kind), ("high", f"max({name})", kind),
                      ("oldest", f"first({name})", kind), ("newest", f"last({name})", kind),
                      ("present", f"count({name})", "int"),
                      ("approx_distinct", f"distinct({name})", "other")]  # fmt: skip
        for name in self.random.sample(given.named("int"), min(len(given.named("int")), 1)):
            found += [("own", self.user_function(name, window), "int")] * 3
        found = [item for item in found if item[0] not in by] or [("rows", "count", "int")]
        chosen = self.random.sample(found, min(len(found), self.random.randint(1, 4)))
        functions = {name: function for name, function, _ in chosen}
        for function in functions.values():
            if isinstance(function, str):
                self.features |= {"top"} if function.startswith("top") else set()
            else:
                self.features |= {"user function"} | function.features
        kinds = {name: kind for name, _, kind in chosen}
        return functions, [(name, kinds[name]) for name in functions]

    def user_function(self, column: str, window: str) -> Any:
        fails = ""
        if self.failures and self.chance(0.3):
            fails = self.random.choice(["partial", "finish", "whole"])
        if window != "forever" and (fails == "whole" or (not fails and self.chance(0.4))):
            return _make_whole(column, fails == "whole")
        return _make_partial(column, fails)

    def add_join(self, given: _Made) -> None:
        other = given if self.chance(0.3) else self.any_stream()
        if given.rows * other.rows > 20 * ROWS_MAX or max(given.rows, other.rows) > ROWS_MAX:
            return
        equal = [
            f"left.{a} = right.{b}"
            for kind in ("int", "text", "bool")
            for a in given.named(kind)
            for b in other.named(kind)
        ] + [f"left.{given.time} = right.{other.time}"]
        conditions = self.random.sample(equal[:-1] or equal, 1)
        if self.chance(0.25):
            conditions.append(self.random.choice(equal))
        conditions += self.pair_conditions(given, other, self.random.choice([0, 0, 0, 1, 1, 2]))
        self.random.shuffle(conditions)
        tuples = self.chance(0.35)
        stream = given.stream.join(
            other.stream,
            " and ".join(conditions),
            window="tuples" if tuples else "time",
            size=self.length(3),
            per="key" if tuples else None,
            name=self.name("join"),
        )
        self.add_pairs(stream, given, other, given.rows * other.rows / 8)

    def add_product(self, given: _Made) -> None:
        other = given if self.chance(0.3) else self.any_stream()
        conditions = self.pair_conditions(given, other, self.random.randint(1, 2))
        if given.rows * other.rows > 15 * ROWS_MAX or not conditions:
            return
        stream = given.stream.product(
            other.stream, " and ".join(conditions), size=self.length(3), name=self.name("product")
        )
        self.add_pairs(stream, given, other, given.rows * other.rows / 10)

    def pair_conditions(self, left: _Made, right: _Made, count: int) -> list[str]:
        texts = []
        for a in left.named("int"):
            texts += [f"left.{a} mod 2 = 1", f"left.{a} is not null"]
            for b in right.named("int"):
                texts += [f"left.{a} < right.{b}", f"abs(left.{a} - right.{b}) < 3",
                          f"(left.{a} + right.{b}) mod 3 != 0",
                          f"not (left.{a} = right.{b} or right.{b} > 4)"]  # fmt: skip
            texts += [f"left.{a} * 0.5 <= right.{b}" for b in right.named("float")]
        for a in left.named("text"):
            texts += [f"left.{a} != right.{b}" for b in right.named("text")]
            texts += [f"left.{a} in ('a', 'b')"]
        texts.append(f"left.{left.time} <= right.{right.time}")
        return self.random.sample(texts, min(count, len(texts)))

    def add_pairs(self, stream: Stream, left: _Made, right: _Made, rows: float) -> None:
        time_kind = "int" if self.unit == 1 else "time"
        columns = [
            (f"{side}_{name}", kind)
            for side, made in (("left", left), ("right", right))
            for name, kind in ((made.time, time_kind), *made.columns)
        ]
        self.add(stream, left.time, columns, rows, left, right)
        if self.chance(0.5):  # shorter names, and fewer columns
            self.add_map(self.streams[-1])


# --------------------------------------------------------------------------- functions of the user


def _map_function(
    schema: pa.Schema, number: str | None, several: bool, fails_at: int | None
) -> Callable[[pa.RecordBatch], Any]:
    def function(batch: pa.RecordBatch) -> Any:
        found = batch.column(number).to_pylist() if number else [0] * batch.num_rows
        if fails_at is not None and fails_at in found:
            raise ValueError(f"a value of {fails_at}")
        chosen = batch.select(schema.names)
        if not several:
            return type(batch).from_arrays(chosen.columns, schema=schema)
        rows = [k for k, value in enumerate(found) for _ in range(abs(value or 0) % 4)]
        copies = chosen.take(rows) if rows else chosen.slice(0, 0)
        return type(batch).from_arrays(copies.columns, schema=schema), rows

    return function


def _make_partial(column: str, fails: str) -> Any:
    class Squares:
        """Sum of squares; null if there are none."""

        columns = (column,)
        type = pa.int64()
        features = ({"user function failure"} if fails == "finish" else set()) | (
            {"partial failure"} if fails == "partial" else set()
        )

        def partial(self, values: pa.Array) -> list[int]:
            found = [value for value in values.to_pylist() if value is not None]
            if fails == "partial" and 3 in found:
                raise ValueError("a value of 3")
            return [len(found), sum(value * value for value in found)]

        def merge(self, states: Sequence[list[int]]) -> list[int]:
            return [sum(state[0] for state in states), sum(state[1] for state in states)]

        def finish(self, state: list[int]) -> int | None:
            if fails == "finish" and state[1] % 3 == 1:
                raise ValueError("a sum of 1 modulo 3")
            return state[1] if state[0] else None

    return Squares()


def _make_whole(column: str, fails: bool) -> Any:
    class Changes:
        """Number of times that a value differs from the one before, which depends on the order."""

        columns = (column,)
        type = pa.int64()
        features = {"user function failure"} if fails else set()

        def whole(self, values: pa.Array) -> int:
            found = values.to_pylist()
            if fails and len(found) % 3 == 2:
                raise ValueError(f"{len(found)} values")
            return sum(found[k] != found[k - 1] for k in range(1, len(found)))

    return Changes()


# --------------------------------------------------------------------------- streams


@dataclass
class _Feed:
    """Makes the batches of a case."""

    random: random.Random
    builder: _Builder
    with_idle: bool
    with_late: bool
    slow: bool = False
    features: set[str] = field(default_factory=set)
    lateness: int = 0
    idle: float | None = None

    def make(self) -> list[Batch]:
        unit, sources = self.builder.unit, self.builder.sources
        self.lateness = self.random.choice([0, 1, 2, 4]) * unit
        self.idle = 3.0 if self.with_idle and self.random.random() < 0.5 else None
        now = self.random.randint(-20, 20)
        clock, count = float(max(now, 0)), self.random.randint(3, 8)
        count += 4 if self.slow else 0
        behind = {name: self.random.choice([0, 0, 1, 5]) for name in sources}
        gaps = {name: self.gap(count) for name in sources}
        newest = dict.fromkeys(sources, -math.inf)
        ended: set[str] = set()
        batches = []
        for number in range(count):
            rows: dict[str, list[dict[str, Any]]] = {}
            for name in sources:
                silent = number in gaps[name] or name in ended
                bound = newest[name] - self.lateness
                some = 0 if silent else self.random.choice([0, 2, 4, 6, 8])
                some += 4 if self.slow and not silent else 0
                rows[name] = [self.row(name, now - behind[name], bound) for _ in range(some)]
                times = [row.get(sources[name].time) for row in rows[name]]
                known = [time for time in times if time is not None]
                self.notice(known, newest[name], bound)
                newest[name] = max([newest[name], *known])
            if not any(rows.values()):
                self.features.add("empty batch")
            ending = self.ending(number == count - 1, [x for x in sources if x not in ended])
            ended |= set(ending)
            batches.append(Batch(rows, clock, ending))
            now += self.random.randint(0, 1 if self.slow else 5)
            clock += self.random.choice([1.0, 1.0, 2.0, 4.0])
        return batches

    def gap(self, count: int) -> range:
        """Return the numbers of batches in which a source is silent."""
        if not self.with_idle or self.random.random() < 0.5:
            return range(0)
        start = self.random.randrange(count)
        if self.idle is not None:
            self.features.add("idle")
        return range(start, start + self.random.randint(2, 4))

    def ending(self, last: bool, running: list[str]) -> tuple[str, ...]:
        if last:
            return tuple(running) if self.random.random() < 0.8 else ()
        early = tuple(name for name in running if self.random.random() < 0.04)
        if early:
            self.features.add("early end")
        return early

    def notice(self, times: Sequence[int], newest: float, bound: float) -> None:
        if any(time < bound for time in times):
            self.features.add("late")
        highest = newest
        for time in times:
            if bound <= time < highest:
                self.features.add("out-of-order")
            highest = max(highest, time)

    def row(self, name: str, now: int, bound: float) -> dict[str, Any]:
        made, unit = self.builder.sources[name], self.builder.unit
        row = {column: self.value(column, kind) for column, kind in made.columns}
        if made.time == "event_time":
            return row
        time: int | None = (now + self.random.randint(-3, 2 if self.slow else 5)) * unit
        time += self.random.choice([0, 0, 1]) if unit > 1 else 0
        if time < bound and not (self.with_late and self.random.random() < 0.3):
            time = int(bound) + self.random.randint(0, 1 if self.slow else 3) * unit
        if self.random.random() < 0.01:
            self.features.add("null time")
            time = None
        return {made.time: time, **row}

    def value(self, column: str, kind: str) -> Any:
        null = self.random.random()
        if null < (0.02 if column in ("k", "s") else 0.15):
            if column in ("k", "s"):
                self.features.add("null key")
            return None
        match kind:
            case "int":
                return self.random.randint(0, 3 if column == "k" else 7)
            case "text":
                return self.random.choice(["a", "b", "é", "zz"])
            case "bool":
                return self.random.random() < 0.5
        return math.nan if self.random.random() < 0.05 else self.random.randint(-8, 8) / 4


# --------------------------------------------------------------------------- features of a graph


def _graph_features(graph: FlowGraph) -> set[str]:
    found: set[str] = set()
    behind: dict[str, set[str]] = {}
    aggregates = {node.name for node in graph.nodes if isinstance(node.operator, Aggregate)}
    for node in graph.nodes:
        read = [port.node for port in node.operator.inputs]
        inputs = [behind[name] | {name} for name in read]
        behind[node.name] = set().union(*inputs)
        match node.operator:
            case Aggregate(window=window):
                found |= {"aggregate of aggregate"} if behind[node.name] & aggregates else set()
                found |= {"tuple window"} if window.by is WindowBy.TUPLES else set()
                found |= {"forever"} if window.by is WindowBy.FOREVER else set()
                sliding = window.by is WindowBy.TIME and node.size != node.advance
                found |= {"sliding window"} if sliding else set()
            case Join(window=window):
                found.add("tuple join" if window.by is WindowBy.TUPLES else "join")
                found |= {"join of aggregates"} if behind[node.name] & aggregates else set()
            case Product():
                found.add("product")
            case Union():
                found.add("union")
            case Filter():
                found.add("filter")
        if isinstance(node.operator, Join | Product) and len(set(node.operator.inputs)) == 1:
            found.add("self-join")
        if any(a & b for k, a in enumerate(inputs) for b in inputs[:k]):
            found.add("diamond")
    if sum(node.output is None for node in graph.nodes) > 1:
        found.add("several sinks")
    return found
