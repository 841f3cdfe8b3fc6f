"""Group records: exact sums of every group, stored as columns, merged by addition.

For every pair of features ``a, b`` a record has, over the rows in which neither is null, their
number, the sum and the sum of squares of ``a``, and the sum of the products: what a mean, a
variance, a correlation or a regression of two features needs, with nulls left out pair by pair.
Values are shifted before they are summed (see :mod:`roost.synopsis.bins`), which keeps variances
accurate. A record also has the extremes of each feature, the bounds of the group in space and
time, and its marginals: the number of rows by feature and bin.

Next to the records of the groups there is one of the bins: what lies in a bin over all groups. It
gives a bin its mean and its extremes, which are narrower than its edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.model.arrays import Floats, Ints
from roost.synopsis.bins import Coding
from roost.synopsis.leaves import Bytes

CHUNK_ROWS = 512  # rows that are summed together: their values stay in the cache


class GroupRecords(NamedTuple):
    """Columns by group, sorted by key; matrices are by feature ``a``, then ``b``."""

    keys: Ints
    counts: Ints
    present: Ints  # rows in which neither a nor b is null
    sums: Floats  # of a, over those rows
    squares: Floats
    products: Floats  # by pair a < b, see `pair_index`
    lows: Floats
    highs: Floats
    bounds: Floats  # x0, y0, x1, y1
    times: Ints  # first, last
    marginals: Ints  # by feature and code
    exact: NDArray[np.bool_]  # False where leaves left the group: sums are not those of its leaves

    @classmethod
    def empty(cls, groups: int, features: int, codes: int) -> GroupRecords:
        """Return records without rows."""
        pairs = (groups, features, features)
        products = np.zeros((groups, features * (features - 1) // 2))
        bounds = np.tile([np.inf, np.inf, -np.inf, -np.inf], (groups, 1))
        limits = np.iinfo(np.int64)
        return cls(
            *(np.zeros(groups, np.int64), np.zeros(groups, np.int64), np.zeros(pairs, np.int64)),
            *(np.zeros(pairs), np.zeros(pairs), products),
            *(np.full((groups, features), np.inf), np.full((groups, features), -np.inf)),
            *(bounds, np.tile([limits.max, limits.min], (groups, 1))),
            np.zeros((groups, features, codes), np.int64),
            np.ones(groups, np.bool_),
        )

    def take(self, groups: Any) -> GroupRecords:
        """Return some of the records."""
        return GroupRecords(*(column[groups] for column in self))

    def narrowed(self) -> GroupRecords:
        """Return the same records with counts in the narrowest types, as they are stored."""
        counts = (narrow(self.counts), narrow(self.present), narrow(self.marginals))
        return self._replace(counts=counts[0], present=counts[1], marginals=counts[2])


class Totals(NamedTuple):
    """Sums of groups by interval, sorted by key; see :mod:`roost.synopsis.totals`.

    A key has the prefix, the slot and the number of the interval since 1970, so the intervals of a
    prefix and slot follow each other. The other columns are those of `GroupRecords`.
    """

    keys: Ints
    counts: Ints
    present: Ints
    sums: Floats
    squares: Floats
    products: Floats

    @classmethod
    def empty(cls, keys: Ints, features: int) -> Totals:
        """Return totals without rows."""
        pairs = (keys.size, features, features)
        products = np.zeros((keys.size, features * (features - 1) // 2))
        counts = np.zeros(keys.size, np.int64), np.zeros(pairs, np.int64)
        return cls(keys, *counts, np.zeros(pairs), np.zeros(pairs), products)

    @classmethod
    def none(cls, features: int) -> Totals:
        """Return no totals."""
        return cls.empty(np.empty(0, np.int64), features).narrowed()

    def take(self, at: Any) -> Totals:
        """Return some of the totals."""
        return Totals(*(column[at] for column in self))

    def narrowed(self) -> Totals:
        """Return the same totals with counts in the narrowest types, as they are stored."""
        return self._replace(counts=narrow(self.counts), present=narrow(self.present))


@njit(cache=True, nogil=True)
def pair_index(a: Whole, b: Whole, features: Whole) -> Whole:  # pragma: no cover - compiled
    """Return the position of the pair of features ``a < b`` among the products."""
    return a * (2 * features - a - 1) // 2 + b - a - 1


def product_matrix(products: Floats, features: int) -> Floats:
    """Return products by pair as a symmetric matrix; its diagonal is 0."""
    matrix = np.zeros((features, features))
    matrix[np.triu_indices(features, 1)] = products
    return matrix + matrix.T


class BinRecords(NamedTuple):
    """Number, sums and extremes of the values, by feature and code; null is code 0."""

    counts: Ints
    sums: Floats  # of shifted values
    squares: Floats
    lows: Floats
    highs: Floats

    @classmethod
    def empty(cls, features: int, codes: int) -> BinRecords:
        """Return records of no values."""
        shape = (features, codes)
        sums = np.zeros(shape), np.zeros(shape)
        extremes = np.full(shape, np.inf), np.full(shape, -np.inf)
        return cls(np.zeros(shape, np.int64), *sums, *extremes)


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers from 0 up in the narrowest type that holds them."""
    top = int(values.max(initial=0))
    return values.astype(np.min_scalar_type(top))


def merge_groups(parts: Sequence[GroupRecords]) -> GroupRecords:
    """Add records of equal keys, within and between parts."""
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    added = ("counts", "present", "sums", "squares", "products", "marginals")
    merged, *sums = add_columns(keys, parts, added)
    bounds, times = column("bounds"), column("times")
    ends = (np.minimum.reduceat(x, firsts) for x in (column("lows"), bounds[:, :2], times[:, :1]))
    tops = (np.maximum.reduceat(x, firsts) for x in (column("highs"), bounds[:, 2:], times[:, 1:]))
    lows, highs, *limits = (pair for pairs in zip(ends, tops, strict=True) for pair in pairs)
    return GroupRecords(
        keys=merged,
        lows=lows,
        highs=highs,
        bounds=np.hstack(limits[:2]),
        times=np.hstack(limits[2:]),
        exact=np.logical_and.reduceat(column("exact"), firsts),
        **dict(zip(added, sums, strict=True)),
    )


def add_columns(
    keys: Ints, parts: Sequence[NamedTuple], names: Sequence[str]
) -> Iterator[NDArray[Any]]:
    """Yield the distinct keys of all parts, ascending, then the sums of columns by key."""
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    yield keys[order][firsts]
    for name in names:
        values = np.concatenate([getattr(part, name) for part in parts])[order]
        whole = np.issubdtype(values.dtype, np.unsignedinteger)
        yield np.add.reduceat(values, firsts, dtype=np.int64 if whole else None)


def reduce_bounds(bounds: Floats, owners: Ints, count: int) -> Floats:
    """Return for each owner the smallest box that contains its boxes."""
    out = np.tile([np.inf, np.inf, -np.inf, -np.inf], (count, 1))
    for column, pick in enumerate((np.minimum, np.minimum, np.maximum, np.maximum)):
        pick.at(out[:, column], owners, bounds[:, column])
    return out


def merge_bins(parts: Sequence[BinRecords]) -> BinRecords:
    """Add the records of the bins."""
    counts, sums, squares = (np.sum([part[k] for part in parts], axis=0) for k in range(3))
    return BinRecords(
        counts,
        sums,
        squares,
        np.min([part.lows for part in parts], axis=0),
        np.max([part.highs for part in parts], axis=0),
    )


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _dot(a: Floats, b: Floats) -> float:  # pragma: no cover - compiled
    """Return the sum of products; the order of the additions is the compiler's."""
    total = 0.0
    for k in range(a.size):
        total += a[k] * b[k]
    return total


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _masked_sums(a: Floats, mask: Floats) -> tuple[float, float]:  # pragma: no cover - compiled
    """Return sum and sum of squares of the numbers with mask 1; the others have 0."""
    total = squares = 0.0
    for k in range(a.size):
        value = a[k] * mask[k]
        total += value
        squares += value * value
    return total, squares


@njit(cache=True, nogil=True)
def _add_pairs(
    shifted: Floats, known: Floats, size: Whole, unit: Whole, totals: Totals
) -> None:  # pragma: no cover - compiled
    """Add rows, by feature, to the sums of all pairs; where ``known`` is 0, so are the values."""
    features = shifted.shape[0]
    counts = np.empty(features, np.int64)
    for f in range(features):
        counts[f] = np.int64(known[f][:size].sum())
    pair = 0
    for a in range(features):
        own, known_a = shifted[a][:size], known[a][:size]
        total_a, squares_a = _masked_sums(own, known_a)
        for b in range(features):
            total, squares, count = total_a, squares_a, counts[a]
            if b > a:
                totals.products[unit, pair] += _dot(own, shifted[b][:size])
                pair += 1
            if b != a and counts[b] < size:
                total, squares = _masked_sums(own, known[b][:size])
                count = np.int64(_dot(known_a, known[b][:size]))
            totals.sums[unit, a, b] += total
            totals.squares[unit, a, b] += squares
            totals.present[unit, a, b] += count


@njit(cache=True, nogil=True)
def _code_feature(
    f: Whole,
    positions: Ints,
    coding: Coding,
    group: Whole,
    records: GroupRecords,
    bins: BinRecords,
    codes: Bytes,
    values: Floats,
    known: Floats,
) -> None:  # pragma: no cover - compiled
    """Add one feature of some rows to the counts, fill its codes, and shift its values."""
    edges, starts, plane = coding.edges[f], coding.starts[f], coding.planes[f]
    shift, low, scale = coding.shifts[f], coding.lows[f], coding.scales[f]
    last = float(starts.size - 1)
    sums, squares, lows, highs = bins.sums[f], bins.squares[f], bins.lows[f], bins.highs[f]
    marginals = records.marginals[group, f]
    least, most = records.lows[group, f], records.highs[group, f]
    for k in range(positions.size):
        value = values[k]
        if not np.isfinite(value):
            marginals[0] += 1
            codes[positions[k], f] = 0
            values[k] = known[k] = 0.0
            continue
        code = np.int64(starts[int(min(max((value - low) * scale, 0.0), last))])
        # Nearly every cell has one edge or two: no branch depends on which.
        code += edges[code] <= value
        code += edges[code] <= value
        while edges[code] <= value:
            code += 1
        code += 1
        v = value - shift
        values[k], known[k] = v, 1.0
        codes[positions[k], f] = plane[code]
        marginals[code] += 1
        sums[code] += v
        squares[code] += v * v
        # Extremes rarely change: a branch is cheaper than to write them.
        if value < lows[code]:
            lows[code] = value
        if value > highs[code]:
            highs[code] = value
        least, most = min(least, value), max(most, value)
    records.lows[group, f] = least
    records.highs[group, f] = most


class Division(NamedTuple):
    """Rows in order of group and interval; unit ``u`` has rows ``starts[u]`` to the next one."""

    positions: Ints  # in the order of the groups
    starts: Ints
    groups: Ints  # of each unit
    intervals: Ints  # of each unit, in its bucket


@njit(cache=True, nogil=True)
def digest_rows(
    values: Floats,
    order: Ints,
    units: Division,
    coding: Coding,
    records: GroupRecords,
    totals: Totals,
    bins: BinRecords,
    codes: Bytes,
) -> None:  # pragma: no cover - compiled
    """Add rows to the records of groups and to totals by unit; fill the codes of the leaves.

    Sums are added to the totals only.
    """
    features = values.shape[1]
    shifted, known = np.empty((features, CHUNK_ROWS)), np.empty((features, CHUNK_ROWS))
    for unit in range(units.groups.size):
        last, group = units.starts[unit + 1], units.groups[unit]
        for begin in range(units.starts[unit], last, CHUNK_ROWS):
            at = units.positions[begin : min(begin + CHUNK_ROWS, last)]
            for k in range(at.size):
                row = order[at[k]]
                for f in range(features):
                    shifted[f, k] = values[row, f]
            for f in range(features):
                to = shifted[f], known[f]
                _code_feature(f, at, coding, group, records, bins, codes, *to)
            _add_pairs(shifted, known, at.size, unit, totals)
    for group in range(records.marginals.shape[0]):
        for f in range(features):
            for code in range(records.marginals.shape[2]):
                bins.counts[f, code] += records.marginals[group, f, code]


@njit(cache=True, nogil=True)
def bound_rows(
    x: Floats, y: Floats, order: Ints, owners: Ints, bounds: Floats
) -> None:  # pragma: no cover - compiled
    """Widen the bounds of each row's owner to contain the row; owners are by position in order."""
    for k in range(order.size):
        i, at = order[k], owners[k]
        bounds[at, 0] = min(bounds[at, 0], x[i])
        bounds[at, 1] = min(bounds[at, 1], y[i])
        bounds[at, 2] = max(bounds[at, 2], x[i])
        bounds[at, 3] = max(bounds[at, 3], y[i])
