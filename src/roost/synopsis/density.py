"""Density queries: probability, quantiles and kernel density estimates of a feature.

They use counts by bin: the marginals of whole groups, and the leaves of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit

from roost.errors import ConfigError
from roost.synopsis.bands import Sketch
from roost.synopsis.bounds import EPSILON, SynopsisResult, ValueCounts, greatest_mean, rounding
from roost.synopsis.evidence import count_rows, gather
from roost.synopsis.scope import EVERYTHING, Scope
from roost.synopsis.statistics import stddev

PEAK = 1.0 / math.sqrt(2.0 * math.pi)


def probability(synopsis: Sketch, predicate: str, scope: Scope = EVERYTHING) -> SynopsisResult:
    """Return the share of the rows in a scope that satisfy a predicate.

    Rows for which the predicate is unknown, because a feature is null, do not count.
    """
    low, high, value, records = count_rows(synopsis, scope.and_predicate(predicate))
    denied = count_rows(synopsis, scope.and_predicate(f"not ({predicate})"))
    records += denied[3]
    if high + denied[1] <= 0.0:
        return SynopsisResult(None, None, None, records)
    least = low / (low + denied[1]) if low > 0.0 else 0.0
    most = high / (high + denied[0]) if high > 0.0 else 0.0
    total = value + denied[2]
    estimate = min(max(value / total, least), most) if total > 0.0 else None
    return SynopsisResult(estimate, least, most, records)


def quantiles(
    synopsis: Sketch, feature: str, ranks: Sequence[float], scope: Scope = EVERYTHING
) -> list[SynopsisResult]:
    """Return quantiles of a feature, such as ``[0.25, 0.5, 0.75]``.

    Between two values the quantile is interpolated, as by ``quantile_cont`` of SQL.
    """
    wrong = [rank for rank in ranks if not 0.0 <= rank <= 1.0]
    if wrong:
        raise ConfigError("ranks", wrong[0], "numbers from 0 to 1")
    at = synopsis.spec.index(feature, numeric=True)
    _, counts, _, records, _ = gather(synopsis, scope, at, exact=False)
    if not counts.most.any():
        return [SynopsisResult(None, None, None, records) for _ in ranks]
    return [_result(*_quantile(counts, float(rank)), records) for rank in ranks]


@njit(cache=True, nogil=True)
def _quantile(
    counts: ValueCounts, rank: float
) -> tuple[float, float, float]:  # pragma: no cover - compiled
    """Return a quantile, NaN if no row is expected, and its bounds over all selections."""
    sure, optional = counts.sure.sum(), counts.most - counts.sure
    # The least: all optional rows up to a value count, and none above it.
    order = np.argsort(counts.lows)
    low = counts.lows[order[0]]
    below, rows = 0.0, sure
    for k in order:
        below += counts.most[k]
        rows += optional[k]
        if below >= math.floor(rank * max(rows - 1.0, 0.0)) + 1.0:
            low = counts.lows[k]
            break
    # The greatest: all optional rows from a value on count, and none below it.
    order = np.argsort(counts.highs)[::-1]
    high = counts.highs[order[0]]
    above, rows = 0.0, sure
    for k in order:
        above += counts.sure[k]
        rows += optional[k]
        if sure - above <= math.ceil(rank * max(rows - 1.0, 0.0)):
            high = counts.highs[k]
            break
    margin = 4.0 * EPSILON * max(abs(low), abs(high))  # of the interpolation
    return _interpolate(counts, rank), low - margin, high + margin


@njit(cache=True, nogil=True)
def _interpolate(counts: ValueCounts, rank: float) -> float:  # pragma: no cover - compiled
    """Return the estimate of a quantile: each mean is the middle of its rows."""
    order = np.argsort(counts.means)
    goal = rank * counts.expected.sum()
    rows, last_middle, last = 0.0, -1.0, np.nan
    k = 0
    while k < order.size:
        mean, weight = counts.means[order[k]], 0.0
        # Equal means are one, whatever their order.
        while k < order.size and counts.means[order[k]] == mean:
            weight += counts.expected[order[k]]
            k += 1
        if weight <= 0.0:
            continue
        middle = rows + weight / 2.0
        if goal <= middle:
            share = (goal - last_middle) / (middle - last_middle)
            return float(mean if last_middle < 0.0 else last + share * (mean - last))
        rows, last_middle, last = rows + weight, middle, mean
    return float(last)


def _result(value: float, low: float, high: float, records: int) -> SynopsisResult:
    known = None if math.isnan(value) else min(max(value, low), high)
    return SynopsisResult(known, low, high, records)


def density(
    synopsis: Sketch,
    feature: str,
    points: Sequence[float],
    scope: Scope = EVERYTHING,
    bandwidth: float | None = None,
) -> list[SynopsisResult]:
    """Return the Gaussian kernel density estimate of a feature at some points.

    Without a bandwidth, Silverman's rule chooses it. The bounds hold for the estimate from all rows
    with the same bandwidth.
    """
    if bandwidth is not None and not 0.0 < bandwidth < math.inf:
        raise ConfigError("bandwidth", bandwidth, "a number above 0")
    wrong = [point for point in points if not math.isfinite(point)]
    if wrong:
        raise ConfigError("points", wrong[0], "finite numbers")
    at = synopsis.spec.index(feature, numeric=True)
    width = silverman(synopsis, feature, scope) if bandwidth is None else bandwidth
    _, counts, _, records, _ = gather(synopsis, scope, at, exact=False)
    if width is None or not counts.most.any():
        return [SynopsisResult(None, None, None, records) for _ in points]
    margin = rounding(float(counts.most.sum()), PEAK / width)
    found = [_density(counts, float(point), width) for point in points]
    return [
        _result(value, max(low - margin, 0.0), high + margin, records) for value, low, high in found
    ]


@njit(cache=True, nogil=True)
def _density(
    counts: ValueCounts, point: float, width: float
) -> tuple[float, float, float]:  # pragma: no cover - compiled
    """Return a density, NaN if no row is expected, and its bounds."""
    n = counts.lows.size
    lows, highs = np.empty(n), np.empty(n)
    low = high = total = 0.0
    for k in range(n):
        left, right = point - counts.lows[k], counts.highs[k] - point
        near = max(-left, -right, 0.0)
        lows[k], highs[k] = _kernel(max(left, right), width), _kernel(near, width)
        low += counts.sure[k] * lows[k]
        high += counts.sure[k] * highs[k]
        total += counts.expected[k] * _kernel(point - counts.means[k], width)
    sure, more = counts.sure.sum(), counts.most - counts.sure
    low, high = -greatest_mean(-low, sure, -lows, more), greatest_mean(high, sure, highs, more)
    expected = counts.expected.sum()
    return total / expected if expected > 0.0 else np.nan, low, high


@njit(cache=True, nogil=True)
def _kernel(distance: float, width: float) -> float:  # pragma: no cover - compiled
    scaled = distance / width
    return math.exp(-0.5 * scaled * scaled) * (PEAK / width)


def silverman(synopsis: Sketch, feature: str, scope: Scope = EVERYTHING) -> float | None:
    """Return the bandwidth of Silverman's rule; None if the values do not vary."""
    spread = stddev(synopsis, feature, scope).value
    quarter, three = (x.value for x in quantiles(synopsis, feature, [0.25, 0.75], scope))
    if not spread or quarter is None or three is None:
        return None
    at = synopsis.spec.index(feature)
    rows = float(gather(synopsis, scope, at, exact=False).counts.expected.sum())
    sides = [spread, *([(three - quarter) / 1.34] if three > quarter else [])]
    return float(0.9 * min(sides) * rows**-0.2)
