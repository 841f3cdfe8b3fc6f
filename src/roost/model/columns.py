"""Convert columns to the types that Roost computes with, and mark the rows that do not fit.

A column of the right type is used as it is. Anything that Arrow does not cast is converted value by
value, so that a bad value rejects its row and not the whole file.
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
from roost.model.schemas import TIMESTAMP, is_text

Bad = NDArray[np.bool_]
_Fits = Callable[[pa.DataType], Any]
# Values of more than one type in one column, each as JSON: the conversion of a value must not
# depend on other rows.
MIXED = pa.struct([("json", pa.string())])
VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_YEAR_1_US = -62_135_596_800_000_000


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Join a column's chunks."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column is decoded to: dictionaries and views only save space."""
    if pa.types.is_dictionary(kind):
        return decoded_type(kind.value_type)
    return VIEWS.get(kind, kind)


def convert(column: pa.Array | pa.ChunkedArray, to: pa.DataType) -> tuple[pa.Array, Bad]:
    """Convert a column; rows whose value does not fit are null and marked.

    A nested type is converted as a whole: if one value does not fit, none does.

    Examples
    --------
    >>> values, bad = convert(pa.array(["1.5", "x"]), pa.float64())
    >>> values.to_pylist(), bad.tolist()
    ([1.5, None], [False, True])
    """
    array = one_array(column)
    bad = np.zeros(len(array), bool)
    if array.type == to:
        return array, bad
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type in VIEWS:
        array = array.cast(VIEWS[array.type])
    if array.type == to:
        return array, bad
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), to), bad
    _, castable, parse = next(row for row in _CONVERSIONS if row[0](to))
    if any(fits(array.type) for fits in castable):
        try:
            return array.cast(to, safe=not pa.types.is_timestamp(to)), bad
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if pa.types.is_nested(to):
                unfit = array.is_valid().to_numpy(zero_copy_only=False)
                return pa.nulls(len(array), to), np.asarray(unfit, bool)
    if to == TIMESTAMP and pa.types.is_string(array.type):
        times = _read_times(array)
        if times is not None:
            return times, bad
    values: list[Any] = []
    for row, value in enumerate(_values(array)):
        try:
            parsed = None if value is None else parse(value)
            pa.scalar(parsed, to)  # narrow types hold less than Python's
            values.append(parsed)
        except (ValueError, TypeError, OverflowError, pa.ArrowException):
            values.append(None)
            bad[row] = True
    return pa.array(values, to), bad


def _values(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    if array.type != MIXED:
        return values
    return [None if value is None else json.loads(value["json"]) for value in values]


def _read_times(texts: pa.Array) -> pa.Array | None:
    """Parse ISO texts at once if all have a zone or none has; None where Arrow cannot."""
    for kind in (TIMESTAMP, pa.timestamp("us")):
        try:
            times = texts.cast(kind).cast(TIMESTAMP)
        except pa.ArrowInvalid:
            continue
        first = pc.min(times.cast(pa.int64())).as_py()
        # Arrow has a year 0, Python does not: the result of a row must not depend on the others.
        return times if first is None or first >= _YEAR_1_US else None
    return None


def parse_time(value: Any) -> dt.datetime:
    """Return a timestamp from ISO text, a date or a datetime; without a zone it is UTC."""
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


def _anything(value: Any) -> Any:
    return value


# Types, the types that Arrow casts to them with the same meaning, and the parser of other values.
_CONVERSIONS: tuple[tuple[_Fits, tuple[_Fits, ...], Callable[[Any], Any]], ...] = (
    (pa.types.is_timestamp, (pa.types.is_timestamp, pa.types.is_date), parse_time),
    (pa.types.is_integer, (pa.types.is_integer,), _parse_int),
    (
        pa.types.is_floating,
        (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
        _parse_float,
    ),
    (pa.types.is_boolean, (), _parse_bool),
    (pa.types.is_date, (), lambda value: parse_time(value).date()),
    (is_text, (is_text, pa.types.is_integer), _parse_text),
    (pa.types.is_nested, (_anything,), _anything),
    (_anything, (), _anything),
)


def times_as_int(values: pa.Array) -> NDArray[np.int64]:
    """Return event times as 64-bit integers; nulls become 0."""
    numbers = values.cast(pa.int64()) if values.type == TIMESTAMP else values
    return as_numpy(numbers.fill_null(0) if numbers.null_count else numbers)


def record_at(block: pa.Table, row: int) -> str:
    """Return one row as JSON; unreadable values are replaced."""
    values = {}
    for name in block.column_names:
        try:
            values[name] = block[name][row].as_py()
        except (OverflowError, ValueError):  # a time out of range, bytes that are not UTF-8
            values[name] = "unreadable"
    return record_json(values)


def record_json(row: dict[str, Any]) -> str:
    """Return a record as JSON, whatever its values are."""

    def encodable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: encodable(item) for key, item in value.items()}
        if isinstance(value, list):
            return [encodable(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value.hex() if isinstance(value, bytes) else value

    known = {key: encodable(value) for key, value in row.items() if value is not None}
    return json.dumps(known, default=str, ensure_ascii=False)


def stream_bytes(table: pa.Table, compression: str = "lz4") -> bytes:
    """Return a table as a compressed Arrow stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
