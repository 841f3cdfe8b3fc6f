"""What can go wrong, as one small tree.

A record that is bad never raises: it becomes a dead letter with a reason. Exceptions are for the
person who runs Roost and can change something::

    RoostError
    ├── ConfigError      a setting: names the key, what it got, what it takes
    ├── PredicateError   a predicate that does not parse or does not fit the points' attributes
    ├── RequestError     a single request that was refused, with its reason code
    ├── SourceError      points or requests that cannot be read at all
    └── StateError       a state directory that is not what it should be
"""

from __future__ import annotations


class RoostError(Exception):
    """Base of every exception that Roost raises on purpose."""


class ConfigError(RoostError):
    """A setting that cannot be used.

    Parameters
    ----------
    key
        The setting's full name, such as ``space.bounds``.
    got
        The value that was found.
    takes
        What the setting accepts, in words.
    """

    def __init__(self, key: str, got: object, takes: str) -> None:
        super().__init__(f"{key}: got {got!r}, takes {takes}")
        self.key = key
        self.got = got
        self.takes = takes


class PredicateError(RoostError):
    """A predicate that does not parse, or that does not fit the attributes of the points."""


class RequestError(RoostError):
    """A single request that was refused.

    Parameters
    ----------
    reason
        Short code, the same that a dead letter carries.
    detail
        A sentence for the person who sent the request.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class SourceError(RoostError):
    """Points or requests that cannot be read at all."""


class StateError(RoostError):
    """A state directory that is missing, damaged, or made by another configuration."""
