"""Compiled loops over leaves: which leaves a query selects, and what they add to its result.

A leaf is outside the query, inside it, or on its border: its place, its step or one of its bins is
partly inside. The three states are ordered, so that "and" is the lower and "or" the higher of two
states. A leaf on the border has an estimated share of rows that are inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from roost.kernel.shapes import BORDER, INSIDE, OUTSIDE
from roost.model.arrays import Floats, Ints
from roost.synopsis.leaves import (
    CODES,
    COUNT,
    UNSURE,
    Bytes,
    Leaves,
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
def make_scratch(leaves: Leaves, groups: GroupList, depth: int) -> Scratch:  # pragma: no cover
    longest = 0
    for g in range(groups.slots.size):
        for run in range(groups.first_runs[g], groups.last_runs[g]):
            longest = max(longest, np.int64(leaves.sizes[run]))
    return Scratch(
        np.empty(longest, np.int64),
        np.empty((depth + 1, longest), np.uint8),
        np.empty((depth + 1, longest)),
    )


@njit(cache=True, nogil=True)
def _judge_time(
    leaves: Leaves,
    run: int,
    start_us: int,
    slot: int,
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
    leaves: Leaves, run: int, leaf_filter: LeafFilter, scratch: Scratch
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
def judge_run(
    leaves: Leaves,
    run: int,
    start_us: int,
    slot: int,
    timed: bool,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    scratch: Scratch,
) -> bool:  # pragma: no cover - compiled
    """Fill states and shares of a run's leaves; returns False if all are outside."""
    size = np.int64(leaves.sizes[run])
    place = leaf_filter.places[leaves.places[run]]
    if place == OUTSIDE:
        return False
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
    return True


@njit(cache=True, nogil=True)
def scan(
    leaves: Leaves,
    groups: GroupList,
    layout: KeyLayout,
    leaf_filter: LeafFilter,
    a: int,
    b: int,
    out: Floats,
) -> int:  # pragma: no cover - compiled
    """Add up rows by the codes of two features: certainly inside, possibly inside, estimated.

    A negative feature counts as code 0. Returns the number of leaves read.
    """
    scratch = make_scratch(leaves, groups, leaf_filter.program.size)
    counts = np.empty(scratch.numbers.size, np.int64)
    firsts, seconds = np.zeros_like(counts), np.zeros_like(counts)
    read = 0
    for g in range(groups.slots.size):
        for run in range(groups.first_runs[g], groups.last_runs[g]):
            timed = groups.timed[g] > 0
            start, slot = groups.starts_us[g], groups.slots[g]
            if not judge_run(leaves, run, start, slot, timed, layout, leaf_filter, scratch):
                continue
            size = np.int64(leaves.sizes[run])
            read += size
            read_field(leaves, run, COUNT, counts)
            if a >= 0:
                read_field(leaves, run, CODES + a, firsts)
            if b >= 0:
                read_field(leaves, run, CODES + b, seconds)
            for k in range(size):
                state = scratch.states[0, k]
                if state == OUTSIDE:
                    continue
                i, j = firsts[k], seconds[k]
                out[1, i, j] += counts[k]
                if state == INSIDE:
                    out[0, i, j] += counts[k]
                    out[2, i, j] += counts[k]
                else:
                    out[2, i, j] += counts[k] * scratch.shares[0, k]
    return read
