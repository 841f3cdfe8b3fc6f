"""Compiled loops of the guard: keys of user names, look-up, admission, counting, hotspots.

A user is identified by a 64-bit key of their name. The key is SipHash-1-3 with a secret that is
drawn once per state: with an unkeyed hash, an attacker could construct a name that collides with
another user's and have that user blocked. A million users collide by chance once in 37 million
cases, so names are not compared.

``index`` is a hash table with open addressing: a row number plus one, or zero if empty. Its size is
a power of two, and at most half of it is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, Mask

# Columns of a user's counters. The first five are x1 to x5 of the open round, the next five x6 to
# x10 as of the last closed round.
NEW, DELETED, INVOLVED, CONTRIBUTED, SEQUENCE = range(5)
FADED = 5
SEQUENCE_NEW, WEIGHTED, RATE_SUM, RATE_ROUNDS = range(10, 14)
# Weight, then weighted sums of x, y and squares.
PLACE_WEIGHT, PLACE_SQUARE = 14, 17
# Expected share of a user's queries in the hotspots of the open round that the user is in.
CHANCE = 18
NUMBERS = 19

# Kinds of requests for the counters.
UNCOUNTED, REGISTERS, TERMINATES, REFUSED = range(4)
KINDS = 3

_C0 = np.uint64(0x736F6D6570736575)
_C1 = np.uint64(0x646F72616E646F6D)
_C2 = np.uint64(0x6C7967656E657261)
_C3 = np.uint64(0x7465646279746573)
_LAST = np.uint64(0xFF)

Keys = NDArray[np.uint64]
Index = NDArray[np.int32]


class UserRows(NamedTuple):
    """Hash table of users: index, keys, counters, and the round each was last active in."""

    entries: Index
    keys: Keys
    numbers: Floats
    active: Ints


class BlockRows(NamedTuple):
    """Hash table of block events: index, keys, first event of each user, positions, states."""

    entries: Index
    keys: Keys
    starts: Ints
    positions: Ints
    blocked: Mask


@njit(cache=True, nogil=True, inline="always")
def _rotated(value: Any, bits: int) -> Any:  # pragma: no cover - compiled
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@njit(cache=True, nogil=True, inline="always")
def _sip_round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:  # pragma: no cover - compiled
    v0 += v1
    v1 = _rotated(v1, 13) ^ v0
    v0 = _rotated(v0, 32)
    v2 += v3
    v3 = _rotated(v3, 16) ^ v2
    v0 += v3
    v3 = _rotated(v3, 21) ^ v0
    v2 += v1
    v1 = _rotated(v1, 17) ^ v2
    v2 = _rotated(v2, 32)
    return v0, v1, v2, v3


@njit(cache=True, nogil=True)
def hash_names(
    offsets: Ints, data: NDArray[np.uint8], secret: Keys, keys: Keys
) -> None:  # pragma: no cover - compiled
    """Compute SipHash-1-3 of each name."""
    for row in range(keys.size):
        start, stop = offsets[row], offsets[row + 1]
        v0, v1 = secret[0] ^ _C0, secret[1] ^ _C1
        v2, v3 = secret[0] ^ _C2, secret[1] ^ _C3
        at = start
        while at + 8 <= stop:
            word = np.uint64(0)
            for k in range(8):
                word |= np.uint64(data[at + k]) << np.uint64(8 * k)
            v3 ^= word
            v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
            v0 ^= word
            at += 8
        word = np.uint64((stop - start) & 0xFF) << np.uint64(56)
        for k in range(stop - at):
            word |= np.uint64(data[at + k]) << np.uint64(8 * k)
        v3 ^= word
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0 ^= word
        v2 ^= _LAST
        for _ in range(3):
            v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        keys[row] = v0 ^ v1 ^ v2 ^ v3


@njit(cache=True, nogil=True, inline="always")
def _find_entry(key: Any, index: Index, held: Keys) -> Any:  # pragma: no cover - compiled
    """Return the index entry of a key, or the empty entry for it."""
    mask = np.uint64(index.size - 1)
    at = key & mask
    while index[at] != 0 and held[index[at] - 1] != key:
        at = (at + np.uint64(1)) & mask
    return at


@njit(cache=True, nogil=True)
def rebuild(index: Index, held: Keys, used: int) -> None:  # pragma: no cover - compiled
    """Index the first ``used`` keys."""
    index[:] = 0
    for row in range(used):
        index[_find_entry(held[row], index, held)] = row + 1


@njit(cache=True, nogil=True)
def compact(retained: Mask, users: UserRows) -> int:  # pragma: no cover - compiled
    """Move the retained rows to the front, in order; return their number."""
    _, held, numbers, active = users
    to = 0
    for row in range(retained.size):
        if retained[row]:
            held[to], active[to] = held[row], active[row]
            numbers[to] = numbers[row]
            to += 1
    held[to : retained.size] = 0
    active[to : retained.size] = 0
    numbers[to : retained.size] = 0.0
    return to


@njit(cache=True, nogil=True)
def find_rows(keys: Keys, index: Index, held: Keys) -> Index:  # pragma: no cover - compiled
    """Return the row of each key, -1 for unknown users."""
    rows = np.empty(keys.size, np.int32)
    for k in range(keys.size):
        rows[k] = index[_find_entry(keys[k], index, held)] - 1
    return rows


@njit(cache=True, nogil=True)
def add_rows(
    keys: Keys,
    start: int,
    number: int,
    users: UserRows,
    used: int,
    counts: Ints,
    newcomers: Ints,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Count requests of users from ``start`` on, adding rows for unknown users until full.

    ``newcomers`` receives the index in ``keys`` of each new row. Returns where the loop stopped and
    the number of used rows.
    """
    index, held, numbers, active = users
    first = used
    for k in range(start, keys.size):
        at = _find_entry(keys[k], index, held)
        if index[at] == 0:
            if used == held.size:
                return k, used
            newcomers[used - first] = k
            held[used] = keys[k]
            used += 1
            index[at] = used
        row = index[at] - 1
        active[row] = number
        numbers[row, NEW] += counts[k, 0]
        numbers[row, DELETED] += counts[k, 1]
    return keys.size, used


@njit(cache=True, nogil=True)
def tally_rows(
    keys: Keys, kinds: NDArray[np.int8]
) -> tuple[Ints, Ints]:  # pragma: no cover - compiled
    """Return the first request of each user, and the requests by user and kind."""
    size = 1
    while size <= 2 * keys.size:
        size *= 2
    index = np.zeros(size, np.int32)
    firsts = np.empty(keys.size, np.int64)
    counts = np.zeros((keys.size, KINDS), np.int64)
    users = 0
    mask = np.uint64(size - 1)
    for k in range(keys.size):
        if kinds[k] == UNCOUNTED:
            continue
        at = keys[k] & mask
        while index[at] != 0 and keys[firsts[index[at] - 1]] != keys[k]:
            at = (at + np.uint64(1)) & mask
        if index[at] == 0:
            firsts[users] = k
            users += 1
            index[at] = users
        counts[index[at] - 1, kinds[k] - 1] += 1
    return firsts[:users], counts[:users]


@njit(cache=True, nogil=True)
def judge_rows(keys: Keys, position: int, blocks: BlockRows) -> Mask:  # pragma: no cover - compiled
    """Return whether requests are admitted: the last event before their position decides."""
    index, held, starts, positions, blocked = blocks
    admitted = np.ones(keys.size, np.bool_)
    for k in range(keys.size):
        user = index[_find_entry(keys[k], index, held)] - 1
        if user < 0:
            continue
        at = position + k
        for event in range(starts[user + 1] - 1, starts[user] - 1, -1):
            if positions[event] < at:
                admitted[k] = not blocked[event]
                break
    return admitted


@njit(cache=True, nogil=True)
def sense(
    bounds: NDArray[Any],
    rects: NDArray[Any],
    codes: NDArray[np.int32],
    ages: Ints,
    present: Mask,
    by_age: Ints,
    older: Ints,
    places: Floats,
) -> None:  # pragma: no cover - compiled
    """Count the queries that touch a rectangle by user and age, and sum their locations.

    A place is the weighted sum of the centres, and of their squares with the query's own extent;
    the weights are those of x12. Queries older than all ages are counted in ``older``.
    """
    rounds = by_age.shape[1]
    for k in range(codes.size):
        for r in range(rects.shape[0]):
            wide = bounds[k, 0] < rects[r, 2] and bounds[k, 2] >= rects[r, 0]
            if not (wide and bounds[k, 1] < rects[r, 3] and bounds[k, 3] >= rects[r, 1]):
                continue
            user = codes[k]
            present[user] = True
            age = max(ages[k], 0)
            if age >= rounds:
                older[user] += 1
            else:
                by_age[user, age] += 1
                weight = 0.5**age
                x, y = (bounds[k, 0] + bounds[k, 2]) / 2.0, (bounds[k, 1] + bounds[k, 3]) / 2.0
                half_x, half_y = bounds[k, 2] - x, bounds[k, 3] - y
                places[user, 0] += weight * x
                places[user, 1] += weight * y
                places[user, 2] += weight * (x * x + y * y + half_x * half_x + half_y * half_y)
            break
