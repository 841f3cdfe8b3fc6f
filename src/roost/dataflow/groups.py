"""Groups rows by the values of several columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.types as pt
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import as_numpy, frozen
from roost.model.columns import one_array
from roost.window.grouped import Groups

Column = Any  # an Arrow column, or a numpy array whose order matters
_CODES_MAX = 1 << 62
_SPARSE = 4  # codes per row above which sorting is faster than counting


@njit(cache=True, nogil=True)
def _place_rows(
    codes: NDArray[np.int64], starts: NDArray[np.int64], rows: NDArray[np.int32]
) -> None:  # pragma: no cover - compiled
    """Write the rows of each code from its start on, in their order; ``starts`` is consumed."""
    for row in range(codes.size):
        rows[starts[codes[row]]] = row
        starts[codes[row]] += 1


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


def group(codes: NDArray[np.int64]) -> tuple[Groups, NDArray[np.int64]]:
    """Return the rows of each different code, in their order, and one row of each group.

    Groups are in ascending order of their codes.
    """
    size = int(codes.max(initial=-1)) + 1
    if size > _SPARSE * codes.size + 1024:
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
        size = int(codes.max(initial=-1)) + 1
    counts = np.bincount(codes, minlength=size)
    present = np.flatnonzero(counts)
    ends = np.cumsum(counts)
    rows = np.empty(codes.size, np.int32)
    _place_rows(frozen(np.ascontiguousarray(codes)), ends - counts, rows)
    starts = np.concatenate([[0], ends[present]]).astype(np.int64)
    return Groups(starts, rows), rows[starts[:-1]].astype(np.int64)
