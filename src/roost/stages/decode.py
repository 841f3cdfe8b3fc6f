"""Rows of a source into a block of valid points; every other row gets a reason.

The common case (float64 coordinates, timestamps, nothing missing) costs one look at each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.kernel.cells import all_within
from roost.kernel.segment import longitude_range
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import convert, record_json, times_as_int
from roost.model.records import Reason
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Outside, Space

ROW = "__roost_row"  # place of a row in its source, added where the source has no identifiers
MALFORMED = "__roost_malformed"  # text of a row that could not be read at all


@dataclass(frozen=True)
class PointSchema:
    """Which columns of a source are what.

    Parameters
    ----------
    x, y, time
        Column names.
    point_id
        Column name; None takes the row number.
    id_type, time_type
        Types of identifiers and event times in matches.
    attributes
        All other columns.
    """

    x: str
    y: str
    time: str
    point_id: str | None
    id_type: pa.DataType
    time_type: pa.DataType
    attributes: pa.Schema


@dataclass(frozen=True, slots=True)
class DeadRow:
    """A row on its way to the dead letters."""

    position: int
    reason: Reason
    detail: str
    record: str


class _Faults:
    """First fault of each row."""

    def __init__(self, size: int) -> None:
        self.good = np.ones(size, bool)
        self.reasons: dict[int, tuple[Reason, str]] = {}

    def mark(self, bad: NDArray[np.bool_], reason: Reason, detail: str) -> None:
        if not bad.any():
            return
        for row in np.flatnonzero(bad & self.good).tolist():
            self.reasons[row] = (reason, detail)
        self.good &= ~bad


def _nulls(column: pa.Array) -> NDArray[np.bool_]:
    if column.null_count == 0:
        return np.zeros(len(column), bool)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), bool)


def _column(table: pa.Table, name: str, to: pa.DataType, faults: _Faults) -> pa.Array:
    if name not in table.column_names:
        faults.mark(np.ones(table.num_rows, bool), Reason.MISSING_FIELD, f"{name} is missing")
        return pa.nulls(table.num_rows, to)
    values, bad = convert(table[name], to)
    faults.mark(bad, Reason.WRONG_TYPE, f"{name} takes {to}")
    return values


def _coordinates(
    table: pa.Table, schema: PointSchema, space: Space, faults: _Faults
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    both = []
    for name in (schema.x, schema.y):
        column = _column(table, name, pa.float64(), faults)
        faults.mark(_nulls(column), Reason.NOT_FINITE, f"{name} is null")
        both.append(as_numpy(column))
    x, y = both
    if not all_within(x, y, *_allowed(space)):
        _judge_coordinates(x, y, schema, space, faults)
    return x, y


def _allowed(space: Space) -> tuple[float, float, float, float]:
    """Rectangle that every valid point is in."""
    if space.outside is Outside.DEAD:
        b = space.bounds
        return b.x0, b.y0, b.x1, b.y1
    if space.coordinates is Coordinates.LONLAT:
        left, right = longitude_range(space)
        return left, -90.0, right, 90.0
    limit = float(np.finfo(np.float64).max)
    return -limit, -limit, limit, limit


def _judge_coordinates(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    schema: PointSchema,
    space: Space,
    faults: _Faults,
) -> None:
    for name, values in ((schema.x, x), (schema.y, y)):
        faults.mark(~np.isfinite(values), Reason.NOT_FINITE, f"{name} is not a finite number")
    with np.errstate(invalid="ignore"):
        if space.coordinates is Coordinates.LONLAT:
            faults.mark(np.abs(y) > 90.0, Reason.LATITUDE, f"{schema.y} takes -90 to 90")
            left, right = longitude_range(space)
            beyond = (x < left) | (x > right)
            faults.mark(beyond, Reason.LONGITUDE, f"{schema.x} takes {left:g} to {right:g}")
        if space.outside is Outside.DEAD:
            b = space.bounds
            outside = (x < b.x0) | (x > b.x1) | (y < b.y0) | (y > b.y1)
            faults.mark(outside, Reason.OUT_OF_BOUNDS, "lies outside the bounds")


def decode(
    table: pa.Table,
    schema: PointSchema,
    space: Space,
    wanted: tuple[str, ...],
    late_before: int | None = None,
) -> tuple[PointBlock, list[DeadRow]]:
    """Split rows into valid points and dead letters.

    Parameters
    ----------
    table
        Rows as they came; may have the columns ``ROW`` and ``MALFORMED``.
    schema
        Which columns are what.
    space
        Where points may be.
    wanted
        Attributes that some predicate or the window asks for; the others are left behind.
    late_before
        Points with an older event time are too late; None where none is.
    """
    faults = _Faults(table.num_rows)
    if MALFORMED in table.column_names:
        unread = ~_nulls(convert(table[MALFORMED], pa.string())[0])
        faults.mark(unread, Reason.MALFORMED, "not a record")
    x, y = _coordinates(table, schema, space, faults)
    times = _column(table, schema.time, schema.time_type, faults)
    faults.mark(_nulls(times), Reason.NULL_TIME, f"{schema.time} is null")
    ids = _column(table, schema.point_id or ROW, schema.id_type, faults)
    faults.mark(_nulls(ids), Reason.NULL_ID, f"{schema.point_id} is null")
    faults.mark(_garbled(ids), Reason.WRONG_TYPE, f"{schema.point_id} is not UTF-8")
    attributes: dict[str, pa.Array] = {}
    for name in wanted:
        data_type = schema.attributes.field(name).type
        if name in table.column_names:
            attributes[name], bad = convert_attribute(table[name], data_type)
            faults.mark(bad, Reason.WRONG_TYPE, f"{name} takes {data_type}")
            faults.mark(_garbled(attributes[name]), Reason.WRONG_TYPE, f"{name} is not UTF-8")
        else:
            attributes[name] = pa.nulls(table.num_rows, data_type)
    time = times_as_int(times)
    if late_before is not None:
        faults.mark(time < late_before, Reason.LATE, f"{schema.time} is before the watermark")
    if not faults.reasons:
        return PointBlock(x, y, time, ids, attributes), []
    good = faults.good
    mask = pa.array(good)
    kept = {name: array.filter(mask) for name, array in attributes.items()}
    block = PointBlock(x[good], y[good], time[good], ids.filter(mask), kept)
    return block, _dead_rows(table, faults)


def convert_attribute(
    column: pa.ChunkedArray, to: pa.DataType
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Attribute column in its declared type; types that only Arrow knows are taken as they are."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if array.type == to:
        return array, np.zeros(len(array), bool)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type in (to, pa.string_view(), pa.binary_view()):
        return array.cast(to), np.zeros(len(array), bool)
    if pa.types.is_nested(to):
        try:
            return array.cast(to), np.zeros(len(array), bool)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return pa.nulls(len(array), to), ~_nulls(array)
    return convert(array, to)


def _garbled(column: pa.Array) -> NDArray[np.bool_]:
    """Which texts are not UTF-8: neither Parquet nor Arrow looks before somebody reads one."""
    good = np.zeros(len(column), bool)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return good
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.large_binary()).to_pylist()
        return np.array([value is not None and not _is_text(value) for value in raw], bool)
    return good


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _readable(table: pa.Table) -> pa.Table:
    """Replace what is not UTF-8, for a record that a person is to read."""
    for place, field in enumerate(table.schema):
        column = table.column(place).combine_chunks()
        if pa.types.is_string(field.type) and _garbled(column).any():
            raw = column.cast(pa.binary()).to_pylist()
            texts = [None if value is None else value.decode(errors="replace") for value in raw]
            table = table.set_column(place, field, pa.array(texts, field.type))
    return table


def _dead_rows(table: pa.Table, faults: _Faults) -> list[DeadRow]:
    rows = sorted(faults.reasons)
    records = _readable(table.take(pa.array(rows, pa.int64()))).to_pylist()
    dead = []
    for row, record in zip(rows, records, strict=True):
        reason, detail = faults.reasons[row]
        position = record.pop(ROW, None)
        text = record.pop(MALFORMED, None) or record_json(record)
        dead.append(DeadRow(-1 if position is None else position, reason, detail, text))
    return dead


def block_schema(schema: PointSchema, wanted: tuple[str, ...]) -> pa.Schema:
    """Columns of a packed block."""
    fixed = [
        ("x", pa.float64()),
        ("y", pa.float64()),
        ("time", pa.int64()),
        ("cell", pa.int32()),
        ("id", schema.id_type),
    ]
    return pa.schema([*fixed, *((f"a.{n}", schema.attributes.field(n).type) for n in wanted)])


def pack_columns(block: PointBlock, cells: NDArray[np.int32]) -> pa.RecordBatch:
    """Put a block and the cells of its points into the columns that are shuffled."""
    columns = [as_arrow(values) for values in (block.x, block.y, block.time, cells)]
    names = ["x", "y", "time", "cell", "id", *(f"a.{name}" for name in block.attributes)]
    return pa.RecordBatch.from_arrays([*columns, block.ids, *block.attributes.values()], names)


def pack_rows(packed: pa.RecordBatch, start: int, stop: int) -> bytes:
    """Turn some rows into bytes; whoever reads them knows the schema."""
    data: bytes = packed.slice(start, stop - start).serialize().to_pybytes()
    return data


def unpack_blocks(
    packed: Sequence[bytes], schema: pa.Schema
) -> tuple[PointBlock, NDArray[np.int32]]:
    """Inverse of :func:`pack_rows`, for several blocks that become one."""
    batches = [pa.ipc.read_record_batch(pa.py_buffer(data), schema) for data in packed]
    numbers = [np.concatenate([as_numpy(b.column(k)) for b in batches]) for k in range(4)]
    others = [
        pa.concat_arrays([batch.column(k) for batch in batches]) for k in range(4, len(schema))
    ]
    names = (name[2:] for name in schema.names[5:])
    attributes = dict(zip(names, others[1:], strict=True))
    return PointBlock(numbers[0], numbers[1], numbers[2], others[0], attributes), numbers[3]


def take_rows(block: PointBlock, rows: NDArray[np.int64]) -> PointBlock:
    """Take some points of a block."""
    index = as_arrow(rows)
    return PointBlock(
        block.x[rows],
        block.y[rows],
        block.time[rows],
        block.ids.take(index),
        {name: array.take(index) for name, array in block.attributes.items()},
    )
