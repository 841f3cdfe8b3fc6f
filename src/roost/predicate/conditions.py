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

from roost.predicate.ast import is_word
from roost.predicate.axis import Array
from roost.predicate.columns import Block, Index, Mask, WordIndex

#: (Pair, word) combinations looked up at a time; bounds memory.
_WORDS_AT_ONCE = 1 << 22


class Node(Protocol):
    """A compiled expression."""

    def evaluate(self, block: Block, rows: Index, positions: Index) -> Mask:
        """Return a mask of the pairs for which the expression is certainly true."""


@dataclass(frozen=True, slots=True, eq=False)
class Combination:
    """A conjunction or disjunction, by the function that combines two masks."""

    nodes: tuple[Node, ...]
    combine: np.ufunc

    def evaluate(self, block: Block, rows: Index, positions: Index) -> Mask:
        """Return where all nodes, or at least one, are true."""
        mask = self.nodes[0].evaluate(block, rows, positions)
        for node in self.nodes[1:]:
            self.combine(mask, node.evaluate(block, rows, positions), out=mask)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Null:
    """``is null``, or its negation."""

    attribute: str
    negated: bool

    def evaluate(self, block: Block, rows: Index, positions: Index) -> Mask:
        """Return where the row is null, or is not null."""
        valid = block.valid(self.attribute)
        if valid is None:
            return np.full(len(rows), self.negated)
        return valid[rows] if self.negated else ~valid[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """Whether the value is in the closed interval of the predicate, or its negation.

    Parameters
    ----------
    low, high
        Ends by position in the group; a scalar if all are equal; none if unbounded.
    constants
        For strings, the sorted constants; the ends are their ranks.
    """

    attribute: str
    negated: bool
    low: Array | None
    high: Array | None
    constants: pa.Array | None = None

    def evaluate(self, block: Block, rows: Index, positions: Index) -> Mask:
        """Return where the value is inside, or outside."""
        inside = self._inside(_read_values(block, self, rows), positions)
        return _resolve(inside, block, self, rows)

    def _inside(self, values: Array, positions: Index) -> Mask:
        if self.low is not None and self.low is self.high:
            return np.asarray(values == _pick(self.low, positions))
        if self.low is not None:
            mask = np.asarray(values >= _pick(self.low, positions))
            if self.high is not None:
                mask &= values <= _pick(self.high, positions)
            return mask
        if self.high is not None:
            return np.asarray(values <= _pick(self.high, positions))
        # Literals are finite, so every interval of floats excludes NaN: the values are integers.
        return np.ones(len(values), dtype=np.bool_)

    def encode(self, strings: pa.Array) -> Array:
        """Return the points of the strings on the axis of the constants' ranks."""
        if self.low is not None and self.low is self.high:
            # Equality does not depend on the order of other strings, and hashing is faster.
            return 2 * _find(strings, self.constants) + 1
        constants = _objects(self.constants)
        found = _objects(strings.fill_null(b""))
        ranks = np.searchsorted(constants, found)
        equal = constants[np.minimum(ranks, len(constants) - 1)] == found
        return np.asarray(2 * ranks + equal)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """Whether the value is in the list of the predicate, or its negation.

    Parameters
    ----------
    starts, members
        Sorted list of the predicate at position ``k``: ``members[starts[k]:starts[k + 1]]``.
    constants
        For strings, the constants; the members are their indexes.
    """

    attribute: str
    negated: bool
    starts: npt.NDArray[np.int64]
    members: Array
    constants: pa.Array | None = None

    @classmethod
    def of_points(
        cls, attribute: str, negated: bool, lists: Sequence[Sequence[Any]], dtype: np.dtype[Any]
    ) -> Member:
        """Build from one list of stored values per predicate."""
        members = [point for points in lists for point in sorted(points)]
        return cls(attribute, negated, _starts(lists), np.array(members, dtype=dtype))

    @classmethod
    def of_strings(cls, attribute: str, negated: bool, lists: Sequence[Sequence[Any]]) -> Member:
        """Build from one list of strings per predicate."""
        numbers: dict[str, int] = {}
        numbered = [[numbers.setdefault(x, len(numbers)) for x in strings] for strings in lists]
        constants = pa.array([string.encode() for string in numbers], pa.large_binary())
        members = np.array([number for part in numbered for number in sorted(part)], np.int64)
        return cls(attribute, negated, _starts(lists), members, constants)

    def evaluate(self, block: Block, rows: Index, positions: Index) -> Mask:
        """Return where the value is in the list, or is not."""
        values = _read_values(block, self, rows)
        listed = _contains(self.members, self.starts, positions, values)
        return _resolve(listed, block, self, rows)

    def encode(self, strings: pa.Array) -> Index:
        """Return the members that equal the strings; -1 if none does."""
        return _find(strings, self.constants)


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Whether the string contains every, or any, of the predicate's words, or its negation.

    Parameters
    ----------
    vocabulary
        The distinct case-folded words, in the order of their numbers.
    starts, members
        Words of the predicate at position ``k``: ``members[starts[k]:starts[k + 1]]``.
    """

    attribute: str
    negated: bool
    every: bool
    vocabulary: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    members: npt.NDArray[np.int64]

    @classmethod
    def build(
        cls, attribute: str, negated: bool, every: bool, lists: Sequence[Sequence[Any]]
    ) -> Words:
        """Build from one list per predicate; raises ValueError for anything but single words."""
        if not all(is_word(word) for words in lists for word in words):
            raise ValueError("only single words can be searched for")
        numbers: dict[str, int] = {}
        members = [
            numbers.setdefault(word.casefold(), len(numbers)) for words in lists for word in words
        ]
        starts, ids = _starts(lists), np.array(members, dtype=np.int64)
        return cls(attribute, negated, every, tuple(numbers), starts, ids)

    def evaluate(self, block: Block, rows: Index, positions: Index) -> Mask:
        """Return where the words are in the string, or are not."""
        column, index = block.strings(self.attribute), block.words(self.attribute)
        words = block.cached(self, lambda: self._number_words(index))
        counts = np.diff(self.starts)[positions]
        ends = np.cumsum(counts)
        found = np.empty(len(positions), dtype=np.bool_)
        begin = 0
        while begin < len(positions):
            done = ends[begin] - counts[begin]
            end = max(int(np.searchsorted(ends, done + _WORDS_AT_ONCE, "right")), begin + 1)
            codes = column.codes[rows[begin:end]]
            found[begin:end] = self._search(index, words, codes, positions[begin:end])
            begin = end
        return _resolve(found, block, self, rows)

    def _number_words(self, index: WordIndex) -> npt.NDArray[np.int64]:
        """Return the numbers of the members in the block; -1 for words not in the block."""
        numbers = np.array([index.numbers.get(word, -1) for word in self.vocabulary])
        return np.asarray(numbers[self.members])

    def _search(
        self, index: WordIndex, words: npt.NDArray[np.int64], codes: Index, positions: Index
    ) -> Mask:
        counts = self.starts[positions + 1] - self.starts[positions]
        firsts = np.cumsum(counts) - counts
        at = np.arange(counts.sum()) + np.repeat(self.starts[positions] - firsts, counts)
        present = _contains(index.members, index.starts, np.repeat(codes, counts), words[at])
        hits = np.add.reduceat(present.astype(np.int64), firsts)
        return np.asarray(hits == counts if self.every else hits > 0)


def _starts(lists: Sequence[Sequence[Any]]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


def _contains(members: Array, starts: npt.NDArray[np.int64], lists: Index, values: Array) -> Mask:
    """Return for each pair of list and value whether the list contains the value.

    A binary search of all pairs at once, each in its own sorted list
    ``members[starts[k]:starts[k + 1]]``; the longest list determines the number of steps.
    """
    if len(members) == 0:
        return np.zeros(len(values), dtype=np.bool_)
    at, end = starts[lists], starts[lists + 1]
    for bit in reversed(range(int(np.diff(starts).max()).bit_length())):
        ahead = at + (1 << bit)
        below = members[np.minimum(ahead, len(members)) - 1] < values
        at = np.where((ahead <= end) & below, ahead, at)
    return np.asarray((at < end) & (members[np.minimum(at, len(members) - 1)] == values))


def _read_values(block: Block, node: Within | Member, rows: Index) -> Array:
    """Return the value of each pair; encodes distinct strings once."""
    if node.constants is None:
        return np.asarray(block.numbers(node.attribute)[rows])
    strings = block.strings(node.attribute)
    codes, dictionary = strings.codes[rows], strings.dictionary
    if len(codes) < len(dictionary):
        used, codes = np.unique(codes, return_inverse=True)
        by_code = node.encode(dictionary.take(pa.array(used)))
    else:
        by_code = block.cached(node, lambda: node.encode(dictionary))
    return np.asarray(by_code[codes])


def _pick(bounds: Array, positions: Index) -> Array:
    return bounds[positions] if bounds.ndim else bounds


def _resolve(mask: Mask, block: Block, node: Within | Member | Words, rows: Index) -> Mask:
    """Return the certain results: negated if requested, and never true for null rows."""
    valid = block.valid(node.attribute)
    if node.negated:
        mask = ~mask
    return mask if valid is None else mask & valid[rows]


def _find(strings: pa.Array, constants: pa.Array) -> Index:
    """Return the index of the constant that equals each string; -1 if none does."""
    return np.asarray(pc.index_in(strings, constants).fill_null(-1)).astype(np.int64)


def _objects(strings: pa.Array) -> Array:
    objects = np.empty(len(strings), dtype=object)
    objects[:] = strings.to_pylist()
    return objects
