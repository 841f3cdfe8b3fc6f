"""Groups rows by the values of several columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.types as pt
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import as_arrow, as_numpy, frozen
from roost.model.columns import one_array
from roost.window.grouped import Groups

Column = Any  # an Arrow column, or a numpy array whose order matters
_CODES_MAX = 1 << 62
_SPARSE = 4  # codes per row above which sorting is faster than counting
_BITS = 16  # likewise, where a code needs a byte only


@njit(cache=True, nogil=True)
def _place_rows(
    codes: NDArray[np.int64], starts: NDArray[np.int64], rows: NDArray[np.int32]
) -> None:  # pragma: no cover - compiled
    """Write the rows of each code from its start on, in their order; ``starts`` is consumed."""
    for row in range(codes.size):
        rows[starts[codes[row]]] = row
        starts[codes[row]] += 1


@njit(cache=True, nogil=True)
def _slide(
    starts: NDArray[np.int64], panes: NDArray[np.int64], size: int, advance: int,
    first: int, last: int, found: NDArray[np.int64],
) -> int:  # fmt: skip  # pragma: no cover - compiled
    """Find windows and the runs of panes in each: window, first and last row. Returns their number.

    Code ``c`` has the panes ``panes[starts[c]:starts[c + 1]]``, ascending. Nothing is written
    without room for it.
    """
    count = 0
    for code in range(starts.size - 1):
        low, end = starts[code], starts[code + 1]
        high, window = low, first
        while low < end and window <= last:
            # The first window that has the pane; those before it are empty.
            window = max(window, (panes[low] - size) // advance + 1)
            if window > last:
                break
            begin = window * advance
            while low < end and panes[low] < begin:
                low += 1
            high = max(high, low)
            while high < end and panes[high] < begin + size:
                high += 1
            if low < high:
                if count < found.shape[1]:
                    found[0, count], found[1, count], found[2, count] = window, low, high
                count += 1
                window += 1
    return count


def slide(
    codes: NDArray[np.int64], panes: NDArray[np.int64], size: int, advance: int,
    first: int, last: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
    """Return the windows from ``first`` to ``last`` of each code that have panes.

    Windows of ``size`` panes begin at multiples of ``advance`` panes. Returns an order of the rows,
    and for each window its number and the first and last place of its rows in this order.
    """
    codes = dense(codes)
    order = np.argsort(panes, kind="stable")
    starts, placed = place(codes[order], int(codes.max(initial=-1)) + 1)
    order = order[placed]
    ordered = frozen(np.ascontiguousarray(panes[order], np.int64))
    found = np.empty((3, 2 * codes.size + 1024), np.int64)
    for _ in range(2):
        count = _slide(frozen(starts), ordered, size, advance, first, last, found)
        if count <= found.shape[1]:
            break
        found = np.empty((3, count), np.int64)
    return order, found[:, :count]


def encode(columns: Sequence[Column], rows: int) -> NDArray[np.int64]:
    """Return a number per row, equal where all columns are; numbers sort as numpy columns do."""
    codes, count = np.zeros(rows, np.int64), 1
    for column in columns:
        own, distinct = _encode_one(column)
        if distinct > _SPARSE * rows + 1024:
            own = np.unique(own, return_inverse=True)[1].astype(np.int64)
            distinct = int(own.max(initial=0)) + 1
        if count * max(distinct, 1) >= _CODES_MAX:
            codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
            count = int(codes.max(initial=0)) + 1
        codes = codes * distinct + own
        count *= max(distinct, 1)
    return codes


def _encode_one(column: Column) -> tuple[NDArray[np.int64], int]:
    """Return codes from 0 up and their number; a null is a value of its own."""
    if isinstance(column, np.ndarray):
        low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
        return column.astype(np.int64) - low, high - low + 1
    array = one_array(column)
    if pt.is_integer(array.type) and not array.null_count and len(array):
        values = as_numpy(array)
        low, high = int(values.min()), int(values.max())
        if high - low < _SPARSE * len(array):
            return values.astype(np.int64) - low, high - low + 1
    encoded = array.dictionary_encode(null_encoding="encode")
    return as_numpy(encoded.indices).astype(np.int64), max(len(encoded.dictionary), 1)


def slots_of(groups: Groups) -> NDArray[np.int64]:
    """Return the group of each row."""
    slots = np.empty(groups.rows.size, np.int64)
    slots[groups.rows] = np.repeat(np.arange(groups.sizes.size), groups.sizes)
    return slots


def dense(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return codes in the same order that are not much more than the rows."""
    if int(codes.max(initial=-1)) < _SPARSE * codes.size + 1024:
        return codes
    return np.unique(codes, return_inverse=True)[1].astype(np.int64)


def places_with(codes: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of codes that the others have, too."""
    size = max(int(codes.max(initial=-1)), int(others.max(initial=-1))) + 1
    if size <= _BITS * codes.size + 1024:
        present = np.zeros(size, bool)
        present[others] = True
        return np.flatnonzero(present[codes])
    return np.flatnonzero(pc.is_in(as_arrow(codes), value_set=as_arrow(others)))


def distinct(
    numbers: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], Callable[[NDArray[np.int64]], NDArray[np.int64]]]:
    """Return the different numbers below ``size`` in order, and a count of those below others."""
    if size > _SPARSE * numbers.size + 1024:
        ordered = np.unique(numbers)
        return ordered, lambda others: np.searchsorted(ordered, others)
    below = np.zeros(size + 1, np.int64)
    below[numbers + 1] = 1
    ordered = np.flatnonzero(below) - 1
    np.cumsum(below, out=below)
    return ordered, lambda others: below[others]


def place(codes: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Sort by codes below ``size``: code ``c`` has ``rows[starts[c]:starts[c + 1]]``, in order."""
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(codes, minlength=size), out=starts[1:])
    rows = np.empty(codes.size, np.int32)
    _place_rows(frozen(np.ascontiguousarray(codes, np.int64)), starts[:-1].copy(), rows)
    return starts, rows


def group(codes: NDArray[np.int64]) -> tuple[Groups, NDArray[np.int64]]:
    """Return the rows of each different code, in their order, and one row of each group.

    Groups are in ascending order of their codes.
    """
    codes = dense(codes)
    starts, rows = place(codes, int(codes.max(initial=-1)) + 1)
    starts = np.concatenate([starts[:1], starts[1:][np.diff(starts) > 0]])
    return Groups(starts, rows), rows[starts[:-1]].astype(np.int64)
