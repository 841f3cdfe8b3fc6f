"""The order of tuples as bytes that sort like it.

Tuples are ordered by event time, then by the operator that made them, then by key, then by the
order of the tuples that they were made from. The event time is a column of its own; the rest is one
binary column, which only streams have that some ordered operator reads. Every part is encoded so
that no encoding is the beginning of another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.model.arrays import as_numpy
from roost.model.columns import one_array
from roost.model.schemas import is_text

SIGN = np.uint64(1 << 63)
_BYTES_PER_NODE = 2
_BYTES = (pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary)
_NUMBERS = (pt.is_boolean, pt.is_integer, pt.is_floating, pt.is_temporal)


def _fixed(rows: NDArray[np.uint8]) -> pa.Array:
    """Return a matrix of bytes as a binary column, one value per row."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    data = pa.py_buffer(np.ascontiguousarray(rows))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), data])


def integer_bytes(values: NDArray[Any]) -> pa.Array:
    """Encode 64-bit integers."""
    shifted = values.astype(np.int64).view(np.uint64) ^ SIGN
    return _fixed(shifted.astype(">u8").view(np.uint8).reshape(-1, 8))


def _text_bytes(values: pa.Array) -> pa.Array:
    """Encode texts or bytes, which may have any length and any character; null as the empty one."""
    raw = values.cast(pa.binary())
    raw = raw.fill_null(b"") if raw.null_count else raw
    # Every zero byte is followed by another one than the zero byte of the end.
    escaped = pc.replace_substring(raw, b"\x00", b"\x00\xff")
    return pc.binary_join_element_wise(escaped, b"\x00\x01", b"")


def whole_numbers(column: pa.Array) -> NDArray[np.int64]:
    """Return a column of integers, booleans, times or floats as integers; nulls are arbitrary."""
    if pt.is_boolean(column.type):
        column = column.cast(pa.int64())
    elif pt.is_date32(column.type) or pt.is_time32(column.type):
        column = column.view(pa.int32())
    elif pt.is_temporal(column.type):
        column = column.view(pa.int64())
    elif pt.is_floating(column.type):
        bits = (as_numpy(column.cast(pa.float64()).fill_null(0.0)) + 0.0).view(np.int64)
        return np.where(bits < 0, ~bits ^ np.int64(-1 << 63), bits)
    return as_numpy(column.fill_null(0) if column.null_count else column).astype(np.int64)


def key_bytes(
    columns: Iterable[pa.Array | pa.ChunkedArray], rows: int, *, nullable: bool = False
) -> pa.Array:
    """Encode the values of several columns row by row; with ``nullable``, nulls sort first."""
    parts: list[Any] = []
    for given in columns:
        column = one_array(given)
        if nullable:
            valid = np.asarray(column.is_valid()).astype(np.uint8)
            parts.append(_fixed(valid[:, None]))
        parts.append(_value_bytes(column))
    return join_bytes(parts, rows)


def _value_bytes(column: pa.Array) -> pa.Array:
    """Encode the values of a column of any type."""
    if is_text(column.type) or any(of(column.type) for of in _BYTES):
        return _text_bytes(column)
    if any(of(column.type) for of in _NUMBERS):
        return integer_bytes(whole_numbers(column))
    # Nested values and decimals: equal ones have equal texts, and any order of the others will do.
    return _text_bytes(pa.array([repr(value) for value in column.to_pylist()], pa.string()))


def join_bytes(parts: list[Any], rows: int) -> pa.Array:
    """Concatenate binary columns and constants, row by row."""
    if not parts:
        return pa.array([b""] * rows, pa.binary())
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, b"")


def node_bytes(number: int) -> bytes:
    """Encode the number of an operator."""
    return number.to_bytes(_BYTES_PER_NODE, "big")


def made_order(number: int, parts: list[Any], rows: int) -> pa.Array:
    """Return the order of tuples that an operator made, from encoded parts."""
    prefix = pa.array([node_bytes(number)] * rows, pa.binary())
    return join_bytes([prefix, *parts], rows)
