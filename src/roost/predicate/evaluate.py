"""Evaluation of many predicates for arrays of (predicate, point) pairs.

A hundred thousand predicates have few distinct forms: ``fare > 50``, ``fare > 60``, ``base =
'B02617'``. Predicates whose trees differ only in their constants form a group, compiled once into
conditions with arrays of constants. To evaluate pairs, they are sorted by group, and each group
costs a few numpy expressions. Compilation pushes negations down to the conditions (see
`roost.predicate.conditions`).

A set is built for one schema and is immutable; it stores and caches no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from roost.errors import PredicateError
from roost.predicate.arithmetic import compile_comparison
from roost.predicate.ast import (
    LIST_OPERATORS,
    Comparison,
    Condition,
    Constant,
    Expression,
    Kind,
    Literal,
    members_of,
)
from roost.predicate.axis import Array, Axis, axis_of, rank_axis
from roost.predicate.columns import Index, Lists, RowBlock
from roost.predicate.conditions import Combination, Compiled, Member, Null, Within, Words
from roost.predicate.kinds import check, check_kinds, kind_of
from roost.predicate.lexer import Key, check_text, lists_fit, scan
from roost.predicate.parser import parse

#: Pairs evaluated at a time: bounds memory, and the arrays fit in the CPU caches.
_PAIRS_AT_ONCE = 1 << 18

#: The constants that the predicates of a group have at one place of their template.
_Slot = Sequence[Constant]


@dataclass(slots=True)
class _Group:
    """Predicates that differ only in their constants, while the set is built."""

    template: Expression
    slots: list[list[Constant]]
    types: list[bool] | None  # which constants are integers, if that matters
    ids: list[int] = field(default_factory=list)


class PredicateSet:
    """Predicates compiled for points with a schema, identified by their index.

    Raises `PredicateError` with its id if a text does not parse or is not valid for the schema.

    Examples
    --------
    >>> schema = pa.schema([("fare", pa.float64())])
    >>> predicates = PredicateSet(["fare > 50", "fare > 60"], schema)
    >>> columns = {"fare": pa.array([55.0, None, 70.0])}
    >>> predicates.evaluate(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 2]), columns).tolist()
    [True, False, False, True]
    """

    def __init__(self, texts: Sequence[str], schema: pa.Schema) -> None:
        groups = _collect(texts, schema)
        self._schema = schema
        self._nodes = [_compile_group(group, texts, schema) for group in groups]
        #: The names of the columns that `evaluate` requires.
        self.attributes: frozenset[str] = frozenset().union(
            *(group.template.attributes() for group in groups)
        )
        # numpy sorts 16-bit integers in linear time.
        self._group_of = np.zeros(len(texts), np.uint16 if len(groups) < 2**16 else np.int64)
        self._position_of = np.zeros(len(texts), np.int32)
        for number, group in enumerate(groups):
            self._group_of[group.ids] = number
            self._position_of[group.ids] = np.arange(len(group.ids))

    def evaluate(
        self,
        predicate_ids: npt.NDArray[np.integer[Any]],
        rows: npt.NDArray[np.integer[Any]],
        columns: Mapping[str, pa.Array | pa.ChunkedArray],
    ) -> npt.NDArray[np.bool_]:
        """Return for each pair whether the predicate is true, not false or unknown.

        A pair is predicate ``predicate_ids[k]`` and the point at row ``rows[k]``; the points have
        at least the columns in `attributes`.
        """
        if len(predicate_ids) != len(rows):
            raise ValueError(f"{len(predicate_ids)} predicates for {len(rows)} rows")
        results = np.zeros(len(rows), dtype=np.bool_)
        if len(rows) == 0:
            return results
        if min(predicate_ids.min(), rows.min()) < 0:
            raise IndexError("predicate ids and rows start at 0")
        block = RowBlock(columns, self._schema, rows)
        for begin in range(0, len(rows), _PAIRS_AT_ONCE):
            part = slice(begin, begin + _PAIRS_AT_ONCE)
            results[part] = self._evaluate_part(block, predicate_ids[part], rows[part])
        return results

    def _evaluate_part(self, block: RowBlock, ids: Index, rows: Index) -> npt.NDArray[np.bool_]:
        positions = self._position_of[ids]
        if len(self._nodes) == 1:
            return self._nodes[0].evaluate(block, rows, positions)
        groups = self._group_of[ids]
        order = np.argsort(groups, kind="stable")
        present, starts = np.unique(groups[order], return_index=True)
        results = np.empty(len(ids), dtype=np.bool_)
        for number, pairs in zip(present, np.split(order, starts[1:]), strict=True):
            results[pairs] = self._nodes[number].evaluate(block, rows[pairs], positions[pairs])
        return results


def _collect(texts: Sequence[str], schema: pa.Schema) -> list[_Group]:
    by_key: dict[Key, _Group] = {}
    by_template: dict[Expression, _Group] = {}
    for number, text in enumerate(texts):
        try:
            check_text(text)
            key, constants = scan(text)
            group = by_key.get(key)
            if group is None or (group.types is not None and group.types != _types(constants)):
                template = parse(text).erased
                group = by_template.get(template)
                if group is None:
                    check_kinds(template, schema)
                    typed = any(isinstance(x, Comparison) for x in template.conditions())
                    types = _types(constants) if typed else None
                    group = _Group(template, [[] for _ in constants], types)
                    by_template[template] = group
                by_key[key] = group
            elif not lists_fit(constants):
                parse(text)  # raises
        except PredicateError as error:
            raise _add_id(error, number, text) from None
        group.ids.append(number)
        for slot, constant in zip(group.slots, constants, strict=True):
            slot.append(constant)
    return list(by_template.values())


def _types(constants: Sequence[Constant]) -> list[bool]:
    """Return which constants are integers: arithmetic differs, but the key does not."""
    return [Literal.of(constant).integer for constant in constants]


def _add_id(error: PredicateError, number: int, text: object) -> PredicateError:
    shown = text if isinstance(text, str) and len(text) <= 80 else str(text)[:77] + "..."
    return PredicateError(f"predicate {number} ({shown}): {error}")


def _compile_group(group: _Group, texts: Sequence[str], schema: pa.Schema) -> Compiled:
    try:
        return compile_expression(group.template, False, iter(group.slots), schema)
    except (PredicateError, ValueError):
        for number in group.ids:  # find the first predicate with an invalid constant
            try:
                check(parse(texts[number]), schema)
            except PredicateError as error:
                raise _add_id(error, number, texts[number]) from None
        raise


def compile_expression(
    expression: Expression, negated: bool, slots: Iterator[_Slot], schema: pa.Schema
) -> Compiled:
    """Compile a tree or its negation; consumes the slots of its constants in text order."""
    if isinstance(expression, Condition):
        return _compile_condition(expression, negated, slots, schema)
    if isinstance(expression, Comparison):
        return compile_comparison(expression, negated, slots)
    if expression.operator == "not":
        return compile_expression(expression.operands[0], not negated, slots, schema)
    nodes = tuple([compile_expression(x, negated, slots, schema) for x in expression.operands])
    every = (expression.operator == "and") is not negated
    return Combination(nodes, np.bitwise_and if every else np.bitwise_or)


def _compile_condition(
    condition: Condition, negated: bool, slots: Iterator[_Slot], schema: pa.Schema
) -> Compiled:
    name, operator = condition.attribute, condition.operator
    if operator == "is null":
        return Null(name, negated)
    if operator == "is true":
        true = np.array(1)
        return Within(name, negated, None, true, true)
    type_ = schema.field(name).type
    if operator in LIST_OPERATORS:
        lists: list[list[Any]] = [members_of(constant) for constant in next(slots)]
        return _compile_list(name, negated, operator, lists, type_)
    if operator == "between":
        bounds = [(">=", next(slots)), ("<=", next(slots))]
    elif operator == "!=":
        negated, bounds = not negated, [("=", next(slots))]
    else:
        bounds = [(operator, next(slots))]
    if kind_of(type_) is not Kind.STRING:
        return Within(name, negated, None, *_intersect(axis_of(type_), bounds))
    constants = sorted({str(value).encode() for _, slot in bounds for value in slot})
    strings = pa.array(constants, pa.large_binary())
    return Within(name, negated, strings, *_intersect(rank_axis(constants), bounds))


def _compile_list(
    name: str, negated: bool, operator: str, lists: list[list[Any]], type_: pa.DataType
) -> Compiled:
    if operator != "in":
        return Words.of(name, negated, operator == "has all", lists)
    if kind_of(type_) is Kind.STRING:
        strings, numbers = Lists.numbered(lists)
        encoded = pa.array([string.encode() for string in strings], pa.large_binary())
        return Member(name, negated, encoded, numbers)
    axis = axis_of(type_)
    return Member(name, negated, None, Lists.of([axis.points(x) for x in lists], axis.dtype))


def _intersect(
    axis: Axis, bounds: Sequence[tuple[str, _Slot]]
) -> tuple[Array | None, Array | None]:
    """Return the ends of each predicate's interval, the intersection of its bounds."""
    lows: list[Array] = []
    highs: list[Array] = []
    for operator, slot in bounds:
        intervals = [axis.interval(operator, value) for value in slot]
        lows.append(np.array([low for low, _ in intervals], dtype=axis.dtype))
        highs.append(np.array([high for _, high in intervals], dtype=axis.dtype))
    low = _collapse(np.maximum.reduce(lows), axis.lowest)
    high = _collapse(np.minimum.reduce(highs), axis.highest)
    if low is not None and high is not None and np.array_equal(low, high):
        return low, low
    return low, high


def _collapse(ends: Array, unbounded: Any) -> Array | None:
    """Return a scalar if all ends are equal, and none if they exclude nothing."""
    if not (ends == ends[0]).all():
        return ends
    return None if ends[0] == unbounded else np.array(ends[0], dtype=ends.dtype)
