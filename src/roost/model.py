"""What flows through Roost: queries, requests, points, matches, dead letters, and their schemas.

Records travel as Arrow columns; the classes here are what a person writes down one at a time.
Times are kept as 64-bit integers inside: microseconds since 1970 where the stream has timestamps,
the stream's own numbers where its time column is an integer.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import ConfigError

TIME_MIN = -(1 << 63)
TIME_MAX = (1 << 63) - 1

BOX, CIRCLE, POLYGON = 0, 1, 2

TIMESTAMP = pa.timestamp("us", "UTC")


class Reason(StrEnum):
    """Why a record is in the dead letters."""

    MALFORMED = "malformed"  # not a record at all
    WRONG_TYPE = "wrong_type"  # a field that is not what it must be
    MISSING_FIELD = "missing_field"
    NOT_FINITE = "not_finite"  # NaN or infinite coordinate
    LATITUDE = "latitude_out_of_range"
    LONGITUDE = "longitude_out_of_range"
    OUT_OF_BOUNDS = "out_of_bounds"  # only where the space refuses what is outside
    NULL_ID = "null_id"
    NULL_TIME = "null_time"
    LATE = "late"  # older than the window's watermark
    UNKNOWN_OP = "unknown_op"
    INVERTED_BOX = "inverted_box"
    BAD_RADIUS = "bad_radius"
    INVALID_POLYGON = "invalid_polygon"
    OVERSIZED_POLYGON = "oversized_polygon"
    BAD_PREDICATE = "bad_predicate"
    BAD_AGGREGATE = "bad_aggregate"
    BAD_NEAREST = "bad_nearest"
    NO_WINDOW = "no_window"  # aggregates and nearest points are those of a window
    DUPLICATE_QUERY = "duplicate_query"
    UNKNOWN_QUERY = "unknown_query"
    NOT_OWNER = "not_owner"
    BLOCKED = "blocked"  # by the guard, or by an operator


@dataclass(frozen=True, slots=True)
class Box:
    """A closed rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True, slots=True)
class Circle:
    """A closed disc; the radius is in metres on lon/lat and in plain units on a plane."""

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
    """A standing question.

    Parameters
    ----------
    query_id
        Unique among live queries.
    shape
        Where it looks.
    user_id
        Its owner; only the owner may terminate it.
    predicate
        Condition on the attributes of a point, see ``docs/queries.md``.
    at, expires_at
        Live for points whose event time is in ``[at, expires_at)``.
    aggregate
        Aggregates of the points in the window instead of single matches, such as
        ``count, avg(fare)``.
    nearest
        So many points of the window, nearest to the centre of the circle, instead of matches.

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
    """The end of a query, from ``at`` on by event time, or from the next batch on."""

    query_id: str | int
    user_id: str = "local"
    at: Instant | None = None


Request = Query | Terminate

SHAPE_FIELDS = ("x0", "y0", "x1", "y1", "cx", "cy", "radius")


def request_schema(id_type: pa.DataType, time_type: pa.DataType) -> pa.Schema:
    """Columns of a block of requests, as the query log keeps them."""
    return pa.schema(
        [
            ("op", pa.string()),
            ("query_id", id_type),
            ("user_id", pa.string()),
            *((name, pa.float64()) for name in SHAPE_FIELDS),
            ("wkt", pa.string()),
            ("predicate", pa.string()),
            ("at", time_type),
            ("expires_at", time_type),
            ("aggregate", pa.string()),
            ("nearest", pa.int64()),
        ]
    )


def request_record(request: Request) -> dict[str, object]:
    """Plain fields of one request."""
    record: dict[str, object] = {"query_id": request.query_id, "user_id": request.user_id}
    if isinstance(request, Terminate):
        return {**record, "op": "terminate", "at": request.at}
    shape = request.shape
    if isinstance(shape, Polygon):
        record["wkt"] = shape.text
    else:
        record.update((name, getattr(shape, name)) for name in type(shape).__slots__)
    for name in ("aggregate", "nearest"):
        if getattr(request, name) is not None:
            record[name] = getattr(request, name)
    return {
        **record,
        "op": "register",
        "predicate": request.predicate,
        "at": request.at,
        "expires_at": request.expires_at,
    }


def match_schema(id_type: pa.DataType, point_id: pa.DataType, time_type: pa.DataType) -> pa.Schema:
    """Columns of the matches."""
    return pa.schema(
        [
            ("batch_id", pa.int64()),
            ("query_id", id_type),
            ("point_id", point_id),
            ("event_time", time_type),
        ]
    )


DEAD_SCHEMA = pa.schema(
    [
        ("batch_id", pa.int64()),
        ("origin", pa.string()),  # "point" or "request"
        ("position", pa.int64()),  # row of the source, or place in the query log
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("record", pa.string()),  # the record as JSON, or as it came
    ]
)


def time_type_of(data_type: pa.DataType, key: str) -> pa.DataType:
    """Type that event times keep in Roost: UTC microseconds, or plain integers."""
    if pa.types.is_timestamp(data_type) or pa.types.is_date(data_type):
        return TIMESTAMP
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return TIMESTAMP
    if pa.types.is_integer(data_type):
        return pa.int64()
    raise ConfigError(key, str(data_type), "a timestamp, date, ISO text or integer column")


def id_type_of(data_type: pa.DataType, key: str) -> pa.DataType:
    """Type that identifiers keep in Roost: integers or text."""
    if pa.types.is_integer(data_type):
        return pa.int64()
    if pa.types.is_dictionary(data_type):
        return id_type_of(data_type.value_type, key)
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return pa.string()
    raise ConfigError(key, str(data_type), "an integer or text column")


@dataclass(frozen=True, slots=True)
class PointBlock:
    """Valid points as columns. ``attributes`` holds what predicates may ask for."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    time: NDArray[np.int64]
    ids: pa.Array
    attributes: dict[str, pa.Array]

    @property
    def size(self) -> int:
        """Number of points."""
        return int(self.x.size)
