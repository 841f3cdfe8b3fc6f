"""Kinds of values of Arrow columns, and whether a predicate is valid for a schema.

Numbers are compared with numbers, strings with strings, booleans with booleans, and times (dates
and timestamps) with ISO 8601 strings. ``is null`` accepts any column. A time without an offset, in
a predicate or in a column, is UTC. A dictionary-encoded column has the kind of its values.
"""

from __future__ import annotations

import datetime as dt
import re

import pyarrow as pa

from roost.errors import PredicateError
from roost.predicate.ast import Condition, Expression, Kind, quote_name

_ISO = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]((?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9])?)"
    r"(?:(?<=:[0-9]{2}:[0-9]{2})[.,]([0-9]{1,9}))?"
    r"(?:[Zz]|([-+](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?))?)?"
)


def kind_of(type_: pa.DataType) -> Kind:
    """Return the kind of an Arrow type."""
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return Kind.NUMBER
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if any(test(type_) for test in tests):
        return Kind.STRING
    if pa.types.is_boolean(type_):
        return Kind.BOOLEAN
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return Kind.TIME
    return Kind.OTHER


def read_time_ns(text: str) -> int:
    """Return the nanoseconds since 1970 UTC of an ISO 8601 date or date and time.

    Raises `PredicateError` for another form, or a day that the calendar does not have.
    """
    match = _ISO.fullmatch(text)
    try:
        if match is None:
            raise ValueError("another form")
        day, clock, fraction, offset = match.groups("")
        moment = dt.datetime.fromisoformat(f"{day}T{clock or '00'}{offset or '+00'}")
    except ValueError:
        example = "'2014-04-01' or '2014-04-01T09:30:00Z'"
        problem = f"expected an ISO 8601 time such as {example}, got {text[:40]!r}"
        raise PredicateError(problem) from None
    return int(moment.timestamp()) * 10**9 + int(fraction.ljust(9, "0"))


def check(expression: Expression, schema: pa.Schema) -> None:
    """Validate a predicate against the attributes of the points.

    Raises `PredicateError` if an attribute is unknown (the message lists the known ones), its type
    does not support the condition, or a time is not in ISO form.
    """
    check_kinds(expression, schema)
    for condition in expression.conditions():
        if kind_of(_find_type(condition.attribute, schema)) is Kind.TIME:
            for value in condition.values:
                read_time_ns(str(value))


def check_kinds(expression: Expression, schema: pa.Schema) -> None:
    """Validate the part of a predicate that does not depend on its constants' values."""
    for condition in expression.conditions():
        _check_condition(condition, _find_type(condition.attribute, schema))


def _find_type(attribute: str, schema: pa.Schema) -> pa.DataType:
    found = schema.get_all_field_indices(attribute)
    if len(found) == 1:
        return schema.field(found[0]).type
    name = quote_name(attribute)
    if found:
        raise PredicateError(f"attribute {name} is ambiguous: {len(found)} columns have this name")
    known = ", ".join(map(quote_name, schema.names)) or "none"
    raise PredicateError(f"unknown attribute {name} (known: {known})")


def _check_condition(condition: Condition, type_: pa.DataType) -> None:
    kind = kind_of(type_)
    accepts = Kind.STRING if kind is Kind.TIME else kind
    operator = condition.operator
    if operator == "is true" and kind is not Kind.BOOLEAN:
        problem = "expected a comparison; only a boolean can stand alone"
    elif operator.startswith("has") and kind is not Kind.STRING:
        problem = "'has' requires a string attribute"
    elif condition.kind in (None, accepts):
        return
    elif kind is Kind.OTHER:
        problem = f"expected 'is null', got a {condition.kind.value}"
    else:
        hint = " in ISO form" if kind is Kind.TIME else ""
        problem = f"expected a {accepts.value}{hint}, got a {condition.kind.value}"
    name = quote_name(condition.attribute)
    raise PredicateError(f"attribute {name} has type {type_} ({kind.value}): {problem}")
