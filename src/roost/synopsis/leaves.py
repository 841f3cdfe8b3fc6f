"""Leaves in packed form: runs of small integers with as few bits as a run needs.

A leaf is one path: place, step, and one bin of each feature, with the number of rows that took it.
The leaves of one group and place form a *run*, sorted by step and path. Inside a run each field is
a column of numbers of equal width: differences of steps, counts minus one, marks of leaves that
may not belong to a part (see :mod:`roost.synopsis.part`), and codes minus the lowest of the run. A
place has similar weather for weeks, so most codes take 3 to 5 bits instead of 7. Counts take none,
and neither do steps where each has one leaf.

Codes refer to bins that all machines share, so packing loses nothing: merging copies the runs that
occur once, and unpacks, sorts, combines and packs the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.kernel.cells import Whole
from roost.model.arrays import Ints, frozen

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Naturals = NDArray[np.uint32]

STEP, COUNT, UNSURE, CODES = 0, 1, 2, 3
HAS_NULL = 128  # in the width of a code: packed value 0 is null
EVERY_STEP = 128  # in the width of steps: one leaf in each, as most sensors report; no bits
#: How many bits a code needs.
BITS_OF = np.array([code.bit_length() for code in range(256)], np.int64)
PADDING = 2  # words after the last run, so that no read has to check for the end


class Leaves(NamedTuple):
    """Packed leaves; run ``r`` has ``sizes[r]`` leaves from word ``starts[r]`` on."""

    places: Naturals  # position of the place in the synopsis' list of places
    firsts: Naturals  # step of the first leaf
    sizes: Naturals
    starts: Naturals
    lows: Bytes  # lowest code by run and feature
    widths: Bytes  # bits by run and field
    words: Words


class Field(NamedTuple):
    """Where the numbers of one field of a run are: the first bit, and how to read them."""

    bit: Whole
    width: Whole
    low: Whole
    nulls: Whole  # 1 if packed value 0 is null


class Paths(NamedTuple):
    """Unpacked leaves, sorted by run and step; run ``r`` begins at ``starts[r]``."""

    run_keys: Ints
    starts: Ints
    steps: NDArray[np.int32]
    counts: NDArray[np.int32]
    unsure: Bytes
    codes: Bytes  # by leaf and feature


def empty_paths(run_keys: Ints, starts: Ints, total: int, features: int) -> Paths:
    """Allocate paths."""
    return Paths(
        run_keys,
        starts,
        np.empty(total, np.int32),
        np.empty(total, np.int32),
        np.empty(total, np.uint8),
        np.empty((total, features), np.uint8),
    )


@njit(cache=True, nogil=True)
def bits_of(value: Whole) -> Whole:  # pragma: no cover - compiled
    """Return how many bits a number needs."""
    bits = 0
    while value > 0:
        bits += 1
        value >>= 1
    return bits


@njit(cache=True, nogil=True)
def read_bits(words: Words, bit: Whole, width: Whole) -> Whole:  # pragma: no cover - compiled
    """Return the number of at most 32 bits at a bit position; one word more must follow."""
    word = bit >> 6
    offset = np.uint64(bit & 63)
    # Two shifts, because a shift by 64 is undefined.
    rest = (words[word + 1] << np.uint64(1)) << (np.uint64(63) - offset)
    value = (words[word] >> offset) | rest
    return np.int64(value & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))


@njit(cache=True, nogil=True)
def read_code(words: Words, field: Field, k: Whole) -> Whole:  # pragma: no cover - compiled
    """Return the number of leaf ``k`` of a run."""
    value = read_bits(words, field.bit + k * field.width, field.width)
    return 0 if field.nulls & (value == 0) else value + field.low - field.nulls


@njit(cache=True, nogil=True)
def measure_runs(paths: Paths, lows: Bytes, widths: Bytes) -> None:  # pragma: no cover - compiled
    """Fill the lowest code of each run and feature, and the bits of each field."""
    features = paths.codes.shape[1]
    # Of codes but null, less 1 (null is 255 then); of all codes; the greatest.
    least, first = np.empty(features, np.uint8), np.empty(features, np.uint8)
    most = np.empty(features, np.uint8)
    for run in range(paths.starts.size - 1):
        begin, end = paths.starts[run], paths.starts[run + 1]
        gap = 0
        every = True
        count = 1
        unsure = 0
        for k in range(begin, end):
            if k > begin:
                gap = max(gap, paths.steps[k] - paths.steps[k - 1])
                every &= paths.steps[k] - paths.steps[k - 1] == 1
            count = max(count, paths.counts[k])
            unsure |= paths.unsure[k]
        widths[run, STEP] = EVERY_STEP if every else bits_of(gap)
        widths[run, COUNT] = bits_of(count - 1)
        widths[run, UNSURE] = unsure
        least[:], first[:], most[:] = 255, 255, 0
        for k in range(begin, end):
            for f in range(features):
                code = paths.codes[k, f]
                least[f] = min(least[f], np.uint8(code - np.uint8(1)))
                first[f] = min(first[f], code)
                most[f] = max(most[f], code)
        for f in range(features):
            low, high, nulls = np.int64(least[f]) + 1, np.int64(most[f]), np.int64(first[f] == 0)
            if high == 0:
                low = nulls = np.int64(0)  # only nulls: no bits
            lows[run, f] = low
            widths[run, CODES + f] = BITS_OF[high - low + nulls] + HAS_NULL * nulls


@njit(cache=True, nogil=True)
def _fill_words(paths: Paths, leaves: Leaves) -> None:  # pragma: no cover - compiled
    words = leaves.words
    features = leaves.lows.shape[1]
    for run in range(leaves.sizes.size):
        begin = paths.starts[run]
        end = begin + np.int64(leaves.sizes[run])
        at = np.int64(leaves.starts[run])
        word, used = np.uint64(0), np.uint64(0)  # of which so many bits are used
        for field in range(CODES + features):
            width = np.uint64(leaves.widths[run, field] & 127)
            if width == 0:
                continue
            f = max(field - CODES, 0)
            low = np.int64(leaves.lows[run, f]) - np.int64(leaves.widths[run, field] >> 7)
            for k in range(begin, end):
                value = np.int64(0)
                if field >= CODES:
                    value = max(np.int64(paths.codes[k, f]) - low, value)  # null: below the lowest
                elif field == STEP:
                    if k > begin:
                        value = np.int64(paths.steps[k] - paths.steps[k - 1])
                elif field == COUNT:
                    value = np.int64(paths.counts[k] - 1)
                else:
                    value = np.int64(paths.unsure[k])
                word |= np.uint64(value) << used
                used += width
                if used >= np.uint64(64):
                    words[at] = word
                    at += 1
                    used -= np.uint64(64)
                    word = np.uint64(value) >> (width - used)
        if used > np.uint64(0):
            words[at] = word


@njit(cache=True, nogil=True)
def locate_field(leaves: Leaves, run: Whole, field: Whole) -> Field:  # pragma: no cover - compiled
    """Return where the counts, the marks or the codes of a run are."""
    bits = np.int64(0)
    for k in range(field):
        bits += leaves.widths[run, k] & 127
    bit = np.int64(leaves.starts[run]) * 64 + bits * np.int64(leaves.sizes[run])
    width = np.int64(leaves.widths[run, field])
    # With a branch here, each call would count references to all arrays: 0.1 us.
    low = np.int64(leaves.lows[run, field - CODES]) if field >= CODES else np.int64(field == COUNT)
    return Field(bit, width & 127, low, width >> 7)


@njit(cache=True, nogil=True)
def read_steps(
    leaves: Leaves, run: Whole, steps: NDArray[Any]
) -> None:  # pragma: no cover - compiled
    """Fill the steps of a run."""
    width = np.int64(leaves.widths[run, STEP])
    bit = np.int64(leaves.starts[run]) * 64
    step = np.int64(leaves.firsts[run])
    if width == EVERY_STEP:
        for k in range(np.int64(leaves.sizes[run])):
            steps[k] = step + k
        return
    for k in range(np.int64(leaves.sizes[run])):
        step += read_bits(leaves.words, bit, width)
        bit += width
        steps[k] = step


@njit(cache=True, nogil=True)
def read_field(
    leaves: Leaves, run: Whole, field: Whole, out: NDArray[Any]
) -> None:  # pragma: no cover
    """Fill the counts, the marks or the codes of a run."""
    found = locate_field(leaves, run, field)
    if found.width == 0:
        out[: leaves.sizes[run]] = found.low
        return
    for k in range(np.int64(leaves.sizes[run])):
        out[k] = read_code(leaves.words, found, k)


@njit(cache=True, nogil=True)
def fill_paths(
    leaves: Leaves, runs: Ints, begins: Ints, paths: Paths
) -> None:  # pragma: no cover - compiled
    """Unpack some runs, each to its own position."""
    for j in range(runs.size):
        run = runs[j]
        size = np.int64(leaves.sizes[run])
        begin = begins[j]
        read_steps(leaves, run, paths.steps[begin : begin + size])
        read_field(leaves, run, COUNT, paths.counts[begin : begin + size])
        read_field(leaves, run, UNSURE, paths.unsure[begin : begin + size])
        for f in range(leaves.lows.shape[1]):
            read_field(leaves, run, CODES + f, paths.codes[begin : begin + size, f])


def run_words(leaves: Leaves) -> Ints:
    """Return how many words each run takes; runs begin with a new word."""
    bits = (leaves.widths & 127).sum(axis=1, dtype=np.int64)
    return np.asarray((leaves.sizes * bits + 63) // 64)


def pack(paths: Paths, places: Naturals) -> Leaves:
    """Pack sorted, combined paths; ``places`` has the position of each run's place."""
    runs, features = paths.starts.size - 1, paths.codes.shape[1]
    lows = np.empty((runs, features), np.uint8)
    widths = np.empty((runs, CODES + features), np.uint8)
    measure_runs(paths, lows, widths)
    firsts = paths.steps[paths.starts[:-1]].astype(np.uint32)
    sizes = np.diff(paths.starts).astype(np.uint32)
    leaves = Leaves(places, firsts, sizes, firsts, lows, widths, np.empty(0, np.uint64))
    starts = np.concatenate([[0], np.cumsum(run_words(leaves))])
    words = np.zeros(int(starts[-1]) + PADDING, np.uint64)
    leaves = leaves._replace(starts=starts[:-1].astype(np.uint32), words=words)
    _fill_words(paths, leaves)
    # As in mapped files: numba compiles the loops of queries once.
    return Leaves(*map(frozen, leaves))


def unpack(leaves: Leaves, runs: Ints, run_keys: Ints) -> Paths:
    """Unpack some runs; ``run_keys`` has their keys."""
    starts = np.concatenate([[0], np.cumsum(leaves.sizes[runs], dtype=np.int64)])
    paths = empty_paths(run_keys, starts, int(starts[-1]), leaves.lows.shape[1])
    fill_paths(leaves, runs, starts[:-1], paths)
    return paths
