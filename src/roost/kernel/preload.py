"""Prefetch of posting lists for the cells that a machine has just been assigned.

Segments are memory-mapped, so a list that was never used is still on disk, perhaps of another
host. A machine that is assigned a partition reads its lists before points arrive, so that the cost
can be measured. Lists are in Z-order, so those of a rectangle form a few contiguous runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from roost.kernel.boxes import BoxPostings
from roost.kernel.cells import LEVELS, IndexGrid, find_cell, locate, morton, squeeze
from roost.kernel.index import Index
from roost.kernel.segment import Segment
from roost.kernel.shapes import ShapePostings
from roost.model.arrays import Floats, Ints
from roost.model.records import BOX
from roost.storage.files import copied, read_ahead
from roost.storage.files import release as release_file

# Elements between two reads, which are at most one memory page apart.
STRIDE = 512


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _find_lists(
    level_start: Ints, cells: NDArray[np.uint32], bounds: Floats, grid: IndexGrid
) -> NDArray[np.bool_]:
    """Return for each cell that has a posting list whether it touches a rectangle."""
    found = np.zeros(cells.size, np.bool_)
    for k in range(bounds.shape[0]):
        left, right = locate(bounds[k, 0], grid.edges_x), locate(bounds[k, 2], grid.edges_x)
        bottom, top = locate(bounds[k, 1], grid.edges_y), locate(bounds[k, 3], grid.edges_y)
        for level in range(LEVELS):
            column0, row0 = left >> level, bottom >> level
            column1, row1 = right >> level, top >> level
            # Morton codes grow with columns and rows, so the corners' codes bound the rectangle's.
            at = find_cell(cells, morton(column0, row0), level_start[level], level_start[level + 1])
            highest = morton(column1, row1)
            while at < level_start[level + 1] and cells[at] <= highest:
                column, row = squeeze(cells[at]), squeeze(cells[at] >> 1)
                found[at] |= column0 <= column <= column1 and row0 <= row <= row1
                at += 1
    return found


def preload(index: Index, bounds: Floats) -> int:
    """Read the posting lists of some rectangles and return their size in bytes.

    ``bounds`` has rows of ``x0, y0, x1, y1``, infinite where a rectangle is unbounded.
    """
    size = 0
    for segment in index.segments:
        for postings, lists in _lists(segment, bounds, index.grid):
            size += _read(postings, lists)
            _copy_queries(segment, postings, lists)
    return size


def prefetch(index: Index, segment: Segment, bounds: Floats) -> None:
    """Have the system read the posting lists of some rectangles, without waiting for them."""
    for postings, lists in _lists(segment, bounds, index.grid):
        _request(postings, lists)
        _copy_queries(segment, postings, lists)


def release(index: Index) -> None:
    """Give the pages of the queries back to the system: those of cells that left are not needed."""
    for segment in index.segments:
        release_file(segment.boxes)


def _copy_queries(segment: Segment, postings: BoxPostings | ShapePostings, lists: Ints) -> None:
    """Copy identifiers, times and predicates of the boxes of some lists, if copies are made."""
    mapping = copied(postings.starts)
    if mapping is None or not isinstance(postings, BoxPostings) or not lists.size:
        return
    near = np.zeros(segment.size // STRIDE + 1, np.bool_)
    for begin, end in zip(*(postings.starts[at] for at in _close(lists)), strict=True):
        near[postings.slots[begin:end] // STRIDE] = True
    edges = STRIDE * np.flatnonzero(np.diff(near, prepend=False, append=False))
    first, last = edges[::2], np.minimum(edges[1::2], segment.size)
    found = (segment.timed, segment.live_from, segment.live_until, segment.predicate)
    for column in (*found, segment.outputs, segment.created_position):
        if column is not None:
            read_ahead(column, first, last)
    for begin, end in zip(*_places(segment.ids, first, last), strict=True):
        mapping.request(begin, end)


def _places(ids: pa.Array, first: Ints, last: Ints) -> tuple[list[int], list[int]]:
    """Return the addresses of ranges of identifiers."""
    buffers = ids.buffers()
    width = 8 if pa.types.is_large_string(ids.type) else ids.type.bit_width // 8
    begins, ends = (buffers[1].address + width * at for at in (first, last + 1))
    if pa.types.is_large_string(ids.type):
        offsets = np.frombuffer(buffers[1], np.int64)
        texts = (buffers[2].address + offsets[at] for at in (first, last))
        begins, ends = (np.concatenate(both) for both in zip((begins, ends), texts, strict=True))
    return begins.tolist(), ends.tolist()


def slots_near(segment: Segment, bounds: Floats, grid: IndexGrid) -> Ints:
    """Return the slots of all queries that may overlap some rectangles, in ascending order.

    Of boxes it reads the posting lists there, so that other parts of the file are not read. Other
    shapes are all returned: a list has only those that touch its cell, not those whose box does.
    """
    near = np.zeros(segment.size, np.bool_)
    for postings, lists in _lists(segment, bounds, grid):
        if isinstance(postings, BoxPostings):
            first, last = _close(lists)
            read_ahead(postings.starts, first, last + 1)
            read_ahead(postings.slots, postings.starts[first], postings.starts[last])
            # Neighbouring lists are one range of the file.
            for begin, end in zip(*(postings.starts[at] for at in _close(lists, 1)), strict=True):
                near[postings.slots[begin:end]] = True
    if segment.shape_postings is not None:
        near |= segment.kinds != BOX
    return np.flatnonzero(near)


Lists = tuple[BoxPostings | ShapePostings, Ints]  # and the numbers of some lists


def _lists(segment: Segment, bounds: Floats, grid: IndexGrid) -> Iterator[Lists]:
    x, y = grid
    reach = np.clip(bounds, [x[0], y[0], x[0], y[0]], [x[-1], y[-1], x[-1], y[-1]])
    for postings in segment.postings:
        found = _find_lists(postings.level_start, postings.cells, reach, grid)
        yield postings, np.flatnonzero(found)


def _columns(postings: BoxPostings | ShapePostings) -> tuple[NDArray[Any], ...]:
    """Return the arrays of the lists."""
    if isinstance(postings, ShapePostings):
        return (postings.postings,)
    return (postings.slots, *postings[5:])


def _request(postings: BoxPostings | ShapePostings, lists: Ints) -> None:
    """Request lists and their directory from the system; those that are close are one range."""
    if not lists.size:
        return
    first, last = _close(lists)
    read_ahead(postings.starts, first, last + 1)
    if isinstance(postings, BoxPostings):
        read_ahead(postings.parts, first, last)
    for values in _columns(postings):
        read_ahead(values, postings.starts[first], postings.starts[last])


def _close(lists: Ints, distance: int = STRIDE) -> tuple[Ints, Ints]:
    """Return the first and last list, plus one, of each range of lists that are close."""
    if not lists.size:
        return lists, lists
    breaks = np.flatnonzero(np.diff(lists) > distance)
    return lists[np.append(0, breaks + 1)], lists[np.append(breaks, lists.size - 1)] + 1


def _read(postings: BoxPostings | ShapePostings, lists: Ints) -> int:
    _request(postings, lists)
    begins = postings.starts[lists]
    sizes = postings.starts[lists + 1] - begins
    # One position every STRIDE elements of each list.
    counts = -(-sizes // STRIDE)
    places = np.repeat(begins - STRIDE * (np.cumsum(counts) - counts), counts)
    places += STRIDE * np.arange(places.size)
    columns = _columns(postings)
    for values in columns:
        values.take(places)
    return int(sizes.sum()) * sum(values.itemsize for values in columns)
