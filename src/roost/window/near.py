"""Distance join in space and time: all pairs of points within a distance and a time.

The points of one set are sorted by time slab, row of latitude (or y), and rank by longitude (or x),
packed into one integer. For each point of the other set, only the rows and slabs within its reach
are searched, by binary search on x. Rows and slabs are as high as the reach, so at most three of
each are searched. They cover the range of most points; outliers share the outermost ones.

The row is a monotone function of the coordinate, and reaches are rounded up. So no pair is missed,
and the circle test of the kernel decides the rest, also across the antimeridian and at the poles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.shapes import in_circle
from roost.model.arrays import Floats, Ints, frozen
from roost.model.records import TIME_MAX, TIME_MIN
from roost.model.space import EARTH_RADIUS_M
from roost.window.distance import apart
from roost.window.segment import PointColumns

CHUNK = 1 << 18  # pairs in a chunk
ROWS_MAX = 1 << 19
SLABS_MAX = 1 << 12
CACHED = 1 << 15  # points that fit into the processor's cache in any order
RANK_BITS = 32
SAMPLE = 4096  # points by which rows and slabs are chosen
# The square of a smaller distance underflows to 0: points this near are in any circle on a plane.
UNDERFLOW = 1e-161
# Nearly around the earth, rounding moves a circle's edge by metres; then no latitude is excluded.
ANGLE_MAX = 3.0
# The images of a wider range, 360 degrees apart, might overlap.
LONGITUDE_REACH_MAX = 179.9
TURN_SLACK = 1e-6


class Reach(NamedTuple):
    """Range of latitudes (or y) and half-width in longitude (or x) where near points can be."""

    low: Floats
    high: Floats
    beside: Floats


class RowGrid(NamedTuple):
    """Rows of equal height over most points."""

    origin: float
    scale: float
    rows: int


class _Probes(NamedTuple):
    """Points to find neighbours of, in the order in which they are processed."""

    order: Ints
    x: Floats
    y: Floats


class _SearchLimits(NamedTuple):
    """Where neighbours of each probe can be: coordinates, times, slabs and turns (inclusive)."""

    low_y: Floats
    high_y: Floats
    beside: Floats
    low_time: Ints
    high_time: Ints
    first_slab: Ints
    last_slab: Ints
    first_turn: Ints
    last_turn: Ints


class _SortedTargets(NamedTuple):
    """The other set, sorted by key; ``x_by_rank`` has its sorted x coordinates."""

    keys: Ints
    x: Floats
    y: Floats
    time: Ints
    x_by_rank: Floats


class _PairsOut(NamedTuple):
    probe: Ints
    target: Ints
    distance: Floats


def reach_of(y0: Floats, y1: Floats, distance: float, lonlat: bool) -> Reach:
    """Return where points within a distance of ranges of latitudes (or y) can be."""
    if not lonlat:
        reach = distance * (1.0 + 1e-12) + UNDERFLOW
        if math.isinf(distance * distance):
            reach = math.inf
        return Reach(y0 - reach, y1 + reach, np.full(y0.size, reach))
    angle = distance / EARTH_RADIUS_M * (1.0 + 1e-9) + 1e-12
    degrees = math.degrees(angle)
    low, high = y0 - degrees, y1 + degrees
    # Near a pole, or if nearly everything is near, every longitude is.
    around = (low <= -90.0) | (high >= 90.0) | (angle > ANGLE_MAX)
    narrowest = np.cos(np.radians(np.maximum(np.abs(y0), np.abs(y1))))
    sine = np.minimum(math.sin(min(angle, math.pi / 2)) / np.maximum(narrowest, 1e-300), 1.0)
    beside = np.degrees(np.arcsin(sine)) * (1.0 + 1e-9) + 1e-9
    around |= beside > LONGITUDE_REACH_MAX
    if angle > ANGLE_MAX:
        low, high = np.full(y0.size, -math.inf), np.full(y0.size, math.inf)
    return Reach(low, high, np.where(around, math.inf, beside))


def times_near(first: Ints, last: Ints, within: int) -> tuple[Ints, Ints]:
    """Return the range of event times within a time of ``first`` to ``last``."""
    low = np.where(first < TIME_MIN + within, TIME_MIN, first - within)
    high = np.where(last > TIME_MAX - within, TIME_MAX, last + within)
    return low, high


def _turns_near(
    x: Floats, beside: Floats, left: float, right: float, lonlat: bool
) -> tuple[Ints, Ints]:
    """Return by how many turns of 360 degrees longitudes reach ``left`` to ``right``."""
    if not lonlat:
        none = np.zeros(x.size, np.int64)
        return none, none
    around = np.isinf(beside)
    reach = np.where(around, 0.0, beside)
    first = np.where(around, 0.0, np.ceil((left - x - reach) / 360.0 - TURN_SLACK))
    last = np.where(around, 0.0, np.floor((right - x + reach) / 360.0 + TURN_SLACK))
    return first.astype(np.int64), last.astype(np.int64)


@njit(cache=True, nogil=True)
def _row_of(y: float, grid: RowGrid) -> int:  # pragma: no cover - compiled
    """Return the row of a coordinate; monotone in spite of rounding."""
    if grid.scale == 0.0:
        return 0
    return int(min(max((y - grid.origin) * grid.scale, 0.0), grid.rows - 1.0))


@njit(cache=True, nogil=True)
def _cells(y: Floats, slabs: Ints, grid: RowGrid) -> Ints:  # pragma: no cover - compiled
    """Return slab and row of each point as one number."""
    cells = np.empty(y.size, np.int64)
    for i in range(y.size):
        cells[i] = slabs[i] * grid.rows + _row_of(y[i], grid)
    return cells


@njit(cache=True, nogil=True)
def _sweep(
    first: int,
    probes: _Probes,
    limits: _SearchLimits,
    targets: _SortedTargets,
    grid: RowGrid,
    distance: float,
    lonlat: bool,
    out: _PairsOut,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Find pairs from the ``first`` probe on until ``out`` is full.

    Returns the next probe and the number of pairs found.
    """
    # Fields are read once: inside the loops, each access would cost a reference count.
    order, ax, ay = probes
    low_y, high_y, beside, low_t, high_t, first_slab, last_slab, first_turn, last_turn = limits
    keys, bx, by, bt, by_rank = targets
    out_a, out_b, out_distance = out
    rows = grid.rows
    found = 0
    for place in range(first, order.size):
        i = order[place]
        before = found
        x, y = ax[i], ay[i]
        bottom, top = _row_of(low_y[i], grid), _row_of(high_y[i], grid)
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
    one: PointColumns, other: PointColumns, distance: float, within: int, lonlat: bool
) -> Iterator[tuple[Ints, Ints, Floats]]:
    """Find all pairs of points within a distance and a time of each other, inclusive.

    Yields chunks of about ``CHUNK`` pairs, in no particular order: the indices into the two sets,
    and the distances (metres on lon/lat, coordinate units on a plane).
    """
    ax, ay, at = one
    bx, by, bt = other
    if not ax.size or not bx.size:
        return
    reach = reach_of(ay, ay, distance, lonlat)
    low_t, high_t = times_near(at, at, within)
    grid = _rows_over(by, distance, lonlat)
    # Times are measured from the first slab, so that differences fit into unsigned integers.
    start, stop = (int(time) for time in _central_range(bt))
    width = np.uint64(max(within, (stop - start) // SLABS_MAX + 1))

    def slabs_of(times: Ints) -> Ints:
        since = np.clip(times, start, stop).view(np.uint64) - np.int64(start).view(np.uint64)
        return (since // width).astype(np.int64)

    first_slab, last_slab = slabs_of(low_t), slabs_of(high_t)
    ax, ay, bx, by = frozen(ax), frozen(ay), frozen(bx), frozen(by)
    by_x = np.argsort(bx)
    ranks = np.empty(bx.size, np.int64)
    ranks[by_x] = np.arange(bx.size)
    # One integer sort orders the points by slab, row and x.
    keys = np.sort((_cells(by, frozen(slabs_of(bt)), grid) << RANK_BITS) | ranks)
    by_key = by_x[keys & ((1 << RANK_BITS) - 1)]
    by_rank = bx[by_x]
    turns = _turns_near(ax, reach.beside, float(by_rank[0]), float(by_rank[-1]), lonlat)
    order = np.arange(ax.size)
    if bx.size > CACHED:
        # Probes in spatial order find their targets in the processor's cache.
        order = np.lexsort((ax, _cells(ay, frozen(first_slab), grid)))
    bounds = (*reach, low_t, high_t, first_slab, last_slab, *turns)
    sorted_targets = (keys, bx[by_key], by[by_key], bt[by_key], by_rank)
    probes = _Probes(frozen(order), ax, ay)
    limits = _SearchLimits(*map(frozen, bounds))
    targets = _SortedTargets(*map(frozen, sorted_targets))
    room = CHUNK
    begin = 0
    while begin < order.size:
        out = _PairsOut(np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room))
        last = begin
        begin, found = _sweep(last, probes, limits, targets, grid, float(distance), lonlat, out)
        if found:
            yield out.probe[:found], by_key[out.target[:found]], out.distance[:found]
        elif begin == last:
            room *= 2  # one point has more neighbours than the buffers hold


def _central_range(values: NDArray[Any]) -> tuple[Any, Any]:
    """Return the 1st and 99th percentile of a sample."""
    sample = np.sort(values[:: -(-values.size // SAMPLE)])
    few = sample.size // 100
    return sample[few], sample[-1 - few]


def _rows_over(y: Floats, distance: float, lonlat: bool) -> RowGrid:
    """Divide the range of most points into rows as high as the distance."""
    height = math.degrees(distance / EARTH_RADIUS_M) if lonlat else distance
    low, high = (float(value) for value in _central_range(y))
    span = high - low
    rows = ROWS_MAX
    if span < height * ROWS_MAX:
        rows = max(int(span / height), 1)
    scale = rows / span if span > 0.0 else 0.0
    # A range that is too small or too large to be divided is a single row.
    return RowGrid(low, scale if math.isfinite(scale) else 0.0, rows)
