"""Exact comparison of literals with the values of a column.

Comparing an int64 column with the float ``9007199254740992.0`` through float64 gives wrong
results, and so does comparing a float column with a long integer. But the possible values of a
column form an ordered axis, and every comparison with a real number is membership of a closed
interval of that axis: ``x > 2.5`` on integers is ``x`` in [3, highest]. The intervals are computed
once, with Python's exact numbers, when predicates are compiled; rows are then compared in the
type of the column.

A literal with a decimal point or an exponent is the nearest float64 when it is compared with
integers and floats. When it is compared with decimals, it is the shortest decimal representation
of that float64, so that ``price = 1.10`` finds 1.10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from roost.predicate.kinds import read_time_ns

Array = npt.NDArray[Any]

#: Exceeds every decimal of Arrow (76 digits).
_WIDE_LIMIT = 10**80
#: A decimal with this many digits has an unscaled value that fits in 64 bits.
NARROW_DIGITS = 18
_NS_PER_UNIT = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_NS_PER_DAY = 86_400 * 10**9


class Axis:
    """The ordered values that a column can hold: integers that count a unit, or float64 numbers.

    The stored values are int64, uint64, object for Python integers, or float64, which includes
    infinities; NaN is in no interval. ``floor`` returns the greatest point not above a literal, and
    whether it equals the literal.
    """

    def __init__(self, dtype: npt.DTypeLike, floor: Callable[[Any], tuple[Any, bool]]) -> None:
        self.dtype = np.dtype(dtype)
        self.floor = floor
        self._step: Callable[[Any, int], Any] = int.__add__
        self.lowest: Any = -_WIDE_LIMIT
        self.highest: Any = _WIDE_LIMIT
        if self.dtype.kind == "f":
            self._step = _next_float
            self.lowest, self.highest = -math.inf, math.inf
        elif self.dtype != object:
            limits = np.iinfo(self.dtype)
            self.lowest, self.highest = int(limits.min), int(limits.max)

    def interval(self, operator: str, value: Any) -> tuple[Any, Any]:
        """Return the closed interval of the points that satisfy a comparison with a literal.

        Both ends are within the axis; the lower exceeds the upper if no point qualifies. The
        operator is ``=``, ``<``, ``<=``, ``>`` or ``>=``.
        """
        floor, exact = self.floor(value)
        ceiling = floor if exact else self._step(floor, 1)
        low, high = self.lowest, self.highest
        if operator == "=":
            low, high = ceiling, floor
        elif operator == "<":
            high = self._step(ceiling, -1)
        elif operator == "<=":
            high = floor
        elif operator == ">":
            low = self._step(floor, 1)
        else:
            low = ceiling
        if low > high or low > self.highest or high < self.lowest:
            return self.highest, self.lowest
        return max(low, self.lowest), min(high, self.highest)

    def points(self, values: Sequence[Any]) -> list[Any]:
        """Return the points that equal a literal; a literal between two points has none."""
        intervals = [self.interval("=", value) for value in values]
        return [low for low, high in intervals if low == high]


def axis_of(type_: pa.DataType) -> Axis:
    """Return the axis of a column of numbers, times or booleans."""
    if pa.types.is_dictionary(type_):
        return axis_of(type_.value_type)
    if pa.types.is_floating(type_):
        return Axis(np.float64, _floor_float)
    if pa.types.is_decimal(type_):
        dtype = np.int64 if type_.precision <= NARROW_DIGITS else object
        return Axis(dtype, partial(_floor_decimal, type_.scale))
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return Axis(np.int64, partial(_floor_time, _time_unit_ns(type_)))
    return Axis(np.uint64 if pa.types.is_uint64(type_) else np.int64, _floor_integer)


def unit_of(type_: pa.DataType) -> Fraction:
    """Return the unit that stored values count: seconds of a time, the last digit of a decimal."""
    if pa.types.is_dictionary(type_):
        return unit_of(type_.value_type)
    if pa.types.is_decimal(type_):
        return Fraction(10 ** max(-type_.scale, 0), 10 ** max(type_.scale, 0))
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return Fraction(_time_unit_ns(type_), 10**9)
    return Fraction(1)


def _time_unit_ns(type_: pa.DataType) -> int:
    if pa.types.is_timestamp(type_):
        return _NS_PER_UNIT[type_.unit]
    return _NS_PER_DAY if pa.types.is_date32(type_) else _NS_PER_UNIT["ms"]


def rank_axis(constants: Sequence[bytes]) -> Axis:
    """Return the axis of strings by rank: sorted constant ``k`` is ``2k + 1``, gaps are even."""
    ranks = {constant: 2 * rank + 1 for rank, constant in enumerate(constants)}
    return Axis(np.int64, lambda value: (ranks[value.encode()], True))


def _next_float(point: float, direction: int) -> float:
    return math.nextafter(point, direction * math.inf)


def _floor_float(value: Any) -> tuple[float, bool]:
    nearest = float(value)
    # Python compares an int with a float exactly.
    return (nearest, nearest == value) if nearest <= value else (_next_float(nearest, -1), False)


def _floor_integer(value: Any) -> tuple[int, bool]:
    whole = math.floor(value)
    return whole, whole == value


def _floor_time(unit_ns: int, value: Any) -> tuple[int, bool]:
    """Return the whole units since 1970 UTC of an ISO time."""
    whole, rest = divmod(read_time_ns(value), unit_ns)
    return whole, rest == 0


def _floor_decimal(scale: int, value: Any) -> tuple[int, bool]:
    """Return the unscaled integer of a decimal."""
    exact = Decimal(repr(value)) if isinstance(value, float) else value
    numerator, denominator = exact.as_integer_ratio()
    whole, rest = divmod(numerator * 10 ** max(scale, 0), denominator * 10 ** max(-scale, 0))
    return whole, rest == 0
