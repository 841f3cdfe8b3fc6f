"""Block list: a history of blocks by user, because batches may be repeated.

A block is an event at a log position, and so is its end. The last event before position ``p``
decides about a request at ``p``, so a batch that is repeated after a user was blocked admits the
same requests as before.

Histories are never deleted: a lost block would admit an attacker. They grow with the decisions of
the detector and of operators, not with requests.
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
class BlockEvent:
    """Start or end of a block: requests after the position are refused or admitted.

    With ``evict``, the user's queries are terminated, too.
    """

    position: int
    blocked: bool
    round: int
    reason: str
    evict: bool = False


@dataclass(slots=True)
class BlockHistory:
    """A user's history, in order of position."""

    key: int
    name: str
    events: list[BlockEvent] = field(default_factory=list)
    evicted: int | None = None  # position of the block whose queries were terminated


class BlockList:
    """Block histories by user key, with arrays for compiled loops."""

    def __init__(self) -> None:
        self._records: dict[int, BlockHistory] = {}
        self._build_arrays()

    def _build_arrays(self, refused: dict[int, int] | None = None) -> None:
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
        # Other threads read this set while blocks are added.
        self._names = frozenset(r.name for r in records if self.now(r.key) is not None)

    def _refusals(self) -> dict[int, int]:
        return dict(zip(self._keys.tolist(), self._refused.tolist(), strict=True))

    def judge(self, keys: Keys, position: int) -> NDArray[np.bool_]:
        """Return whether each request from ``position`` on is admitted."""
        if not self._records:
            return np.ones(len(keys), np.bool_)
        admitted = np.empty(len(keys), np.bool_)
        events = (self._starts, self._positions, self._states)
        judge_rows(keys, position, self._index, self._keys, *events, admitted)
        return admitted

    def count(self, keys: Keys, refused: NDArray[np.int64]) -> None:
        """Add refusals of distinct users; users without a history are ignored."""
        rows = np.empty(len(keys), np.int32)
        find_rows(keys, self._index, self._keys, rows)
        known = rows >= 0
        self._refused[rows[known]] += refused[known]

    def now(self, key: int) -> BlockEvent | None:
        """Return the event that blocks a user now, or None."""
        record = self._records.get(key)
        last = record.events[-1] if record and record.events else None
        return last if last is not None and last.blocked else None

    def add(self, users: Iterable[tuple[int, str]], event: BlockEvent) -> None:
        """Add an event for users, as keys and names; it replaces one at the same position.

        Operators block at the end of the log, the detector where the log is applied, so events may
        arrive out of order.
        """
        for key, name in users:
            events = self._records.setdefault(key, BlockHistory(key, name)).events
            at = bisect_left(events, event.position, key=lambda known: known.position)
            same = at < len(events) and events[at].position == event.position
            events[at : at + same] = [event]
        self._build_arrays(self._refusals())

    def keys_blocked(self) -> Keys:
        """Return the keys of blocked users, ascending."""
        keys = [key for key in self._records if self.now(key) is not None]
        return np.array(sorted(keys), np.uint64)

    def names_blocked(self) -> frozenset[str]:
        """Return the names of blocked users."""
        return self._names

    def evictions(self) -> dict[str, tuple[int, int]]:
        """Return name to key and position of blocked users whose queries must be terminated."""
        found = {}
        for key, record in self._records.items():
            event = self.now(key)
            if event is not None and event.evict and record.evicted != event.position:
                found[record.name] = (key, event.position)
        return found

    def evicted(self, key: int) -> bool:
        """Record that a user's queries are terminated; return False if they were before."""
        event, record = self.now(key), self._records[key]
        if event is None or record.evicted == event.position:
            return False
        record.evicted = event.position
        return True

    def named(self, name: str) -> int | None:
        """Return the key of a user by the displayed name."""
        for record in self._records.values():
            if record.name == name:
                return record.key
        return None

    def listing(self) -> list[dict[str, Any]]:
        """Return all users that were ever blocked, as JSON data."""
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
        """Return JSON data for the state directory."""
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
        """Invert :meth:`to_json`."""
        made = cls()
        for item in data:
            events = [BlockEvent(**event) for event in item["events"]]
            key, name, evicted = item["key"], item["name"], item["evicted"]
            made._records[key] = BlockHistory(key, name, events, evicted)
        made._build_arrays({item["key"]: item["refused"] for item in data})
        return made
