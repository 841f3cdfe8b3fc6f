"""Density queries: probability, quantiles and kernel density estimates of a feature.

They use counts by bin: the marginals of whole groups, and the leaves of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from roost.errors import ConfigError
from roost.model.arrays import Floats, Ints
from roost.synopsis.bands import Sketch
from roost.synopsis.bounds import (
    EPSILON,
    Interval,
    SynopsisResult,
    ValueCounts,
    greatest_mean,
    rounding,
)
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
    by_low, by_high = np.argsort(counts.lows), np.argsort(counts.highs)
    return [_quantile(counts, float(rank), by_low, by_high, records) for rank in ranks]


def _quantile(
    counts: ValueCounts, rank: float, by_low: Ints, by_high: Ints, records: int
) -> SynopsisResult:
    """Bound the quantile of any selection: optional rows count where they move it furthest."""
    sure = float(counts.sure.sum())
    # The least: all optional rows up to a value count, and none above it.
    below = np.cumsum(counts.most[by_low])
    rows = sure + np.cumsum(counts.optional[by_low])
    reached = below >= np.floor(rank * np.maximum(rows - 1.0, 0.0)) + 1.0
    low = float(counts.lows[by_low][np.argmax(reached)])
    # The greatest: all optional rows from a value on count, and none below it.
    order = by_high[::-1]
    above = np.cumsum(counts.sure[order])
    rows = sure + np.cumsum(counts.optional[order])
    reached = sure - above <= np.ceil(rank * np.maximum(rows - 1.0, 0.0))
    high = float(counts.highs[order][np.argmax(reached)])
    margin = 4.0 * EPSILON * max(abs(low), abs(high))  # of the interpolation
    value = None
    if counts.expected.any():
        # Each mean is the middle of its rows; equal means are one, whatever their order.
        means, at = np.unique(counts.means, return_inverse=True)
        weights = np.bincount(at, counts.expected)
        middles = np.cumsum(weights) - weights / 2.0
        value = float(np.interp(rank * weights.sum(), middles, means))
        value = min(max(value, low), high)
    return SynopsisResult(value, low - margin, high + margin, records)


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
    at = synopsis.spec.index(feature, numeric=True)
    width = silverman(synopsis, feature, scope) if bandwidth is None else bandwidth
    _, counts, _, records, _ = gather(synopsis, scope, at, exact=False)
    if width is None or not counts.most.any():
        return [SynopsisResult(None, None, None, records) for _ in points]
    return [_density_at(counts, float(point), width, records) for point in points]


def _density_at(counts: ValueCounts, point: float, width: float, records: int) -> SynopsisResult:
    near = np.clip(point, counts.lows, counts.highs)
    far = np.where(point - counts.lows > counts.highs - point, counts.lows, counts.highs)
    highs, lows, values = (_kernel(point - x, width) for x in (near, far, counts.means))
    sure, more, rows = counts.sure, counts.optional, float(counts.sure.sum())
    bounds = Interval(
        -greatest_mean(-float(sure @ lows), rows, -lows, more),
        greatest_mean(float(sure @ highs), rows, highs, more),
    ).widened(rounding(rows + float(more.sum()), PEAK / width))
    total = float(counts.expected.sum())
    value = float(counts.expected @ values) / total if total > 0.0 else None
    low, high = max(bounds.low, 0.0), bounds.high
    return SynopsisResult(None if value is None else min(max(value, low), high), low, high, records)


def _kernel(distances: Floats, width: float) -> Floats:
    return np.asarray(np.exp(-0.5 * (distances / width) ** 2) * (PEAK / width))


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
