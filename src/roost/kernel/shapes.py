"""Circles and polygons: cells wholly inside, cells on the border, and exact tests for the latter.

A shape is cut along the cells of one level. Most of its area is in cells that lie wholly inside:
a point there matches without a test. In a border cell a circle is tested by distance, a polygon
by counting the crossings of a ray with the few edges in that cell's band of rows.

Crossing tests are filtered: where rounding could change the answer, or the point touches an
edge's end, the pair comes back marked *unsure* and the caller asks GEOS, whose predicates are
exact. So the answer is always that of ``shapely.intersects``, at a fraction of its price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.boxes import directory
from roost.kernel.cells import LEVELS, IndexGrid, find_cell, locate, morton, squeeze
from roost.space import EARTH_RADIUS_M

CIRCLE = 1
POLYGON = 2
SIDE_MAX = 24  # cells along the longer side of a polygon with very many vertices
CIRCLE_SIDE = 4

OUTSIDE, BORDER, INSIDE = 0, 1, 2

# Half the unit round-off times the operations of an orientation determinant, rounded up.
ORIENT_ERROR = 4.0e-16
# Wider than the rounding of the haversine formula; inside this band the formula itself decides.
ARC_MARGIN = 1.0e-9


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes to index. A circle across the antimeridian has several rows (images).

    ``circles`` holds centre and radius (zeros for polygons); polygon ``j`` has the edges
    ``edges[edge_start[j]:edge_start[j + 1]]`` (a circle none); ``bounds`` is what each
    row may cover.
    """

    slots: NDArray[np.int32]
    kinds: NDArray[np.int8]
    bounds: NDArray[np.float64]
    circles: NDArray[np.float64]
    edge_start: NDArray[np.int64]
    edges: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ShapePostings:
    """Shapes of one segment by level and cell; a posting is ``shape * 2 + wholly inside``."""

    level_start: NDArray[np.int64]
    cells: NDArray[np.uint32]
    starts: NDArray[np.int64]
    postings: NDArray[np.uint32]
    slots: NDArray[np.int32]
    kinds: NDArray[np.int8]
    circles: NDArray[np.float64]
    first_row: NDArray[np.int32]
    band_at: NDArray[np.int64]
    band_start: NDArray[np.int64]
    band_edges: NDArray[np.float64]

    @property
    def longest(self) -> int:
        """Length of the longest posting list."""
        return int(np.diff(self.starts).max()) if self.cells.size else 0


@njit(cache=True, nogil=True)
def half_arc(
    lon0: float, lat0: float, lon1: float, lat1: float
) -> float:  # pragma: no cover - compiled
    """Square of the sine of half the angle between two places (the haversine)."""
    phi0 = math.radians(lat0)
    phi1 = math.radians(lat1)
    half_lat = math.sin((phi1 - phi0) / 2.0)
    half_lon = math.sin((math.radians(lon1) - math.radians(lon0)) / 2.0)
    return half_lat * half_lat + math.cos(phi0) * math.cos(phi1) * half_lon * half_lon


@njit(cache=True, nogil=True)
def in_circle(
    x: float, y: float, cx: float, cy: float, radius: float, lonlat: bool
) -> bool:  # pragma: no cover - compiled
    """Whether a point is in a closed circle."""
    if lonlat:
        arc = half_arc(cx, cy, x, y)
        return 2.0 * EARTH_RADIUS_M * math.asin(math.sqrt(min(arc, 1.0))) <= radius
    dx = x - cx
    dy = y - cy
    return dx * dx + dy * dy <= radius * radius


@njit(cache=True, nogil=True)
def _circle_holds_cell(
    x0: float, y0: float, x1: float, y1: float, cx: float, cy: float, radius: float, lonlat: bool
) -> bool:  # pragma: no cover - compiled
    """Whether a whole cell is certainly inside a circle."""
    far_x = max(abs(x0 - cx), abs(x1 - cx))
    far_y = max(abs(y0 - cy), abs(y1 - cy))
    if not lonlat:
        return far_x * far_x + far_y * far_y < radius * radius * (1.0 - ARC_MARGIN)
    if far_x > 180.0:
        return False
    # Bounds each term of the haversine on its own: never too small.
    widest = 1.0 if y0 <= 0.0 <= y1 else math.cos(math.radians(min(abs(y0), abs(y1))))
    half_lat = math.sin(math.radians(min(far_y, 180.0)) / 2.0)
    half_lon = math.sin(math.radians(far_x) / 2.0)
    arc = half_lat * half_lat + math.cos(math.radians(cy)) * widest * half_lon * half_lon
    limit = math.sin(min(radius / (2.0 * EARTH_RADIUS_M), math.pi / 2.0))
    return arc < limit * limit * (1.0 - ARC_MARGIN)


@njit(cache=True, nogil=True)
def _crossings(
    x: float, y: float, edges: NDArray[np.float64], start: int, stop: int
) -> int:  # pragma: no cover - compiled
    """INSIDE or OUTSIDE by the parity of crossings to the right, BORDER where rounding decides."""
    inside = False
    for k in range(start, stop):
        ax, ay, bx, by = edges[k, 0], edges[k, 1], edges[k, 2], edges[k, 3]
        if (ay > y) != (by > y):
            if x < ax and x < bx:
                inside = not inside
                continue
            if x > ax and x > bx:
                continue
            left = (ax - x) * (by - y)
            right = (bx - x) * (ay - y)
            turn = left - right
            if abs(turn) <= ORIENT_ERROR * (abs(left) + abs(right)):
                return BORDER
            if (turn > 0.0) == (by > ay):
                inside = not inside
        elif y in (ay, by) and min(ax, bx) <= x <= max(ax, bx):
            return BORDER
    return INSIDE if inside else OUTSIDE


@njit(cache=True, nogil=True)
def _mark_edges(
    edges: NDArray[np.float64],
    start: int,
    stop: int,
    level: int,
    column0: int,
    row0: int,
    edges_x: NDArray[np.float64],
    edges_y: NDArray[np.float64],
    marks: NDArray[np.int8],
) -> None:  # pragma: no cover - compiled
    """Mark as BORDER every cell that an edge may touch, erring on the side of marking."""
    width = edges_x[1 << level] - edges_x[0]
    for k in range(start, stop):
        ax, ay, bx, by = edges[k, 0], edges[k, 1], edges[k, 2], edges[k, 3]
        if ay > by:
            ax, ay, bx, by = bx, by, ax, ay
        slack = 1e-9 * (abs(bx - ax) + width)
        bottom = locate(ay, edges_y) >> level
        top = locate(by, edges_y) >> level
        for row in range(bottom, top + 1):
            xa, xb = ax, bx
            if by > ay:
                slope = (bx - ax) / (by - ay)
                if row > bottom:
                    xa = ax + (edges_y[row << level] - ay) * slope
                if row < top:
                    xb = ax + (edges_y[(row + 1) << level] - ay) * slope
            low = locate(max(min(xa, xb) - slack, min(ax, bx)), edges_x) >> level
            high = locate(min(max(xa, xb) + slack, max(ax, bx)), edges_x) >> level
            for column in range(low, high + 1):
                marks[row - row0, column - column0] = BORDER


@njit(cache=True, nogil=True)
def _cut_polygon(
    edges: NDArray[np.float64],
    start: int,
    stop: int,
    level: int,
    span: NDArray[np.int64],
    edges_x: NDArray[np.float64],
    edges_y: NDArray[np.float64],
    marks: NDArray[np.int8],
) -> None:  # pragma: no cover - compiled
    _mark_edges(edges, start, stop, level, span[0], span[1], edges_x, edges_y, marks)
    for row in range(span[1], span[3] + 1):
        y = (edges_y[row << level] + edges_y[(row + 1) << level]) / 2.0
        for column in range(span[0], span[2] + 1):
            if marks[row - span[1], column - span[0]] != BORDER:
                x = (edges_x[column << level] + edges_x[(column + 1) << level]) / 2.0
                # No edge comes near this cell: one point of it speaks for all.
                marks[row - span[1], column - span[0]] = _crossings(x, y, edges, start, stop)


@njit(cache=True, nogil=True)
def _cut_circle(
    circle: NDArray[np.float64],
    level: int,
    span: NDArray[np.int64],
    edges_x: NDArray[np.float64],
    edges_y: NDArray[np.float64],
    lonlat: bool,
    marks: NDArray[np.int8],
) -> None:  # pragma: no cover - compiled
    last = (edges_x.size - 2) >> level
    for row in range(span[1], span[3] + 1):
        for column in range(span[0], span[2] + 1):
            mark = BORDER
            # Cells on the edge of the grid have no end, so no circle holds them.
            if 0 < column < last and 0 < row < last:
                x0, x1 = edges_x[column << level], edges_x[(column + 1) << level]
                y0, y1 = edges_y[row << level], edges_y[(row + 1) << level]
                if _circle_holds_cell(x0, y0, x1, y1, circle[0], circle[1], circle[2], lonlat):
                    mark = INSIDE
            marks[row - span[1], column - span[0]] = mark


@njit(cache=True, nogil=True)
def _level_of(
    bounds: NDArray[np.float64],
    side: int,
    edges_x: NDArray[np.float64],
    edges_y: NDArray[np.float64],
    span: NDArray[np.int64],
) -> int:  # pragma: no cover - compiled
    """Finest level where the shape is at most ``side`` cells wide and high; fills its span."""
    column0, row0 = locate(bounds[0], edges_x), locate(bounds[1], edges_y)
    column1, row1 = locate(bounds[2], edges_x), locate(bounds[3], edges_y)
    level = 0
    while level < LEVELS - 1 and (
        (column1 >> level) - (column0 >> level) >= side or (row1 >> level) - (row0 >> level) >= side
    ):
        level += 1
    span[0], span[1] = column0 >> level, row0 >> level
    span[2], span[3] = column1 >> level, row1 >> level
    return level


@njit(cache=True, nogil=True)
def _cut_shapes(
    kinds: NDArray[np.int8],
    bounds: NDArray[np.float64],
    circles: NDArray[np.float64],
    edge_start: NDArray[np.int64],
    edges: NDArray[np.float64],
    edges_x: NDArray[np.float64],
    edges_y: NDArray[np.float64],
    lonlat: bool,
    levels: NDArray[np.int8],
    first_row: NDArray[np.int32],
    bands: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> int:  # pragma: no cover - compiled
    """Cut every shape; with room in ``keys`` also write the posting keys. Returns their number."""
    marks = np.zeros((SIDE_MAX + 1, SIDE_MAX + 1), np.int8)
    span = np.zeros(4, np.int64)
    total = 0
    for j in range(kinds.size):
        count = edge_start[j + 1] - edge_start[j]
        side = CIRCLE_SIDE
        if kinds[j] == POLYGON:
            side = min(max(int(math.sqrt(count)), 3), SIDE_MAX)
        level = _level_of(bounds[j], side, edges_x, edges_y, span)
        levels[j] = level
        first_row[j] = span[1]
        bands[j] = span[3] - span[1] + 1
        marks[:] = OUTSIDE
        if kinds[j] == POLYGON:
            _cut_polygon(
                edges, edge_start[j], edge_start[j + 1], level, span, edges_x, edges_y, marks
            )
        else:
            _cut_circle(circles[j], level, span, edges_x, edges_y, lonlat, marks)
        for row in range(span[1], span[3] + 1):
            for column in range(span[0], span[2] + 1):
                mark = marks[row - span[1], column - span[0]]
                if mark == OUTSIDE:
                    continue
                if keys.size:
                    cell = np.uint64(morton(column, row))
                    posting = np.uint64(j * 2 + (mark == INSIDE))
                    keys[total] = (
                        (np.uint64(level) << np.uint64(56)) | (cell << np.uint64(32)) | posting
                    )
                total += 1
    return total


@njit(cache=True, nogil=True)
def _band_polygons(
    edge_start: NDArray[np.int64],
    edges: NDArray[np.float64],
    edges_y: NDArray[np.float64],
    levels: NDArray[np.int8],
    first_row: NDArray[np.int32],
    band_at: NDArray[np.int64],
    band_start: NDArray[np.int64],
    band_edges: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Count (with no room in ``band_edges``) or copy the edges of each band of rows."""
    fill = band_edges.shape[0] > 0
    for j in range(levels.size):
        for k in range(edge_start[j], edge_start[j + 1]):
            low = min(edges[k, 1], edges[k, 3])
            high = max(edges[k, 1], edges[k, 3])
            bottom = (locate(low, edges_y) >> levels[j]) - first_row[j]
            top = (locate(high, edges_y) >> levels[j]) - first_row[j]
            for band in range(band_at[j] + bottom, band_at[j] + top + 1):
                if fill:
                    band_edges[band_start[band]] = edges[k]
                    band_start[band] += 1
                else:
                    band_start[band + 1] += 1


def build_shapes(shapes: Shapes, grid: IndexGrid, *, lonlat: bool) -> ShapePostings:
    """Index circles and polygons."""
    count = shapes.kinds.size
    levels = np.zeros(count, np.int8)
    first_row = np.zeros(count, np.int32)
    bands = np.zeros(count, np.int64)
    arguments = (
        shapes.kinds,
        shapes.bounds,
        shapes.circles,
        shapes.edge_start,
        shapes.edges,
        grid.edges_x,
        grid.edges_y,
        lonlat,
        levels,
        first_row,
        bands,
    )
    total = _cut_shapes(*arguments, np.empty(0, np.uint64))
    keys = np.empty(total, np.uint64)
    if total:
        _cut_shapes(*arguments, keys)
    keys.sort()
    level_start, cells, starts = directory(keys)

    band_at = np.concatenate([[0], np.cumsum(bands)]).astype(np.int64)
    counts = np.zeros(band_at[-1] + 1, np.int64)
    polygon_arguments = (shapes.edge_start, shapes.edges, grid.edges_y, levels, first_row, band_at)
    _band_polygons(*polygon_arguments, counts, np.empty((0, 4)))
    band_start = np.cumsum(counts)
    band_edges = np.empty((int(band_start[-1]), 4))
    if band_edges.size:
        _band_polygons(*polygon_arguments, band_start.copy(), band_edges)
    return ShapePostings(
        level_start,
        cells,
        starts,
        (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        shapes.slots,
        shapes.kinds,
        shapes.circles,
        first_row,
        band_at,
        band_start,
        band_edges,
    )


@njit(cache=True, nogil=True, boundscheck=False)
def match_shapes(
    level: int,
    first_cell: int,
    last_cell: int,
    cells: NDArray[np.uint32],
    starts: NDArray[np.int64],
    postings: NDArray[np.uint32],
    slots: NDArray[np.int32],
    kinds: NDArray[np.int8],
    circles: NDArray[np.float64],
    first_row: NDArray[np.int32],
    band_at: NDArray[np.int64],
    band_start: NDArray[np.int64],
    band_edges: NDArray[np.float64],
    lonlat: bool,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    codes: NDArray[np.uint32],
    order: NDArray[np.int32],
    cursor: NDArray[np.int64],
    out_slots: NDArray[np.int32],
    out_rows: NDArray[np.int32],
) -> int:  # pragma: no cover - compiled
    """Match sorted points with one level's shapes until done or the buffers are full.

    ``cursor`` is ``[next point, next cell, checks so far, unsure pairs so far]``. An unsure pair
    has its slot written as ``-1 - slot``.
    """
    n = x.size
    point = cursor[0]
    cell_at = cursor[1]
    room = out_slots.size
    written = 0
    shift = 2 * level
    while point < n:
        code = np.int64(codes[point]) >> shift
        cell_at = find_cell(cells, code, cell_at, last_cell)
        if cell_at == last_cell:
            point = n
            break
        if cells[cell_at] != code:
            point = find_cell(codes, np.int64(cells[cell_at]) << shift, point, n)
            continue
        begin, end = starts[cell_at], starts[cell_at + 1]
        row = squeeze(code >> 1)
        while point < n and (codes[point] >> shift) == code:
            if written + (end - begin) > room:
                cursor[0] = point
                cursor[1] = cell_at
                return written
            for at in range(begin, end):
                posting = postings[at]
                j = posting >> 1
                state = INSIDE
                if posting & 1 == 0:
                    cursor[2] += 1
                    if kinds[j] == CIRCLE:
                        hit = in_circle(
                            x[point], y[point], circles[j, 0], circles[j, 1], circles[j, 2], lonlat
                        )
                        state = INSIDE if hit else OUTSIDE
                    else:
                        band = band_at[j] + row - first_row[j]
                        state = _crossings(
                            x[point], y[point], band_edges, band_start[band], band_start[band + 1]
                        )
                if state == OUTSIDE:
                    continue
                out_slots[written] = slots[j]
                if state == BORDER:
                    out_slots[written] = -1 - slots[j]
                    cursor[3] += 1
                out_rows[written] = order[point]
                written += 1
            point += 1
    cursor[0] = point
    cursor[1] = cell_at
    return written
