"""Standing synopsis queries: evaluated after batches, and reported when they are due.

A query is due after each batch, once in each period of event time, or when its value has left the
bounds that were reported last. What was reported last is a value that the run records with the
batch, so a replay reports the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pyarrow as pa

from roost.errors import ConfigError, PredicateError, RequestError
from roost.model.schemas import TIMESTAMP
from roost.synopsis.bands import Sketch
from roost.synopsis.bins import learn_bins
from roost.synopsis.bounds import SynopsisResult
from roost.synopsis.queries import read_query, run_query, scopes_of
from roost.synopsis.queries import result_table as query_table
from roost.synopsis.scope import Scope
from roost.synopsis.spec import SECOND_US, SynopsisSpec
from roost.synopsis.synopsis import build

KEY = "synopsis.queries"
BATCH, CHANGE = "batch", "change"
Memory = Mapping[str, Any]  # of a query, as JSON: what it was, and what it reported last
Item = tuple[str | None, SynopsisResult]

RESULTS = pa.schema(
    {
        "batch_id": pa.int64(),
        "name": pa.string(),
        "item": pa.string(),
        "event_time": TIMESTAMP,
        **dict.fromkeys(("value", "low", "high"), pa.float64()),
        "kind": pa.string(),
        "confidence": pa.float64(),
        "records": pa.int64(),
    }
)


@dataclass(frozen=True)
class StandingQuery:
    """A query in JSON, and when it reports.

    ``emit`` is ``batch``, ``change``, or a period in seconds of event time. ``last`` restricts the
    scope to so many seconds before the time that the stream has reached, and ``ahead`` sets the
    time of a forecast.
    """

    name: str
    query: str
    arguments: Mapping[str, Any]
    emit: str | float = BATCH
    last: float | None = None
    ahead: float | None = None
    text: str = ""  # what the settings say

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> StandingQuery:
        """Read the settings of a query; raises `ConfigError` for a wrong one."""
        rest = dict(data)
        own = {key: rest.pop(key) for key in ("name", "emit", "last", "ahead") if key in rest}
        emit = own.get("emit", BATCH)
        if emit not in (BATCH, CHANGE) and not _is_period(emit):
            raise ConfigError("emit", emit, f"{BATCH}, {CHANGE}, or seconds above 0")
        for key in ("last", "ahead"):
            if key in own and not _is_period(own[key]):
                raise ConfigError(key, own[key], "seconds above 0")
        query, arguments = read_query(rest)
        for key, other in (("last", "since"), ("ahead", "at")):
            scope = arguments.get("scope", Scope())
            if key in own and (arguments.get(other) or getattr(scope, other, None)) is not None:
                raise ConfigError(key, own[key], f"either {key} or {other}")
        text = json.dumps(dict(data), sort_keys=True, default=str)
        return cls(query=query, arguments=arguments, text=text, **own)

    def at(self, now: int) -> dict[str, Any]:
        """Return the arguments at an event time."""
        arguments = dict(self.arguments)
        if self.last is not None:
            since = now - round(self.last * SECOND_US)
            arguments["scope"] = replace(arguments.get("scope", Scope()), since=since)
        if self.ahead is not None:
            arguments["at"] = now + round(self.ahead * SECOND_US)
        return arguments

    def scopes(self, now: int) -> list[Scope]:
        """Return the scopes at an event time: rows outside all of them are not needed."""
        return scopes_of(self.at(now))

    def period(self, now: int) -> int | None:
        """Return the number of the period that an event time is in; None without periods."""
        return None if isinstance(self.emit, str) else int(now // (self.emit * SECOND_US))

    def remembered(self, memory: Memory) -> Memory:
        """Return what the same query reported last; empty if it is another one now."""
        return memory if memory.get("text") == self.text else {}

    def may_be_due(self, now: int, memory: Memory) -> bool:
        """Return whether the query must be evaluated."""
        known = self.remembered(memory)
        return not known or isinstance(self.emit, str) or self.period(now) != known["period"]

    def evaluate(self, sketch: Sketch, now: int, memory: Memory) -> tuple[list[Item], Memory]:
        """Return the items to report, if any, and what was reported last."""
        items = list(items_of(run_query(sketch, self.query, self.at(now))))
        known = self.remembered(memory)
        if known and self.emit == CHANGE and not _has_left(items, known["reported"]):
            return [], known
        reported = [[name, result.value, result.low, result.high] for name, result in items]
        return items, {"text": self.text, "period": self.period(now), "reported": reported}


def _is_period(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0.0 < value < float("inf")


def _has_left(items: Sequence[Item], reported: Sequence[Sequence[Any]]) -> bool:
    """Return whether a value is outside the bounds that were reported last."""
    if [name for name, _ in items] != [name for name, *_ in reported]:
        return True
    for (_, result), (_, value, low, high) in zip(items, reported, strict=True):
        if (result.value is None) != (value is None):
            return True
        if result.value is not None and not low <= result.value <= high:
            return True
    return False


def items_of(result: Any, name: str | None = None) -> Iterator[Item]:
    """Yield each value with bounds of a result, with its position in it."""
    if isinstance(result, SynopsisResult):
        yield name, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from items_of(value, _position(name, key))
    elif isinstance(result, list | tuple):
        for number, value in enumerate(result):
            yield from items_of(value, _position(name, number))
    elif is_dataclass(result):
        for field in fields(result):
            yield from items_of(getattr(result, field.name), _position(name, field.name))


def _position(name: str | None, key: Any) -> str:
    return str(key) if name is None else f"{name}.{key}"


def standing_queries(
    settings: Sequence[Mapping[str, Any]], spec: SynopsisSpec, rows: pa.Table
) -> list[StandingQuery]:
    """Read the standing queries of a run and try them on a table without rows.

    Raises `ConfigError`, which names the query, if one makes no sense.
    """
    queries = []
    empty = build(rows, spec, learn_bins(rows, spec)) if settings else None
    for data in settings:
        key = f"{KEY}: {data['name']}"
        try:
            query = StandingQuery.of(data)
            assert empty is not None
            found = run_query(empty, query.query, query.at(0))
            if query_table(found) is not None:
                raise ConfigError("query", query.query, "a query whose results are values")
        except ConfigError as error:
            raise ConfigError(f"{key}: {error.key}", error.got, error.expected) from None
        except (PredicateError, RequestError, TypeError, ValueError) as error:
            raise ConfigError(key, dict(data), f"a query that can run ({error})") from None
        queries.append(query)
    return queries


def result_table(
    batch_id: int, now: int, found: Sequence[tuple[StandingQuery, Sequence[Item]]]
) -> pa.Table:
    """Return the results of a batch, at an event time, as a table."""
    rows = [
        {
            "batch_id": batch_id,
            "name": query.name,
            "item": item,
            "event_time": now,
            **{field: getattr(result, field) for field in ("value", "low", "high")},
            "kind": result.kind.value,
            "confidence": result.confidence,
            "records": result.records,
        }
        for query, items in found
        for item, result in items
    ]
    return pa.Table.from_pylist(rows, schema=RESULTS)
