"""What the groups, leaves and rows in a scope say about one feature or about two."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.shapes import INSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.bands import Sketch, parts_of
from roost.synopsis.bounds import ValueCounts, join_counts
from roost.synopsis.narrowing import Moments
from roost.synopsis.records import pair_index
from roost.synopsis.scan import scan
from roost.synopsis.scope import CompiledScope, Scope, compile_scope
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
    moments: Moments | None = None  # of the values of which entries of the counts are a part


class PairEvidence(NamedTuple):
    """Exact sums of whole groups, and counts by the codes of both features of all else."""

    sums: Sums
    firsts: ValueCounts  # one entry for each combination of codes, or row
    seconds: ValueCounts
    sizes: tuple[float, float]
    records: int


@njit(cache=True, nogil=True)
def _occurring(out: Floats) -> tuple[Ints, Ints, Floats]:  # pragma: no cover - compiled
    """Return the combinations of codes without null that occur, and their three counts."""
    total = 0
    for i in range(1, out.shape[1]):
        for j in range(1, out.shape[2]):
            total += out[0, i, j] + out[1, i, j] > 0.0
    first, second = np.empty(total, np.int64), np.empty(total, np.int64)
    counts = np.empty((3, total))
    at = 0
    for i in range(1, out.shape[1]):
        for j in range(1, out.shape[2]):
            if out[0, i, j] + out[1, i, j] > 0.0:
                first[at], second[at] = i, j
                for k in range(3):
                    counts[k, at] = out[0, i, j] + (out[k, i, j] if k else 0.0)
                at += 1
    return first, second, counts


def count_rows(sketch: Sketch, scope: Scope) -> tuple[float, float, float, int]:
    """Return the rows in a scope: certainly, possibly, estimated; and the records read."""
    found = [_count_rows(part, scope) for part in parts_of(sketch, scope)]
    low, high, value, records = map(sum, zip(*found, strict=True))
    return low, high, value, int(records)


def _count_rows(synopsis: Synopsis, scope: Scope) -> tuple[float, float, float, int]:
    compiled = compile_scope(synopsis, scope)
    if is_unresolved(synopsis, scope.predicate):
        listed, read = count_listed(synopsis, scope, compiled)
        out = np.array([column.sum() for column in listed])[:, None, None]
    else:
        out, read = _scan(synopsis, compiled, -1, -1)
    whole = float(synopsis.groups.counts[compiled.whole].sum(dtype=np.int64))
    inside = float(np.count_nonzero(compiled.rows == INSIDE))
    possible = float(np.count_nonzero(compiled.rows))
    sure, most, expected = map(float, out[:, 0, 0])
    records = read + compiled.whole.size + compiled.rows.size
    middle = (inside + possible) / 2.0
    return whole + sure + inside, whole + most + possible, whole + expected + middle, records


def gather(sketch: Sketch, scope: Scope, feature: int, *, exact: bool) -> Evidence:
    """Return what is known of a feature; ``exact`` takes whole groups as sums, not as counts."""
    parts = [_gather(part, scope, feature, exact=exact) for part in parts_of(sketch, scope)]
    if len(parts) == 1:
        return parts[0]
    moments = None
    if any(part.moments is not None for part in parts):
        padded = (part.moments or Moments.none(part.counts.lows.size) for part in parts)
        moments = Moments(*map(np.concatenate, zip(*padded, strict=True)))
    return Evidence(
        Sums(*map(sum, zip(*(part.sums for part in parts), strict=True))),
        join_counts([part.counts for part in parts]),
        max(part.size for part in parts),
        sum(part.records for part in parts),
        moments,
    )


def _gather(synopsis: Synopsis, scope: Scope, feature: int, *, exact: bool) -> Evidence:
    compiled = compile_scope(synopsis, scope)
    table, records, whole = synopsis.plane_table, synopsis.bin_records, compiled.whole
    moments = None
    if synopsis.bins.dropped[feature]:
        listed, moments, read = unresolved_counts(synopsis, scope, compiled, feature, exact=exact)
        parts = [listed]
    else:
        out, read = _scan(synopsis, compiled, feature, -1)
        parts = [_entries(table.lows, table.highs, table.means, feature, out[:, :, 0])]
    sums, size = Sums(), 0.0
    if whole.size and exact:
        sums = _sums(synopsis, compiled, feature, feature)
        size = _size(synopsis, compiled, feature)
    elif whole.size:
        counts = synopsis.groups.marginals[whole, feature].sum(axis=0, dtype=np.int64)
        shift = synopsis.bins.shifts[feature]
        means = shift + records.sums / np.maximum(records.counts, 1)
        threefold = np.tile(counts.astype(np.float64), (3, 1))
        parts.append(_entries(records.lows, records.highs, means, feature, threefold))
    if compiled.rows.any():
        parts.append(_row_entries(synopsis, compiled, feature))
    joined = parts[0] if len(parts) == 1 else join_counts(parts)
    if moments is not None:
        moments = moments.padded(joined.lows.size)
    return Evidence(sums, joined, size, read + whole.size + compiled.rows.size, moments)


def gather_pair(sketch: Sketch, scope: Scope, a: int, b: int) -> PairEvidence:
    """Return what is known of two features, over the rows that have both."""
    parts = [_gather_pair(part, scope, a, b) for part in parts_of(sketch, scope)]
    if len(parts) == 1:
        return parts[0]
    sizes = [max(sizes) for sizes in zip(*(part.sizes for part in parts), strict=True)]
    return PairEvidence(
        Sums(*map(sum, zip(*(part.sums for part in parts), strict=True))),
        join_counts([part.firsts for part in parts]),
        join_counts([part.seconds for part in parts]),
        (sizes[0], sizes[1]),
        sum(part.records for part in parts),
    )


def _gather_pair(synopsis: Synopsis, scope: Scope, a: int, b: int) -> PairEvidence:
    compiled = compile_scope(synopsis, scope)
    if synopsis.bins.dropped[a] or synopsis.bins.dropped[b]:
        *entries, read = unresolved_pairs(synopsis, scope, compiled, a, b)
    else:
        out, read = _scan(synopsis, compiled, a, b)
        i, j, counts = _occurring(out)
        table = synopsis.plane_table
        entries = [
            ValueCounts(*(column[f, at] for column in table), *counts) for f, at in ((a, i), (b, j))
        ]
    if compiled.rows.any():
        both = np.isfinite(synopsis.rows.values[:, a]) & np.isfinite(synopsis.rows.values[:, b])
        rows = [_row_entries(synopsis, compiled, f, both) for f in (a, b)]
        entries = [join_counts(pair) for pair in zip(entries, rows, strict=True)]
    sums, sizes = Sums(), (0.0, 0.0)
    if compiled.whole.size:
        sums = _sums(synopsis, compiled, a, b)
        sizes = _size(synopsis, compiled, a), _size(synopsis, compiled, b)
    records = read + compiled.whole.size + compiled.rows.size
    return PairEvidence(sums, entries[0], entries[1], sizes, records)


def _scan(synopsis: Synopsis, compiled: CompiledScope, a: int, b: int) -> tuple[Floats, int]:
    codes = synopsis.bins.codes_max
    out = np.zeros((3, codes if a >= 0 else 1, codes if b >= 0 else 1))
    if not compiled.listed.slots.size:
        return out, 0
    layout, leaf_filter = synopsis.spec.layout, compiled.leaf_filter
    read = scan(synopsis.leaves, compiled.listed, layout, leaf_filter, a, b, out)
    if b < 0:
        out[1:] += out[0]
    return out, int(read)


def _entries(
    lows: Floats, highs: Floats, means: Floats, feature: int, counts: Floats
) -> ValueCounts:
    """Return the entries of the codes that occur; nulls are left out."""
    at = np.flatnonzero(counts[1, 1:]) + 1
    return ValueCounts(lows[feature, at], highs[feature, at], means[feature, at], *counts[:, at])


def _row_entries(
    synopsis: Synopsis,
    compiled: CompiledScope,
    feature: int,
    known: NDArray[np.bool_] | None = None,
) -> ValueCounts:
    values = synopsis.rows.values[:, feature]
    at = np.flatnonzero(compiled.rows * (np.isfinite(values) if known is None else known))
    values, states = values[at], compiled.rows[at]
    sure, most = (states == INSIDE).astype(np.float64), np.ones(at.size)
    return ValueCounts(values, values, values, sure, most, (sure + most) / 2.0)


def _sums(synopsis: Synopsis, compiled: CompiledScope, a: int, b: int) -> Sums:
    groups, at = synopsis.groups, compiled.whole
    features = groups.sums.shape[1]
    first, second = min(a, b), max(a, b)
    products = groups.squares[:, a, a]
    if a != b:
        products = groups.products[:, pair_index(first, second, features)]
    columns = (
        *(groups.sums[:, a, b], groups.sums[:, b, a]),
        *(groups.squares[:, a, b], groups.squares[:, b, a], products),
    )
    rows = float(groups.present[at, a, b].sum(dtype=np.int64))
    return Sums(rows, *(float(column[at].sum()) for column in columns))


def _size(synopsis: Synopsis, compiled: CompiledScope, feature: int) -> float:
    """Return the greatest absolute shifted value of a feature in whole groups."""
    lows = synopsis.groups.lows[compiled.whole, feature].min()
    highs = synopsis.groups.highs[compiled.whole, feature].max()
    shift = synopsis.bins.shifts[feature]
    return float(max(abs(lows - shift), abs(highs - shift))) if lows <= highs else 0.0
