"""Boxes: posting lists of 16-bit borders, tested with SIMD instructions.

A box is posted in every cell it overlaps, at the finest level where it overlaps at most
``POSTINGS_MAX`` cells. A posting holds the box's four borders as 16-bit positions inside the cell.

The posting list of a cell has four groups: boxes that only end in the cell, by right border;
boxes that span it; boxes that only begin in it, by left border; boxes that do both. The boxes of
the first three groups whose x range contains a point are one contiguous run, found by two binary
searches; only y remains to be tested, in one vectorised loop that reads 4 bytes per check instead
of 32. Short lists are tested by x and y together.

Positions are monotone in the coordinates, so a strict comparison is final. Only where a position
*equals* that of a border are the float64 borders compared, so the result is exact in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import (
    LEVELS,
    QUANT_HIGH,
    QUANT_LOW,
    IndexGrid,
    SortedPoints,
    Whole,
    find_cell,
    locate,
    morton,
    posting_key,
    quantise,
    squeeze,
)
from roost.model.arrays import Floats, Ints, frozen

Positions = NDArray[np.int16]
Borders = tuple[Positions, Positions]
Slots = NDArray[np.int32]
Point = tuple[float, float]
Quantised = tuple[np.int16, np.int16]

POSTINGS_MAX = 9
CHUNK = 1024
# Below this many postings, two binary searches cost more than testing every posting by x.
SEARCH_MIN = 256


class BoxPostings(NamedTuple):
    """Posting lists of the boxes of one segment, by level and cell.

    ``cells[level_start[l]:level_start[l + 1]]`` are the cells of level ``l``; cell ``k`` has the
    postings ``starts[k]:starts[k + 1]``, and ``parts[k]`` counts the postings in the first, the
    first two and the first three groups.
    """

    level_start: Ints
    cells: NDArray[np.uint32]
    starts: Ints
    parts: NDArray[np.int32]
    slots: Slots
    low_x: Positions
    high_x: Positions
    low_y: Positions
    high_y: Positions


class PairBuffers(NamedTuple):
    """Output of the matching loops, reused between calls, and the scratch ``mask`` of boxes."""

    slots: Slots
    rows: Slots
    mask: Positions


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _span_boxes(
    boxes: Floats, grid: IndexGrid, spans: NDArray[np.int32], levels: NDArray[np.int8]
) -> int:
    """Compute the fine cells and the level of each box; return the number of postings."""
    total = 0
    for i in range(boxes.shape[0]):
        spans[i, 0] = locate(boxes[i, 0], grid.edges_x)
        spans[i, 1] = locate(boxes[i, 1], grid.edges_y)
        spans[i, 2] = locate(boxes[i, 2], grid.edges_x)
        spans[i, 3] = locate(boxes[i, 3], grid.edges_y)
        for level in range(LEVELS):
            wide = (spans[i, 2] >> level) - (spans[i, 0] >> level) + 1
            high = (spans[i, 3] >> level) - (spans[i, 1] >> level) + 1
            if wide * high <= POSTINGS_MAX:
                levels[i] = level
                total += wide * high
                break
    return total


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _list_postings(
    spans: NDArray[np.int32], levels: NDArray[np.int8], keys: NDArray[np.uint64]
) -> None:
    """Write the key of every posting (level, cell, box); sorting the keys orders the postings."""
    k = 0
    for i in range(levels.size):
        level = levels[i]
        for row in range(spans[i, 1] >> level, (spans[i, 3] >> level) + 1):
            for column in range(spans[i, 0] >> level, (spans[i, 2] >> level) + 1):
                keys[k] = posting_key(level, morton(column, row), i)
                k += 1


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _position(
    border: float, edges: Floats, at: Whole, cell: Whole, level: Whole, outside: int
) -> np.int16:
    """Return the position of a border that has the fine cell ``at``, ``outside`` if elsewhere."""
    if at >> level != cell:
        return np.int16(outside)
    return quantise(border, edges, cell, level)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _fill_postings(
    keys: NDArray[np.uint64],
    boxes: Floats,
    spans: NDArray[np.int32],
    slots: Slots,
    grid: IndexGrid,
    out: BoxPostings,
) -> None:
    for k in range(keys.size):
        key = keys[k]
        level = np.int64(key >> np.uint64(56))
        code = np.int64((key >> np.uint64(32)) & np.uint64(0xFFFFFF))
        i = np.int64(key & np.uint64(0xFFFFFFFF))
        column = squeeze(code)
        row = squeeze(code >> 1)
        x, y = grid
        out.slots[k] = slots[i]
        out.low_x[k] = _position(boxes[i, 0], x, spans[i, 0], column, level, QUANT_LOW)
        out.low_y[k] = _position(boxes[i, 1], y, spans[i, 1], row, level, QUANT_LOW)
        out.high_x[k] = _position(boxes[i, 2], x, spans[i, 2], column, level, QUANT_HIGH)
        out.high_y[k] = _position(boxes[i, 3], y, spans[i, 3], row, level, QUANT_HIGH)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _group_postings(postings: BoxPostings) -> None:
    """Sort the postings of each cell into the four groups, each in its order."""
    _, _, starts, parts, slots, low_x, high_x, low_y, high_y = postings
    for k in range(starts.size - 1):
        begin, end = starts[k], starts[k + 1]
        ranks = np.empty(end - begin, np.int64)
        for i in range(begin, end):
            begins, ends = low_x[i] != QUANT_LOW, high_x[i] != QUANT_HIGH
            if ends and not begins:
                ranks[i - begin] = np.int64(high_x[i]) - QUANT_LOW
                parts[k, 0] += 1
            elif not begins:
                ranks[i - begin] = 1 << 17
                parts[k, 1] += 1
            elif not ends:
                ranks[i - begin] = (1 << 18) + np.int64(low_x[i]) - QUANT_LOW
                parts[k, 2] += 1
            else:
                ranks[i - begin] = 1 << 19
        parts[k, 1] += parts[k, 0]
        parts[k, 2] += parts[k, 1]
        order = np.argsort(ranks) + begin
        slots[begin:end] = slots[order]
        for borders in (low_x, high_x, low_y, high_y):
            borders[begin:end] = borders[order]


def directory(
    keys: NDArray[np.uint64],
) -> tuple[Ints, NDArray[np.uint32], Ints]:
    """Return the level table, the cells and the list starts of sorted posting keys."""
    heads = keys >> np.uint64(32)
    new = np.ones(keys.size, bool)
    new[1:] = heads[1:] != heads[:-1]
    firsts = np.flatnonzero(new)
    found = heads[firsts]
    cells = (found & np.uint64(0xFFFFFF)).astype(np.uint32)
    levels = (found >> np.uint64(24)).astype(np.int64)
    level_start = np.searchsorted(levels, np.arange(LEVELS + 1)).astype(np.int64)
    return level_start, cells, np.append(firsts, keys.size).astype(np.int64)


def build_boxes(boxes: Floats, slots: Slots, grid: IndexGrid) -> BoxPostings:
    """Index closed boxes: rows of ``x0, y0, x1, y1``; a slot identifies a box in a match."""
    count = boxes.shape[0]
    spans = np.empty((count, 4), np.int32)
    levels = np.zeros(count, np.int8)
    total = _span_boxes(boxes, grid, spans, levels)
    keys = np.empty(total, np.uint64)
    _list_postings(spans, levels, keys)
    keys.sort()
    level_start, cells, starts = directory(keys)
    parts = np.zeros((cells.size, 3), np.int32)
    borders = [np.empty(total, np.int16) for _ in range(4)]
    postings = BoxPostings(level_start, cells, starts, parts, np.empty(total, np.int32), *borders)
    _fill_postings(keys, boxes, spans, slots, grid, postings)
    _group_postings(postings)
    return BoxPostings(*map(frozen, postings))


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def _first_not_below(values: Positions, wanted: np.int16, low: Whole, high: Whole) -> Whole:
    """Return the first index whose value is not below; branch-free binary search."""
    size = high - low
    if size <= 0:
        return low
    while size > 1:
        half = size >> 1
        low += half * (values[low + half - 1] < wanted)
        size -= half
    if values[low] < wanted:
        low += 1
    return low


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def _first_above(values: Positions, wanted: np.int16, low: Whole, high: Whole) -> Whole:
    """Return the first index after the equal values; rarely more than one step."""
    while low < high and values[low] == wanted:
        low += 1
    return low


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def _test_y(qy: np.int16, low_y: Positions, high_y: Positions, mask: Positions) -> None:
    """Set the mask to 0 outside, 2 inside, 1 where only float64 decides; vectorised by LLVM."""
    for i in range(low_y.size):
        may = (low_y[i] <= qy) & (qy <= high_y[i])
        sure = (low_y[i] < qy) & (qy < high_y[i])
        mask[i] = np.int16(may) + np.int16(sure)


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def _test_xy(q: Quantised, x_borders: Borders, y_borders: Borders, mask: Positions) -> None:
    """Test x and y, for postings of any group; see ``_test_y``."""
    (qx, qy), (low_x, high_x), (low_y, high_y) = q, x_borders, y_borders
    for i in range(low_x.size):
        may = (low_x[i] <= qx) & (qx <= high_x[i]) & (low_y[i] <= qy) & (qy <= high_y[i])
        sure = (low_x[i] < qx) & (qx < high_x[i]) & (low_y[i] < qy) & (qy < high_y[i])
        mask[i] = np.int16(may) + np.int16(sure)


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def _emit_exact(
    slots: Slots, point: Point, boxes: Floats, out_slots: Slots, written: Whole
) -> Whole:
    """Write the boxes that contain a point by their float64 borders."""
    x, y = point
    for i in range(slots.size):
        slot = slots[i]
        hit = (boxes[slot, 0] <= x) & (x <= boxes[slot, 2])
        hit &= (boxes[slot, 1] <= y) & (y <= boxes[slot, 3])
        out_slots[written] = slot
        written += hit
    return written


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def _emit_masked(
    slots: Slots, point: Point, boxes: Floats, mask: Positions, out_slots: Slots, written: Whole
) -> Whole:
    """Write the boxes that the mask selects."""
    unsure = np.int16(0)
    before = written
    for i in range(slots.size):
        out_slots[written] = slots[i]
        written += mask[i] != 0
        unsure |= mask[i]
    if unsure & 1:
        written = _emit_exact(slots, point, boxes, out_slots, before)
    return written


@njit(cache=True, nogil=True, boundscheck=False)  # pragma: no cover - compiled
def match_boxes(
    level: int,
    last_cell: int,
    postings: BoxPostings,
    boxes: Floats,
    grid: IndexGrid,
    points: SortedPoints,
    cursor: Ints,
    out: PairBuffers,
) -> Whole:
    """Match sorted points with one level's boxes until done or the buffers are full.

    ``cursor`` is ``[next point, next cell, checks so far]`` and is advanced; call again while the
    next point is below the number of points. Returns the number of pairs written. The buffers
    must hold the longest posting list plus one.
    """
    _, cells, starts, parts, slots, low_x, high_x, low_y, high_y = postings
    edges_x, edges_y = grid
    x, y, codes, order = points
    out_slots, out_rows, mask = out
    n = x.size
    point = cursor[0]
    cell_at = cursor[1]
    room = out_slots.size - 1
    written: Whole = 0
    shift = 2 * level
    while point < n:
        code = codes[point] >> shift
        cell_at = find_cell(cells, code, cell_at, last_cell)
        if cell_at == last_cell:
            point = n
            break
        if cells[cell_at] != code:
            # Skip every point before the next cell that has boxes.
            point = find_cell(codes, np.int64(cells[cell_at]) << shift, point, n)
            continue
        begin, end = starts[cell_at], starts[cell_at + 1]
        spanning = begin + parts[cell_at, 0]
        beginning = begin + parts[cell_at, 1]
        inside = begin + parts[cell_at, 2]
        column = squeeze(code)
        row = squeeze(code >> 1)
        while point < n and (codes[point] >> shift) == code:
            if written + (end - begin) > room:
                cursor[0] = point
                cursor[1] = cell_at
                return written
            here = (x[point], y[point])
            qx = quantise(here[0], edges_x, column, level)
            qy = quantise(here[1], edges_y, row, level)
            before = written
            low, high = begin, end
            if end - begin >= SEARCH_MIN:
                # Postings whose border has the point's own position are at both ends of the run.
                near_low = _first_not_below(high_x, qx, begin, spanning)
                low = _first_above(high_x, qx, near_low, spanning)
                high = _first_not_below(low_x, qx, beginning, inside)
                near_high = _first_above(low_x, qx, high, inside)
                written = _emit_exact(slots[near_low:low], here, boxes, out_slots, written)
                written = _emit_exact(slots[high:near_high], here, boxes, out_slots, written)
                at = low
                while at < high:
                    stop = min(at + CHUNK, high)
                    _test_y(qy, low_y[at:stop], high_y[at:stop], mask)
                    written = _emit_masked(slots[at:stop], here, boxes, mask, out_slots, written)
                    at = stop
                cursor[2] += near_high - near_low
                low, high = inside, end
            at = low
            while at < high:
                stop = min(at + CHUNK, high)
                x_borders = (low_x[at:stop], high_x[at:stop])
                y_borders = (low_y[at:stop], high_y[at:stop])
                _test_xy((qx, qy), x_borders, y_borders, mask)
                written = _emit_masked(slots[at:stop], here, boxes, mask, out_slots, written)
                at = stop
            cursor[2] += high - low
            out_rows[before:written] = order[point]
            point += 1
    cursor[0] = point
    cursor[1] = cell_at
    return written
