"""Aggregate functions of a dataflow: what a text or a user's object computes, and its type.

Besides the functions of snapshot queries (``count``, ``sum``, ``avg``, ``min``, ``max``,
``stddev``, ``distinct``, ``quantile``) there are ``first(column)`` and ``last(column)``, and
``top(n, column)``, the rows with the greatest values. A function of the user is an object with the
names of the ``columns`` that it reads, the Arrow ``type`` of its result, and either

- ``partial(*arrays)``, ``merge(states)`` and ``finish(state)``, where states can be pickled and
  merged in any order and grouping; or
- ``whole(*arrays)``, which receives all rows of a window in tuple order.

Functions skip nulls, except those of the user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from roost.errors import ConfigError, DataflowError
from roost.window.aggregate import AggregateSpec
from roost.window.output import parse_aggregates

_NAME = r"(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[^\W\d]\w*))"
_ORDERED = re.compile(
    rf"\s*(?:(?P<end>first|last)\s*\(|top\s*\(\s*(?P<rows>\d+)\s*,)\s*{_NAME}\s*\)\s*",
    re.IGNORECASE,
)
ORDERED = frozenset(["first", "last", "top", "whole"])
"""Functions whose result depends on the order of tuples."""


@dataclass(frozen=True)
class Function:
    """One result column of an Aggregate."""

    name: str  # of the result column
    kind: str  # of the function; "partial" and "whole" are those of the user
    columns: tuple[str, ...]
    type: pa.DataType
    parameter: float | None = None  # rank of a quantile, number of rows of top
    user: Any = None

    @property
    def ordered(self) -> bool:
        """Whether the result depends on the order of tuples."""
        return self.kind in ORDERED

    @property
    def mergeable(self) -> bool:
        """Whether partial results of some tuples replace these tuples.

        Results do not depend on how tuples are divided into partial results (``stddev``: up to
        rounding; ``quantile``: within its error).
        """
        return self.kind != "whole"


def resolve_function(operator: str, name: str, given: Any, schema: pa.Schema) -> Function:
    """Validate a function against the columns that it reads."""
    if not isinstance(given, str):
        return _user_function(operator, name, given, schema)
    ordered = _ORDERED.fullmatch(given)
    if ordered is not None:
        quoted, plain, rows = ordered["quoted"], ordered["plain"], ordered["rows"]
        column = plain if quoted is None else quoted.replace("``", "`")
        kind = (ordered["end"] or "top").lower()
        _check_column(operator, column, schema)
        if kind != "top":
            return Function(name, kind, (column,), schema.field(column).type)
        if not int(rows):
            raise DataflowError(operator, "top of zero rows; expected a number from 1 up", name)
        _check_type(operator, "max", column, schema)
        row = pa.list_(pa.struct(list(schema)))
        return Function(name, kind, (column, *schema.names), row, int(rows))
    try:
        functions = parse_aggregates(given).functions
    except ConfigError as error:
        problem = f"{given!r} is not a function: got {error.got}, expected {error.expected}"
        more = "first(column), last(column) and top(n, column) are functions, too"
        raise DataflowError(operator, f"{problem}; {more}", name) from None
    if len(functions) != 1:
        raise DataflowError(operator, f"expected one function, got {given!r}", name)
    ((kind, over, parameter),) = functions
    if over is None:
        return Function(name, kind, (), pa.int64())
    _check_column(operator, over, schema)
    type_ = _check_type(operator, kind, over, schema, parameter)
    return Function(name, kind, (over,), type_, parameter)


def _check_column(operator: str, column: str, schema: pa.Schema) -> None:
    if column not in schema.names:
        known = ", ".join(schema.names)
        raise DataflowError(operator, f"unknown column (known: {known})", column)


def _check_type(
    operator: str, kind: str, column: str, schema: pa.Schema, parameter: float | None = None
) -> pa.DataType:
    """Return the type of a function's result."""
    only = pa.schema([schema.field(column)])
    try:
        spec = AggregateSpec(((kind, column, parameter),))
        return spec.result_schema(only, pa.int64()).field(0).type
    except ConfigError as error:
        raise DataflowError(operator, f"{error.got} requires {error.expected}", column) from None


def _user_function(operator: str, name: str, given: Any, schema: pa.Schema) -> Function:
    kind = "whole" if callable(getattr(given, "whole", None)) else "partial"
    methods = ("whole",) if kind == "whole" else ("partial", "merge", "finish")
    missing = [method for method in methods if not callable(getattr(given, method, None))]
    missing += [field for field in ("columns", "type") if not hasattr(given, field)]
    if missing:
        problem = (
            "expected a text, or an object with columns, type and either whole or partial, merge "
            f"and finish; {type(given).__name__} has no {', '.join(missing)}"
        )
        raise DataflowError(operator, problem, name)
    if not isinstance(given.type, pa.DataType):
        problem = f"the type of a function is a pyarrow type such as pa.int64(), not {given.type!r}"
        raise DataflowError(operator, problem, name)
    if not isinstance(given.columns, str | Sequence):
        problem = f"the columns of a function are names, not {given.columns!r}"
        raise DataflowError(operator, problem, name)
    columns = (given.columns,) if isinstance(given.columns, str) else tuple(given.columns)
    for column in columns:
        _check_column(operator, column, schema)
    return Function(name, kind, columns, given.type, user=given)
