"""Accumulators: partial results of aggregates, which are merged and read at the end.

Each is a small immutable value that can be serialised as JSON. Results do not depend on the order
of merging: counts, sums and extremes exactly, spreads up to rounding, sketches within their error.
Columns have no nulls here; aggregates skip them as SQL does. NaN is greater than all other
numbers, as in Spark.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasketches import hll_sketch, hll_union, kll_doubles_sketch
from numpy.typing import NDArray

from roost.model.arrays import as_numpy
from roost.window.sums import SCALE, quotient, scaled_sum, whole_sum

HLL_LG_K = 12  # 4096 registers: a standard error of 1.6 %
KLL_K = 400  # a rank error of 0.7 %


class Accumulator(Protocol):
    """Interface of all accumulators."""

    @classmethod
    def of(cls, column: pa.Array) -> Self:
        """Accumulate a column without nulls."""
        ...

    def plus(self, other: Self) -> Self:
        """Merge two accumulators."""
        ...

    def to_json(self) -> Any:
        """Return JSON data."""
        ...

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Invert :meth:`to_json`."""
        ...


def numbers(column: pa.Array) -> NDArray[Any]:
    """Return a numeric column as numpy: integers unchanged, other types as doubles."""
    if pa.types.is_integer(column.type):
        return as_numpy(column)
    return as_numpy(column if column.type == pa.float64() else column.cast(pa.float64()))


@dataclass(frozen=True, slots=True)
class Count:
    """Number of values."""

    n: int

    @classmethod
    def of(cls, column: pa.Array) -> Count:
        """Count a column."""
        return cls(len(column))

    def plus(self, other: Count) -> Count:
        """Merge two accumulators."""
        return Count(self.n + other.n)

    def to_json(self) -> int:
        """Return JSON data."""
        return self.n

    @classmethod
    def from_json(cls, data: int) -> Count:
        """Invert :meth:`to_json`."""
        return cls(data)


@dataclass(frozen=True, slots=True)
class Total:
    """An exact sum.

    Parameters
    ----------
    n
        Number of values.
    scaled
        Sum of the finite values, times ``2**scale``.
    scale
        0 for integers.
    others
        Sum of the values that are not finite: 0, an infinity or NaN.
    """

    n: int
    scaled: int
    scale: int
    others: float

    @classmethod
    def of(cls, column: pa.Array) -> Total:
        """Sum a column."""
        values = numbers(column)
        if values.dtype.kind in "iu":
            return cls(values.size, whole_sum(values), 0, 0.0)
        finite = np.isfinite(values)
        if finite.all():
            return cls(values.size, scaled_sum(values), SCALE, 0.0)
        with np.errstate(invalid="ignore"):
            others = float(values[~finite].sum())
        return cls(values.size, scaled_sum(values[finite]), SCALE, others)

    def plus(self, other: Total) -> Total:
        """Merge two accumulators."""
        scale = max(self.scale, other.scale)
        scaled = (self.scaled << (scale - self.scale)) + (other.scaled << (scale - other.scale))
        return Total(self.n + other.n, scaled, scale, self.others + other.others)

    def sum(self) -> int | float | None:
        """Return the sum: an integer for integers, None without values."""
        if not self.n:
            return None
        if self.scale == 0:
            return self.scaled
        return self.others or quotient(self.scaled, self.scale)

    def mean(self) -> float | None:
        """Return the mean, None without values."""
        if not self.n:
            return None
        return self.others or quotient(self.scaled, self.scale, self.n)

    def to_json(self) -> Any:
        """Return JSON data."""
        return [self.n, hex(self.scaled), self.scale, self.others.hex()]

    @classmethod
    def from_json(cls, data: Any) -> Total:
        """Invert :meth:`to_json`."""
        n, scaled, scale, others = data
        return cls(n, int(scaled, 16), scale, float.fromhex(others))


@dataclass(frozen=True, slots=True)
class Extremes:
    """Minimum and maximum, None without values."""

    least: Any
    greatest: Any

    @classmethod
    def of(cls, column: pa.Array) -> Extremes:
        """Accumulate a column."""
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            # Python's datetime has microsecond resolution.
            column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
        if not len(column):
            return cls(None, None)
        if pa.types.is_floating(column.type):
            values = numbers(column)
            return cls(float(np.fmin.reduce(values)), float(values.max()))
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            integer = pa.int32() if pa.types.is_date32(column.type) else pa.int64()
            limits = python_limits(column.type)
            within = np.clip(as_numpy(column.cast(integer)), *limits)
            column = pa.array(within, integer).cast(column.type)
        both = pc.min_max(column)
        return cls(both["min"].as_py(), both["max"].as_py())

    def plus(self, other: Extremes) -> Extremes:
        """Merge two accumulators."""
        if self.least is None:
            return other
        if other.least is None:
            return self
        return Extremes(
            min(self.least, other.least, key=_sort_key),
            max(self.greatest, other.greatest, key=_sort_key),
        )

    def to_json(self) -> Any:
        """Return JSON data."""
        return [_encode(self.least), _encode(self.greatest)]

    @classmethod
    def from_json(cls, data: Any) -> Extremes:
        """Invert :meth:`to_json`."""
        return cls(*map(_decode, data))


def python_limits(kind: pa.DataType) -> tuple[int, int]:
    """Return the range of times that Python can represent, as integers of an Arrow time type.

    Arrow's range is far wider, and a source may use an extreme value that means "never".

    Examples
    --------
    >>> python_limits(pa.date32())
    (-719161, 2932895)
    """
    first, last = -719_161, 2_932_895  # days from 1970 to 0001-01-02 and 9999-12-30
    if pa.types.is_date32(kind):
        return first, last
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    day = 86_400 * {"s": 1, "ms": 1_000, "us": 1_000_000}[unit]
    return first * day, last * day


def _sort_key(value: Any) -> Any:
    """Sort NaN after every other value."""
    return isinstance(value, float) and math.isnan(value), value


def _encode(value: Any) -> Any:
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, dt.datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, dt.date):
        return {"date": value.isoformat()}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    return value


_READERS = {
    "float": float.fromhex,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "decimal": decimal.Decimal,
}


def _decode(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, text),) = data.items()
    return _READERS[kind](text)


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, mean, and sum of squared deviations from the mean."""

    n: int
    mean: float
    squares: float

    @classmethod
    def of(cls, column: pa.Array) -> Spread:
        """Accumulate a column in two passes."""
        values = numbers(column).astype(np.float64, copy=False)
        if not values.size:
            return cls(0, 0.0, 0.0)
        with np.errstate(all="ignore"):
            mean = float(values.mean())
            apart = values - mean
            return cls(values.size, mean, float(np.square(apart).sum()))

    def plus(self, other: Spread) -> Spread:
        """Merge (Chan, Golub and LeVeque)."""
        if not self.n or not other.n:
            return self if self.n else other
        n = self.n + other.n
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.n / n)
        squares = self.squares + other.squares + apart * apart * (self.n / n) * other.n
        return Spread(n, mean, squares)

    def deviation(self) -> float | None:
        """Return the sample standard deviation, None for fewer than two values."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else None

    def to_json(self) -> Any:
        """Return JSON data."""
        return [self.n, self.mean.hex(), self.squares.hex()]

    @classmethod
    def from_json(cls, data: Any) -> Spread:
        """Invert :meth:`to_json`."""
        n, mean, squares = data
        return cls(n, float.fromhex(mean), float.fromhex(squares))


@dataclass(frozen=True, slots=True)
class _Sketch:
    """A serialised sketch."""

    data: bytes

    def to_json(self) -> str:
        """Return JSON data."""
        return base64.b64encode(self.data).decode()

    @classmethod
    def from_json(cls, data: str) -> Self:
        """Invert :meth:`to_json`."""
        return cls(base64.b64decode(data))


class Distinct(_Sketch):
    """Number of distinct values, by a HyperLogLog sketch."""

    @classmethod
    def of(cls, column: pa.Array) -> Distinct:
        """Sketch a column."""
        sketch = hll_sketch(HLL_LG_K)
        for value in _hashable(column):
            sketch.update(value)
        return cls(sketch.serialize_compact())

    def plus(self, other: Distinct) -> Distinct:
        """Merge two accumulators."""
        union = hll_union(HLL_LG_K)
        union.update(hll_sketch.deserialize(self.data))
        union.update(hll_sketch.deserialize(other.data))
        return Distinct(union.get_result().serialize_compact())

    def estimate(self) -> int:
        """Return the estimated number of distinct values."""
        return round(float(hll_sketch.deserialize(self.data).get_estimate()))


def _hashable(column: pa.Array) -> list[Any]:
    """Return the distinct values as integers, doubles or texts that are equal if the values are."""
    different = column.unique()
    if pa.types.is_floating(column.type):
        values = numbers(different) + 0.0  # turns -0.0 into 0.0
        values[np.isnan(values)] = np.nan
        return list(np.unique(values).tolist())
    if pa.types.is_integer(column.type):
        return list(as_numpy(different).astype(np.int64).tolist())
    if pa.types.is_boolean(column.type):
        return [int(value) for value in different.to_pylist()]
    if pa.types.is_temporal(column.type):
        whole = pa.int32() if pa.types.is_date32(column.type) else pa.int64()
        return list(different.cast(whole).to_pylist())
    # The sketch ignores an empty text.
    return [f"={text}" for text in different.cast(pa.string()).to_pylist()]


class Ranks(_Sketch):
    """Quantiles, by a KLL sketch."""

    @classmethod
    def of(cls, column: pa.Array) -> Ranks:
        """Sketch a column; NaN has no rank."""
        values = numbers(column).astype(np.float64, copy=False)
        sketch = kll_doubles_sketch(KLL_K)
        sketch.update(np.ascontiguousarray(values[~np.isnan(values)]))
        return cls(sketch.serialize())

    def plus(self, other: Ranks) -> Ranks:
        """Merge two accumulators."""
        sketch = kll_doubles_sketch.deserialize(self.data)
        sketch.merge(kll_doubles_sketch.deserialize(other.data))
        return Ranks(sketch.serialize())

    def quantile(self, rank: float) -> float | None:
        """Return the estimated value of a rank from 0 to 1, None without values."""
        sketch = kll_doubles_sketch.deserialize(self.data)
        return None if sketch.is_empty() else float(sketch.get_quantile(rank, True))
