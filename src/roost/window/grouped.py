"""Columnar accumulators: partial results of aggregates for many groups of rows at once.

Ten thousand standing queries would need ten thousand objects per batch. So a set of partial results
is a few arrays: computed by one loop over the rows, stored as columns, merged by adding arrays. A
snapshot query is a set of one group.

Aggregates skip nulls, as in SQL. NaN is greater than all other numbers, as in Spark. Results do not
depend on the order of merging: counts, sums and extremes exactly, spreads up to rounding, sketches
within their error. Sketches are built and merged one by one, at about ten microseconds each.
:mod:`roost.window.grouped_extremes` has minima and maxima.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from datasketches import hll_sketch, hll_union, kll_doubles_sketch
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, Mask, as_arrow, as_numpy, frozen
from roost.window.grouped_loops import (
    LIMB,
    LIMBS_MORE,
    TotalArrays,
    add_counts,
    add_spreads,
    add_totals,
    carry,
    divide_totals,
    find_spreads,
    limb_range,
    sum_doubles,
    sum_others,
    sum_runs,
    sum_whole,
)

SCALE = 1074  # a double, and so a sum of doubles, is an integer multiple of 2**-1074
BASE_MAX = SCALE // LIMB  # limbs from here on are integers
LIMB_MAX = 2045 // LIMB  # the limb at which the greatest doubles begin
HLL_LG_K = 12  # 4096 registers: a standard error of 1.6 %
KLL_K = 400  # a rank error of 0.7 %


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group: group ``g`` has ``rows[starts[g]:starts[g + 1]]``.

    If ``whole``, a single group has all rows in order; snapshot queries gain from the shortcuts.
    """

    starts: Ints
    rows: NDArray[np.int32]
    whole: bool = False

    @classmethod
    def one(cls, size: int) -> Groups:
        """Return a single group of all rows."""
        return cls(np.array([0, size]), np.arange(size, dtype=np.int32), whole=True)

    @property
    def sizes(self) -> Ints:
        """Number of rows of each group."""
        return np.diff(self.starts)

    def where(self, keep: Mask) -> Groups:
        """Filter the rows; all groups remain."""
        kept = np.concatenate([[0], np.cumsum(keep)])
        return Groups(kept[self.starts], self.rows[keep])

    def take(self, groups: Ints) -> Groups:
        """Select groups, given in ascending order."""
        if groups.size == self.starts.size - 1:
            return self
        sizes = self.sizes[groups]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(starts[-1]) + np.repeat(self.starts[groups] - starts[:-1], sizes)
        return Groups(starts, self.rows[places])

    def without_nulls(self, column: pa.Array) -> Groups:
        """Drop rows where a column is null."""
        if not column.null_count:
            return self
        return self.where(np.asarray(column.is_valid())[self.rows])

    @property
    def frozen(self) -> tuple[Ints, NDArray[np.int32]]:
        """The arrays as arguments of compiled loops."""
        return frozen(self.starts), frozen(self.rows)


class Values(NamedTuple):
    """Results: numbers or texts, and whether each is known."""

    known: Mask
    numbers: Floats | None
    texts: list[str] | None = None


class Contribution(NamedTuple):
    """Some partial results of a set (``picks``), and the slot that each is merged into."""

    grouped: Any
    picks: Ints
    slots: Ints


class Stored:
    """Base of dataclasses whose array fields are stored as columns, other fields as JSON."""

    __slots__ = ()

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store, one row per partial result."""
        return {name: _column(value) for name, value in self._fields(arrays=True)}

    def facts(self) -> dict[str, Any]:
        """Return the JSON data to store with the columns."""
        return dict(self._fields(arrays=False))

    def _fields(self, *, arrays: bool) -> Iterable[tuple[str, Any]]:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray | pa.Array) == arrays:
                yield field.name, value

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Self:
        """Invert :meth:`columns` and :meth:`facts`."""
        return cls(**{name: _array(column) for name, column in columns.items()}, **facts)


def _column(values: NDArray[Any] | pa.Array) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if values.ndim == 1:
        return as_arrow(values)
    return pa.FixedSizeListArray.from_arrays(as_arrow(values.reshape(-1)), values.shape[1])


def _array(column: pa.Array) -> NDArray[Any] | pa.Array:
    if pt.is_fixed_size_list(column.type):
        return as_numpy(column.flatten()).reshape(len(column), -1)
    return as_numpy(column) if pt.is_primitive(column.type) else column


class Grouped(Stored, ABC):
    """Base of all sets of partial results."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def of(cls, column: pa.Array, groups: Groups) -> Self:
        """Compute one partial result per group; no row of a group is null."""

    @classmethod
    @abstractmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Self:
        """Merge partial results into ``size`` slots."""

    @abstractmethod
    def results(self, function: str, parameter: float | None) -> Values:
        """Return the results of a function."""

    def single(self, function: str, parameter: float | None) -> Any:
        """Return the result of a set of one group as a Python value, None if it is unknown."""
        known, numbers, _ = self.results(function, parameter)
        assert numbers is not None, "a class with results of other types overrides this"
        number = float(numbers[0]) if known[0] else None
        return int(numbers[0]) if function in ("count", "distinct") else number


def raw_values(column: pa.Array) -> NDArray[Any]:
    """Return the values of a column of fixed width; those of nulls are arbitrary."""
    if column.null_count:
        buffers = [None, column.buffers()[1]]
        column = pa.Array.from_buffers(column.type, len(column), buffers, offset=column.offset)
    return as_numpy(column)


def doubles(column: pa.Array) -> Floats:
    """Return a column of numbers or booleans as doubles."""
    if pt.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif not pt.is_integer(column.type) and column.type != pa.float64():
        column = column.cast(pa.float64())
    return raw_values(column).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class Counts(Grouped):
    """Numbers of values."""

    n: Ints

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Counts:
        """Count the rows of each group."""
        return cls(groups.sizes)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Counts:
        """Add counts."""
        n = np.zeros(size, np.int64)
        for grouped, picks, slots in parts:
            add_counts(frozen(picks), frozen(slots), frozen(grouped.n), n)
        return cls(n)

    @classmethod
    def slid(cls, parts: Sequence[Self], order: Ints, low: Ints, high: Ints) -> Self:
        """Add runs of counts: ``order[low[k]:high[k]]``, numbered through all parts."""
        return cls(_runs(np.concatenate([one.n for one in parts]), order, low, high))

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the counts."""
        return Values(np.ones(self.n.size, bool), self.n.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Totals(Grouped):
    """Exact sums, rounded only when they are read.

    ``others`` is the sum of the values that are not finite, ``limbs`` that of the finite ones, an
    integer with the least significant 32 bits first; ``base`` limbs are omitted before them. Sums
    of doubles (not ``whole``) are multiples of ``2**-SCALE``.
    """

    n: Ints
    others: Floats
    limbs: Ints
    base: int
    whole: bool

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Totals:
        """Sum each group."""
        size = groups.starts.size - 1
        others = np.zeros(size)
        if pt.is_integer(column.type):
            low, high = _halves(raw_values(column))
            limbs = np.array([[low.sum(), high.sum()]])
            if not groups.whole:
                limbs = np.zeros((size, 2), np.int64)
                sum_whole(frozen(low), frozen(high), *groups.frozen, limbs)
            carry(limbs)
            return cls(groups.sizes, others, limbs, 0, True)
        numbers = doubles(column)
        bits = frozen(numbers).view(np.int64)
        starts, rows = groups.frozen
        if groups.whole:
            # Finding the limbs of a single group would take as long as summing it.
            base, highest, finite = 0, LIMB_MAX, bool(np.isfinite(numbers).all())
        else:
            lowest, highest, finite = limb_range(bits, rows)
            base = min(lowest, BASE_MAX)
        limbs = np.zeros((size, max(highest - base, 0) + LIMBS_MORE), np.int64)
        sum_doubles(bits, starts, None if groups.whole else rows, base, limbs)
        carry(limbs)
        if not finite:
            sum_others(frozen(numbers), *groups.frozen, others)
        return cls(groups.sizes, others, limbs, base, False)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Totals:
        """Add sums."""
        sets = [part.grouped for part in parts]
        whole = sets[0].whole
        assert all(one.whole == whole for one in sets), "a column is of integers or it is not"
        base = min(one.base for one in sets)
        width = max(one.base + one.limbs.shape[1] for one in sets) - base
        limbs = np.zeros((size, width), np.int64)
        target = TotalArrays(np.zeros(size, np.int64), np.zeros(size), limbs)
        for one, picks, slots in parts:
            source = TotalArrays(frozen(one.n), frozen(one.others), frozen(one.limbs))
            add_totals(frozen(picks), frozen(slots), source, one.base - base, target)
        carry(limbs)
        return cls(*target, base, whole)

    @classmethod
    def slid(cls, parts: Sequence[Self], order: Ints, low: Ints, high: Ints) -> Self | None:
        """Add runs of sums, as :meth:`Counts.slid`; None if values are not finite.

        Sums are exact, so the difference of two running sums is.
        """
        if any(one.others.any() for one in parts):
            return None
        base = min(one.base for one in parts)
        width = max(one.base + one.limbs.shape[1] for one in parts) - base
        limbs = np.zeros((sum(one.n.size for one in parts), width), np.int64)
        at = 0
        for one in parts:
            shift = one.base - base
            limbs[at : at + one.n.size, shift : shift + one.limbs.shape[1]] = one.limbs
            at += one.n.size
        limbs = _runs(limbs, order, low, high)
        carry(limbs)
        n = _runs(np.concatenate([one.n for one in parts]), order, low, high)
        return cls(n, np.zeros(n.size), limbs, base, parts[0].whole)

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the sums or the means, each rounded once."""
        scale = 0 if self.whole else SCALE - LIMB * self.base
        divisors = np.maximum(self.n, 1) if function == "avg" else np.ones(self.n.size, np.int64)
        numbers = np.empty(self.n.size)
        left = np.flatnonzero(divide_totals(frozen(self.limbs), frozen(divisors), scale, numbers))
        if left.size:
            rest = replace(self, n=self.n[left], limbs=self.limbs[left])
            numbers[left] = [
                quotient(total, scale, int(divisor))
                for total, divisor in zip(rest.exact(), divisors[left], strict=True)
            ]
        numbers = np.where(self.others != 0.0, self.others, numbers)
        return Values(self.n > 0, numbers)

    def single(self, function: str, parameter: float | None) -> Any:
        """Return the sum or the mean; a sum of integers is an integer."""
        if function == "sum" and self.whole and self.n[0]:
            return next(iter(self.exact()))
        return Grouped.single(self, function, parameter)

    def exact(self) -> Iterable[int]:
        """Return the sums in units of the first limb."""
        width = self.limbs.shape[1]
        # The last limb holds the sign and may exceed 32 bits, so it becomes two words.
        words = np.empty((self.n.size, width + 1), np.uint32)
        words[:, : width - 1] = self.limbs[:, :-1]
        words[:, width - 1] = self.limbs[:, -1] & ((1 << LIMB) - 1)
        words[:, width] = (self.limbs[:, -1] >> LIMB) & ((1 << LIMB) - 1)
        data, step = words.tobytes(), words.itemsize * (width + 1)
        for begin in range(0, len(data), step):
            yield int.from_bytes(data[begin : begin + step], "little", signed=True)


def _runs(values: Ints, order: Ints, low: Ints, high: Ints) -> Ints:
    """Return the sums of ``values[order[low[k]:high[k]]]`` for each ``k``."""
    table = values.reshape(values.shape[0], -1)
    sums = np.empty((low.size, table.shape[1]), np.int64)
    sum_runs(frozen(table), frozen(order), frozen(low), frozen(high), sums)
    return sums.reshape(low.size, *values.shape[1:])


def _halves(values: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the low 32 bits and the rest of integers of any width."""
    if values.dtype != np.uint64:
        values = values.astype(np.int64, copy=False)
    low = values & values.dtype.type((1 << LIMB) - 1)
    high = values >> values.dtype.type(LIMB)
    return low.astype(np.int64, copy=False), high.astype(np.int64, copy=False)


def quotient(total: int, scale: int, divisor: int = 1) -> float:
    """Return ``total / 2**scale / divisor``, rounded once; an infinity if it overflows."""
    try:
        return total / (divisor << scale)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class Spreads(Grouped):
    """Counts, means, and sums of squared deviations from the mean."""

    n: Ints
    means: Floats
    squares: Floats

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Spreads:
        """Compute the spread of each group in two passes."""
        values = doubles(column)
        if groups.whole and values.size:
            with np.errstate(all="ignore"):
                means = values.mean(keepdims=True)
                return cls(groups.sizes, means, np.square(values - means).sum(keepdims=True))
        means, squares = np.zeros((2, groups.starts.size - 1))
        find_spreads(frozen(values), *groups.frozen, means, squares)
        return cls(groups.sizes, means, squares)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Spreads:
        """Merge spreads."""
        n, (means, squares) = np.zeros(size, np.int64), np.zeros((2, size))
        for one, picks, slots in parts:
            stored = (frozen(one.n), frozen(one.means), frozen(one.squares))
            add_spreads(frozen(picks), frozen(slots), *stored, n, means, squares)
        return cls(n, means, squares)

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the sample standard deviations; unknown for fewer than two values."""
        return Values(self.n > 1, np.sqrt(self.squares / np.maximum(self.n - 1, 1)))


@dataclass(frozen=True, slots=True)
class Sketches(Grouped):
    """Serialised sketches; null without values."""

    sketch: pa.Array

    @staticmethod
    @abstractmethod
    def build(values: pa.Array) -> bytes:
        """Build the sketch of some values."""

    @staticmethod
    @abstractmethod
    def union(parts: list[bytes]) -> bytes:
        """Merge one or more sketches."""

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Self:
        """Build the sketch of each group."""
        values = column if groups.whole else column.take(as_arrow(groups.rows))
        runs = zip(groups.starts.tolist(), groups.sizes.tolist(), strict=False)
        data = [cls.build(values.slice(at, n)) if n else None for at, n in runs]
        return cls(pa.array(data, pa.binary()))

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Self:
        """Merge the sketches of each slot."""
        found: list[list[bytes]] = [[] for _ in range(size)]
        for one, picks, slots in parts:
            data = one.sketch.to_pylist()
            for pick, slot in zip(picks.tolist(), slots.tolist(), strict=True):
                if data[pick] is not None:
                    found[slot].append(data[pick])
        return cls(pa.array([cls.union(some) if some else None for some in found], pa.binary()))


class DistinctSketches(Sketches):
    """Numbers of distinct values, by HyperLogLog."""

    __slots__ = ()

    @staticmethod
    def build(values: pa.Array) -> bytes:
        """Build the sketch of some values."""
        sketch = hll_sketch(HLL_LG_K)
        for value in _hashable(values):
            sketch.update(value)
        return bytes(sketch.serialize_compact())

    @staticmethod
    def union(parts: list[bytes]) -> bytes:
        """Merge one or more sketches."""
        union = hll_union(HLL_LG_K)
        for part in parts:
            union.update(hll_sketch.deserialize(part))
        return bytes(union.get_result().serialize_compact())

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the estimated numbers of distinct values."""
        counts = [0.0 if data is None else _estimate(data) for data in self.sketch.to_pylist()]
        return Values(np.ones(len(counts), bool), np.array(counts, np.float64))


def _estimate(data: bytes) -> float:
    """Return the estimate of a sketch, which does not depend on how it was merged.

    A sketch that was never merged would return one that depends on the order of its values.
    """
    sketch, union = hll_sketch.deserialize(data), hll_union(HLL_LG_K)
    union.update(sketch)
    union.update(sketch)
    return float(round(union.get_result().get_estimate()))


def _hashable(column: pa.Array) -> list[Any]:
    """Return the distinct values as integers, doubles or texts that are equal if the values are."""
    different = column.unique()
    if pt.is_floating(column.type):
        values = doubles(different) + 0.0  # turns -0.0 into 0.0
        values[np.isnan(values)] = np.nan
        return list(np.unique(values).tolist())
    if pt.is_integer(column.type):
        return list(as_numpy(different).astype(np.int64).tolist())
    if pt.is_boolean(column.type):
        return [int(value) for value in different.to_pylist()]
    if pt.is_temporal(column.type):
        whole = pa.int32() if pt.is_date32(column.type) else pa.int64()
        return list(different.cast(whole).to_pylist())
    # The sketch ignores an empty text.
    return [f"={text}" for text in different.cast(pa.string()).to_pylist()]


class RankSketches(Sketches):
    """Quantiles, by KLL."""

    __slots__ = ()

    @staticmethod
    def build(values: pa.Array) -> bytes:
        """Build the sketch of some values; NaN has no rank."""
        numbers = doubles(values)
        sketch = kll_doubles_sketch(KLL_K)
        sketch.update(np.ascontiguousarray(numbers[~np.isnan(numbers)]))
        return bytes(sketch.serialize())

    @staticmethod
    def union(parts: list[bytes]) -> bytes:
        """Merge one or more sketches."""
        sketch = kll_doubles_sketch.deserialize(parts[0])
        for part in parts[1:]:
            sketch.merge(kll_doubles_sketch.deserialize(part))
        return bytes(sketch.serialize())

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the estimated values of a rank from 0 to 1."""
        values = [_quantile(data, parameter) for data in self.sketch.to_pylist()]
        known = np.array([value is not None for value in values], bool)
        return Values(known, np.array([value or 0.0 for value in values], np.float64))


def _quantile(data: bytes | None, rank: float | None) -> float | None:
    sketch = None if data is None else kll_doubles_sketch.deserialize(data)
    return None if sketch is None or sketch.is_empty() else float(sketch.get_quantile(rank, True))
