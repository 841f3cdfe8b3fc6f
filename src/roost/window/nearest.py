"""k nearest neighbours: the k rows of a segment that are nearest to a point.

Zones are visited by the minimum distance of their boxes, a few at first and then twice as many each
time, until the k-th row found is nearer than the next zone. On lon/lat the minimum distance is
measured on the sphere, so boxes beyond the antimeridian or across a pole are handled correctly.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from roost.kernel.cells import Whole
from roost.kernel.shapes import half_arc
from roost.model.arrays import Floats, Ints, as_arrow
from roost.window.distance import apart, arc_m
from roost.window.evaluate import ALL, Live, on_live_side, satisfying
from roost.window.segment import PointColumns, Rows, WindowSegment, first_time

ZONES_AT_FIRST = 4
# Rounding error of a haversine; a zone is skipped only if it is farther by more.
ARC_SLACK = 1e-14
ARC_MARGIN = 1e-12
DEGREE_SLACK = 1e-9


@njit(cache=True, nogil=True)
def _least_arc(
    lon: float, lat: float, x0: float, y0: float, x1: float, y1: float
) -> float:  # pragma: no cover - compiled
    """Return a lower bound of the haversine between a point and the points of a box."""
    offset = (lon - x0) % 360.0
    width = x1 - x0
    if offset <= width + DEGREE_SLACK or offset >= 360.0 - DEGREE_SLACK:
        if y0 <= lat <= y1:
            return 0.0
        return half_arc(0.0, lat, 0.0, y0 if lat < y0 else y1)
    # On each parallel, the nearest point lies on the nearer side of the box.
    apart = min(offset - width, 360.0 - offset)
    arc = min(half_arc(0.0, lat, apart, y0), half_arc(0.0, lat, apart, y1))
    phi, turn = math.radians(lat), math.radians(apart)
    ahead = math.cos(phi) * math.cos(turn)
    if ahead > 0.0:
        # Foot of the great circle that is perpendicular to the side.
        foot = math.degrees(math.atan2(math.sin(phi), ahead))
        if y0 - DEGREE_SLACK <= foot <= y1 + DEGREE_SLACK:
            half = math.sin(math.asin(math.cos(phi) * math.sin(turn)) / 2.0)
            arc = min(arc, half * half)
    return arc


@njit(cache=True, nogil=True)
def _reaches(
    pieces: Ints, boxes: Floats, x: float, y: float, lonlat: bool
) -> Floats:  # pragma: no cover - compiled
    """Return a lower bound of the distance to the rows of each piece."""
    reaches = np.empty(pieces.shape[0])
    for k in range(pieces.shape[0]):
        box = boxes[pieces[k, 2]]
        if lonlat:
            arc = _least_arc(x, y, box[0], box[1], box[2], box[3])
            reaches[k] = arc_m(arc * (1.0 - ARC_MARGIN) - ARC_SLACK)
        else:
            # Rounding is monotone here, so no slack is needed.
            dx = max(box[0] - x, x - box[2], 0.0)
            dy = max(box[1] - y, y - box[3], 0.0)
            reaches[k] = math.sqrt(dx * dx + dy * dy)
    return reaches


@njit(cache=True, nogil=True)
def _measure(
    points: PointColumns,
    pieces: Ints,
    x: float,
    y: float,
    lonlat: bool,
    since: Whole,
    at_most: float,
) -> tuple[Floats, Ints]:  # pragma: no cover - compiled
    """Return distances and rows that are near enough and not older than ``since``."""
    px, py, time = points
    room = 0
    for k in range(pieces.shape[0]):
        room += pieces[k, 1] - pieces[k, 0]
    distances = np.empty(room)
    rows = np.empty(room, np.int64)
    found = 0
    for k in range(pieces.shape[0]):
        for row in range(pieces[k, 0], pieces[k, 1]):
            if time[row] < since:
                continue
            distance = apart(x, y, px[row], py[row], lonlat)
            if distance <= at_most:
                distances[found] = distance
                rows[found] = row
                found += 1
    return distances[:found], rows[:found]


def nearest(
    segment: WindowSegment,
    x: float,
    y: float,
    k: int,
    live: Live = ALL,
    predicate: str | None = None,
    partition_ids: Collection[int] | None = None,
    at_most: float = math.inf,
) -> tuple[Floats, Rows]:
    """Find the ``k`` rows nearest to a point, ordered by distance and then identifier.

    Doubles are metres on lon/lat, coordinate units on a plane. If ``at_most`` is the k-th
    distance of another segment, most of this one is skipped. ``partition_ids`` None selects all.
    """
    since = first_time(live.time_after)
    distances, rows = np.empty(0), np.empty(0, np.int64)
    if since is None or k < 1:
        return distances, rows
    place = (float(x), float(y), segment.lonlat)
    pieces = segment.pieces(partition_ids)
    pieces = pieces[segment.zone_times[pieces[:, 2], 1] >= since]
    reaches = _reaches(pieces, segment.zone_boxes, *place)
    order = np.argsort(reaches, kind="stable")
    pieces, reaches = pieces[order], reaches[order]
    points = PointColumns(segment.x, segment.y, segment.time)
    begin, step = 0, ZONES_AT_FIRST
    limit = float(at_most)
    while begin < reaches.size and reaches[begin] <= limit:
        end = min(begin + step, int(np.searchsorted(reaches, limit, side="right")))
        near, found = _measure(points, pieces[begin:end], *place, np.int64(since), limit)
        near, found = _live_matches(segment, near, found, live, predicate)
        distances, rows = np.concatenate([distances, near]), np.concatenate([rows, found])
        if rows.size >= k:
            limit = float(np.partition(distances, k - 1)[k - 1])
            kept = distances <= limit
            distances, rows = distances[kept], rows[kept]
        begin, step = end, 2 * step
    order = ranked(distances, segment.ids.take(as_arrow(rows)))[:k]
    return distances[order], rows[order]


def _live_matches(
    segment: WindowSegment, distances: Floats, rows: Rows, live: Live, predicate: str | None
) -> tuple[Floats, Rows]:
    if live.line is None and predicate is None:
        return distances, rows
    order = np.argsort(rows)  # rows are unique, so a kept row is found by binary search
    kept = satisfying(segment, on_live_side(segment, rows[order], live), predicate)
    places = order[np.searchsorted(rows[order], kept)]
    return distances[places], kept


def ranked(distances: Floats, ids: pa.Array) -> Ints:
    """Return the stable order by distance and then identifier."""
    table = pa.table({"distance": as_arrow(distances), "id": ids})
    keys = [("distance", "ascending"), ("id", "ascending")]
    return np.asarray(pc.sort_indices(table, sort_keys=keys), np.int64)
