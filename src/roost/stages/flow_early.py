"""Aggregation before an exchange: a task sends partial results instead of tuples.

A block of partial results has the columns of :meth:`roost.dataflow.partials.Partials.table`, the
beginning of the pane as event time, and no bucket, which the exchange adds. Where keys repeat too
seldom for this to pay, the task sends the tuples themselves; the receiver accepts both. Tuples of
hot keys are aggregated in any case, and their partial results say how many tuples each has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from roost.dataflow.accumulators import RowsFailedError
from roost.dataflow.aggregate import AggregateWork, pane_length
from roost.dataflow.blocks import BUCKET, TIME, times_of
from roost.dataflow.buckets import hash_rows
from roost.dataflow.functions import Function
from roost.dataflow.groups import encode
from roost.dataflow.loads import TUPLES
from roost.dataflow.partials import PANE, Partials, compacted
from roost.dataflow.schema import Node
from roost.model.arrays import as_arrow
from roost.stages.flow_routing import PackedTuples, unpacked

ROWS_AT_ONCE = 1 << 16
ROWS_TESTED = 1 << 12  # by which a task decides whether to aggregate
ROWS_PER_PARTIAL = 3
"""Tuples for each partial result from which aggregating pays; measured."""
COUNT = Function(TUPLES, "count", (), pa.int64())


@dataclass
class EarlyAggregate:
    """Partial results of one Aggregate in one task.

    ``hot`` are hashes of keys; without ``every``, tuples of other keys are sent as they are.
    """

    node: Node
    every: bool = True
    hot: Sequence[int] = ()
    _work: AggregateWork = field(init=False)
    _rows: list[pa.Table] = field(init=False, default_factory=list)
    _found: list[Partials] = field(init=False, default_factory=list)
    _pays: bool | None = field(init=False, default=None)  # None: not known yet

    def __post_init__(self) -> None:
        """Compute panes as the receiver does."""
        self._work = AggregateWork(self.node, False)
        self._hot = np.array(self.hot, np.uint64)
        self._functions = (*self.node.functions, *([COUNT] if self.hot else []))
        self._pays = None if self.every else False

    def add(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Aggregate tuples; yield those that are better sent as they are."""
        if self._pays is None:
            self._pays = self._repeats(rows.slice(0, ROWS_TESTED))
        if not self._pays:
            rows, others = self._divided(rows)
            if others.num_rows:
                yield others
            if not rows.num_rows:
                return
        self._rows.append(rows)
        if sum(table.num_rows for table in self._rows) >= ROWS_AT_ONCE:
            yield from self._aggregate()

    def flush(self) -> Iterator[pa.Table]:
        """Yield the partial results as one block."""
        yield from self._aggregate()
        found, self._found = self._found, []
        if not found:
            return
        merged = found[0]
        if len(found) > 1:
            panes = np.concatenate([one.panes for one in found])
            rows, keys = np.arange(panes.size), self._work.keys
            merged = compacted(found, panes, rows, keys, self._functions)
        times = as_arrow(merged.panes * self._work.pane)
        parts = merged.parts[: len(self.node.functions)]
        block = Partials(merged.keys, parts).table().drop_columns([BUCKET])
        if self.hot:
            block = block.append_column(TUPLES, as_arrow(merged.parts[-1].n))
        yield block.append_column(TIME, times)

    def _aggregate(self) -> Iterator[pa.Table]:
        """Aggregate the tuples so far; yield those for which a function raises.

        The receiver calls the function again, and rejects them.
        """
        rows, self._rows = self._rows, []
        while rows:
            table = pa.concat_tables(rows)
            placed = table.append_column(BUCKET, as_arrow(np.zeros(table.num_rows, np.int32)))
            keys, pane = self._work.keys, self._work.pane
            try:
                self._found.append(Partials.of(placed, keys, self._functions, pane))
                return
            except RowsFailedError as error:
                failed = np.zeros(table.num_rows, bool)
                failed[list(error.rows)] = True
                yield table.filter(pa.array(failed))
                rows = [] if failed.all() else [table.filter(pa.array(~failed))]

    def _divided(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return the tuples of hot keys, and the others."""
        if not self._hot.size:
            return rows.slice(0, 0), rows
        hashes = hash_rows([rows[key] for key in self._work.keys], rows.num_rows)
        hot = np.isin(hashes, self._hot)
        return rows.filter(pa.array(hot)), rows.filter(pa.array(~hot))

    def _repeats(self, rows: pa.Table) -> bool:
        """Return whether keys repeat often enough."""
        panes = times_of(rows) // self._work.pane
        codes = np.sort(encode([panes, *(rows[key] for key in self._work.keys)], rows.num_rows))
        distinct = 1 + np.count_nonzero(np.diff(codes))  # numpy.unique takes 20 times as long
        return bool(distinct * ROWS_PER_PARTIAL <= rows.num_rows)


@dataclass(frozen=True)
class Received:
    """What a machine received on one input: tuples, and partial results of others."""

    tuples: pa.Table | None
    partials: Sequence[Partials] = ()
    tables: Sequence[pa.Table] = ()  # of the partial results
    pane: int = 1  # length of their panes

    @classmethod
    def with_partials(cls, blocks: Sequence[PackedTuples], node: Node) -> Received:
        """Tell blocks of tuples from blocks of partial results.

        Partial results are in the order of their bytes, which does not depend on when they arrived.
        """
        rows, sets = [], []
        # Merging costs per set of partial results: those that are stored alike are one set.
        alike: dict[bytes, list[PackedTuples]] = {}
        for block in sorted(blocks):
            alike.setdefault(block.schema, []).append(block)
        for same in alike.values():
            table = unpacked(same)
            assert table is not None
            if PANE in table.column_names:
                sets.append(table.combine_chunks())
            else:
                rows.append(table)
        found = [Partials.stored(table, node.keys[0]) for table in sets]
        return cls(unpacked(rows), found, sets, pane_length(node))

    @property
    def newest(self) -> int | None:
        """An event time that no tuple exceeds; of a partial result, the last of its pane."""
        last = [] if self.tuples is None else [int(times_of(self.tuples).max())]
        last += [int(times_of(table).max()) + self.pane - 1 for table in self.tables]
        return max(last, default=None)

    def load(self, keys: Sequence[str]) -> pa.Table | None:
        """Return buckets, times and keys of all that was received; its rows are the load."""
        if not self.tables:
            return self.tuples
        columns = [TIME, BUCKET, *keys]
        own = [] if self.tuples is None else [self.tuples]
        found = []
        for table in [*own, *self.tables]:
            if TUPLES not in table.column_names:
                table = table.append_column(TUPLES, as_arrow(np.ones(table.num_rows, np.int64)))
            found.append(table.select([*columns, TUPLES]))
        return pa.concat_tables(found)
