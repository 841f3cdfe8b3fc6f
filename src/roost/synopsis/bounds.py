"""Results and the arithmetic of their bounds.

A guaranteed bound holds for every table that the synopsis could have been built from: each row
lies between the extremes of its bin, rows of leaves on the border of the query may or may not
count, and rounding is included. A probable bound would hold with its confidence; no result of this
module is of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numba import njit
from numba.extending import register_jitable

from roost.model.arrays import Floats

EPSILON = float(np.finfo(np.float64).eps)


class BoundKind(StrEnum):
    """What a bound promises."""

    GUARANTEED = "guaranteed"
    PROBABLE = "probable"


@dataclass(frozen=True, slots=True)
class SynopsisResult:
    """An estimate with its bounds.

    ``value`` is None if there is nothing to estimate, such as the mean of no rows; then ``low`` and
    ``high`` are None, too, unless rows may exist. ``records`` counts the group records, leaves and
    rows that were used.
    """

    value: float | None
    low: float | None
    high: float | None
    records: int
    kind: BoundKind = BoundKind.GUARANTEED
    confidence: float = 1.0

    def minus(self, other: SynopsisResult) -> SynopsisResult:
        """Return the difference of two results; both hold with the confidence of its bounds."""
        records = self.records + other.records
        pairs = ((self.value, other.value), (self.low, other.high), (self.high, other.low))
        value, low, high = (None if a is None or b is None else a - b for a, b in pairs)
        confidence = max(self.confidence + other.confidence - 1.0, 0.0)
        kind = self.kind if self.kind is BoundKind.PROBABLE else other.kind
        return SynopsisResult(value, low, high, records, kind, confidence)


class ValueCounts(NamedTuple):
    """Rows by value: each entry has extremes and mean of its values, and three counts of rows."""

    lows: Floats
    highs: Floats
    means: Floats
    sure: Floats  # certainly in the scope
    most: Floats  # possibly in the scope
    expected: Floats


def join_counts(parts: Sequence[ValueCounts]) -> ValueCounts:
    """Return the entries of all parts."""
    if len(parts) == 1:
        return parts[0]
    return ValueCounts(*map(np.concatenate, zip(*parts, strict=True)))


class Interval(NamedTuple):
    """A closed interval."""

    low: float
    high: float

    def times(self, other: Interval) -> Interval:
        """Return the interval of the products."""
        ends = [a * b for a in self for b in other]
        return Interval(min(ends), max(ends))


@register_jitable
def rounding(rows: float, size: float) -> float:
    """Return more than the rounding error of a mean of so many numbers of at most this size."""
    return 4.0 * (rows + 16.0) * EPSILON * size


@njit(cache=True, nogil=True)
def greatest_mean(
    total: float, rows: float, values: Floats, counts: Floats
) -> float:  # pragma: no cover - compiled
    """Return the greatest mean of some rows and any selection of further ones.

    ``counts[k]`` further rows have the value ``values[k]``. Rows whose value exceeds a mean raise
    it: selecting them again and again by the last mean ends, after a few times, with the greatest.
    The result is -inf if there are no rows at all, and inf if sums are too large for a float.
    """
    best = total / rows if rows > 0.0 else -np.inf
    while True:
        added, number = total, rows
        for k in range(values.size):
            if values[k] > best:
                added += values[k] * counts[k]
                number += counts[k]
        if number <= 0.0 or added / number <= best:
            return best
        best = added / number
        if math.isnan(best):
            return np.inf


def root(value: float) -> float:
    """Return the square root, 0 of a negative number."""
    return math.sqrt(value) if value > 0.0 else 0.0
