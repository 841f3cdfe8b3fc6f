"""Many predicates, decided for whole arrays of (predicate, point) pairs.

A hundred thousand queries carry a hundred thousand predicates, but people write few *sentences*:
``fare > 50``, ``fare > 60``, ``base = 'B02617'``. Predicates with the same tree but for their
constants form a group, compiled once into conditions with arrays of constants. To decide pairs,
they are sorted by group and each group is a handful of numpy expressions. Negations are pushed
down to the conditions when compiling (see `roost.predicate.conditions`).

A set is built for one schema and does not change; it holds no rows and no caches of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from roost.errors import PredicateError
from roost.predicate.ast import (
    And,
    Between,
    Comparison,
    Condition,
    Constant,
    Expression,
    Has,
    In,
    IsNull,
    Kind,
    Not,
    Or,
    Truth,
    members_of,
)
from roost.predicate.axis import Array, Axis, RankAxis, axis_of, interval, points
from roost.predicate.columns import Block, Index
from roost.predicate.conditions import AllOf, AnyOf, Member, Node, Null, Within, Words
from roost.predicate.kinds import check, check_kinds, kind_of
from roost.predicate.lexer import DEFAULT_LIMITS, Key, Limits, check_text, scan
from roost.predicate.parser import lists_fit, parse

#: Pairs decided at a time: bounds memory, and keeps the arrays in the caches.
_PAIRS_AT_ONCE = 1 << 18

#: One literal, or one list, of every predicate of a group.
_Slot = Sequence[Constant]


@dataclass(slots=True)
class _Group:
    """Predicates that differ only in their constants, while they are collected."""

    pattern: Expression
    slots: list[list[Constant]]
    ids: list[int] = field(default_factory=list)


class PredicateSet:
    """Predicates with their numbers, ready to be decided for pairs.

    Parameters
    ----------
    texts
        The predicates; a predicate's id is its index.
    schema
        The points' attributes.
    limits
        How large a predicate may be.

    Raises
    ------
    PredicateError
        Where a text does not parse or does not fit the schema; names its id.

    Examples
    --------
    >>> schema = pa.schema([("fare", pa.float64())])
    >>> predicates = PredicateSet(["fare > 50", "fare > 60"], schema)
    >>> columns = {"fare": pa.array([55.0, None, 70.0])}
    >>> predicates.evaluate(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 2]), columns).tolist()
    [True, False, False, True]
    """

    def __init__(
        self, texts: Sequence[str], schema: pa.Schema, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        groups = _collect(texts, schema, limits)
        self._schema = schema
        self._nodes = [_compile_group(group, texts, schema, limits) for group in groups]
        self._attributes = frozenset().union(*(group.pattern.attributes() for group in groups))
        # numpy sorts 16-bit numbers in linear time.
        self._group_of = np.zeros(len(texts), np.uint16 if len(groups) < 2**16 else np.int64)
        self._place_of = np.zeros(len(texts), np.int32)
        for number, group in enumerate(groups):
            self._group_of[group.ids] = number
            self._place_of[group.ids] = np.arange(len(group.ids))

    def __len__(self) -> int:
        """Return how many predicates there are."""
        return len(self._group_of)

    @property
    def attributes(self) -> frozenset[str]:
        """The names of the columns that `evaluate` needs."""
        return self._attributes

    def evaluate(
        self,
        predicate_ids: npt.NDArray[np.integer[Any]],
        rows: npt.NDArray[np.integer[Any]],
        columns: Mapping[str, pa.Array | pa.ChunkedArray],
    ) -> npt.NDArray[np.bool_]:
        """Tell for each pair whether the point satisfies the predicate.

        Parameters
        ----------
        predicate_ids, rows
            The pairs: predicate ``predicate_ids[k]`` and the point at row ``rows[k]``.
        columns
            The points' attributes, at least those in `attributes`.

        Returns
        -------
        numpy.ndarray
            True where the predicate is true; false where it is false or unknown.
        """
        if len(predicate_ids) != len(rows):
            raise ValueError(f"{len(predicate_ids)} predicates for {len(rows)} rows")
        answers = np.zeros(len(rows), dtype=np.bool_)
        if len(rows) == 0:
            return answers
        if min(predicate_ids.min(), rows.min()) < 0:
            raise IndexError("predicate ids and rows start at 0")
        block = Block(columns, self._schema, rows)
        for begin in range(0, len(rows), _PAIRS_AT_ONCE):
            part = slice(begin, begin + _PAIRS_AT_ONCE)
            answers[part] = self._evaluate_part(block, predicate_ids[part], rows[part])
        return answers

    def _evaluate_part(self, block: Block, ids: Index, rows: Index) -> npt.NDArray[np.bool_]:
        places = self._place_of[ids]
        if len(self._nodes) == 1:
            return self._nodes[0].decide(block, rows, places)
        groups = self._group_of[ids]
        order = np.argsort(groups, kind="stable")
        present, starts = np.unique(groups[order], return_index=True)
        answers = np.empty(len(ids), dtype=np.bool_)
        for number, pairs in zip(present, np.split(order, starts[1:]), strict=True):
            answers[pairs] = self._nodes[number].decide(block, rows[pairs], places[pairs])
        return answers


def _collect(texts: Sequence[str], schema: pa.Schema, limits: Limits) -> list[_Group]:
    by_key: dict[Key, _Group] = {}
    by_pattern: dict[Expression, _Group] = {}
    for number, text in enumerate(texts):
        try:
            check_text(text, limits)
            key, constants = scan(text)
            group = by_key.get(key)
            if group is None:
                group = _find_group(text, len(constants), schema, limits, by_pattern)
                by_key[key] = group
            elif not lists_fit(constants, limits):
                parse(text, limits)
        except PredicateError as error:
            raise _name(number, text, error) from None
        group.ids.append(number)
        for slot, constant in zip(group.slots, constants, strict=True):
            slot.append(constant)
    return list(by_pattern.values())


def _find_group(
    text: str,
    slots: int,
    schema: pa.Schema,
    limits: Limits,
    by_pattern: dict[Expression, _Group],
) -> _Group:
    pattern = parse(text, limits).erased
    group = by_pattern.get(pattern)
    if group is None:
        check_kinds(pattern, schema)
        group = by_pattern[pattern] = _Group(pattern, [[] for _ in range(slots)])
    return group


def _name(number: int, text: object, error: PredicateError) -> PredicateError:
    shown = text if isinstance(text, str) and len(text) <= 80 else str(text)[:77] + "..."
    return PredicateError(f"predicate {number} ({shown}): {error}")


def _compile_group(group: _Group, texts: Sequence[str], schema: pa.Schema, limits: Limits) -> Node:
    try:
        return _compile(group.pattern, False, iter(group.slots), schema)
    except (PredicateError, ValueError):
        _blame(group.ids, texts, schema, limits)
        raise


def _blame(ids: Sequence[int], texts: Sequence[str], schema: pa.Schema, limits: Limits) -> None:
    """Raise for the first predicate whose constants are at fault."""
    for number in ids:
        try:
            check(parse(texts[number], limits), schema)
        except PredicateError as error:
            raise _name(number, texts[number], error) from None


def _compile(
    expression: Expression, negated: bool, slots: Iterator[_Slot], schema: pa.Schema
) -> Node:
    """Compile a tree or its negation; takes the slots of its constants in the text's order."""
    if isinstance(expression, Not):
        return _compile(expression.operand, not negated, slots, schema)
    if isinstance(expression, And | Or):
        nodes = tuple([_compile(x, negated, slots, schema) for x in expression.operands])
        return AllOf(nodes) if isinstance(expression, And) is not negated else AnyOf(nodes)
    assert isinstance(expression, Condition), expression
    return _compile_condition(expression, negated, slots, schema)


def _compile_condition(
    condition: Condition, negated: bool, slots: Iterator[_Slot], schema: pa.Schema
) -> Node:
    name = condition.attribute
    if isinstance(condition, IsNull):
        return Null(name, negated)
    if isinstance(condition, Truth):
        true = np.array(1)
        return Within(name, negated, true, true)
    if isinstance(condition, Has):
        return Words.build(name, negated, condition.every, [*map(members_of, next(slots))])
    type_ = schema.field(name).type
    if isinstance(condition, In):
        return _compile_in(name, negated, next(slots), type_)
    if isinstance(condition, Between):
        return _compile_interval(name, negated, [(">=", next(slots)), ("<=", next(slots))], type_)
    assert isinstance(condition, Comparison), condition
    if condition.operator == "!=":
        return _compile_interval(name, not negated, [("=", next(slots))], type_)
    return _compile_interval(name, negated, [(condition.operator, next(slots))], type_)


def _compile_in(name: str, negated: bool, slot: _Slot, type_: pa.DataType) -> Member:
    lists = [members_of(constant) for constant in slot]
    if kind_of(type_) is Kind.TEXT:
        return Member.of_texts(name, negated, lists)
    axis = axis_of(type_)
    placed = [points(axis, values) for values in lists]
    return Member.of_points(name, negated, placed, axis.dtype)


def _compile_interval(
    name: str, negated: bool, bounds: Sequence[tuple[str, _Slot]], type_: pa.DataType
) -> Within:
    if kind_of(type_) is not Kind.TEXT:
        low, high = _ends(axis_of(type_), bounds)
        return Within(name, negated, low, high)
    constants = sorted({str(value).encode() for _, slot in bounds for value in slot})
    low, high = _ends(RankAxis(constants), bounds)
    return Within(name, negated, low, high, pa.array(constants, pa.large_binary()))


def _ends(axis: Axis, bounds: Sequence[tuple[str, _Slot]]) -> tuple[Array | None, Array | None]:
    """Return the ends of the predicates' intervals, each the intersection of some bounds."""
    lows: list[Array] = []
    highs: list[Array] = []
    for operator, slot in bounds:
        spans = [interval(axis, operator, value) for value in slot]
        lows.append(np.array([low for low, _ in spans], dtype=axis.dtype))
        highs.append(np.array([high for _, high in spans], dtype=axis.dtype))
    low = _shrink(np.maximum.reduce(lows), axis.lowest)
    high = _shrink(np.minimum.reduce(highs), axis.highest)
    if low is not None and high is not None and np.array_equal(low, high):
        return low, low
    return low, high


def _shrink(ends: Array, excludes_nothing: Any) -> Array | None:
    """Return one number for ends that all agree, and none for ends that exclude nothing."""
    if not (ends == ends[0]).all():
        return ends
    return None if ends[0] == excludes_nothing else np.array(ends[0], dtype=ends.dtype)
