"""Window segment: the points of one machine and batch, stored for selective reads.

Points are sorted by partition and, within it, in Z-order, so a rectangle is a few contiguous runs.
A zone map holds the minimum and maximum coordinates and times of every ``ZONE_ROWS`` rows: most of
a segment is decided without reading a point.

A segment is a set of named arrays, memory-mapped and never changed. Identifiers and attributes are
one Arrow stream in it, which is read without a copy, and only on first access.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import IndexGrid, Whole, code_points, sort_codes
from roost.model.arrays import Floats, Ints, as_arrow
from roost.model.records import TIME_MAX, TIME_MIN
from roost.model.schemas import TIMESTAMP, PointBlock
from roost.model.space import Coordinates, Space
from roost.workload.cells import CellCounts

ZONE_ROWS = 512
NO_ALIASES: Mapping[str, Any] = {}
PLACES_MAX_16 = 1 << 16

# Arrays of a file in the order of the fields of a segment.
STORED = (
    *("x", "y", "time", "zone_boxes", "zone_times", "partition_ids", "partition_starts"),
    *("cells", "cell_counts", "space", "columns", "aliases"),
)

Arrays = dict[str, NDArray[Any]]
Rows = Ints  # indices into the arrays of a segment
Bounds = tuple[float, float, float, float]


class PointColumns(NamedTuple):
    """Coordinates and event times of points, for compiled loops."""

    x: Floats
    y: Floats
    time: Ints


class ZoneMaps(NamedTuple):
    """Bounds ``x0, y0, x1, y1`` and minimum and maximum time of every ``ZONE_ROWS`` rows."""

    boxes: Floats
    times: Ints


@njit(cache=True, nogil=True)
def _fill_zone_maps(points: PointColumns, zones: ZoneMaps) -> None:  # pragma: no cover - compiled
    x, y, time = points
    boxes, times = zones
    for zone in range(boxes.shape[0]):
        first = zone * ZONE_ROWS
        x0 = x1 = x[first]
        y0 = y1 = y[first]
        t0 = t1 = time[first]
        for row in range(first + 1, min(first + ZONE_ROWS, x.size)):
            x0, x1 = min(x0, x[row]), max(x1, x[row])
            y0, y1 = min(y0, y[row]), max(y1, y[row])
            t0, t1 = min(t0, time[row]), max(t1, time[row])
        boxes[zone, 0], boxes[zone, 1], boxes[zone, 2], boxes[zone, 3] = x0, y0, x1, y1
        times[zone, 0], times[zone, 1] = t0, t1


@njit(cache=True, nogil=True)
def cut_runs(starts: Ints, stops: Ints) -> Ints:  # pragma: no cover - compiled
    """Split runs of rows at zone borders: first row, end row (exclusive) and zone of each."""
    count = 0
    for k in range(starts.size):
        if starts[k] < stops[k]:
            count += (stops[k] - 1) // ZONE_ROWS - starts[k] // ZONE_ROWS + 1
    pieces = np.empty((count, 3), np.int64)
    at = 0
    for k in range(starts.size):
        row = starts[k]
        while row < stops[k]:
            zone = row // ZONE_ROWS
            stop = min((zone + 1) * ZONE_ROWS, stops[k])
            pieces[at, 0], pieces[at, 1], pieces[at, 2] = row, stop, zone
            at += 1
            row = stop
    return pieces


@njit(cache=True, nogil=True)
def _misses(
    zone: Whole, zones: ZoneMaps, x0: float, y0: float, x1: float, y1: float, since: Whole
) -> bool:  # pragma: no cover - compiled
    """Return whether no row of a zone can be in a box and not older than ``since``."""
    boxes, times = zones
    beside = boxes[zone, 2] < x0 or boxes[zone, 0] > x1
    return bool(beside or boxes[zone, 3] < y0 or boxes[zone, 1] > y1 or times[zone, 1] < since)


@njit(cache=True, nogil=True)
def _find_rows(
    points: PointColumns,
    zones: ZoneMaps,
    pieces: Ints,
    x0: float,
    y0: float,
    x1: float,
    y1: float,
    since: Whole,
) -> Ints:  # pragma: no cover - compiled
    """Return the rows of some pieces that lie in a closed box and are not older than a time."""
    x, y, time = points
    boxes, times = zones
    room = 0
    for k in range(pieces.shape[0]):
        if not _misses(pieces[k, 2], zones, x0, y0, x1, y1, since):
            room += pieces[k, 1] - pieces[k, 0]
    rows = np.empty(room, np.int64)
    found = 0
    for k in range(pieces.shape[0]):
        zone = pieces[k, 2]
        if _misses(zone, zones, x0, y0, x1, y1, since):
            continue
        inside = x0 <= boxes[zone, 0] and boxes[zone, 2] <= x1 and times[zone, 0] >= since
        if inside and y0 <= boxes[zone, 1] and boxes[zone, 3] <= y1:
            for row in range(pieces[k, 0], pieces[k, 1]):
                rows[found] = row
                found += 1
            continue
        for row in range(pieces[k, 0], pieces[k, 1]):
            rows[found] = row
            across = (x0 <= x[row]) & (x[row] <= x1)
            found += across & (y0 <= y[row]) & (y[row] <= y1) & (time[row] >= since)
    return rows[:found]


class Alias(StrEnum):
    """Stored column that an attribute duplicates, so that it is not stored twice."""

    X = "x"
    Y = "y"
    NUMBER = "number"  # the event time, as a number
    MOMENT = "moment"  # the event time, as a timestamp
    ID = "id"


def row_order(
    block: PointBlock, places: NDArray[np.int32], partitions: int, space: Space
) -> NDArray[np.int32]:
    """Return the order of points in a segment: by partition, then in Z-order."""
    grid = IndexGrid.over(space.bounds)
    codes = np.empty(block.size, np.uint32)
    order = np.empty(block.size, np.int32)
    code_points(block.x, block.y, grid.edges_x, grid.edges_y, codes)
    sort_codes(codes, order)
    # numpy sorts 16-bit numbers in linear time.
    narrow = np.uint16 if partitions <= PLACES_MAX_16 else np.int32
    return order[np.argsort(places[order].astype(narrow), kind="stable")]


def build(
    block: PointBlock,
    cells: NDArray[np.int32],
    places: NDArray[np.int32],
    partition_ids: Ints,
    space: Space,
    order: NDArray[np.int32] | None = None,
    aliases: Mapping[str, Alias] = NO_ALIASES,
) -> Arrays:
    """Build the segment of one machine and batch, for :meth:`WindowSegment.open`.

    ``cells`` are the points' cells in the grid of the plan, ``places`` the indices of their
    partitions in ``partition_ids``, ``order`` is the result of :func:`row_order`, if the caller has
    it, and ``aliases`` are further attributes that duplicate a stored column.
    """
    if order is None:
        order = row_order(block, places, partition_ids.size, space)
    x, y, time = block.x[order], block.y[order], block.time[order]
    zones = -(-block.size // ZONE_ROWS)
    boxes, times = np.empty((zones, 4)), np.empty((zones, 2), np.int64)
    _fill_zone_maps(PointColumns(x, y, time), ZoneMaps(boxes, times))
    counts = np.bincount(places, minlength=partition_ids.size)
    present = np.flatnonzero(counts)
    touched, per_cell = np.unique(cells, return_counts=True)
    return {
        "space": np.frombuffer(json.dumps(space.to_json()).encode(), np.uint8),
        "x": x,
        "y": y,
        "time": time,
        "zone_boxes": boxes,
        "zone_times": times,
        "partition_ids": np.asarray(partition_ids, np.int64)[present],
        "partition_starts": np.concatenate([[0], np.cumsum(counts[present])]).astype(np.int64),
        "cells": touched.astype(np.int32),
        "cell_counts": per_cell.astype(np.int64),
        "columns": _pack_block(block, order),
        "aliases": np.frombuffer(json.dumps(dict(aliases)).encode(), np.uint8),
    }


def _pack_block(block: PointBlock, order: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Pack identifiers and attributes into one array."""
    index = as_arrow(order)
    columns = {"id": block.ids} | {f"a.{name}": a for name, a in block.attributes.items()}
    return pack_columns({name: column.take(index) for name, column in columns.items()})


def pack_columns(
    columns: Mapping[str, pa.Array], metadata: dict[str, str] | None = None
) -> NDArray[np.uint8]:
    """Write columns into an Arrow stream."""
    fields = [(name, column.type) for name, column in columns.items()]
    schema = pa.schema(fields, metadata=metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
    return np.frombuffer(sink.getvalue(), np.uint8)


def unpack_columns(stream: NDArray[np.uint8]) -> pa.RecordBatch:
    """Invert :func:`pack_columns`, without a copy."""
    return pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch()


@dataclass(frozen=True, eq=False)
class WindowSegment:
    """Points of one machine and batch; a row number is an index into its arrays.

    Partition ``partition_ids[k]`` has rows ``partition_starts[k]`` to ``partition_starts[k + 1]``.
    """

    x: Floats
    y: Floats
    time: Ints
    zone_boxes: Floats
    zone_times: Ints
    partition_ids: Ints
    partition_starts: Ints
    _cells: NDArray[np.int32]
    _cell_counts: Ints
    _space: NDArray[np.uint8]
    _columns: NDArray[np.uint8]
    _aliases: NDArray[np.uint8]

    @classmethod
    def open(cls, arrays: Mapping[str, NDArray[Any]]) -> WindowSegment:
        """Open the arrays of :func:`build`, mapped or in memory, without copying them."""
        return cls(*(arrays[name] for name in STORED))

    @property
    def size(self) -> int:
        """Number of points."""
        return int(self.x.size)

    @property
    def counts(self) -> CellCounts:
        """Points by cell of the plan's grid; statistics subtract them on expiry."""
        return CellCounts(self._cells, self._cell_counts)

    @cached_property
    def space(self) -> Space:
        """Bounds and coordinates of the points."""
        return Space.from_json(json.loads(self._space.tobytes()))

    @property
    def lonlat(self) -> bool:
        """Whether coordinates are degrees."""
        return self.space.coordinates is Coordinates.LONLAT

    @cached_property
    def _batch(self) -> pa.RecordBatch:
        return unpack_columns(self._columns)

    @property
    def ids(self) -> pa.Array:
        """Identifier of each point."""
        return self._batch.column(0)

    @cached_property
    def attributes(self) -> dict[str, pa.Array]:
        """Attributes by name."""
        names = self._batch.schema.names[1:]
        stored = {name[2:]: self._batch.column(k) for k, name in enumerate(names, 1)}
        aliases = json.loads(self._aliases.tobytes())
        return stored | {name: self._same_as(Alias(alias)) for name, alias in aliases.items()}

    def _same_as(self, alias: Alias) -> pa.Array:
        if alias is Alias.ID:
            return self.ids
        if alias in (Alias.X, Alias.Y):
            return as_arrow(self.x if alias is Alias.X else self.y)
        time = as_arrow(self.time)
        return time if alias is Alias.NUMBER else time.cast(TIMESTAMP)

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the attributes."""
        return pa.schema([(name, array.type) for name, array in self.attributes.items()])

    def pieces(self, partition_ids: Collection[int] | None = None) -> Ints:
        """Return the rows of some partitions, or of all, as pieces; see :func:`cut_runs`."""
        if partition_ids is None:
            return cut_runs(np.zeros(1, np.int64), np.array([self.size]))
        requested = np.fromiter(partition_ids, np.int64, len(partition_ids))
        mine = np.flatnonzero(np.isin(self.partition_ids, requested))
        return cut_runs(self.partition_starts[mine], self.partition_starts[mine + 1])

    def rows_in(
        self,
        bounds: Bounds,
        time_after: int | None = None,
        partition_ids: Collection[int] | None = None,
    ) -> Rows:
        """Return the rows in a closed box, ascending.

        Only rows with an event time greater than ``time_after``, and only those of some partitions.
        """
        since = first_time(time_after)
        if since is None:
            return np.empty(0, np.int64)
        pieces = self.pieces(partition_ids)
        x0, y0, x1, y1 = map(float, bounds)
        zones = ZoneMaps(self.zone_boxes, self.zone_times)
        points = PointColumns(self.x, self.y, self.time)
        return _find_rows(points, zones, pieces, x0, y0, x1, y1, np.int64(since))

    def take(self, rows: Rows, names: Collection[str] | None = None) -> PointBlock:
        """Return the points of some rows, with some attributes or all."""
        index = as_arrow(rows)
        columns = self.attributes if names is None else {n: self.attributes[n] for n in names}
        attributes = {name: array.take(index) for name, array in columns.items()}
        ids = self.ids.take(index)
        return PointBlock(self.x[rows], self.y[rows], self.time[rows], ids, attributes)


def first_time(time_after: int | None) -> int | None:
    """Return the least event time after another; None if there is none."""
    if time_after is None or time_after < TIME_MIN:
        return TIME_MIN
    return time_after + 1 if time_after < TIME_MAX else None
