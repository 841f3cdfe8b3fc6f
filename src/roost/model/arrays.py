"""Zero-copy conversion of numeric columns between Arrow and numpy.

``pa.array`` and ``to_numpy`` import pandas to check their argument, which costs 40 MB and half a
second in every worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def frozen(values: Any) -> NDArray[Any]:
    """Return a contiguous read-only view, as of mapped files: numba compiles each kind apart."""
    view: NDArray[Any] = np.ascontiguousarray(values).view()
    view.flags.writeable = False
    return view


def as_arrow(values: NDArray[Any]) -> pa.Array:
    """View a numeric array as an Arrow array.

    Examples
    --------
    >>> as_arrow(np.array([1, 2])).to_pylist()
    [1, 2]
    """
    values = np.ascontiguousarray(values)
    buffers = [None, pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, buffers)


def as_numpy(column: pa.Array) -> NDArray[Any]:
    """View an integer or floating-point column as numpy; floating-point nulls become NaN.

    Examples
    --------
    >>> as_numpy(pa.array([1.5, 2.5])[1:]).tolist()
    [2.5]
    """
    if column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    dtype = np.dtype(column.type.to_pandas_dtype())
    if len(column) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)


def sort_small(values: NDArray[Any], limit: int) -> Ints:
    """Return the stable order of integers from 0 to below a limit.

    Numpy sorts 16 bits by counting, ten times as fast as it compares.

    Examples
    --------
    >>> sort_small(np.array([2, 0, 2, 1]), 3).tolist()
    [1, 3, 0, 2]
    """
    return np.argsort(values.astype(np.uint16) if limit <= 1 << 16 else values, kind="stable")
