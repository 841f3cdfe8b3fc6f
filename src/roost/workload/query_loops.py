"""Compiled loops over the queries of a partition, and of how two versions of them differ.

The queries of a segment in a partition are rows in the order of their slots; a circle may have
several rows. Sets of terminated queries are ascending slots.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole, find_cell, locate
from roost.model.arrays import Floats, Ints, Mask


@njit(cache=True, nogil=True)
def cut_boxes(
    boxes: Floats,
    numbers: Ints,
    area: tuple[float, float, float, float],
    edges: tuple[Floats, Floats],
) -> tuple[Ints, NDArray[np.int32]]:  # pragma: no cover - compiled
    """Return those of some boxes that overlap a half-open rectangle, and their cell ranges."""
    x0, y0, x1, y1 = area
    edges_x, edges_y = edges
    # The edges of a cell decide which cell a coordinate is in, so this is exact.
    inside = np.empty(numbers.size, np.bool_)
    for row, number in enumerate(numbers):
        across = boxes[number, 2] >= x0 and boxes[number, 0] < x1
        inside[row] = across and boxes[number, 3] >= y0 and boxes[number, 1] < y1
    # Arrays of the right size: where queries need a host's memory, there is none to spare.
    found = np.empty(inside.sum(), np.int64)
    ranges = np.empty((found.size, 4), np.int32)
    written = 0
    for row, number in enumerate(numbers):
        if inside[row]:
            found[written] = number
            ranges[written, 0] = locate(boxes[number, 0], edges_x)
            ranges[written, 1] = locate(boxes[number, 1], edges_y)
            ranges[written, 2] = locate(boxes[number, 2], edges_x)
            ranges[written, 3] = locate(boxes[number, 3], edges_y)
            written += 1
    return found, ranges


@njit(cache=True, nogil=True)
def live_rows(
    owners: Ints, until: Ints, ended: Ints, now: int
) -> Ints:  # pragma: no cover - compiled
    """Return the rows whose query is live at a time; ``until`` is empty if it limits none."""
    rows = np.empty(owners.size, np.int64)
    count = 0
    at: Whole = 0
    for row in range(owners.size):
        at = find_cell(ended, owners[row], at, ended.size)
        gone = at < ended.size and ended[at] == owners[row]
        if not gone and (until.size == 0 or until[row] > now):
            rows[count] = row
            count += 1
    return rows[:count]


@njit(cache=True, nogil=True)
def differing_slots(first: Ints, second: Ints) -> tuple[Ints, Mask]:  # pragma: no cover - compiled
    """Return the slots that are in one of two sets only, and which are in the first."""
    slots = np.empty(first.size + second.size, np.int64)
    only_first = np.empty(slots.size, np.bool_)
    count = i = j = 0
    while i < first.size or j < second.size:
        if i < first.size and j < second.size and first[i] == second[j]:
            i += 1
            j += 1
            continue
        only_first[count] = j >= second.size or (i < first.size and first[i] < second[j])
        if only_first[count]:
            slots[count] = first[i]
            i += 1
        else:
            slots[count] = second[j]
            j += 1
        count += 1
    return slots[:count].copy(), only_first[:count].copy()


@njit(cache=True, nogil=True)
def changed_rows(
    owners: Ints,
    until: Ints,
    by_end: Ints,
    slots: Ints,
    returned: Mask,
    ended: Ints,
    then: int,
    now: int,
) -> tuple[Ints, Mask]:  # pragma: no cover - compiled
    """Return the rows whose query is live at one of two times only, and whether at the second.

    ``slots`` are terminated at one of the times only, ``returned`` says which at the first;
    ``ended`` are terminated at the second. ``by_end`` are the rows in the order of ``until``.
    """
    rows = np.empty(owners.size, np.int64)
    live = np.empty(owners.size, np.bool_)
    count = 0
    at: Whole = 0
    i: Whole = 0
    while i < slots.size and at < owners.size:
        if owners[at] < slots[i]:
            at = find_cell(owners, slots[i], at, owners.size)
        elif owners[at] > slots[i]:
            i = find_cell(slots, owners[at], i, slots.size)
        else:
            if until.size == 0 or until[at] > (now if returned[i] else then):
                rows[count], live[count] = at, returned[i]
                count += 1
            at += 1
    first, last = min(then, now), max(then, now)
    low, high = 0, by_end.size if first < last else 0
    while low < high:
        middle = (low + high) >> 1
        if until[by_end[middle]] <= first:
            low = middle + 1
        else:
            high = middle
    while first < last and low < by_end.size and until[by_end[low]] <= last:
        row = by_end[low]
        low += 1
        at = find_cell(slots, owners[row], 0, slots.size)
        if at < slots.size and slots[at] == owners[row]:
            continue
        at = find_cell(ended, owners[row], 0, ended.size)
        if at == ended.size or ended[at] != owners[row]:
            rows[count], live[count] = row, until[row] > now
            count += 1
    return rows[:count], live[:count]
