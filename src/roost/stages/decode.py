"""Decode rows of a source into a block of valid points; every other row is rejected with a reason.

The common case (float64 coordinates, timestamps, nothing missing) scans each column once.
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
from roost.model.records import DeadLetter, Reason
from roost.model.schemas import PointBlock, is_text
from roost.model.space import Coordinates, Outside, Space

ROW = "__roost_row"  # number of a row in its source
MALFORMED = "__roost_malformed"  # text of a row that could not be parsed


@dataclass(frozen=True)
class PointSchema:
    """The role of each column of a source."""

    x: str
    y: str
    time: str
    point_id: str | None  # None uses the row number
    id_type: pa.DataType  # types of identifiers and event times in matches
    time_type: pa.DataType
    attributes: pa.Schema  # all columns, in the types that they are decoded to


class RowFaults:
    """First fault of each row."""

    def __init__(self, size: int) -> None:
        self.good = np.ones(size, bool)
        self.reasons: dict[int, tuple[Reason, str]] = {}

    def mark(self, bad: NDArray[np.bool_], reason: Reason, detail: str) -> None:
        """Reject rows that have no earlier fault."""
        if not bad.any():
            return
        for row in np.flatnonzero(bad & self.good).tolist():
            self.reasons[row] = (reason, detail)
        self.good &= ~bad


def nulls(column: pa.Array) -> NDArray[np.bool_]:
    """Return which values are null."""
    if column.null_count == 0:
        return np.zeros(len(column), bool)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), bool)


def malformed(table: pa.Table, faults: RowFaults) -> None:
    """Mark the rows that could not be parsed."""
    if MALFORMED in table.column_names:
        unread = ~nulls(convert(table[MALFORMED], pa.string())[0])
        faults.mark(unread, Reason.MALFORMED, "not a record")


def typed_column(table: pa.Table, name: str, to: pa.DataType, faults: RowFaults) -> pa.Array:
    """Return a column in a type; values that do not fit, and a missing column, are faults."""
    if name not in table.column_names:
        faults.mark(np.ones(table.num_rows, bool), Reason.MISSING_FIELD, f"{name} is missing")
        return pa.nulls(table.num_rows, to)
    values, bad = convert(table[name], to)
    faults.mark(bad, Reason.WRONG_TYPE, f"{name} is not of type {to}")
    return values


def _coordinates(
    table: pa.Table, schema: PointSchema, space: Space, faults: RowFaults
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    both = []
    for name in (schema.x, schema.y):
        column = typed_column(table, name, pa.float64(), faults)
        faults.mark(nulls(column), Reason.NOT_FINITE, f"{name} is null")
        both.append(as_numpy(column))
    x, y = both
    if not all_within(x, y, *_allowed(space)):
        _mark_coordinates(x, y, schema, space, faults)
    return x, y


def _allowed(space: Space) -> tuple[float, float, float, float]:
    """Return the rectangle that holds every valid point."""
    if space.outside is Outside.DEAD:
        b = space.bounds
        return b.x0, b.y0, b.x1, b.y1
    if space.coordinates is Coordinates.LONLAT:
        left, right = longitude_range(space)
        return left, -90.0, right, 90.0
    limit = float(np.finfo(np.float64).max)
    return -limit, -limit, limit, limit


def _mark_coordinates(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    schema: PointSchema,
    space: Space,
    faults: RowFaults,
) -> None:
    for name, values in ((schema.x, x), (schema.y, y)):
        faults.mark(~np.isfinite(values), Reason.NOT_FINITE, f"{name} is not a finite number")
    with np.errstate(invalid="ignore"):
        if space.coordinates is Coordinates.LONLAT:
            faults.mark(np.abs(y) > 90.0, Reason.LATITUDE, f"{schema.y} must be from -90 to 90")
            left, right = longitude_range(space)
            beyond = (x < left) | (x > right)
            faults.mark(beyond, Reason.LONGITUDE, f"{schema.x} must be from {left:g} to {right:g}")
        if space.outside is Outside.DEAD:
            b = space.bounds
            outside = (x < b.x0) | (x > b.x1) | (y < b.y0) | (y > b.y1)
            faults.mark(outside, Reason.OUT_OF_BOUNDS, "is outside the bounds")


def decode(
    table: pa.Table,
    schema: PointSchema,
    space: Space,
    attributes: tuple[str, ...],
    late_before: int | None = None,
) -> tuple[PointBlock, list[DeadLetter]]:
    """Divide rows into valid points and rejected rows.

    The table may have the columns ``ROW`` and ``MALFORMED``. ``attributes`` are the columns that
    the block must have; others are neither converted nor checked. Rows with an event time before
    ``late_before`` are rejected.
    """
    faults = RowFaults(table.num_rows)
    malformed(table, faults)
    x, y = _coordinates(table, schema, space, faults)
    times = typed_column(table, schema.time, schema.time_type, faults)
    faults.mark(nulls(times), Reason.NULL_TIME, f"{schema.time} is null")
    ids = typed_column(table, schema.point_id or ROW, schema.id_type, faults)
    faults.mark(nulls(ids), Reason.NULL_ID, f"{schema.point_id} is null")
    faults.mark(_not_utf8(ids), Reason.WRONG_TYPE, f"{schema.point_id} is not UTF-8")
    found: dict[str, pa.Array] = {}
    for name in attributes:
        data_type = schema.attributes.field(name).type
        if name in table.column_names:
            found[name] = typed_column(table, name, data_type, faults)
            faults.mark(_not_utf8(found[name]), Reason.WRONG_TYPE, f"{name} is not UTF-8")
        else:
            found[name] = pa.nulls(table.num_rows, data_type)
    time = times_as_int(times)
    if late_before is not None:
        faults.mark(time < late_before, Reason.LATE, f"{schema.time} is before the watermark")
    if not faults.reasons:
        return PointBlock(x, y, time, ids, found), []
    good = faults.good
    mask = pa.array(good)
    found = {name: array.filter(mask) for name, array in found.items()}
    block = PointBlock(x[good], y[good], time[good], ids.filter(mask), found)
    return block, rejected(table, faults)


def _not_utf8(column: pa.Array) -> NDArray[np.bool_]:
    """Return which texts are not UTF-8: neither Parquet nor Arrow validates what it reads."""
    if is_text(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raw = column.cast(pa.large_binary()).to_pylist()
            bad = [
                text is not None and text.decode(errors="ignore").encode() != text for text in raw
            ]
            return np.array(bad, bool)
    return np.zeros(len(column), bool)


def _readable(table: pa.Table) -> pa.Table:
    """Replace bytes that are not UTF-8."""
    for place, field in enumerate(table.schema):
        column = table.column(place).combine_chunks()
        if pa.types.is_string(field.type) and _not_utf8(column).any():
            raw = column.cast(pa.binary()).to_pylist()
            texts = [None if value is None else value.decode(errors="replace") for value in raw]
            table = table.set_column(place, field, pa.array(texts, field.type))
    return table


def rejected(table: pa.Table, faults: RowFaults) -> list[DeadLetter]:
    """Return the rows that have a fault."""
    rows = sorted(faults.reasons)
    records = _readable(table.take(pa.array(rows, pa.int64()))).to_pylist()
    dead = []
    for row, record in zip(rows, records, strict=True):
        reason, detail = faults.reasons[row]
        position = record.pop(ROW, None)
        text = record.pop(MALFORMED, None) or record_json(record)
        dead.append(DeadLetter(-1 if position is None else position, reason, detail, text))
    return dead


def block_schema(schema: PointSchema, attributes: tuple[str, ...]) -> pa.Schema:
    """Return the columns of a packed block."""
    fixed = [
        ("x", pa.float64()),
        ("y", pa.float64()),
        ("time", pa.int64()),
        ("cell", pa.int32()),
        ("id", schema.id_type),
    ]
    more = [(f"a.{name}", schema.attributes.field(name).type) for name in attributes]
    return pa.schema([*fixed, *more])


def pack_columns(block: PointBlock, cells: NDArray[np.int32]) -> pa.RecordBatch:
    """Return a block and the cells of its points as the columns that an exchange sends."""
    columns = [as_arrow(values) for values in (block.x, block.y, block.time, cells)]
    names = ["x", "y", "time", "cell", "id", *(f"a.{name}" for name in block.attributes)]
    return pa.RecordBatch.from_arrays([*columns, block.ids, *block.attributes.values()], names)


def pack_rows(packed: pa.RecordBatch, start: int, stop: int) -> pa.Buffer:
    """Serialize some rows without their schema."""
    return packed.slice(start, stop - start).serialize()


def unpack_blocks(
    packed: Sequence[pa.Buffer], schema: pa.Schema
) -> tuple[PointBlock, NDArray[np.int32]]:
    """Join several results of :func:`pack_rows` into one block."""
    batches = [pa.ipc.read_record_batch(data, schema) for data in packed]
    numbers = [np.concatenate([as_numpy(b.column(k)) for b in batches]) for k in range(4)]
    others = [
        pa.concat_arrays([batch.column(k) for batch in batches]) for k in range(4, len(schema))
    ]
    names = (name[2:] for name in schema.names[5:])
    attributes = dict(zip(names, others[1:], strict=True))
    return PointBlock(numbers[0], numbers[1], numbers[2], others[0], attributes), numbers[3]


def take_rows(block: PointBlock, rows: NDArray[np.int64]) -> PointBlock:
    """Return some points of a block."""
    index = as_arrow(rows)
    return PointBlock(
        block.x[rows],
        block.y[rows],
        block.time[rows],
        block.ids.take(index),
        {name: array.take(index) for name, array in block.attributes.items()},
    )
