"""Join and Product on one machine: pairs of the tuples of the buckets that it owns.

The state is the tuples of both sides. Pairs of a time window are emitted in the batch in which
their second tuple arrives; a window of tuples per key waits until the watermark has passed a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from roost.dataflow.groups import encode
from roost.dataflow.operators import Join, Product, WindowBy
from roost.dataflow.order import key_bytes, made_order
from roost.dataflow.schema import Node
from roost.model.arrays import as_arrow, as_numpy, frozen
from roost.model.columns import one_array
from roost.model.records import TIME_MAX, TIME_MIN
from roost.predicate.pairs import PairPredicate

SIDES = ("left", "right")
PAIRS_AT_ONCE = 1 << 20
DONE = "__done"  # whether a tuple has met those before it
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

    @property
    def rewrites(self) -> bool:
        """Whether every batch replaces all of the state."""
        return self.window is WindowBy.TUPLES

    @cached_property
    def condition(self) -> PairPredicate:
        """The condition, compiled."""
        assert isinstance(self.node.operator, Join | Product)
        left, right = self.node.inputs
        return PairPredicate(self.node.operator.condition, left.columns, right.columns)

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
            return self._run_tuples(fresh, old, after)
        stored = [
            pa.concat_tables([fresh[k].slice(0, 0), *(state.tables[side] for state in old)])
            for k, side in enumerate(SIDES)
        ]
        pairs = [(fresh[0], stored[1]), (stored[0], fresh[1]), (fresh[0], fresh[1])]
        found = [
            block
            for left, right in pairs
            if left.num_rows and right.num_rows
            for block in self._pairs(left, right)
        ]
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

    def _fresh(self, side: int, table: pa.Table | None) -> pa.Table:
        """Return the tuples of a side with the columns that are stored."""
        stream = self.node.inputs[side]
        own = [(TIME, pa.int64()), (BUCKET, pa.int32())]
        if self.ordered or self.rewrites:
            own.append((ORDER, pa.binary()))
        schema = pa.schema([*stream.columns, *own])
        if table is None:
            return schema.empty_table()
        return table.select(schema.names).cast(schema)

    def _pairs(self, left: pa.Table, right: pa.Table) -> Iterator[pa.Table]:
        """Yield the pairs of two tables within the time window."""
        if isinstance(self.node.operator, Product):
            candidates = self._product(left, right)
        else:
            candidates = self._equal(left, right)
        for a, b in _joined(candidates):
            if self.mine is not None:
                a, b = self._own_pairs(left, right, a, b)
            if not a.size:
                continue
            kept = self.condition.evaluate(left, right, a, b)
            if kept.any():
                yield self._emit(left, right, a[kept], b[kept])

    def _own_pairs(
        self, left: pa.Table, right: pa.Table, a: Integers, b: Integers
    ) -> tuple[Integers, Integers]:
        """Return the pairs that this machine computes."""
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
        codes = encode(columns, left.num_rows + right.num_rows)
        dense = np.unique(codes, return_inverse=True)[1].astype(np.int64)
        return dense[: left.num_rows], dense[left.num_rows :]

    def _equal(self, left: pa.Table, right: pa.Table) -> Iterator[tuple[Integers, Integers]]:
        """Yield pairs of rows with equal keys, within the window."""
        mine, theirs = self._codes(left, right)
        times = times_of(right)
        order = np.lexsort((times, theirs))
        starts = np.searchsorted(theirs[order], np.arange(max(mine.max(), theirs.max()) + 2))
        low, high = time_ranges(mine, times_of(left), starts, times[order], self.size)
        yield from ((rows, order[places]) for places, rows in _chunks(low, high))

    def _product(self, left: pa.Table, right: pa.Table) -> Iterator[tuple[Integers, Integers]]:
        """Yield pairs of rows in the cells of the machine, within the window."""
        sides = [as_numpy(one_array(table[BUCKET])) for table in (left, right)]
        times = times_of(left), times_of(right)
        for a, b in self.cells:
            mine, theirs = np.flatnonzero(sides[0] == a), np.flatnonzero(sides[1] == b)
            theirs = theirs[np.argsort(times[1][theirs], kind="stable")]
            low = np.searchsorted(times[1][theirs], times[0][mine] - self.size + 1)
            high = np.searchsorted(times[1][theirs], times[0][mine] + self.size)
            yield from ((mine[rows], theirs[places]) for places, rows in _chunks(low, high))

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

    def _run_tuples(self, fresh: Sequence[pa.Table], old: Sequence[OldState], after: int) -> Ran:
        """Pair each tuple with the last ones of the other side that have its key."""
        sides = []
        for k, side in enumerate(SIDES):
            new = fresh[k].append_column(DONE, pa.array(np.zeros(fresh[k].num_rows, bool)))
            sides.append(pa.concat_tables([new, *(state.tables[side] for state in old)]))
        left, right = sides
        codes = self._codes(left, right)
        times = [times_of(table) for table in sides]
        ready = [np.full(t.size, True) if after == TIME_MAX else t < after for t in times]
        place = self._positions(sides)
        found, kept = [], []
        for k in (0, 1):
            other = 1 - k
            theirs = np.flatnonzero(ready[other])
            theirs = theirs[np.lexsort((place[other][theirs], codes[other][theirs]))]
            done = np.asarray(one_array(sides[k][DONE]))
            mine = np.flatnonzero(ready[k] & ~done)
            # Among the other side's tuples of the key, those before this one in tuple order.
            width = place[0].size + place[1].size + 1
            ranks = codes[other][theirs] * width + place[other][theirs]
            high = np.searchsorted(ranks, codes[k][mine] * width + place[k][mine])
            begin = np.searchsorted(ranks, codes[k][mine] * width)
            low = np.maximum(begin, high - self.size)
            for places, rows in _chunks(low, high):
                pair = (mine[rows], theirs[places]) if k == 0 else (theirs[places], mine[rows])
                met = self.condition.evaluate(left, right, *pair)
                if met.any():
                    found.append(self._emit(left, right, pair[0][met], pair[1][met]))
        state = {}
        for k, side in enumerate(SIDES):
            keep = ~ready[k] | self._last(codes[k], place[k], ready[k])
            table = sides[k].drop_columns([DONE]).append_column(DONE, pa.array(ready[k]))
            state[side] = table.filter(pa.array(keep))
            kept.append(int(keep.sum()))
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


def _joined(chunks: Iterator[tuple[Integers, Integers]]) -> Iterator[tuple[Integers, Integers]]:
    """Join small chunks of pairs: evaluating a condition has a cost per call."""
    waiting: list[tuple[Integers, Integers]] = []
    size = 0
    for chunk in chunks:
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
