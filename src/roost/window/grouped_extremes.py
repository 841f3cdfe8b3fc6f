"""Minima and maxima of groups of rows.

Standing queries report doubles, or texts for columns of texts or times. So extremes of numbers are
stored as doubles: rounding preserves their order. Times are stored as integers, and texts are
compared by their rank among the distinct texts. The same two loops process all three. Snapshot
queries report values of the column's type, so their single group has a class of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, as_arrow, as_numpy, frozen
from roost.window.grouped import (
    Contribution,
    Grouped,
    Groups,
    Values,
    doubles,
    raw_values,
)
from roost.window.grouped_loops import add_extremes, find_extremes

DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class ExtremeValues(Grouped):
    """Minima and maxima of numbers (doubles) or times (integers), valid where ``n`` is not 0."""

    n: Ints
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
        """Merge extremes."""
        first = parts[0].grouped
        n = np.zeros(size, np.int64)
        least, greatest = np.zeros((2, size), first.least.dtype)
        for one, picks, slots in parts:
            assert one.kind == first.kind, "a column has one type"
            stored = (frozen(one.n), frozen(one.least), frozen(one.greatest))
            add_extremes(frozen(picks), frozen(slots), *stored, n, least, greatest)
        return cls(n, least, greatest, first.kind)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns to store; extremes have the type of the values."""
        both = {
            "least": _typed(self.least, self.kind),
            "greatest": _typed(self.greatest, self.kind),
        }
        return {"n": as_arrow(self.n), **both}

    def facts(self) -> dict[str, Any]:
        """Return no data: the columns have the type."""
        return {}

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
        texts = [moment.isoformat() for moment in _typed(within, self.kind).to_pylist()]
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
    if pt.is_date32(kind):
        return raw_values(column.view(pa.int32())).astype(np.int64), kind
    numbers = raw_values(column.view(pa.int64()))
    if pt.is_date64(kind):
        return np.clip(numbers // DAY_MS, -(1 << 31), (1 << 31) - 1), pa.date32()
    return numbers, kind


def _typed(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    narrow = np.int32 if pt.is_date32(kind) else values.dtype
    return as_arrow(values.astype(narrow, copy=False)).view(kind)


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
        """Merge extremes."""
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

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the minima or the maxima."""
        values = self.least if function == "min" else self.greatest
        return Values(np.asarray(values.is_valid()), None, values.to_pylist())


def _ranked(column: pa.Array) -> tuple[Ints, pa.Array]:
    """Return the rank of each text (arbitrary for nulls), and the distinct texts in order."""
    encoded = column.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.zeros(len(order) + 1, np.int64)
    rank[np.asarray(order)] = np.arange(len(order))
    codes = raw_values(encoded.indices)
    valid = np.asarray(column.is_valid())
    return rank[np.where(valid, codes, len(order))], encoded.dictionary.take(order)


def _named(ranks: Floats, n: Ints, words: pa.Array) -> pa.Array:
    """Return the texts of some ranks, null for groups without values."""
    with_null = pa.concat_arrays([words, pa.nulls(1, words.type)])
    return with_null.take(as_arrow(np.where(n > 0, ranks, len(words)).astype(np.int64)))


@dataclass(frozen=True, slots=True)
class ExactExtremes(Grouped):
    """Minimum and maximum of one group as Python values, None without values."""

    least: Any
    greatest: Any

    @classmethod
    def of(cls, column: pa.Array, groups: Groups) -> ExactExtremes:
        """Find the extremes of the group."""
        if not groups.rows.size:
            return cls(None, None)
        if not groups.whole:
            column = column.take(as_arrow(groups.rows))
        if pt.is_floating(column.type):
            values = doubles(column)
            return cls(float(np.fmin.reduce(values)), float(values.max()))
        if pt.is_timestamp(column.type) or pt.is_date(column.type):
            values, kind = _ordered(column)
            ends = np.clip([values.min(), values.max()], *python_limits(kind))
            return cls(*_typed(ends, kind).to_pylist())
        both = pc.min_max(column)
        return cls(both["min"].as_py(), both["max"].as_py())

    @classmethod
    def merged(cls, parts: Sequence[Contribution], size: int) -> ExactExtremes:
        """Merge extremes."""
        some = [part.grouped for part in parts if part.grouped.least is not None]
        return cls(
            min((one.least for one in some), key=_nan_last, default=None),
            max((one.greatest for one in some), key=_nan_last, default=None),
        )

    def single(self, function: str, parameter: float | None) -> Any:
        """Return the minimum or the maximum."""
        return self.least if function == "min" else self.greatest

    def results(self, function: str, parameter: float | None) -> Values:
        """Fail: standing queries use the other classes."""
        raise NotImplementedError


def _nan_last(value: Any) -> Any:
    return isinstance(value, float) and math.isnan(value), value


def python_limits(kind: pa.DataType) -> tuple[int, int]:
    """Return the range of times that Python can represent, as integers of an Arrow time type.

    Arrow's range is far wider, and a source may use an extreme value that means "never".
    """
    first, last = -719_161, 2_932_895  # days from 1970 to 0001-01-02 and 9999-12-30
    if pt.is_date32(kind):
        return first, last
    day = 86_400 * {"s": 1, "ms": 1_000, "us": 1_000_000}[kind.unit]
    return first * day, last * day
