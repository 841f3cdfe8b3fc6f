"""User table: counters per user, in columns, for a bounded number of users.

An attacker may invent a million names; a dictionary of objects would grow without bound and cost
microseconds per request. Here each user has one row, found through a hash table in compiled loops.
Users without requests for ``IDLE_ROUNDS`` rounds are evicted when a round is closed: by then the
decaying counters are negligible, and no cluster stays suspicious that long. If the table is full
within a round, a quarter of the rows is evicted: first users who were never in a hotspot, of those
the ones with the fewest registrations, then the least recently active. So a flood of invented names
evicts other invented names and not the users that the detector looks for.

x11 and x14 of table 5.1 never decay; eviction bounds them.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.guard import loops
from roost.guard.loops import Keys
from roost.kernel.ids import text_buffers

USERS_MAX = 1 << 18
IDLE_ROUNDS = 64
NAME_MAX = 200
_ROWS_MIN = 1024
_FREED = 4
_REGISTERED_MAX = (1 << 20) - 1
_RECENT_MAX = (1 << 16) - 1
_GROWTH = 4


def make_secret(random: np.random.Generator) -> Keys:
    """Draw the secret of the users' keys."""
    return random.integers(0, 1 << 64, 2, np.uint64)


def keys_of(names: pa.Array, secret: Keys) -> Keys:
    """Return the key of each name; a missing name has the key of an empty one."""
    if pa.types.is_dictionary(names.type):
        known = keys_of(names.dictionary, secret)
        codes = names.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return known[codes] if len(known) else np.zeros(len(names), np.uint64)
    offsets, data = text_buffers(names)
    keys = np.empty(len(names), np.uint64)
    loops.hash_names(offsets, data, secret, keys)
    return keys


class UserTable:
    """Counters by user, in at most ``users_max`` rows, of which the first :attr:`used` are valid.

    ``numbers`` has the columns that ``loops.py`` lists, ``active`` the round in which each user was
    last active.
    """

    def __init__(self, secret: Keys, users_max: int = USERS_MAX) -> None:
        assert users_max >= 2 * _FREED, "too few rows"
        self.secret = secret
        self.users_max = users_max
        self.used = 0
        self.evicted = 0  # users, in total
        self.names: list[str] = []
        self.keys: Keys = np.zeros(0, np.uint64)
        self.numbers: NDArray[np.float64] = np.zeros((0, loops.NUMBERS))
        self.active: NDArray[np.int64] = np.zeros(0, np.int64)
        self._resize(min(_ROWS_MIN, users_max))

    def _resize(self, rows: int) -> None:
        fresh = rows - len(self.keys)
        self.keys = np.pad(self.keys, (0, fresh))
        self.numbers = np.pad(self.numbers, ((0, fresh), (0, 0)))
        self.active = np.pad(self.active, (0, fresh))
        self._index = np.zeros(1 << (2 * rows - 1).bit_length(), np.int32)
        loops.rebuild(self._index, self.keys, self.used)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns and the index, without the names."""
        return sum(a.nbytes for a in (self.keys, self.numbers, self.active, self._index))

    def _rows(self) -> loops.UserRows:
        return loops.UserRows(self._index, self.keys, self.numbers, self.active)

    def find(self, keys: Keys) -> NDArray[np.int32]:
        """Return the row of each key, -1 for unknown users."""
        return loops.find_rows(keys, self._index, self.keys)

    def count(
        self, keys: Keys, names: pa.Array, counts: NDArray[np.int64], number: int
    ) -> NDArray[np.int32]:
        """Count registrations and terminations of distinct users in a round.

        Returns the row of each user, -1 for users who were evicted in favour of later ones.
        """
        at = 0
        newcomers = np.empty(len(keys), np.int64)
        while True:
            at, used = loops.add_rows(keys, at, number, self._rows(), self.used, counts, newcomers)
            self._add_names(names, newcomers, used)
            if at == len(keys):
                return self.find(keys)
            self._make_room()

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

    def _make_room(self) -> None:
        """Add rows; at the maximum, evict a quarter of them."""
        if len(self.keys) < self.users_max:
            self._resize(min(_GROWTH * len(self.keys), self.users_max))
            return
        rows = self.numbers[: self.used]
        in_hotspots = [loops.RATE_ROUNDS, loops.INVOLVED, loops.SEQUENCE_NEW]
        hot = (rows[:, in_hotspots] > 0).any(axis=1)
        registrations = rows[:, loops.NEW] + rows[:, loops.FADED]
        registered = np.minimum(registrations, _REGISTERED_MAX).astype(np.int64)
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
        """Evict users who were not active in the last ``IDLE_ROUNDS`` rounds."""
        kept = self.active[: self.used] > number - IDLE_ROUNDS
        if not kept.all():
            self._retain(kept)

    def _retain(self, kept: NDArray[np.bool_]) -> None:
        self.names = list(compress(self.names, kept.tolist()))
        self.evicted += self.used - len(self.names)
        self.used = loops.compact(kept, self._rows())
        loops.rebuild(self._index, self.keys, self.used)

    def start_round(self) -> None:
        """Reset the counters of the open round."""
        self.numbers[: self.used, : loops.SEQUENCE + 1] = 0.0
        self.numbers[: self.used, loops.WEIGHTED] = 0.0
        self.numbers[: self.used, loops.RATE_ROUNDS + 1 :] = 0.0

    def restore(
        self, keys: Keys, numbers: NDArray[np.float64], active: NDArray[np.int64], names: list[str]
    ) -> None:
        """Fill an empty table with stored rows."""
        assert self.used == 0, "a table is restored once"
        assert len(keys) <= self.users_max, "more users than the table has rows"
        while len(self.keys) < len(keys):
            self._resize(min(_GROWTH * len(self.keys), self.users_max))
        self.used = len(keys)
        self.keys[: self.used] = keys
        self.numbers[: self.used] = numbers
        self.active[: self.used] = active
        self.names = list(names)
        loops.rebuild(self._index, self.keys, self.used)


def shown(name: str | None, key: int | None = None) -> str:
    """Return a name for messages: long names are truncated; stored ones have the key appended."""
    text = name or ""
    suffix = "" if key is None else f"{key:016x}"
    return text if len(text) <= NAME_MAX else f"{text[:NAME_MAX]}…{suffix}"
