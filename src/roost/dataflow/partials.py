"""Partial results of an Aggregate by bucket, pane and key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.accumulators import STORED, Failed, accumulate, merge
from roost.dataflow.blocks import BUCKET, times_of
from roost.dataflow.functions import Function
from roost.dataflow.groups import encode, group, slots_of
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import one_array
from roost.window.grouped import Contribution, Counts, Totals

PANE = "__pane"
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Partials:
    """Partial results of some functions; ``keys`` has bucket, pane and key columns."""

    keys: pa.Table
    parts: tuple[Any, ...]  # by function

    @classmethod
    def of(
        cls, rows: pa.Table, keys: Sequence[str], functions: Sequence[Function], pane: int
    ) -> Partials:
        """Aggregate tuples; raises RowsFailedError where a function of the user does."""
        panes = times_of(rows) // pane
        buckets = as_numpy(one_array(rows[BUCKET]))
        # A bucket is a function of the key.
        groups, firsts = group(encode([panes, *(rows[key] for key in keys)], rows.num_rows))
        parts = tuple(accumulate(function, rows, groups) for function in functions)
        index = as_arrow(firsts)
        columns = {BUCKET: as_arrow(buckets[firsts]), PANE: as_arrow(panes[firsts])}
        columns |= {key: one_array(rows[key]).take(index) for key in keys}
        return cls(pa.table(columns), parts)

    @property
    def size(self) -> int:
        """Number of partial results of each function."""
        return int(self.keys.num_rows)

    @property
    def panes(self) -> Integers:
        """The pane of each partial result."""
        return as_numpy(one_array(self.keys[PANE]))

    def table(self) -> pa.Table:
        """Return the partial results as columns to store."""
        columns = {name: one_array(self.keys[name]) for name in self.keys.column_names}
        about = []
        for number, part in enumerate(self.parts):
            columns |= {f"__{number}.{name}": column for name, column in part.columns().items()}
            about.append([type(part).__name__, part.facts()])
        return pa.table(columns).replace_schema_metadata({"parts": json.dumps(about)})

    @classmethod
    def stored(cls, table: pa.Table, keys: Sequence[str]) -> Partials:
        """Invert :meth:`table`."""
        parts = []
        for number, (kind, facts) in enumerate(json.loads(table.schema.metadata[b"parts"])):
            prefix = f"__{number}."
            columns = {
                name.removeprefix(prefix): one_array(table[name])
                for name in table.column_names
                if name.startswith(prefix)
            }
            parts.append(STORED[kind].stored(columns, facts))
        return cls(table.select([BUCKET, PANE, *keys]), tuple(parts))


def merge_into(
    functions: Sequence[Function],
    partials: Sequence[Partials],
    rows: Integers,
    slots: Integers,
    size: int,
    failed: Failed | None,
) -> tuple[Any, ...]:
    """Merge some of the partial results, numbered through all sets, into slots.

    The rows ascend; each slot has at least one.
    """
    borders = np.cumsum([0, *(one.size for one in partials)])
    cuts = np.searchsorted(rows, borders)
    found = []
    for number, function in enumerate(functions):
        parts = [
            Contribution(one.parts[number], rows[a:b] - first, slots[a:b])
            for one, first, a, b in zip(partials, borders, cuts, cuts[1:], strict=False)
            if a < b
        ]
        found.append(merge(function, parts, size, failed))
    return tuple(found)


def slide_into(
    partials: Sequence[Partials], order: Integers, low: Integers, high: Integers
) -> tuple[Any, ...] | None:
    """Merge runs of partial results, as :func:`roost.dataflow.groups.slide` returns them.

    None if a function cannot subtract what leaves a window.
    """
    found = []
    for parts in zip(*(one.parts for one in partials), strict=True):
        kind = type(parts[0])
        part = kind.slid(parts, order, low, high) if kind in (Counts, Totals) else None
        if part is None:
            return None
        found.append(part)
    return tuple(found)


def compacted(
    partials: Sequence[Partials],
    panes: Integers,
    rows: Integers,
    keys: Sequence[str],
    functions: Sequence[Function],
) -> Partials:
    """Return one partial result per bucket, pane and key of some rows; they get these panes."""
    table = pa.concat_tables([one.keys for one in partials]).take(as_arrow(rows))
    groups, firsts = group(encode([panes, *(table[key] for key in keys)], rows.size))
    parts = merge_into(functions, partials, rows, slots_of(groups), groups.sizes.size, None)
    return Partials(table.set_column(1, PANE, as_arrow(panes)).take(as_arrow(firsts)), parts)
