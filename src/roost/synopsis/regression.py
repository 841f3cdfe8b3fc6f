"""Least squares from sums and products.

Least squares uses the rows that have the target and all features. The records of whole groups have
exact sums over the rows that have two of them. With one feature these are the same. With several,
rows with some of them but not all are subtracted, as their leaves describe them: only runs of
leaves with nulls are read. Groups that the scope cuts contribute their leaves.

A leaf has the bin of a value, and the mean of the bin stands for it. Replacing a feature by the
mean of its bin does not bias a coefficient. What lies inside bins may, and widens the
intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from roost.errors import ConfigError
from roost.kernel.shapes import INSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.bands import Sketch, parts_of
from roost.synopsis.bounds import BoundKind, SynopsisResult, root
from roost.synopsis.leaves import CODES, HAS_NULL
from roost.synopsis.records import GroupRecords, Totals, product_matrix
from roost.synopsis.scope import EVERYTHING, CompiledScope, Scope, compile_scope
from roost.synopsis.scope_leaves import (
    ScopeLeaves,
    check_planes,
    leaves_cut,
    leaves_of_runs,
    whole_runs,
)
from roost.synopsis.synopsis import Synopsis

RANK_TOLERANCE = 1e-9  # of an eigenvalue of the features' correlations


@dataclass(frozen=True, eq=False)
class Regression:
    """A linear model of a target; intervals are probable.

    A coefficient without a value is not determined: its feature does not vary, or depends on
    others. ``deviation`` is that of the residuals. Without enough rows all are None.
    """

    target: str
    intercept: SynopsisResult
    coefficients: Mapping[str, SynopsisResult]
    r2: float | None
    deviation: float | None
    rows: float
    records: int
    _means: Floats = field(repr=False)  # of the features, then of the target
    _inverse: Floats = field(repr=False)  # of the centred products of the features
    _reach: float = field(repr=False)  # of a residual

    def predict(self, values: Mapping[str, float]) -> SynopsisResult:
        """Return the target of a further row; the interval includes its residual."""
        if set(values) != set(self.coefficients):
            raise ConfigError("values", sorted(values), f"one for each of {[*self.coefficients]}")
        slopes = [result.value for result in self.coefficients.values()]
        if self.deviation is None or None in slopes:
            return SynopsisResult(None, None, None, self.records)
        away = np.array([values[name] for name in self.coefficients]) - self._means[:-1]
        value = float(self._means[-1] + away @ np.array(slopes, np.float64))
        share = 1.0 + 1.0 / self.rows + float(away @ self._inverse @ away)
        return _probable(value, self._reach * root(share), self.intercept)


class _Moments:
    """Sums over the rows with both of two columns, by pair; of shifted values."""

    def __init__(self, columns: int) -> None:
        self.rows, self.sums, self.squares, self.products = np.zeros((4, columns, columns))
        self.inside_bins = np.zeros(columns)  # squares of the distances from the means of bins

    def add(self, values: Floats, weights: Floats, variances: Floats, *, all_columns: bool) -> None:
        """Add rows, NaN for null; ``variances`` are those of the values, which are means.

        With ``all_columns`` the squares of all columns include them, without it those of the
        target, the last one.
        """
        known = np.isfinite(values)
        filled, ones = np.where(known, values, 0.0), known.astype(np.float64)
        within = np.where(known, variances, 0.0)
        self.inside_bins += np.abs(weights) @ within
        if not all_columns:
            within[:, :-1] = 0.0
        weighted = filled * weights[:, None]
        self.rows += (ones * weights[:, None]).T @ ones
        self.sums += weighted.T @ ones
        self.squares += ((filled * filled + within) * weights[:, None]).T @ ones
        self.products += weighted.T @ filled

    def add_records(self, records: GroupRecords | Totals, chosen: Ints, at: Ints) -> None:
        """Add the records of whole groups, or totals."""
        pairs = (slice(None), at[:, None], at)
        self.rows += records.present[chosen][pairs].sum(axis=0, dtype=np.float64)
        self.sums += records.sums[chosen][pairs].sum(axis=0)
        self.squares += records.squares[chosen][pairs].sum(axis=0)
        products = product_matrix(records.products[chosen].sum(axis=0), records.sums.shape[1])
        self.products += products[pairs[1:]]

    def centred(self) -> tuple[float, Floats, Floats]:
        """Return the number of rows, the means and the centred products."""
        others = ~np.eye(len(self.rows), dtype=np.bool_)
        rows = float(self.rows[0, 1])
        if rows <= 0.0:
            return 0.0, self.sums[0], self.products
        # Sums depend on the other column only by what is subtracted as means of bins.
        sums, squares = (np.average(part, 1, others) for part in (self.sums, self.squares))
        products = np.where(others, self.products, np.diag(squares))
        return rows, sums / rows, products - np.outer(sums, sums) / rows


def regress(
    sketch: Sketch,
    target: str,
    features: Sequence[str],
    scope: Scope = EVERYTHING,
    confidence: float = 0.95,
) -> Regression:
    """Fit a linear model of a feature by least squares.

    Intervals assume that residuals are independent and have the same deviation.
    """
    if not features or len({target, *features}) != len(features) + 1:
        raise ConfigError("features", list(features), f"distinct features other than {target}")
    if not 0.0 < confidence < 1.0:
        raise ConfigError("confidence", confidence, "a number between 0 and 1")
    at = np.array([sketch.spec.index(name, numeric=True) for name in (*features, target)])
    moments, records = _Moments(at.size), 0
    for part in parts_of(sketch, scope):
        check_planes(part, at, scope)
        # With several features, rows with some of them are subtracted, and totals have no leaves.
        compiled = compile_scope(part, scope, totals=at.size == 2)
        records += _gather(part, compiled, at, moments)
    return _solve(moments, sketch.bins.shifts[at], (target, *features), records, confidence)


def _gather(synopsis: Synopsis, compiled: CompiledScope, at: Ints, moments: _Moments) -> int:
    """Add what a synopsis knows to the moments; returns the records used."""
    totals = compiled.exact.totals
    records = compiled.whole.size + totals.size + compiled.rows.size
    variances = _bin_variances(synopsis)
    if totals.size:
        moments.add_records(synopsis.totals, totals, at)
    if compiled.whole.size:
        moments.add_records(synopsis.groups, compiled.whole, at)
        runs = whole_runs(synopsis, compiled)
        for part in leaves_of_runs(synopsis, runs[_have_nulls(synopsis, runs, at)]):
            values, within = _values_of(synopsis, part, at, variances)
            lacking = ~np.isfinite(values).all(axis=1)
            weights = -part.weights[lacking]
            moments.add(values[lacking], weights, within[lacking], all_columns=True)
            records += lacking.size
    for part in leaves_cut(synopsis, compiled):
        values, within = _values_of(synopsis, part, at, variances)
        used = np.isfinite(values).all(axis=1) & (part.weights > 0.0)
        moments.add(values[used], part.weights[used], within[used], all_columns=False)
        records += used.size
    rows = synopsis.rows.values[:, at] - synopsis.bins.shifts[at]
    used = np.isfinite(rows).all(axis=1) & (compiled.rows > 0)
    weights = np.where(compiled.rows == INSIDE, 1.0, 0.5)[used]
    moments.add(rows[used], weights, np.zeros_like(rows[used]), all_columns=True)
    return records


def _have_nulls(synopsis: Synopsis, runs: Ints, at: Ints) -> NDArray[np.bool_]:
    """Return which runs have rows with some of the columns but not all."""
    widths, lows = synopsis.leaves.widths[runs], synopsis.leaves.lows[runs]
    some = (widths[:, CODES + at] & HAS_NULL > 0) | (lows[:, at] == 0)
    return np.asarray(some.any(axis=1) & (at.size > 2))


def _bin_variances(synopsis: Synopsis) -> Floats:
    """Return the variance of the values of each code of the leaves."""
    records = synopsis.bin_records
    found = np.zeros(records.counts.shape)
    for f, own in enumerate(synopsis.bins.planes):
        columns = (records.counts[f], records.sums[f], records.squares[f])
        counts, sums, squares = (np.bincount(own, column, own.size) for column in columns)
        counts = np.maximum(counts, 1.0)
        found[f] = np.maximum(squares / counts - (sums / counts) ** 2, 0.0)
    return found


def _values_of(
    synopsis: Synopsis, part: ScopeLeaves, at: Ints, variances: Floats
) -> tuple[Floats, Floats]:
    """Return shifted means of the bins of each leaf, NaN for null, and the variances."""
    codes = part.paths.codes[:, at]
    means = synopsis.plane_table.means[at, codes] - synopsis.bins.shifts[at]
    return np.where(codes > 0, means, np.nan), variances[at, codes]


def _solve(
    moments: _Moments, shifts: Floats, names: Sequence[str], records: int, confidence: float
) -> Regression:
    from scipy.special import stdtrit  # here, since every worker imports this package

    rows, means, products = moments.centred()
    means = means + shifts
    squares = np.maximum(np.diag(products), 0.0)
    # Below this, a constant differs from its mean by rounding only.
    varies = squares > 1e-12 * (np.abs(means - shifts) ** 2 * rows + squares) + 1e-300
    scales = np.where(varies, np.sqrt(squares), 1.0)
    relations = products / np.outer(scales, scales)
    inverse, rank, determined = _inverse(relations[:-1, :-1], varies[:-1])
    slopes = inverse @ relations[:-1, -1]
    spare = rows - rank - 1.0
    target, *features = names
    none = SynopsisResult(None, None, None, records)
    if spare <= 0.0 or not varies[-1]:
        empty = dict.fromkeys(features, none)
        return Regression(target, none, empty, None, None, rows, records, means, inverse, 0.0)
    explained = float(np.clip(slopes @ relations[:-1, -1], 0.0, 1.0))
    deviation = float(scales[-1] * root((1.0 - explained) / spare))
    # Inside bins, columns may be related otherwise than their means: correlations may differ by
    # the share of the squares that is there.
    blurred = float((moments.inside_bins[varies] / squares[varies]).max())
    sizes = 1.0 + float(np.abs(slopes).sum())
    margins = blurred * sizes * np.abs(inverse).sum(axis=1)
    residual = root((1.0 - explained + blurred * sizes * sizes) / spare)
    reach = float(stdtrit(spare, 0.5 + confidence / 2.0)) * residual
    units = scales[-1] / scales[:-1]
    values, reaches = slopes * units, (reach * np.sqrt(np.diag(inverse)) + margins) * units
    kind = SynopsisResult(None, None, None, records, BoundKind.PROBABLE, confidence)
    coefficients = {
        name: _probable(float(values[k]), float(reaches[k]), kind) if determined[k] else none
        for k, name in enumerate(features)
    }
    reach *= float(scales[-1])
    inverse = inverse / np.outer(scales[:-1], scales[:-1])
    centre, intercept = means[:-1], none
    if determined.all():
        own = reach * root(1.0 / rows + float(centre @ inverse @ centre))
        own += float((margins * units) @ np.abs(centre))
        intercept = _probable(float(means[-1] - values @ centre), own, kind)
    fit = (explained, deviation, rows, records)
    return Regression(target, intercept, coefficients, *fit, means, inverse, reach)


def _inverse(relations: Floats, varies: NDArray[np.bool_]) -> tuple[Floats, int, NDArray[np.bool_]]:
    """Return the pseudoinverse of the features' correlations, its rank, and the determined ones."""
    relations = np.where(np.outer(varies, varies), relations, 0.0)
    values, vectors = np.linalg.eigh(relations)
    kept = values > RANK_TOLERANCE * max(float(values.max()), 1e-300)
    inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
    return inverse, int(kept.sum()), (vectors[:, ~kept] ** 2).sum(axis=1) < 1e-6


def _probable(value: float, reach: float, like: SynopsisResult) -> SynopsisResult:
    return SynopsisResult(
        value, value - reach, value + reach, like.records, BoundKind.PROBABLE, like.confidence
    )
