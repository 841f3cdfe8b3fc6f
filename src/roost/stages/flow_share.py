"""One machine's share of a bucket map: which tuples, windows and pairs it receives, reads, stores.

A tuple is stored once, by the owner that it belongs to, and read by all that receive such tuples.
So the state of a bucket is the same whether it has one owner or, while it moves, two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.aggregate import PANES, pane_length
from roost.dataflow.blocks import BUCKET, times_of
from roost.dataflow.buckets import BucketMap
from roost.dataflow.join import SIDES
from roost.dataflow.partials import PANE
from roost.dataflow.schema import Node
from roost.model.arrays import as_numpy
from roost.model.columns import one_array
from roost.model.records import TIME_MAX, TIME_MIN
from roost.stages.flow_routing import received_by_side

TABLES = (PANES, "rows", *SIDES)
Tables = Mapping[str, pa.Table]


@dataclass(frozen=True)
class MachineShare:
    """The share of a machine in the work of an operator; a Product has a grid of buckets."""

    node: Node
    map: BucketMap
    grid: tuple[int, int] | None
    machine: int

    @property
    def divided(self) -> bool:
        """Whether buckets have two owners, so that not all that a machine gets is its own."""
        return bool(self.map.under_way)

    def belongs(
        self, buckets: NDArray[np.integer[Any]], times: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which windows or pairs this machine computes."""
        mine: NDArray[np.bool_] = self.map.owners_of(buckets, times) == self.machine
        return mine

    def cells(self) -> NDArray[np.bool_] | None:
        """Return the cells of a Product's grid that the machine has a share of."""
        if self.grid is None:
            return None
        owned = np.isin(np.arange(self.map.buckets), self.map.owned(self.machine))
        return owned.reshape(self.grid)

    def received(self, label: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tuples of each bucket that the machine gets, for a table of the state.

        They are those from a time on, and those before another.
        """
        if self.grid is None:
            return self.map.received(self.machine)
        return received_by_side(self.map, self.grid, self.machine, SIDES.index(label))

    def buckets(self) -> dict[str, NDArray[np.int64]]:
        """Return the buckets that the machine needs, by table of the state."""
        if self.grid is None:
            return dict.fromkeys(TABLES, self.map.owned(self.machine))
        found = {}
        for label in SIDES:
            since, until = self.received(label)
            found[label] = np.flatnonzero((since < TIME_MAX) | (until > TIME_MIN))
        return found

    def readable(self, tables: Tables) -> dict[str, pa.Table]:
        """Return what the machine reads of stored buckets: what it received, or would have.

        The new owner of a bucket that moves by window recreation reads nothing from before.
        """
        found = {}
        for label, table in tables.items():
            since, until = self.received(label)
            buckets, times = _buckets(table), self._times(label, table)
            kept = (times >= since[buckets]) | (times < until[buckets])
            found[label] = table if kept.all() else table.filter(pa.array(kept))
        return found

    def stored(self, tables: Tables) -> Tables:
        """Return what the machine stores.

        A tuple of a moving bucket is stored by the owner that it belongs to; that of a Product by
        the first of those that it belongs to, of the cells in its row or column.
        """
        if self.grid is None and not self.divided:
            return tables
        switches, owners = self.map.shares
        found = {}
        for label, table in tables.items():
            first = owners
            if self.grid is not None:
                first = owners.reshape(-1, *self.grid).min(axis=2 - SIDES.index(label))
            intervals = np.searchsorted(switches, self._times(label, table), "right")
            mine = first[intervals, _buckets(table)] == self.machine
            found[label] = table if mine.all() else table.filter(pa.array(mine))
        return found

    def _times(self, label: str, table: pa.Table) -> NDArray[np.int64]:
        """Return the event times of stored tuples, or the starts of stored panes."""
        if label != PANES:
            return times_of(table)
        panes: NDArray[np.int64] = as_numpy(one_array(table[PANE]))
        return panes * pane_length(self.node)

    # ------------------------------------------------------------------ bytes because of moves

    def read_bytes(self, before: BucketMap, stored: Sequence[Tables]) -> int:
        """Return the bytes of state that the machine read for buckets that it did not have."""
        earlier = MachineShare(self.node, before, self.grid, self.machine).buckets()
        total = 0.0
        for label, table in ((label, table) for one in stored for label, table in one.items()):
            if table.num_rows:
                new = ~np.isin(_buckets(table), earlier[label])
                total += table.nbytes * float(new.mean())
        return round(total)

    def sent_twice(self, inputs: Sequence[pa.Table | None]) -> int:
        """Return the bytes of tuples that the machine got beside the owner they belong to."""
        if not self.divided or self.grid is not None:
            return 0
        total = 0.0
        for table in inputs:
            if table is not None and table.num_rows:
                mine = self.belongs(_buckets(table), times_of(table))
                total += table.nbytes * float(1.0 - mine.mean())
        return round(total)


def _buckets(table: pa.Table) -> NDArray[np.int32]:
    found: NDArray[np.int32] = as_numpy(one_array(table[BUCKET]))
    return found
