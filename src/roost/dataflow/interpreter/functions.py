"""Aggregate functions for the interpreter, computed exactly from all tuples of a window.

Numbers are added as fractions and rounded once. ``distinct`` and ``quantile`` are exact here; the
engine estimates them within its documented error. NaN is greater than every number and equals
itself. Functions skip nulls, except those of the user, which receive arrays of all tuples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Integral
from typing import Any

import pyarrow as pa

from roost.dataflow.functions import Function
from roost.errors import DataflowError


class FunctionFailed(Exception):
    """A function of the user raised."""


def evaluate(
    operator: str, function: Function, rows: Sequence[Mapping[str, Any]], schema: pa.Schema
) -> Any:
    """Return the result of a function over the rows of a window, in tuple order.

    Raises :class:`FunctionFailed` if a function of the user does.
    """
    if function.user is not None:
        return _user_result(operator, function, rows, schema)
    if not function.columns:
        return len(rows)
    column = function.columns[0]
    present = [row for row in rows if row[column] is not None]
    if function.kind == "top":
        assert function.parameter is not None
        # Sorting is stable: among equal values the earlier tuple comes first.
        greatest = sorted(present, key=lambda row: _rank(row[column]), reverse=True)
        return [dict(row) for row in greatest[: int(function.parameter)]] or None
    return _built_in(function, [row[column] for row in present])


def _built_in(function: Function, values: list[Any]) -> Any:
    """Return the result of a function over the values that are not null."""
    if function.kind == "count":
        return len(values)
    if function.kind == "distinct":
        return len({_rank(value) for value in values})
    if not values or (function.kind == "stddev" and len(values) < 2):
        return None
    match function.kind:
        case "first":
            return values[0]
        case "last":
            return values[-1]
        case "min":
            return min(values, key=_rank)
        case "max":
            return max(values, key=_rank)
        case "sum" if pa.types.is_integer(function.type):
            if not -(1 << 63) <= sum(values) < 1 << 63:
                raise FunctionFailed(function.name)
            return sum(values)
        case "sum":
            return _rounded(values, lambda exact: sum(exact))
        case "avg":
            return _rounded(values, lambda exact: sum(exact) / len(exact))
        case "stddev":
            return _deviation(values)
        case "quantile":
            assert function.parameter is not None
            return _quantile(values, function.parameter)
    raise AssertionError(function.kind)


def _rank(value: Any) -> tuple[bool, Any]:
    """Return what values are ordered and distinguished by: NaN comes last."""
    if isinstance(value, float) and math.isnan(value):
        return True, 0
    return False, value.encode() if isinstance(value, str) else value


def _rounded(values: list[Any], exactly: Any) -> float:
    """Compute with fractions and round once; infinities and NaN follow IEEE 754."""
    floats = [value for value in values if isinstance(value, float) and not math.isfinite(value)]
    if floats:
        return float(sum(floats))
    result = exactly([Fraction(value) for value in values])
    try:
        return float(result)
    except OverflowError:
        return math.inf if result > 0 else -math.inf


def _deviation(values: list[Any]) -> float:
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        return math.nan

    def variance(exact: list[Fraction]) -> Fraction:
        mean = sum(exact) / Fraction(len(exact))
        return sum((value - mean) ** 2 for value in exact) / Fraction(len(exact) - 1)

    return math.sqrt(_rounded(values, variance))


def _quantile(values: list[Any], rank: float) -> float | None:
    """Return the smallest value such that the given share of values is not greater.

    NaN has no rank.
    """
    ordered = sorted(value for value in values if value == value)
    if not ordered:
        return None
    place = max(math.ceil(Fraction(rank) * len(ordered)), 1) - 1
    return float(ordered[place])


# --------------------------------------------------------------------------- functions of the user


def arrays_of(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], schema: pa.Schema
) -> list[pa.Array]:
    """Return columns of rows as arrays of their types."""
    return [pa.array([row[name] for row in rows], schema.field(name).type) for name in columns]


def check_partial(function: Function, row: Mapping[str, Any], schema: pa.Schema) -> None:
    """Raise :class:`FunctionFailed` if a user's function cannot read a row."""
    if function.kind == "partial":
        try:
            function.user.partial(*arrays_of(function.columns, [row], schema))
        except Exception as error:
            raise FunctionFailed(function.name) from error


def _user_result(
    operator: str, function: Function, rows: Sequence[Mapping[str, Any]], schema: pa.Schema
) -> Any:
    arrays = arrays_of(function.columns, rows, schema)
    user = function.user
    try:
        if function.kind == "whole":
            result = user.whole(*arrays)
        else:
            result = user.finish(user.merge([user.partial(*arrays)]))
    except Exception as error:
        raise FunctionFailed(function.name) from error
    try:
        return checked(result, function.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        problem = f"expected a result of type {function.type}, got {type(result).__name__}"
        raise DataflowError(operator, problem, function.name) from None


def checked(value: Any, type_: pa.DataType) -> Any:
    """Return a value of a type as the interpreter holds it; raises if it has another type."""
    if isinstance(value, pa.Scalar) and value.type != type_:
        raise TypeError(f"expected {type_}, got {value.type}")
    if pa.types.is_integer(type_) and not isinstance(value, Integral | pa.Scalar | None):
        raise TypeError(f"expected {type_}, got {value!r}")  # Arrow would drop a fraction
    return plain(pa.scalar(plain(value, type_), type_))


def plain(value: Any, type_: pa.DataType | None = None) -> Any:
    """Return a value as the interpreter holds it: times as whole numbers of their unit."""
    if type_ is not None and not isinstance(value, pa.Scalar):
        if value is None or not pa.types.is_temporal(type_):
            return value
        value = pa.scalar(value, type_)
    if not isinstance(value, pa.Scalar):
        return value
    if pa.types.is_temporal(value.type):
        return value.value if value.is_valid else None
    if pa.types.is_struct(value.type):
        return {name: plain(value[name]) for name in value} if value.is_valid else None
    if pa.types.is_list(value.type):
        return [plain(item) for item in value.values] if value.is_valid else None
    return value.as_py()
