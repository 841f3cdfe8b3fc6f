"""Aggregates over rows of many segments: partial states that merge into one answer.

Each task makes a :class:`State` of the rows it finds. States are merged in any order, travel as
bytes, and are finished once. Functions that need the same of a column share it: a sum and a mean
are one accumulator, any number of quantiles one sketch.
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
from roost.kernel.arrays import as_arrow
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
    """How an aggregate is kept and what is asked of it; ``empty`` is the answer of no segment."""

    kept: type[Any]
    result: Callable[[Any, Any], Any]
    empty: Any = None


FUNCTIONS: dict[str, _Function] = {
    "count": _Function(Count, lambda kept, _: kept.n, 0),
    "sum": _Function(Total, lambda kept, _: kept.sum()),
    "avg": _Function(Total, lambda kept, _: kept.mean()),
    "min": _Function(Extremes, lambda kept, _: kept.least),
    "max": _Function(Extremes, lambda kept, _: kept.greatest),
    "stddev": _Function(Spread, lambda kept, _: kept.deviation()),
    "distinct": _Function(Distinct, lambda kept, _: kept.estimate(), 0),
    "quantile": _Function(Ranks, lambda kept, rank: kept.quantile(rank)),
}
NUMERIC = frozenset(["sum", "avg", "stddev", "quantile"])

# Name of the function, column (None counts points), and the rank of a quantile.
Function = tuple[str, str | None, float | None]
_Key = tuple[str, str | None]


@dataclass(frozen=True)
class AggregateSpec:
    """Which aggregates to compute.

    Parameters
    ----------
    functions
        Function, column and parameter of each. The functions are ``count``, ``sum``, ``avg``,
        ``min``, ``max``, ``stddev``, ``distinct`` and ``quantile``; a quantile takes its rank as
        parameter, the others take None. ``count`` without a column counts points. A column is an
        attribute, or ``x``, ``y``, ``time`` or ``id`` where no attribute has that name.

    Raises
    ------
    ConfigError
        If a function is unknown, twice there, or without what it takes.

    Examples
    --------
    >>> AggregateSpec((("count", None, None), ("quantile", "fare", 0.5))).names
    ('count', 'quantile(fare, 0.5)')
    """

    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be computed from any column."""
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
        """Name of each result; a column that is no identifier is backquoted, as in predicates."""
        return tuple(
            name if column is None else f"{name}({quote_name(column)}{_suffix(parameter)})"
            for name, column, parameter in self.functions
        )

    @property
    def columns(self) -> frozenset[str]:
        """Columns that are read."""
        return frozenset(column for _, column, _ in self.functions if column is not None)

    def result_schema(self, attributes: pa.Schema, id_type: pa.DataType) -> pa.Schema:
        """Types of the results.

        Parameters
        ----------
        attributes
            The points' attributes.
        id_type
            Type of their identifiers.

        Raises
        ------
        ConfigError
            If a column does not exist or is of a type that the function does not take.
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
    """A partial result; without accumulators it is that of no rows at all."""

    spec: AggregateSpec
    parts: dict[_Key, Accumulator]

    def to_bytes(self) -> bytes:
        """Write down."""
        parts = [[*key, part.to_json()] for key, part in self.parts.items()]
        return json.dumps({"functions": self.spec.functions, "parts": parts}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """Inverse of :meth:`to_bytes`."""
        plain = json.loads(data)
        spec = AggregateSpec(tuple((name, of, rank) for name, of, rank in plain["functions"]))
        parts = {
            (kind, column): _KINDS[kind].from_json(part) for kind, column, part in plain["parts"]
        }
        return cls(spec, parts)


_KINDS: dict[str, type[Any]] = {f.kept.__name__: f.kept for f in FUNCTIONS.values()}


def partial(segment: WindowSegment, rows: Rows, spec: AggregateSpec) -> State:
    """Aggregate some rows of a segment."""
    columns: dict[str, pa.Array] = {}
    parts: dict[_Key, Accumulator] = {}
    for name, column, _ in spec.functions:
        kept = FUNCTIONS[name].kept
        key = (kept.__name__, column)
        if key in parts:
            continue
        if column is None:
            parts[key] = Count(rows.size)
            continue
        if column not in columns:
            columns[column] = _values(segment, rows, column)
        parts[key] = kept.of(columns[column])
    return State(spec, parts)


def _values(segment: WindowSegment, rows: Rows, name: str) -> pa.Array:
    """Values of a column at some rows, without nulls."""
    if name in segment.attributes:
        column = segment.attributes[name]
    elif name == "id":
        column = segment.ids
    elif name in OWN_COLUMNS:
        return as_arrow(np.asarray(getattr(segment, name)[rows]))
    else:
        known = ", ".join([*segment.attributes, *OWN_COLUMNS])
        raise ConfigError(KEY, name, f"columns {known}")
    if rows.size < len(column):
        column = column.take(as_arrow(rows))
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.drop_null() if column.null_count else column


def merge(states: Iterable[State]) -> State:
    """Merge states of the same aggregates, in any order.

    Raises
    ------
    ValueError
        If there are none, or they are of different aggregates.
    """
    waiting = list(states)
    if len({state.spec for state in waiting}) != 1:
        raise ValueError("merging takes states of one and the same aggregates, at least one")
    return reduce(_merged, waiting)


def _merged(one: State, other: State) -> State:
    if not one.parts or not other.parts:
        return one if one.parts else other
    return State(one.spec, {key: part.plus(other.parts[key]) for key, part in one.parts.items()})


def finish(state: State) -> dict[str, Any]:
    """Return the results by name (see :attr:`AggregateSpec.names`).

    Sums of integers are exact Python integers. Nothing has a sum, mean, extreme or quantile of
    None, and fewer than two values a deviation of None.
    """
    results = {}
    for label, (name, column, parameter) in zip(
        state.spec.names, state.spec.functions, strict=True
    ):
        function = FUNCTIONS[name]
        part = state.parts.get((function.kept.__name__, column))
        results[label] = function.empty if part is None else function.result(part, parameter)
    return results
