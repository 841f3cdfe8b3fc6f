"""Least and greatest values of many groups of rows at once.

Answers are doubles, or texts where a column has texts or times. So extremes of numbers are kept
as doubles: rounding keeps their order. Times are kept as the integers they are, and texts are
compared by their rank among the different texts at hand. One pair of loops serves all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.kernel.arrays import as_arrow, as_numpy
from roost.window.accumulators import python_limits
from roost.window.grouped import Doubles, Groups, Part, Values, Whole, doubles, plain
from roost.window.grouped_loops import add_extremes, find_extremes, frozen


@dataclass(frozen=True, slots=True)
class Extremes:
    """Least and greatest numbers, or times as integers of a type.

    Parameters
    ----------
    n
        How many values.
    least, greatest
        Meaningful where there are values: doubles, or for times integers.
    kind
        Type of the values.
    """

    n: Whole
    least: NDArray[Any]
    greatest: NDArray[Any]
    kind: pa.DataType

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> Extremes:
        """Look through a column."""
        values, kind = _ordered(column)
        least, greatest = np.zeros((2, groups.starts.size - 1), values.dtype)
        find_extremes(frozen(values), *groups.frozen, least, greatest)
        return cls(groups.sizes, least, greatest, kind)

    @classmethod
    def merged(cls, parts: Sequence[Part], size: int) -> Extremes:
        """Merge."""
        first = parts[0].grouped
        n = np.zeros(size, np.int64)
        least, greatest = np.zeros((2, size), first.least.dtype)
        for one, picks, slots in parts:
            assert one.kind == first.kind, "a column has one type"
            stored = (frozen(one.n), frozen(one.least), frozen(one.greatest))
            add_extremes(frozen(picks), frozen(slots), *stored, n, least, greatest)
        return cls(n, least, greatest, first.kind)

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored."""
        both = {"least": self._typed(self.least), "greatest": self._typed(self.greatest)}
        return {"n": as_arrow(self.n), **both}

    def _typed(self, values: NDArray[Any]) -> pa.Array:
        narrow = np.int32 if pt.is_date32(self.kind) else values.dtype
        return as_arrow(values.astype(narrow, copy=False)).view(self.kind)

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored."""
        return {}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Extremes:
        """Take back what was stored."""
        least, kind = _ordered(columns["least"])
        greatest, _ = _ordered(columns["greatest"])
        return cls(as_numpy(columns["n"]), least, greatest, kind)

    def answers(self, function: str, parameter: float | None) -> Values:
        """Return the least or the greatest values."""
        values = self.least if function == "min" else self.greatest
        if pt.is_floating(self.kind):
            return Values(self.n > 0, values)
        within = np.clip(values, *python_limits(self.kind))
        texts = [moment.isoformat() for moment in self._typed(within).to_pylist()]
        return Values(self.n > 0, None, texts)


def _ordered(column: pa.Array) -> tuple[NDArray[Any], pa.DataType]:
    """Numbers that are ordered as a column's values are, and the type that is kept."""
    kind = column.type
    if not pt.is_temporal(kind):
        return doubles(column), pa.float64()
    if pt.is_timestamp(kind) and kind.unit == "ns":
        # Python's own times end at microseconds.
        kind = pa.timestamp("us", kind.tz)
        column = column.cast(kind, safe=False)
    if pt.is_date(kind):
        kind = pa.date32()
        return plain(column.cast(kind).view(pa.int32())).astype(np.int64), kind
    return plain(column.view(pa.int64())), kind


@dataclass(frozen=True, slots=True)
class TextExtremes:
    """Least and greatest texts; null where there are no values."""

    least: pa.Array
    greatest: pa.Array

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> TextExtremes:
        """Look through a column."""
        ranks, words = _ranked(column)
        one = Extremes.of(as_arrow(ranks), groups)
        return cls(_named(one.least, one.n, words), _named(one.greatest, one.n, words))

    @classmethod
    def merged(cls, parts: Sequence[Part], size: int) -> TextExtremes:
        """Merge."""
        present = []
        for one, picks, slots in parts:
            some = np.asarray(one.least.is_valid())[picks]
            present.append(Part(one, picks[some], slots[some]))
        ends = [
            end.take(as_arrow(part.picks))
            for part in present
            for end in (part.grouped.least, part.grouped.greatest)
        ]
        ranks, words = _ranked(pa.concat_arrays(ends))
        # Both ends of a part come one after the other, each a value of the same owner.
        slots = np.concatenate([part.slots for part in present for _ in range(2)])
        n = np.ones(slots.size, np.int64)
        whole = Extremes(n, ranks.astype(np.float64), ranks.astype(np.float64), pa.float64())
        one = Extremes.merged([Part(whole, np.arange(slots.size), slots)], size)
        return cls(_named(one.least, one.n, words), _named(one.greatest, one.n, words))

    def columns(self) -> dict[str, pa.Array]:
        """Columns to be stored."""
        return {"least": self.least, "greatest": self.greatest}

    def facts(self) -> dict[str, Any]:
        """Plain data to be stored."""
        return {}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> TextExtremes:
        """Take back what was stored."""
        return cls(columns["least"], columns["greatest"])

    def answers(self, function: str, parameter: float | None) -> Values:
        """Return the least or the greatest values."""
        values = self.least if function == "min" else self.greatest
        return Values(np.asarray(values.is_valid()), None, values.to_pylist())


def _ranked(column: pa.Array) -> tuple[Whole, pa.Array]:
    """Rank of each text among the different ones, and those in order; nulls have any rank."""
    encoded = column.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.zeros(len(order) + 1, np.int64)
    rank[np.asarray(order)] = np.arange(len(order))
    codes = plain(encoded.indices)
    valid = np.asarray(column.is_valid())
    return rank[np.where(valid, codes, len(order))], encoded.dictionary.take(order)


def _named(ranks: Doubles, n: Whole, words: pa.Array) -> pa.Array:
    """Return the words of some ranks, null where there were none."""
    with_null = pa.concat_arrays([words, pa.nulls(1, words.type)])
    return with_null.take(as_arrow(np.where(n > 0, ranks, len(words)).astype(np.int64)))
