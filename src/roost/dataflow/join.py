"""Join and Product on one machine: pairs of the tuples of the buckets that it owns.

The state is the tuples of both sides. Pairs of a time window are emitted in the batch in which
their second tuple arrives; a window of tuples per key waits until the watermark has passed a tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from roost.dataflow.blocks import (
    BUCKET,
    ORDER,
    TIME,
    Mine,
    OldState,
    Ran,
    expand,
    full_order,
    sort_order,
    stamped,
    times_of,
)
from roost.dataflow.groups import dense, encode, place, places_with
from roost.dataflow.operators import Join, Product, WindowBy
from roost.dataflow.order import key_bytes, made_order
from roost.dataflow.schema import Node
from roost.model.arrays import as_arrow, as_numpy, frozen
from roost.model.columns import one_array
from roost.model.records import TIME_MAX, TIME_MIN
from roost.predicate.pairs import PairPredicate

SIDES = ("left", "right")
PAIRS_AT_ONCE = 1 << 20
Integers = NDArray[np.int64]


@njit(cache=True, nogil=True)
def _time_ranges(
    codes: Integers, times: Integers, starts: Integers, others: Integers, size: int,
    low: Integers, high: Integers,
) -> None:  # fmt: skip  # pragma: no cover - compiled
    """Find the tuples of the other side that have a tuple's key and are within the window.

    The tuples of code ``c`` have the times ``others[starts[c]:starts[c + 1]]``, ascending.
    """
    for row in range(codes.size):
        begin, end = starts[codes[row]], starts[codes[row] + 1]
        low[row] = begin + np.searchsorted(others[begin:end], times[row] - size + 1)
        high[row] = begin + np.searchsorted(others[begin:end], times[row] + size)


def time_ranges(
    codes: Integers, times: Integers, starts: Integers, others: Integers, size: int
) -> tuple[Integers, Integers]:
    """Return the range of tuples of the other side that each tuple meets; see the loop."""
    low, high = np.empty((2, codes.size), np.int64)
    _time_ranges(frozen(codes), frozen(times), frozen(starts), frozen(others), size, low, high)
    return low, high


@dataclass(frozen=True)
class PairWork:
    """A Join or Product on one machine; ``ordered`` where a later operator needs the order."""

    node: Node
    ordered: bool
    cells: Any = None  # of a Product: pairs of left and right bucket that the machine owns
    mine: Mine | None = None  # while buckets move: which pairs the machine computes
    width: int = 0  # of a Product's grid

    @cached_property
    def window(self) -> WindowBy:
        """What bounds the windows."""
        assert isinstance(self.node.operator, Join | Product)
        return self.node.operator.window.by

    @cached_property
    def condition(self) -> PairPredicate:
        """The condition, compiled."""
        assert isinstance(self.node.operator, Join | Product)
        left, right = self.node.inputs
        return PairPredicate(self.node.operator.condition, left.columns, right.columns)

    @cached_property
    def rest(self) -> PairPredicate | None:
        """The condition on tuples whose keys are equal."""
        return self.condition.without_equalities(list(zip(*self.node.keys, strict=True)))

    @property
    def size(self) -> int:
        """Size of the window."""
        assert self.node.size is not None
        return self.node.size

    def run(
        self, inputs: Sequence[pa.Table | None], old: Sequence[OldState], before: int, after: int
    ) -> Ran:
        """Pair a batch; the watermark of the inputs was ``before`` and is ``after``."""
        fresh = [self._fresh(k, table) for k, table in enumerate(inputs)]
        if self.window is WindowBy.TUPLES:
            return self._run_tuples(fresh, old, before, after)
        found = self._pairs(fresh, old) if any(table.num_rows for table in fresh) else []
        state, until = {}, TIME_MIN
        for k, side in enumerate(SIDES):
            merged = (one.tables[side] for one in old if one.merge)
            rows = pa.concat_tables([fresh[k], *merged])
            ends = times_of(rows) + self.size
            live = ends > after
            state[side] = rows.filter(pa.array(live))
            until = max(until, int(ends[live].max(initial=TIME_MIN)))
        output = pa.concat_tables(found) if found else None
        return Ran(output, state, until)

    def _pairs(self, fresh: Sequence[pa.Table], old: Sequence[OldState]) -> list[pa.Table]:
        """Return the pairs in which at least one tuple is new."""
        # The new tuples are first.
        tables = [
            pa.concat_tables([fresh[k], *(state.tables[side] for state in old)]).combine_chunks()
            for k, side in enumerate(SIDES)
        ]
        counts = [table.num_rows for table in fresh]
        find = self._product if isinstance(self.node.operator, Product) else self._equal
        found = []
        for a, b in _joined(find(tables, counts)):
            if self.mine is not None:
                a, b = self._own_pairs(tables, a, b)
            if a.size:
                found.append(self._emit(tables[0], tables[1], a, b))
        return found

    def _fresh(self, side: int, table: pa.Table | None) -> pa.Table:
        """Return the tuples of a side with the columns that are stored."""
        stream = self.node.inputs[side]
        own = [(TIME, pa.int64()), (BUCKET, pa.int32())]
        if self.ordered or self.window is WindowBy.TUPLES:
            own.append((ORDER, pa.binary()))
        schema = pa.schema([*stream.columns, *own])
        if table is None:
            return schema.empty_table()
        return table.select(schema.names).cast(schema)

    def _own_pairs(
        self, tables: Sequence[pa.Table], a: Integers, b: Integers
    ) -> tuple[Integers, Integers]:
        """Return the pairs that this machine computes."""
        left, right = tables
        assert self.mine is not None
        buckets = as_numpy(one_array(left[BUCKET])).astype(np.int64)[a]
        if isinstance(self.node.operator, Product):
            buckets = buckets * self.width + as_numpy(one_array(right[BUCKET]))[b]
        mine = self.mine(buckets, np.minimum(times_of(left)[a], times_of(right)[b]))
        return a[mine], b[mine]

    def _codes(self, left: pa.Table, right: pa.Table) -> tuple[Integers, Integers]:
        """Return a number per tuple of both sides, equal where their keys are."""
        columns = []
        for a, b in zip(*self.node.keys, strict=True):
            both = [one_array(left[a]), one_array(right[b])]
            if both[0].type != both[1].type:
                wide = pa.int64() if pa.types.is_integer(both[0].type) else pa.string()
                both = [column.cast(wide) for column in both]
            columns.append(pa.concat_arrays(both))
        codes = dense(encode(columns, left.num_rows + right.num_rows))
        return codes[: left.num_rows], codes[left.num_rows :]

    def _equal(
        self, tables: Sequence[pa.Table], fresh: Sequence[int]
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield pairs of tuples with equal keys, within the window, that satisfy the condition."""
        codes, times = self._codes(*tables), [times_of(table) for table in tables]
        size = max(int(one.max(initial=-1)) for one in codes) + 1
        condition = None if self.rest is None else self.rest.on(*tables)
        for mine, count in _met(tables, fresh):
            # Most of the state has other keys than the new tuples.
            left = places_with(codes[0][mine], codes[1][:count]) + mine.start
            order = places_with(codes[1][:count], codes[0][mine])
            order = order[np.argsort(times[1][order], kind="stable")]
            starts, placed = place(codes[1][order], size)
            order = order[placed]
            low, high = time_ranges(
                codes[0][left], times[0][left], starts, times[1][order], self.size
            )
            for places, rows in _chunks(low, high):
                a, b = left[rows], order[places]
                if condition is not None:
                    kept = condition.evaluate(a, b)
                    a, b = a[kept], b[kept]
                yield a, b

    def _product(
        self, tables: Sequence[pa.Table], fresh: Sequence[int]
    ) -> Iterator[tuple[Integers, Integers]]:
        """Yield pairs of tuples in the cells of the machine, within the window, likewise."""
        names = [
            [name for name in table.column_names if f"{side}.{name}" in self.condition.attributes]
            for side, table in zip(SIDES, tables, strict=True)
        ]
        times = [times_of(table) for table in tables]
        owners = [as_numpy(one_array(table[BUCKET])) for table in tables]
        for buckets in _rectangles(self.cells):
            for mine, count in _met(tables, fresh):
                rows = []
                for k, part in enumerate((mine, slice(0, count))):
                    of = np.flatnonzero(np.isin(owners[k][part], buckets[k])) + part.start
                    rows.append(of[np.argsort(times[k][of], kind="stable")])
                left, right = (times[k][of] for k, of in enumerate(rows))
                low = np.searchsorted(right, left - self.size + 1)
                high = np.searchsorted(right, left + self.size)
                block = self.condition.on(
                    *(tables[k].select(names[k]).take(as_arrow(of)) for k, of in enumerate(rows))
                )
                yield from ((rows[0][a], rows[1][b]) for a, b in block.within(low, high))

    def _emit(self, left: pa.Table, right: pa.Table, a: Integers, b: Integers) -> pa.Table:
        assert self.node.output is not None
        rows = [left.take(as_arrow(a)), right.take(as_arrow(b))]
        times = np.maximum(times_of(rows[0]), times_of(rows[1]))
        columns = [
            one_array(table[name])
            for table, stream in zip(rows, self.node.inputs, strict=True)
            for name in stream.columns.names
        ]
        order = None
        if self.ordered:
            keys = self.node.keys[0] if self.node.keys else ()
            key = key_bytes([rows[0][name] for name in keys], a.size)
            parts = [key, *full_order(rows[0]), *full_order(rows[1])]
            order = made_order(self.node.number, parts, a.size)
        return stamped(self.node.output, times, columns, order)

    def _run_tuples(
        self, fresh: Sequence[pa.Table], old: Sequence[OldState], before: int, after: int
    ) -> Ran:
        """Pair each tuple with the last ones of the other side that have its key.

        A tuple does so in the batch in which the watermark passes it. Later its file is only read:
        tuples that newer ones have replaced are left out when files are merged.
        """
        sides, written = [], []
        for k, side in enumerate(SIDES):
            tables = [fresh[k], *(state.tables[side] for state in old)]
            sides.append(pa.concat_tables(tables).combine_chunks())
            sizes = [table.num_rows for table in tables]
            written.append(np.repeat([True, *(state.merge for state in old)], sizes))
        left, right = sides
        codes = self._codes(left, right)
        condition = None if self.rest is None else self.rest.on(left, right)
        times = [times_of(table) for table in sides]
        ready = [t < after if after != TIME_MAX else np.full(t.size, True) for t in times]
        waited = [t >= before if before != TIME_MAX else np.full(t.size, False) for t in times]
        place = self._positions(sides)
        found, kept = [], []
        for k in (0, 1):
            other = 1 - k
            theirs = np.flatnonzero(ready[other])
            theirs = theirs[np.lexsort((place[other][theirs], codes[other][theirs]))]
            mine = np.flatnonzero(ready[k] & waited[k])
            # Among the other side's tuples of the key, those before this one in tuple order.
            width = place[0].size + place[1].size + 1
            ranks = codes[other][theirs] * width + place[other][theirs]
            high = np.searchsorted(ranks, codes[k][mine] * width + place[k][mine])
            begin = np.searchsorted(ranks, codes[k][mine] * width)
            low = np.maximum(begin, high - self.size)
            for places, rows in _chunks(low, high):
                pair = (mine[rows], theirs[places]) if k == 0 else (theirs[places], mine[rows])
                if condition is not None:
                    met = condition.evaluate(*pair)
                    pair = pair[0][met], pair[1][met]
                if pair[0].size:
                    found.append(self._emit(left, right, *pair))
        state = {}
        for k, side in enumerate(SIDES):
            keep = ~ready[k] | self._last(codes[k], place[k], ready[k])
            state[side] = sides[k].filter(pa.array(keep & written[k]))
            kept.append(state[side].num_rows)
        return Ran(pa.concat_tables(found) if found else None, state if sum(kept) else {}, TIME_MAX)

    def _positions(self, sides: Sequence[pa.Table]) -> list[Integers]:
        """Return the place of each tuple among both sides; a left one is before its equal."""
        both = pa.concat_tables([table.select([TIME, ORDER]) for table in sides])
        order = sort_order(both)  # stable, and the left side is first
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        return [place[: sides[0].num_rows], place[sides[0].num_rows :]]

    def _last(
        self, codes: Integers, place: Integers, ready: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which tuples are among the last ones of their key that are ready."""
        rows = np.flatnonzero(ready)
        order = rows[np.lexsort((place[rows], codes[rows]))]
        ends = np.searchsorted(codes[order], codes[order], side="right")
        last = np.zeros(codes.size, bool)
        last[order[ends - np.arange(order.size) <= self.size]] = True
        return last


def _met(tables: Sequence[pa.Table], fresh: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield left tuples and the number of right ones to pair: at least one of a pair is new."""
    if fresh[0] and tables[1].num_rows:
        yield slice(0, fresh[0]), tables[1].num_rows
    if fresh[1] and tables[0].num_rows > fresh[0]:
        yield slice(fresh[0], tables[0].num_rows), fresh[1]


def _rectangles(cells: Iterable[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """Return left and right buckets, all pairs of which are cells; each cell is in one of them."""
    rights: dict[int, list[int]] = {}
    for a, b in sorted(cells):
        rights.setdefault(a, []).append(b)
    lefts: dict[tuple[int, ...], list[int]] = {}
    for a, bs in rights.items():
        lefts.setdefault(tuple(bs), []).append(a)
    return [(of, list(bs)) for bs, of in lefts.items()]


def _joined(chunks: Iterator[tuple[Integers, Integers]]) -> Iterator[tuple[Integers, Integers]]:
    """Join small chunks of pairs: emitting them has a cost per call."""
    waiting: list[tuple[Integers, Integers]] = []
    size = 0
    for chunk in chunks:
        if chunk[0].size:
            waiting.append(chunk)
        size += chunk[0].size
        if size >= PAIRS_AT_ONCE:
            yield _both(waiting)
            waiting, size = [], 0
    if waiting:
        yield _both(waiting)


def _both(chunks: Sequence[tuple[Integers, Integers]]) -> tuple[Integers, Integers]:
    return np.concatenate([a for a, _ in chunks]), np.concatenate([b for _, b in chunks])


def _chunks(low: Integers, high: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Expand ranges in chunks of about ``PAIRS_AT_ONCE``: places and rows."""
    counts = np.maximum(high - low, 0)
    ends = np.cumsum(counts)
    begin = 0
    while begin < counts.size:
        done = ends[begin] - counts[begin]
        stop = max(int(np.searchsorted(ends, done + PAIRS_AT_ONCE, "right")), begin + 1)
        places, rows = expand(low[begin:stop], high[begin:stop])
        if places.size:
            yield places, rows + begin
        begin = stop
