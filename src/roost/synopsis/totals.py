"""Totals: the exact sums of groups, divided into intervals of a day or a few.

A time range that cuts a calendar bucket would read the leaves of all its days. With totals it reads
only those of the intervals that it cuts itself; totals are added up for all others. They are
records of shorter buckets without extremes and marginals, merged by addition like those of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.model.arrays import Ints
from roost.synopsis.paths import RunRows
from roost.synopsis.records import Division, GroupRecords, Totals, add_columns
from roost.synopsis.spec import (
    BUCKET_BITS,
    BUCKET_ZERO,
    SLOT_BITS,
    KeyLayout,
    SynopsisSpec,
    join_group_keys,
    split_group_keys,
)


def totals_of(totals: Totals, groups: Ints, spec: SynopsisSpec) -> Totals:
    """Return the totals of some groups, by their keys."""
    return totals.take(np.isin(owners_of(totals.keys, spec), groups))


def owners_of(keys: Ints, spec: SynopsisSpec) -> Ints:
    """Return the key of the group of each of the totals."""
    prefixes, slots, intervals = _split_keys(keys)
    return join_group_keys(prefixes, intervals // spec.layout.intervals, slots)


def coarsen_totals(
    totals: Totals, groups: GroupRecords, fine: SynopsisSpec, coarse: SynopsisSpec
) -> Totals:
    """Return the totals of coarser groups and intervals; ``groups`` are the finer ones."""
    if coarse.layout.intervals == 1:
        return Totals.none(totals.sums.shape[1])
    if fine.layout.intervals == 1:  # the records are the totals
        prefixes, buckets, slots = split_group_keys(groups.keys)
        columns = (getattr(groups, name) for name in Totals._fields[1:])
        totals = Totals(join_keys(prefixes, slots, buckets), *columns)
    prefixes, slots, intervals = _split_keys(totals.keys)
    keys = join_keys(
        prefixes >> (fine.prefix_bits - coarse.prefix_bits),
        slots // (fine.slots // coarse.slots),
        intervals // (coarse.layout.interval_days // fine.layout.interval_days),
    )
    return merge_totals([totals._replace(keys=keys)])


def join_keys(prefixes: Ints, slots: Ints, intervals: Ints) -> Ints:
    """Return the keys of prefixes, slots and intervals since 1970."""
    heads = prefixes << SLOT_BITS | slots
    return np.asarray(heads << BUCKET_BITS | (intervals + BUCKET_ZERO))


def _split_keys(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Return prefix, slot and interval of each key."""
    slots = keys >> BUCKET_BITS & ((1 << SLOT_BITS) - 1)
    return keys >> (SLOT_BITS + BUCKET_BITS), slots, (keys & ((1 << BUCKET_BITS) - 1)) - BUCKET_ZERO


def keys_of(groups: Ints, intervals: Ints, spec: SynopsisSpec) -> Ints:
    """Return the keys of intervals since the first day of the bucket of their groups."""
    prefixes, buckets, slots = split_group_keys(groups)
    return join_keys(prefixes, slots, buckets * spec.layout.intervals + intervals)


def merge_totals(parts: Sequence[Totals]) -> Totals:
    """Add totals of equal keys, within and between parts."""
    keys = np.concatenate([part.keys for part in parts])
    if not keys.size:
        return parts[0]
    return Totals(*add_columns(keys, parts, Totals._fields[1:])).narrowed()


@njit(cache=True, nogil=True)
def divide_groups(
    runs: RunRows, group_of_run: Ints, groups: Whole, positions: Ints, layout: KeyLayout
) -> Division:  # pragma: no cover - compiled
    """Divide the rows of groups into intervals; the rows of a unit stay in their order."""
    intervals, span = layout.intervals, layout.interval_days * layout.steps_per_slot
    n = runs.rows.size
    at, units = np.zeros(groups * intervals + 1, np.int64), np.empty(n, np.int64)
    for k in range(n):
        unit = group_of_run[runs.ranks[k]] * intervals
        units[k] = unit + (runs.steps[k] // span if intervals > 1 else 0)
        at[units[k] + 1] += 1
    present = np.flatnonzero(at[1:])
    at = np.cumsum(at)
    starts = np.append(at[present], n)
    rows, own_positions = np.empty(n, np.int64), np.empty(n, np.int64)
    for k in range(n):
        to = at[units[k]]
        at[units[k]] += 1
        rows[to], own_positions[to] = runs.rows[k], positions[k]
    return Division(rows, own_positions, starts, present // intervals, present % intervals)


@njit(cache=True, nogil=True)
def find_totals(
    keys: Ints, group: Whole, layout: KeyLayout, first: Whole, last: Whole
) -> tuple[Whole, Whole]:  # pragma: no cover - compiled
    """Return the positions of some intervals of a group, from and to."""
    bucket = (group >> SLOT_BITS & ((1 << BUCKET_BITS) - 1)) - BUCKET_ZERO
    head = (group >> (SLOT_BITS + BUCKET_BITS)) << SLOT_BITS | group & ((1 << SLOT_BITS) - 1)
    key = head << BUCKET_BITS | (bucket * layout.intervals + first + BUCKET_ZERO)
    begin = np.searchsorted(keys, key)
    end = begin
    while end < keys.size and keys[end] < key + (last - first):
        end += 1
    return begin, end


def add_units(groups: GroupRecords, totals: Totals, owners: Ints) -> None:
    """Fill the sums of groups from those of their intervals."""
    if not owners.size:
        return
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    for name in Totals._fields[1:]:
        column: NDArray[Any] = getattr(groups, name)
        sums = getattr(totals, name)
        column[:] = sums if firsts.size == owners.size else np.add.reduceat(sums, firsts)
