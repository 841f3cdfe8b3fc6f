"""Block list: a history of block events by user.

The last event before a request's log position decides whether it is admitted, so a batch that is
repeated after a user was blocked admits the same requests as before. Histories are never deleted: a
lost block would admit an attacker. They grow with decisions, not with requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.guard.loops import BlockRows, Keys, find_rows, judge_rows, rebuild


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

    name: str
    events: list[BlockEvent] = field(default_factory=list)
    evicted: int | None = None  # position of the block whose queries were terminated

    @property
    def block(self) -> BlockEvent | None:
        """The event that blocks the user now, if any."""
        last = self.events[-1] if self.events else None
        return last if last is not None and last.blocked else None


class BlockList:
    """Block histories by user key, with arrays for compiled loops."""

    def __init__(self) -> None:
        self._histories: dict[int, BlockHistory] = {}
        self._build_arrays({})

    def _build_arrays(self, refused: dict[int, int]) -> None:
        histories = list(self._histories.values())
        counts = [len(history.events) for history in histories]
        events = [event for history in histories for event in history.events]
        self._rows = BlockRows(
            np.zeros(1 << (2 * len(histories) + 1).bit_length(), np.int32),
            np.array(list(self._histories), np.uint64),
            np.array([0, *np.cumsum(counts)], np.int64),
            np.array([event.position for event in events], np.int64),
            np.array([event.blocked for event in events], np.bool_),
        )
        rebuild(self._rows.entries, self._rows.keys, len(histories))
        self._refused = np.array([refused.get(key, 0) for key in self._histories], np.int64)
        # Other threads read this set while blocks are added.
        self.names = frozenset(history.name for history in histories if history.block)

    def _refusals(self) -> dict[int, int]:
        return dict(zip(self._rows.keys.tolist(), self._refused.tolist(), strict=True))

    def judge(self, keys: Keys, position: int) -> NDArray[np.bool_]:
        """Return whether each request from ``position`` on is admitted."""
        if not self._histories:
            return np.ones(len(keys), np.bool_)
        return judge_rows(keys, position, self._rows)

    def count(self, keys: Keys, refused: NDArray[np.int64]) -> None:
        """Add refusals of distinct users; users without a history are ignored."""
        rows = find_rows(keys, self._rows.entries, self._rows.keys)
        known = rows >= 0
        self._refused[rows[known]] += refused[known]

    def now(self, key: int) -> BlockEvent | None:
        """Return the event that blocks a user now, or None."""
        history = self._histories.get(key)
        return None if history is None else history.block

    def add(self, users: Iterable[tuple[int, str]], event: BlockEvent) -> None:
        """Add an event for users, as keys and names; it replaces one at the same position.

        Operators block at the end of the log, the detector where the log is applied, so events may
        arrive out of order.
        """
        for key, name in users:
            events = self._histories.setdefault(key, BlockHistory(name)).events
            at = bisect_left(events, event.position, key=lambda known: known.position)
            same = at < len(events) and events[at].position == event.position
            events[at : at + same] = [event]
        self._build_arrays(self._refusals())

    def keys_blocked(self) -> Keys:
        """Return the keys of blocked users, ascending."""
        keys = [key for key, history in self._histories.items() if history.block]
        return np.array(sorted(keys), np.uint64)

    def evictions(self) -> dict[str, tuple[int, int]]:
        """Return name to key and position of blocked users whose queries must be terminated."""
        return {
            history.name: (key, event.position)
            for key, history in self._histories.items()
            if (event := history.block) and event.evict and history.evicted != event.position
        }

    def record_eviction(self, key: int) -> bool:
        """Record that a user's queries are terminated; return False if they were before."""
        history = self._histories[key]
        event = history.block
        if event is None or history.evicted == event.position:
            return False
        history.evicted = event.position
        return True

    def key_of(self, name: str) -> int | None:
        """Return the key of a user by the displayed name."""
        return next((key for key, h in self._histories.items() if h.name == name), None)

    def listing(self) -> list[dict[str, Any]]:
        """Return all users that were ever blocked, as JSON data."""
        return [
            {
                "user": history["name"],
                "blocked": history["events"][-1]["blocked"],
                "refused": history["refused"],
                "events": history["events"],
            }
            for history in self.to_json()
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """Return JSON data for the state directory."""
        refusals = self._refusals()
        return [
            {"key": key, **asdict(history), "refused": refusals[key]}
            for key, history in self._histories.items()
        ]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> BlockList:
        """Invert :meth:`to_json`."""
        made = cls()
        for item in data:
            events = [BlockEvent(**event) for event in item["events"]]
            made._histories[item["key"]] = BlockHistory(item["name"], events, item["evicted"])
        made._build_arrays({item["key"]: item["refused"] for item in data})
        return made
