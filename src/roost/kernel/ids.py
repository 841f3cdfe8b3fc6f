"""Sortable 64-bit keys of identifiers, for binary search in a memory-mapped array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import Ints, as_numpy

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _hash_text(offsets: Ints, data: NDArray[np.uint8], keys: NDArray[np.uint64]) -> None:
    """Compute the FNV-1a hash of each text, which is the same in every process."""
    for i in range(keys.size):
        key = FNV_OFFSET
        for at in range(offsets[i], offsets[i + 1]):
            key = (key ^ np.uint64(data[at])) * FNV_PRIME
        keys[i] = key


def text_buffers(values: pa.Array) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the offsets (from zero) and bytes of a text or binary array; nulls are empty."""
    large = values.fill_null(b"" if pa.types.is_binary(values.type) else "").cast(pa.large_binary())
    size = len(large)
    if size == 0:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    _, offset_buffer, data_buffer = large.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, size + 1, large.offset * 8)
    data = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], data


def hash_ids(ids: pa.Array) -> NDArray[np.uint64]:
    """Return the 64-bit key of each identifier; different texts may share a key.

    Examples
    --------
    >>> hash_ids(pa.array([7, 8])).tolist()
    [7, 8]
    """
    if pa.types.is_integer(ids.type):
        return np.asarray(as_numpy(ids), np.int64).view(np.uint64)
    offsets, data = text_buffers(ids)
    keys = np.empty(len(ids), np.uint64)
    _hash_text(offsets, data, keys)
    return keys
