"""Columns as they come into columns as they must be, with the rows that cannot be named.

A column of the right type is taken as it is. Anything else is converted value by value, so that
one bad value costs one row its place and not the whole file.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.model.arrays import as_numpy
from roost.model.schemas import TIMESTAMP

Bad = NDArray[np.bool_]
# Values of more than one type in one column, each as JSON: what becomes of a value must not depend
# on what its neighbours are.
MIXED = pa.struct([("json", pa.string())])
_YEAR_1_US = -62_135_596_800_000_000


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Join a column's chunks."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def convert(column: pa.Array | pa.ChunkedArray, to: pa.DataType) -> tuple[pa.Array, Bad]:
    """Convert a column; rows whose value does not fit are null and marked.

    Examples
    --------
    >>> values, bad = convert(pa.array(["1.5", "x"]), pa.float64())
    >>> values.to_pylist(), bad.tolist()
    ([1.5, None], [False, True])
    """
    array = one_array(column)
    if isinstance(array, pa.ChunkedArray):  # combine_chunks of an empty column
        array = pa.array([], array.type)
    good = np.zeros(len(array), bool)
    if array.type == to:
        return array, good
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), to), good
    if _castable(array.type, to):
        try:
            return array.cast(to, safe=not pa.types.is_timestamp(to)), good
        except pa.ArrowInvalid:
            pass
    if to == TIMESTAMP and pa.types.is_string(array.type):
        times = _read_times(array)
        if times is not None:
            return times, good
    parse = _parser(to)
    values: list[Any] = []
    for row, value in enumerate(_values(array)):
        try:
            parsed = None if value is None else parse(value)
            pa.scalar(parsed, to)  # narrow types hold less than Python's
            values.append(parsed)
        except (ValueError, TypeError, OverflowError, pa.ArrowException):
            values.append(None)
            good[row] = True
    return pa.array(values, to), good


def _values(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    if array.type != MIXED:
        return values
    return [None if value is None else json.loads(value["json"]) for value in values]


def _read_times(texts: pa.Array) -> pa.Array | None:
    """Read ISO texts at once where all have a zone or none has; None where Arrow cannot."""
    for kind in (TIMESTAMP, pa.timestamp("us")):
        try:
            times = texts.cast(kind).cast(TIMESTAMP)
        except pa.ArrowInvalid:
            continue
        first = pc.min(times.cast(pa.int64())).as_py()
        # Arrow knows a year 0, Python does not: what is refused must not depend on the neighbours.
        return times if first is None or first >= _YEAR_1_US else None
    return None


def _castable(source: pa.DataType, to: pa.DataType) -> bool:
    """Whether Arrow's own cast means what we mean."""
    if pa.types.is_timestamp(to):
        return bool(pa.types.is_timestamp(source) or pa.types.is_date(source))
    if pa.types.is_integer(to):
        return bool(pa.types.is_integer(source))
    if pa.types.is_floating(to):
        number = pa.types.is_integer(source) or pa.types.is_floating(source)
        return bool(number or pa.types.is_decimal(source))
    if pa.types.is_string(to) or pa.types.is_large_string(to):
        text = pa.types.is_large_string(source) or pa.types.is_string(source)
        return bool(text or pa.types.is_integer(source))
    return False


def _parser(to: pa.DataType) -> Callable[[Any], Any]:
    if pa.types.is_timestamp(to):
        return parse_time
    if pa.types.is_integer(to):
        return _parse_int
    if pa.types.is_floating(to):
        return _parse_float
    if pa.types.is_boolean(to):
        return _parse_bool
    if pa.types.is_date(to):
        return lambda value: parse_time(value).date()
    if pa.types.is_string(to) or pa.types.is_large_string(to):
        return _parse_text
    return lambda value: value


def parse_time(value: Any) -> dt.datetime:
    """Timestamp from ISO text, a date or a datetime; without a zone it is UTC."""
    if isinstance(value, str):
        value = dt.datetime.fromisoformat(value.strip())
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = dt.datetime(value.year, value.month, value.day, tzinfo=dt.UTC)
    if not isinstance(value, dt.datetime):
        raise TypeError(f"not a time: {value!r}")
    return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value


def _parse_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        raise TypeError(f"not an integer: {value!r}")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"not a whole number: {value!r}")
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"beyond 64 bits: {number}")
    return number


def _parse_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(f"not a number: {value!r}")
    return float(value)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise TypeError(f"neither true nor false: {value!r}")
    return value


def _parse_text(value: Any) -> str:
    if not isinstance(value, str | int):
        raise TypeError(f"not text: {value!r}")
    return str(value)


def times_as_int(values: pa.Array) -> NDArray[np.int64]:
    """Event times as Roost computes with them; nulls give any number."""
    plain = values.cast(pa.int64()) if values.type == TIMESTAMP else values
    return as_numpy(plain.fill_null(0) if plain.null_count else plain)


def record_at(block: pa.Table, row: int) -> str:
    """One row as JSON, as far as it can be read."""
    values = {}
    for name in block.column_names:
        try:
            values[name] = block[name][row].as_py()
        except (OverflowError, ValueError):  # a time beyond all calendars, a text that is none
            values[name] = "unreadable"
    return record_json(values)


def record_json(row: dict[str, Any]) -> str:
    """One record as JSON, whatever it holds."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, bytes):
            return value.hex()
        return value

    known = {key: plain(value) for key, value in row.items() if value is not None}
    return json.dumps(known, default=str, ensure_ascii=False)


def stream_bytes(table: pa.Table, compression: str = "lz4") -> bytes:
    """Return a table as a compressed Arrow stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
