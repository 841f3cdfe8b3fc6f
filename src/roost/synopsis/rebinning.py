"""Moving the rows of an old synopsis to the bins of another, so that they can be merged.

Every bin goes as a whole to the one that has its mean, which then has the extremes of both: bounds
use extremes, not edges, so they hold. Leaves have no planes by then. Sums of groups stay exact.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roost.errors import ConfigError
from roost.model.arrays import Ints
from roost.synopsis.bins import Bins
from roost.synopsis.records import BinRecords, narrow
from roost.synopsis.synopsis import Synopsis


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
