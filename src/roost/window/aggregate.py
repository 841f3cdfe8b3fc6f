"""Aggregates over rows of many segments: partial states that merge into one result.

Each task computes a :class:`State` of the rows it finds. States are merged in any order,
serialised as bytes, and finished once. Functions share accumulators: a sum and a mean of a column
use one, any number of quantiles use one sketch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from roost.errors import ConfigError
from roost.model.arrays import as_arrow
from roost.predicate.ast import quote_name
from roost.window.accumulators import (
    Accumulator,
    Count,
    Distinct,
    Extremes,
    Ranks,
    Spread,
    Total,
)
from roost.window.segment import Rows, WindowSegment

KEY = "aggregate"
OWN_COLUMNS = ("x", "y", "time", "id")


@dataclass(frozen=True, slots=True)
class _Function:
    """Accumulator and result of a function; ``empty`` is the result without segments."""

    accumulator: type[Any]
    result: Callable[[Any, Any], Any]
    empty: Any = None


FUNCTIONS: dict[str, _Function] = {
    "count": _Function(Count, lambda count, _: count.n, 0),
    "sum": _Function(Total, lambda total, _: total.sum()),
    "avg": _Function(Total, lambda total, _: total.mean()),
    "min": _Function(Extremes, lambda extremes, _: extremes.least),
    "max": _Function(Extremes, lambda extremes, _: extremes.greatest),
    "stddev": _Function(Spread, lambda spread, _: spread.deviation()),
    "distinct": _Function(Distinct, lambda distinct, _: distinct.estimate(), 0),
    "quantile": _Function(Ranks, lambda ranks, rank: ranks.quantile(rank)),
}
NUMERIC = frozenset(["sum", "avg", "stddev", "quantile"])

# Name of the function, column (None counts points), and the rank of a quantile.
Function = tuple[str, str | None, float | None]
_Key = tuple[str, str | None]


@dataclass(frozen=True)
class AggregateSpec:
    """Aggregates to compute.

    Parameters
    ----------
    functions
        Function, column and parameter of each. The functions are ``count``, ``sum``, ``avg``,
        ``min``, ``max``, ``stddev``, ``distinct`` and ``quantile``; the parameter of a quantile is
        its rank, of the others None. ``count`` without a column counts points. A column is an
        attribute, or ``x``, ``y``, ``time`` or ``id`` if no attribute has that name.

    Raises
    ------
    ConfigError
        If a function is unknown or repeated, or its column or parameter is missing or invalid.

    Examples
    --------
    >>> AggregateSpec((("count", None, None), ("quantile", "fare", 0.5))).names
    ('count', 'quantile(fare, 0.5)')
    """

    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        """Validate functions, columns and parameters."""
        for name, column, parameter in self.functions:
            if name not in FUNCTIONS:
                raise ConfigError(KEY, name, ", ".join(FUNCTIONS))
            if column is None and name != "count":
                raise ConfigError(KEY, name, f"{name} of a column")
            if name == "quantile":
                if parameter is None or not 0.0 <= parameter <= 1.0:
                    raise ConfigError(KEY, parameter, "a quantile's rank from 0 to 1")
            elif parameter is not None:
                raise ConfigError(KEY, parameter, f"{name} without a parameter")
        if not self.functions or len(set(self.names)) < len(self.names):
            raise ConfigError(KEY, self.functions, "different functions, at least one")

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each result; columns are backquoted where predicates require it."""
        return tuple(
            name if column is None else f"{name}({quote_name(column)}{_suffix(parameter)})"
            for name, column, parameter in self.functions
        )

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the aggregates read."""
        return frozenset(column for _, column, _ in self.functions if column is not None)

    def result_schema(self, attributes: pa.Schema, id_type: pa.DataType) -> pa.Schema:
        """Return the names and types of the results.

        Parameters
        ----------
        attributes
            The points' attributes.
        id_type
            Type of their identifiers.

        Raises
        ------
        ConfigError
            If a column does not exist or its type does not fit the function.
        """
        own = {"x": pa.float64(), "y": pa.float64(), "time": pa.int64(), "id": id_type}
        types = own | dict(zip(attributes.names, attributes.types, strict=True))
        fields = []
        for label, (name, column, _) in zip(self.names, self.functions, strict=True):
            if column is not None and column not in types:
                raise ConfigError(KEY, label, f"columns {', '.join(types)}")
            fields.append((label, _result_type(label, name, types.get(column or ""))))
        return pa.schema(fields)


def _suffix(parameter: float | None) -> str:
    return "" if parameter is None else f", {parameter}"


def _result_type(label: str, name: str, of: pa.DataType | None) -> pa.DataType:
    if of is not None and pt.is_dictionary(of):
        of = of.value_type
    if name == "count":
        return pa.int64()
    number = pt.is_integer(of) or pt.is_floating(of) or pt.is_decimal(of)
    if name in NUMERIC and not number:
        raise ConfigError(KEY, label, f"a column of numbers, not {of}")
    text = pt.is_string(of) or pt.is_large_string(of)
    ordered = number or text or pt.is_boolean(of) or pt.is_timestamp(of) or pt.is_date(of)
    if not ordered:
        raise ConfigError(KEY, label, f"numbers, text, booleans or times, not {of}")
    if name in ("min", "max"):
        return of
    if name == "distinct" or (name == "sum" and pt.is_integer(of)):
        return pa.int64()
    return pa.float64()


@dataclass(frozen=True)
class State:
    """Partial result of some aggregates; without accumulators, of no segment."""

    spec: AggregateSpec
    parts: dict[_Key, Accumulator]

    def to_bytes(self) -> bytes:
        """Serialise the state."""
        parts = [[*key, part.to_json()] for key, part in self.parts.items()]
        return json.dumps({"functions": self.spec.functions, "parts": parts}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """Invert :meth:`to_bytes`."""
        plain = json.loads(data)
        spec = AggregateSpec(tuple((name, of, rank) for name, of, rank in plain["functions"]))
        parts = {
            (kind, column): _KINDS[kind].from_json(part) for kind, column, part in plain["parts"]
        }
        return cls(spec, parts)


_KINDS: dict[str, type[Any]] = {f.accumulator.__name__: f.accumulator for f in FUNCTIONS.values()}


def partial(segment: WindowSegment, rows: Rows, spec: AggregateSpec) -> State:
    """Aggregate some rows of a segment."""
    columns: dict[str, pa.Array] = {}
    parts: dict[_Key, Accumulator] = {}
    for name, column, _ in spec.functions:
        accumulator = FUNCTIONS[name].accumulator
        key = (accumulator.__name__, column)
        if key in parts:
            continue
        if column is None:
            parts[key] = Count(rows.size)
            continue
        if column not in columns:
            columns[column] = _values(segment, rows, column)
        parts[key] = accumulator.of(columns[column])
    return State(spec, parts)


def _values(segment: WindowSegment, rows: Rows, name: str) -> pa.Array:
    """Return the values of a column at some rows, without nulls."""
    column = read_column(segment, name)
    if rows.size < len(column):
        column = column.take(as_arrow(rows))
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.drop_null() if column.null_count else column


def read_column(segment: WindowSegment, name: str) -> pa.Array:
    """Return an attribute or, if there is none of that name, one of the points' own columns.

    Raises
    ------
    ConfigError
        If there is no such column.
    """
    if name in segment.attributes:
        return segment.attributes[name]
    if name == "id":
        return segment.ids
    if name in OWN_COLUMNS:
        return as_arrow(np.asarray(getattr(segment, name)))
    raise ConfigError(KEY, name, f"columns {', '.join([*segment.attributes, *OWN_COLUMNS])}")


def merge(states: Iterable[State]) -> State:
    """Merge states of the same aggregates, in any order.

    Raises
    ------
    ValueError
        If there is no state, or the states are of different aggregates.
    """
    waiting = list(states)
    if len({state.spec for state in waiting}) != 1:
        raise ValueError("merge needs at least one state, and all of the same aggregates")
    return reduce(_merged, waiting)


def _merged(one: State, other: State) -> State:
    if not one.parts or not other.parts:
        return one if one.parts else other
    return State(one.spec, {key: part.plus(other.parts[key]) for key, part in one.parts.items()})


def finish(state: State) -> dict[str, Any]:
    """Return the results by name (see :attr:`AggregateSpec.names`).

    Sums of integers are exact Python integers. Without values, sum, mean, extremes and quantiles
    are None, as is the deviation of fewer than two values.
    """
    results = {}
    for label, (name, column, parameter) in zip(
        state.spec.names, state.spec.functions, strict=True
    ):
        function = FUNCTIONS[name]
        part = state.parts.get((function.accumulator.__name__, column))
        results[label] = function.empty if part is None else function.result(part, parameter)
    return results
