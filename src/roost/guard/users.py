"""What is known of each user, in columns, and never of more users than there is room for.

The problem: requests name users, and anybody may make up a million of them. A dictionary of objects
would grow without bound and cost microseconds a request.

The idea: a row of numbers a user, found through a hash table that compiled loops walk. The table
grows up to a cap. Users who were not heard of for ``FORGET_ROUNDS`` rounds are forgotten when a
round is closed: what fades has faded to nothing by then, and the longest time that a cluster stays
suspicious is over. Where the cap is reached within a round, a quarter of the rows is freed: first
users who were never in a hotspot, of those the ones who have asked for least, and then those not
heard of for longest. So a flood of made-up names pushes out other made-up names, and not the users
that the detector looks for.

Two numbers of table 5.1 never fade, x11 and x14. Forgetting is what bounds them.
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
_ASKED_MAX = (1 << 20) - 1
_RECENT_MAX = (1 << 16) - 1
_GROWTH = 4

Keys = NDArray[np.uint64]


def make_secret(random: np.random.Generator) -> Keys:
    """Draw the secret that keys of names depend on."""
    return random.integers(0, 1 << 64, 2, np.uint64)


def keys_of(names: pa.Array, secret: Keys) -> Keys:
    """Key of each name; a missing name has the key of an empty one."""
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
        What keys depend on.
    users_max
        Rows there may be.

    Attributes
    ----------
    numbers
        ``(rows, NUMBERS)``, columns as named in ``loops.py``; only the first :attr:`used` count.
    active
        Round in which each user was last heard of.
    forgotten
        Users that were dropped so far.
    """

    def __init__(self, secret: Keys, users_max: int = USERS_MAX) -> None:
        assert users_max >= 2 * _FREED, "room for a few users"
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
        """Make room for so many rows; keeps what is there."""
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
        """Bytes of the columns and of the index; names come on top, at most ``NAME_MAX`` each."""
        return sum(a.nbytes for a in (self.keys, self.numbers, self.active, self._index))

    def find(self, keys: Keys) -> NDArray[np.int32]:
        """Row of each key, -1 for strangers."""
        rows = np.empty(len(keys), np.int32)
        find_rows(keys, self._index, self.keys, rows)
        return rows

    def count(
        self, keys: Keys, names: pa.Array, counts: NDArray[np.int64], number: int
    ) -> NDArray[np.int32]:
        """Count registrations and terminations of some different users in a round.

        Returns
        -------
        numpy.ndarray
            Row of each user; -1 where there was no room.
        """
        at = 0
        newcomers = np.empty(len(keys), np.int64)
        while True:
            at, used = add_rows(
                keys,
                at,
                number,
                self._index,
                self.keys,
                self.used,
                counts,
                self.numbers,
                self.active,
                newcomers,
            )
            self._welcome(names, newcomers, used)
            if at == len(keys):
                return self.find(keys)
            self._widen()

    def rows_for(self, keys: Keys, names: pa.Array, number: int) -> NDArray[np.int32]:
        """Row of each of some different users, heard of in a round; -1 where there is no room."""
        return self.count(keys, names, np.zeros((len(keys), 2), np.int64), number)

    def _welcome(self, names: pa.Array, newcomers: NDArray[np.int64], used: int) -> None:
        """Write down the names of new rows."""
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
        """Make more rows; at the cap, free a quarter of them."""
        if len(self.keys) < self.users_max:
            self._room(min(_GROWTH * len(self.keys), self.users_max))
            return
        rows = self.numbers[: self.used]
        hot = (rows[:, RATE_ROUNDS] > 0) | (rows[:, INVOLVED] > 0) | (rows[:, SEQUENCE_NEW] > 0)
        asked = np.minimum(rows[:, NEW] + rows[:, FADED], _ASKED_MAX).astype(np.int64)
        active = self.active[: self.used]
        recent = np.minimum(active - active.min(), _RECENT_MAX)
        # One number each, the more the longer to keep; sorting by three columns takes ten times
        # as long.
        worth = ((hot * (_ASKED_MAX + 1) + asked) * (_RECENT_MAX + 1) + recent) * self.used
        worth += np.arange(self.used)
        count = max(self.used // _FREED, 1)
        kept = np.ones(self.used, np.bool_)
        kept[np.argpartition(worth, count)[:count]] = False
        self._keep(kept)

    def forget(self, number: int) -> None:
        """Drop users who were not heard of in the last ``FORGET_ROUNDS`` rounds."""
        kept = self.active[: self.used] > number - FORGET_ROUNDS
        if not kept.all():
            self._keep(kept)

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self.names = list(compress(self.names, kept.tolist()))
        self.forgotten += self.used - len(self.names)
        self.used = compact(kept, self.keys, self.numbers, self.active)
        rebuild(self._index, self.keys, self.used)

    def start_round(self) -> None:
        """Set what is counted by round back to nothing."""
        self.numbers[: self.used, : SEQUENCE + 1] = 0.0
        self.numbers[: self.used, WEIGHTED] = 0.0
        self.numbers[: self.used, RATE_ROUNDS + 1 :] = 0.0

    def restore(
        self, keys: Keys, numbers: NDArray[np.float64], active: NDArray[np.int64], names: list[str]
    ) -> None:
        """Fill an empty table with rows that were saved."""
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
    """Name as it is kept: long ones are cut off, and told apart by their keys."""
    text = name or ""
    return text if len(text) <= NAME_MAX else f"{text[:NAME_MAX]}…{key:016x}"


def shown_name(name: str) -> str:
    """Name for a sentence: long ones are cut off."""
    return name if len(name) <= NAME_MAX else f"{name[:NAME_MAX]}…"
