"""Exceptions of Roost.

A bad record never raises: it becomes a dead letter with a reason. Exceptions are for the user who
runs Roost and can change something::

    RoostError
    ├── ConfigError      a setting: names the key, the value received, the values accepted
    ├── DataflowError    a dataflow that cannot run: names the operator and the column
    ├── PredicateError   a predicate that does not parse or does not fit the points' attributes
    ├── RequestError     a single request that was refused, with its reason code
    ├── SourceError      points or requests that cannot be read at all
    └── StateError       a state directory that is missing, damaged or of another configuration
"""

from __future__ import annotations

import enum


class RoostError(Exception):
    """Base of every exception that Roost raises on purpose."""


class ConfigError(RoostError):
    """A setting that cannot be used; ``expected`` describes the accepted values."""

    def __init__(self, key: str, got: object, expected: str) -> None:
        shown = got.value if isinstance(got, enum.Enum) else got
        super().__init__(f"{key}: got {shown!r}, expected {expected}")
        self.key = key
        self.got = got
        self.expected = expected


class DataflowError(RoostError):
    """A dataflow that cannot be compiled or continued."""

    def __init__(self, operator: str, problem: str, column: str | None = None) -> None:
        place = f"operator {operator!r}" + ("" if column is None else f", column {column!r}")
        super().__init__(f"{place}: {problem}")
        self.operator = operator
        self.column = column


class PredicateError(RoostError):
    """A predicate that does not parse, or that does not fit the attributes of the points."""


class RequestError(RoostError):
    """A single request that was refused; ``reason`` is the code of a dead letter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class SourceError(RoostError):
    """Points or requests that cannot be read at all."""


class StateError(RoostError):
    """A state directory that is missing, damaged, or made by another configuration."""
