"""Guard: combines gate, sensor, features and detector, and serialises their state.

The engine reports requests when it applies the log, hotspots when it changes the plan
(:meth:`Guard.on_rebalance`), and the end of detection rounds (:meth:`Guard.close_round`). Time is
passed in as round numbers; the guard reads no clock. One seed determines all random numbers and the
secret of the users' keys, so a live system must draw it.

Quarantine precedes a block. Queries that a cluster registers after it was found suspicious are no
reason to rebalance, for a few rounds or until the cluster is found again at the same place, like a
crowd: load that stays should be balanced, whatever its cause. The sensor must still receive
hotspots that no longer cause rebalancing; otherwise quarantine would hide what follows.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import StateError
from roost.guard.blocks import BlockEvent, BlockList
from roost.guard.decisions import GuardDecision
from roost.guard.detector import detect
from roost.guard.features import add_hotspot, close_features
from roost.guard.gate import Gate
from roost.guard.loops import Keys
from roost.guard.sensor import ROUNDS, LiveQueries, sense_hotspot
from roost.guard.suspicion import DetectorSettings, ListedCluster
from roost.guard.users import NAME_MAX, USERS_MAX, UserTable, keys_of, make_secret, shown
from roost.model.arrays import Mask
from roost.model.columns import stream_bytes

_FORMAT = 3
_META = b"guard"
BY_OPERATOR = "by an operator"


class Guard:
    """Finds and blocks attacks on the balancer.

    It starts at a log position: earlier requests are judged and not counted, and their queries are
    old. A live system draws the seed once.
    """

    def __init__(
        self,
        seed: int,
        settings: DetectorSettings = DetectorSettings(),  # noqa: B008 - immutable
        users_max: int = USERS_MAX,
        position: int = 0,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self.settings = settings
        self.round = 0  # the open one, to which requests and hotspots are added
        self.hotspots = 0  # so far, which is the id of the last one
        # Event time at which the open round began, stored for the caller that closes rounds.
        self.opened: int | None = None
        self.users = UserTable(make_secret(self._random), users_max)
        self.blocks = BlockList()
        self._listed: tuple[ListedCluster, ...] = ()
        self.gate = Gate(self.users, self.blocks, position)
        # Log positions at which the last rounds began, the open one last.
        self._begins: list[int] = [position] * ROUNDS

    def on_requests(self, users: pa.Array, registers: Mask, position: int) -> Mask:
        """Judge and count a block of requests; see :meth:`Gate.admit`."""
        return self.gate.admit(users, registers, position, self.round)

    def rounds_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the round of requests at log positions; old ones are at most five rounds old."""
        behind = len(self._begins) - np.searchsorted(self._begins, positions, side="right")
        rounds: NDArray[np.int64] = self.round - behind
        return rounds

    def on_rebalance(self, rects: NDArray[Any], queries: LiveQueries) -> None:
        """Inspect a hot partition, before or instead of rebalancing it.

        ``rects`` are its half-open rectangles, ``(k, 4)``; together they are one hotspot.
        """
        self.hotspots += 1
        summary = sense_hotspot(queries, rects, self.round)
        add_hotspot(self.users, summary, self.hotspots, self.round)

    def close_round(
        self, number: int, position: int, *, evict: bool = False
    ) -> tuple[GuardDecision, ...]:
        """Close the open round and any empty rounds up to ``number``, and run the detector.

        Newly blocked users are refused from ``position`` on, the first of the next round; with
        ``evict``, their queries are terminated.
        """
        assert number >= self.round, "rounds close in order"
        features = close_features(self.users, number - self.round + 1)
        blocked = np.isin(features.keys, self.blocks.keys_blocked())
        if blocked.any():
            features = features.taken(np.flatnonzero(~blocked))
        # A block holds for requests after its position, and ``position`` is the next request.
        at = position - 1
        found = detect(features, self._listed, number, at, self._random, self.settings)
        self._listed = found.listed
        if found.blocked:
            event = BlockEvent(at, True, number, "attack on the balancer", evict)
            self.blocks.add(found.blocked, event)
        self.users.evict_idle(number)
        skipped = [position] * min(number - self.round, ROUNDS)
        self._begins = [*self._begins, *skipped, position][-ROUNDS:]
        self.round = number + 1
        return found.decisions

    @property
    def blocked(self) -> frozenset[str]:
        """Names of blocked users."""
        return self.blocks.names

    @property
    def quarantine(self) -> dict[str, int]:
        """Round in which each quarantined user was found, by name.

        Only queries registered after that round are no reason to rebalance: earlier ones are
        already balanced. Blocked users are not included: their remaining queries are permanent
        load, which must be balanced.
        """
        return {name: found for (_, name), found in self._quarantine().items()}

    def _quarantine(self) -> dict[tuple[int, str], int]:
        found: dict[tuple[int, str], int] = {}
        for entry in self._listed:
            if self._in_quarantine(entry):
                for user in entry.users:
                    found[user] = min(entry.found, found.get(user, entry.found))
        return found

    def _in_quarantine(self, entry: ListedCluster) -> bool:
        return not entry.stays and self.round - entry.found <= self.settings.quarantine_rounds

    def quarantined_mask(self, users: pa.Array, rounds: NDArray[np.int64]) -> Mask:
        """Return whether each query, by its user and round, is no reason to rebalance."""
        found = {key: number for (key, _), number in self._quarantine().items()}
        if not found:
            return np.zeros(len(users), np.bool_)
        known = np.array(sorted(found), np.uint64)
        since = np.array([found[int(key)] for key in known], np.int64)
        keys = self.keys_of(users)
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        mask: Mask = (known[at] == keys) & (rounds > since[at])
        return mask

    def keys_of(self, users: pa.Array) -> Keys:
        """Return the keys of users."""
        return keys_of(users, self.users.secret)

    def block(
        self, user: str, position: int, reason: str = BY_OPERATOR, *, evict: bool = False
    ) -> None:
        """Refuse a user's requests after a log position, except requests already judged."""
        self._add_event(self._key(user), user, True, position, reason, evict)

    def unblock(self, user: str, position: int, reason: str = BY_OPERATOR) -> bool:
        """Admit a user's requests after a log position again; return False if not blocked.

        The user's features are reset: the detector needs two new findings to block them again.
        """
        key = self._key(user)
        if self.blocks.now(key) is None:
            return False
        self._add_event(key, user, False, position, reason)
        rows = self.users.find(np.array([key], np.uint64))
        self.users.numbers[rows[rows >= 0]] = 0.0
        self._listed = tuple(left for e in self._listed if (left := e.without({key})).users)
        return True

    def _add_event(
        self, key: int, user: str, blocked: bool, position: int, reason: str, evict: bool = False
    ) -> None:
        # Not before a position already judged: a replay must judge the same.
        at = max(position, self.gate.counted - 1)
        event = BlockEvent(at, blocked, self.round, reason, evict)
        self.blocks.add([(key, shown(user, key))], event)

    def _key(self, user: str) -> int:
        """Return the key of a user by name, or by the shortened name that listings show."""
        key = int(self.keys_of(pa.array([user], pa.string()))[0])
        if len(user) <= NAME_MAX or self.blocks.now(key) is not None:
            return key
        if user in self.users.names:
            return int(self.users.keys[self.users.names.index(user)])
        return self.blocks.key_of(user) or key

    def listing(self) -> dict[str, Any]:
        """Return blocked and suspicious users as JSON data for an operator."""
        suspects = [
            {
                "users": [name for _, name in entry.users],
                "found": entry.found,
                "until": entry.until,
                "quarantined": self._in_quarantine(entry),
                "evidence": entry.evidence,
            }
            for entry in self._listed
        ]
        known = {"users": self.users.used, "forgotten": self.users.evicted}
        return {"blocked": self.blocks.listing(), "suspects": suspects, **known}

    def to_bytes(self) -> bytes:
        """Return the complete state, compressed; random numbers continue from it, too."""
        users = self.users
        state = {
            "format": _FORMAT,
            "round": self.round,
            "hotspots": self.hotspots,
            "opened": self.opened,
            "counted": self.gate.counted,
            "begins": self._begins,
            "random": self._random.bit_generator.state,
            "secret": users.secret.tolist(),
            "users_max": users.users_max,
            "forgotten": users.evicted,
            "blocks": self.blocks.to_json(),
            "listed": [asdict(entry) for entry in self._listed],
        }
        numbers = users.numbers[: users.used]
        columns = {
            "key": users.keys[: users.used],
            "active": users.active[: users.used],
            "name": pa.array(users.names, pa.string()),
        } | {f"n{k}": np.ascontiguousarray(column) for k, column in enumerate(numbers.T)}
        table = pa.table(columns).replace_schema_metadata({_META: json.dumps(state)})
        return stream_bytes(table, "zstd")

    @classmethod
    def from_bytes(cls, data: bytes, settings: DetectorSettings = DetectorSettings()) -> Guard:  # noqa: B008
        """Invert :meth:`to_bytes`; settings may have changed since.

        Raises :class:`StateError` if the state was not written by :meth:`to_bytes`.
        """
        try:
            table = pa.ipc.open_stream(data).read_all()
            state = json.loads((table.schema.metadata or {})[_META])
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise StateError("the state of the guard cannot be read") from error
        if state["format"] != _FORMAT:
            raise StateError(
                f"the state of the guard has format {state['format']}; this version of Roost reads "
                f"format {_FORMAT}"
            )
        made = cls(0, settings, state["users_max"])
        made._random.bit_generator.state = state["random"]
        made.round = state["round"]
        made.hotspots = state["hotspots"]
        made.opened = state["opened"]
        made._begins = state["begins"]
        made._listed = tuple(ListedCluster.from_json(entry) for entry in state["listed"])
        made.users = UserTable(np.array(state["secret"], np.uint64), state["users_max"])
        made.users.evicted = state["forgotten"]
        names = [name for name in table.column_names if name.startswith("n") and name[1:].isdigit()]
        made.users.restore(
            table["key"].to_numpy(),
            np.column_stack([table[name].to_numpy() for name in names]),
            table["active"].to_numpy(),
            table["name"].to_pylist(),
        )
        made.blocks = BlockList.from_json(state["blocks"])
        made.gate = Gate(made.users, made.blocks, state["counted"])
        return made
