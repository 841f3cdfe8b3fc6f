"""Compiled loops over leaves: which leaves a query selects, and what they add to its result.

A leaf is outside the query, inside it, or on its border: its place, its step or one of its bins is
partly inside. The three states are ordered, so that "and" is the lower and "or" the higher of two
states. A leaf on the border has an estimated share of rows that are inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from roost.kernel.cells import Whole
from roost.kernel.shapes import BORDER, INSIDE, OUTSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.leaves import (
    CODES,
    COUNT,
    STEP,
    UNSURE,
    Bytes,
    Leaves,
    field_start,
    read_bits,
    read_code,
    read_field,
    read_steps,
)
from roost.synopsis.spec import KeyLayout

AND, OR = -1, -2
DAY_US = 86_400_000_000
HALF = 0.5


class LeafFilter(NamedTuple):
    """A query's restrictions, compiled.

    ``program`` is the predicate in postfix order: the feature of a condition, or ``AND``, ``OR``.
    Condition ``k`` has its states and shares by code in row ``k`` of the tables.
    """

    since: int
    until: int
    day: Bytes  # state of each step of the day, by the hours of the query
    day_shares: Floats
    places: Bytes  # state of each place
    near: Ints  # places that are not outside, ascending
    program: Ints
    states: Bytes
    shares: Floats


class GroupList(NamedTuple):
    """Groups to scan: runs, first microsecond and slot of each, and whether time can cut it."""

    first_runs: Ints
    last_runs: Ints
    starts_us: Ints  # of the bucket
    slots: Ints
    timed: Bytes


class Scratch(NamedTuple):
    """Arrays that are reused for every run."""

    numbers: Ints
    states: Bytes  # by depth of the predicate's stack, 0 for the result
    shares: Floats


@njit(cache=True, nogil=True)
def make_scratch(
    leaves: Leaves, runs: Ints, depth: Whole
) -> Scratch:  # pragma: no cover - compiled
    """Allocate for the longest of some runs and a predicate of some conditions."""
    longest = np.int64(0)
    for run in runs:
        longest = max(longest, np.int64(leaves.sizes[run]))
    return Scratch(
        np.empty(longest, np.int64),
        np.empty((depth + 1, longest), np.uint8),
        np.empty((depth + 1, longest)),
    )


@njit(cache=True, nogil=True)
def _judge_time(
    leaves: Leaves,
    run: Whole,
    start_us: Whole,
    slot: Whole,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    scratch: Scratch,
) -> None:  # pragma: no cover - compiled
    """Lower the states of a run's leaves to what the time range and the hours allow."""
    states, shares = scratch.states[0], scratch.shares[0]
    since, until, step_us = leaf_filter.since, leaf_filter.until, layout.step_us
    per_slot = layout.steps_per_slot
    read_steps(leaves, run, scratch.numbers)
    for k in range(np.int64(leaves.sizes[run])):
        day = scratch.numbers[k] // per_slot
        of_day = slot * per_slot + scratch.numbers[k] - day * per_slot
        begin = start_us + day * DAY_US + of_day * step_us
        end = begin + step_us
        state = leaf_filter.day[of_day]
        if begin >= until or end <= since:
            state = OUTSIDE
        elif begin < since or end > until:
            state = min(state, BORDER)
            shares[k] *= float(min(end, until) - max(begin, since)) / step_us
        if state == BORDER:
            shares[k] *= leaf_filter.day_shares[of_day]
        states[k] = min(states[k], state)


@njit(cache=True, nogil=True)
def _judge_predicate(
    leaves: Leaves, run: Whole, leaf_filter: LeafFilter, scratch: Scratch
) -> None:  # pragma: no cover - compiled
    """Lower the states of a run's leaves to what the predicate allows."""
    size = np.int64(leaves.sizes[run])
    top = 0
    condition = 0
    states, shares = scratch.states, scratch.shares
    for j in range(leaf_filter.program.size):
        op = leaf_filter.program[j]
        if op >= 0:
            top += 1
            read_field(leaves, run, CODES + op, scratch.numbers)
            for k in range(size):
                states[top, k] = leaf_filter.states[condition, scratch.numbers[k]]
                shares[top, k] = leaf_filter.shares[condition, scratch.numbers[k]]
            condition += 1
            continue
        top -= 1
        for k in range(size):
            a, b = shares[top, k], shares[top + 1, k]
            if op == AND:
                states[top, k] = min(states[top, k], states[top + 1, k])
                shares[top, k] = a * b
            else:
                states[top, k] = max(states[top, k], states[top + 1, k])
                shares[top, k] = a + b - a * b
    for k in range(size):
        states[0, k] = min(states[0, k], states[1, k])
        shares[0, k] *= shares[1, k]


@njit(cache=True, nogil=True)
def _step_at(
    time: Whole, start_us: Whole, slot: Whole, layout: KeyLayout
) -> Whole:  # pragma: no cover
    """Return the first step of a group that does not begin before a time; -1 if one contains it."""
    # Far times would overflow.
    time = min(max(time, start_us - DAY_US), start_us + layout.bucket_us + DAY_US)
    since_slot = time - start_us - slot * layout.slot_us
    day = since_slot // DAY_US
    of_day = since_slot - day * DAY_US
    if of_day >= layout.slot_us:
        return max((day + 1) * layout.steps_per_slot, 0)
    if of_day % layout.step_us:
        return -1
    return max(day * layout.steps_per_slot + of_day // layout.step_us, 0)


@njit(cache=True, nogil=True)
def step_range(
    start_us: Whole, slot: Whole, layout: KeyLayout, leaf_filter: LeafFilter
) -> tuple[Whole, Whole]:  # pragma: no cover - compiled
    """Return the steps of a group inside the scope, from and to; -1, -1 if it cuts a step."""
    per_slot = layout.steps_per_slot
    for k in range(slot * per_slot, (slot + 1) * per_slot):
        if leaf_filter.day[k] != INSIDE:
            return -1, -1
    low = _step_at(leaf_filter.since, start_us, slot, layout)
    high = _step_at(leaf_filter.until, start_us, slot, layout)
    return (-1, -1) if low < 0 or high < 0 else (low, high)


@njit(cache=True, nogil=True)
def _find_part(
    leaves: Leaves, run: Whole, low: Whole, high: Whole
) -> tuple[Whole, Whole]:  # pragma: no cover - compiled
    """Return the leaves of a run with steps in a range, from and to."""
    words, size = leaves.words, np.int64(leaves.sizes[run])
    width = np.int64(leaves.widths[run, STEP])
    bit, step = np.int64(leaves.starts[run]) * 64, np.int64(leaves.firsts[run])
    begin: Whole = 0
    end = 0
    for k in range(size):
        step += read_bits(words, bit + k * width, width)
        if step >= high:
            break
        begin += step < low
        end += 1
    return begin, end


@njit(cache=True, nogil=True)
def judge_run(
    leaves: Leaves,
    run: Whole,
    start_us: Whole,
    slot: Whole,
    timed: bool,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    scratch: Scratch,
) -> tuple[Whole, Whole, bool]:  # pragma: no cover - compiled
    """Return which leaves of a run may be inside, from and to, and whether all of them are.

    Otherwise states and shares of all leaves of the run are filled.
    """
    size = np.int64(leaves.sizes[run])
    place = leaf_filter.places[leaves.places[run]]
    if place == OUTSIDE:
        return 0, 0, True
    simple = place == INSIDE and leaves.widths[run, UNSURE] == 0
    if simple and leaf_filter.program.size == 0:
        if not timed:
            return 0, size, True
        low, high = step_range(start_us, slot, layout, leaf_filter)
        if low >= 0:
            begin, end = _find_part(leaves, run, low, high)
            return begin, end, True
    share = 1.0 if place == INSIDE else HALF
    for k in range(size):
        scratch.states[0, k] = place
        scratch.shares[0, k] = share
    if leaves.widths[run, UNSURE]:
        read_field(leaves, run, UNSURE, scratch.numbers)
        for k in range(size):
            if scratch.numbers[k]:
                scratch.states[0, k] = BORDER
                scratch.shares[0, k] *= HALF
    if timed:
        _judge_time(leaves, run, start_us, slot, layout, leaf_filter, scratch)
    if leaf_filter.program.size:
        _judge_predicate(leaves, run, leaf_filter, scratch)
    return 0, size, False


@njit(cache=True, nogil=True)
def near_runs(
    leaves: Leaves, groups: GroupList, leaf_filter: LeafFilter
) -> tuple[Ints, Ints]:  # pragma: no cover - compiled
    """Return the runs of the listed groups at places that are not outside, and their groups."""
    near = leaf_filter.near
    total = 0
    for g in range(groups.slots.size):
        total += min(near.size, groups.last_runs[g] - groups.first_runs[g])
    runs, owners = np.empty(total, np.int64), np.empty(total, np.int64)
    size = 0
    for g in range(groups.slots.size):
        first, last = groups.first_runs[g], groups.last_runs[g]
        # Runs of a group are sorted by place: a few places are searched for, many are merged.
        few = near.size * 8 < last - first
        run = first
        for place in near:
            if few:
                run += np.searchsorted(leaves.places[run:last], np.uint32(place))
            else:
                while run < last and leaves.places[run] < place:
                    run += 1
            if run < last and leaves.places[run] == place:
                runs[size], owners[size] = run, g
                size += 1
    return runs[:size], owners[:size]


@njit(cache=True, nogil=True)
def scan(
    leaves: Leaves,
    groups: GroupList,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    a: Whole,
    b: Whole,
    out: Floats,
) -> Whole:  # pragma: no cover - compiled
    """Add up rows by the codes of two features: inside, on the border, estimated on the border.

    A negative feature counts as code 0. Returns the number of leaves read.
    """
    runs, owners = near_runs(leaves, groups, leaf_filter)
    scratch = make_scratch(leaves, runs, leaf_filter.program.size)
    words, widths, lows, sure = leaves.words, leaves.widths, leaves.lows, out[0]
    read: Whole = 0
    zero = np.int64(0)
    for at in range(runs.size):
        run, g = runs[at], owners[at]
        start, slot, timed = groups.starts_us[g], groups.slots[g], groups.timed[g] > 0
        begin, end, inside = judge_run(
            leaves, run, start, slot, timed, layout, leaf_filter, scratch
        )
        size = np.int64(leaves.sizes[run])
        read += size
        if begin == end:
            continue
        bit_n, width_n = field_start(leaves, run, COUNT), np.int64(widths[run, COUNT])
        bit_a: Whole = zero
        bit_b: Whole = zero
        width_a, low_a, nulls_a = zero, zero, zero
        width_b, low_b, nulls_b = zero, zero, zero
        if a >= 0:
            bit_a, low_a = field_start(leaves, run, CODES + a), np.int64(lows[run, a])
            width_a = np.int64(widths[run, CODES + a] & 127)
            nulls_a = np.int64(widths[run, CODES + a] >> 7)
        if b >= 0:
            bit_b, low_b = field_start(leaves, run, CODES + b), np.int64(lows[run, b])
            width_b = np.int64(widths[run, CODES + b] & 127)
            nulls_b = np.int64(widths[run, CODES + b] >> 7)
        if inside and width_n == 0:
            bit_a += begin * width_a
            bit_b += begin * width_b
            for _ in range(end - begin):
                i = read_code(words, bit_a, width_a, low_a, nulls_a)
                j = read_code(words, bit_b, width_b, low_b, nulls_b)
                sure[i, j] += 1.0
                bit_a += width_a
                bit_b += width_b
            continue
        for k in range(begin, end):
            i = read_code(words, bit_a + k * width_a, width_a, low_a, nulls_a)
            j = read_code(words, bit_b + k * width_b, width_b, low_b, nulls_b)
            count = 1 + read_bits(words, bit_n + k * width_n, width_n)
            if inside or scratch.states[0, k] == INSIDE:
                out[0, i, j] += count
            elif scratch.states[0, k] == BORDER:
                out[1, i, j] += count
                out[2, i, j] += count * scratch.shares[0, k]
    return read
