"""Who is blocked, since when, and why: a history by user, because batches are run again.

A block is an event at a log position, and so is its end. A request at position ``p`` is judged by
the last event before ``p``, so a batch that is repeated after its user was blocked still admits
what it admitted the first time.

Histories are kept for good: a block that is forgotten is an open door. They grow with the
decisions of the detector and of operators, not with requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.guard.loops import find_rows, judge_rows, rebuild
from roost.guard.users import Keys


@dataclass(frozen=True, slots=True)
class Event:
    """A block (or its end) from a log position on: rows after it are refused (or admitted).

    With ``evict``, the user's queries are to be ended, too.
    """

    position: int
    blocked: bool
    round: int
    reason: str
    evict: bool = False


@dataclass(slots=True)
class Record:
    """A user's history, in order of position."""

    key: int
    name: str
    events: list[Event] = field(default_factory=list)
    evicted: int | None = None  # position of the block whose eviction is done


class BlockList:
    """Histories by user key, laid out for compiled loops."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._lay_out()

    def _lay_out(self, refused: dict[int, int] | None = None) -> None:
        records = list(self._records.values())
        counts = [len(record.events) for record in records]
        events = [event for record in records for event in record.events]
        self._keys = np.array([record.key for record in records], np.uint64)
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._positions = np.array([event.position for event in events], np.int64)
        self._states = np.array([event.blocked for event in events], np.bool_)
        self._index = np.zeros(1 << (2 * len(records) + 1).bit_length(), np.int32)
        rebuild(self._index, self._keys, len(records))
        known = refused or {}
        self._refused = np.array([known.get(record.key, 0) for record in records], np.int64)
        # Other threads read this one while blocks are added.
        self._names = frozenset(r.name for r in records if self.now(r.key) is not None)

    def _refusals(self) -> dict[int, int]:
        return dict(zip(self._keys.tolist(), self._refused.tolist(), strict=True))

    def judge(self, keys: Keys, position: int) -> NDArray[np.bool_]:
        """Admit or refuse rows at ``position`` and after; see ``loops.py: judge_rows``."""
        if not self._records:
            return np.ones(len(keys), np.bool_)
        admitted = np.empty(len(keys), np.bool_)
        judge_rows(
            keys,
            position,
            self._index,
            self._keys,
            self._starts,
            self._positions,
            self._states,
            admitted,
        )
        return admitted

    def count(self, keys: Keys, refused: NDArray[np.int64]) -> None:
        """Add to how often some different users were refused; strangers are passed over."""
        rows = np.empty(len(keys), np.int32)
        find_rows(keys, self._index, self._keys, rows)
        known = rows >= 0
        self._refused[rows[known]] += refused[known]

    def now(self, key: int) -> Event | None:
        """Return the event that blocks a user now, None where nothing does."""
        record = self._records.get(key)
        last = record.events[-1] if record and record.events else None
        return last if last is not None and last.blocked else None

    def add(self, users: Iterable[tuple[int, str]], event: Event) -> None:
        """Add an event for users, as keys and names; at the same position, the new one holds.

        Operators write at the end of the log and the detector where it is folded, so an event may
        come before one that is known.
        """
        for key, name in users:
            events = self._records.setdefault(key, Record(key, name)).events
            at = bisect_left(events, event.position, key=lambda known: known.position)
            same = at < len(events) and events[at].position == event.position
            events[at : at + same] = [event]
        self._lay_out(self._refusals())

    def keys_blocked(self) -> Keys:
        """Keys of those who are blocked now, ascending."""
        keys = [key for key in self._records if self.now(key) is not None]
        return np.array(sorted(keys), np.uint64)

    def names_blocked(self) -> frozenset[str]:
        """Names of those who are blocked now."""
        return self._names

    def evictions(self) -> dict[str, tuple[int, int]]:
        """By name, key and position of those who are blocked and whose queries are to be ended."""
        found = {}
        for key, record in self._records.items():
            event = self.now(key)
            if event is not None and event.evict and record.evicted != event.position:
                found[record.name] = (key, event.position)
        return found

    def evicted(self, key: int) -> bool:
        """Note that a user's queries are ended; False where they were before."""
        event, record = self.now(key), self._records[key]
        if event is None or record.evicted == event.position:
            return False
        record.evicted = event.position
        return True

    def named(self, name: str) -> int | None:
        """Key of a user by the name that listings show."""
        for record in self._records.values():
            if record.name == name:
                return record.key
        return None

    def listing(self) -> list[dict[str, Any]]:
        """Everybody who was ever blocked, as plain data."""
        refusals = self._refusals()
        return [
            {
                "user": record.name,
                "blocked": record.events[-1].blocked,
                "refused": refusals[key],
                "events": [asdict(event) for event in record.events],
            }
            for key, record in self._records.items()
            if record.events
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for the state directory."""
        refusals = self._refusals()
        return [
            {
                "key": key,
                "name": record.name,
                "refused": refusals[key],
                "evicted": record.evicted,
                "events": [asdict(event) for event in record.events],
            }
            for key, record in self._records.items()
        ]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> BlockList:
        """Inverse of :meth:`to_json`."""
        made = cls()
        for item in data:
            events = [Event(**event) for event in item["events"]]
            key, name, evicted = item["key"], item["name"], item["evicted"]
            made._records[key] = Record(key, name, events, evicted)
        made._lay_out({item["key"]: item["refused"] for item in data})
        return made
