"""Partial results of aggregate functions for many groups of tuples at once.

Counts, exact sums, spreads and distinct counts are those of :mod:`roost.window.grouped`. Added here
are functions that pick tuples (:class:`Picks`), quantiles that a replay repeats
(:class:`Quantiles`), and functions of the user (:class:`UserStates`).
"""

from __future__ import annotations

import operator
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from roost.dataflow.blocks import ORDER, TIME
from roost.dataflow.functions import Function
from roost.model.arrays import as_arrow
from roost.window.grouped import (
    Contribution,
    Counts,
    DistinctSketches,
    Grouped,
    Groups,
    Sketches,
    Spreads,
    Stored,
    Totals,
    Values,
    doubles,
)

CLASSES: dict[str, type[Grouped]] = {
    "count": Counts,
    "sum": Totals,
    "avg": Totals,
    "stddev": Spreads,
    "distinct": DistinctSketches,
}


Failed = dict[int, str]
"""Groups for which a function failed, and why."""


class RowsFailedError(Exception):
    """A function of the user raised for single rows of a table."""

    def __init__(self, rows: Failed) -> None:
        super().__init__(f"a function raised for {len(rows)} rows")
        self.rows = rows


def problem_of(error: Exception) -> str:
    """Return the text of an error of a user's function."""
    return f"{type(error).__name__}: {error}"


def ranks(column: pa.Array) -> NDArray[np.int64]:
    """Return numbers in the order of the values, equal where they are; NaN is the greatest."""
    if pt.is_floating(column.type):
        return np.asarray(np.unique(doubles(column), return_inverse=True)[1], np.int64)
    if pt.is_boolean(column.type):
        column = column.cast(pa.int8())
    encoded = column.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary)
    rank = np.empty(len(order), np.int64)
    rank[np.asarray(order)] = np.arange(len(order))
    return np.asarray(rank[np.asarray(encoded.indices)])


@dataclass(frozen=True, slots=True)
class Picks(Stored):
    """The first rows of each group by some order: one, or those of ``top``.

    ``rows`` has a struct for each row: what it is ordered by, and its ``value``.
    """

    starts: NDArray[np.int64]
    rows: pa.StructArray

    LAST: ClassVar[frozenset[str]] = frozenset(["max", "last", "top"])

    @classmethod
    def of(cls, function: Function, table: pa.Table, groups: Groups) -> Picks:
        """Pick the rows of each group."""
        by = _column(table, function.columns[0])
        fields: dict[str, pa.Array] = {"value": by}
        if function.kind == "top":
            names = function.columns[1:]
            fields["by"] = by
            fields["value"] = pa.StructArray.from_arrays(
                [_column(table, name) for name in names], list(names)
            )
        if function.ordered:
            fields |= {"time": _column(table, TIME), "order": _column(table, ORDER)}
        struct = pa.StructArray.from_arrays(list(fields.values()), list(fields))
        groups = groups.without_nulls(by)
        slots = np.repeat(np.arange(groups.sizes.size), groups.sizes)
        return cls._picked(function, struct.take(as_arrow(groups.rows)), slots, groups.sizes.size)

    @classmethod
    def merged(cls, function: Function, parts: Sequence[Contribution], size: int) -> Picks:
        """Merge picks into ``size`` slots."""
        chunks, slots = [], []
        for one, picks, targets in parts:
            counts = np.diff(one.starts)[picks]
            ends = np.cumsum(counts)
            places = np.arange(int(counts.sum())) + np.repeat(
                one.starts[picks] - (ends - counts), counts
            )
            chunks.append(one.rows.take(as_arrow(places)))
            slots.append(np.repeat(targets, counts))
        return cls._picked(function, pa.concat_arrays(chunks), np.concatenate(slots), size)

    @classmethod
    def _picked(
        cls, function: Function, rows: pa.StructArray, slots: NDArray[Any], size: int
    ) -> Picks:
        limit = int(function.parameter or 1)
        sign = -1 if function.kind in cls.LAST else 1
        if function.kind in ("first", "last"):
            keys = [ranks(rows.field("order")) * sign, ranks(rows.field("time")) * sign]
        elif function.kind == "top":
            keys = [ranks(rows.field("order")), ranks(rows.field("time"))]
            keys.append(ranks(rows.field("by")) * sign)
        else:
            keys = [ranks(rows.field("value")) * sign]
        order = np.lexsort((*keys, slots))
        counts = np.bincount(slots, minlength=size)
        firsts = np.cumsum(counts) - counts
        kept = order[np.arange(order.size) - np.repeat(firsts, counts) < limit]
        starts = np.concatenate([[0], np.cumsum(np.minimum(counts, limit))])
        return cls(starts, rows.take(as_arrow(kept)))

    def columns(self) -> dict[str, pa.Array]:
        """Return the rows as a column of lists."""
        offsets = as_arrow(self.starts.astype(np.int32))
        return {"rows": pa.ListArray.from_arrays(offsets, self.rows)}

    def facts(self) -> dict[str, Any]:
        """Return no data."""
        return {}

    @classmethod
    def stored(cls, columns: dict[str, pa.Array], facts: dict[str, Any]) -> Picks:
        """Invert :meth:`columns`."""
        lists = columns["rows"]
        offsets = np.asarray(lists.offsets).astype(np.int64)
        return cls(offsets - offsets[0], lists.flatten())

    def result(self, function: Function) -> pa.Array:
        """Return the picked value of each group, or the list of them."""
        values = self.rows.field("value")
        some = self.starts[1:] > self.starts[:-1]
        if function.kind == "top":
            offsets = as_arrow(self.starts.astype(np.int32))
            lists = pa.ListArray.from_arrays(offsets, values, mask=pa.array(~some))
            return lists.cast(function.type)
        return values.take(pa.array(np.where(some, self.starts[:-1], -1), mask=~some))


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column


class Quantiles(Sketches):
    """Quantiles by a KLL sketch whose coins depend on the values, so that a replay repeats them.

    Level ``h`` holds values of weight ``2**h``. Where the values exceed the capacity, the lowest
    full level is sorted and every second value moves up.
    """

    __slots__ = ()

    K: ClassVar[int] = 400  # a rank error of 0.7 %, as of the other quantiles
    LEVEL_MIN: ClassVar[int] = 8

    @staticmethod
    def build(values: pa.Array) -> bytes:
        """Build the sketch of some values, in any order; NaN has no rank."""
        numbers = doubles(values)
        return Quantiles._packed([np.sort(numbers[~np.isnan(numbers)])])

    @staticmethod
    def union(parts: list[bytes]) -> bytes:
        """Merge one or more sketches, in this order."""
        levels: list[NDArray[np.float64]] = []
        for part in parts:
            for height, values in enumerate(Quantiles._levels(part)):
                if height == len(levels):
                    levels.append(np.empty(0))
                levels[height] = np.concatenate([levels[height], values])
        return Quantiles._packed(levels)

    @staticmethod
    def _packed(levels: list[NDArray[np.float64]]) -> bytes:
        height = 0
        while height < len(levels):
            limit = max(
                Quantiles.LEVEL_MIN, int(Quantiles.K * (2 / 3) ** (len(levels) - 1 - height))
            )
            if levels[height].size <= limit:
                height += 1
                continue
            values = np.sort(levels[height])
            odd = values.size % 2
            rest, pairs = values[:odd], values[odd:]
            coin = zlib.crc32(pairs.tobytes()) & 1
            if height + 1 == len(levels):
                levels.append(np.empty(0))
            levels[height] = rest
            levels[height + 1] = np.concatenate([levels[height + 1], pairs[coin::2]])
            height = 0
        sizes = np.array([len(levels), *(level.size for level in levels)], np.float64)
        return np.concatenate([sizes, *levels]).tobytes()

    @staticmethod
    def _levels(data: bytes) -> list[NDArray[np.float64]]:
        numbers = np.frombuffer(data, np.float64)
        count = int(numbers[0])
        borders = np.cumsum(numbers[1 : count + 1]).astype(int)[:-1]
        return np.split(numbers[count + 1 :], borders)

    def results(self, function: str, parameter: float | None) -> Values:
        """Return the estimated values of a rank from 0 to 1."""
        found = [
            None if data is None else self._at(data, parameter) for data in self.sketch.to_pylist()
        ]
        known = np.array([value is not None for value in found], bool)
        return Values(known, np.array([value or 0.0 for value in found], np.float64))

    @staticmethod
    def _at(data: bytes, rank: float | None) -> float | None:
        levels = Quantiles._levels(data)
        values = np.concatenate(levels)
        if not values.size:
            return None
        weights = np.repeat([2.0**h for h in range(len(levels))], [level.size for level in levels])
        order = np.argsort(values, kind="stable")
        below = np.cumsum(weights[order])
        place = int(np.searchsorted(below, (rank or 0.0) * below[-1], side="left"))
        return float(values[order[min(place, values.size - 1)]])


class Apart(NamedTuple):
    """States of one group that the user's ``merge`` raised for; a window that needs them fails."""

    states: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class UserStates(Stored):
    """Pickled partial results of a function of the user."""

    state: pa.Array

    @classmethod
    def of(cls, function: Function, table: pa.Table, groups: Groups) -> UserStates:
        """Call ``partial`` for each group.

        Where it raises, it is called for single rows; :class:`RowsFailedError` names those for
        which it raises again.
        """
        columns = [_column(table, name).take(as_arrow(groups.rows)) for name in function.columns]

        def partial(start: int, stop: int) -> Any:
            return function.user.partial(*(column.slice(start, stop - start) for column in columns))

        states, failed = [], {}
        for start, stop in pairwise(groups.starts.tolist()):
            try:
                states.append(partial(start, stop))
                continue
            except Exception:
                singles = []
            for row in range(start, stop):
                try:
                    singles.append(partial(row, row + 1))
                except Exception as error:
                    failed[int(groups.rows[row])] = problem_of(error)
            states.append(_merged_or_apart(function, singles))
        if failed:
            raise RowsFailedError(failed)
        return cls._pickled(states)

    @classmethod
    def merged(
        cls, function: Function, parts: Sequence[Contribution], size: int, failed: Failed | None
    ) -> UserStates:
        """Call ``merge`` for each slot; without ``failed``, states for which it raises stay."""
        found: list[list[Any]] = [[] for _ in range(size)]
        for one, picks, slots in parts:
            states = one.state.take(as_arrow(picks)).to_pylist()
            for data, slot in zip(states, slots.tolist(), strict=True):
                state = pickle.loads(data)
                found[slot] += state.states if isinstance(state, Apart) else [state]
        if failed is None:
            return cls._pickled([_merged_or_apart(function, states) for states in found])
        return cls._pickled(_each(lambda slot: function.user.merge(found[slot]), size, failed))

    @classmethod
    def _pickled(cls, states: list[Any]) -> UserStates:
        return cls(pa.array([_dumped(state) for state in states], pa.binary()))

    def result(self, function: Function, failed: Failed) -> pa.Array:
        """Call ``finish`` for each group."""
        states = self.state.to_pylist()

        def finish(group: int) -> Any:
            state = pickle.loads(states[group])
            if isinstance(state, Apart):
                state = function.user.merge(list(state.states))
            return function.user.finish(state)

        return _typed(_each(finish, len(states), failed), function.type)


def _dumped(state: Any) -> bytes:
    """Pickle a state; by value if no worker can import its class."""
    try:
        return pickle.dumps(state, 5)
    except Exception:
        return bytes(cloudpickle.dumps(state))


def _merged_or_apart(function: Function, states: list[Any]) -> Any:
    """Return the merged states of a group that is not a whole window."""
    try:
        return function.user.merge(states)
    except Exception:
        return Apart(tuple(states))


def _each(call: Callable[[int], Any], size: int, failed: Failed) -> list[Any]:
    """Call a function of the user for each group; None where it fails."""
    values = []
    for group in range(size):
        try:
            values.append(None if group in failed else call(group))
        except Exception as error:
            failed[group] = problem_of(error)
            values.append(None)
    return values


def _typed(values: list[Any], type_: pa.DataType) -> pa.Array:
    """Return values of the user as a column; raises TypeError where one does not fit."""
    if pt.is_integer(type_):  # Arrow drops fractions silently
        for value in values:
            if value is not None and not isinstance(value, pa.Scalar):
                operator.index(value)
    return pa.array(values, type_)


def whole_results(function: Function, table: pa.Table, groups: Groups, failed: Failed) -> pa.Array:
    """Call ``whole`` for each group; its rows are in tuple order."""
    columns = [_column(table, name).take(as_arrow(groups.rows)) for name in function.columns]
    starts = groups.starts.tolist()

    def whole(group: int) -> Any:
        start, stop = starts[group], starts[group + 1]
        return function.user.whole(*(column.slice(start, stop - start) for column in columns))

    return _typed(_each(whole, len(starts) - 1, failed), function.type)


def accumulate(function: Function, table: pa.Table, groups: Groups) -> Any:
    """Compute the partial results of a function; a null is no value."""
    if function.kind == "partial":
        return UserStates.of(function, table, groups)
    if function.kind not in CLASSES and function.kind != "quantile":
        return Picks.of(function, table, groups)
    if not function.columns:
        return Counts(groups.sizes)
    column = _column(table, function.columns[0])
    kind = Quantiles if function.kind == "quantile" else CLASSES[function.kind]
    return kind.of(column, groups.without_nulls(column))


def merge(
    function: Function, parts: Sequence[Contribution], size: int, failed: Failed | None
) -> Any:
    """Merge partial results into ``size`` slots, each of which some part contributes to.

    Without ``failed``, states for which the user's ``merge`` raises stay apart.
    """
    kind = type(parts[0].grouped)
    if kind is UserStates:
        return kind.merged(function, parts, size, failed)
    return kind.merged(function, parts, size) if kind is Picks else kind.merged(parts, size)


def result(function: Function, grouped: Any, failed: Failed) -> pa.Array:
    """Return the results as a column of the function's type."""
    if isinstance(grouped, UserStates):
        return grouped.result(function, failed)
    if isinstance(grouped, Picks):
        return grouped.result(function)
    if isinstance(grouped, Totals) and function.kind == "sum" and grouped.whole:
        low, high = grouped.limbs.T
        for group in np.flatnonzero(high != high.astype(np.int32)).tolist():
            total = (int(high[group]) << 32) + int(low[group])
            failed[group] = f"the sum {total} exceeds 64 bits"
        return pa.array(low + (high << 32), mask=grouped.n == 0)
    known, numbers, _ = grouped.results(function.kind, function.parameter)
    return pa.array(numbers, mask=~known).cast(function.type)


STORED: dict[str, type[Stored]] = {
    kind.__name__: kind
    for kind in (Counts, Totals, Spreads, DistinctSketches, Quantiles, Picks, UserStates)
}
"""Classes by their name in stored state."""
