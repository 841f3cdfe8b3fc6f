"""Does a predicate fit the points? What kind of value an Arrow column has, and what it takes.

Numbers are compared with numbers, text with text, booleans with booleans, and times (dates and
timestamps) with ISO 8601 text. ``is null`` takes any column. A time without an offset, in a
predicate or in a column, is UTC. Dictionary-encoded columns count as what they encode.
"""

from __future__ import annotations

import datetime as dt
import functools
import re

import pyarrow as pa

from roost.errors import PredicateError
from roost.predicate.ast import (
    Between,
    Comparison,
    Condition,
    Expression,
    Has,
    In,
    IsNull,
    Kind,
    Literal,
    Truth,
    quote_name,
)

_NS_PER_S = 1_000_000_000
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_CLOCK = r"([01][0-9]|2[0-3]):([0-5][0-9])"
_ISO = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    rf"(?:[Tt ]{_CLOCK}(?::([0-5][0-9])(?:[.,]([0-9]{{1,9}}))?)?"
    rf"(?:[Zz]|([-+]){_CLOCK}|([-+])([01][0-9]|2[0-3])([0-5][0-9])?)?)?"
)


def kind_of(type_: pa.DataType) -> Kind:
    """Return the kind of an Arrow type."""
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return Kind.NUMBER
    if is_text(type_):
        return Kind.TEXT
    if pa.types.is_boolean(type_):
        return Kind.BOOLEAN
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return Kind.TIME
    return Kind.OTHER


def is_text(type_: pa.DataType) -> bool:
    """Tell whether an Arrow type holds text, not counting dictionaries."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(type_) for test in tests)


def read_time_ns(text: str) -> int:
    """Return the nanoseconds since 1970 UTC of an ISO 8601 date or date and time.

    Raises
    ------
    PredicateError
        Where the text is not one, or names a moment that no calendar has.
    """
    match = _ISO.fullmatch(text)
    days = None if match is None else _days_since_epoch(match[1])
    if match is None or days is None:
        example = "'2014-04-01' or '2014-04-01T09:30:00Z'"
        raise PredicateError(f"expected an ISO time such as {example}, got {text[:40]!r}")
    seconds = days * 86_400
    if match[2]:
        seconds += int(match[2]) * 3_600 + int(match[3]) * 60 + int(match[4] or 0)
    sign = match[6] or match[9]
    if sign:
        offset_s = int(match[7] or match[10]) * 3_600 + int(match[8] or match[11] or 0) * 60
        seconds += offset_s if sign == "-" else -offset_s
    return seconds * _NS_PER_S + (int(match[5].ljust(9, "0")) if match[5] else 0)


@functools.lru_cache(maxsize=4096)
def _days_since_epoch(day: str) -> int | None:
    """Return the number of a day; none where the calendar does not have it."""
    try:
        return dt.date.fromisoformat(day).toordinal() - _EPOCH_DAY
    except ValueError:
        return None


def check(expression: Expression, schema: pa.Schema) -> None:
    """Refuse a predicate that does not fit the points' attributes.

    Parameters
    ----------
    expression
        What `roost.predicate.parse` returned.
    schema
        The attributes and their types.

    Raises
    ------
    PredicateError
        Names the attribute that is unknown (and those that are known), or whose type does not go
        with what the predicate does to it.
    """
    check_kinds(expression, schema)
    _check_times(expression, schema)


def check_kinds(expression: Expression, schema: pa.Schema) -> None:
    """Do the part of `check` that does not depend on the constants' values."""
    if isinstance(expression, Condition):
        _check_test(expression, _find_type(expression.attribute, schema))
    for child in expression.children():
        check_kinds(child, schema)


def literals_of(test: Condition) -> tuple[Literal, ...]:
    """Return the literals that a test compares its attribute with."""
    if isinstance(test, Comparison):
        return (test.literal,)
    if isinstance(test, Between):
        return (test.low, test.high)
    return test.members if isinstance(test, In) else ()


def _find_type(attribute: str, schema: pa.Schema) -> pa.DataType:
    found = schema.get_all_field_indices(attribute)
    if len(found) == 1:
        return schema.field(found[0]).type
    if found:
        raise PredicateError(f"attribute {quote_name(attribute)} is there {len(found)} times")
    known = ", ".join(map(quote_name, schema.names)) or "none"
    raise PredicateError(f"unknown attribute {quote_name(attribute)} (known: {known})")


def _check_test(test: Condition, type_: pa.DataType) -> None:
    kind = kind_of(type_)
    name = f"attribute {quote_name(test.attribute)} is of kind {kind.value} ({type_})"
    if isinstance(test, IsNull):
        return
    if isinstance(test, Truth) and kind is not Kind.BOOLEAN:
        raise PredicateError(f"{name}: expected a comparison, only a boolean stands alone")
    if isinstance(test, Has) and kind is not Kind.TEXT:
        raise PredicateError(f"{name}: 'has' takes text")
    takes = Kind.TEXT if kind is Kind.TIME else kind
    for literal in literals_of(test)[:1]:
        if literal.kind is not takes:
            hint = " in ISO form" if kind is Kind.TIME else ""
            wanted = "only 'is null'" if kind is Kind.OTHER else f"a {takes.value}{hint}"
            raise PredicateError(f"{name}: expected {wanted}, got a {literal.kind.value}")


def _check_times(expression: Expression, schema: pa.Schema) -> None:
    for child in expression.children():
        _check_times(child, schema)
    if not isinstance(expression, Condition):
        return
    if kind_of(_find_type(expression.attribute, schema)) is Kind.TIME:
        for literal in literals_of(expression):
            read_time_ns(str(literal.value))
