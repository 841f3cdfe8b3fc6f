"""Columns of the records: Arrow schemas, and the block of points that tasks process.

Event times are 64-bit integers: microseconds since 1970 where the stream has timestamps, the
stream's own numbers where its time column is an integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import ConfigError

TIMESTAMP = pa.timestamp("us", "UTC")
SHAPE_FIELDS = ("x0", "y0", "x1", "y1", "cx", "cy", "radius")


def request_schema(id_type: pa.DataType, time_type: pa.DataType) -> pa.Schema:
    """Return the columns of a block of requests in the query log."""
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


def match_schema(id_type: pa.DataType, point_id: pa.DataType, time_type: pa.DataType) -> pa.Schema:
    """Return the columns of matches."""
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
        ("position", pa.int64()),  # row of the source, or position in the query log
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("record", pa.string()),  # the record as JSON, or its raw text
    ]
)


def is_text(data_type: pa.DataType) -> bool:
    """Return whether a column holds text."""
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def time_type_of(data_type: pa.DataType, key: str) -> pa.DataType:
    """Return the type of event times inside Roost: UTC microseconds, or 64-bit integers."""
    if pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or is_text(data_type):
        return TIMESTAMP
    if pa.types.is_integer(data_type):
        return pa.int64()
    raise ConfigError(key, str(data_type), "a timestamp, date, ISO text or integer column")


def id_type_of(data_type: pa.DataType, key: str) -> pa.DataType:
    """Return the type of identifiers inside Roost: 64-bit integers, or text."""
    if pa.types.is_integer(data_type):
        return pa.int64()
    if pa.types.is_dictionary(data_type):
        return id_type_of(data_type.value_type, key)
    if is_text(data_type):
        return pa.string()
    raise ConfigError(key, str(data_type), "an integer or text column")


@dataclass(frozen=True, slots=True)
class PointBlock:
    """Valid points as columns; ``attributes`` are those that some stage reads."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    time: NDArray[np.int64]
    ids: pa.Array
    attributes: dict[str, pa.Array]

    @property
    def size(self) -> int:
        """Number of points."""
        return int(self.x.size)

    num_rows = size  # the name that all blocks between stages share
