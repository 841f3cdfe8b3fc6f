"""Compiled loops that aggregate groups of rows and merge the partial results.

Group ``g`` has the rows ``rows[starts[g]:starts[g + 1]]``. Merging adds entry ``picks[i]`` of one
set of partial results to entry ``slots[i]`` of another, in place. Callers pass arrays through
:func:`roost.model.arrays.frozen`, so that each loop is compiled once and not again for mapped
files.

A double is an integer multiple of 2**-1074, and so is a sum of doubles. Sums are stored as such
integers, in limbs of 32 bits, so addition is exact and independent of the order. Only the limbs
that the values of a column reach are stored: four or five for most columns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, Mask
from roost.window.distance import apart

LIMB = 32
# A double takes three limbs, and a sum of up to 2**31 of them one more.
LIMBS_MORE = 4


class TotalArrays(NamedTuple):
    """Count, sum of values that are not finite, and limbs of the sum, per group."""

    n: Ints
    others: Floats
    limbs: Ints


@njit(cache=True, nogil=True)
def limb_range(
    bits: Ints, rows: NDArray[np.int32]
) -> tuple[int, int, bool]:  # pragma: no cover - compiled
    """Return the lowest and highest limb at which a finite double begins, and if all are finite.

    The limbs are 0 and -1 without any.
    """
    lowest, highest, finite = 1 << 11, -1, True
    for i in range(rows.size):
        exponent = (bits[rows[i]] >> 52) & 0x7FF
        if exponent == 0x7FF:
            finite = False
            continue
        limb = max(exponent - 1, 0) >> 5
        lowest = min(lowest, limb)
        highest = max(highest, limb)
    return (lowest, highest, finite) if highest >= 0 else (0, -1, finite)


@njit(cache=True, nogil=True)
def carry(limbs: Ints) -> None:  # pragma: no cover - compiled
    """Normalise all limbs but the last to 0 .. 2**32 - 1; the last holds the sign."""
    for g in range(limbs.shape[0]):
        for k in range(limbs.shape[1] - 1):
            over = limbs[g, k] >> LIMB
            limbs[g, k] -= over << LIMB
            limbs[g, k + 1] += over


@njit(cache=True, nogil=True)
def divide_totals(
    limbs: Ints, divisors: Ints, scale: int, quotients: Floats
) -> Mask:  # pragma: no cover - compiled
    """Divide sums by ``divisors * 2**scale``, each rounded once, half to even.

    Returns which are left to the caller: divisors of 2**31 and more, and quotients that are not
    normal numbers.
    """
    low_mask = (1 << LIMB) - 1
    size, width = limbs.shape
    left = np.zeros(size, np.bool_)
    # The sum times 2**96 has at least 55 significant bits after the division.
    words = np.empty(width + 4, np.int64)
    for g in range(size):
        divisor = divisors[g]
        if divisor < 1 or divisor >> 31:
            left[g] = True
            continue
        negative = limbs[g, width - 1] < 0
        add = 1 if negative else 0
        words[:3] = 0
        for k in range(width + 1):
            # The last limb holds the sign and may exceed 32 bits, so it becomes two words.
            word = limbs[g, min(k, width - 1)]
            word = (word >> LIMB if k == width else word) & low_mask
            if negative:
                word = (word ^ low_mask) + add
                add = word >> LIMB
                word &= low_mask
            words[3 + k] = word
        rest, top = 0, -1
        for k in range(width + 3, -1, -1):
            part = (rest << LIMB) | words[k]
            words[k] = part // divisor
            rest = part - words[k] * divisor
            if top < 0 and words[k]:
                top = k
        if top < 0:
            quotients[g] = 0.0
            continue
        bits = 0
        while words[top] >> bits:
            bits += 1
        # 55 bits: those of a double, and two to round by.
        more = 55 - bits
        if more <= LIMB:
            mantissa = (words[top] << more) | (words[top - 1] >> (LIMB - more))
            below = words[top - 1] & ((1 << (LIMB - more)) - 1)
            below |= words[top - 2]
        else:
            mantissa = (words[top] << more) | (words[top - 1] << (more - LIMB))
            mantissa |= words[top - 2] >> (2 * LIMB - more)
            below = words[top - 2] & ((1 << (2 * LIMB - more)) - 1)
        for k in range(top - 2):
            below |= words[k]
        below |= rest
        half = mantissa & 3
        mantissa >>= 2
        if half == 3 or (half == 2 and (below != 0 or mantissa & 1)):
            mantissa += 1
        exponent = LIMB * (top - 3) + bits - 53 - scale
        if exponent + 53 > 1023 or exponent + 52 < -1022:
            left[g] = True
            continue
        quotients[g] = math.ldexp(float(-mantissa if negative else mantissa), exponent)
    return left


@njit(cache=True, nogil=True)
def sum_runs(
    values: Ints, order: Ints, low: Ints, high: Ints, sums: Ints
) -> None:  # pragma: no cover - compiled
    """Add the rows ``order[low[k]:high[k]]`` of a table, for each ``k``, by running sums."""
    width = values.shape[1]
    running = np.zeros((order.size + 1, width), np.int64)
    for i in range(order.size):
        for j in range(width):
            running[i + 1, j] = running[i, j] + values[order[i], j]
    for k in range(low.size):
        for j in range(width):
            sums[k, j] = running[high[k], j] - running[low[k], j]


@njit(cache=True, nogil=True)
def sum_doubles(
    bits: Ints, starts: Ints, rows: NDArray[np.int32] | None, base: int, limbs: Ints
) -> None:  # pragma: no cover - compiled
    """Add the finite doubles of each group, given as bits, to its limbs from ``base`` on.

    Without ``rows``, they are all rows in order.
    """
    low_mask = (1 << LIMB) - 1
    for g in range(starts.size - 1):
        for i in range(starts[g], starts[g + 1]):
            value = bits[i if rows is None else rows[i]]
            exponent = (value >> 52) & 0x7FF
            if exponent == 0x7FF:
                continue
            mantissa = value & ((1 << 52) - 1)
            if exponent:
                mantissa |= 1 << 52
                exponent -= 1
            limb, shift = (exponent >> 5) - base, exponent & 31
            low = (mantissa & low_mask) << shift
            high = (mantissa >> LIMB) << shift
            sign = -1 if value < 0 else 1
            limbs[g, limb] += sign * (low & low_mask)
            limbs[g, limb + 1] += sign * ((low >> LIMB) + (high & low_mask))
            limbs[g, limb + 2] += sign * (high >> LIMB)


@njit(cache=True, nogil=True)
def sum_others(
    values: Floats, starts: Ints, rows: NDArray[np.int32], others: Floats
) -> None:  # pragma: no cover - compiled
    """Add the values of each group that are not finite."""
    for g in range(starts.size - 1):
        for i in range(starts[g], starts[g + 1]):
            if not np.isfinite(values[rows[i]]):
                others[g] += values[rows[i]]


@njit(cache=True, nogil=True)
def sum_whole(
    low: Ints, high: Ints, starts: Ints, rows: NDArray[np.int32], limbs: Ints
) -> None:  # pragma: no cover - compiled
    """Add the integers of each group, given as low and high halves."""
    for g in range(starts.size - 1):
        low_sum = high_sum = 0
        for i in range(starts[g], starts[g + 1]):
            low_sum += low[rows[i]]
            high_sum += high[rows[i]]
        limbs[g, 0] = low_sum
        limbs[g, 1] = high_sum


@njit(cache=True, nogil=True)
def add_totals(
    picks: Ints, slots: Ints, source: TotalArrays, shift: int, target: TotalArrays
) -> None:  # pragma: no cover - compiled
    """Merge sums; limb 0 of the source is limb ``shift`` of the target."""
    n, others, limbs = source
    n_to, others_to, limbs_to = target
    for i in range(picks.size):
        one, to = picks[i], slots[i]
        n_to[to] += n[one]
        others_to[to] += others[one]
        for k in range(limbs.shape[1]):
            limbs_to[to, shift + k] += limbs[one, k]


@njit(cache=True, nogil=True)
def add_counts(
    picks: Ints, slots: Ints, n: Ints, n_to: Ints
) -> None:  # pragma: no cover - compiled
    """Merge counts."""
    for i in range(picks.size):
        n_to[slots[i]] += n[picks[i]]


@njit(cache=True, nogil=True)
def find_extremes(
    values: NDArray[Any],
    starts: Ints,
    rows: NDArray[np.int32],
    least: NDArray[Any],
    greatest: NDArray[Any],
) -> None:  # pragma: no cover - compiled
    """Find the minimum and maximum of each group with rows; NaN is the greatest value."""
    for g in range(starts.size - 1):
        for i in range(starts[g], starts[g + 1]):
            value = values[rows[i]]
            first = i == starts[g]
            # Comparisons with NaN are false, and only NaN differs from itself.
            if first or value < least[g] or least[g] != least[g]:
                least[g] = value
            if first or value > greatest[g] or value != value:
                greatest[g] = value


@njit(cache=True, nogil=True)
def add_extremes(
    picks: Ints,
    slots: Ints,
    n: Ints,
    least: NDArray[Any],
    greatest: NDArray[Any],
    n_to: Ints,
    least_to: NDArray[Any],
    greatest_to: NDArray[Any],
) -> None:  # pragma: no cover - compiled
    """Merge extremes."""
    for i in range(picks.size):
        one, to = picks[i], slots[i]
        if not n[one]:
            continue
        first = n_to[to] == 0
        n_to[to] += n[one]
        if first or least[one] < least_to[to] or least_to[to] != least_to[to]:
            least_to[to] = least[one]
        if first or greatest[one] > greatest_to[to] or greatest[one] != greatest[one]:
            greatest_to[to] = greatest[one]


@njit(cache=True, nogil=True)
def find_spreads(
    values: Floats, starts: Ints, rows: NDArray[np.int32], means: Floats, squares: Floats
) -> None:  # pragma: no cover - compiled
    """Compute mean and sum of squared deviations of each group with rows."""
    for g in range(starts.size - 1):
        n = starts[g + 1] - starts[g]
        if not n:
            continue
        total = 0.0
        for i in range(starts[g], starts[g + 1]):
            total += values[rows[i]]
        mean = total / n
        square = drift = 0.0
        for i in range(starts[g], starts[g + 1]):
            off = values[rows[i]] - mean
            square += off * off
            drift += off
        means[g] = mean
        squares[g] = square
        if np.isfinite(square):
            # Correct the squares for the rounding error of the mean.
            squares[g] = max(square - drift * (drift / n), 0.0)


@njit(cache=True, nogil=True)
def add_spreads(
    picks: Ints,
    slots: Ints,
    n: Ints,
    means: Floats,
    squares: Floats,
    n_to: Ints,
    means_to: Floats,
    squares_to: Floats,
) -> None:  # pragma: no cover - compiled
    """Merge spreads (Chan, Golub and LeVeque)."""
    for i in range(picks.size):
        one, to = picks[i], slots[i]
        if not n[one]:
            continue
        before = n_to[to]
        both = before + n[one]
        n_to[to] = both
        if not before:
            means_to[to] = means[one]
            squares_to[to] = squares[one]
            continue
        off = means[one] - means_to[to]
        means_to[to] += off * (n[one] / both)
        squares_to[to] += squares[one] + off * off * (before / both) * n[one]


@njit(cache=True, nogil=True)
def group_distances(
    x: Floats,
    y: Floats,
    starts: Ints,
    rows: NDArray[np.int32],
    centres: Floats,
    lonlat: bool,
) -> Floats:  # pragma: no cover - compiled
    """Return the distance of each row from its group's centre."""
    distances = np.empty(rows.size)
    for g in range(starts.size - 1):
        cx, cy = centres[g, 0], centres[g, 1]
        for i in range(starts[g], starts[g + 1]):
            distances[i] = apart(cx, cy, x[rows[i]], y[rows[i]], lonlat)
    return distances


@njit(cache=True, nogil=True)
def not_farther_than_kth(
    distances: Floats, starts: Ints, k: Ints
) -> Mask:  # pragma: no cover - compiled
    """Return whether each row is at most as far as the k-th nearest of its group."""
    kept = np.ones(distances.size, np.bool_)
    for g in range(starts.size - 1):
        begin, end = starts[g], starts[g + 1]
        if end - begin <= k[g]:
            continue
        limit = np.sort(distances[begin:end])[k[g] - 1]
        for i in range(begin, end):
            kept[i] = distances[i] <= limit
    return kept
