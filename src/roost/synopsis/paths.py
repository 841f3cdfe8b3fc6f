"""Sorting and combining of paths, for building and for merging.

Rows and unpacked leaves are sorted by run and step with two counting sorts, then equal paths of a
step are combined. The result does not depend on the order of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.model.arrays import Ints, Mask, frozen
from roost.synopsis.leaves import (
    PADDING,
    Leaves,
    Paths,
    Words,
    empty_paths,
    fill_paths,
    pack,
    run_words,
)

COUNT_MAX = 2**31 - 1  # of a leaf: further rows of the same path have another
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def _number(keys: Ints, slots: Ints, ids: Ints, found: Ints) -> Whole:  # pragma: no cover
    """Fill the number of each key in order of appearance, by open addressing."""
    mask = slots.size - 1
    count = 0
    last_key = np.int64(-1)
    last_id = np.int64(-1)
    for i in range(keys.size):
        key = keys[i]
        if key != last_key:
            slot = np.int64((np.uint64(key) * HASH_FACTOR) >> np.uint64(20)) & mask
            while slots[slot] >= 0 and found[slots[slot]] != key:
                slot = (slot + 1) & mask
            if slots[slot] < 0:
                if 2 * count >= slots.size:
                    return -1
                slots[slot] = count
                found[count] = key
                count += 1
            last_key = key
            last_id = slots[slot]
        ids[i] = last_id
    return count


def rank_keys(keys: Ints) -> tuple[Ints, Ints]:
    """Return the sorted distinct keys, and the rank of each key among them."""
    size = 1 << 12
    while True:
        ids, found = np.empty(keys.size, np.int64), np.empty(size // 2 + 1, np.int64)
        count = _number(keys, np.full(size, -1), ids, found)
        if count >= 0:
            break
        size *= 8
    order = np.argsort(found[:count])
    ranks = np.empty(count, np.int64)
    ranks[order] = np.arange(count)
    return found[:count][order], ranks[ids]


class RunRows(NamedTuple):
    """Rows and their runs: keys and sizes by run, sorted by key; the other columns by row."""

    keys: Ints
    sizes: Ints
    rows: Ints  # number in the table
    ranks: Ints  # of the run
    steps: Ints


@njit(cache=True, nogil=True)
def take_runs(runs: RunRows, mine: Mask) -> RunRows:  # pragma: no cover - compiled
    """Return some of the runs with their rows."""
    ranks, sizes = np.cumsum(mine) - 1, runs.sizes[mine]
    n = sizes.sum()
    out = RunRows(
        runs.keys[mine],
        sizes,
        np.empty(n, np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
    )
    at = 0
    for k in range(runs.rows.size):
        rank = runs.ranks[k]
        if mine[rank]:
            out.rows[at], out.ranks[at], out.steps[at] = runs.rows[k], ranks[rank], runs.steps[k]
            at += 1
    return out


@njit(cache=True, nogil=True)
def sort_rows(
    runs: RunRows,
) -> tuple[Ints, Ints, NDArray[np.int32]]:  # pragma: no cover - compiled
    """Return the position of each row by run and step, where each run begins, and the steps."""
    n, steps, ranks = runs.rows.size, runs.steps, runs.ranks
    sorted_already = True
    for i in range(1, n):
        if steps[i] < steps[i - 1]:
            sorted_already = False
            break
    first = np.empty(0 if sorted_already else n, np.int64)
    if not sorted_already:
        span = steps.max() + 1
        at = np.zeros(span + 1, np.int64)
        for i in range(n):
            at[steps[i] + 1] += 1
        for k in range(span):
            at[k + 1] += at[k]
        for i in range(n):
            first[at[steps[i]]] = i
            at[steps[i]] += 1
    starts = np.zeros(runs.sizes.size + 1, np.int64)
    for k in range(runs.sizes.size):
        starts[k + 1] = starts[k] + runs.sizes[k]
    place = starts[:-1].copy()
    positions, sorted_steps = np.empty(n, np.int64), np.empty(n, np.int32)
    for k in range(n):
        i = k if sorted_already else first[k]
        to = place[ranks[i]]
        place[ranks[i]] += 1
        positions[i] = to
        sorted_steps[to] = steps[i]
    return positions, starts, sorted_steps


@njit(cache=True, nogil=True)
def _compare(paths: Paths, a: Whole, b: Whole) -> Whole:  # pragma: no cover - compiled
    for f in range(paths.codes.shape[1]):
        if paths.codes[a, f] != paths.codes[b, f]:
            return np.int64(paths.codes[a, f]) - np.int64(paths.codes[b, f])
    return np.int64(paths.unsure[a]) - np.int64(paths.unsure[b])


@njit(cache=True, nogil=True)
def _sort_step(paths: Paths, order: Ints, begin: Whole, end: Whole) -> None:  # pragma: no cover
    """Sort the leaves of one step by path (Shell sort: most steps have few leaves)."""
    gap = 1
    while gap < (end - begin) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(begin + gap, end):
            item = order[k]
            j = k
            while j >= begin + gap and _compare(paths, order[j - gap], item) > 0:
                order[j] = order[j - gap]
                j -= gap
            order[j] = item
        gap //= 3


@njit(cache=True, nogil=True)
def _combine_run(paths: Paths, begin: Whole, end: Whole, at: Whole) -> Whole:  # pragma: no cover
    """Sort and combine the leaves of one run, move them to a position, return the next one."""
    features = paths.codes.shape[1]
    order = begin + np.argsort(paths.steps[begin:end], kind="mergesort")
    left = 0
    while left < order.size:
        right = left + 1
        while right < order.size and paths.steps[order[right]] == paths.steps[order[left]]:
            right += 1
        _sort_step(paths, order, left, right)
        left = right
    steps, counts = paths.steps[order], paths.counts[order]
    marks, codes = paths.unsure[order], paths.codes[order]
    for k in range(order.size):
        same = k > 0 and steps[k] == steps[k - 1] and marks[k] == marks[k - 1]
        for f in range(features):
            same = same and codes[k, f] == codes[k - 1, f]
        if same:
            room = COUNT_MAX - np.int64(paths.counts[at - 1])
            if counts[k] <= room:
                paths.counts[at - 1] += counts[k]
                continue
            paths.counts[at - 1] = COUNT_MAX
            counts[k] -= room
        paths.steps[at] = steps[k]
        paths.counts[at] = counts[k]
        paths.unsure[at] = marks[k]
        for f in range(features):
            paths.codes[at, f] = codes[k, f]
        at += 1
    return at


@njit(cache=True, nogil=True)
def _combine(paths: Paths) -> Whole:  # pragma: no cover - compiled
    """Combine all runs in place; returns how many leaves remain."""
    features = paths.codes.shape[1]
    at: Whole = 0
    for run in range(paths.starts.size - 1):
        begin, end = paths.starts[run], paths.starts[run + 1]
        paths.starts[run] = at
        ascending = True
        for k in range(begin + 1, end):
            ascending &= paths.steps[k] > paths.steps[k - 1]
        if not ascending:
            at = _combine_run(paths, begin, end, at)
            continue
        if at < begin:
            for k in range(begin, end):
                to = at + k - begin
                paths.steps[to] = paths.steps[k]
                paths.counts[to] = paths.counts[k]
                paths.unsure[to] = paths.unsure[k]
                for f in range(features):
                    paths.codes[to, f] = paths.codes[k, f]
        at += end - begin
    paths.starts[paths.starts.size - 1] = at
    return at


def combine(paths: Paths) -> Paths:
    """Sort the leaves of each run by step and path, and combine equal ones; reuses the arrays."""
    size = _combine(paths)
    columns = (column[:size] for column in paths[2:])
    return Paths._make((*paths[:2], *columns))


def sort_runs(paths: Paths) -> Paths:
    """Return paths of runs in any order sorted by run; runs with the same key become one."""
    by_key = np.argsort(paths.run_keys, kind="stable")
    sizes = np.diff(paths.starts)[by_key]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    inner = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    order = np.repeat(paths.starts[:-1][by_key], sizes) + inner
    keys, firsts = np.unique(paths.run_keys[by_key], return_index=True)
    columns = (column[order] for column in paths[2:])
    return Paths._make((keys, np.append(starts[firsts], starts[-1]), *columns))


@njit(cache=True, nogil=True)
def _copy_words(
    leaves: Leaves, runs: Ints, lengths: Ints, words: Words, starts: Ints
) -> None:  # pragma: no cover - compiled
    """Copy the packed words of some runs, each to its own position."""
    for k in range(runs.size):
        begin = np.int64(leaves.starts[runs[k]])
        for j in range(lengths[k]):
            words[starts[k] + j] = leaves.words[begin + j]


def join_leaves(parts: Sequence[tuple[Leaves, Ints]]) -> tuple[Ints, Leaves]:
    """Merge the leaves of several synopses with equal bins and places, each with its run keys.

    Returns the keys of the merged runs, and the runs. Those that occur in one part only are copied
    as they are, which is nearly all of them when a batch is added to the stream before it.
    """
    # A stable sort of sorted pieces is a merge.
    keys = np.sort(np.concatenate([own for _, own in parts]), kind="stable")
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    alone, keys = np.diff(firsts, append=keys.size) == 1, keys[firsts]
    copied = [alone[np.searchsorted(keys, own)] for _, own in parts]
    sources = [
        (leaves, np.flatnonzero(mask)) for (leaves, _), mask in zip(parts, copied, strict=True)
    ]
    if not alone.all():
        shared = _join_runs(parts, [np.flatnonzero(~mask) for mask in copied])
        sources.append((shared, np.arange(shared.sizes.size)))
    found = [own[mask] for (_, own), mask in zip(parts, copied, strict=True)]
    order = np.argsort(np.concatenate([*found, keys[~alone]]), kind="stable")
    columns = (
        np.concatenate([leaves[k][at] for leaves, at in sources])[order]
        for k in range(len(Leaves._fields) - 1)
    )
    joined = Leaves._make((*columns, np.empty(0, np.uint64)))
    lengths = run_words(joined)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    words = np.zeros(int(starts[-1]) + PADDING, np.uint64)
    position = np.empty(order.size, np.int64)
    position[order] = np.arange(order.size)
    begin = 0
    for leaves, at in sources:
        to = position[begin : begin + at.size]
        _copy_words(Leaves(*map(frozen, leaves)), at, lengths[to], words, starts[to])
        begin += at.size
    joined = joined._replace(starts=starts[:-1].astype(np.uint32), words=words)
    return keys, Leaves(*map(frozen, joined))


def _join_runs(parts: Sequence[tuple[Leaves, Ints]], runs: Sequence[Ints]) -> Leaves:
    """Merge some runs of each part.

    Runs of the same key are unpacked one after the other, by their first step. Batches follow each
    other in time, so most of them are sorted then.
    """
    pairs = list(zip(parts, runs, strict=True))
    keys = np.concatenate([run_keys[at] for (_, run_keys), at in pairs])
    firsts = np.concatenate([leaves.firsts[at] for (leaves, _), at in pairs])
    places = np.concatenate([leaves.places[at] for (leaves, _), at in pairs])
    sizes = np.concatenate([leaves.sizes[at] for (leaves, _), at in pairs]).astype(np.int64)
    order = np.lexsort((firsts, keys))
    ends = np.cumsum(sizes[order])
    begins = np.empty_like(ends)
    begins[order] = ends - sizes[order]
    run_keys, first_pairs = np.unique(keys[order], return_index=True)
    total = int(ends[-1]) if ends.size else 0
    starts = np.append((ends - sizes[order])[first_pairs], total)
    paths = empty_paths(run_keys, starts, total, parts[0][0].lows.shape[1])
    at = 0
    for (leaves, _), own in pairs:
        fill_paths(leaves, own, begins[at : at + own.size], paths)
        at += own.size
    return pack(combine(paths), places[order][first_pairs])
