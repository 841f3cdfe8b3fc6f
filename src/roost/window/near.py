"""All pairs of points that are near each other in space and time.

Points of one set are sorted by slab of time, row of latitude (or y), and rank by longitude (or
x), all three in one integer. For each point of the other set the few rows and slabs that its
reach touches are searched, each from the first place that can be near. Rows and slabs are as high
as the reach, so three of each are searched at most. They are laid where most points are; all that
lie beyond share the outermost ones, and a few points far away make no row too high.

Which row a coordinate is in is a monotone function of it, and reaches are a little too large
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
CACHED = 1 << 15  # points that a processor's cache holds anyway
RANK_BITS = 32
SAMPLE = 4096  # points by which rows and slabs are laid
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
def _row_of(y: float, origin: float, scale: float, rows: int) -> int:  # pragma: no cover - compiled
    """Which of the rows a coordinate is in; monotone, whatever the rounding."""
    if scale == 0.0:
        return 0
    return int(min(max((y - origin) * scale, 0.0), rows - 1.0))


@njit(cache=True, nogil=True)
def _cells(
    y: Doubles, slabs: Whole, origin: float, scale: float, rows: int
) -> Whole:  # pragma: no cover - compiled
    """Slab and row of each point in one number."""
    cells = np.empty(y.size, np.int64)
    for i in range(y.size):
        cells[i] = slabs[i] * rows + _row_of(y[i], origin, scale, rows)
    return cells


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
    by_rank: Doubles,
    origin: float,
    scale: float,
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
        bottom = _row_of(low_y[i], origin, scale, rows)
        top = _row_of(high_y[i], origin, scale, rows)
        for turn in range(first_turn[i], last_turn[i] + 1):
            begin = np.searchsorted(by_rank, x - beside[i] + 360.0 * turn)
            end = np.searchsorted(by_rank, x + beside[i] + 360.0 * turn, "right")
            if begin == end:
                continue
            for slab in range(first_slab[i], last_slab[i] + 1):
                for row in range(slab * rows + bottom, slab * rows + top + 1):
                    until = (row << RANK_BITS) | end
                    j = np.searchsorted(keys, (row << RANK_BITS) | begin)
                    while j < keys.size and keys[j] < until:
                        if low_t[i] <= bt[j] <= high_t[i] and in_circle(
                            bx[j], by[j], x, y, distance, lonlat
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

    Yields
    ------
    i, j, distances
        Places of each pair in the two sets, in no particular order, and how far it is apart; in
        chunks of about ``CHUNK`` pairs.

    Examples
    --------
    >>> a, b = np.array([0.0, 9.0]), np.array([0.5, 7.0, 9.0])
    >>> times = np.array([10, 20, 30])
    >>> ((i, j, distances),) = near_chunks(a, a, times[:2], b, b, times, 1.0, 10, False)
    >>> i.tolist(), j.tolist()
    ([0, 1], [0, 2])
    """
    if not ax.size or not bx.size:
        return
    reach = reach_of(ay, ay, distance, lonlat)
    low_t, high_t = times_near(at, at, within)
    grid = _rows_over(by, distance, lonlat)
    # Times are compared as distances from the first slab, which fit into unsigned integers.
    start, stop = (int(time) for time in _where_most_are(bt))
    width = np.uint64(max(within, (stop - start) // SLABS_MAX + 1))

    def slabs_of(times: Whole) -> Whole:
        since = np.clip(times, start, stop).view(np.uint64) - np.int64(start).view(np.uint64)
        return (since // width).astype(np.int64)

    first_slab, last_slab = slabs_of(low_t), slabs_of(high_t)
    ax, ay, bx, by = frozen(ax), frozen(ay), frozen(bx), frozen(by)
    by_x = np.argsort(bx)
    ranks = np.empty(bx.size, np.int64)
    ranks[by_x] = np.arange(bx.size)
    # One sort of plain integers brings points in order of slab, row and x.
    keys = np.sort((_cells(by, frozen(slabs_of(bt)), *grid) << RANK_BITS) | ranks)
    by_key = by_x[keys & ((1 << RANK_BITS) - 1)]
    by_rank = bx[by_x]
    turns = turns_near(ax, ax, reach.beside, float(by_rank[0]), float(by_rank[-1]), lonlat)
    order = np.arange(ax.size)
    if bx.size > CACHED:
        # Neighbours one after the other find what they need in the processor's cache.
        order = np.lexsort((ax, _cells(ay, frozen(first_slab), *grid)))
    limits = (*reach, low_t, high_t, first_slab, last_slab, *turns)
    others = (keys, bx[by_key], by[by_key], bt[by_key], by_rank)
    read = (order, ax, ay, *limits, *others)
    asked = (*map(frozen, read), *grid, float(distance), lonlat)
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


def _where_most_are(values: NDArray[Any]) -> tuple[Any, Any]:
    """Tell between which of some values nearly all of them are, from a sample."""
    sample = np.sort(values[:: -(-values.size // SAMPLE)])
    few = sample.size // 100
    return sample[few], sample[-1 - few]


def _rows_over(y: Doubles, distance: float, lonlat: bool) -> tuple[float, float, int]:
    """Lay rows over most points: origin, scale and number."""
    height = math.degrees(distance / EARTH_RADIUS_M) if lonlat else distance
    low, high = (float(value) for value in _where_most_are(y))
    span = high - low
    rows = ROWS_MAX
    if span < height * ROWS_MAX:
        rows = max(int(span / height), 1)
    scale = rows / span if span > 0.0 else 0.0
    # Differences that are too small or too large to be divided leave a single row.
    return low, scale if math.isfinite(scale) else 0.0, rows
