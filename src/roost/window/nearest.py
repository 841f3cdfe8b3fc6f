"""The k rows of a segment that are nearest to a place.

Zones are visited in the order of the least distance that any point of their box can have, a few
at first and then twice as many each time, until the k-th row found is nearer than the next zone.
On lon/lat that least distance is taken along the sphere: a box beyond the antimeridian or on the
other side of a pole is as near as it really is.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from roost.kernel.arrays import as_arrow
from roost.kernel.cells import Whole
from roost.kernel.shapes import half_arc
from roost.space import EARTH_RADIUS_M, Coordinates
from roost.window.evaluate import ALL, Live, on_live_side, satisfying
from roost.window.segment import Rows, WindowSegment, first_time

Distances = NDArray[np.float64]

ZONES_AT_FIRST = 4
# How much a haversine may be off by rounding; a zone is only left out if it is farther by more.
ARC_SLACK = 1e-14
ARC_MARGIN = 1e-12
DEGREE_SLACK = 1e-9


@njit(cache=True, nogil=True)
def _arc_m(arc: float) -> float:  # pragma: no cover - compiled
    """Metres along the sphere from a haversine."""
    return 2.0 * EARTH_RADIUS_M * math.asin(math.sqrt(min(max(arc, 0.0), 1.0)))


@njit(cache=True, nogil=True)
def _least_arc(
    lon: float, lat: float, x0: float, y0: float, x1: float, y1: float
) -> float:  # pragma: no cover - compiled
    """Haversine that no point of a box is nearer than."""
    offset = (lon - x0) % 360.0
    width = x1 - x0
    if offset <= width + DEGREE_SLACK or offset >= 360.0 - DEGREE_SLACK:
        if y0 <= lat <= y1:
            return 0.0
        return half_arc(0.0, lat, 0.0, y0 if lat < y0 else y1)
    # On each parallel the nearest point is on the nearer side of the box.
    apart = min(offset - width, 360.0 - offset)
    arc = min(half_arc(0.0, lat, apart, y0), half_arc(0.0, lat, apart, y1))
    phi, turn = math.radians(lat), math.radians(apart)
    ahead = math.cos(phi) * math.cos(turn)
    if ahead > 0.0:
        # The great circle that meets the side at a right angle.
        foot = math.degrees(math.atan2(math.sin(phi), ahead))
        if y0 - DEGREE_SLACK <= foot <= y1 + DEGREE_SLACK:
            half = math.sin(math.asin(math.cos(phi) * math.sin(turn)) / 2.0)
            arc = min(arc, half * half)
    return arc


@njit(cache=True, nogil=True)
def _reaches(
    pieces: NDArray[np.int64], boxes: NDArray[np.float64], x: float, y: float, lonlat: bool
) -> NDArray[np.float64]:  # pragma: no cover - compiled
    """Distance that no row of each piece is nearer than."""
    reaches = np.empty(pieces.shape[0])
    for k in range(pieces.shape[0]):
        box = boxes[pieces[k, 2]]
        if lonlat:
            arc = _least_arc(x, y, box[0], box[1], box[2], box[3])
            reaches[k] = _arc_m(arc * (1.0 - ARC_MARGIN) - ARC_SLACK)
        else:
            # Rounding keeps the order of these sums, so no slack is needed.
            dx = max(box[0] - x, x - box[2], 0.0)
            dy = max(box[1] - y, y - box[3], 0.0)
            reaches[k] = math.sqrt(dx * dx + dy * dy)
    return reaches


@njit(cache=True, nogil=True)
def _measure(
    px: NDArray[np.float64],
    py: NDArray[np.float64],
    time: NDArray[np.int64],
    pieces: NDArray[np.int64],
    x: float,
    y: float,
    lonlat: bool,
    since: Whole,
    at_most: float,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:  # pragma: no cover - compiled
    """Rows of some pieces that are near and young enough, with their distances."""
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
            if lonlat:
                distance = _arc_m(half_arc(x, y, px[row], py[row]))
            else:
                dx = px[row] - x
                dy = py[row] - y
                distance = math.sqrt(dx * dx + dy * dy)
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
) -> tuple[Distances, Rows]:
    """Find the nearest rows, nearest first and then by identifier.

    Parameters
    ----------
    segment
        Where to look.
    x, y
        The place.
    k
        How many rows at most.
    live
        What of the segment is in the window.
    predicate
        Condition on the attributes.
    partition_ids
        Only rows of these partitions; None takes all.
    at_most
        Only rows that are not farther: with the k-th distance of other segments, most of this
        one need not be looked at.

    Returns
    -------
    distances, rows
        Metres on lon/lat and plain units on a plane, and the rows.
    """
    since = first_time(live.time_after)
    distances, rows = np.empty(0), np.empty(0, np.int64)
    if since is None or k < 1:
        return distances, rows
    lonlat = segment.space.coordinates is Coordinates.LONLAT
    place = (float(x), float(y), lonlat)
    pieces = segment.pieces(partition_ids)
    pieces = pieces[segment.zone_times[pieces[:, 2], 1] >= since]
    reaches = _reaches(pieces, segment.zone_boxes, *place)
    order = np.argsort(reaches, kind="stable")
    pieces, reaches = pieces[order], reaches[order]
    columns = (segment.x, segment.y, segment.time)
    begin, step = 0, ZONES_AT_FIRST
    limit = float(at_most)
    while begin < reaches.size and reaches[begin] <= limit:
        end = min(begin + step, int(np.searchsorted(reaches, limit, side="right")))
        near, found = _measure(*columns, pieces[begin:end], *place, np.int64(since), limit)
        near, found = _wanted(segment, near, found, live, predicate)
        distances, rows = np.concatenate([distances, near]), np.concatenate([rows, found])
        if rows.size >= k:
            limit = float(np.partition(distances, k - 1)[k - 1])
            kept = distances <= limit
            distances, rows = distances[kept], rows[kept]
        begin, step = end, 2 * step
    order = ranked(distances, segment.ids.take(as_arrow(rows)))[:k]
    return distances[order], rows[order]


def _wanted(
    segment: WindowSegment, distances: Distances, rows: Rows, live: Live, predicate: str | None
) -> tuple[Distances, Rows]:
    if live.line is None and predicate is None:
        return distances, rows
    order = np.argsort(rows)  # rows are unique, so a kept row is found again by its place
    kept = satisfying(segment, on_live_side(segment, rows[order], live), predicate)
    places = order[np.searchsorted(rows[order], kept)]
    return distances[places], kept


def ranked(distances: Distances, ids: pa.Array) -> NDArray[np.int64]:
    """Order by distance and then identifier; what is alike in both stays as it is."""
    table = pa.table({"distance": as_arrow(distances), "id": ids})
    keys = [("distance", "ascending"), ("id", "ascending")]
    return np.asarray(pc.sort_indices(table, sort_keys=keys), np.int64)
