"""Values of the command line's flags."""

from __future__ import annotations

import argparse
import math

import pyarrow as pa

from roost.errors import ConfigError
from roost.model.columns import parse_time
from roost.model.records import Box, Circle, Instant, Polygon, Query, Request, Terminate
from roost.queries.admission import Rules
from roost.window import parse_aggregates
from roost.window.snapshot import SnapshotQuery


def read_numbers(text: str, count: int, key: str, takes: str) -> list[float]:
    """Parse numbers separated by commas; the key names the flag in the error."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ConfigError(key, text, takes)
    return numbers


def read_shape(arguments: argparse.Namespace) -> Box | Circle | Polygon | None:
    """Return the shape of ``--box``, ``--circle`` or ``--polygon``; None without any of them."""
    if arguments.box is not None:
        return Box(*read_numbers(arguments.box, 4, "--box", "x0,y0,x1,y1"))
    if arguments.circle is not None:
        return Circle(*read_numbers(arguments.circle, 3, "--circle", "cx,cy,radius"))
    return None if arguments.polygon is None else Polygon(arguments.polygon)


def read_instant(text: str | None, rules: Rules, key: str) -> Instant | None:
    """Parse an event time of the type that the stream has."""
    if text is None:
        return None
    try:
        return int(text) if rules.time_type == pa.int64() else parse_time(text)
    except ValueError:
        takes = "a whole number" if rules.time_type == pa.int64() else "an ISO time"
        raise ConfigError(key, text, takes) from None


def request_of(arguments: argparse.Namespace, rules: Rules) -> Request:
    """Return the request of ``roost query register`` or ``terminate``."""
    query_id: str | int = arguments.query_id
    if rules.id_type == pa.int64():
        try:
            query_id = int(query_id)
        except ValueError:
            raise ConfigError("QUERY_ID", query_id, "a whole number in this state") from None
    at = read_instant(arguments.at, rules, "--at")
    if arguments.action == "terminate":
        return Terminate(query_id, arguments.user, at)
    shape = read_shape(arguments)
    assert shape is not None, "the parser requires one"
    return Query(
        query_id,
        shape,
        arguments.user,
        arguments.where,
        at,
        read_instant(arguments.expires_at, rules, "--expires-at"),
        arguments.aggregate,
        arguments.nearest,
    )


def snapshot_query_of(arguments: argparse.Namespace, rules: Rules) -> SnapshotQuery:
    """Return the query of ``roost snapshot``."""
    shape = read_shape(arguments)
    if arguments.at is not None:
        x, y = read_numbers(arguments.at, 2, "--at", "x,y")
        shape = Circle(x, y, math.inf)
    if arguments.at is not None and arguments.nearest is None:
        raise ConfigError("--at", arguments.at, "--nearest K, too")
    return SnapshotQuery(
        shape,
        arguments.where,
        read_instant(arguments.since, rules, "--since"),
        read_instant(arguments.until, rules, "--until"),
        None if arguments.aggregate is None else parse_aggregates(arguments.aggregate),
        arguments.nearest,
        arguments.user,
    )
