"""Deciding one condition for many (predicate, row) pairs at once, each with its own constants.

A compiled condition stands for the same condition of a whole group of predicates, with arrays of
their constants. `decide` takes, for each pair, the row and the predicate's place in the group.
Negations have been pushed down to the conditions, so each answers only where it is *certainly*
true (or, if negated, certainly false): a null row never qualifies, and ``and``/``or`` of such
answers is SQL's three-valued logic without a third value.

Text costs per distinct value of the block, not per pair: values are first placed among the
constants of the group, and pairs compare integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from roost.predicate.ast import is_word
from roost.predicate.axis import Array
from roost.predicate.columns import Block, Index, Mask, TextColumn, WordIndex

#: So many (pair, word) combinations are looked up at a time.
_WORDS_AT_ONCE = 1 << 22


class Node(Protocol):
    """Something that can be decided for pairs."""

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return for which pairs of row and place in the group the answer is certainly yes."""


@dataclass(frozen=True, slots=True, eq=False)
class AllOf:
    """Certainly all."""

    nodes: tuple[Node, ...]

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return where every node says yes."""
        mask = self.nodes[0].decide(block, rows, places)
        for node in self.nodes[1:]:
            mask &= node.decide(block, rows, places)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class AnyOf:
    """Certainly any."""

    nodes: tuple[Node, ...]

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return where some node says yes."""
        mask = self.nodes[0].decide(block, rows, places)
        for node in self.nodes[1:]:
            mask |= node.decide(block, rows, places)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Null:
    """``is null``, or its negation."""

    attribute: str
    negated: bool

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return where the row has no value, or has one."""
        valid = block.valid(self.attribute)
        if valid is None:
            return np.full(len(rows), self.negated)
        return valid[rows] if self.negated else ~valid[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """The value lies in each predicate's closed interval, or does not.

    Parameters
    ----------
    attribute, negated
        What is tested, and whether for the contrary.
    low, high
        Ends by place in the group; one number where all agree; none where it excludes nothing.
    constants
        For text, the sorted constants whose ranks the ends are.
    """

    attribute: str
    negated: bool
    low: Array | None
    high: Array | None
    constants: pa.Array | None = None

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return where the value is inside, or outside."""
        if self.constants is None:
            column = block.numbers(self.attribute)
            values, valid = column.values[rows], column.valid
        else:
            text = block.text(self.attribute)
            values, valid = _by_code(block, self, text, rows, self._ranks), text.valid
        return _settle(self._inside(values, places), self.negated, valid, rows)

    def _inside(self, values: Array, places: Index) -> Mask:
        if self.low is not None and self.low is self.high:
            return np.asarray(values == _pick(self.low, places))
        if self.low is not None:
            mask = np.asarray(values >= _pick(self.low, places))
            if self.high is not None:
                mask &= values <= _pick(self.high, places)
            return mask
        if self.high is not None:
            return np.asarray(values <= _pick(self.high, places))
        # Literals are finite, so every interval of floats excludes NaN: these are integers.
        return np.ones(len(values), dtype=np.bool_)

    def _ranks(self, texts: pa.Array) -> Array:
        """Return the texts' points on the axis of the constants' ranks."""
        if self.low is not None and self.low is self.high:
            # For equality alone the order of the others does not matter, and hashing is faster.
            return 2 * _find(texts, self.constants) + 1
        constants = _objects(self.constants)
        found = _objects(texts.fill_null(b""))
        ranks = np.searchsorted(constants, found)
        equal = constants[np.minimum(ranks, len(constants) - 1)] == found
        return np.asarray(2 * ranks + equal)


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The value is in each predicate's list, or is not.

    Parameters
    ----------
    attribute, negated
        What is tested, and whether for the contrary.
    starts, members
        Sorted list of the predicate at place ``k``: ``members[starts[k]:starts[k + 1]]``.
    constants
        For text, the constants whose numbers the members are.
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
        """Build from one list of stored values per place."""
        members = [point for points in lists for point in sorted(points)]
        return cls(attribute, negated, _starts(lists), np.array(members, dtype=dtype))

    @classmethod
    def of_texts(cls, attribute: str, negated: bool, lists: Sequence[Sequence[Any]]) -> Member:
        """Build from one list of texts per place."""
        numbers: dict[str, int] = {}
        numbered = [[numbers.setdefault(text, len(numbers)) for text in texts] for texts in lists]
        constants = pa.array([text.encode() for text in numbers], pa.large_binary())
        members = np.array([number for part in numbered for number in sorted(part)], np.int64)
        return cls(attribute, negated, _starts(lists), members, constants)

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return where the value is in the list, or is not."""
        if self.constants is None:
            column = block.numbers(self.attribute)
            values, valid = column.values[rows], column.valid
        else:
            text = block.text(self.attribute)
            values, valid = _by_code(block, self, text, rows, self._find), text.valid
        listed = _contains(self.members, self.starts, places, values)
        return _settle(listed, self.negated, valid, rows)

    def _find(self, texts: pa.Array) -> Index:
        return _find(texts, self.constants)


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The text contains all, or any, of each predicate's words; or does not.

    Parameters
    ----------
    attribute, negated
        What is tested, and whether for the contrary.
    every
        Whether all words must be there.
    vocabulary
        The distinct case-folded words, in the order of their numbers.
    starts, members
        Words of the predicate at place ``k``: ``members[starts[k]:starts[k + 1]]``.
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
        """Build from one list per place; raises ValueError for what is not a single word."""
        if not all(is_word(word) for words in lists for word in words):
            raise ValueError("only single words can be searched for")
        numbers: dict[str, int] = {}
        members = [
            numbers.setdefault(word.casefold(), len(numbers)) for words in lists for word in words
        ]
        starts, ids = _starts(lists), np.array(members, dtype=np.int64)
        return cls(attribute, negated, every, tuple(numbers), starts, ids)

    def decide(self, block: Block, rows: Index, places: Index) -> Mask:
        """Return where the words are in the text, or are not."""
        text, index = block.text(self.attribute), block.words(self.attribute)
        wanted = block.keep(self, lambda: self._wanted(index))
        counts = np.diff(self.starts)[places]
        ends = np.cumsum(counts)
        found = np.empty(len(places), dtype=np.bool_)
        begin = 0
        while begin < len(places):
            done = ends[begin] - counts[begin]
            end = max(int(np.searchsorted(ends, done + _WORDS_AT_ONCE, "right")), begin + 1)
            codes = text.codes[rows[begin:end]]
            found[begin:end] = self._search(index, wanted, codes, places[begin:end])
            begin = end
        return _settle(found, self.negated, text.valid, rows)

    def _wanted(self, index: WordIndex) -> npt.NDArray[np.int64]:
        """Return the members as numbers of the block's words; -1 where the block has none."""
        numbers = np.array([index.numbers.get(word, -1) for word in self.vocabulary])
        return np.asarray(numbers[self.members])

    def _search(
        self, index: WordIndex, wanted: npt.NDArray[np.int64], codes: Index, places: Index
    ) -> Mask:
        counts = self.starts[places + 1] - self.starts[places]
        firsts = np.cumsum(counts) - counts
        at = np.arange(counts.sum()) + np.repeat(self.starts[places] - firsts, counts)
        present = _contains(index.members, index.starts, np.repeat(codes, counts), wanted[at])
        hits = np.add.reduceat(present.astype(np.int64), firsts)
        return np.asarray(hits == counts if self.every else hits > 0)


def _starts(lists: Sequence[Sequence[Any]]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


def _contains(members: Array, starts: npt.NDArray[np.int64], lists: Index, values: Array) -> Mask:
    """Return for each pair of list and value whether the list contains the value.

    All pairs search their own sorted list ``members[starts[k]:starts[k + 1]]`` at once, in as many
    steps as the longest list needs.
    """
    if len(members) == 0:
        return np.zeros(len(values), dtype=np.bool_)
    at, end = starts[lists], starts[lists + 1]
    for bit in reversed(range(int(np.diff(starts).max()).bit_length())):
        ahead = at + (1 << bit)
        below = members[np.minimum(ahead, len(members)) - 1] < values
        at = np.where((ahead <= end) & below, ahead, at)
    return np.asarray((at < end) & (members[np.minimum(at, len(members) - 1)] == values))


def _pick(bounds: Array, places: Index) -> Array:
    return bounds[places] if bounds.ndim else bounds


def _settle(mask: Mask, negated: bool, valid: Mask | None, rows: Index) -> Mask:
    """Return the certain answers: of the contrary if negated, and never for null rows."""
    if negated:
        mask = ~mask
    return mask if valid is None else mask & valid[rows]


def _find(texts: pa.Array, constants: pa.Array) -> Index:
    """Return which constant each text is; -1 where it is none."""
    return np.asarray(pc.index_in(texts, constants).fill_null(-1)).astype(np.int64)


def _objects(texts: pa.Array) -> Array:
    objects = np.empty(len(texts), dtype=object)
    objects[:] = texts.to_pylist()
    return objects


def _by_code(
    block: Block, key: object, text: TextColumn, rows: Index, place: Callable[[pa.Array], Array]
) -> Array:
    """Return what a function gives for each pair's text, calling it once per distinct text."""
    codes = text.codes[rows]
    if len(codes) < len(text.dictionary):
        used, texts = np.unique(codes, return_inverse=True)
        return place(text.dictionary.take(pa.array(used)))[texts]
    by_code: Array = block.keep(key, lambda: place(text.dictionary))
    return by_code[codes]
