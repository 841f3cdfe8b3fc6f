"""Partial results of aggregates for many groups of rows at once.

:mod:`roost.window.accumulators` keeps one partial result as an object, which is right for one
question. Ten thousand standing queries would be ten thousand objects a batch. Here a whole set
of them is a few arrays: made by one loop over the rows, stored as columns, merged by adding
arrays. What comes out is the same: sums exact and rounded once, NaN the greatest number, nulls
skipped. This module has counts, sums and spreads; :mod:`roost.window.grouped_extremes` has
extremes and :mod:`roost.window.grouped_sketches` the sketches, which are made one at a time.

Answers are doubles, or texts where a column has texts or times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.kernel.arrays import as_arrow, as_numpy
from roost.window.grouped_loops import (
    LIMB,
    LIMBS_MORE,
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

Whole = NDArray[np.int64]
Doubles = NDArray[np.float64]
BASE_MAX = SCALE // LIMB  # limbs from here on are whole numbers


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group: group ``g`` has ``rows[starts[g]:starts[g + 1]]``."""

    starts: Whole
    rows: NDArray[np.int32]

    @property
    def sizes(self) -> Whole:
        """Rows of each group."""
        return np.diff(self.starts)

    def where(self, keep: NDArray[np.bool_]) -> Groups:
        """Leave out some of the rows; the groups stay."""
        kept = np.concatenate([[0], np.cumsum(keep)])
        return Groups(kept[self.starts], self.rows[keep])

    def take(self, groups: Whole) -> Groups:
        """Keep some of the groups, given in ascending order."""
        if groups.size == self.starts.size - 1:
            return self
        sizes = self.sizes[groups]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(starts[-1]) + np.repeat(self.starts[groups] - starts[:-1], sizes)
        return Groups(starts, self.rows[places])

    def without_nulls(self, column: pa.Array) -> Groups:
        """Leave out rows where a column has no value."""
        if not column.null_count:
            return self
        return self.where(np.asarray(column.is_valid())[self.rows])

    @property
    def frozen(self) -> tuple[Whole, NDArray[np.int32]]:
        """The arrays as loops take them."""
        return frozen(self.starts), frozen(self.rows)


class Values(NamedTuple):
    """Answers: numbers or texts, and whether there is one at all."""

    known: NDArray[np.bool_]
    numbers: Doubles | None
    texts: list[str] | None = None


class Part(NamedTuple):
    """A set of partial results, which of them are meant, and to whom each belongs."""

    grouped: Any
    picks: Whole
    slots: Whole


class Grouped(Protocol):
    """What all sets of partial results can do."""

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Self:
        """Make one result for each group; no row of a group is null."""
        ...

    @classmethod
    def merged(cls, parts: Sequence[Part], size: int) -> Self:
        """Merge results that belong to the same of ``size`` owners."""
        ...

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored, one row for each result."""
        ...

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored with the columns."""
        ...

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Self:
        """Inverse of :meth:`columns` and :meth:`facts`."""
        ...

    def answers(self, function: str, parameter: float | None) -> Values:
        """Tell what the results say."""
        ...


def plain(column: pa.Array) -> NDArray[Any]:
    """Values of a column of fixed width, whatever is there for nulls."""
    if column.null_count:
        buffers = [None, column.buffers()[1]]
        column = pa.Array.from_buffers(column.type, len(column), buffers, offset=column.offset)
    return as_numpy(column)


def doubles(column: pa.Array) -> Doubles:
    """Values of a column of numbers or booleans as doubles."""
    if pt.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif not pt.is_integer(column.type) and column.type != pa.float64():
        column = column.cast(pa.float64())
    return plain(column).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many values there are."""

    n: Whole

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Counts:
        """Count."""
        return cls(groups.sizes)

    @classmethod
    def merged(cls, parts: Sequence[Part], size: int) -> Counts:
        """Merge."""
        n = np.zeros(size, np.int64)
        for grouped, picks, slots in parts:
            add_counts(frozen(picks), frozen(slots), frozen(grouped.n), n)
        return cls(n)

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored."""
        return {"n": as_arrow(self.n)}

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored."""
        return {}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Counts:
        """Take back what was stored."""
        return cls(as_numpy(columns["n"]))

    def answers(self, function: str, parameter: float | None) -> Values:
        """Return the counts."""
        return Values(np.ones(self.n.size, bool), self.n.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Totals:
    """Exact sums.

    Parameters
    ----------
    n
        How many values.
    others
        Sum of those that are not finite.
    limbs
        Sum of the finite ones as a whole number, the least 32 bits first.
    base
        How many limbs lie below the first.
    whole
        Whether the values are integers; of doubles, the sum is that of multiples of ``2**-SCALE``.
    """

    n: Whole
    others: Doubles
    limbs: Whole
    base: int
    whole: bool

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Totals:
        """Sum."""
        size = groups.starts.size - 1
        others = np.zeros(size)
        if pt.is_integer(column.type):
            values = plain(column)
            low, high = _halves(values)
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
    def merged(cls, parts: Sequence[Part], size: int) -> Totals:
        """Merge."""
        sets = [part.grouped for part in parts]
        whole = sets[0].whole
        assert all(one.whole == whole for one in sets), "a column is of integers or it is not"
        base = min(one.base for one in sets)
        width = max(one.base + one.limbs.shape[1] for one in sets) - base
        n, others = np.zeros(size, np.int64), np.zeros(size)
        limbs = np.zeros((size, width), np.int64)
        for one, picks, slots in parts:
            stored = (frozen(one.n), frozen(one.others), frozen(one.limbs), one.base - base)
            add_totals(frozen(picks), frozen(slots), *stored, n, others, limbs)
        carry(limbs)
        return cls(n, others, limbs, base, whole)

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored."""
        flat = as_arrow(self.limbs.reshape(-1))
        limbs = pa.FixedSizeListArray.from_arrays(flat, self.limbs.shape[1])
        return {"n": as_arrow(self.n), "others": as_arrow(self.others), "limbs": limbs}

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored."""
        return {"base": self.base, "whole": self.whole}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Totals:
        """Take back what was stored."""
        n, others = as_numpy(columns["n"]), as_numpy(columns["others"])
        limbs = as_numpy(columns["limbs"].flatten()).reshape(n.size, -1)
        return cls(n, others, limbs, facts["base"], facts["whole"])

    def answers(self, function: str, parameter: float | None) -> Values:
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
        # The last limb has the sign and may be wide: it becomes two.
        words = np.empty((self.n.size, width + 1), np.uint32)
        words[:, : width - 1] = self.limbs[:, :-1]
        words[:, width - 1] = self.limbs[:, -1] & ((1 << LIMB) - 1)
        words[:, width] = (self.limbs[:, -1] >> LIMB) & ((1 << LIMB) - 1)
        data, step = words.tobytes(), words.itemsize * (width + 1)
        for begin in range(0, len(data), step):
            yield int.from_bytes(data[begin : begin + step], "little", signed=True)


def _halves(values: NDArray[Any]) -> tuple[Whole, Whole]:
    """Low 32 bits and the rest of integers of any width."""
    if values.dtype != np.uint64:
        values = values.astype(np.int64, copy=False)
    low = values & values.dtype.type((1 << LIMB) - 1)
    high = values >> values.dtype.type(LIMB)
    return low.astype(np.int64, copy=False), high.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class Spreads:
    """Numbers, means, and sums of squared distances from the mean."""

    n: Whole
    means: Doubles
    squares: Doubles

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Spreads:
        """Look through a column twice."""
        means, squares = np.zeros((2, groups.starts.size - 1))
        find_spreads(frozen(doubles(column)), *groups.frozen, means, squares)
        return cls(groups.sizes, means, squares)

    @classmethod
    def merged(cls, parts: Sequence[Part], size: int) -> Spreads:
        """Merge."""
        n, (means, squares) = np.zeros(size, np.int64), np.zeros((2, size))
        for one, picks, slots in parts:
            stored = (frozen(one.n), frozen(one.means), frozen(one.squares))
            add_spreads(frozen(picks), frozen(slots), *stored, n, means, squares)
        return cls(n, means, squares)

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored."""
        both = {"means": as_arrow(self.means), "squares": as_arrow(self.squares)}
        return {"n": as_arrow(self.n), **both}

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored."""
        return {}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Spreads:
        """Take back what was stored."""
        return cls(*(as_numpy(columns[name]) for name in ("n", "means", "squares")))

    def answers(self, function: str, parameter: float | None) -> Values:
        """Return the standard deviations of samples."""
        return Values(self.n > 1, np.sqrt(self.squares / np.maximum(self.n - 1, 1)))
