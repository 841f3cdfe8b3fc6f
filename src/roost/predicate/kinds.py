"""Kinds of values of Arrow columns, and whether a predicate is valid for a schema.

Numbers are compared with numbers, strings with strings, booleans with booleans, and times (dates
and timestamps) with ISO 8601 strings. ``is null`` accepts any column. A time without an offset, in
a predicate or in a column, is UTC. A dictionary-encoded column has the kind of its values.

Arithmetic accepts integers and floats, and the difference of two times. Two attributes are
compared if they have the same kind. Decimals are refused in arithmetic and in comparisons with
floats, where float64 would not be exact.
"""

from __future__ import annotations

import datetime as dt
import re

import pyarrow as pa

from roost.errors import PredicateError
from roost.predicate.ast import (
    Comparison,
    Condition,
    Expression,
    Kind,
    Literal,
    Term,
    quote_name,
)

_ISO = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]((?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9])?)"
    r"(?:(?<=:[0-9]{2}:[0-9]{2})[.,]([0-9]{1,9}))?"
    r"(?:[Zz]|([-+](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?))?)?"
)
_QUALIFIED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
#: Types of terms that can be compared with each other.
_COMPARABLE = [{"integer", "float"}, {"integer", "decimal"}, {"string"}, {"boolean"}, {"time"}]

_ACCEPTED = (
    "numbers, strings or times on both sides, booleans with = or !=, "
    "or decimals with attributes that have decimals or integers"
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
        if isinstance(condition, Comparison):
            continue
        if kind_of(_find_type(condition.attribute, schema)) is Kind.TIME:
            for value in condition.values:
                read_time_ns(str(value))


def check_kinds(expression: Expression, schema: pa.Schema) -> None:
    """Validate the part of a predicate that does not depend on its constants' values."""
    for condition in expression.conditions():
        if isinstance(condition, Comparison):
            _check_comparison(condition, schema)
        else:
            _check_condition(condition, _find_type(condition.attribute, schema))


def _find_type(attribute: str, schema: pa.Schema) -> pa.DataType:
    found = schema.get_all_field_indices(attribute)
    if len(found) == 1:
        return schema.field(found[0]).type
    name = _show(attribute)
    if found:
        raise PredicateError(f"attribute {name} is ambiguous: {len(found)} columns have this name")
    known = ", ".join(map(_show, schema.names)) or "none"
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
    raise _misfit(condition.attribute, type_, problem)


def _misfit(attribute: str, type_: pa.DataType, problem: str) -> PredicateError:
    kind = kind_of(type_).value
    return PredicateError(f"attribute {_show(attribute)} has type {type_} ({kind}): {problem}")


def _show(attribute: str) -> str:
    return attribute if _QUALIFIED.fullmatch(attribute) else quote_name(attribute)


def _check_comparison(comparison: Comparison, schema: pa.Schema) -> None:
    terms = comparison.operands
    types = {_type_of(term, schema) for term in terms}
    comparable = any(types <= group for group in _COMPARABLE)
    if "boolean" in types:
        comparable = comparable and comparison.operator in ("=", "!=")
    if "decimal" in types:
        comparable = comparable and all(isinstance(term, str) for term in terms)
    if not comparable:
        names = sorted(comparison.attributes())
        shown = ", ".join([f"{_show(name)} ({_find_type(name, schema)})" for name in names])
        raise PredicateError(f"cannot compare these types: {shown}; expected {_ACCEPTED}")


def _type_of(term: Term, schema: pa.Schema) -> str:
    """Return the type of a term: a kind, with numbers divided into integer, float and decimal.

    Raises `PredicateError` for arithmetic on anything but integers, floats and two times.
    """
    if isinstance(term, Literal):
        return "integer" if term.integer else "float"
    if isinstance(term, str):
        return _type_of_column(_find_type(term, schema))
    types = [_type_of(operand, schema) for operand in term.operands]
    if term.operator[0] == "-" and types[:2] == ["time", "time"]:
        types[:2] = ["float", "float"]
    for operand, type_ in zip(term.operands, types, strict=True):
        if type_ not in ("integer", "float"):
            problem = "arithmetic accepts integers and floats, and the difference of two times"
            raise _misfit(operand, _find_type(operand, schema), problem)
    return "float" if "float" in types or "/" in term.operator else "integer"


def _type_of_column(type_: pa.DataType) -> str:
    if pa.types.is_dictionary(type_):
        return _type_of_column(type_.value_type)
    if pa.types.is_integer(type_):
        return "integer"
    if pa.types.is_decimal(type_):
        return "decimal"
    return "float" if pa.types.is_floating(type_) else kind_of(type_).value
