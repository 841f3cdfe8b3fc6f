"""Minima and maxima of many groups of rows at once.

Results are doubles, or texts for columns of texts or times. So extremes of numbers are stored as
doubles: rounding preserves their order. Times are stored as integers, and texts are compared by
their rank among the distinct texts. The same two loops process all three.
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

from roost.model.arrays import as_arrow, as_numpy
from roost.window.accumulators import python_limits
from roost.window.grouped import (
    Contribution,
    Doubles,
    Grouped,
    Groups,
    Integers,
    Values,
    doubles,
    raw_values,
)
from roost.window.grouped_loops import add_extremes, find_extremes, frozen


@dataclass(frozen=True, slots=True)
class ExtremeValues(Grouped):
    """Minima and maxima of numbers or times.

    Parameters
    ----------
    n
        Number of values.
    least, greatest
        Defined for groups with values: doubles, or integers for times.
    kind
        Type of the values.
    """

    n: Integers
    least: NDArray[Any]
    greatest: NDArray[Any]
    kind: pa.DataType

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> ExtremeValues:
        """Find the extremes of each group."""
        values, kind = _ordered(column)
        least, greatest = np.zeros((2, groups.starts.size - 1), values.dtype)
        find_extremes(frozen(values), *groups.frozen, least, greatest)
        return cls(groups.sizes, least, greatest, kind)

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> ExtremeValues:
        """Merge partial results."""
        first = parts[0].grouped
        n = np.zeros(size, np.int64)
        least, greatest = np.zeros((2, size), first.least.dtype)
        for one, picks, slots in parts:
            assert one.kind == first.kind, "a column has one type"
            stored = (frozen(one.n), frozen(one.least), frozen(one.greatest))
            add_extremes(frozen(picks), frozen(slots), *stored, n, least, greatest)
        return cls(n, least, greatest, first.kind)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store."""
        both = {"least": self._typed(self.least), "greatest": self._typed(self.greatest)}
        return {"n": as_arrow(self.n), **both}

    def _typed(self, values: NDArray[Any]) -> pa.Array:
        narrow = np.int32 if pt.is_date32(self.kind) else values.dtype
        return as_arrow(values.astype(narrow, copy=False)).view(self.kind)

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> ExtremeValues:
        """Invert :meth:`columns`."""
        least, kind = _ordered(columns["least"])
        greatest, _ = _ordered(columns["greatest"])
        return cls(as_numpy(columns["n"]), least, greatest, kind)

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the minima or the maxima."""
        values = self.least if function == "min" else self.greatest
        if pt.is_floating(self.kind):
            return Values(self.n > 0, values)
        within = np.clip(values, *python_limits(self.kind))
        texts = [moment.isoformat() for moment in self._typed(within).to_pylist()]
        return Values(self.n > 0, None, texts)


def _ordered(column: pa.Array) -> tuple[NDArray[Any], pa.DataType]:
    """Return numbers in the order of a column's values, and the type to store."""
    kind = column.type
    if not pt.is_temporal(kind):
        return doubles(column), pa.float64()
    if pt.is_timestamp(kind) and kind.unit == "ns":
        # Python's datetime has microsecond resolution.
        kind = pa.timestamp("us", kind.tz)
        column = column.cast(kind, safe=False)
    if pt.is_date(kind):
        kind = pa.date32()
        return raw_values(column.cast(kind).view(pa.int32())).astype(np.int64), kind
    return raw_values(column.view(pa.int64())), kind


@dataclass(frozen=True, slots=True)
class TextExtremes(Grouped):
    """Minima and maxima of texts; null without values."""

    least: pa.Array
    greatest: pa.Array

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> TextExtremes:
        """Find the extremes of each group."""
        ranks, words = _ranked(column)
        one = ExtremeValues.of(as_arrow(ranks), groups)
        return cls(_named(one.least, one.n, words), _named(one.greatest, one.n, words))

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> TextExtremes:
        """Merge partial results."""
        present = []
        for one, picks, slots in parts:
            some = np.asarray(one.least.is_valid())[picks]
            present.append(Contribution(one, picks[some], slots[some]))
        ends = [
            end.take(as_arrow(part.picks))
            for part in present
            for end in (part.grouped.least, part.grouped.greatest)
        ]
        ranks, words = _ranked(pa.concat_arrays(ends))
        # The minima of a part precede its maxima; both are values of the same slots.
        slots = np.concatenate([part.slots for part in present for _ in range(2)])
        n = np.ones(slots.size, np.int64)
        values = ranks.astype(np.float64)
        whole = ExtremeValues(n, values, values, pa.float64())
        one = ExtremeValues.merged([Contribution(whole, np.arange(slots.size), slots)], size)
        return cls(_named(one.least, one.n, words), _named(one.greatest, one.n, words))

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store."""
        return {"least": self.least, "greatest": self.greatest}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> TextExtremes:
        """Invert :meth:`columns`."""
        return cls(columns["least"], columns["greatest"])

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the minima or the maxima."""
        values = self.least if function == "min" else self.greatest
        return Values(np.asarray(values.is_valid()), None, values.to_pylist())


def _ranked(column: pa.Array) -> tuple[Integers, pa.Array]:
    """Return the rank of each text (arbitrary for nulls), and the distinct texts in order."""
    encoded = column.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.zeros(len(order) + 1, np.int64)
    rank[np.asarray(order)] = np.arange(len(order))
    codes = raw_values(encoded.indices)
    valid = np.asarray(column.is_valid())
    return rank[np.where(valid, codes, len(order))], encoded.dictionary.take(order)


def _named(ranks: Doubles, n: Integers, words: pa.Array) -> pa.Array:
    """Return the texts of some ranks, null for groups without values."""
    with_null = pa.concat_arrays([words, pa.nulls(1, words.type)])
    return with_null.take(as_arrow(np.where(n > 0, ranks, len(words)).astype(np.int64)))
