"""All pairs of points that are near each other in space and time.

Points of one set are sorted by slab of time, row of latitude (or y), and longitude (or x), all
three in one integer. For each point of the other set the few rows and slabs that its reach
touches are searched, each from the first place that can be near. Rows and slabs are as high as
the reach, so three of each are searched at most; points far away, or very many in one place, do
no harm to the order along x.

Which cell a coordinate is in is a monotone function of it, and reaches are a little too large
rather than too small. So no pair is missed, and the circle test of matching decides the rest: on
lon/lat across the antimeridian and around the poles too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.shapes import in_circle
from roost.model import TIME_MAX, TIME_MIN
from roost.space import EARTH_RADIUS_M
from roost.window.distance import apart
from roost.window.grouped_loops import frozen

Whole = NDArray[np.int64]
Doubles = NDArray[np.float64]
Found = tuple[Whole, Whole, Doubles]

CHUNK = 1 << 18  # pairs that are found before they are handed on
ROWS_MAX = 1 << 19
SLABS_MAX = 1 << 12
COLUMN_BITS = 32
COLUMN_MAX = float((1 << COLUMN_BITS) - 1)
# A square that is too small for a double is 0: points this near are in any circle on a plane.
UNDERFLOW = 1e-161
# Nearly around the earth rounding moves a circle's edge by metres; nothing is left out then.
ANGLE_MAX = 3.0
# Images of a range that is wider than this, a turn apart, might overlap.
LONGITUDE_REACH_MAX = 179.9
TURN_SLACK = 1e-6


class Reach(NamedTuple):
    """Where points near some places can be: latitudes from and to, and how far beside."""

    low: Doubles
    high: Doubles
    beside: Doubles


def reach_of(y0: Doubles, y1: Doubles, distance: float, lonlat: bool) -> Reach:
    """Tell how far from places between two latitudes (or y) points within a distance can be."""
    if not lonlat:
        reach = distance * (1.0 + 1e-12) + UNDERFLOW
        if math.isinf(distance * distance):
            reach = math.inf
        return Reach(y0 - reach, y1 + reach, np.full(y0.size, reach))
    angle = distance / EARTH_RADIUS_M * (1.0 + 1e-9) + 1e-12
    degrees = math.degrees(angle)
    low, high = y0 - degrees, y1 + degrees
    # Where a pole is near, or nearly everything, every longitude is.
    around = (low <= -90.0) | (high >= 90.0) | (angle > ANGLE_MAX)
    narrowest = np.cos(np.radians(np.maximum(np.abs(y0), np.abs(y1))))
    sine = np.minimum(math.sin(min(angle, math.pi / 2)) / np.maximum(narrowest, 1e-300), 1.0)
    beside = np.degrees(np.arcsin(sine)) * (1.0 + 1e-9) + 1e-9
    around |= beside > LONGITUDE_REACH_MAX
    if angle > ANGLE_MAX:
        low, high = np.full(y0.size, -math.inf), np.full(y0.size, math.inf)
    return Reach(low, high, np.where(around, math.inf, beside))


def times_near(first: Whole, last: Whole, within: int) -> tuple[Whole, Whole]:
    """Tell from when to when points within a time of some times can be."""
    low = np.where(first < TIME_MIN + within, TIME_MIN, first - within)
    high = np.where(last > TIME_MAX - within, TIME_MAX, last + within)
    return low, high


def turns_near(
    x0: Doubles, x1: Doubles, beside: Doubles, left: float, right: float, lonlat: bool
) -> tuple[Whole, Whole]:
    """Tell how many full turns from ranges of longitudes there are points between two others."""
    if not lonlat:
        none = np.zeros(x0.size, np.int64)
        return none, none
    reach = np.where(np.isinf(beside), 0.0, beside)
    first = np.ceil((left - x1 - reach) / 360.0 - TURN_SLACK)
    last = np.floor((right - x0 + reach) / 360.0 + TURN_SLACK)
    around = np.isinf(beside)
    return (
        np.where(around, 0.0, first).astype(np.int64),
        np.where(around, 0.0, last).astype(np.int64),
    )


@njit(cache=True, nogil=True)
def _cell(
    value: float, origin: float, scale: float, most: float
) -> int:  # pragma: no cover - compiled
    """Which of the cells 0 to ``most`` a coordinate is in; monotone, whatever the rounding."""
    if scale == 0.0:
        return 0
    return int(min(max((value - origin) * scale, 0.0), most))


@njit(cache=True, nogil=True)
def _keys(
    x: Doubles,
    y: Doubles,
    slabs: Whole,
    origin_x: float,
    scale_x: float,
    origin_y: float,
    scale_y: float,
    rows: int,
) -> Whole:  # pragma: no cover - compiled
    keys = np.empty(x.size, np.int64)
    for i in range(x.size):
        row = slabs[i] * rows + _cell(y[i], origin_y, scale_y, rows - 1.0)
        keys[i] = (row << COLUMN_BITS) | _cell(x[i], origin_x, scale_x, COLUMN_MAX)
    return keys


@njit(cache=True, nogil=True)
def _sweep(
    first: int,
    order: Whole,
    ax: Doubles,
    ay: Doubles,
    low_y: Doubles,
    high_y: Doubles,
    beside: Doubles,
    low_t: Whole,
    high_t: Whole,
    first_slab: Whole,
    last_slab: Whole,
    first_turn: Whole,
    last_turn: Whole,
    keys: Whole,
    bx: Doubles,
    by: Doubles,
    bt: Whole,
    origin_x: float,
    scale_x: float,
    origin_y: float,
    scale_y: float,
    rows: int,
    distance: float,
    lonlat: bool,
    out_a: Whole,
    out_b: Whole,
    out_distance: Doubles,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Find pairs from the ``first`` point on until the room is full; returns the next point."""
    found = 0
    for place in range(first, order.size):
        i = order[place]
        before = found
        x, y = ax[i], ay[i]
        bottom = _cell(low_y[i], origin_y, scale_y, rows - 1.0)
        top = _cell(high_y[i], origin_y, scale_y, rows - 1.0)
        for turn in range(first_turn[i], last_turn[i] + 1):
            left = x - beside[i] + 360.0 * turn
            right = x + beside[i] + 360.0 * turn
            begin = _cell(left, origin_x, scale_x, COLUMN_MAX)
            end = _cell(right, origin_x, scale_x, COLUMN_MAX)
            for slab in range(first_slab[i], last_slab[i] + 1):
                for row in range(slab * rows + bottom, slab * rows + top + 1):
                    until = (row << COLUMN_BITS) | end
                    j = np.searchsorted(keys, (row << COLUMN_BITS) | begin)
                    while j < keys.size and keys[j] <= until:
                        # The columns of two turns may share an end; a point is in one of them.
                        if (
                            left <= bx[j] <= right
                            and low_t[i] <= bt[j] <= high_t[i]
                            and in_circle(bx[j], by[j], x, y, distance, lonlat)
                        ):
                            if found == out_a.size:
                                return place, before
                            out_a[found] = i
                            out_b[found] = j
                            out_distance[found] = apart(x, y, bx[j], by[j], lonlat)
                            found += 1
                        j += 1
    return order.size, found


def near_chunks(
    ax: Doubles,
    ay: Doubles,
    at: Whole,
    bx: Doubles,
    by: Doubles,
    bt: Whole,
    distance: float,
    within: int,
    lonlat: bool,
) -> Iterator[Found]:
    """Yield what :func:`near_pairs` finds, in chunks of about ``CHUNK`` pairs."""
    if not ax.size or not bx.size:
        return
    reach = reach_of(ay, ay, distance, lonlat)
    low_t, high_t = times_near(at, at, within)
    grid, rows = _grid(bx, by, distance, lonlat)
    # Times are compared as distances from the first one, which fit into unsigned integers.
    first_time, last_time = int(bt.min()), int(bt.max())
    width = max(within, (last_time - first_time) // SLABS_MAX + 1)

    def slabs_of(times: Whole) -> Whole:
        since = np.clip(times, first_time, last_time).view(np.uint64)
        since = since - np.int64(first_time).view(np.uint64)
        return (since // np.uint64(width)).astype(np.int64)

    first_slab, last_slab = slabs_of(low_t), slabs_of(high_t)
    # A point whose times are all before or after the others has no slab to search.
    last_slab[(high_t < first_time) | (low_t > last_time)] = -1
    ax, ay, bx, by = frozen(ax), frozen(ay), frozen(bx), frozen(by)
    keys = _keys(bx, by, frozen(slabs_of(bt)), *grid, rows)
    by_key = np.argsort(keys)
    left, right = float(bx.min()), float(bx.max())
    first_turn, last_turn = turns_near(ax, ax, reach.beside, left, right, lonlat)
    # Neighbours one after the other find what they need in the processor's cache.
    order = np.argsort(_keys(ax, ay, frozen(first_slab), *grid, rows))
    limits = (*reach, low_t, high_t, first_slab, last_slab, first_turn, last_turn)
    others = (keys[by_key], bx[by_key], by[by_key], bt[by_key])
    fixed = (float(distance), lonlat)
    asked = (frozen(order), ax, ay, *map(frozen, limits), *map(frozen, others), *grid, rows, *fixed)
    room = CHUNK
    begin = 0
    while begin < order.size:
        out = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
        last = begin
        arguments: Any = (last, *asked, *out)
        begin, found = _sweep(*arguments)
        if found:
            yield out[0][:found], by_key[out[1][:found]], out[2][:found]
        elif begin == last:
            room *= 2  # one point has more neighbours than there is room for


def _grid(
    x: Doubles, y: Doubles, distance: float, lonlat: bool
) -> tuple[tuple[float, float, float, float], int]:
    """Origin and scale of columns and rows, and the number of rows."""
    height = math.degrees(distance / EARTH_RADIUS_M) if lonlat else distance
    origin_x, origin_y = float(x.min()), float(y.min())
    wide, high = float(x.max()) - origin_x, float(y.max()) - origin_y
    rows = ROWS_MAX
    if high < height * ROWS_MAX:
        rows = max(int(high / height), 1)
    scale_x = COLUMN_MAX / wide if wide > 0.0 else 0.0
    scale_y = rows / high if high > 0.0 else 0.0
    # Differences that are too small or too large to be divided leave a single cell.
    scale_x = scale_x if math.isfinite(scale_x) else 0.0
    scale_y = scale_y if math.isfinite(scale_y) else 0.0
    return (origin_x, scale_x, origin_y, scale_y), rows


def near_pairs(
    ax: Doubles,
    ay: Doubles,
    at: Whole,
    bx: Doubles,
    by: Doubles,
    bt: Whole,
    distance: float,
    within: int,
    lonlat: bool,
) -> Found:
    """Find all pairs of points within a distance and a time of each other.

    Parameters
    ----------
    ax, ay, at
        Coordinates and event times of one set of points.
    bx, by, bt
        Those of the other.
    distance
        Greatest distance, inclusive: metres on lon/lat, plain units on a plane.
    within
        Greatest difference of event times, inclusive.
    lonlat
        Whether coordinates are degrees.

    Returns
    -------
    i, j, distances
        Places of each pair in the two sets, in no particular order, and how far it is apart.

    Examples
    --------
    >>> a, b = np.array([0.0, 9.0]), np.array([0.5, 7.0, 9.0])
    >>> times = np.array([10, 20, 30])
    >>> i, j, distances = near_pairs(a, a, times[:2], b, b, times, 1.0, 10, False)
    >>> i.tolist(), j.tolist()
    ([0, 1], [0, 2])
    """
    chunks = list(near_chunks(ax, ay, at, bx, by, bt, distance, within, lonlat))
    none = np.empty(0, np.int64)
    i, j, distances = zip(*chunks, strict=True) if chunks else ((none,), (none,), (np.empty(0),))
    return np.concatenate(i), np.concatenate(j), np.concatenate(distances)
