"""Synopsis queries by name, with arguments that JSON can express."""

from __future__ import annotations

import datetime as dt
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from numbers import Integral, Real
from typing import Any

import pyarrow as pa

from roost.errors import ConfigError
from roost.model.columns import parse_time
from roost.model.records import Box, Circle, Instant, Polygon
from roost.synopsis.bands import Bands, Sketch
from roost.synopsis.bounds import SynopsisResult
from roost.synopsis.density import density, probability, quantiles
from roost.synopsis.forecast import forecast
from roost.synopsis.part import record_batches, record_schema, select
from roost.synopsis.pictures import climate_chart, feature_map
from roost.synopsis.regression import regress
from roost.synopsis.scope import Scope
from roost.synopsis.set_queries import cardinality, contains, frequency
from roost.synopsis.statistics import contrast, correlation, count, mean, outliers, stddev
from roost.synopsis.synopsis import Synopsis
from roost.synopsis.synthesis import synthesize

QUERIES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(count, mean, stddev, correlation, contrast, outliers),
        *(density, probability, quantiles, regress, forecast),
        *(contains, cardinality, frequency, select, synthesize),
    )
}
QUERIES |= {"chart": climate_chart, "map": feature_map}
#: What `contrast` accepts: queries that return one value with bounds.
STATISTICS = {
    name: function
    for name, function in QUERIES.items()
    if function is not contrast
    and inspect.signature(function).return_annotation == SynopsisResult.__name__
}
SCOPES = ("scope", "other")  # arguments that are scopes
TIME = "an ISO time, or microseconds since 1970"
NAMES, NUMBERS = "Sequence[str]", "Sequence[float]"
#: What arguments must be, by their annotations.
TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a text"),
    "int": (lambda value: isinstance(value, Integral), "a whole number"),
    "float": (lambda value: isinstance(value, Real), "a number"),
    "Instant": (lambda value: isinstance(value, dt.datetime | Integral), TIME),
    "Scope": (lambda value: isinstance(value, Scope), "a Scope"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "values by column"),
    NAMES: (lambda value: _all(value, str), "a list of names"),
    f"{NAMES} | str": (lambda value: isinstance(value, str) or _all(value, str), "names"),
    NUMBERS: (lambda value: _all(value, Real), "a list of numbers"),
    "Statistic": (callable, "a statistic"),
}
SHAPES: dict[str, tuple[type[Box | Circle], int]] = {"box": (Box, 4), "circle": (Circle, 3)}


def run_query(synopsis: Sketch, query: str, arguments: Mapping[str, Any]) -> Any:
    """Run a query that is known by name; raises `ConfigError` for a wrong name or argument.

    ``contrast`` takes the ``statistic`` by name, and the arguments of the statistic.
    """
    return check_query(query, arguments)(synopsis)


def check_query(query: str, arguments: Mapping[str, Any]) -> Callable[[Sketch], Any]:
    """Return what runs a query; raises `ConfigError` for a wrong name or argument."""
    function, given = _find("query", query, QUERIES), dict(arguments)
    if function is contrast:
        statistic = _find("statistic", str(given.pop("statistic", "")), STATISTICS)
        names = set(_parameters(statistic)[0]) - {"scope"}
        own = {name: given.pop(name) for name in names & set(given)}
        _check_arguments(statistic.__name__, statistic, own)
        given["statistic"] = partial(statistic, **own)
    _check_arguments(query, function, given)
    return partial(function, **given)


def scopes_of(arguments: Mapping[str, Any]) -> list[Scope]:
    """Return the scopes of a query: rows outside all of them are not needed."""
    return [arguments[name] for name in SCOPES if name in arguments] or [Scope()]


def _find(key: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        expected = f"{near[0]!r}" if near else f"one of {', '.join(known)}"
        raise ConfigError(key, name, expected)
    return known[name]


def _all(value: Any, kind: type) -> bool:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return False
    return all(isinstance(item, kind) for item in value)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return all arguments but the synopsis with their annotations, and which are required."""
    own = list(inspect.signature(function).parameters.values())[1:]
    required = (parameter.name for parameter in own if parameter.default is parameter.empty)
    return {parameter.name: parameter.annotation for parameter in own}, tuple(required)


def _check_arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    known, required = _parameters(function)
    for argument, value in given.items():
        if argument not in known:
            raise ConfigError(f"{name}: {argument}", value, f"one of {', '.join(known)}")
        kind = known[argument].removesuffix(" | None")
        if value is None and kind != known[argument]:
            continue
        accepts, expected = TYPES[kind]
        if value is not None and not accepts(value):
            raise ConfigError(f"{name}: {argument}", value, expected)
    for argument in required:
        if given.get(argument) is None:
            raise ConfigError(f"{name}: {argument}", None, f"a value: {name} requires one")


def read_query(data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a query in JSON.

    ``query`` is the name; ``scope`` and ``other`` are objects, see :func:`read_scope`; the rest are
    the arguments of the function: a time is a text or microseconds since 1970, and a list may be a
    text with commas.

    Examples
    --------
    >>> name, arguments = read_query({"query": "mean", "feature": "t", "scope": {"hours": [2, 4]}})
    >>> name, arguments["scope"].hours
    ('mean', (2, 4))
    """
    arguments = dict(data)
    name = arguments.pop("query", None)
    if not isinstance(name, str):
        raise ConfigError("query", name, f"one of {', '.join(QUERIES)}")
    for key in SCOPES:
        if key in arguments:
            arguments[key] = read_scope(arguments[key], key)
    kinds = _parameters(QUERIES[name])[0] if name in QUERIES else {}
    statistic = arguments.get("statistic")
    if isinstance(statistic, str) and statistic in STATISTICS:
        kinds = kinds | _parameters(STATISTICS[statistic])[0]
    for key in arguments.keys() & kinds.keys():
        kind, value = kinds[key], arguments[key]
        if kind == "Instant":
            arguments[key] = _instant(value, key)
        elif kind == NAMES and isinstance(value, str):
            arguments[key] = [part.strip() for part in value.split(",")]
        elif kind == NUMBERS and isinstance(value, str | int | float):
            with suppress(ValueError):  # the query refuses it
                arguments[key] = [float(part) for part in str(value).split(",")]
    return name, arguments


def read_scope(data: Any, key: str = "scope") -> Scope:
    """Return the scope of a JSON object.

    Keys: one of ``box`` (x0, y0, x1, y1), ``circle`` (cx, cy, radius) and ``polygon`` (WKT or
    GeoJSON text); ``since`` and ``until`` (ISO times, or microseconds since 1970); ``hours`` (from,
    to); ``predicate``.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(key, data, 'an object, such as {"hours": [14, 16]}')
    rest = dict(data)
    shapes = [name for name in (*SHAPES, "polygon") if rest.get(name) is not None]
    if len(shapes) > 1:
        raise ConfigError(key, shapes, "one shape")
    shape = _shape(shapes[0], rest[shapes[0]], key) if shapes else None
    times = {name: _instant(rest.get(name), f"{key}.{name}") for name in ("since", "until")}
    hours = rest.get("hours")
    if hours is not None:
        first, last = _numbers(hours, 2, f"{key}.hours")
        hours = tuple(int(hour) if hour.is_integer() else hour for hour in (first, last))
    known = {*SHAPES, "polygon", "since", "until", "hours", "predicate"}
    for name in rest.keys() - known:
        raise ConfigError(f"{key}.{name}", rest[name], f"one of {', '.join(sorted(known))}")
    predicate = rest.get("predicate")
    if predicate is not None and not isinstance(predicate, str):
        raise ConfigError(f"{key}.predicate", predicate, "a text")
    return Scope(shape, times["since"], times["until"], hours, predicate)


def _shape(name: str, value: Any, key: str) -> Box | Circle | Polygon:
    if name == "polygon":
        return Polygon(str(value))
    kind, size = SHAPES[name]
    return kind(*_numbers(value, size, f"{key}.{name}"))


def _numbers(value: Any, size: int, key: str) -> list[float]:
    try:
        numbers = [float(number) for number in value]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != size:
        raise ConfigError(key, value, f"{size} numbers")
    return numbers


def _instant(value: Any, key: str) -> Instant | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    try:
        return parse_time(str(value))
    except ValueError:
        raise ConfigError(key, value, TIME) from None


def result_table(value: Any) -> pa.Table | None:
    """Return a result that is a table, or the records of one that is a synopsis; else None."""
    if isinstance(value, Synopsis | Bands):
        return pa.Table.from_batches(record_batches(value), record_schema(value.spec))
    return value if isinstance(value, pa.Table) else None


def result_json(value: Any) -> Any:
    """Return a result as JSON data; a table as a list of its rows."""
    table = result_table(value)
    if table is not None:
        return result_json(table.to_pylist())
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: result_json(item) for name, item in items.items() if name[0] != "_"}
    if isinstance(value, Mapping):
        return {str(name): result_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [result_json(item) for item in value]
    return value
