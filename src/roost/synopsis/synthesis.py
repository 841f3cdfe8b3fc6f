"""Synthetic rows: drawn from leaves with the correlations and marginals of their group.

A leaf has place, step, and the bin of every feature; a row is one draw from the values there. A
group is described by a normal copula: features have the group's marginals, and normal scores with
the group's correlations. The scores of a row are drawn inside the bins of its leaf, one given the
ones before it, the finest planes first, and translated into values. With narrow bins the leaf
decides the value; where planes are coarse, the correlations do. A null stays null.

Rows are chosen by stratified sampling: the leaves, sorted by group, place and step, are divided
into as many parts of equal weight as rows are wanted, and one row is drawn from each part. So every
place and time has its share, which a simple random sample does not guarantee.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import ConfigError
from roost.kernel.shapes import BORDER, INSIDE
from roost.model.arrays import Floats, Ints, as_arrow
from roost.model.schemas import TIMESTAMP
from roost.synopsis.bands import Sketch, parts_of
from roost.synopsis.evidence import count_rows
from roost.synopsis.leaves import Bytes
from roost.synopsis.records import GroupRecords, product_matrix
from roost.synopsis.scope import EVERYTHING, Scope, compile_scope, row_columns
from roost.synopsis.scope_leaves import ScopeLeaves, leaves_in, step_times
from roost.synopsis.synopsis import SmallRows, Synopsis

ATTEMPTS = 30  # to draw a row inside the scope from a leaf on its border
EIGENVALUE_MIN = 0.02
POOLED = -1
SHORTFALL = 1e-9  # of the rows: sums in different orders differ by less


class _Leaves(NamedTuple):
    """The leaf of each row to draw."""

    groups: Ints
    bounds: Floats  # of the place
    begins: Ints  # of the step
    codes: Bytes
    border: NDArray[np.bool_]

    def take(self, rows: Any) -> _Leaves:
        """Return some of them."""
        return _Leaves(*(column[rows] for column in self))


def synthesize(
    synopsis: Sketch,
    share: float | None = None,
    scope: Scope = EVERYTHING,
    *,
    rows: int | None = None,
    seed: int = 0,
) -> pa.Table:
    """Return synthetic rows of a scope, sorted by time, with the columns of the original ones.

    Their number is a share of the original rows, which may exceed 1, or given. It is less if rows
    inside the scope are rare in leaves on its border: those with an exact value, for example.
    Categories without a bin are null.
    """
    if (share is None) == (rows is None):
        raise ConfigError("share, rows", (share, rows), "one of them")
    wanted = rows if share is None else share
    if wanted is None or not 0.0 <= wanted < float("inf"):
        raise ConfigError("share" if rows is None else "rows", wanted, "a number from 0 up")
    parts = parts_of(synopsis, scope)
    totals = np.array([count_rows(part, scope)[2] for part in parts])
    total, rng = float(totals.sum()), np.random.default_rng(seed)
    number = round(share * total) if share is not None else int(wanted)
    # Each part has its share; rounded sums make the number right.
    ends = np.round(np.cumsum(totals) * number / max(total, 1.0)).astype(np.int64)
    numbers = np.diff(ends, prepend=0).tolist()
    tables = [
        _table(part, _draw(part, scope, rng, own, k))
        for part, own, k in zip(parts, totals.tolist(), numbers, strict=True)
    ]
    drawn = pa.concat_tables(tables)
    order = np.argsort(np.asarray(drawn[synopsis.spec.time].cast(pa.int64())), kind="stable")
    return drawn.take(as_arrow(order))


def _draw(
    synopsis: Synopsis, scope: Scope, rng: np.random.Generator, total: float, number: int
) -> SmallRows:
    """Draw some rows of a synopsis that has so many in the scope."""
    parts = [SmallRows.empty(len(synopsis.spec.features))]
    if total > 0.0 and number:
        sampler = _Sampler(synopsis, scope, rng)
        parts += sampler.draw(total * (1.0 - SHORTFALL) / number, number)
    return SmallRows(*map(np.concatenate, zip(*parts, strict=True)))


def _table(synopsis: Synopsis, rows: SmallRows) -> pa.Table:
    spec = synopsis.spec
    columns = {spec.time: pa.array(rows.time, TIMESTAMP), spec.x: pa.array(rows.x)}
    columns |= {spec.y: pa.array(rows.y)} | row_columns(replace(synopsis, rows=rows))
    return pa.table(columns)


class _Sampler:
    """Draws rows from the leaves of a scope."""

    def __init__(self, synopsis: Synopsis, scope: Scope, rng: np.random.Generator) -> None:
        self.synopsis, self.scope, self.rng = synopsis, scope, rng
        self.compiled = compile_scope(synopsis, scope)
        layout, times = synopsis.spec.layout, synopsis.groups.times
        # Hourly data, for example, has no times inside the steps.
        self.on_steps = not (times % layout.step_us).any()
        codes = np.arange(synopsis.bins.codes_max)
        planes = synopsis.bins.planes
        # First and last code of each code of the leaves; they include null, which is its own.
        self.first, self.last = (
            np.array([np.searchsorted(own, codes, side) for own in planes])
            for side in ("left", "right")
        )
        self.last = np.maximum(self.last - 1, 0)
        self.order = synopsis.bins.plane_order[::-1]
        self.models: dict[int, tuple[Floats, Floats]] = {}

    def draw(self, stride: float, number: int) -> Iterator[SmallRows]:
        """Yield one row from each of some parts of equal weight."""
        positions = (np.arange(number) + self.rng.random(number)) * stride
        before = 0.0
        for part in leaves_in(self.synopsis, self.compiled):
            ends = before + np.cumsum(part.weights)
            here = positions[np.searchsorted(positions, before) :]
            here = here[: np.searchsorted(here, ends[-1])] if ends.size else here[:0]
            if here.size:
                yield self._rows_of(self._leaves_at(part, np.searchsorted(ends, here, "right")))
            before = float(ends[-1]) if ends.size else before
        rows = self.synopsis.rows.take(self.compiled.rows == INSIDE)
        rows = rows.take(np.lexsort((*rows.values.T, rows.y, rows.x, rows.time)))
        here = positions[np.searchsorted(positions, before) :]
        at = (here - before).astype(np.int64)
        yield rows.take(at[at < rows.x.size])

    def _leaves_at(self, part: ScopeLeaves, at: Ints) -> _Leaves:
        synopsis, paths = self.synopsis, part.paths
        runs = part.runs[np.searchsorted(paths.starts, at, "right") - 1]
        return _Leaves(
            np.searchsorted(synopsis.run_starts, runs, "right") - 1,
            synopsis.places.bounds[synopsis.leaves.places[runs]],
            step_times(paths, synopsis.spec)[at],
            paths.codes[at],
            part.states[at] == BORDER,
        )

    def _rows_of(self, leaves: _Leaves) -> SmallRows:
        """Draw a row from each leaf; from one on the border until it is inside the scope."""
        drawn = self._draw(leaves)
        left = np.flatnonzero(leaves.border)
        for attempt in range(ATTEMPTS + 1):
            inside = replace(self.synopsis, rows=drawn.take(left))
            left = left[compile_scope(inside, self.scope).rows != INSIDE] if left.size else left
            if not left.size or attempt == ATTEMPTS:
                break
            for column, again in zip(drawn, self._draw(leaves.take(left)), strict=True):
                column[left] = again
        return drawn.take(np.delete(np.arange(leaves.groups.size), left))

    def _draw(self, leaves: _Leaves) -> SmallRows:
        rng, step_us = self.rng, self.synopsis.spec.layout.step_us
        x0, y0, x1, y1 = leaves.bounds.T
        x = np.clip(x0 + (x1 - x0) * rng.random(x0.size), x0, x1)
        y = np.clip(y0 + (y1 - y0) * rng.random(x0.size), y0, y1)
        offsets = np.zeros(x0.size, np.int64)
        if not self.on_steps:
            offsets = rng.integers(0, step_us, x0.size)
        times = self.synopsis.groups.times[leaves.groups]
        time = np.clip(leaves.begins + offsets, times[:, 0], times[:, 1])
        values = np.empty(leaves.codes.shape)
        order = np.argsort(leaves.groups, kind="stable")
        cuts = np.flatnonzero(np.diff(leaves.groups[order])) + 1
        for rows in np.split(order, cuts):
            group = int(leaves.groups[rows[0]])
            values[rows] = self._values(group, leaves.codes[rows])
        return SmallRows(x, y, time, values)

    def _values(self, group: int, codes: Bytes) -> Floats:
        """Draw the features of some rows of a group from the bins of their leaves."""
        from scipy.special import ndtr, ndtri  # here, since every worker imports this package

        shares, factor = self._model(group)
        columns = np.arange(codes.shape[1])
        first, last = self.first[columns, codes], self.last[columns, codes]
        # A leaf has nothing of a dropped plane, not even whether the value is null.
        missing = self.rng.random(codes.shape) < self._null_shares(group)
        null = np.where(self.synopsis.bins.dropped, missing, codes == 0)
        low = np.where(null, 0.0, shares[columns, np.maximum(first - 1, 0)])
        high = np.where(null, 1.0, shares[columns, last])
        lows, highs, middle = ndtri(low), ndtri(high), ndtri((low + high) / 2.0)
        scores, parts = np.empty(codes.shape), np.zeros(codes.shape)  # independent parts
        for k, f in enumerate(self.order):
            mean, spread = parts[:, :k] @ factor[k, :k], factor[k, k]
            below, above = (ndtr((end[:, f] - mean) / spread) for end in (lows, highs))
            ranks = below + (above - below) * self.rng.random(mean.size)
            drawn = np.clip(mean + spread * ndtri(ranks), lows[:, f], highs[:, f])
            # Far from the mean, ranks are 0 or 1.
            scores[:, f] = np.where(np.isfinite(drawn), drawn, middle[:, f])
            parts[:, k] = (scores[:, f] - mean) / spread
        return np.where(null, np.nan, self._translate(ndtr(scores), shares, first, last))

    def _translate(self, ranks: Floats, shares: Floats, first: Ints, last: Ints) -> Floats:
        """Return the values at some ranks of the marginals, in bins between first and last."""
        records, bins = self.synopsis.bin_records, self.synopsis.bins
        values = np.empty(ranks.shape)
        for f, feature in enumerate(self.synopsis.spec.features):
            code = np.clip(np.searchsorted(shares[f], ranks[:, f]), first[:, f], last[:, f])
            if feature.categorical:
                values[:, f] = code - 1.0
                continue
            below = shares[f, np.maximum(code - 1, 0)]
            low, high = records.lows[f, code], records.highs[f, code]
            with np.errstate(divide="ignore", invalid="ignore"):
                within = np.clip((ranks[:, f] - below) / (shares[f, code] - below), 0.0, 1.0)
                mean = bins.shifts[f] + records.sums[f, code] / records.counts[f, code]
                # The power of a uniform number whose mean is that of the bin.
                power = np.maximum(high - mean, 0.0) / (mean - low)
                drawn = low + (high - low) * within**power
            drawn = np.where((low < high) & np.isfinite(drawn), drawn, low)
            if pa.types.is_integer(feature.type):
                drawn = np.round(drawn)
            values[:, f] = np.clip(drawn, low, high)
        return values

    def _null_shares(self, group: int) -> Floats:
        """Return the share of nulls of each feature in a group."""
        groups, counts = self.synopsis.groups, self.synopsis.bin_records.counts
        if groups.exact[group]:
            counts = groups.marginals[group]
        return np.asarray(counts[:, 0] / np.maximum(counts.sum(axis=1), 1))

    def _model(self, group: int) -> tuple[Floats, Floats]:
        """Return cumulative shares by feature and code, and a factor of the correlations."""
        groups = self.synopsis.groups
        if not groups.exact[group]:
            group = POOLED  # of what is known of the others
        if group not in self.models:
            at = [group] if group != POOLED else np.flatnonzero(groups.exact)
            marginals = self.synopsis.bin_records.counts
            if group != POOLED:
                marginals = groups.marginals[group]
            counts = marginals.astype(np.float64)
            counts[:, 0] = 0.0  # nulls
            shares = np.cumsum(counts, axis=1)
            shares /= np.maximum(shares[:, -1:], 1.0)
            correlations = _correlations(groups.take(at))[np.ix_(self.order, self.order)]
            factor: Floats = np.linalg.cholesky(correlations).astype(np.float64)
            self.models[group] = shares, factor
        return self.models[group]


def _correlations(groups: GroupRecords) -> Floats:
    """Return the correlations in some groups."""
    present = groups.present.sum(axis=0, dtype=np.float64)
    products = product_matrix(groups.products.sum(axis=0), len(present))
    with np.errstate(divide="ignore", invalid="ignore"):
        means = groups.sums.sum(axis=0) / present
        variances = groups.squares.sum(axis=0) / present - means * means
        covariances = products / present - means * means.T
        found = covariances / np.sqrt(variances * variances.T)
    np.fill_diagonal(found, 1.0)
    # Pairs have different rows, so that the matrix may be no correlation matrix.
    values, vectors = np.linalg.eigh(np.clip(np.nan_to_num(found), -1.0, 1.0))
    found = (vectors * np.maximum(values, EIGENVALUE_MIN)) @ vectors.T
    scales = np.sqrt(np.diag(found))
    return np.asarray(found / np.outer(scales, scales))
