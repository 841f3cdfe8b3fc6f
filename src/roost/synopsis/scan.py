"""Compiled loops over leaves: which leaves a query selects, and what they add to its result.

A leaf is outside the query, inside it, or on its border: its place, its step or one of its bins is
partly inside. The three states are ordered, so that "and" is the lower and "or" the higher of two
states. A leaf on the border has an estimated share of rows that are inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.kernel.shapes import BORDER, INSIDE, OUTSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.leaves import (
    CODES,
    COUNT,
    EVERY_STEP,
    STEP,
    UNSURE,
    Bytes,
    Field,
    Leaves,
    locate_field,
    read_bits,
    read_code,
    read_field,
    read_steps,
)
from roost.synopsis.spec import KeyLayout

AND, OR = -1, -2
DAY_US = 86_400_000_000
STEPS_END = np.iinfo(np.int64).max  # of a group that time does not cut
HALF = 0.5
PAIR = 64  # features at most
CODE = 256  # codes at most


class LeafFilter(NamedTuple):
    """A query's restrictions, compiled.

    ``program`` is the predicate in postfix order: the feature of a condition, or ``AND``, ``OR``.
    Condition ``k`` has its states and shares by code in row ``k`` of the tables. A comparison of
    features ``a`` and ``b`` is ``a + (b + 1) * PAIR``, its codes ``x`` and ``y`` ``x * CODE + y``.
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


class Exact(NamedTuple):
    """What has exact sums of rows that are all inside a scope."""

    groups: Ints
    totals: Ints
    owners: Ints  # the groups of which the totals are a part, each once


class GroupList(NamedTuple):
    """Groups to scan: runs, first microsecond and slot of each, and its steps in the scope."""

    first_runs: Ints
    last_runs: Ints
    starts_us: Ints  # of the bucket
    slots: Ints
    first_steps: Ints
    last_steps: Ints  # the one after
    judged: NDArray[np.bool_]  # the scope cuts steps


class Parts(NamedTuple):
    """Runs that a query reads, the group of each, and its leaves that may be in the scope."""

    runs: Ints
    owners: Ints
    begins: Ints
    ends: Ints
    inside: NDArray[np.bool_]  # all of these leaves are in the scope
    leaves: Whole  # of all runs, in the scope or not


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
    first: Whole = 0  # step of the current day
    for k in range(np.int64(leaves.sizes[run])):
        while scratch.numbers[k] >= first + per_slot:
            first += per_slot
            start_us += DAY_US
        of_day = slot * per_slot + scratch.numbers[k] - first
        begin = start_us + of_day * step_us
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
            if op >= PAIR:
                read_field(leaves, run, CODES + op % PAIR, scratch.numbers)
                for k in range(size):
                    shares[top, k] = scratch.numbers[k] * CODE
                read_field(leaves, run, CODES + op // PAIR - 1, scratch.numbers)
                for k in range(size):
                    scratch.numbers[k] += np.int64(shares[top, k])
            else:
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
) -> tuple[Whole, bool]:  # pragma: no cover
    """Return the first step of a group that ends after a time, and whether it begins before."""
    # Far times would overflow.
    time = min(max(time, start_us - DAY_US), start_us + layout.bucket_us + DAY_US)
    since_slot = time - start_us - slot * layout.slot_us
    day = since_slot // DAY_US
    of_day = since_slot - day * DAY_US
    if of_day >= layout.slot_us:
        return max((day + 1) * layout.steps_per_slot, 0), False
    step = day * layout.steps_per_slot + of_day // layout.step_us
    return max(step, 0), bool(step >= 0 and of_day % layout.step_us > 0)


@njit(cache=True, nogil=True)
def step_range(
    start_us: Whole, slot: Whole, layout: KeyLayout, since: Whole, until: Whole
) -> tuple[Whole, Whole, bool]:  # pragma: no cover - compiled
    """Return the steps of a group in a time range, from and to, and whether it cuts one of them."""
    low, low_cut = _step_at(since, start_us, slot, layout)
    high, high_cut = _step_at(until, start_us, slot, layout)
    return low, high + high_cut, low_cut or high_cut


@njit(cache=True, nogil=True)
def interval_range(
    start_us: Whole, slot: Whole, layout: KeyLayout, since: Whole, until: Whole
) -> tuple[Whole, Whole]:  # pragma: no cover - compiled
    """Return the intervals of a group of which all steps are in a time range, from and to."""
    begin_us, length_us = start_us + slot * layout.slot_us, layout.interval_days * DAY_US
    end_us = begin_us + layout.bucket_us
    since, until = max(since, begin_us), min(until, end_us)
    first = -((begin_us - since) // length_us)
    # The slot ends before the last day of an interval does.
    last = (until + DAY_US - layout.slot_us - begin_us) // length_us
    return first, min(last, layout.intervals)


@njit(cache=True, nogil=True)
def _find_leaves(
    leaves: Leaves, run: Whole, low: Whole, high: Whole
) -> tuple[Whole, Whole]:  # pragma: no cover - compiled
    """Return the leaves of a run with steps in a range, from and to."""
    size, first = np.int64(leaves.sizes[run]), np.int64(leaves.firsts[run])
    if low <= first and high == STEPS_END:
        return 0, size
    words, width = leaves.words, np.int64(leaves.widths[run, STEP])
    if width == EVERY_STEP:
        low, high = max(int(low - first), 0), max(int(high - first), 0)
        return min(low, int(size)), min(high, int(size))
    bit = np.int64(leaves.starts[run]) * 64
    begin: Whole = 0
    end = 0
    for k in range(size):
        first += read_bits(words, bit + k * width, width)
        if first >= high:
            break
        begin += first < low
        end += 1
    return begin, end


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
        run, last = groups.first_runs[g], groups.last_runs[g]
        if near.size * 8 >= last - run:
            for at in range(run, last):
                if leaf_filter.places[leaves.places[at]] != OUTSIDE:
                    runs[size], owners[size] = at, g
                    size += 1
            continue
        # Runs of a group are sorted by place.
        for place in near:
            run += np.searchsorted(leaves.places[run:last], np.uint32(place))
            if run < last and leaves.places[run] == place:
                runs[size], owners[size] = run, g
                size += 1
    return runs[:size], owners[:size]


@njit(cache=True, nogil=True)
def find_parts(
    leaves: Leaves, groups: GroupList, leaf_filter: LeafFilter
) -> Parts:  # pragma: no cover - compiled
    """Return the runs, and the leaves of each, that may be in the scope."""
    runs, owners = near_runs(leaves, groups, leaf_filter)
    begins, ends = np.empty(runs.size, np.int64), np.empty(runs.size, np.int64)
    inside = np.zeros(runs.size, np.bool_)
    plain = leaf_filter.program.size == 0
    total = np.int64(0)
    for at in range(runs.size):
        run, g = runs[at], owners[at]
        total += np.int64(leaves.sizes[run])
        low, high = groups.first_steps[g], groups.last_steps[g]
        begins[at], ends[at] = _find_leaves(leaves, run, low, high)
        sure = leaf_filter.places[leaves.places[run]] == INSIDE and not leaves.widths[run, UNSURE]
        inside[at] = plain and sure and not groups.judged[g]
    return Parts(runs, owners, begins, ends, inside, total)


@njit(cache=True, nogil=True)
def judge_run(
    leaves: Leaves,
    run: Whole,
    groups: GroupList,
    g: Whole,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    scratch: Scratch,
) -> None:  # pragma: no cover - compiled
    """Fill the states and shares of the leaves of a run, by all but steps wholly outside."""
    size = np.int64(leaves.sizes[run])
    place = leaf_filter.places[leaves.places[run]]
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
    if groups.judged[g]:
        start_us, slot = groups.starts_us[g], groups.slots[g]
        _judge_time(leaves, run, start_us, slot, layout, leaf_filter, scratch)
    if leaf_filter.program.size:
        _judge_predicate(leaves, run, leaf_filter, scratch)


@njit(cache=True, nogil=True)
def _locate_codes(
    leaves: Leaves, run: Whole, feature: Whole
) -> Field:  # pragma: no cover - compiled
    """Return where the codes of a feature are; those of a negative one are 0 and have no bits."""
    used = np.int64(feature >= 0)
    field = locate_field(leaves, run, CODES + max(feature, 0))
    return Field(field.bit, field.width * used, field.low * used, field.nulls * used)


@njit(cache=True, nogil=True)
def _add_inside(
    leaves: Leaves, parts: Parts, a: Whole, b: Whole, sure: Floats
) -> None:  # pragma: no cover - compiled
    """Add up the leaves of the runs of which all are inside."""
    words = leaves.words
    for at in range(parts.runs.size):
        if not parts.inside[at]:
            continue
        run, begin, end = parts.runs[at], parts.begins[at], parts.ends[at]
        n = locate_field(leaves, run, COUNT)
        if n.width == 0 and a < 0:
            sure[0, 0] += end - begin
            continue
        x, y = _locate_codes(leaves, run, a), _locate_codes(leaves, run, b)
        if n.width == 0:
            for k in range(begin, end):
                sure[read_code(words, x, k), read_code(words, y, k)] += 1.0
        else:
            for k in range(begin, end):
                count = read_code(words, n, k)
                sure[read_code(words, x, k), read_code(words, y, k)] += count


@njit(cache=True, nogil=True)
def _add_judged(
    leaves: Leaves,
    parts: Parts,
    groups: GroupList,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    a: Whole,
    b: Whole,
    sure: Floats,
) -> Floats:  # pragma: no cover - compiled
    """Add up the leaves of the other runs; returns those on the border, as `scan` does."""
    scratch = make_scratch(leaves, parts.runs, leaf_filter.program.size)
    states, shares = scratch.states[0], scratch.shares[0]
    border = np.empty((0, 0, 0))
    for at in range(parts.runs.size):
        begin, end = parts.begins[at], parts.ends[at]
        if parts.inside[at] or begin >= end:
            continue
        run = parts.runs[at]
        judge_run(leaves, run, groups, parts.owners[at], layout, leaf_filter, scratch)
        x, y = _locate_codes(leaves, run, a), _locate_codes(leaves, run, b)
        n = locate_field(leaves, run, COUNT)
        for k in range(begin, end):
            if states[k] == OUTSIDE:
                continue
            i, j = read_code(leaves.words, x, k), read_code(leaves.words, y, k)
            count = read_code(leaves.words, n, k)
            if states[k] == INSIDE:
                sure[i, j] += count
                continue
            if border.size == 0:
                border = np.zeros((2, *sure.shape))
            border[0, i, j] += count
            border[1, i, j] += count * shares[k]
    return border


@njit(cache=True, nogil=True)
def scan(
    leaves: Leaves,
    groups: GroupList,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    codes: Whole,
    a: Whole,
    b: Whole,
) -> tuple[Whole, Floats, Floats]:  # pragma: no cover - compiled
    """Add up rows by the codes of two features; a negative feature counts as code 0.

    Returns the number of leaves read, the rows inside, and those on the border with their
    expected number: the latter is empty if there are none.
    """
    parts = find_parts(leaves, groups, leaf_filter)
    sure = np.zeros((codes if a >= 0 else 1, codes if b >= 0 else 1))
    _add_inside(leaves, parts, a, b, sure)
    border = np.empty((0, 0, 0))
    if not parts.inside.all():
        border = _add_judged(leaves, parts, groups, layout, leaf_filter, a, b, sure)
    return parts.leaves, sure, border
