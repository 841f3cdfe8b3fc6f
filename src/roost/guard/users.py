"""User table: numbers per user, in columns, with a bounded number of users.

Problem: requests name users, and an attacker may invent a million names. A dictionary of objects
would grow without bound and cost microseconds per request.

Idea: one row of numbers per user, found through a hash table in compiled loops. The table grows up
to a maximum. Users without requests for ``FORGET_ROUNDS`` rounds are evicted when a round is
closed: by then fading numbers are negligible, and no cluster stays suspicious that long. If the
table is full within a round, a quarter of the rows is evicted: first users who were never in a
hotspot, of those the ones with the fewest registrations, then the least recently active. So a flood
of invented names evicts other invented names, and not the users that the detector looks for.

Two numbers of table 5.1 never fade, x11 and x14; eviction bounds them.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.guard.loops import (
    FADED,
    INVOLVED,
    NEW,
    NUMBERS,
    RATE_ROUNDS,
    SEQUENCE,
    SEQUENCE_NEW,
    WEIGHTED,
    UserRows,
    add_rows,
    compact,
    find_rows,
    hash_names,
    rebuild,
)
from roost.kernel.ids import text_buffers

USERS_MAX = 1 << 18
FORGET_ROUNDS = 64
NAME_MAX = 200
_ROWS_MIN = 1024
_FREED = 4
_REGISTERED_MAX = (1 << 20) - 1
_RECENT_MAX = (1 << 16) - 1
_GROWTH = 4

Keys = NDArray[np.uint64]


def make_secret(random: np.random.Generator) -> Keys:
    """Draw the secret that keys of names depend on."""
    return random.integers(0, 1 << 64, 2, np.uint64)


def keys_of(names: pa.Array, secret: Keys) -> Keys:
    """Return the key of each name; a missing name has the key of an empty one."""
    if pa.types.is_dictionary(names.type):
        known = keys_of(names.dictionary, secret)
        codes = names.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return known[codes] if len(known) else np.zeros(len(names), np.uint64)
    offsets, data = text_buffers(names)
    keys = np.empty(len(names), np.uint64)
    hash_names(offsets, data, secret, keys)
    return keys


class UserTable:
    """Rows of numbers by user.

    Parameters
    ----------
    secret
        Secret of the keys.
    users_max
        Maximum number of rows.

    Attributes
    ----------
    numbers
        ``(rows, NUMBERS)``, columns as in ``loops.py``; only the first :attr:`used` are valid.
    active
        Round in which each user was last active.
    forgotten
        Number of evicted users.
    """

    def __init__(self, secret: Keys, users_max: int = USERS_MAX) -> None:
        assert users_max >= 2 * _FREED, "too few rows"
        self.secret = secret
        self.users_max = users_max
        self.used = 0
        self.forgotten = 0
        self.names: list[str] = []
        self.keys: Keys = np.zeros(0, np.uint64)
        self.numbers: NDArray[np.float64] = np.zeros((0, NUMBERS))
        self.active: NDArray[np.int64] = np.zeros(0, np.int64)
        self._room(min(_ROWS_MIN, users_max))

    def _room(self, rows: int) -> None:
        """Resize the table, keeping its rows."""
        keys = np.zeros(rows, np.uint64)
        numbers = np.zeros((rows, NUMBERS))
        active = np.zeros(rows, np.int64)
        keys[: self.used] = self.keys[: self.used]
        numbers[: self.used] = self.numbers[: self.used]
        active[: self.used] = self.active[: self.used]
        self.keys, self.numbers, self.active = keys, numbers, active
        self._index = np.zeros(1 << (2 * rows - 1).bit_length(), np.int32)
        rebuild(self._index, self.keys, self.used)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns and the index, without names of at most ``NAME_MAX`` characters."""
        return sum(a.nbytes for a in (self.keys, self.numbers, self.active, self._index))

    def find(self, keys: Keys) -> NDArray[np.int32]:
        """Return the row of each key, -1 for unknown users."""
        rows = np.empty(len(keys), np.int32)
        find_rows(keys, self._index, self.keys, rows)
        return rows

    def count(
        self, keys: Keys, names: pa.Array, counts: NDArray[np.int64], number: int
    ) -> NDArray[np.int32]:
        """Count registrations and terminations of distinct users in a round.

        Returns
        -------
        numpy.ndarray
            Row of each user; -1 if it was evicted to make room for later ones.
        """
        at = 0
        newcomers = np.empty(len(keys), np.int64)
        while True:
            rows = UserRows(self._index, self.keys, self.numbers, self.active)
            at, used = add_rows(keys, at, number, rows, self.used, counts, newcomers)
            self._add_names(names, newcomers, used)
            if at == len(keys):
                return self.find(keys)
            self._widen()

    def rows_for(self, keys: Keys, names: pa.Array, number: int) -> NDArray[np.int32]:
        """Return the row of each of some distinct users, marked active; -1 if evicted."""
        return self.count(keys, names, np.zeros((len(keys), 2), np.int64), number)

    def _add_names(self, names: pa.Array, newcomers: NDArray[np.int64], used: int) -> None:
        """Store the names of new rows."""
        fresh = used - self.used
        if fresh:
            texts = names.take(pa.array(newcomers[:fresh]))
            if pa.types.is_dictionary(texts.type):
                texts = texts.dictionary_decode()
            known = texts.to_pylist()
            if (pc.max(pc.utf8_length(texts)).as_py() or 0) > NAME_MAX:
                keys = self.keys[self.used : used].tolist()
                known = [shown(name, key) for name, key in zip(known, keys, strict=True)]
            self.names.extend(known)
            self.used = used

    def _widen(self) -> None:
        """Add rows; at the maximum, evict a quarter of them."""
        if len(self.keys) < self.users_max:
            self._room(min(_GROWTH * len(self.keys), self.users_max))
            return
        rows = self.numbers[: self.used]
        hot = (rows[:, RATE_ROUNDS] > 0) | (rows[:, INVOLVED] > 0) | (rows[:, SEQUENCE_NEW] > 0)
        registered = np.minimum(rows[:, NEW] + rows[:, FADED], _REGISTERED_MAX).astype(np.int64)
        active = self.active[: self.used]
        recent = np.minimum(active - active.min(), _RECENT_MAX)
        # One rank per user, the lowest evicted first; sorting by three columns takes ten times as
        # long.
        rank = ((hot * (_REGISTERED_MAX + 1) + registered) * (_RECENT_MAX + 1) + recent) * self.used
        rank += np.arange(self.used)
        count = max(self.used // _FREED, 1)
        kept = np.ones(self.used, np.bool_)
        kept[np.argpartition(rank, count)[:count]] = False
        self._retain(kept)

    def evict_idle(self, number: int) -> None:
        """Evict users who were not active in the last ``FORGET_ROUNDS`` rounds."""
        kept = self.active[: self.used] > number - FORGET_ROUNDS
        if not kept.all():
            self._retain(kept)

    def _retain(self, kept: NDArray[np.bool_]) -> None:
        self.names = list(compress(self.names, kept.tolist()))
        self.forgotten += self.used - len(self.names)
        self.used = compact(kept, self.keys, self.numbers, self.active)
        rebuild(self._index, self.keys, self.used)

    def start_round(self) -> None:
        """Reset the numbers of the open round."""
        self.numbers[: self.used, : SEQUENCE + 1] = 0.0
        self.numbers[: self.used, WEIGHTED] = 0.0
        self.numbers[: self.used, RATE_ROUNDS + 1 :] = 0.0

    def restore(
        self, keys: Keys, numbers: NDArray[np.float64], active: NDArray[np.int64], names: list[str]
    ) -> None:
        """Fill an empty table with stored rows."""
        assert self.used == 0, "a table is restored once"
        rows = len(self.keys)
        while rows < len(keys):
            rows = min(_GROWTH * rows, self.users_max)
            assert rows >= len(keys) or rows < self.users_max, "more users than there is room for"
        self._room(rows)
        self.used = len(keys)
        self.keys[: self.used] = keys
        self.numbers[: self.used] = numbers
        self.active[: self.used] = active
        self.names = list(names)
        rebuild(self._index, self.keys, self.used)


def shown(name: str | None, key: int) -> str:
    """Return the stored name: long names are truncated, with their key appended."""
    text = name or ""
    return text if len(text) <= NAME_MAX else f"{text[:NAME_MAX]}…{key:016x}"


def shown_name(name: str) -> str:
    """Return a name for messages: long names are truncated."""
    return name if len(name) <= NAME_MAX else f"{name[:NAME_MAX]}…"
