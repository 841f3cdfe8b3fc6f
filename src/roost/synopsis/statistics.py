"""Statistical queries: count, mean, standard deviation, correlation, contrast and outliers.

Whole groups contribute their exact sums. Other rows contribute the extremes of their bins to the
bounds, and the mean of their bin to the value. Nulls do not count; a correlation uses the rows that
have both features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roost.errors import ConfigError
from roost.model.arrays import Floats
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
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.synopsis import Synopsis


class Statistic(Protocol):
    """A query of one scope, for `contrast`."""

    def __call__(self, synopsis: Synopsis, scope: Scope) -> SynopsisResult:
        """Return the result for a scope."""


def count(synopsis: Synopsis, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the number of rows in a scope."""
    low, high, value, records = count_rows(synopsis, scope)
    return SynopsisResult(value, low, high, records)


def mean(synopsis: Synopsis, feature: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the mean of a feature."""
    at = synopsis.spec.index(feature, numeric=True)
    evidence = gather(synopsis, scope, at, exact=True)
    centre = _Centred.of(evidence, float(synopsis.bins.shifts[at]))
    if centre is None:
        return SynopsisResult(None, None, None, evidence.records)
    low, high = centre.mean
    value = None if centre.estimate is None else min(max(centre.estimate, low), high)
    return SynopsisResult(value, low, high, evidence.records)


def stddev(synopsis: Synopsis, feature: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the standard deviation of a feature, of a sample as in SQL."""
    at = synopsis.spec.index(feature, numeric=True)
    evidence = gather(synopsis, scope, at, exact=True)
    centre = _Centred.of(evidence, float(synopsis.bins.shifts[at]))
    if centre is None or centre.rows.high < 2.0:
        return SynopsisResult(None, None, None, evidence.records)
    sums, counts = centre.sums, centre.counts
    lows, highs = square_bounds(counts.lows, counts.highs)
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
        centre = float(counts.means.mean() - shift) if estimate is None else estimate
        moved = _move(counts, shift + centre)
        about = sums.a - sums.rows * centre
        size = max(evidence.size + abs(centre), _size_of(moved))
        squares = sums.aa - 2.0 * centre * sums.a + sums.rows * centre * centre
        ends = about + float(counts.sure @ moved.lows), about + float(counts.sure @ moved.highs)
        offset = mean_interval(
            Interval(*ends), rows.low, moved.lows, moved.highs, moved.optional
        ).widened(rounding(rows.high, size))
        margin = 4.0 * EPSILON * (abs(shift) + abs(centre))
        bounds = Interval(offset.low + centre + shift, offset.high + centre + shift).widened(margin)
        value = None if estimate is None else estimate + shift
        exact = sums._replace(a=about, aa=max(squares, 0.0))
        return cls(value, bounds, offset, rows, exact, moved, size)


def _move(counts: ValueCounts, by: float) -> ValueCounts:
    lows, highs, means = counts.lows - by, counts.highs - by, counts.means - by
    return counts._replace(lows=lows, highs=highs, means=means)


def _size_of(counts: ValueCounts) -> float:
    extremes = np.maximum(np.abs(counts.lows), np.abs(counts.highs))
    return float(extremes.max(initial=0.0))


def correlation(
    synopsis: Synopsis, first: str, second: str, scope: Scope = EVERYTHING
) -> SynopsisResult:
    """Return Pearson's correlation of two features."""
    a, b = (synopsis.spec.index(name, numeric=True) for name in (first, second))
    evidence = gather_pair(synopsis, scope, a, b)
    shift_a, shift_b = (float(synopsis.bins.shifts[f]) for f in (a, b))
    firsts, seconds = _move(evidence.firsts, shift_a), _move(evidence.seconds, shift_b)
    exact, expected = evidence.sums, firsts.expected
    rows = exact.rows + float(expected.sum())
    rows_low = exact.rows + float(firsts.sure.sum())
    rows_high = exact.rows + float(firsts.most.sum())
    if rows_high < 2.0 or rows <= 0.0:
        return SynopsisResult(None, None, None, evidence.records)
    centre_a = (exact.a + float(expected @ firsts.means)) / rows
    centre_b = (exact.b + float(expected @ seconds.means)) / rows
    exact = _recentre(exact, centre_a, centre_b)
    firsts, seconds = _move(firsts, centre_a), _move(seconds, centre_b)
    size_a = max(evidence.sizes[0] + abs(centre_a), _size_of(firsts))
    size_b = max(evidence.sizes[1] + abs(centre_b), _size_of(seconds))

    def bounded(total: float, lows: Floats, highs: Floats, size: float) -> Interval:
        ends = total + float(firsts.sure @ lows), total + float(firsts.sure @ highs)
        found = mean_interval(Interval(*ends), rows_low, lows, highs, firsts.optional)
        return found.widened(rounding(rows_high, size))

    corners = [x * y for x in (firsts.lows, firsts.highs) for y in (seconds.lows, seconds.highs)]
    mean_a = bounded(exact.a, firsts.lows, firsts.highs, size_a)
    mean_b = bounded(exact.b, seconds.lows, seconds.highs, size_b)
    var_a = bounded(exact.aa, *square_bounds(firsts.lows, firsts.highs), size_a * size_a)
    var_b = bounded(exact.bb, *square_bounds(seconds.lows, seconds.highs), size_b * size_b)
    product = bounded(
        exact.ab, np.minimum.reduce(corners), np.maximum.reduce(corners), size_a * size_b
    )
    var_a, var_b = var_a.minus(mean_a.squared()), var_b.minus(mean_b.squared())
    low, high = _ratio(product.minus(mean_a.times(mean_b)), var_a, var_b)
    aa = exact.aa + float(expected @ (firsts.means * firsts.means))
    bb = exact.bb + float(expected @ (seconds.means * seconds.means))
    ab = exact.ab + float(expected @ (firsts.means * seconds.means))
    # Below this, a constant feature differs from its mean by rounding only.
    varies = aa > rounding(rows, size_a * size_a) and bb > rounding(rows, size_b * size_b)
    if not varies:
        return SynopsisResult(None, low, high, evidence.records)
    value = min(max(ab / math.sqrt(aa * bb), low), high)
    return SynopsisResult(value, low, high, evidence.records)


def _recentre(sums: Sums, a: float, b: float) -> Sums:
    return Sums(
        sums.rows,
        sums.a - sums.rows * a,
        sums.b - sums.rows * b,
        sums.aa - 2.0 * a * sums.a + sums.rows * a * a,
        sums.bb - 2.0 * b * sums.b + sums.rows * b * b,
        sums.ab - a * sums.b - b * sums.a + sums.rows * a * b,
    )


def _ratio(product: Interval, var_a: Interval, var_b: Interval) -> Interval:
    """Return the bounds of a covariance over the root of two variances, between -1 and 1."""
    least, most = root(var_a.low * max(var_b.low, 0.0)), root(var_a.high * var_b.high)
    if var_a.low <= 0.0 or least <= 0.0:
        return Interval(-1.0, 1.0)
    low = product.low / (least if product.low < 0.0 else most)
    high = product.high / (most if product.high < 0.0 else least)
    return Interval(max(low * (1.0 + EPSILON), -1.0), min(high * (1.0 + EPSILON), 1.0))


def contrast(
    synopsis: Synopsis, statistic: Statistic, scope: Scope, other: Scope
) -> SynopsisResult:
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
    synopsis: Synopsis, feature: str, share: float, scope: Scope = EVERYTHING
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
    _, counts, _, records = gather(synopsis, scope, at, exact=False)
    out_sure = (counts.highs < low) | (counts.lows > high)
    out_most = (counts.lows < low) | (counts.highs > high)
    sure, most = float(counts.sure @ out_sure), float(counts.most @ out_most)
    value = float(counts.expected @ ((counts.means < low) | (counts.means > high)))
    return Outliers(low, high, SynopsisResult(min(max(value, sure), most), sure, most, records))
