"""Aggregates over rows of many segments: partial states that merge into one result.

Each task computes a :class:`State` of the rows it finds; states are merged in any order and
finished once. Functions share accumulators: a sum and a mean of a column use one, any number of
quantiles use one sketch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from roost.errors import ConfigError
from roost.model.arrays import as_arrow
from roost.predicate.ast import quote_name
from roost.window.grouped import (
    Contribution,
    Counts,
    DistinctSketches,
    Grouped,
    Groups,
    RankSketches,
    Spreads,
    Totals,
)
from roost.window.grouped_extremes import ExactExtremes
from roost.window.segment import Rows, WindowSegment

KEY = "aggregate"
OWN_COLUMNS = ("x", "y", "time", "id")


class _Function(NamedTuple):
    """Accumulator of a function, and its result without segments."""

    accumulator: str
    empty: int | None = None


FUNCTIONS = {
    "count": _Function("Count", 0),
    "sum": _Function("Total"),
    "avg": _Function("Total"),
    "min": _Function("Extremes"),
    "max": _Function("Extremes"),
    "stddev": _Function("Spread"),
    "distinct": _Function("Distinct", 0),
    "quantile": _Function("Ranks"),
}
NUMERIC = frozenset(["sum", "avg", "stddev", "quantile"])
ACCUMULATORS: dict[str, type[Grouped]] = {
    "Count": Counts,
    "Total": Totals,
    "Extremes": ExactExtremes,
    "Spread": Spreads,
    "Distinct": DistinctSketches,
    "Ranks": RankSketches,
}

# Name of the function, column (None counts points), and the rank of a quantile.
Function = tuple[str, str | None, float | None]
# Accumulator and its column; None counts points.
Key = tuple[str, str | None]


def key_of(function: str, column: str | None) -> Key:
    """Return the accumulator that a function requires."""
    return FUNCTIONS[function].accumulator, column


@dataclass(frozen=True)
class AggregateSpec:
    """Aggregates to compute: function, column and parameter of each.

    The functions are those of ``FUNCTIONS``. A quantile has its rank as parameter, the others have
    None. ``count`` without a column counts points. A column is an attribute, or ``x``, ``y``,
    ``time`` or ``id`` if no attribute has that name. Invalid or repeated functions raise
    :class:`ConfigError`.

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
        names = []
        for name, column, parameter in self.functions:
            rank = "" if parameter is None else f", {parameter}"
            names.append(name if column is None else f"{name}({quote_name(column)}{rank})")
        return tuple(names)

    def result_schema(self, attributes: pa.Schema, id_type: pa.DataType) -> pa.Schema:
        """Return the names and types of the results.

        Raises :class:`ConfigError` if a column does not exist or its type does not fit the
        function.
        """
        own = {"x": pa.float64(), "y": pa.float64(), "time": pa.int64(), "id": id_type}
        types = own | dict(zip(attributes.names, attributes.types, strict=True))
        fields = []
        for label, (name, column, _) in zip(self.names, self.functions, strict=True):
            if column is not None and column not in types:
                raise ConfigError(KEY, label, f"columns {', '.join(types)}")
            fields.append((label, _result_type(label, name, types.get(column or ""))))
        return pa.schema(fields)


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
    parts: dict[Key, Grouped]


def partial(segment: WindowSegment, rows: Rows, spec: AggregateSpec) -> State:
    """Aggregate some rows of a segment."""
    present: dict[str, tuple[pa.Array, Groups]] = {}
    parts: dict[Key, Grouped] = {}
    for name, column, _ in spec.functions:
        key = key_of(name, column)
        if key in parts:
            continue
        if column is None:
            parts[key] = Counts(np.array([rows.size]))
            continue
        if column not in present:
            values = read_column(segment, column, rows)
            values = values.drop_null() if values.null_count else values
            present[column] = values, Groups.one(len(values))
        parts[key] = ACCUMULATORS[key[0]].of(*present[column])
    return State(spec, parts)


def read_column(segment: WindowSegment, name: str, rows: Rows | None = None) -> pa.Array:
    """Return an attribute or, if there is none of that name, one of the points' own columns.

    With ``rows``, each at most once, only their values.
    """
    if name in segment.attributes:
        column = segment.attributes[name]
    elif name == "id":
        column = segment.ids
    elif name in OWN_COLUMNS:
        column = as_arrow(np.asarray(getattr(segment, name)))
    else:
        raise ConfigError(KEY, name, f"columns {', '.join([*segment.attributes, *OWN_COLUMNS])}")
    if rows is not None and rows.size < len(column):
        column = column.take(as_arrow(rows))
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column


def merge(states: Iterable[State]) -> State:
    """Merge one or more states of the same aggregates, in any order."""
    waiting = list(states)
    if len({state.spec for state in waiting}) != 1:
        raise ValueError("merge needs at least one state, and all of the same aggregates")
    full = [state for state in waiting if state.parts]
    if len(full) < 2:
        return full[0] if full else waiting[0]
    first = np.zeros(1, np.int64)
    parts = {
        key: type(part).merged([Contribution(s.parts[key], first, first) for s in full], 1)
        for key, part in full[0].parts.items()
    }
    return State(full[0].spec, parts)


def finish(state: State) -> dict[str, Any]:
    """Return the results by name (see :attr:`AggregateSpec.names`).

    Sums of integers are exact Python integers. Without values, sum, mean, extremes and quantiles
    are None, as is the deviation of fewer than two values.
    """
    results = {}
    for label, (name, column, rank) in zip(state.spec.names, state.spec.functions, strict=True):
        part = state.parts.get(key_of(name, column))
        results[label] = FUNCTIONS[name].empty if part is None else part.single(name, rank)
    return results
