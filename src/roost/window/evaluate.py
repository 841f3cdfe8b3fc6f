"""Selection of the rows of a segment that are live, inside a shape, and satisfy a predicate.

The tests are those of matching: closed boxes, the compiled circle test, GEOS for polygons,
half-open lifetimes, and the same predicates. A snapshot query finds exactly the points of the
window that a continuous query with the same conditions matched on arrival.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import shapely
from numba import njit

from roost.errors import RequestError
from roost.kernel.segment import circle_images
from roost.kernel.shapes import in_circle
from roost.model.arrays import Floats, Ints, Mask, as_arrow
from roost.model.records import Box, Circle, Instant, Polygon, Query, Reason
from roost.model.space import Space
from roost.predicate import PredicateSet
from roost.window.segment import Bounds, Rows, WindowSegment
from roost.window.spec import Extent

CACHED = 64  # compiled predicates, and polygons
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MICROSECOND = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class CutLine:
    """Boundary of a count window inside a segment.

    Rows with a greater (event time, identifier) are live, and the first ``ties`` rows of those
    with exactly this one.
    """

    time: int
    point_id: int | str
    ties: int


@dataclass(frozen=True, slots=True)
class Live:
    """Limits of the live rows of one segment."""

    time_after: int | None = None
    line: CutLine | None = None


ALL = Live()


def live_parts(extent: Extent, batch_id: int, segments: Sequence[WindowSegment]) -> list[Live]:
    """Return the live rows of each segment of a batch in the extent.

    A count window selects points across all segments of the batch, so a caller passes all of them,
    always in the same order.
    """
    whole = [Live(extent.time_after)] * len(segments)
    if extent.cut is None or extent.cut.batch_id != batch_id:
        return whole
    times = np.concatenate([segment.time for segment in segments])
    keep = extent.cut.keep
    if keep >= times.size:
        return whole
    time = int(np.partition(times, times.size - keep)[times.size - keep])
    left = keep - int(np.count_nonzero(times > time))
    tied = [s.ids.take(as_arrow(np.flatnonzero(s.time == time))) for s in segments]
    ids = pa.concat_arrays(tied)
    order = pc.array_sort_indices(ids, order="descending")
    point_id = ids[order[left - 1].as_py()]
    left -= pc.sum(pc.greater(ids, point_id)).as_py()
    lines = []
    for own in tied:
        same = pc.sum(pc.equal(own, point_id)).as_py() or 0
        lines.append(Live(extent.time_after, CutLine(time, point_id.as_py(), min(same, left))))
        left -= min(same, left)
    return lines


def above_line(segment: WindowSegment, line: CutLine) -> Mask:
    """Return whether each row of a segment is on the live side of a boundary."""
    keep: Mask = segment.time > line.time
    tied = np.flatnonzero(segment.time == line.time)
    ids = segment.ids.take(as_arrow(tied))
    limit = pa.scalar(line.point_id, ids.type)
    keep[tied] = np.asarray(pc.greater(ids, limit))
    keep[tied[np.flatnonzero(np.asarray(pc.equal(ids, limit)))[: line.ties]]] = True
    return keep


def select(
    segment: WindowSegment,
    query: Query,
    live: Live = ALL,
    partition_ids: Collection[int] | None = None,
) -> Rows:
    """Return the live rows that a query matches, ascending; only those of some partitions."""
    rows = _rows_in_shape(segment, query.shape, live.time_after, partition_ids)
    rows = on_live_side(segment, rows, live)
    if query.at is not None:
        rows = rows[segment.time[rows] >= time_of(query.at)]
    if query.expires_at is not None:
        rows = rows[segment.time[rows] < time_of(query.expires_at)]
    return satisfying(segment, rows, query.predicate)


def on_live_side(segment: WindowSegment, rows: Rows, live: Live) -> Rows:
    """Drop rows that a count window excludes."""
    if live.line is None or not rows.size:
        return rows
    return rows[above_line(segment, live.line)[rows]]


def satisfying(segment: WindowSegment, rows: Rows, predicate: str | None) -> Rows:
    """Drop rows for which a predicate is not true."""
    if predicate is None:
        return rows
    compiled = _compiled(predicate, segment.schema)
    if not rows.size:
        return rows
    return rows[compiled.evaluate(np.zeros(rows.size, np.int32), rows, segment.attributes)]


@lru_cache(maxsize=CACHED)
def _compiled(predicate: str, schema: pa.Schema) -> PredicateSet:
    return PredicateSet([predicate], schema)


def time_of(instant: Instant) -> int:
    """Return an event time as a number; a datetime without a time zone is UTC."""
    if isinstance(instant, int):
        return instant
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=dt.UTC)
    return (aware - EPOCH) // MICROSECOND


def shape_bounds(shape: Box | Circle | Polygon, space: Space) -> list[Bounds]:
    """Return boxes that together contain every point of a shape."""
    if isinstance(shape, Box):
        return [(shape.x0, shape.y0, shape.x1, shape.y1)]
    if isinstance(shape, Circle):
        images = circle_images(shape.cx, shape.cy, shape.radius, space)
        return [(x0, y0, x1, y1) for x0, y0, x1, y1 in images]
    return [polygon_of(shape.text).bounds]


@lru_cache(maxsize=CACHED)
def polygon_of(text: str) -> shapely.Geometry:
    """Return the prepared geometry of a polygon; raises `RequestError` if it is none."""
    try:
        read = shapely.from_geojson if text.lstrip().startswith("{") else shapely.from_wkt
        geometry = shapely.force_2d(read(text))
    except (shapely.errors.ShapelyError, ValueError, TypeError):
        raise RequestError(Reason.MALFORMED, "the shape is neither WKT nor GeoJSON") from None
    if geometry.geom_type not in ("Polygon", "MultiPolygon") or geometry.is_empty:
        raise RequestError(Reason.INVALID_POLYGON, f"{geometry.geom_type} is not a polygon")
    shapely.prepare(geometry)
    return geometry


@njit(cache=True, nogil=True)
def _in_circle(
    x: Floats, y: Floats, rows: Ints, cx: float, cy: float, radius: float, lonlat: bool
) -> Mask:  # pragma: no cover - compiled
    inside = np.empty(rows.size, np.bool_)
    for k in range(rows.size):
        inside[k] = in_circle(x[rows[k]], y[rows[k]], cx, cy, radius, lonlat)
    return inside


def _rows_in_shape(
    segment: WindowSegment,
    shape: Box | Circle | Polygon,
    time_after: int | None,
    partition_ids: Collection[int] | None,
) -> Rows:
    found = [
        segment.rows_in(bounds, time_after, partition_ids)
        for bounds in shape_bounds(shape, segment.space)
    ]
    # Images of a circle that reaches around the earth may overlap.
    rows = found[0] if len(found) == 1 else np.unique(np.concatenate([*found, _NO_ROWS]))
    if isinstance(shape, Box) or not rows.size:
        return rows
    if isinstance(shape, Polygon):
        inside = shapely.intersects_xy(polygon_of(shape.text), segment.x[rows], segment.y[rows])
        kept: Rows = rows[np.asarray(inside, bool)]
        return kept
    circle = (float(shape.cx), float(shape.cy), float(shape.radius))
    return rows[_in_circle(segment.x, segment.y, rows, *circle, segment.lonlat)]


_NO_ROWS = np.empty(0, np.int64)
