"""Columnar accumulators: partial results of aggregates for many groups of rows at once.

:mod:`roost.window.accumulators` represents one partial result as an object, which suits a single
query. Ten thousand standing queries would need ten thousand objects per batch. Here a set of
partial results is a few arrays: computed by one loop over the rows, stored as columns, merged by
adding arrays. The semantics are the same: sums exact and rounded once, NaN the greatest number,
nulls skipped. This module has counts, sums and spreads; :mod:`roost.window.grouped_extremes` has
extremes and :mod:`roost.window.grouped_sketches` the sketches, which are processed one by one.

Results are doubles, or texts for columns of texts or times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.model.arrays import as_arrow, as_numpy
from roost.window.grouped_loops import (
    LIMB,
    LIMBS_MORE,
    TotalArrays,
    add_counts,
    add_spreads,
    add_totals,
    carry,
    find_spreads,
    frozen,
    limb_range,
    sum_doubles,
    sum_others,
    sum_whole,
)
from roost.window.sums import SCALE, quotient

Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]
BASE_MAX = SCALE // LIMB  # limbs from here on are integers


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group: group ``g`` has ``rows[starts[g]:starts[g + 1]]``."""

    starts: Integers
    rows: NDArray[np.int32]

    @property
    def sizes(self) -> Integers:
        """Rows of each group."""
        return np.diff(self.starts)

    def where(self, keep: NDArray[np.bool_]) -> Groups:
        """Filter the rows; all groups remain."""
        kept = np.concatenate([[0], np.cumsum(keep)])
        return Groups(kept[self.starts], self.rows[keep])

    def take(self, groups: Integers) -> Groups:
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
    def frozen(self) -> tuple[Integers, NDArray[np.int32]]:
        """The arrays as arguments of compiled loops."""
        return frozen(self.starts), frozen(self.rows)


class Values(NamedTuple):
    """Results: numbers or texts, and whether each is known."""

    known: NDArray[np.bool_]
    numbers: Doubles | None
    texts: list[str] | None = None


class Contribution(NamedTuple):
    """Some partial results of a set (``picks``), and the slot that each is merged into."""

    grouped: Any
    picks: Integers
    slots: Integers


class Grouped(ABC):
    """Base class of all sets of partial results."""

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
    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store, one row per partial result."""

    def facts(self) -> dict[str, Any]:
        """Return JSON data to store with the columns."""
        return {}

    @classmethod
    @abstractmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Self:
        """Invert :meth:`columns` and :meth:`facts`."""

    @abstractmethod
    def results(self, function: str, parameter: float | None) -> Values:
        """Return the results of a function."""


def raw_values(column: pa.Array) -> NDArray[Any]:
    """Return the values of a column of fixed width; those of nulls are arbitrary."""
    if column.null_count:
        buffers = [None, column.buffers()[1]]
        column = pa.Array.from_buffers(column.type, len(column), buffers, offset=column.offset)
    return as_numpy(column)


def doubles(column: pa.Array) -> Doubles:
    """Return a column of numbers or booleans as doubles."""
    if pt.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif not pt.is_integer(column.type) and column.type != pa.float64():
        column = column.cast(pa.float64())
    return raw_values(column).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class Counts(Grouped):
    """Numbers of values."""

    n: Integers

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Counts:
        """Count the rows of each group."""
        return cls(groups.sizes)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Counts:
        """Merge partial results."""
        n = np.zeros(size, np.int64)
        for grouped, picks, slots in parts:
            add_counts(frozen(picks), frozen(slots), frozen(grouped.n), n)
        return cls(n)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store."""
        return {"n": as_arrow(self.n)}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Counts:
        """Invert :meth:`columns`."""
        return cls(as_numpy(columns["n"]))

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the counts."""
        return Values(np.ones(self.n.size, bool), self.n.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Totals(Grouped):
    """Exact sums.

    Parameters
    ----------
    n
        Number of values.
    others
        Sum of the values that are not finite.
    limbs
        Sum of the finite values as an integer, the least significant 32 bits first.
    base
        Number of limbs below the first.
    whole
        Whether the values are integers; sums of doubles are multiples of ``2**-SCALE``.
    """

    n: Integers
    others: Doubles
    limbs: Integers
    base: int
    whole: bool

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Totals:
        """Sum each group."""
        size = groups.starts.size - 1
        others = np.zeros(size)
        if pt.is_integer(column.type):
            low, high = _halves(raw_values(column))
            limbs = np.zeros((size, 2), np.int64)
            sum_whole(frozen(low), frozen(high), *groups.frozen, limbs)
            carry(limbs)
            return cls(groups.sizes, others, limbs, 0, True)
        numbers = doubles(column)
        bits = frozen(numbers).view(np.int64)
        lowest, highest = limb_range(bits, frozen(groups.rows))
        base = min(lowest, BASE_MAX)
        limbs = np.zeros((size, max(highest - base, 0) + LIMBS_MORE), np.int64)
        sum_doubles(bits, *groups.frozen, base, limbs)
        carry(limbs)
        sum_others(frozen(numbers), *groups.frozen, others)
        return cls(groups.sizes, others, limbs, base, False)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Totals:
        """Merge partial results."""
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

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store."""
        flat = as_arrow(self.limbs.reshape(-1))
        limbs = pa.FixedSizeListArray.from_arrays(flat, self.limbs.shape[1])
        return {"n": as_arrow(self.n), "others": as_arrow(self.others), "limbs": limbs}

    def facts(self) -> dict[str, Any]:
        """Return JSON data to store with the columns."""
        return {"base": self.base, "whole": self.whole}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Totals:
        """Invert :meth:`columns`."""
        n, others = as_numpy(columns["n"]), as_numpy(columns["others"])
        limbs = as_numpy(columns["limbs"].flatten()).reshape(n.size, -1)
        return cls(n, others, limbs, facts["base"], facts["whole"])

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the sums or the means, each rounded once."""
        scale = 0 if self.whole else SCALE - LIMB * self.base
        divisors = self.n.tolist() if function == "avg" else [1] * self.n.size
        numbers = np.array(
            [
                quotient(total, scale, divisor or 1)
                for total, divisor in zip(self._exact(), divisors, strict=True)
            ],
            np.float64,
        )
        numbers = np.where(self.others != 0.0, self.others, numbers)
        return Values(self.n > 0, numbers)

    def _exact(self) -> Iterable[int]:
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


def _halves(values: NDArray[Any]) -> tuple[Integers, Integers]:
    """Return the low 32 bits and the rest of integers of any width."""
    if values.dtype != np.uint64:
        values = values.astype(np.int64, copy=False)
    low = values & values.dtype.type((1 << LIMB) - 1)
    high = values >> values.dtype.type(LIMB)
    return low.astype(np.int64, copy=False), high.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class Spreads(Grouped):
    """Counts, means, and sums of squared deviations from the mean."""

    n: Integers
    means: Doubles
    squares: Doubles

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Spreads:
        """Compute the spread of each group in two passes."""
        means, squares = np.zeros((2, groups.starts.size - 1))
        find_spreads(frozen(doubles(column)), *groups.frozen, means, squares)
        return cls(groups.sizes, means, squares)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> Spreads:
        """Merge partial results."""
        n, (means, squares) = np.zeros(size, np.int64), np.zeros((2, size))
        for one, picks, slots in parts:
            stored = (frozen(one.n), frozen(one.means), frozen(one.squares))
            add_spreads(frozen(picks), frozen(slots), *stored, n, means, squares)
        return cls(n, means, squares)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store."""
        both = {"means": as_arrow(self.means), "squares": as_arrow(self.squares)}
        return {"n": as_arrow(self.n), **both}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Spreads:
        """Invert :meth:`columns`."""
        return cls(*(as_numpy(columns[name]) for name in ("n", "means", "squares")))

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the sample standard deviations."""
        return Values(self.n > 1, np.sqrt(self.squares / np.maximum(self.n - 1, 1)))
