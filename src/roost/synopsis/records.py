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
from roost.model.arrays import Floats, Ints, frozen
from roost.synopsis.bins import Coding
from roost.synopsis.leaves import Bytes
from roost.synopsis.paths import RunRows

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
    _widen_boxes(frozen(bounds), owners, out)
    return out


@njit(cache=True, nogil=True)
def _widen_boxes(bounds: Floats, owners: Ints, out: Floats) -> None:  # pragma: no cover - compiled
    for k in range(owners.size):
        own, box = out[owners[k]], bounds[k]
        own[0], own[1] = min(own[0], box[0]), min(own[1], box[1])
        own[2], own[3] = max(own[2], box[2]), max(own[3], box[3])


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
def _find_codes(
    values: Floats, f: Whole, coding: Coding, cells: NDArray[np.int32], found: Bytes
) -> None:  # pragma: no cover - compiled
    """Fill the code of each value of a feature; NaN and infinite values count as null."""
    edges, starts = coding.edges[f], coding.starts[f]
    low, scale, last = coding.lows[f], coding.scales[f], float(starts.size - 1)
    for k in range(values.size):
        cell = (values[k] - low) * scale
        cell = cell if cell > 0.0 else 0.0  # NaN, too
        cells[k] = np.int32(cell if cell < last else last)
    for k in range(values.size):
        value, code = values[k], np.uint64(starts[np.uint64(cells[k])])
        # Nearly every cell has one edge or none: no branch depends on which.
        code += np.uint64(edges[code] <= value)
        while edges[code] <= value:
            code += np.uint64(1)
        found[k] = code + np.uint64(1) if abs(value) < np.inf else np.uint64(0)


@njit(cache=True, nogil=True)
def _add_values(
    values: Floats,
    known: Floats,
    found: Bytes,
    f: Whole,
    group: Whole,
    shift: float,
    records: GroupRecords,
    bins: BinRecords,
) -> None:  # pragma: no cover - compiled
    """Add the values of a feature to its group and its bins, and shift them."""
    sums, squares, lows, highs = bins.sums[f], bins.squares[f], bins.lows[f], bins.highs[f]
    marginals = records.marginals[group, f]
    least, most = records.lows[group, f], records.highs[group, f]
    for k in range(found.size):
        code = found[k]
        marginals[code] += 1
        if code == 0:
            values[k] = known[k] = 0.0
            continue
        value = values[k]
        v = value - shift
        values[k], known[k] = v, 1.0
        sums[code] += v
        squares[code] += v * v
        # Extremes rarely change: a branch is cheaper than to write them.
        if value < lows[code]:
            lows[code] = value
        if value > highs[code]:
            highs[code] = value
        if value < least:
            least = value
        if value > most:
            most = value
    records.lows[group, f] = least
    records.highs[group, f] = most


class Division(NamedTuple):
    """Rows in order of group and interval; unit ``u`` has rows ``starts[u]`` to the next one."""

    rows: Ints
    positions: Ints  # of the paths of the rows
    starts: Ints
    groups: Ints  # of each unit
    intervals: Ints  # of each unit, in its bucket


@njit(cache=True, nogil=True)
def digest_rows(
    values: Floats,
    units: Division,
    coding: Coding,
    records: GroupRecords,
    totals: Totals,
    bins: BinRecords,
    codes: Bytes,
) -> None:  # pragma: no cover - compiled
    """Add rows to the records of groups and to totals by unit; fill the codes of the leaves.

    ``values`` are by feature, then row. Sums are added to the totals only.
    """
    features = values.shape[0]
    shifted, known = np.empty((features, CHUNK_ROWS)), np.empty((features, CHUNK_ROWS))
    cells, codes_of_chunk = np.empty(CHUNK_ROWS, np.int32), np.empty(CHUNK_ROWS, np.uint8)
    for unit in range(units.groups.size):
        last, group = units.starts[unit + 1], units.groups[unit]
        for begin in range(units.starts[unit], last, CHUNK_ROWS):
            end = min(begin + CHUNK_ROWS, last)
            rows, positions = units.rows[begin:end], units.positions[begin:end]
            found = codes_of_chunk[: rows.size]
            for f in range(features):
                own, plane = shifted[f][: rows.size], coding.planes[f]
                for k in range(rows.size):
                    own[k] = values[f, rows[k]]
                # Several simple loops take half the time of one.
                _find_codes(own, f, coding, cells, found)
                shift = coding.shifts[f]
                _add_values(own, known[f], found, f, group, shift, records, bins)
                for k in range(rows.size):
                    codes[positions[k], f] = plane[found[k]]
            _add_pairs(shifted, known, rows.size, unit, totals)
    for group in range(records.marginals.shape[0]):
        for f in range(features):
            for code in range(records.marginals.shape[2]):
                bins.counts[f, code] += records.marginals[group, f, code]


class Extents(NamedTuple):
    """Bounds and times by run."""

    bounds: Floats  # x0, y0, x1, y1
    times: Ints  # first, last

    @classmethod
    def empty(cls, runs: int) -> Extents:
        """Return extents without rows."""
        limits = np.iinfo(np.int64)
        bounds = np.tile([np.inf, np.inf, -np.inf, -np.inf], (runs, 1))
        return cls(bounds, np.tile([limits.max, limits.min], (runs, 1)))


@njit(cache=True, nogil=True)
def widen_runs(
    x: Floats, y: Floats, time: Ints, runs: RunRows, extents: Extents
) -> None:  # pragma: no cover - compiled
    """Widen the extents of runs to contain their rows."""
    for k in range(runs.rows.size):
        row, run = runs.rows[k], runs.ranks[k]
        bounds, times = extents.bounds[run], extents.times[run]
        bounds[0], bounds[1] = min(bounds[0], x[row]), min(bounds[1], y[row])
        bounds[2], bounds[3] = max(bounds[2], x[row]), max(bounds[3], y[row])
        times[0], times[1] = min(times[0], time[row]), max(times[1], time[row])
