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

from collections.abc import Sequence
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
        values = np.concatenate([getattr(part, name) for part in parts])[order]
        return (
            values.astype(np.int64) if np.issubdtype(values.dtype, np.unsignedinteger) else values
        )

    added = ("counts", "present", "sums", "squares", "products", "marginals")
    bounds, times = column("bounds"), column("times")
    ends = (np.minimum.reduceat(x, firsts) for x in (column("lows"), bounds[:, :2], times[:, :1]))
    tops = (np.maximum.reduceat(x, firsts) for x in (column("highs"), bounds[:, 2:], times[:, 1:]))
    lows, highs, *limits = (pair for pairs in zip(ends, tops, strict=True) for pair in pairs)
    return GroupRecords(
        keys=keys[order][firsts],
        lows=lows,
        highs=highs,
        bounds=np.hstack(limits[:2]),
        times=np.hstack(limits[2:]),
        exact=np.logical_and.reduceat(column("exact"), firsts),
        **{name: np.add.reduceat(column(name), firsts) for name in added},
    )


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
    shifted: Floats, known: Floats, size: Whole, group: Whole, records: GroupRecords
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
                records.products[group, pair] += _dot(own, shifted[b][:size])
                pair += 1
            if b != a and counts[b] < size:
                total, squares = _masked_sums(own, known[b][:size])
                count = np.int64(_dot(known_a, known[b][:size]))
            records.sums[group, a, b] += total
            records.squares[group, a, b] += squares
            records.present[group, a, b] += count


@njit(cache=True, nogil=True)
def _code_feature(
    f: Whole,
    size: Whole,
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
    for k in range(size):
        value = values[k]
        if not np.isfinite(value):
            marginals[0] += 1
            codes[k, f] = 0
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
        codes[k, f] = plane[code]
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


@njit(cache=True, nogil=True)
def digest_rows(
    values: Floats,
    order: Ints,
    group_starts: Ints,
    coding: Coding,
    records: GroupRecords,
    bins: BinRecords,
    codes: Bytes,
) -> None:  # pragma: no cover - compiled
    """Add rows, listed in order of groups, to the records; fill the codes of the leaves."""
    features = values.shape[1]
    shifted, known = np.empty((features, CHUNK_ROWS)), np.empty((features, CHUNK_ROWS))
    for group in range(group_starts.size - 1):
        for begin in range(group_starts[group], group_starts[group + 1], CHUNK_ROWS):
            end = min(begin + CHUNK_ROWS, group_starts[group + 1])
            own, size = codes[begin:end], end - begin
            for k in range(size):
                for f in range(features):
                    shifted[f, k] = values[order[begin + k], f]
            for f in range(features):
                to = shifted[f], known[f]
                _code_feature(f, size, coding, group, records, bins, own, *to)
            _add_pairs(shifted, known, size, group, records)
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
