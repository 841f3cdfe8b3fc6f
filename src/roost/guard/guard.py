"""Guard: combines gate, sensor, features and detector, and serialises their state.

The engine reports requests when it applies the log (:meth:`Guard.on_requests`), hotspots when it
changes the plan (:meth:`Guard.on_rebalance`), and the end of detection rounds
(:meth:`Guard.close_round`), with the log position from which blocks hold. It reads which users are
blocked and quarantined. Time is passed in as round numbers; the guard reads no clock. One seed
determines all random numbers and the secret of the users' keys, so a live system must draw it.

Quarantine precedes a block. Queries that a cluster registers after it was found suspicious are no
reason to rebalance, for a few rounds or until the cluster is found again at the same place, like a
crowd: load that stays should be balanced, whatever its cause. The sensor must still be shown
hotspots that no longer cause rebalancing; else quarantine would hide what follows.

:meth:`Guard.to_bytes` returns the complete state. A guard restored from it continues exactly like
the original, random numbers included.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import StateError
from roost.guard.blocks import BlockEvent, BlockList
from roost.guard.decisions import GuardDecision
from roost.guard.detector import detect
from roost.guard.features import Features, add_hotspot, close_features
from roost.guard.gate import Gate, Mask
from roost.guard.sensor import ROUNDS, LiveQueries, sense_hotspot
from roost.guard.suspicion import DetectorSettings, ListedCluster
from roost.guard.users import NAME_MAX, USERS_MAX, Keys, UserTable, keys_of, make_secret, shown

_FORMAT = 3
_META = b"guard"
BY_OPERATOR = "by an operator"


class Guard:
    """Finds and blocks attacks on the balancer.

    Parameters
    ----------
    seed
        Seed of all random numbers; a live system draws it once.
    settings
        Settings of the detector.
    users_max
        Maximum number of users in the table.
    first_round
        Number of the first open round.
    position
        Log position at which the guard starts: earlier requests are judged and not counted, and
        their queries are old.

    Attributes
    ----------
    round
        The open round, to which requests and hotspots are added.
    hotspots
        Number of hotspots so far, which is the id of the last one.
    opened
        Event time at which the open round began, stored for the caller that closes rounds.
    """

    def __init__(
        self,
        seed: int,
        settings: DetectorSettings = DetectorSettings(),  # noqa: B008 - immutable
        users_max: int = USERS_MAX,
        first_round: int = 0,
        position: int = 0,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self.settings = settings
        self.round = first_round
        self.hotspots = 0
        self.opened: int | None = None
        self._users = UserTable(make_secret(self._random), users_max)
        self._blocks = BlockList()
        self._listed: tuple[ListedCluster, ...] = ()
        self.gate = Gate(self._users, self._blocks, position)
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

    def on_rebalance(self, rects: NDArray[Any], queries: LiveQueries) -> int:
        """Inspect a hot partition, before or instead of rebalancing it.

        Parameters
        ----------
        rects
            Half-open rectangles of the hot partition, ``(k, 4)``; together they are one hotspot.
        queries
            All live queries.

        Returns
        -------
        int
            The hotspot's id.
        """
        self.hotspots += 1
        summary = sense_hotspot(queries, rects, self.round)
        add_hotspot(self._users, summary, self.hotspots, self.round)
        return self.hotspots

    def close_round(
        self, number: int, position: int, *, evict: bool = False
    ) -> tuple[GuardDecision, ...]:
        """Close a detection round and run the detector.

        Parameters
        ----------
        number
            The round to close: the open one, or a later one if the rounds between are empty.
        position
            First log position of the next round, from which newly blocked users are refused.
        evict
            Whether to terminate the queries of newly blocked users.
        """
        assert number >= self.round, "rounds close in order"
        closed = close_features(self._users, number - self.round + 1)
        features = self._unblocked(closed)
        # A block holds for requests after its position, and ``position`` is the next request.
        at = position - 1
        found = detect(features, self._listed, number, at, self._random, self.settings)
        self._listed = found.listed
        if found.blocked:
            event = BlockEvent(at, True, number, "attack on the balancer", evict)
            self._blocks.add(found.blocked, event)
        self._users.evict_idle(number)
        skipped = [position] * min(number - self.round, ROUNDS)
        self._begins = [*self._begins, *skipped, position][-ROUNDS:]
        self.round = number + 1
        return found.decisions

    def _unblocked(self, features: Features) -> Features:
        blocked = np.isin(features.keys, self._blocks.keys_blocked())
        return features.taken(np.flatnonzero(~blocked)) if blocked.any() else features

    @property
    def blocked(self) -> frozenset[str]:
        """Names of blocked users."""
        return self._blocks.names_blocked()

    @property
    def quarantined(self) -> frozenset[str]:
        """Names of users whose new queries are no reason to rebalance.

        Blocked users are not included: their remaining queries are permanent load, which must be
        balanced.
        """
        return frozenset(self.quarantine)

    @property
    def quarantine(self) -> dict[str, int]:
        """Round in which each quarantined user was found, by name.

        Only queries registered after that round are no reason to rebalance. Earlier ones are
        already balanced.
        """
        return {name: found for (_, name), found in self._quarantine().items()}

    def _quarantine(self) -> dict[tuple[int, str], int]:
        found: dict[tuple[int, str], int] = {}
        for entry in self._listed:
            if self._in_quarantine(entry):
                found |= {
                    user: min(entry.found, found.get(user, entry.found)) for user in entry.users
                }
        return found

    def keys_of(self, users: pa.Array) -> Keys:
        """Return the keys of users."""
        return keys_of(users, self._users.secret)

    def evictions(self) -> dict[str, tuple[int, int]]:
        """Return name to key and position of users whose queries must be terminated."""
        return self._blocks.evictions()

    def evicted(self, key: int) -> bool:
        """Record that a user's queries are terminated; return False if they were before."""
        return self._blocks.evicted(key)

    def quarantined_mask(self, users: pa.Array, rounds: NDArray[np.int64] | None = None) -> Mask:
        """Return whether each query is no reason to rebalance.

        Parameters
        ----------
        users
            User of each query.
        rounds
            Round in which each was registered; by default, all are new.
        """
        found = {key: number for (key, _), number in self._quarantine().items()}
        known = np.array(sorted(found), np.uint64)
        keys = keys_of(users, self._users.secret)
        mask: Mask = np.isin(keys, known)
        if rounds is not None and len(known):
            since = np.array([found[int(key)] for key in known], np.int64)
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            mask &= rounds > since[at]
        return mask

    def _in_quarantine(self, entry: ListedCluster) -> bool:
        return not entry.stays and self.round - entry.found <= self.settings.quarantine_rounds

    def block(
        self, user: str, position: int, reason: str = BY_OPERATOR, *, evict: bool = False
    ) -> None:
        """Refuse a user's requests after a log position, except requests already judged."""
        event = BlockEvent(self._not_before(position), True, self.round, reason, evict)
        key = self._key(user)
        self._blocks.add([(key, shown(user, key))], event)

    def unblock(self, user: str, position: int, reason: str = BY_OPERATOR) -> bool:
        """Admit a user's requests after a log position again; return False if not blocked.

        The user's features are reset: the detector needs two new findings to block them again.
        """
        key = self._key(user)
        if self._blocks.now(key) is None:
            return False
        event = BlockEvent(self._not_before(position), False, self.round, reason)
        self._blocks.add([(key, shown(user, key))], event)
        rows = self._users.find(np.array([key], np.uint64))
        self._users.numbers[rows[rows >= 0]] = 0.0
        self._listed = tuple(left for e in self._listed if (left := e.without({key})).users)
        return True

    def _not_before(self, position: int) -> int:
        """Return at least the last position already judged: a replay must judge the same."""
        return max(position, self.gate.counted - 1)

    def _key(self, user: str) -> int:
        """Return the key of a user by name, or by the shortened name that listings show."""
        key = int(keys_of(pa.array([user], pa.string()), self._users.secret)[0])
        if len(user) <= NAME_MAX or self._blocks.now(key) is not None:
            return key
        if user in self._users.names:
            return int(self._users.keys[self._users.names.index(user)])
        return self._blocks.named(user) or key

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
        known = {"users": self._users.used, "forgotten": self._users.forgotten}
        return {"blocked": self._blocks.listing(), "suspects": suspects, **known}

    @property
    def nbytes(self) -> int:
        """Memory that grows with the number of users, without their names."""
        return self._users.nbytes

    def to_bytes(self) -> bytes:
        """Return the complete state, compressed."""
        users = self._users
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
            "forgotten": users.forgotten,
            "blocks": self._blocks.to_json(),
            "listed": [entry.to_json() for entry in self._listed],
        }
        numbers = users.numbers[: users.used]
        columns = {
            "key": users.keys[: users.used],
            "active": users.active[: users.used],
            "name": pa.array(users.names, pa.string()),
        } | {f"n{k}": np.ascontiguousarray(numbers[:, k]) for k in range(numbers.shape[1])}
        table = pa.table(columns).replace_schema_metadata({_META: json.dumps(state)})
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    @classmethod
    def from_bytes(cls, data: bytes, settings: DetectorSettings = DetectorSettings()) -> Guard:  # noqa: B008
        """Invert :meth:`to_bytes`; settings may have changed since.

        Raises
        ------
        StateError
            If the state was not written by :meth:`to_bytes`.
        """
        try:
            table = pa.ipc.open_stream(data).read_all()
            state = json.loads((table.schema.metadata or {})[_META])
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise StateError("the state of the guard cannot be read") from error
        if state["format"] != _FORMAT:
            raise StateError(f"the state of the guard has format {state['format']}")
        made = cls(0, settings, state["users_max"], state["round"])
        made._random.bit_generator.state = state["random"]
        made.hotspots = state["hotspots"]
        made.opened = state["opened"]
        made._begins = state["begins"]
        made._listed = tuple(ListedCluster.from_json(entry) for entry in state["listed"])
        made._users = UserTable(np.array(state["secret"], np.uint64), state["users_max"])
        made._users.forgotten = state["forgotten"]
        names = [name for name in table.column_names if name.startswith("n") and name[1:].isdigit()]
        made._users.restore(
            table["key"].to_numpy(),
            np.column_stack([table[name].to_numpy() for name in names]),
            table["active"].to_numpy(),
            table["name"].to_pylist(),
        )
        made._blocks = BlockList.from_json(state["blocks"])
        made.gate = Gate(made._users, made._blocks, state["counted"])
        return made
