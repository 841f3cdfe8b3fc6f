"""Queries and requests as users write them, and dead letters.

Inside Roost, records are Arrow columns; :mod:`roost.model.schemas` defines these.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from enum import StrEnum

TIME_MIN = -(1 << 63)
TIME_MAX = (1 << 63) - 1
TIME_LIMIT = 1 << 62  # event times and windows of a dataflow are smaller: sums have 64 bits

BOX, CIRCLE, POLYGON = 0, 1, 2


class Reason(StrEnum):
    """Why a record was rejected; the ``reason`` column of the dead letters."""

    MALFORMED = "malformed"  # does not parse as a record
    WRONG_TYPE = "wrong_type"  # a field has the wrong type
    MISSING_FIELD = "missing_field"
    NOT_FINITE = "not_finite"  # NaN or infinite coordinate
    LATITUDE = "latitude_out_of_range"
    LONGITUDE = "longitude_out_of_range"
    OUT_OF_BOUNDS = "out_of_bounds"  # only with space.outside = dead
    NULL_ID = "null_id"
    NULL_TIME = "null_time"
    LATE = "late"  # before the window's watermark
    UNKNOWN_OP = "unknown_op"
    INVERTED_BOX = "inverted_box"
    BAD_RADIUS = "bad_radius"
    INVALID_POLYGON = "invalid_polygon"
    OVERSIZED_POLYGON = "oversized_polygon"
    BAD_PREDICATE = "bad_predicate"
    BAD_AGGREGATE = "bad_aggregate"
    BAD_NEAREST = "bad_nearest"
    NO_WINDOW = "no_window"  # aggregate and nearest queries require a window
    DUPLICATE_QUERY = "duplicate_query"
    UNKNOWN_QUERY = "unknown_query"
    NOT_OWNER = "not_owner"
    NULL_KEY = "null_key"  # a key of a dataflow
    FUNCTION_FAILED = "function_failed"  # a function of a dataflow raised
    BLOCKED = "blocked"  # the guard or an operator blocked the user


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected row or request."""

    position: int  # row of the source, or position in the query log; -1 if unknown
    reason: Reason
    detail: str
    record: str  # as JSON, or the text that could not be parsed


@dataclass(frozen=True, slots=True)
class Box:
    """A closed rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True, slots=True)
class Circle:
    """A closed disc; the radius is in metres on lon/lat, in coordinate units on a plane."""

    cx: float
    cy: float
    radius: float


@dataclass(frozen=True, slots=True)
class Polygon:
    """A closed polygon or multipolygon, with holes, as WKT or GeoJSON text."""

    text: str


Instant = dt.datetime | int


@dataclass(frozen=True, slots=True)
class Query:
    """A continuous query, active for points with an event time in ``[at, expires_at)``.

    Its identifier is unique among active queries, and only its owner may terminate it. Instead of
    matches, the result may be an aggregate of the window, such as ``count, avg(fare)``, or a number
    of its points that are nearest to the circle's centre. ``docs/queries.md`` describes predicates.

    Examples
    --------
    >>> Query("q1", Box(0, 0, 1, 1), user_id="ann").shape
    Box(x0=0, y0=0, x1=1, y1=1)
    """

    query_id: str | int
    shape: Box | Circle | Polygon
    user_id: str = "local"
    predicate: str | None = None
    at: Instant | None = None
    expires_at: Instant | None = None
    aggregate: str | None = None
    nearest: int | None = None


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ends a query at event time ``at``, or with the next batch."""

    query_id: str | int
    user_id: str = "local"
    at: Instant | None = None


Request = Query | Terminate


def request_record(request: Request) -> dict[str, object]:
    """Return the request as a row of the query log."""
    record: dict[str, object] = {"query_id": request.query_id, "user_id": request.user_id}
    if isinstance(request, Terminate):
        return {**record, "op": "terminate", "at": request.at}
    shape = request.shape
    record |= {"wkt": shape.text} if isinstance(shape, Polygon) else asdict(shape)
    options = {"aggregate": request.aggregate, "nearest": request.nearest}
    record |= {name: value for name, value in options.items() if value is not None}
    times = {"at": request.at, "expires_at": request.expires_at}
    return {**record, "op": "register", "predicate": request.predicate, **times}
