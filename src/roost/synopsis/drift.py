"""Requantisation: new bins for new rows when the distribution of a feature has drifted.

The error of a number is the root mean square that remains when recent values are replaced by the
mean of their bin. A category has the share of rows whose name has no bin. Bins in use are compared
with bins decided from the recent rows alone. Existing leaves keep their boxes: rows under new bins
are a band of their own, and shifts of sums stay as they are.

`rebin` moves the rows of an old synopsis, whose leaves have no planes by then, to other bins, so
that it can be merged. Every bin goes as a whole to the one that has its mean, which then has the
extremes of both: bounds use extremes, not edges, so they hold. Sums of groups stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roost.errors import ConfigError
from roost.model.arrays import Floats, Ints
from roost.synopsis.bins import BinLearner, Bins
from roost.synopsis.records import BinRecords, narrow
from roost.synopsis.synopsis import Synopsis

ERROR_RATIO = 2.0  # of the bins in use to new ones
SMALL_ERROR = 0.005  # of the range of recent values, as in the paper: no error below is too large
NAMELESS_SHARE = 0.05  # of the rows that new names would give a bin
VALUES_MIN = 20_000  # fewer recent values decide nothing


@dataclass(frozen=True, slots=True)
class Drift:
    """A feature whose recent values have a larger error than they would have under new bins."""

    feature: str
    error: float
    new_error: float


@dataclass(frozen=True, slots=True, eq=False)
class Requantisation:
    """Bins for new rows, and the features that require them."""

    bins: Bins
    drifts: tuple[Drift, ...]


def requantise(
    recent: BinLearner, bins: Bins, values_min: int = VALUES_MIN
) -> Requantisation | None:
    """Return bins for new rows if those in use suit recent rows badly, else None."""
    fresh = replace(recent.bins(), shifts=bins.shifts, halvings=bins.halvings)
    drifts = []
    for k, feature in enumerate(recent.spec.features):
        if recent.sampled(k) < values_min:
            continue
        if feature.categorical:
            error, new_error = (_nameless(recent, k, own) for own in (bins, fresh))
            drifted = error - new_error > NAMELESS_SHARE
        else:
            grid = recent.grid(k)
            error, new_error = (bin_error(grid, own.edges[k]) for own in (bins, fresh))
            small = SMALL_ERROR * float(grid[-1] - grid[0])
            drifted = error > max(ERROR_RATIO * new_error, small)
        if drifted:
            drifts.append(Drift(feature.name, error, new_error))
    return Requantisation(fresh, tuple(drifts)) if drifts else None


def bin_error(values: Floats, edges: Floats) -> float:
    """Return the root mean square error of values that are replaced by the mean of their bin.

    Examples
    --------
    >>> bin_error(np.array([1.0, 3.0, 10.0, 10.0]), np.array([5.0]))
    0.7071067811865476
    """
    codes = np.searchsorted(edges, values, side="right")
    counts = np.maximum(np.bincount(codes), 1)
    means = np.bincount(codes, values) / counts
    return float(np.sqrt(np.mean((values - means[codes]) ** 2)))


def _nameless(recent: BinLearner, k: int, bins: Bins) -> float:
    """Return the share of recent rows whose category has no bin."""
    counts, names = recent.counts_of(k), bins.categories[k] or ()
    return 1.0 - sum(counts[name] for name in names) / max(counts.total(), 1)


def rebin(synopsis: Synopsis, bins: Bins) -> Synopsis:
    """Return a synopsis without planes with other bins."""
    if not all(synopsis.bins.dropped):
        raise ConfigError("rebin", synopsis.bins.halvings, "planes that are all dropped")
    groups, old = synopsis.groups, synopsis.bin_records
    features, values = len(bins.edges), synopsis.rows.values.copy()
    marginals = np.zeros((groups.keys.size, features, bins.codes_max), np.int64)
    records = BinRecords.empty(features, bins.codes_max)
    for f in range(features):
        codes = _code_map(synopsis, bins, f)
        for code, to in enumerate(codes):
            marginals[:, f, to] += groups.marginals[:, f, code]
        for k in range(3):
            np.add.at(records[k][f], codes, old[k][f])
        np.minimum.at(records.lows[f], codes, old.lows[f])
        np.maximum.at(records.highs[f], codes, old.highs[f])
        if bins.categories[f] is not None:
            known = np.isfinite(values[:, f])
            values[known, f] = codes[values[known, f].astype(np.int64) + 1] - 1.0
    return replace(
        synopsis,
        bins=replace(bins, halvings=synopsis.bins.halvings),
        groups=groups._replace(marginals=narrow(marginals)),
        bin_records=records,
        rows=synopsis.rows._replace(values=values),
    )


def _code_map(synopsis: Synopsis, bins: Bins, f: int) -> Ints:
    """Return the code under other bins of each code of a feature."""
    own, codes = synopsis.bins, np.zeros(synopsis.bins.codes_max, np.int64)
    names, others = own.categories[f], bins.categories[f]
    if names is not None and others is not None:
        # The last bin has the values without a name.
        found = [others.index(name) if name in others else len(others) for name in names]
        codes[1 : len(names) + 2] = np.array([*found, len(others)]) + 1
        return codes
    records = synopsis.bin_records
    means = own.shifts[f] + records.sums[f] / np.maximum(records.counts[f], 1)
    codes[1:] = np.searchsorted(bins.edges[f], means[1:], side="right") + 1
    return codes
