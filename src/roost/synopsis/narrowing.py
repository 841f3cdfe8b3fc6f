"""What a group record says about its rows when leaves do not tell a feature.

A group knows how many of its rows satisfy a condition up to one bin of its marginals, and by
Markov's inequality (mean, minimum, maximum) and Cantelli's (mean, variance) at most how many are in
a tail. Fréchet's bounds combine conditions, and a group of which an unknown part is in the scope.
The mean of an unknown ``k`` of ``n`` values is within ``stddev * sqrt((n - k) / k)`` of theirs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.kernel.shapes import INSIDE, OUTSIDE
from roost.model.arrays import Floats, Ints
from roost.predicate.ast import Comparison, Condition
from roost.synopsis.bounds import EPSILON
from roost.synopsis.comparing import judge_ranges
from roost.synopsis.scan import AND
from roost.synopsis.scope import features_at, judge_codes, postfix, ranges_of
from roost.synopsis.synopsis import Synopsis


class RowCounts(NamedTuple):
    """Bounds and an estimate of a number of rows, by group."""

    low: Floats
    high: Floats
    value: Floats


class GroupMoments(NamedTuple):
    """Number, mean and sum of squares about the mean of the values of the group of each entry.

    ``error`` exceeds the rounding error of the mean, ``squares_error`` that of the squares. Without
    such values their number is infinite.
    """

    rows: Floats
    means: Floats
    squares: Floats
    error: Floats
    squares_error: Floats

    @classmethod
    def none(cls, entries: int) -> GroupMoments:
        """Return the moments of entries that are not parts of known groups."""
        return cls(np.full(entries, np.inf), *(np.zeros(entries) for _ in range(4)))

    def padded(self, entries: int) -> GroupMoments:
        """Return the moments with further entries, so many in all."""
        rest = GroupMoments.none(entries - self.rows.size)
        return GroupMoments(*map(np.concatenate, zip(self, rest, strict=True)))


NO_MOMENTS = GroupMoments.none(0)


def moments_of(synopsis: Synopsis, at: Ints, feature: int) -> GroupMoments:
    """Return the moments of a feature in some groups; values are shifted."""
    groups = synopsis.groups
    rows = groups.present[at, feature, feature].astype(np.float64)
    some = np.maximum(rows, 1.0)
    means = groups.sums[at, feature, feature] / some
    squares = groups.squares[at, feature, feature] - means * means * rows
    shift = synopsis.bins.shifts[feature]
    extremes = np.abs(groups.lows[at, feature] - shift), np.abs(groups.highs[at, feature] - shift)
    sizes = np.where(rows > 0.0, np.maximum(*extremes), 0.0)
    error = 4.0 * (rows + 16.0) * EPSILON * sizes
    return GroupMoments(rows, means, np.maximum(squares, 0.0), error, error * sizes * some)


@njit(cache=True, nogil=True)
def narrow_mean(
    groups: GroupMoments, k: Whole, sure: float, centre: float, low: float, high: float
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return bounds of the mean of the rows of an entry in the scope, not of every value.

    They are minus the shift and the centre, the moments minus the shift. ``sure`` is above 0.
    """
    rows, mean = groups.rows[k], groups.means[k]
    squares = groups.squares[k] + groups.squares_error[k]
    reach = math.sqrt(squares / rows * max(rows - sure, 0.0) / sure) * (1.0 + 8.0 * EPSILON)
    reach += groups.error[k] + 4.0 * EPSILON * (abs(centre) + abs(mean))
    return max(low, mean - centre - reach), min(high, mean - centre + reach)


@njit(cache=True, nogil=True)
def narrow_square(
    groups: GroupMoments, k: Whole, sure: float, centre: float, low: float, high: float
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return bounds of the mean square of the rows of an entry in the scope about a centre.

    ``low`` and ``high`` are those of every square. The squares of a part sum up to at most those
    of the group, and to at least what the largest squares leave of it.
    """
    rows, offset = groups.rows[k], groups.means[k] - centre
    total = groups.squares[k] + rows * offset * offset
    error = groups.squares_error[k] + 2.0 * rows * abs(offset) * groups.error[k]
    error += 16.0 * EPSILON * (total + rows * (offset * offset + centre * centre))
    least = high - (rows * high - total + error) / sure
    return max(low, least), min(high, (total + error) / sure)


def predicate_rows(synopsis: Synopsis, at: Ints, predicate: str) -> RowCounts:
    """Return how many rows of some groups satisfy a predicate."""
    rows = synopsis.groups.counts[at].astype(np.float64)
    stack: list[RowCounts] = []
    for step in postfix(predicate, synopsis.spec.schema):
        if not isinstance(step, int):
            stack.append(_condition_rows(synopsis, at, rows, *step))
            continue
        a, b = stack[-2:]
        both = a.value * b.value / np.maximum(rows, 1.0)
        if step == AND:
            low = np.maximum(a.low + b.low - rows, 0.0)
            stack[-2:] = [RowCounts(low, np.minimum(a.high, b.high), both)]
        else:
            high = np.minimum(a.high + b.high, rows)
            stack[-2:] = [RowCounts(np.maximum(a.low, b.low), high, a.value + b.value - both)]
    return stack[0]


def _compared_rows(
    synopsis: Synopsis, at: Ints, rows: Floats, comparison: Comparison, negated: bool
) -> RowCounts:
    """Return how many rows satisfy a comparison, by the extremes of both features in a group."""
    groups, (a, b) = synopsis.groups, features_at(synopsis.spec, comparison)
    ranges = ((groups.lows[at, f], groups.highs[at, f]) for f in (a, b))
    states, shares = judge_ranges(comparison.operator, negated, *ranges)
    both, exact = groups.present[at, a, b].astype(np.float64), groups.exact[at]
    low, high = both * (states == INSIDE), both * (states != OUTSIDE)
    value = np.where(exact, both * shares, rows / 2.0)
    return RowCounts(np.where(exact, low, 0.0), np.where(exact, high, rows), value)


def _condition_rows(
    synopsis: Synopsis, at: Ints, rows: Floats, condition: Condition | Comparison, negated: bool
) -> RowCounts:
    if isinstance(condition, Comparison):
        return _compared_rows(synopsis, at, rows, condition, negated)
    groups, feature = synopsis.groups, synopsis.spec.index(condition.attribute)
    states, shares = judge_codes(synopsis, feature, condition, negated)
    marginals = groups.marginals[at, feature].astype(np.float64)
    low, high = marginals @ (states == INSIDE), marginals @ (states != OUTSIDE)
    value = marginals @ shares
    exact = groups.exact[at]
    if synopsis.bins.categories[feature] is None and condition.operator != "is null":
        type_ = synopsis.spec.features[feature].type
        ranges, outside = ranges_of(condition, negated, type_)
        least, most = _rows_in_ranges(synopsis, at, feature, ranges)
        if outside:
            present = groups.present[at, feature, feature]
            least, most = present - most, present - least
        low, high = np.maximum(low, least), np.minimum(high, most)
    # Groups of a selected part have no sums and no marginals.
    counts = synopsis.bin_records.counts[feature]
    share = float(counts @ shares) / max(float(counts.sum()), 1.0)
    value = np.where(exact, np.clip(value, low, high), rows * share)
    return RowCounts(np.where(exact, low, 0.0), np.where(exact, high, rows), value)


def _rows_in_ranges(
    synopsis: Synopsis, at: Ints, feature: int, ranges: list[tuple[float, float]]
) -> tuple[Floats, Floats]:
    """Return at least and at most how many values of some groups are in closed ranges."""
    moments, shift = moments_of(synopsis, at, feature), float(synopsis.bins.shifts[feature])
    lows, highs = (column[at, feature] for column in (synopsis.groups.lows, synopsis.groups.highs))
    least, most = np.zeros(at.size), np.zeros(at.size)
    mirrored = moments._replace(means=-moments.means)
    for low, high in ranges:
        above = _tail(moments, shift, lows, highs, low)
        below = _tail(mirrored, -shift, -highs, -lows, -high)
        most += np.minimum(above, below)
        over = _tail(moments, shift, lows, highs, np.nextafter(high, np.inf))
        under = _tail(mirrored, -shift, -highs, -lows, -np.nextafter(low, -np.inf))
        least = np.maximum(least, moments.rows - over - under)
    return least, np.minimum(most, moments.rows)


def _tail(moments: GroupMoments, shift: float, lows: Floats, highs: Floats, limit: float) -> Floats:
    """Return at most how many values are at or above a limit, by Markov's and Cantelli's bounds."""
    error = moments.error + 8.0 * EPSILON * (abs(limit) + abs(shift))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        variance = (moments.squares + moments.squares_error) / moments.rows
        distance = limit - shift - moments.means - error
        cantelli = variance / (variance + distance * distance)
        markov = (moments.means + shift + error - lows) / (limit - lows)
        share = np.fmin(np.minimum(cantelli, 1.0), np.where(limit > lows, markov, 1.0))
    rows = np.floor(moments.rows * np.clip(share, 0.0, 1.0) * (1.0 + 1e-12) + 1e-9)
    rows = np.where(distance > 0.0, rows, moments.rows)
    outside: NDArray[np.bool_] = (highs < limit) | (moments.rows <= 0.0)
    return np.where(outside, 0.0, np.where(lows >= limit, moments.rows, rows))
