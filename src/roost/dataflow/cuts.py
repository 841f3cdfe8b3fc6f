"""Stored tuples of windows that count tuples, in files that are not rewritten.

A window of tuples uses up the oldest tuples of its key. Their files remain as they are until they
are merged, so the batch also stores a *cut* of the key: a copy of the last tuple used up, with the
number of tuples used up that are equal to it in tuple order, whose rows differ in content only
that have no numbers. All tuples before the newest cut, and so many that equal it, are used up.

A merge leaves out used tuples before the cut. Equal ones remain with their cut, because others may
be in files that are not merged; if all files are, neither is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.dataflow.blocks import ORDER, TIME, OldState, times_of
from roost.dataflow.groups import encode
from roost.model.arrays import as_arrow, as_numpy
from roost.model.columns import one_array

CUT = "__cut"  # of a cut: how many tuples are used that equal it; 0 for a tuple
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class StoredTuples:
    """New and stored tuples in tuple order, with their cuts."""

    rows: pa.Table
    codes: Integers  # number of the key
    ranks: Integers  # equal for rows that are equal in tuple order, and ascending
    written: NDArray[np.bool_]  # whether the batch writes the row, because it is new or merged
    complete: bool  # whether the batch writes all rows
    cuts: Integers  # newest cut of each key; -1 without one
    left: Integers  # tuples that are not used up

    @classmethod
    def of(
        cls, fresh: Sequence[pa.Table], old: Sequence[OldState], keys: Sequence[str]
    ) -> StoredTuples | None:
        """Return the tuples of a batch and of the state; None if there are none."""
        tables = [t.append_column(CUT, as_arrow(np.zeros(t.num_rows, np.int64))) for t in fresh]
        tables += [state.tables["rows"] for state in old]
        if not tables:
            return None
        rows = pa.concat_tables(tables)
        sizes = [table.num_rows for table in tables]
        written = np.repeat([*(True for _ in fresh), *(state.merge for state in old)], sizes)
        # A cut comes after the tuples that equal it, and the newest of several is the last one.
        by = [(name, "ascending") for name in (TIME, ORDER, CUT)]
        order = np.asarray(pc.sort_indices(rows.select([TIME, ORDER, CUT]), by)).astype(np.int64)
        rows = rows.take(as_arrow(order))
        codes = encode([rows[key] for key in keys], rows.num_rows)
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
        ranks = _ranks(rows)
        counts = as_numpy(one_array(rows[CUT]))
        cuts = np.full(int(codes.max(initial=-1)) + 1, -1)
        marks = np.flatnonzero(counts)
        np.maximum.at(cuts, codes[marks], marks)
        left = _left(codes, ranks, counts, cuts)
        complete = all(state.merge for state in old)
        return cls(rows, codes, ranks, written[order], complete, cuts, left)

    @property
    def live(self) -> pa.Table:
        """The tuples that are not used up, in tuple order."""
        return self.rows.take(as_arrow(self.left)).drop_columns([CUT])

    def without(self, used: Integers) -> pa.Table:
        """Return what to store after some of the live tuples were used up, which are given."""
        used = np.sort(self.left[used])
        kept = np.zeros(self.rows.num_rows, bool)
        kept[self.left] = True
        kept[used] = False
        if self.complete:
            return self.rows.filter(pa.array(kept))
        # The newest cut of each key: the last tuple used up now, or the one that is stored.
        last = np.full(self.cuts.size, -1)
        np.maximum.at(last, self.codes[used], used)
        known, new = np.flatnonzero((last < 0) & (self.cuts >= 0)), np.flatnonzero(last >= 0)
        kept[self.cuts[known]] = True
        border = np.full(self.cuts.size, -1)
        border[known] = self.ranks[self.cuts[known]]
        border[new] = self.ranks[last[new]]
        is_tuple = as_numpy(one_array(self.rows[CUT])) == 0
        equal = self.ranks == border[self.codes]
        kept |= equal & is_tuple
        rows = self.rows.filter(pa.array(kept & self.written))
        counts = np.bincount(self.codes[used[equal[used]]], minlength=self.cuts.size)
        before = np.flatnonzero((self.cuts >= 0) & (last >= 0))
        same = before[self.ranks[self.cuts[before]] == border[before]]
        counts[same] += as_numpy(one_array(self.rows[CUT]))[self.cuts[same]]
        cuts = self.rows.take(as_arrow(last[new]))
        place = cuts.schema.get_field_index(CUT)
        cuts = cuts.set_column(place, CUT, as_arrow(counts[new].astype(np.int64)))
        return pa.concat_tables([rows, cuts])


def _ranks(rows: pa.Table) -> Integers:
    """Return a number of each row, ascending, and equal where the tuple order is."""
    times, orders = times_of(rows), one_array(rows[ORDER])
    other = np.zeros(rows.num_rows, bool)
    if rows.num_rows:
        following = pc.not_equal(orders.slice(1), orders.slice(0, rows.num_rows - 1))
        other[1:] = (np.diff(times) != 0) | np.asarray(following)
    return np.cumsum(other)


def _left(codes: Integers, ranks: Integers, counts: Integers, cuts: Integers) -> Integers:
    """Return the tuples that are not used up."""
    cut = cuts[codes]
    tuples = counts == 0
    border = np.where(cut >= 0, ranks[cut], -1)
    left = tuples & (ranks > border)
    equal = np.flatnonzero(tuples & (ranks == border))
    # Of the tuples that equal a cut, the first ones are used up.
    order = equal[np.argsort(codes[equal], kind="stable")]
    first = np.searchsorted(codes[order], codes[order])
    left[order[np.arange(order.size) - first >= counts[cut[order]]]] = True
    return np.flatnonzero(left)
