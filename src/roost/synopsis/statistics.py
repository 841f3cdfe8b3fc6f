"""Statistical queries: count, mean, standard deviation, correlation, contrast and outliers.

Whole groups contribute their exact sums. Other rows contribute the extremes of their bins to the
bounds, and the mean of their bin to the value. Nulls do not count; a correlation uses the rows that
have both features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numba import njit

from roost.errors import ConfigError
from roost.model.arrays import Floats
from roost.synopsis.bands import Sketch
from roost.synopsis.bounds import (
    EPSILON,
    Interval,
    SynopsisResult,
    ValueCounts,
    mean_interval,
    root,
    rounding,
    square_bounds,
)
from roost.synopsis.evidence import Evidence, Sums, count_rows, gather, gather_pair
from roost.synopsis.narrowing import narrow_means, narrow_squares
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
    at = synopsis.spec.index(feature, numeric=True)
    evidence = gather(synopsis, scope, at, exact=True)
    centre = _Centred.of(evidence, float(synopsis.bins.shifts[at]))
    if centre is None:
        return SynopsisResult(None, None, None, evidence.records)
    low, high = centre.mean
    value = None if centre.estimate is None else min(max(centre.estimate, low), high)
    return SynopsisResult(value, low, high, evidence.records)


def stddev(synopsis: Sketch, feature: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the standard deviation of a feature, of a sample as in SQL."""
    at = synopsis.spec.index(feature, numeric=True)
    evidence = gather(synopsis, scope, at, exact=True)
    centre = _Centred.of(evidence, float(synopsis.bins.shifts[at]))
    if centre is None or centre.rows.high < 2.0:
        return SynopsisResult(None, None, None, evidence.records)
    sums, counts = centre.sums, centre.counts
    squares_of = square_bounds(counts.lows, counts.highs)
    lows, highs = narrow_squares(*squares_of, counts, evidence.moments, centre.at)
    sure = Interval(sums.aa + float(counts.sure @ lows), sums.aa + float(counts.sure @ highs))
    squares = mean_interval(sure, centre.rows.low, lows, highs, counts.optional)
    far = max(abs(centre.offset.low), abs(centre.offset.high))
    margin = rounding(centre.rows.high, centre.size * centre.size)
    few, many = max(centre.rows.low, 2.0), centre.rows.high
    low = root((squares.low - far * far - margin) * many / (many - 1.0))
    high = root((squares.high + margin) * few / (few - 1.0))
    value = None
    rows = sums.rows + float(counts.expected.sum())
    if rows >= 2.0:
        total = sums.aa + float(counts.expected @ (counts.means * counts.means))
        # The centre is the estimated mean, up to rounding.
        value = min(max(root(total / (rows - 1.0)), low), high)
    return SynopsisResult(value, low, high, evidence.records)


@dataclass(frozen=True)
class _Centred:
    """Evidence with the estimated mean subtracted from all values."""

    estimate: float | None  # of the mean
    mean: Interval
    offset: Interval  # of the mean from the centre
    rows: Interval
    sums: Sums
    counts: ValueCounts
    size: float
    at: float  # the centre, a shifted value

    @classmethod
    def of(cls, evidence: Evidence, shift: float) -> _Centred | None:
        """Return the evidence about its own mean; None if no row can have a value."""
        sums, counts = evidence.sums, evidence.counts
        sure, expected = float(counts.sure.sum()), float(counts.expected.sum())
        rows = Interval(sums.rows + sure, sums.rows + float(counts.most.sum()))
        if rows.high <= 0.0:
            return None
        total = sums.a + float(counts.expected @ (counts.means - shift))
        estimate = total / (sums.rows + expected) if sums.rows + expected > 0.0 else None
        centre = estimate
        if centre is None:
            centre = float(counts.most @ counts.means / counts.most.sum() - shift)
        moved = _move(counts, shift + centre)
        about = sums.a - sums.rows * centre
        size = max(evidence.size + abs(centre), _size_of(moved))
        squares = sums.aa - 2.0 * centre * sums.a + sums.rows * centre * centre
        tight = narrow_means(moved, evidence.moments, centre)
        ends = about + float(counts.sure @ tight.lows), about + float(counts.sure @ tight.highs)
        offset = mean_interval(
            Interval(*ends), rows.low, tight.lows, tight.highs, moved.optional
        ).widened(rounding(rows.high, size))
        margin = 4.0 * EPSILON * (abs(shift) + abs(centre))
        bounds = Interval(offset.low + centre + shift, offset.high + centre + shift).widened(margin)
        value = None if estimate is None else estimate + shift
        exact = sums._replace(a=about, aa=max(squares, 0.0))
        return cls(value, bounds, offset, rows, exact, moved, size, centre)


def _move(counts: ValueCounts, by: float) -> ValueCounts:
    lows, highs, means = counts.lows - by, counts.highs - by, counts.means - by
    return counts._replace(lows=lows, highs=highs, means=means)


def _size_of(counts: ValueCounts) -> float:
    extremes = np.maximum(np.abs(counts.lows), np.abs(counts.highs))
    return float(extremes.max(initial=0.0))


def correlation(
    synopsis: Sketch, first: str, second: str, scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return Pearson's correlation of two features."""
    a, b = (synopsis.spec.index(name, numeric=True) for name in (first, second))
    evidence = gather_pair(synopsis, scope, a, b)
    firsts, seconds = evidence.firsts, evidence.seconds
    shifts = float(synopsis.bins.shifts[a]), float(synopsis.bins.shifts[b])
    rows_high = evidence.sums.rows + float(firsts.most.sum())
    found = _pair_moments(firsts, seconds, evidence.sums, *shifts, evidence.sizes)
    if rows_high < 2.0 or found.rows <= 0.0:
        return SynopsisResult(None, None, None, evidence.records)
    optional = firsts.optional
    if optional.any():
        lows, highs = _pair_terms(
            _move(firsts, shifts[0] + found.centre_a), _move(seconds, shifts[1] + found.centre_b)
        )
        means = [
            mean_interval(Interval(low, high), found.rows_sure, more_low, more_high, optional)
            for low, high, more_low, more_high in zip(
                found.lows, found.highs, lows, highs, strict=True
            )
        ]
    else:
        pairs = zip(found.lows.tolist(), found.highs.tolist(), strict=True)
        means = [Interval(low / found.rows_sure, high / found.rows_sure) for low, high in pairs]
    size_a, size_b = found.size_a, found.size_b
    sizes = (size_a, size_b, size_a * size_a, size_b * size_b, size_a * size_b)
    mean_a, mean_b, square_a, square_b, product = (
        interval.widened(rounding(rows_high, size))
        for interval, size in zip(means, sizes, strict=True)
    )
    var_a, var_b = square_a.minus(mean_a.squared()), square_b.minus(mean_b.squared())
    low, high = _ratio(product.minus(mean_a.times(mean_b)), var_a, var_b)
    # Below this, a constant feature differs from its mean by rounding only.
    varies = found.aa > rounding(found.rows, sizes[2]) and found.bb > rounding(found.rows, sizes[3])
    if not varies:
        return SynopsisResult(None, low, high, evidence.records)
    value = min(max(found.ab / math.sqrt(found.aa * found.bb), low), high)
    return SynopsisResult(value, low, high, evidence.records)


class _PairMoments(NamedTuple):
    """Estimated moments about the estimated means, and bounds of the sums over certain rows."""

    rows: float
    rows_sure: float
    centre_a: float  # of shifted values
    centre_b: float
    aa: float
    bb: float
    ab: float
    size_a: float
    size_b: float
    lows: Floats  # of a, b, aa, bb, ab
    highs: Floats


@njit(cache=True, nogil=True)
def _pair_moments(
    firsts: ValueCounts,
    seconds: ValueCounts,
    sums: Sums,
    shift_a: float,
    shift_b: float,
    sizes: tuple[float, float],
) -> _PairMoments:  # pragma: no cover - compiled
    n = firsts.means.size
    rows, rows_sure, total_a, total_b = sums.rows, sums.rows, sums.a, sums.b
    for k in range(n):
        rows += firsts.expected[k]
        rows_sure += firsts.sure[k]
        total_a += firsts.expected[k] * (firsts.means[k] - shift_a)
        total_b += firsts.expected[k] * (seconds.means[k] - shift_b)
    a = total_a / rows if rows > 0.0 else 0.0
    b = total_b / rows if rows > 0.0 else 0.0
    size_a, size_b = sizes[0] + abs(a), sizes[1] + abs(b)
    aa = sums.aa - 2.0 * a * sums.a + sums.rows * a * a
    bb = sums.bb - 2.0 * b * sums.b + sums.rows * b * b
    ab = sums.ab - a * sums.b - b * sums.a + sums.rows * a * b
    lows = np.array([sums.a - sums.rows * a, sums.b - sums.rows * b, aa, bb, ab])
    highs = lows.copy()
    for k in range(n):
        x, y = firsts.means[k] - shift_a - a, seconds.means[k] - shift_b - b
        weight, sure = firsts.expected[k], firsts.sure[k]
        aa += weight * x * x
        bb += weight * y * y
        ab += weight * x * y
        x0, x1 = firsts.lows[k] - shift_a - a, firsts.highs[k] - shift_a - a
        y0, y1 = seconds.lows[k] - shift_b - b, seconds.highs[k] - shift_b - b
        size_a = max(size_a, abs(x0), abs(x1))
        size_b = max(size_b, abs(y0), abs(y1))
        lows[0] += sure * x0
        highs[0] += sure * x1
        lows[1] += sure * y0
        highs[1] += sure * y1
        lows[2] += sure * (0.0 if x0 <= 0.0 <= x1 else min(x0 * x0, x1 * x1))
        highs[2] += sure * max(x0 * x0, x1 * x1)
        lows[3] += sure * (0.0 if y0 <= 0.0 <= y1 else min(y0 * y0, y1 * y1))
        highs[3] += sure * max(y0 * y0, y1 * y1)
        lows[4] += sure * min(x0 * y0, x0 * y1, x1 * y0, x1 * y1)
        highs[4] += sure * max(x0 * y0, x0 * y1, x1 * y0, x1 * y1)
    return _PairMoments(rows, rows_sure, a, b, aa, bb, ab, size_a, size_b, lows, highs)


def _pair_terms(firsts: ValueCounts, seconds: ValueCounts) -> tuple[list[Floats], list[Floats]]:
    """Return the least and greatest a, b, aa, bb and ab of each entry."""
    corners = [x * y for x in (firsts.lows, firsts.highs) for y in (seconds.lows, seconds.highs)]
    squares = [square_bounds(x.lows, x.highs) for x in (firsts, seconds)]
    lows = [firsts.lows, seconds.lows, squares[0][0], squares[1][0], np.minimum.reduce(corners)]
    highs = [firsts.highs, seconds.highs, squares[0][1], squares[1][1], np.maximum.reduce(corners)]
    return lows, highs


def _ratio(product: Interval, var_a: Interval, var_b: Interval) -> Interval:
    """Return the bounds of a covariance over the root of two variances, between -1 and 1."""
    least, most = root(var_a.low * max(var_b.low, 0.0)), root(var_a.high * var_b.high)
    if var_a.low <= 0.0 or least <= 0.0:
        return Interval(-1.0, 1.0)
    low = product.low / (least if product.low < 0.0 else most)
    high = product.high / (most if product.high < 0.0 else least)
    return Interval(max(low * (1.0 + EPSILON), -1.0), min(high * (1.0 + EPSILON), 1.0))


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
