"""Snapshot queries: queries on the current window, independent of Spark.

A snapshot query reads the partitions of the present plan that its shape overlaps, and their
ancestors, if they have points in the window. Each segment file with such a partition is one scan,
which reads the zones that the shape overlaps. The results of the scans are merged.
:mod:`roost.engine.snapshot` runs the scans in Spark tasks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from roost.errors import StateError
from roost.model.arrays import Ints
from roost.model.columns import one_array
from roost.model.records import TIME_MIN, Box, Circle, Instant, Polygon, Query
from roost.model.schemas import TIMESTAMP
from roost.model.space import Space
from roost.window.aggregate import AggregateSpec, State, finish, merge, partial
from roost.window.evaluate import Live, select, shape_bounds, time_of
from roost.window.nearest import ZONES_AT_FIRST, nearest, ranked
from roost.window.segment import ZONE_ROWS, Bounds, WindowSegment
from roost.window.view import WindowFile, WindowFiles, WindowView
from roost.workload.cells import query_ranges

EVERYWHERE = Box(-math.inf, -math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class SnapshotQuery:
    """A query on the current window.

    ``shape`` None searches everywhere, ``predicate`` is a condition on the attributes (see
    ``docs/queries.md``), and event times are in ``[since, until)``. With ``aggregate``, the result
    is one row instead of the points. With ``nearest``, it is only this many points, those nearest
    to the centre of the shape, which must be a circle; an infinite radius does not limit the
    distance. The guard counts the query for its user, and refuses it if the user is blocked.
    """

    shape: Box | Circle | Polygon | None = None
    predicate: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    aggregate: AggregateSpec | None = None
    nearest: int | None = None
    user_id: str = "local"

    @property
    def selection(self) -> Query:
        """The continuous query that matches the same points."""
        shape = EVERYWHERE if self.shape is None else self.shape
        return Query("", shape, "", self.predicate, self.since, self.until)


@dataclass(frozen=True)
class Columns:
    """Names and types of the points' columns.

    ``x``, ``y``, ``time`` and ``point_id`` are their names in the source. ``attributes`` has all
    attributes that the window stores, including those that duplicate one of the four.
    """

    x: str
    y: str
    time: str
    point_id: str
    id_type: pa.DataType
    time_type: pa.DataType
    attributes: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """Columns of points in a result."""
        own = [
            (self.point_id, self.id_type),
            (self.time, self.time_type),
            (self.x, pa.float64()),
            (self.y, pa.float64()),
        ]
        return pa.schema([*own, *(self.attributes.field(name) for name in self.others)])

    @property
    def at_batch(self) -> str:
        """Name of the column with the batch whose window was read."""
        return free_name("at_batch", self.schema.names)

    @property
    def distance(self) -> str:
        """Name of the column with the distances of the nearest points."""
        return free_name("distance", self.schema.names)

    @property
    def others(self) -> list[str]:
        """Attributes that duplicate none of the four."""
        own = (self.x, self.y, self.time, self.point_id)
        return [name for name in self.attributes.names if name not in own]


def free_name(name: str, taken: Collection[str]) -> str:
    """Append underscores to a name until no column has it."""
    while name in taken:
        name += "_"
    return name


@dataclass(frozen=True, slots=True)
class SegmentScan:
    """The part of a snapshot query that reads one segment file.

    ``likely`` is the estimated number of points to read, ``partitions`` those of the file to read
    (None: all).
    """

    file: str
    likely: int
    live: Live
    partitions: tuple[int, ...] | None


def plan_scans(
    view: WindowView, files: WindowFiles, space: Space, query: SnapshotQuery
) -> list[SegmentScan]:
    """Return the scans of a query on the window."""
    boxes = _boxes(query, space)
    needed_ids = None if boxes is None else _partitions(view, boxes, space)
    after = view.extent.time_after
    since = TIME_MIN if after is None else after + 1
    if query.since is not None:
        since = max(since, time_of(query.since))
    until = math.inf if query.until is None else time_of(query.until)
    scans = []
    for batch in view.live():
        needed = [
            (k, file)
            for k, file in enumerate(batch.files)
            if file.time_max >= since
            and file.time_min < until
            and _touches(file, boxes, needed_ids)
        ]
        lives = view.lives(batch, files) if needed else []
        for k, file in needed:
            likely = _likely(file, boxes, query.nearest)
            scans.append(SegmentScan(file.file, likely, lives[k], _own(file, needed_ids)))
    return scans


def _boxes(query: SnapshotQuery, space: Space) -> list[Bounds] | None:
    """Return boxes around the area of a query, None if it is unbounded."""
    shape = query.shape
    if shape is None or (isinstance(shape, Circle) and math.isinf(shape.radius)):
        return None
    return shape_bounds(shape, space)


def _partitions(view: WindowView, boxes: list[Bounds], space: Space) -> set[int]:
    live = view.live_partitions()
    found: set[int] = set()
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    for column0, row0, column1, row1 in query_ranges(space.grid, corners).tolist():
        cells = (column0, row0, column1, row1)
        found |= view.lineage.needed(view.lineage.present_in(cells), live, cells)
    return found


def _touches(file: WindowFile, boxes: list[Bounds] | None, needed_ids: set[int] | None) -> bool:
    if boxes is None or needed_ids is None:
        return True
    if needed_ids.isdisjoint(file.partitions):
        return False
    x0, y0, x1, y1 = file.bounds
    return any(
        left <= x1 and right >= x0 and low <= y1 and high >= y0 for left, low, right, high in boxes
    )


def _likely(file: WindowFile, boxes: list[Bounds] | None, k: int | None) -> int:
    """Estimate how many points of a file are read, assuming a uniform distribution."""
    if k is not None:
        # Zones are read by distance, until k points are found.
        return min(file.points, k + ZONES_AT_FIRST * ZONE_ROWS)
    if boxes is None:
        return file.points
    x0, y0, x1, y1 = file.bounds
    share = 0.0
    for left, low, right, high in boxes:
        wide = (min(right, x1) - max(left, x0)) / (x1 - x0) if x1 > x0 else 1.0
        tall = (min(high, y1) - max(low, y0)) / (y1 - y0) if y1 > y0 else 1.0
        share += max(wide, 0.0) * max(tall, 0.0)
    return 1 + int(file.points * min(share, 1.0))


def _own(file: WindowFile, needed_ids: set[int] | None) -> tuple[int, ...] | None:
    if needed_ids is None:
        return None
    own = tuple(number for number in file.partitions if number in needed_ids)
    return None if len(own) == len(file.partitions) else own


def run_scans(
    query: SnapshotQuery, columns: Columns, scans: Sequence[SegmentScan], files: WindowFiles
) -> State | pa.Table:
    """Run some scans of a query; :func:`merge_results` merges their results."""
    if query.nearest is not None:
        return _near(query, columns, scans, files)
    selection = query.selection
    states, batches = [], []
    for scan in scans:
        segment = files.segment(scan.file)
        rows = select(segment, selection, scan.live, scan.partitions)
        if not rows.size:
            continue
        if query.aggregate is not None:
            states.append(partial(segment, rows, query.aggregate))
        else:
            arrays = _taken(segment, rows, columns)
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=columns.schema))
    if query.aggregate is not None:
        return merge([State(query.aggregate, {}), *states])
    return pa.Table.from_batches(batches, columns.schema)


def points_schema(query: SnapshotQuery, columns: Columns) -> pa.Schema:
    """Return the columns of the points in a query's result."""
    schema = columns.schema
    return schema.append(pa.field(columns.distance, pa.float64())) if query.nearest else schema


def _taken(segment: WindowSegment, rows: Ints, columns: Columns) -> list[pa.Array]:
    block = segment.take(rows, columns.others)
    time = pa.array(block.time).cast(columns.time_type)
    return [block.ids, time, pa.array(block.x), pa.array(block.y), *block.attributes.values()]


def _near(
    query: SnapshotQuery, columns: Columns, scans: Iterable[SegmentScan], files: WindowFiles
) -> pa.Table:
    circle, k = query.shape, query.nearest
    assert isinstance(circle, Circle) and k is not None
    schema = points_schema(query, columns)
    best: pa.Table = schema.empty_table()
    limit = circle.radius
    for scan in scans:
        segment = files.segment(scan.file)
        distances, rows = nearest(
            segment, circle.cx, circle.cy, k, scan.live, query.predicate, scan.partitions, limit
        )
        if rows.size:
            arrays = [*_taken(segment, rows, columns), pa.array(distances)]
            best = _nearest_of([best, pa.table(arrays, schema=schema)], k, columns)
            if best.num_rows == k:
                limit = min(limit, best[columns.distance][k - 1].as_py())
    return best


def _nearest_of(tables: Sequence[pa.Table], k: int, columns: Columns) -> pa.Table:
    joined = pa.concat_tables(tables).combine_chunks()
    if not joined.num_rows:
        return joined
    distances = np.asarray(joined[columns.distance].to_numpy())
    return joined.take(pa.array(ranked(distances, one_array(joined[columns.point_id]))[:k]))


def merge_results(
    query: SnapshotQuery, columns: Columns, results: Sequence[State | pa.Table], batch_id: int
) -> pa.Table:
    """Merge the results of scans, and add the batch whose window was read."""
    if query.aggregate is not None:
        states = [result for result in results if isinstance(result, State)]
        values = finish(merge([State(query.aggregate, {}), *states]))
        schema = _aggregate_schema(query.aggregate, columns)
        arrays = [_one(name, value, schema.field(name).type) for name, value in values.items()]
        table = pa.table(arrays, schema=schema)
    else:
        tables = [result for result in results if isinstance(result, pa.Table)]
        table = pa.concat_tables([points_schema(query, columns).empty_table(), *tables])
        if query.nearest is not None:
            table = _nearest_of([table], query.nearest, columns)
    return add_batch(table, columns, batch_id)


def _one(name: str, value: Any, kind: pa.DataType) -> pa.Array:
    try:
        whole = pa.types.is_timestamp(kind) and isinstance(value, int)
        return pa.array([value], pa.int64()).cast(kind) if whole else pa.array([value], kind)
    except (OverflowError, pa.ArrowInvalid) as error:
        raise StateError(f"{name} is {value}, which does not fit into {kind}") from error


def add_batch(table: pa.Table, columns: Columns, batch_id: int) -> pa.Table:
    """Add the column with the batch whose window was read."""
    at = pa.array(np.full(table.num_rows, batch_id, np.int64))
    return table.add_column(0, columns.at_batch, at)


def _aggregate_schema(spec: AggregateSpec, columns: Columns) -> pa.Schema:
    schema = spec.result_schema(columns.attributes, columns.id_type)
    if columns.time_type != TIMESTAMP or "time" in columns.attributes.names:
        return schema
    for place, (name, column, _) in enumerate(spec.functions):
        if column == "time" and name in ("min", "max"):
            schema = schema.set(place, pa.field(schema.names[place], TIMESTAMP))
    return schema
