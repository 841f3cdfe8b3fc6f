"""Conditions on pairs of a left and a right row, for joins and products.

Attributes are named ``left.price`` and ``right.price``. The columns of both tables form one block,
and a comparison has one index of rows for each side. For pairs, both indexes are arrays of row
numbers. For a product, they are a column of left rows and a row of right rows, which numpy
broadcasts, so that a term of one side costs once per row and not once per pair. A condition on one
side is evaluated once for each row of its table.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from roost.model.arrays import Mask
from roost.predicate.arithmetic import Compare
from roost.predicate.ast import Comparison, Connective, Expression
from roost.predicate.columns import Index, RowBlock
from roost.predicate.conditions import Combination, Compiled
from roost.predicate.evaluate import compile_expression
from roost.predicate.kinds import check
from roost.predicate.lexer import scan
from roost.predicate.parser import parse

_SIDES = ("left.", "right.")
#: Pairs evaluated at a time: arrays fit in the caches, and malloc reuses their memory without page
#: faults. A tile of a product is at most this wide.
_PAIRS_AT_ONCE = 1 << 17
_TILE_WIDTH = 4096


class PairPredicate:
    """A condition on pairs of rows of two tables.

    Raises `PredicateError` if the text does not parse or is not valid for the schemas. Tables may
    have more columns than the condition reads.

    Examples
    --------
    >>> schema = pa.schema([("user", pa.string()), ("at", pa.int64())])
    >>> text = "left.user = right.user and abs(left.at - right.at) < 60"
    >>> near = PairPredicate(text, schema, schema)
    >>> calls = pa.table({"user": ["a", "b", "a"], "at": [0, 10, 50]}, schema)
    >>> near.product(calls, calls).astype(int).tolist()
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    >>> near.equalities()
    [('user', 'user')]
    """

    def __init__(self, text: str, left_schema: pa.Schema, right_schema: pa.Schema) -> None:
        sides = zip(_SIDES, (left_schema, right_schema), strict=True)
        self._schema = pa.schema([x.with_name(side + x.name) for side, s in sides for x in s])
        tree = parse(text)
        check(tree, self._schema)
        self._constants = scan(text)[1]
        self._set_conjuncts(list(_conjuncts(tree)))

    def _set_conjuncts(self, conjuncts: list[Expression]) -> None:
        slots = iter([[constant] for constant in self._constants])
        nodes = [compile_expression(x, False, slots, self._schema) for x in conjuncts]
        self._conjuncts = conjuncts
        self._node = _divide(Combination(tuple(nodes), np.bitwise_and))
        #: The names of the columns that the condition reads, such as ``left.price``.
        self.attributes: frozenset[str] = frozenset().union(*(x.attributes() for x in conjuncts))

    def equalities(self) -> list[tuple[str, str]]:
        """Return the left and right column of each equality that every pair must satisfy.

        These are the conditions ``left.a = right.b`` that are joined with the others by ``and``.
        Null and NaN equal nothing. The types of the columns may differ, for example int64 and
        float64: they are equal if the values are.
        """
        return [names for names in map(_equality, self._conjuncts) if names is not None]

    def without_equalities(
        self, keys: Collection[tuple[str, str]] | None = None
    ) -> PairPredicate | None:
        """Return the rest of the condition, to check pairs with equal keys; none if it is empty.

        ``keys`` are the equalities to omit, as :meth:`equalities` returns them; by default all.
        """
        rest = copy.copy(self)
        keys = self.equalities() if keys is None else keys
        conjuncts = [x for x in self._conjuncts if _equality(x) not in keys]
        if not conjuncts:
            return None
        rest._set_conjuncts(conjuncts)
        return rest

    def evaluate(
        self, left: pa.Table, right: pa.Table, left_rows: Index, right_rows: Index
    ) -> Mask:
        """Return for each pair of row numbers whether the condition is true."""
        if len(left_rows) != len(right_rows):
            raise ValueError(f"{len(left_rows)} left rows for {len(right_rows)} right rows")
        return self.on(left, right).evaluate(left_rows, right_rows)

    def on(self, left: pa.Table, right: pa.Table) -> PairBlock:
        """Return the condition on two tables, whose columns are converted once."""
        tables = (left, right)
        columns = {x: tables[_is_right(x)].column(_column(x)) for x in self.attributes}
        return PairBlock(self._node, RowBlock(columns, self._schema))

    def product(self, left: pa.Table, right: pa.Table) -> Mask:
        """Return a mask of all pairs: one row for each left row, one column for each right row."""
        block = self.on(left, right)
        results = np.zeros((len(left), len(right)), dtype=np.bool_)
        width = max(1, min(len(right), _TILE_WIDTH))
        height = max(1, _PAIRS_AT_ONCE // width)
        for top in range(0, len(left), height):
            for begin in range(0, len(right), width):
                tile = slice(top, top + height), slice(begin, begin + width)
                results[tile] = block.tile(*tile)
        return results


@dataclass(frozen=True, slots=True)
class PairBlock:
    """A condition on the rows of two tables."""

    node: Compiled
    block: RowBlock

    def evaluate(self, left_rows: Index, right_rows: Index) -> Mask:
        """Return for each pair of row numbers whether the condition is true."""
        results = np.zeros(len(left_rows), dtype=np.bool_)
        for begin in range(0, len(left_rows), _PAIRS_AT_ONCE):
            part = slice(begin, begin + _PAIRS_AT_ONCE)
            results[part] = _narrowed(self.node, self.block, left_rows[part], right_rows[part])
        return results

    def tile(self, left: slice, right: slice) -> Mask:
        """Return a mask of the pairs of some left and right rows, or one that broadcasts to it."""
        return _evaluate(self.node, self.block, (left, None), (None, right))

    def within(self, low: Index, high: Index) -> Iterator[tuple[Index, Index]]:
        """Yield true pairs of each left row ``k`` and the right rows ``low[k]`` to ``high[k] - 1``.

        Both bounds ascend, so neighbouring left rows have nearly the same right rows: tiles of the
        product are evaluated, and pairs beyond the bounds are left out if they are true.
        """
        top = 0
        while top < len(low):
            span = max(1, int(high[top] - low[top]))
            # A tile that is as high as wide would be half out of bounds.
            height = max(1, min(_PAIRS_AT_ONCE // min(span, _TILE_WIDTH), -(-span // 4)))
            bottom = min(top + height, len(low))
            last = int(high[bottom - 1])
            for begin in range(int(low[top]), last, _TILE_WIDTH):
                stop = min(begin + _TILE_WIDTH, last)
                mask = self.tile(slice(top, bottom), slice(begin, stop))
                shape = (bottom - top, stop - begin)
                mask = mask if mask.shape == shape else np.broadcast_to(mask, shape)
                found = np.flatnonzero(mask)
                if found.size:
                    a, b = found // shape[1] + top, found % shape[1] + begin
                    kept = (b >= low[a]) & (b < high[a])
                    yield a[kept], b[kept]
            top = bottom


def _evaluate(node: Compiled, block: RowBlock, left: Any, right: Any) -> Mask:
    def rows(name: str) -> Any:
        return right if _is_right(name) else left

    # There is one predicate, so its constants are scalars, and positions are not read.
    return node.evaluate(block, rows, np.zeros(0, dtype=np.intp))  # type: ignore[arg-type]


def _narrowed(node: Compiled, block: RowBlock, left: Index, right: Index) -> Mask:
    """Evaluate pairs; conditions are skipped for those that earlier ones decide."""
    if not isinstance(node, Combination):
        if isinstance(node, Compare) and node.has_few_strings(block, left.size):
            # Encoding and sorting all strings of both tables would take most of a join's time.
            rows = {x: right if _is_right(x) else left for x in node.attributes}
            found = _evaluate(node, block.take_strings(rows), slice(None), slice(None))
        else:
            found = _evaluate(node, block, left, right)
        # A comparison of constants has one result for all pairs.
        return found if np.shape(found) == left.shape else np.full(left.shape, found)
    mask = _narrowed(node.nodes[0], block, left, right)
    for other in node.nodes[1:]:
        unknown = np.flatnonzero(mask if node.combine is np.bitwise_and else ~mask)
        if 2 * unknown.size >= mask.size:  # selecting the others would cost more than it saves
            mask = node.combine(mask, _narrowed(other, block, left, right), out=mask)
        elif unknown.size:
            mask[unknown] = _narrowed(other, block, left[unknown], right[unknown])
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class _OneSide:
    """A condition on the attributes of one side, evaluated for all rows at once."""

    node: Compiled
    attribute: str  # one of them

    def evaluate(self, block: RowBlock, rows: Any, positions: Index) -> Mask:
        """Return the results of the rows of this side."""
        mask = block.cached(self, lambda: self._evaluate_all(block))
        return np.array(mask[rows(self.attribute)])  # a copy, because the caller may change it

    def _evaluate_all(self, block: RowBlock) -> Mask:
        count = block.length(self.attribute)
        return self.node.evaluate(block, np.arange(count), np.zeros(count, dtype=np.intp))


def _divide(node: Any) -> Compiled:
    """Return a compiled condition in which those on one side are evaluated once per row."""
    if isinstance(node, Combination):
        return Combination(tuple(map(_divide, node.nodes)), node.combine)
    names = node.attributes if isinstance(node, Compare) else frozenset([node.attribute])
    one_side = len({_is_right(name) for name in names}) == 1
    return _OneSide(node, min(names)) if one_side else node


def _is_right(name: str) -> bool:
    return name.startswith("right.")


def _column(name: str) -> str:
    return name.partition(".")[2]


def _conjuncts(expression: Expression) -> Iterator[Expression]:
    if isinstance(expression, Connective) and expression.operator == "and":
        for operand in expression.operands:
            yield from _conjuncts(operand)
    else:
        yield expression


def _equality(expression: Expression) -> tuple[str, str] | None:
    """Return the columns of ``left.a = right.b`` in either order; none for other expressions."""
    if not isinstance(expression, Comparison) or expression.operator != "=":
        return None
    names = sorted([term for term in expression.operands if isinstance(term, str)])
    if len(names) < 2 or _is_right(names[0]) == _is_right(names[1]):
        return None
    return _column(names[0]), _column(names[1])
