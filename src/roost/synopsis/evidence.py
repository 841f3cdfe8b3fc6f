"""What the groups, leaves and rows in a scope say about one feature or about two."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.kernel.shapes import INSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.bands import Sketch, parts_of
from roost.synopsis.bounds import ValueCounts, join_counts
from roost.synopsis.frame import Frame, PlaneTable, open_frame
from roost.synopsis.leaves import Bytes
from roost.synopsis.narrowing import NO_MOMENTS, GroupMoments
from roost.synopsis.records import pair_index
from roost.synopsis.scan import Exact, scan
from roost.synopsis.scope import Request, Scope, compile_scope, judge, judge_rows, prepare
from roost.synopsis.spec import KeyLayout
from roost.synopsis.synopsis import Synopsis
from roost.synopsis.unresolved import (
    count_listed,
    is_unresolved,
    unresolved_counts,
    unresolved_pairs,
)


class Sums(NamedTuple):
    """Exact sums of shifted values of features ``a`` and ``b``, over rows with both."""

    rows: float = 0.0
    a: float = 0.0
    b: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0


class Evidence(NamedTuple):
    """Exact sums of whole groups, counts by value of all else, and the records read."""

    sums: Sums
    counts: ValueCounts
    size: float  # the greatest absolute shifted value among the sums
    records: int
    moments: GroupMoments  # of the groups of which the first entries of the counts are a part


class PairEvidence(NamedTuple):
    """Exact sums of whole groups, and counts by the codes of both features of all else."""

    sums: Sums
    firsts: ValueCounts  # one entry for each combination of codes, or row
    seconds: ValueCounts
    sizes: tuple[float, float]
    records: int


@njit(cache=True, nogil=True)
def _entries(
    sure: Floats, border: Floats, table: PlaneTable, a: Whole, b: Whole
) -> tuple[Floats, Floats, Floats]:  # pragma: no cover - compiled
    """Return the values of two features by the combinations of codes without null that occur.

    Rows of the results are lows, highs and means, and of the last one the three counts.
    """
    lows, highs, means = table.lows, table.highs, table.means
    some = border.size > 0
    begins = int(a >= 0), int(b >= 0)  # code 0 is null
    total = 0
    for i in range(begins[0], sure.shape[0]):
        for j in range(begins[1], sure.shape[1]):
            total += sure[i, j] > 0.0 or (some and border[0, i, j] > 0.0)
    x, y, counts = np.empty((3, total)), np.empty((3, total)), np.empty((3, total))
    at = 0
    for i in range(begins[0], sure.shape[0]):
        for j in range(begins[1], sure.shape[1]):
            possible = border[0, i, j] if some else 0.0
            if sure[i, j] + possible > 0.0:
                x[0, at], x[1, at], x[2, at] = lows[a, i], highs[a, i], means[a, i]
                y[0, at], y[1, at], y[2, at] = lows[b, j], highs[b, j], means[b, j]
                counts[0, at], counts[1, at] = sure[i, j], sure[i, j] + possible
                counts[2, at] = sure[i, j] + (border[1, i, j] if some else 0.0)
                at += 1
    return x, y, counts


@njit(cache=True, nogil=True)
def _add_records(
    frame: Frame, exact: Exact, a: Whole, b: Whole
) -> tuple[Sums, float, float]:  # pragma: no cover - compiled
    """Return the sums of groups and totals, without rows, and the greatest shifted values."""
    groups, totals, shifts = frame.sums, frame.totals, frame.shifts
    sums, squares, lows, highs = groups.sums, groups.squares, groups.lows, groups.highs
    pair = pair_index(min(a, b), max(a, b), sums.shape[1])
    total_a = total_b = aa = bb = ab = size_a = size_b = 0.0
    for g in exact.groups:
        total_a += sums[g, a, b]
        total_b += sums[g, b, a]
        aa += squares[g, a, b]
        bb += squares[g, b, a]
        ab += squares[g, a, a] if a == b else groups.products[g, pair]
    for t in exact.totals:
        total_a += totals.sums[t, a, b]
        total_b += totals.sums[t, b, a]
        aa += totals.squares[t, a, b]
        bb += totals.squares[t, b, a]
        ab += totals.squares[t, a, a] if a == b else totals.products[t, pair]
    for own in (exact.groups, exact.owners):
        for g in own:
            if lows[g, a] <= highs[g, a]:
                size_a = max(size_a, abs(lows[g, a] - shifts[a]), abs(highs[g, a] - shifts[a]))
            if lows[g, b] <= highs[g, b]:
                size_b = max(size_b, abs(lows[g, b] - shifts[b]), abs(highs[g, b] - shifts[b]))
    return Sums(0.0, total_a, total_b, aa, bb, ab), size_a, size_b


class _Whole(NamedTuple):
    """The groups and totals in a scope, and their sums without their number of rows."""

    exact: Exact
    sums: Sums
    size_a: float
    size_b: float


class _Found(NamedTuple):
    """What the leaves and the whole groups in a scope contribute."""

    read: Whole  # leaves
    x: Floats  # see `_entries`
    y: Floats
    counts: Floats
    whole: _Whole


@njit(cache=True, nogil=True)
def _find_records(
    addresses: Ints, exact: Exact, a: Whole, b: Whole
) -> _Whole:  # pragma: no cover - compiled
    """Read the records of whole groups, and totals."""
    return _Whole(exact, *_add_records(open_frame(addresses), exact, a, b))


@njit(cache=True, nogil=True)
def _find(
    addresses: Ints, layout: KeyLayout, request: Request, a: Whole, b: Whole, totals: bool
) -> _Found:  # pragma: no cover - compiled
    """Read leaves and records in a scope; a negative feature means none."""
    frame = open_frame(addresses)
    leaf_filter, exact, listed = judge(frame, layout, request, totals)
    codes = frame.table.means.shape[1]
    read, sure, border = scan(frame.leaves, listed, layout, leaf_filter, codes, a, b)
    x, y, counts = _entries(sure, border, frame.table, a, b)
    first = max(a, 0)
    second = b if b >= 0 else first
    records = _add_records(frame, exact, first, second)
    return _Found(read, x, y, counts, _Whole(exact, *records))


def count_rows(sketch: Sketch, scope: Scope) -> tuple[float, float, float, int]:
    """Return the rows in a scope: certainly, possibly, estimated; and the records read."""
    found = [_count_rows(part, scope) for part in parts_of(sketch, scope)]
    low, high, value, records = map(sum, zip(*found, strict=True))
    return low, high, value, int(records)


def _count_rows(synopsis: Synopsis, scope: Scope) -> tuple[float, float, float, int]:
    if is_unresolved(synopsis, scope.predicate):
        compiled = compile_scope(synopsis, scope)
        listed, read = count_listed(synopsis, scope, compiled)
        sure, most, expected = (float(column.sum()) for column in listed)
        exact, rows = compiled.exact, compiled.rows
    else:
        found, rows = _read(synopsis, scope, -1, -1)
        sure, most, expected = map(float, found.counts.sum(axis=1))
        exact, read = found.whole.exact, int(found.read)
    whole = float(synopsis.groups.counts[exact.groups].sum(dtype=np.int64))
    whole += float(synopsis.totals.counts[exact.totals].sum(dtype=np.int64))
    inside = float(np.count_nonzero(rows == INSIDE))
    possible = float(np.count_nonzero(rows))
    records = read + exact.groups.size + exact.totals.size + rows.size
    middle = (inside + possible) / 2.0
    return whole + sure + inside, whole + most + possible, whole + expected + middle, records


def gather(sketch: Sketch, scope: Scope, feature: int, *, exact: bool) -> Evidence:
    """Return what is known of a feature; ``exact`` takes whole groups as sums, not as counts."""
    parts = [_gather(part, scope, feature, exact=exact) for part in parts_of(sketch, scope)]
    if len(parts) == 1:
        return parts[0]
    moments = NO_MOMENTS
    if any(part.moments.rows.size for part in parts):
        padded = (part.moments.padded(part.counts.lows.size) for part in parts)
        moments = GroupMoments(*map(np.concatenate, zip(*padded, strict=True)))
    return Evidence(
        Sums(*map(sum, zip(*(part.sums for part in parts), strict=True))),
        join_counts([part.counts for part in parts]),
        max(part.size for part in parts),
        sum(part.records for part in parts),
        moments,
    )


def _gather(synopsis: Synopsis, scope: Scope, feature: int, *, exact: bool) -> Evidence:
    moments = NO_MOMENTS
    if synopsis.bins.dropped[feature]:
        compiled = compile_scope(synopsis, scope, totals=exact)
        listed, moments, read = unresolved_counts(synopsis, scope, compiled, feature, exact=exact)
        whole = _find_records(synopsis.frame.addresses, compiled.exact, feature, feature)
        rows = compiled.rows
    else:
        found, rows = _read(synopsis, scope, feature, -1, totals=exact)
        listed, whole = ValueCounts(*found.x, *found.counts), found.whole
        read = int(found.read)
    parts = [listed]
    sums, size = Sums(), 0.0
    groups, totals = whole.exact.groups, whole.exact.totals
    if exact:
        sums, size = _sums(synopsis, whole, feature, feature), whole.size_a
    elif groups.size:
        parts.append(_marginal_entries(synopsis, groups, feature))
    if rows.size and rows.any():
        parts.append(_row_entries(synopsis, rows, feature))
    records = read + groups.size + totals.size + rows.size
    return Evidence(sums, join_counts(parts), size, records, moments)


def gather_pair(sketch: Sketch, scope: Scope, a: int, b: int) -> PairEvidence:
    """Return what is known of two features, over the rows that have both."""
    parts = [_gather_pair(part, scope, a, b) for part in parts_of(sketch, scope)]
    if len(parts) == 1:
        return parts[0]
    size_a, size_b = (max(sizes) for sizes in zip(*(part.sizes for part in parts), strict=True))
    return PairEvidence(
        Sums(*map(sum, zip(*(part.sums for part in parts), strict=True))),
        join_counts([part.firsts for part in parts]),
        join_counts([part.seconds for part in parts]),
        (size_a, size_b),
        sum(part.records for part in parts),
    )


def _gather_pair(synopsis: Synopsis, scope: Scope, a: int, b: int) -> PairEvidence:
    if synopsis.bins.dropped[a] or synopsis.bins.dropped[b]:
        compiled = compile_scope(synopsis, scope, totals=True)
        firsts, seconds, read = unresolved_pairs(synopsis, scope, compiled, a, b)
        whole = _find_records(synopsis.frame.addresses, compiled.exact, a, b)
        rows = compiled.rows
    else:
        found, rows = _read(synopsis, scope, a, b)
        firsts, seconds = (ValueCounts(*values, *found.counts) for values in (found.x, found.y))
        read, whole = int(found.read), found.whole
    if rows.size and rows.any():
        both = np.isfinite(synopsis.rows.values[:, a]) & np.isfinite(synopsis.rows.values[:, b])
        firsts = join_counts([firsts, _row_entries(synopsis, rows, a, both)])
        seconds = join_counts([seconds, _row_entries(synopsis, rows, b, both)])
    sums = _sums(synopsis, whole, a, b)
    records = read + whole.exact.groups.size + whole.exact.totals.size + rows.size
    return PairEvidence(sums, firsts, seconds, (whole.size_a, whole.size_b), records)


def _read(
    synopsis: Synopsis, scope: Scope, a: int, b: int, *, totals: bool = True
) -> tuple[_Found, Bytes]:
    """Return what leaves, groups and totals contribute, and the states of the small rows."""
    request, layout = prepare(synopsis, scope), synopsis.spec.layout
    found: _Found = _find(synopsis.frame.addresses, layout, request, a, b, totals)
    return found, judge_rows(synopsis, scope)


def _marginal_entries(synopsis: Synopsis, whole: Ints, feature: int) -> ValueCounts:
    """Return the values of whole groups by bin; nulls are left out."""
    records, shift = synopsis.bin_records, synopsis.bins.shifts[feature]
    counts = synopsis.groups.marginals[whole, feature].sum(axis=0, dtype=np.int64)
    at = np.flatnonzero(counts[1:]) + 1
    rows = counts[at].astype(np.float64)
    means = shift + records.sums[feature, at] / np.maximum(records.counts[feature, at], 1)
    extremes = records.lows[feature, at], records.highs[feature, at]
    return ValueCounts(*extremes, means, rows, rows, rows)


def _row_entries(
    synopsis: Synopsis, rows: Bytes, feature: int, known: NDArray[np.bool_] | None = None
) -> ValueCounts:
    values = synopsis.rows.values[:, feature]
    at = np.flatnonzero(rows * (np.isfinite(values) if known is None else known))
    values, states = values[at], rows[at]
    sure, most = (states == INSIDE).astype(np.float64), np.ones(at.size)
    return ValueCounts(values, values, values, sure, most, (sure + most) / 2.0)


def _sums(synopsis: Synopsis, whole: _Whole, a: int, b: int) -> Sums:
    """Return the sums of whole groups and totals, with their number of rows."""
    # Counts have the narrowest type: compiled loops would be compiled for each.
    groups, totals, _ = whole.exact
    rows = synopsis.groups.present[groups, a, b].sum(dtype=np.int64)
    rows += synopsis.totals.present[totals, a, b].sum(dtype=np.int64)
    return whole.sums._replace(rows=float(rows))
