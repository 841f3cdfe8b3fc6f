"""Statistical queries: count, mean, standard deviation, correlation, contrast and outliers.

Whole groups contribute their exact sums. Other rows contribute the extremes of their bins to the
bounds, and the mean of their bin to the value. Nulls do not count; a correlation uses the rows that
have both features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from numba import njit

from roost.errors import ConfigError
from roost.model.arrays import Floats
from roost.synopsis.bands import Sketch
from roost.synopsis.bounds import EPSILON, SynopsisResult, root, rounding
from roost.synopsis.evidence import count_rows, gather, gather_pair
from roost.synopsis.moments import AA, AB, BB, A, B, Moments, bound_moments
from roost.synopsis.narrowing import NO_MOMENTS
from roost.synopsis.scope import EVERYTHING, Scope


class Statistic(Protocol):
    """A query of one scope, for `contrast`."""

    def __call__(self, synopsis: Sketch, scope: Scope) -> SynopsisResult:
        """Return the result for a scope."""


def count(synopsis: Sketch, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the number of rows in a scope."""
    low, high, value, records = count_rows(synopsis, scope)
    return SynopsisResult(value, low, high, records)


def mean(synopsis: Sketch, feature: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the mean of a feature."""
    found, shift, records = _moments(synopsis, feature, scope)
    if found.rows_most <= 0.0:
        return SynopsisResult(None, None, None, records)
    centre = found.centre_a
    margin = 4.0 * EPSILON * (abs(shift) + abs(centre))
    low, high = (end + centre + shift for end in found.interval(A))
    low, high = low - margin, high + margin
    value = min(max(centre + shift, low), high) if found.rows > 0.0 else None
    return SynopsisResult(value, low, high, records)


def stddev(synopsis: Sketch, feature: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the standard deviation of a feature, of a sample as in SQL."""
    found, _, records = _moments(synopsis, feature, scope)
    if found.rows_most < 2.0:
        return SynopsisResult(None, None, None, records)
    offset, squares = found.interval(A), found.interval(AA)
    far = max(abs(offset.low), abs(offset.high))
    few, many = max(found.rows_sure, 2.0), found.rows_most
    low = root((squares.low - far * far) * many / (many - 1.0))
    high = root(squares.high * few / (few - 1.0))
    value = None
    if found.rows >= 2.0:
        # The centre is the estimated mean, up to rounding.
        value = min(max(root(found.aa / (found.rows - 1.0)), low), high)
    return SynopsisResult(value, low, high, records)


def _moments(synopsis: Sketch, feature: str, scope: Scope) -> tuple[Moments, float, int]:
    """Return the moments of a feature, the shift of its values, and the records used."""
    at = synopsis.spec.index(feature, numeric=True)
    sums, counts, size, records, known = gather(synopsis, scope, at, exact=True)
    shift = float(synopsis.bins.shifts[at])
    found = bound_moments(counts, counts, sums, (shift, shift), (size, size), known)
    return found, shift, records


def correlation(
    synopsis: Sketch, first: str, second: str, scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return Pearson's correlation of two features."""
    a, b = (synopsis.spec.index(name, numeric=True) for name in (first, second))
    sums, firsts, seconds, sizes, records = gather_pair(synopsis, scope, a, b)
    shifts = float(synopsis.bins.shifts[a]), float(synopsis.bins.shifts[b])
    found = bound_moments(firsts, seconds, sums, shifts, sizes, NO_MOMENTS)
    if found.rows_most < 2.0 or found.rows <= 0.0:
        return SynopsisResult(None, None, None, records)
    low, high = _bound_correlation(found.lows, found.highs)
    # Below this, a constant feature differs from its mean by rounding only.
    size_a, size_b = found.size_a * found.size_a, found.size_b * found.size_b
    margins = rounding(found.rows, size_a), rounding(found.rows, size_b)
    if found.aa <= margins[0] or found.bb <= margins[1]:
        return SynopsisResult(None, low, high, records)
    value = min(max(found.ab / math.sqrt(found.aa * found.bb), low), high)
    return SynopsisResult(value, low, high, records)


@njit(cache=True, nogil=True)
def _bound_variance(
    lows: Floats, highs: Floats, mean: int, square: int
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the bounds of a variance from those of a mean and of a mean square."""
    ends = lows[mean] * lows[mean], highs[mean] * highs[mean]
    least = 0.0 if lows[mean] <= 0.0 <= highs[mean] else min(ends)
    return lows[square] - max(ends), highs[square] - least


@njit(cache=True, nogil=True)
def _bound_correlation(
    lows: Floats, highs: Floats
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return the bounds of a correlation, between -1 and 1, from those of its moments."""
    low_a, high_a = _bound_variance(lows, highs, A, AA)
    low_b, high_b = _bound_variance(lows, highs, B, BB)
    if low_a <= 0.0 or low_b <= 0.0 or low_a * low_b <= 0.0:
        return -1.0, 1.0
    if not high_a * high_b < math.inf:  # squares that no float can hold
        return -1.0, 1.0
    least, most = math.sqrt(low_a * low_b), math.sqrt(high_a * high_b)
    ends = (lows[A] * lows[B], lows[A] * highs[B], highs[A] * lows[B], highs[A] * highs[B])
    low, high = lows[AB] - max(ends), highs[AB] - min(ends)
    low /= least if low < 0.0 else most
    high /= most if high < 0.0 else least
    return max(low * (1.0 + EPSILON), -1.0), min(high * (1.0 + EPSILON), 1.0)


def contrast(synopsis: Sketch, statistic: Statistic, scope: Scope, other: Scope) -> SynopsisResult:
    """Return a statistic of one place or time minus that of another.

    Examples
    --------
    >>> from functools import partial
    >>> june_minus_may = partial(contrast, statistic=partial(mean, feature="temp_c"))
    """
    return statistic(synopsis, scope=scope).minus(statistic(synopsis, scope=other))


@dataclass(frozen=True, slots=True)
class Outliers:
    """Values below ``low`` or above ``high``; ``count`` is their number."""

    low: float
    high: float
    count: SynopsisResult


def outliers(
    synopsis: Sketch, feature: str, share: float, scope: Scope = EVERYTHING
) -> Outliers | None:
    """Return the values so far from the mean that at most a share of all rows can be there.

    By Chebyshev's inequality at most ``share`` of the rows are further from the mean than
    ``sqrt(1 / share)`` standard deviations. None if there are fewer than two values.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError("share", share, "a number between 0 and 1")
    middle, spread = mean(synopsis, feature, scope), stddev(synopsis, feature, scope)
    if middle.value is None or spread.value is None:
        return None
    reach = spread.value / math.sqrt(share)
    low, high = middle.value - reach, middle.value + reach
    at = synopsis.spec.index(feature)
    _, counts, _, records, _ = gather(synopsis, scope, at, exact=False)
    out_sure = (counts.highs < low) | (counts.lows > high)
    out_most = (counts.lows < low) | (counts.highs > high)
    sure, most = float(counts.sure @ out_sure), float(counts.most @ out_most)
    value = float(counts.expected @ ((counts.means < low) | (counts.means > high)))
    return Outliers(low, high, SynopsisResult(min(max(value, sure), most), sure, most, records))
