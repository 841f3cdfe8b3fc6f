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
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Protocol

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


class Axis(Protocol):
    """The ordered values that a column can hold."""

    dtype: np.dtype[Any]
    lowest: Any
    highest: Any

    def floor(self, value: Any) -> tuple[Any, bool]:
        """Return the greatest point not above a literal, and whether it equals the literal."""

    def after(self, point: Any) -> Any:
        """Return the next point."""

    def before(self, point: Any) -> Any:
        """Return the previous point."""


class IntegerAxis:
    """Integers that count a unit: integers, booleans, times and decimals.

    Parameters
    ----------
    dtype
        Type of the stored values: int64, uint64, or object for Python integers.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        limits = None if self.dtype == object else np.iinfo(self.dtype)
        self.lowest = -_WIDE_LIMIT if limits is None else int(limits.min)
        self.highest = _WIDE_LIMIT if limits is None else int(limits.max)

    def floor(self, value: Any) -> tuple[int, bool]:
        """Return the greatest integer not above a number, and whether they are equal."""
        whole = math.floor(value)
        return whole, whole == value

    def after(self, point: int) -> int:
        """Return the next integer."""
        return point + 1

    def before(self, point: int) -> int:
        """Return the previous integer."""
        return point - 1


class TimeAxis(IntegerAxis):
    """Times since 1970 UTC, counted in a unit given in nanoseconds."""

    def __init__(self, unit_ns: int) -> None:
        super().__init__(np.int64)
        self._unit_ns = unit_ns

    def floor(self, value: Any) -> tuple[int, bool]:
        """Return the whole units of an ISO time, and whether they are exact."""
        whole, rest = divmod(read_time_ns(value), self._unit_ns)
        return whole, rest == 0


class DecimalAxis(IntegerAxis):
    """Decimals, counted by their unscaled integers."""

    def __init__(self, precision: int, scale: int) -> None:
        super().__init__(np.int64 if precision <= NARROW_DIGITS else object)
        self._up = 10 ** max(scale, 0)
        self._down = 10 ** max(-scale, 0)

    def floor(self, value: Any) -> tuple[int, bool]:
        """Return the unscaled integer of a number, and whether it is exact."""
        exact = Decimal(repr(value)) if isinstance(value, float) else value
        numerator, denominator = exact.as_integer_ratio()
        whole, rest = divmod(numerator * self._up, denominator * self._down)
        return whole, rest == 0


class FloatAxis:
    """The float64 numbers, infinities included; NaN is in no interval."""

    def __init__(self) -> None:
        self.dtype = np.dtype(np.float64)
        self.lowest = -math.inf
        self.highest = math.inf

    def floor(self, value: Any) -> tuple[float, bool]:
        """Return the greatest float not above a number, and whether they are equal."""
        nearest = float(value)
        # Python compares an int with a float exactly.
        return (nearest, nearest == value) if nearest <= value else (self.before(nearest), False)

    def after(self, point: float) -> float:
        """Return the next float."""
        return math.nextafter(point, math.inf)

    def before(self, point: float) -> float:
        """Return the previous float."""
        return math.nextafter(point, -math.inf)


class RankAxis(IntegerAxis):
    """Strings by rank among sorted constants: constant ``k`` is ``2k + 1``, gaps are even."""

    def __init__(self, constants: Sequence[bytes]) -> None:
        super().__init__(np.int64)
        self._ranks = {constant: 2 * rank + 1 for rank, constant in enumerate(constants)}

    def floor(self, value: Any) -> tuple[int, bool]:
        """Return the rank of a constant."""
        return self._ranks[value.encode()], True


def axis_of(type_: pa.DataType) -> Axis:
    """Return the axis of a column of numbers, times or booleans."""
    if pa.types.is_dictionary(type_):
        return axis_of(type_.value_type)
    if pa.types.is_floating(type_):
        return FloatAxis()
    if pa.types.is_decimal(type_):
        return DecimalAxis(type_.precision, type_.scale)
    if pa.types.is_timestamp(type_):
        return TimeAxis(_NS_PER_UNIT[type_.unit])
    if pa.types.is_date32(type_):
        return TimeAxis(_NS_PER_DAY)
    if pa.types.is_date64(type_):
        return TimeAxis(_NS_PER_UNIT["ms"])
    return IntegerAxis(np.uint64 if pa.types.is_uint64(type_) else np.int64)


def interval(axis: Axis, operator: str, value: Any) -> tuple[Any, Any]:
    """Return the closed interval of the points that satisfy a comparison with a literal.

    Parameters
    ----------
    axis
        The axis of the points.
    operator
        ``=``, ``<``, ``<=``, ``>`` or ``>=``.
    value
        The literal.

    Returns
    -------
    low, high
        Both within the axis; ``low > high`` if no point qualifies.
    """
    floor, exact = axis.floor(value)
    ceiling = floor if exact else axis.after(floor)
    low, high = axis.lowest, axis.highest
    if operator == "=":
        low, high = ceiling, floor
    elif operator == "<":
        high = axis.before(ceiling)
    elif operator == "<=":
        high = floor
    elif operator == ">":
        low = axis.after(floor)
    else:
        low = ceiling
    if low > high or low > axis.highest or high < axis.lowest:
        return axis.highest, axis.lowest
    return max(low, axis.lowest), min(high, axis.highest)


def points(axis: Axis, values: Sequence[Any]) -> list[Any]:
    """Return the points that equal a literal; a literal between two points has none."""
    spans = [interval(axis, "=", value) for value in values]
    return [low for low, high in spans if low == high]
