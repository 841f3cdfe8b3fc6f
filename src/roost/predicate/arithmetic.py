"""Comparisons of terms: arithmetic on columns and constants, for arrays of pairs.

A term evaluates to an array of values and a mask of those that are known. Integers are computed in
int64; a result that does not fit is unknown, not wrong. Most columns are far from the limits, so
integers have a bound, and overflow is looked for only where the bounds allow it. The same bound
shows where an integer can be compared with a float directly and where float64 would round it.

Times and decimals are integers that count a unit. Those with different units are converted to the
finer one, with Python's integers if int64 does not suffice. Strings are replaced by their ranks
among the distinct values of both columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roost.model.arrays import Mask
from roost.predicate.ast import INT64_MAX, Comparison, Constant, Kind, Literal, Operation, Term
from roost.predicate.axis import Array, unit_of
from roost.predicate.columns import Index, RowBlock
from roost.predicate.conditions import Combination, Compiled, pick
from roost.predicate.kinds import kind_of

#: Integers up to this absolute value are exact in float64.
_EXACT_MAX = 2**53
_FEW = 4  # so many times as many strings are compared faster after sorting all of them
_FUNCTIONS: dict[str, np.ufunc] = {
    "=": np.equal, "!=": np.not_equal,
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.true_divide, "%": np.fmod,
    "abs": np.absolute, "negate": np.negative,
}  # fmt: skip


class Value(NamedTuple):
    """Values of pairs: float64, integers of any size, or Python integers."""

    values: Array
    valid: Mask | None  # none if all are known
    bound: int | None = None  # on the absolute value of integers, if computed

    @property
    def real(self) -> bool:
        """Whether the values are float64."""
        return self.values.dtype.kind == "f"

    def find_bound(self) -> int:
        """Return a bound on the absolute value of integers."""
        if self.bound is not None:
            return self.bound
        return max(int(self.values.max(initial=0)), -int(self.values.min(initial=0)))

    def require(self, known: Mask) -> Value:
        """Return the same values, known only where the mask is true."""
        return self if known.all() else self._replace(valid=_both(self.valid, known))

    def to_int64(self) -> Value:
        """Return integers with a bound; unsigned ones beyond int64 become unknown."""
        value = Value(self.values.astype(np.int64, copy=False), self.valid, self.find_bound())
        unsigned = self.values.dtype == np.uint64
        return value.require(self.values <= INT64_MAX) if unsigned else value


@dataclass(frozen=True, slots=True, eq=False)
class Compare:
    """A comparison of two terms, or its negation.

    The literals of the terms are arrays by position in the group, or scalars if all are equal.
    """

    operator: str
    terms: tuple[Term, Term]
    negated: bool
    attributes: frozenset[str]

    def evaluate(self, block: RowBlock, rows: Any, positions: Index) -> Mask:
        """Return the certain results: negated if requested, and never true for unknown values.

        ``rows`` is an index, or a function from the name of an attribute to an index.
        """
        with np.errstate(all="ignore"):
            terms = block.cached(self, lambda: self._resolve(_Resolver(block)))
            left, right = [_read(term, rows, positions) for term in terms]
            mask = _compare(_FUNCTIONS[self.operator], left, right)
        if self.negated:
            mask = ~mask
        valid = _both(left.valid, right.valid)
        return mask if valid is None else mask & valid

    def has_few_strings(self, block: RowBlock, rows: int) -> bool:
        """Return whether it compares strings of much fewer rows than a block has."""
        strings = _Resolver(block).has_kind(self.terms[0], Kind.STRING)
        return strings and _FEW * rows < min(map(block.length, self.attributes))

    def _resolve(self, resolver: _Resolver) -> list[Any]:
        if resolver.has_kind(self.terms[0], Kind.STRING):
            return resolver.rank(self.terms, self.operator not in ("=", "!="))
        return resolver.resolve(self.terms)[0]


def compile_comparison(
    comparison: Comparison, negated: bool, slots: Iterator[Sequence[Constant]]
) -> Compiled:
    """Compile a comparison or its negation; consumes the slots of its constants in text order."""
    left, *others = [_fill(term, slots) for term in comparison.operands]
    operators = (">=", "<=") if comparison.operator == "between" else (comparison.operator,)
    nodes = []
    for operator, right in zip(operators, others, strict=True):
        names = Comparison(operator, (left, right)).attributes()
        nodes.append(Compare(operator, (left, right), negated, names))
    return Combination(tuple(nodes), np.bitwise_or if negated else np.bitwise_and)


def _fill(term: Term, slots: Iterator[Sequence[Any]]) -> Term:
    """Return the term with the arrays of its constants."""
    if isinstance(term, Literal):
        constants = np.array(next(slots), dtype=np.int64 if term.integer else np.float64)
        equal = (constants == constants[0]).all()
        return Literal(np.array(constants[0]) if equal else constants, term.integer)
    if isinstance(term, str):
        return term
    return type(term)(term.operator, tuple([_fill(x, slots) for x in term.operands]))


class _Column(NamedTuple):
    """The column of an attribute, as a term reads it."""

    name: str
    value: Value


class _Seconds(NamedTuple):
    """The difference of two times that count the same unit."""

    end: _Column
    start: _Column
    unit: Fraction


class _Resolver(NamedTuple):
    """Replaces attributes in terms by the columns of a block."""

    block: RowBlock

    def has_kind(self, term: Term, kind: Kind) -> bool:
        return isinstance(term, str) and kind_of(self.block.type_of(term)) is kind

    def resolve(self, terms: Sequence[Term]) -> tuple[list[Any], Fraction]:
        """Return resolved terms, with attributes in the finest of their units, and this unit."""
        units = {x: unit_of(self.block.type_of(x)) for x in terms if isinstance(x, str)}
        unit = min(units.values(), default=Fraction(1))
        return [
            self._column(x, int(units[x] / unit)) if isinstance(x, str) else self._resolve(x)
            for x in terms
        ], unit

    def _resolve(self, term: Literal | Operation) -> Any:
        if isinstance(term, Literal):
            return term
        if not self.has_kind(term.operands[0], Kind.TIME):
            return Operation(term.operator, tuple(self.resolve(term.operands)[0]))
        (end, start), unit = self.resolve(term.operands[:2])
        others = self.resolve(term.operands[2:])[0]
        return Operation(term.operator[1:], (_Seconds(end, start, unit), *others))

    def _column(self, name: str, factor: int) -> _Column:
        value = Value(self.block.numbers(name), self.block.valid(name))
        if value.real:
            value = value._replace(values=value.values.astype(np.float64, copy=False))
        return _Column(name, value if factor == 1 else _rescale(value, factor))

    def rank(self, names: Sequence[Any], ordered: bool) -> list[_Column]:
        """Return string columns as ranks among the values of all of them."""
        columns = [self.block.strings(name) for name in names]
        joined = pa.concat_arrays([column.dictionary for column in columns])
        if ordered:
            ranks = pc.rank(joined, sort_keys="ascending", tiebreaker="dense")
        else:  # hashing is faster than sorting
            ranks = joined.dictionary_encode().indices.fill_null(0)
        ends = np.cumsum([len(column.dictionary) for column in columns])
        parts = np.split(np.asarray(ranks).astype(np.int32), ends[:-1])
        values = [part[x.codes] for part, x in zip(parts, columns, strict=True)]
        return [
            _Column(x, Value(y, self.block.valid(x))) for x, y in zip(names, values, strict=True)
        ]


def _read(term: Any, rows: Any, positions: Index) -> Value:
    """Return the values of a resolved term."""
    if isinstance(term, _Column):
        index = rows(term.name) if callable(rows) else rows
        values, valid, _ = term.value
        return Value(values[index], None if valid is None else valid[index])
    if isinstance(term, Literal):
        return Value(pick(term.value, positions), None)
    if isinstance(term, _Seconds):
        end, start = _read(term.end, rows, positions), _read(term.start, rows, positions)
        return _subtract(end, start, term.unit)
    value, *others = [_read(operand, rows, positions) for operand in term.operands]
    if term.operator in ("abs", "negate"):
        return _apply_sign(term.operator, value)
    for operator, other in zip(term.operator, others, strict=True):
        value = _apply(operator, value, other)
    return value


def _subtract(end: Value, start: Value, unit: Fraction) -> Value:
    """Return the seconds between two times that count a unit."""
    wide = object in (end.values.dtype, start.values.dtype)
    wide = wide or end.find_bound() + start.find_bound() > INT64_MAX
    ticks = np.subtract(end.values, start.values, dtype=object if wide else np.int64)
    seconds = ticks.astype(np.float64) * unit.numerator / unit.denominator
    return Value(seconds, _both(end.valid, start.valid))


def _both(valid: Mask | None, other: Mask | None) -> Mask | None:
    if valid is None or other is None:
        return other if valid is None else valid
    return valid & other


def _rescale(value: Value, factor: int) -> Value:
    """Multiply integers by a factor, exactly."""
    values = value.values
    if values.dtype != object:
        wide = value.find_bound() * factor > INT64_MAX
        values = values.astype(object if wide else np.int64)
    return Value(values * factor, value.valid)


def _apply_sign(operator: str, value: Value) -> Value:
    if not value.real:
        value = value.to_int64()
        if value.find_bound() > INT64_MAX:
            value = value.require(value.values >= -INT64_MAX)
    return value._replace(values=_FUNCTIONS[operator](value.values))


def _apply(operator: str, a: Value, b: Value) -> Value:
    function = _FUNCTIONS[operator]
    if operator == "/" or a.real or b.real:
        result = Value(function(a.values, b.values, dtype=np.float64), _both(a.valid, b.valid))
    else:
        a, b = a.to_int64(), b.to_int64()
        bound = _bound_result(operator, a.find_bound(), b.find_bound())
        result = Value(function(a.values, b.values), _both(a.valid, b.valid), bound)
        if bound > INT64_MAX:
            result = result.require(_fits(operator, a.values, b.values, result.values))
    return result.require(b.values != 0) if operator in "/%" else result


def _bound_result(operator: str, a: int, b: int) -> int:
    if operator == "%":
        return min(a, INT64_MAX)
    return min(a * b if operator == "*" else a + b, INT64_MAX + 1)


def _fits(operator: str, a: Array, b: Array, result: Array) -> Mask:
    """Return where the wrapped result of int64 is the exact one."""
    if operator == "*":
        # A wrapped product differs by a multiple of 2**64, a product of floats by much less.
        estimate = np.multiply(a, b, dtype=np.float64)
        return np.asarray(np.abs(estimate - result) < 2.0**62)
    # A sum overflows if both operands differ from it in sign; a - b = c is the sum b + c = a.
    first, second, total = (a, b, result) if operator == "+" else (b, result, a)
    return np.asarray(((first ^ total) & (second ^ total)) >= 0)


def _compare(function: np.ufunc, a: Value, b: Value) -> Mask:
    """Compare exactly: an integer that float64 would round, by the sign of the difference."""
    if a.real and not b.real and b.find_bound() > _EXACT_MAX:
        return np.asarray(function(0, _difference(b.values, a.values)))
    if b.real and not a.real and a.find_bound() > _EXACT_MAX:
        return np.asarray(function(_difference(a.values, b.values), 0))
    return np.asarray(function(a.values, b.values))


def _difference(whole: Array, real: Array) -> Array:
    """Return numbers with the sign of the exact difference; NaN where the float is NaN."""
    limits, rounded = np.iinfo(whole.dtype), whole.astype(np.float64)
    # The float nearest to the highest integer exceeds it.
    inside = (real >= limits.min) & (real < float(limits.max))
    truncated = np.where(inside, real, 0.0).astype(whole.dtype)
    order = (whole > truncated).astype(np.float64) - (whole < truncated)
    return np.where(rounded == real, np.where(inside, order, -1.0), rounded - real)
