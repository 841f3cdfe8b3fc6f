"""Compiled conditions, evaluated for arrays of (predicate, row) pairs.

A compiled condition represents one condition of a whole group of predicates, with arrays of their
constants. Its `evaluate` reads, for each pair, the row and the position of the predicate in the
group. Negations have been pushed down to the conditions, so a result is true only if the condition
is *certainly* true (or, if negated, certainly false): a null row never qualifies, and ``and`` or
``or`` of such results is SQL's three-valued logic without a third value.

Strings cost per distinct value of the block, not per pair: distinct values are first mapped to
their ranks among the constants of the group, and pairs compare integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from roost.model.arrays import Mask
from roost.predicate.ast import is_word
from roost.predicate.axis import Array
from roost.predicate.columns import Index, Lists, RowBlock, WordIndex

#: (Pair, word) combinations looked up at a time; bounds memory.
_WORDS_AT_ONCE = 1 << 22


class Compiled(Protocol):
    """A compiled expression."""

    def evaluate(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        """Return a mask of the pairs for which the expression is certainly true."""


@dataclass(frozen=True, slots=True, eq=False)
class Combination:
    """A conjunction or disjunction, by the function that combines two masks."""

    nodes: tuple[Compiled, ...]
    combine: np.ufunc

    def evaluate(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        """Return where all nodes, or at least one, are true."""
        mask = self.nodes[0].evaluate(block, rows, positions)
        for node in self.nodes[1:]:
            other = node.evaluate(block, rows, positions)
            # Masks of the two sides of a product are broadcast against each other.
            mask = self.combine(mask, other, out=mask if mask.shape == other.shape else None)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Null:
    """``is null``, or its negation."""

    attribute: str
    negated: bool

    def evaluate(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        """Return where the row is null, or is not null."""
        valid = block.valid(self.attribute)
        if valid is None:
            return np.full(len(rows), self.negated)
        return valid[rows] if self.negated else ~valid[rows]


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledCondition:
    """A condition on the values of an attribute, or its negation."""

    attribute: str
    negated: bool

    def evaluate(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        """Return the certain results: negated if requested, and never true for null rows."""
        mask = self._holds(block, rows, positions)
        if self.negated:
            mask = ~mask
        valid = block.valid(self.attribute)
        return mask if valid is None else mask & valid[rows]

    def _holds(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledComparison(_CompiledCondition):
    """A condition on numbers or, if it has string ``constants``, on encoded strings."""

    constants: pa.Array | None

    def encode(self, strings: pa.Array) -> Array:
        """Return the index of the constant that equals each string; -1 if none does."""
        return np.asarray(pc.index_in(strings, self.constants).fill_null(-1)).astype(np.int64)

    def _values(self, block: RowBlock, rows: Index) -> Array:
        """Return the value of each pair; encodes distinct strings once."""
        if self.constants is None:
            return np.asarray(block.numbers(self.attribute)[rows])
        codes, dictionary = block.strings(self.attribute)
        codes = codes[rows]
        if len(codes) < len(dictionary):
            used, codes = np.unique(codes, return_inverse=True)
            by_code = self.encode(dictionary.take(pa.array(used)))
        else:
            by_code = block.cached(self, lambda: self.encode(dictionary))
        return np.asarray(by_code[codes])


@dataclass(frozen=True, slots=True, eq=False)
class Within(_CompiledComparison):
    """Whether the value is in the closed interval of the predicate.

    Its ends are arrays by position in the group, or a scalar if all are equal; none if unbounded.
    For strings they are ranks among the sorted constants.
    """

    low: Array | None
    high: Array | None

    def _holds(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        values = self._values(block, rows)
        if self.low is not None and self.low is self.high:
            return np.asarray(values == pick(self.low, positions))
        if self.low is not None:
            mask = np.asarray(values >= pick(self.low, positions))
            if self.high is not None:
                mask &= values <= pick(self.high, positions)
            return mask
        if self.high is not None:
            return np.asarray(values <= pick(self.high, positions))
        # Literals are finite, so every interval of floats excludes NaN: the values are integers.
        return np.ones(len(values), dtype=np.bool_)

    def encode(self, strings: pa.Array) -> Array:
        """Return the points of the strings on the axis of the constants' ranks."""
        if self.low is not None and self.low is self.high:
            # Equality does not depend on the order of other strings, and hashing is faster.
            return 2 * _CompiledComparison.encode(self, strings) + 1
        constants = _objects(self.constants)
        found = _objects(strings.fill_null(b""))
        ranks = np.searchsorted(constants, found)
        equal = constants[np.minimum(ranks, len(constants) - 1)] == found
        return np.asarray(2 * ranks + equal)


@dataclass(frozen=True, slots=True, eq=False)
class Member(_CompiledComparison):
    """Whether the value is in the list of the predicate; strings are indexes of constants."""

    lists: Lists

    def _holds(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        return self.lists.contain(positions, self._values(block, rows))


@dataclass(frozen=True, slots=True, eq=False)
class Words(_CompiledCondition):
    """Whether the string contains every, or any, of the predicate's words.

    The lists have numbers of words in the ``vocabulary``, the distinct case-folded words.
    """

    every: bool
    vocabulary: Sequence[str]
    lists: Lists

    @classmethod
    def of(cls, attribute: str, negated: bool, every: bool, lists: list[list[Any]]) -> Words:
        """Build from one list per predicate; raises ValueError for anything but single words."""
        if not all(is_word(word) for words in lists for word in words):
            raise ValueError("only single words can be searched for")
        folded = [[word.casefold() for word in words] for words in lists]
        return cls(attribute, negated, every, *Lists.numbered(folded))

    def _holds(self, block: RowBlock, rows: Index, positions: Index) -> Mask:
        index = block.words(self.attribute)
        codes = block.strings(self.attribute).codes[rows]
        words = block.cached(self, lambda: self._number_words(index))
        counts = np.diff(self.lists.starts)[positions]
        ends = np.cumsum(counts)
        found = np.empty(len(positions), dtype=np.bool_)
        begin = 0
        while begin < len(positions):
            done = ends[begin] - counts[begin]
            end = max(int(np.searchsorted(ends, done + _WORDS_AT_ONCE, "right")), begin + 1)
            found[begin:end] = self._search(index, words, codes[begin:end], positions[begin:end])
            begin = end
        return found

    def _number_words(self, index: WordIndex) -> npt.NDArray[np.int64]:
        """Return the numbers of the members in the block; -1 for words not in the block."""
        numbers = np.array([index.numbers.get(word, -1) for word in self.vocabulary])
        return np.asarray(numbers[self.lists.members])

    def _search(
        self, index: WordIndex, words: npt.NDArray[np.int64], codes: Index, positions: Index
    ) -> Mask:
        starts = self.lists.starts
        counts = starts[positions + 1] - starts[positions]
        firsts = np.cumsum(counts) - counts
        at = np.arange(counts.sum()) + np.repeat(starts[positions] - firsts, counts)
        present = index.lists.contain(np.repeat(codes, counts), words[at])
        hits = np.add.reduceat(present.astype(np.int64), firsts)
        return np.asarray(hits == counts if self.every else hits > 0)


def pick(constants: Array, positions: Index) -> Array:
    """Return the constant of each pair; a scalar applies to all."""
    return constants[positions] if constants.ndim else constants


def _objects(strings: pa.Array) -> Array:
    objects = np.empty(len(strings), dtype=object)
    objects[:] = strings.to_pylist()
    return objects
