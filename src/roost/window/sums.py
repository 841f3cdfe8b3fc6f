"""Exact sums, independent of the order of their terms.

A double is an integer multiple of 2**-1074, and so is a sum of doubles. The sum is stored as that
integer: addition is exact and associative, and only the result is rounded, once. The compiled loop
adds into 32-bit limbs; Python integers do the rest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

SCALE = 1074  # the smallest double is 2**-1074
LIMB = 32
LIMBS = 66  # enough for the largest double, shifted
ROWS_AT_ONCE = 1 << 28  # a limb holds this many terms without overflow


@njit(cache=True, nogil=True)
def _add(bits: NDArray[np.int64], limbs: NDArray[np.int64]) -> None:  # pragma: no cover - compiled
    """Add finite doubles, given as bits."""
    low_mask = (1 << LIMB) - 1
    for i in range(bits.size):
        exponent = (bits[i] >> 52) & 0x7FF
        mantissa = bits[i] & ((1 << 52) - 1)
        if exponent:
            mantissa |= 1 << 52
            exponent -= 1
        limb, shift = exponent >> 5, exponent & 31
        low = (mantissa & low_mask) << shift
        high = (mantissa >> LIMB) << shift
        sign = -1 if bits[i] < 0 else 1
        limbs[limb] += sign * (low & low_mask)
        limbs[limb + 1] += sign * ((low >> LIMB) + (high & low_mask))
        limbs[limb + 2] += sign * (high >> LIMB)


def scaled_sum(values: NDArray[np.float64]) -> int:
    """Return the exact sum of finite doubles, times 2**SCALE.

    Examples
    --------
    >>> scaled_sum(np.array([0.1, 1e300, -1e300])) == scaled_sum(np.array([0.1]))
    True
    """
    total = 0
    for begin in range(0, values.size, ROWS_AT_ONCE):
        limbs = np.zeros(LIMBS, np.int64)
        part = np.ascontiguousarray(values[begin : begin + ROWS_AT_ONCE])
        _add(part.view(np.int64), limbs)
        total += sum(limb << (LIMB * place) for place, limb in enumerate(limbs.tolist()))
    return total


def whole_sum(values: NDArray[Any]) -> int:
    """Return the exact sum of integers of any width.

    Examples
    --------
    >>> whole_sum(np.full(4, 2**62))
    18446744073709551616
    """
    if values.dtype.itemsize < 8:
        return int(values.sum(dtype=np.int64))
    high, low = values >> LIMB, values & values.dtype.type((1 << LIMB) - 1)
    return (int(high.sum()) << LIMB) + int(low.sum())


def quotient(total: int, scale: int, divisor: int = 1) -> float:
    """Return ``total / 2**scale / divisor``, rounded once.

    Examples
    --------
    >>> quotient(scaled_sum(np.full(10, 0.1)), SCALE)
    1.0
    """
    try:
        return total / (divisor << scale)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
