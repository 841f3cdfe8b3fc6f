"""Aggregate on one machine: windows of the keys in the buckets that it owns.

Tuples of time windows are aggregated into panes of gcd(size, advance) at once, and a window merges
its panes when the watermark passes its end. Where a function needs all rows of a window, or windows
count tuples, the state is the tuples themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.accumulators import (
    Failed,
    RowsFailedError,
    accumulate,
    result,
    whole_results,
)
from roost.dataflow.blocks import (
    BUCKET,
    ORDER,
    TIME,
    Mine,
    OldState,
    Ran,
    Rejected,
    expand,
    sort_order,
    stamped,
    times_of,
)
from roost.dataflow.cuts import StoredTuples
from roost.dataflow.functions import Function
from roost.dataflow.groups import dense, distinct, encode, group, places_with, slide, slots_of
from roost.dataflow.operators import Aggregate, WindowBy
from roost.dataflow.order import key_bytes, made_order
from roost.dataflow.partials import Partials, compacted, merge_into, slide_into
from roost.dataflow.schema import Node
from roost.errors import DataflowError
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import one_array
from roost.model.records import TIME_MAX, TIME_MIN, Reason
from roost.window.grouped import Groups

PANES = "panes"  # table of the state
SUBTRACTED = frozenset(["count", "sum", "avg"])
"""Functions whose partial results can be subtracted exactly."""
Integers = NDArray[np.int64]


def pane_length(node: Node) -> int:
    """Return the length of the panes of an Aggregate."""
    assert node.advance is not None
    return math.gcd(node.size or node.advance, node.advance)


@dataclass
class AggregateWork:
    """An Aggregate on one machine in one batch.

    ``ordered`` where a later operator needs the tuple order; ``early`` are partial results that
    were made before the exchange; ``rejected`` collects what it rejects.
    """

    node: Node
    ordered: bool
    early: Sequence[Partials] = ()
    rejected: list[Rejected] = field(default_factory=list)
    mine: Mine | None = None  # while buckets move: which windows the machine computes

    @cached_property
    def window(self) -> WindowBy:
        """What bounds the windows."""
        assert isinstance(self.node.operator, Aggregate)
        return self.node.operator.window.by

    @cached_property
    def advance(self) -> int:
        """Advance of the windows."""
        assert self.node.advance is not None
        return self.node.advance

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns to group by."""
        return self.node.keys[0]

    @property
    def mergeable(self) -> bool:
        """Whether partial results replace tuples."""
        functions = self.node.functions
        return self.window is not WindowBy.TUPLES and all(f.mergeable for f in functions)

    @property
    def columns(self) -> list[str]:
        """The columns of the input that the operator reads."""
        own = [TIME, BUCKET, ORDER] if self.node.ordered else [TIME, BUCKET]
        return [*own, *self.node.reads(0)]

    @cached_property
    def pane(self) -> int:
        """Length of a pane."""
        return pane_length(self.node)

    def run(
        self, inputs: Sequence[pa.Table | None], old: Sequence[OldState], before: int, after: int
    ) -> Ran:
        """Aggregate a batch; the watermark of the input was ``before`` and is ``after``."""
        rows = None if inputs[0] is None or not inputs[0].num_rows else inputs[0]
        if self.mergeable:
            return self._run_panes(rows, old, before, after)
        tables = [] if rows is None else [self._checked(rows.select(self.columns))]
        if self.window is WindowBy.TUPLES:
            return self._run_tuples(tables, old, after)
        return self._run_rows(tables, old, before, after)

    # ------------------------------------------------------------------ panes

    def _run_panes(
        self, rows: pa.Table | None, old: Sequence[OldState], before: int, after: int
    ) -> Ran:
        known: list[Partials] = []
        merged: list[Partials] = []
        for tables, replaced in old:
            if tables["panes"].num_rows:
                known.append(Partials.stored(tables["panes"], self.keys))
                merged += known[-1:] if replaced else []
        fresh = [*self.early, *([] if rows is None else [self._aggregate(rows)])]
        known += fresh
        merged += fresh
        known = [one for one in known if one.size]
        output = self._close(known, before, after) if known else None
        state, until = self._retained([one for one in merged if one.size], after)
        return Ran(output, state, until, self.rejected)

    def _aggregate(self, rows: pa.Table) -> Partials:
        """Aggregate the tuples of a batch, without those for which a function raises."""
        while True:
            try:
                return Partials.of(rows, self.keys, self.node.functions, self.pane)
            except RowsFailedError as error:
                rows = self._without(rows, error.rows)

    def _without(self, rows: pa.Table, failed: Failed) -> pa.Table:
        for row, problem in failed.items():
            one = rows.slice(row, 1)
            # Both owners of a moving bucket get a tuple; one of them rejects it.
            if self._owned(as_numpy(one_array(one[BUCKET])), times_of(one)).any():
                self._reject(problem, one)
        kept = np.ones(rows.num_rows, bool)
        kept[list(failed)] = False
        return rows.filter(pa.array(kept))

    def _owned(self, buckets: NDArray[np.int32], times: Integers) -> NDArray[np.bool_]:
        return np.ones(times.size, bool) if self.mine is None else self.mine(buckets, times)

    def _reject(self, problem: str, rows: pa.Table) -> None:
        self.rejected.append(Rejected(self.node.name, Reason.FUNCTION_FAILED, problem, rows))

    def _close(self, known: Sequence[Partials], before: int, after: int) -> pa.Table | None:
        """Merge the panes of the windows that end after ``before`` and not after ``after``."""
        panes = np.concatenate([one.panes for one in known])
        if self.node.size is None and not self._changed(panes, before, after).any():
            return None
        keys = pa.concat_tables([one.keys for one in known])
        codes = encode([keys[key] for key in self.keys], keys.num_rows)
        failed: Failed = {}
        functions = self.node.functions
        slid = self._slid(known, panes, codes, before, after)
        if slid is not None:
            windows, firsts, parts = slid
        else:
            windows, rows = self._windows(panes, codes, before, after)
            windows, rows = self._own_windows(windows, rows, keys)
            if not windows.size:
                return None
            groups, members = group(encode([windows, codes[rows]], windows.size))
            size = groups.sizes.size
            parts = merge_into(functions, known, rows, slots_of(groups), size, failed)
            windows, firsts = windows[members], rows[members]
        if not windows.size:
            return None
        columns = [
            self._typed(function, partial(result, function, part, failed))
            for function, part in zip(functions, parts, strict=True)
        ]
        index = as_arrow(firsts)
        found = [one_array(keys[key]).take(index) for key in self.keys]
        return self._emit(windows * self.advance, found, columns, failed)

    def _slid(
        self, known: Sequence[Partials], panes: Integers, codes: Integers, before: int, after: int
    ) -> tuple[Integers, Integers, tuple[Any, ...]] | None:
        """Return the windows that close, a row of each, and their partial results.

        Where functions can be subtracted, a window costs the same whatever the number of its panes.
        None where they cannot.
        """
        size = self.node.size
        exact = all(f.kind in SUBTRACTED for f in self.node.functions)
        if size is None or self.mine is not None or not exact:
            return None
        low, high = int(panes.min()), int(panes.max())
        first = (low * self.pane - size) // self.advance + 1
        last = high * self.pane // self.advance
        if before != TIME_MIN:
            first = max(first, (before - size) // self.advance + 1)
        if after != TIME_MAX:
            last = min(last, (after - size) // self.advance if after != TIME_MIN else TIME_MIN)
        if last < first:
            none = np.empty(0, np.int64)
            return none, none, ()
        pane = self.pane
        order, (windows, begin, end) = slide(
            codes, panes, size // pane, self.advance // pane, first, last
        )
        parts = slide_into(known, order, begin, end)
        return None if parts is None else (windows, order[begin], parts)

    def _typed(self, function: Function, call: Callable[[], pa.Array]) -> pa.Array:
        """Build a column; the values that a function of the user returns may not fit its type."""
        try:
            return call()
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            problem = f"the function returned another type than {function.type}: {error}"
            raise DataflowError(self.node.name, problem, function.name) from None

    def _windows(
        self, panes: Integers, codes: Integers, before: int, after: int
    ) -> tuple[Integers, Integers]:
        """Return the windows that close for each pane: their numbers, and the row of the pane."""
        size, advance = self.node.size, self.advance
        if after == TIME_MIN:  # some source has brought no tuple
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if size is None:
            return self._multiples(panes, codes, before, after)
        begins = panes * self.pane
        low, high = (begins - size) // advance + 1, begins // advance
        if before != TIME_MIN:
            low = np.maximum(low, (before - size) // advance + 1)
        if after != TIME_MAX:
            high = np.minimum(high, (after - size) // advance)
        return expand(low, high + 1)

    def _own_windows(
        self, windows: Integers, rows: Integers, keys: pa.Table
    ) -> tuple[Integers, Integers]:
        """Return the windows that this machine computes."""
        if self.mine is None:
            return windows, rows
        buckets = as_numpy(one_array(keys[BUCKET]))[rows]
        mine = self.mine(buckets, windows * self.advance)
        return windows[mine], rows[mine]

    def _multiples(
        self, panes: Integers, codes: Integers, before: int, after: int
    ) -> tuple[Integers, Integers]:
        """Return the multiples of the advance at which a group is emitted, for each of its panes.

        A group is emitted where it has a new pane, over all panes before.
        """
        changed = self._changed(panes, before, after)
        # Most groups of a state without end did not change.
        live = places_with(codes, codes[changed])
        changed, ends, codes = changed[live], panes[live] + 1, dense(codes[live])
        emitted = np.unique(ends[changed])
        width = emitted.size + 1
        places = codes * width + np.searchsorted(emitted, ends)
        # A pane is in the results of its group from its own time on.
        results, below = distinct(places[changed], (int(codes.max()) + 1) * width)
        found, rows = expand(below(places), below((codes + 1) * width))
        return emitted[results[found] % width], live[rows]

    def _changed(self, panes: Integers, before: int, after: int) -> NDArray[np.bool_]:
        """Return the panes of a window without end that the watermark has passed in this batch."""
        first = TIME_MIN if before == TIME_MIN else before // self.pane
        last = after if after in (TIME_MIN, TIME_MAX) else after // self.pane
        return (panes + 1 > first) & (panes + 1 <= last)

    def _emit(
        self,
        times: Integers,
        keys: list[pa.Array],
        columns: list[pa.Array],
        failed: Failed,
        fills: Sequence[pa.Array] = (),
    ) -> pa.Table | None:
        """Build the results, without those for which a function failed.

        ``fills`` is the order of the tuples that filled windows of tuples.
        """
        assert self.node.output is not None
        order = None
        if self.ordered:
            parts = [key_bytes(keys, times.size), *fills]
            order = made_order(self.node.number, parts, times.size)
        table = stamped(self.node.output, times, [*keys, *columns], order)
        if failed:
            # A failed result has no value, or one that overflowed.
            window = table.select([self.node.output.time, *self.keys])
            for row, problem in sorted(failed.items()):
                self._reject(problem, window.slice(row, 1))
            kept = np.ones(times.size, bool)
            kept[list(failed)] = False
            table = table.filter(pa.array(kept))
        return table if table.num_rows else None

    def _retained(self, merged: Sequence[Partials], after: int) -> tuple[dict[str, pa.Table], int]:
        """Return the panes that some open window needs, one row per bucket, pane and key."""
        if not merged:
            return {}, TIME_MIN
        size, advance = self.node.size, self.advance
        panes = np.concatenate([one.panes for one in merged])
        rows = np.arange(panes.size)
        if size is None:
            # The panes that were emitted are needed as a whole only: they become one.
            passed = min(after // self.pane, int(panes.max()) + 1) - 1
            panes = np.maximum(panes, np.int64(max(passed, TIME_MIN)))
            until = TIME_MAX
        else:
            ends = panes * self.pane // advance * advance + size
            rows = np.flatnonzero(ends > after)
            until = int(ends[rows].max(initial=TIME_MIN))
        if not rows.size:
            return {}, TIME_MIN
        if len(merged) == 1 and rows.size == panes.size and size is not None:
            return {"panes": merged[0].table()}, until
        kept = compacted(merged, panes[rows], rows, self.keys, self.node.functions)
        return {"panes": kept.table()}, until

    # ------------------------------------------------------------------ tuples

    def _checked(self, rows: pa.Table) -> pa.Table:
        """Reject tuples for which a function of the user raises."""
        for function in self.node.functions:
            if function.kind == "partial":
                try:
                    accumulate(function, rows, Groups.one(rows.num_rows))
                except RowsFailedError as error:
                    return self._checked(self._without(rows, error.rows))
        return rows

    def _run_rows(
        self, fresh: list[pa.Table], old: Sequence[OldState], before: int, after: int
    ) -> Ran:
        """Aggregate time windows from the tuples themselves."""
        assert self.node.size is not None
        tables = [*fresh, *(state.tables["rows"] for state in old)]
        if not tables:
            return Ran(None, {}, TIME_MIN)
        rows = pa.concat_tables(tables)
        rows = rows.take(as_arrow(sort_order(rows)))
        codes = encode([rows[key] for key in self.keys], rows.num_rows)
        windows, members = self._windows(times_of(rows) // self.pane, codes, before, after)
        windows, members = self._own_windows(windows, members, rows)
        output = None
        if windows.size:
            groups, firsts = group(encode([windows, codes[members]], windows.size))
            groups = Groups(groups.starts, members[groups.rows].astype(np.int32))
            times = windows[firsts] * self.advance
            output = self._evaluate(rows, groups, times, members[firsts])
        merged = (state.tables["rows"] for state in old if state.merge)
        stored = pa.concat_tables([rows.slice(0, 0), *fresh, *merged])
        ends = times_of(stored) // self.advance * self.advance + self.node.size
        live = ends > after
        state = {"rows": stored.filter(pa.array(live))} if live.any() else {}
        return Ran(output, state, int(ends[live].max(initial=TIME_MIN)), self.rejected)

    def _evaluate(
        self,
        rows: pa.Table,
        groups: Groups,
        times: Integers,
        members: Integers,
        fills: Sequence[pa.Array] = (),
    ) -> pa.Table | None:
        """Compute all functions over groups of tuples; ``members`` has a tuple of each group."""
        failed: Failed = {}
        columns = []
        for function in self.node.functions:
            if function.kind == "whole":
                call = partial(whole_results, function, rows, groups, failed)
            else:
                call = partial(result, function, accumulate(function, rows, groups), failed)
            columns.append(self._typed(function, call))
        index = as_arrow(members)
        keys = [one_array(rows[key]).take(index) for key in self.keys]
        return self._emit(times, keys, columns, failed, fills)

    def _run_tuples(self, fresh: list[pa.Table], old: Sequence[OldState], after: int) -> Ran:
        """Aggregate windows of a number of tuples, once the watermark has passed them.

        Tuples that no window to come needs remain in their file until it is merged, and a *cut*
        says which ones: see :mod:`roost.dataflow.cuts`.
        """
        size, advance = self.node.size, self.advance
        assert size is not None
        stored = StoredTuples.of(fresh, old, self.keys)
        if stored is None:
            return Ran(None, {}, TIME_MAX)
        rows = stored.live
        times = times_of(rows)
        ready = int(np.searchsorted(times, after)) if after != TIME_MAX else times.size
        by_key, _ = group(encode([rows[key].slice(0, ready) for key in self.keys], ready))
        counts = np.maximum((by_key.sizes - size) // advance + 1, 0)
        numbers, owners = expand(np.zeros_like(counts), counts)
        starts = by_key.starts[owners] + numbers * advance
        output = None
        if starts.size:
            places, _ = expand(starts, starts + size)
            groups = Groups(np.arange(starts.size + 1) * size, by_key.rows[places])
            last = by_key.rows[starts + size - 1].astype(np.int64)
            fills = [one_array(rows[ORDER]).take(as_arrow(last))]
            output = self._evaluate(rows, groups, times[last], last, fills)
        used, _ = expand(by_key.starts[:-1], by_key.starts[:-1] + counts * advance)
        state = stored.without(by_key.rows[used].astype(np.int64))
        return Ran(output, {"rows": state} if state.num_rows else {}, TIME_MAX, self.rejected)
