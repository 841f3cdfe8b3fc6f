"""Moments of one feature or two: estimates, and the bounds of their means over all selections.

Values are about their estimated means: squares and products of small numbers have narrow bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from roost.model.arrays import Floats
from roost.synopsis.bounds import Interval, ValueCounts, greatest_mean, rounding
from roost.synopsis.evidence import Sums
from roost.synopsis.narrowing import GroupMoments, narrow_mean, narrow_square

A, B, AA, BB, AB = range(5)


class Moments(NamedTuple):
    """Estimated sums about the estimated means, and bounds of the means of a, b, aa, bb, ab.

    The bounds include rounding.
    """

    rows: float
    rows_sure: float
    rows_most: float
    centre_a: float  # of shifted values
    centre_b: float
    aa: float
    bb: float
    ab: float
    size_a: float  # the greatest absolute value
    size_b: float
    lows: Floats
    highs: Floats

    def interval(self, term: int) -> Interval:
        """Return the bounds of the mean of a term."""
        return Interval(float(self.lows[term]), float(self.highs[term]))


@njit(cache=True, nogil=True)
def _extremes(
    x0: float, x1: float, y0: float, y1: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:  # pragma: no cover - compiled
    """Return the least and the greatest a, b, aa, bb and ab of values in two intervals."""
    xx, yy = (x0 * x0, x1 * x1), (y0 * y0, y1 * y1)
    xy = (x0 * y0, x0 * y1, x1 * y0, x1 * y1)
    least_xx = 0.0 if x0 <= 0.0 <= x1 else min(xx)
    least_yy = 0.0 if y0 <= 0.0 <= y1 else min(yy)
    return (x0, y0, least_xx, least_yy, min(xy)), (x1, y1, max(xx), max(yy), max(xy))


@njit(cache=True, nogil=True)
def bound_moments(
    firsts: ValueCounts,
    seconds: ValueCounts,
    sums: Sums,
    shifts: tuple[float, float],
    sizes: tuple[float, float],
    groups: GroupMoments,
) -> Moments:  # pragma: no cover - compiled
    """Return the moments of two features from sums of some rows and counts by value of others.

    ``shifts`` was subtracted from the values of the sums, of which ``sizes`` are the greatest.
    ``groups`` narrow the bounds of the first feature.
    """
    n = firsts.means.size
    rows, rows_sure, rows_most = sums.rows, sums.rows, sums.rows
    total_a, total_b = sums.a, sums.b
    optional = 0
    for k in range(n):
        rows += firsts.expected[k]
        rows_sure += firsts.sure[k]
        rows_most += firsts.most[k]
        optional += firsts.most[k] > firsts.sure[k]
        total_a += firsts.expected[k] * (firsts.means[k] - shifts[0])
        total_b += firsts.expected[k] * (seconds.means[k] - shifts[1])
    a = b = 0.0
    if rows > 0.0:
        a, b = total_a / rows, total_b / rows
    elif rows_most > 0.0:
        for k in range(n):
            a += firsts.most[k] / rows_most * (firsts.means[k] - shifts[0])
            b += firsts.most[k] / rows_most * (seconds.means[k] - shifts[1])
    size_a, size_b = sizes[0] + abs(a), sizes[1] + abs(b)
    aa = sums.aa - 2.0 * a * sums.a + sums.rows * a * a
    bb = sums.bb - 2.0 * b * sums.b + sums.rows * b * b
    ab = sums.ab - a * sums.b - b * sums.a + sums.rows * a * b
    lows = np.array([sums.a - sums.rows * a, sums.b - sums.rows * b, aa, bb, ab])
    highs = lows.copy()
    more = np.empty(optional)
    more_lows, more_highs = np.empty((5, optional)), np.empty((5, optional))
    at = 0
    for k in range(n):
        x, y = firsts.means[k] - shifts[0] - a, seconds.means[k] - shifts[1] - b
        weight = firsts.expected[k]
        aa += weight * x * x
        bb += weight * y * y
        ab += weight * x * y
        x0, x1 = firsts.lows[k] - shifts[0] - a, firsts.highs[k] - shifts[0] - a
        y0, y1 = seconds.lows[k] - shifts[1] - b, seconds.highs[k] - shifts[1] - b
        size_a = max(size_a, abs(x0), abs(x1))
        size_b = max(size_b, abs(y0), abs(y1))
        least, most = _extremes(x0, x1, y0, y1)
        sure = firsts.sure[k]
        if sure > 0.0 and k < groups.rows.size and groups.rows[k] < np.inf:
            x0, x1 = narrow_mean(groups, k, sure, a, x0, x1)
            low, high = narrow_square(groups, k, sure, a, least[AA], most[AA])
            least = (x0, least[B], low, least[BB], least[AB])
            most = (x1, most[B], high, most[BB], most[AB])
        for term in range(5):
            lows[term] += sure * least[term]
            highs[term] += sure * most[term]
        if firsts.most[k] > sure:
            more[at] = firsts.most[k] - sure
            for term in range(5):
                more_lows[term, at], more_highs[term, at] = least[term], most[term]
            at += 1
    for term in range(5):
        lows[term] = -greatest_mean(-lows[term], rows_sure, -more_lows[term], more)
        highs[term] = greatest_mean(highs[term], rows_sure, more_highs[term], more)
    greatest = np.array([size_a, size_b, size_a * size_a, size_b * size_b, size_a * size_b])
    margins = rounding(rows_most, 1.0) * greatest
    lows, highs = lows - margins, highs + margins
    return Moments(rows, rows_sure, rows_most, a, b, aa, bb, ab, size_a, size_b, lows, highs)
