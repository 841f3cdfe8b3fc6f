"""Guard: the gate, the sensor, the features and the detector as one thing that can be saved.

The engine tells it of requests as they are folded (:meth:`Guard.on_requests`), of hotspots when the
plan is changed because of one (:meth:`Guard.on_rebalance`), and of the end of detection rounds
(:meth:`Guard.close_round`), with the log position from which on a block holds. It asks who is
blocked and who is quarantined. It is told the time as round numbers and reads no clock; all chance
comes from one seed, which also makes the secret of the users' keys, so that a live system draws it.

Quarantine comes before the block. What a cluster registers after it was found suspicious is no
reason to rebalance, for a few rounds or until the cluster is found again at the same place, as a
crowd is: load that stays is better balanced than suffered, whoever made it. Its hotspots must
still be shown to the sensor, also where they no longer make anybody rebalance, or quarantine would
hide what comes next.

:meth:`Guard.to_bytes` is the whole state. A guard made from it goes on exactly as the one that was
saved, random numbers included.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import StateError
from roost.guard.blocks import BlockList, Event
from roost.guard.decisions import Decision
from roost.guard.detector import detect
from roost.guard.features import Features, add_hotspot, close_features
from roost.guard.gate import Gate, Mask
from roost.guard.sensor import ROUNDS, LiveQueries, sense_hotspot
from roost.guard.suspicion import Listed, Settings
from roost.guard.users import NAME_MAX, USERS_MAX, Keys, UserTable, keys_of, make_secret, shown

_FORMAT = 3
_META = b"guard"
BY_OPERATOR = "by an operator"


class Guard:
    """Finds and blocks attacks on the balancer.

    Parameters
    ----------
    seed
        Where all chance comes from; a live system draws it once.
    settings
        How the detector judges.
    users_max
        Users that are remembered at most.
    first_round
        Number of the round that is open at first.
    position
        Log position at which it begins: requests before it are judged and not counted, and their
        queries are old.

    Attributes
    ----------
    round
        The open round; requests and hotspots are counted into it.
    hotspots
        How many hotspots there were; the last one's id.
    opened
        Event time at which the open round began, kept for whoever ends rounds.
    """

    def __init__(
        self,
        seed: int,
        settings: Settings = Settings(),  # noqa: B008 - immutable
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
        self._listed: tuple[Listed, ...] = ()
        self.gate = Gate(self._users, self._blocks, position)
        # Where the last rounds began in the log, the open one last.
        self._begins: list[int] = [position] * ROUNDS

    def on_requests(self, users: pa.Array, registers: Mask, position: int) -> Mask:
        """Judge and count a block of requests; see :meth:`Gate.admit`."""
        return self.gate.admit(users, registers, position, self.round)

    def rounds_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Round in which requests at log positions came; what is long past is five rounds old."""
        behind = len(self._begins) - np.searchsorted(self._begins, positions, side="right")
        rounds: NDArray[np.int64] = self.round - behind
        return rounds

    def on_rebalance(self, rects: NDArray[Any], queries: LiveQueries) -> int:
        """Look into a hot partition, before or instead of its rebalancing.

        Parameters
        ----------
        rects
            The hot partition, ``(k, 4)`` without upper ends; together they are one hotspot.
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
    ) -> tuple[Decision, ...]:
        """End a detection round and judge it.

        Parameters
        ----------
        number
            The round that ends: the open one, or a later one if nothing happened in between.
        position
            First log position of the next round; whoever is blocked now is refused from there on.
        evict
            Whether the queries of whoever is blocked now are to be ended.
        """
        assert number >= self.round, "rounds end in order"
        closed = close_features(self._users, number - self.round + 1)
        features = self._unblocked(closed)
        # A block holds for rows after its position, and the row at ``position`` is still to come.
        at = position - 1
        found = detect(features, self._listed, number, at, self._random, self.settings)
        self._listed = found.listed
        if found.blocked:
            event = Event(at, True, number, "attack on the balancer", evict)
            self._blocks.add(found.blocked, event)
        self._users.forget(number)
        skipped = [position] * min(number - self.round, ROUNDS)
        self._begins = [*self._begins, *skipped, position][-ROUNDS:]
        self.round = number + 1
        return found.decisions

    def _unblocked(self, features: Features) -> Features:
        blocked = np.isin(features.keys, self._blocks.keys_blocked())
        return features.taken(np.flatnonzero(~blocked)) if blocked.any() else features

    @property
    def blocked(self) -> frozenset[str]:
        """Names of those who are blocked now."""
        return self._blocks.names_blocked()

    @property
    def quarantined(self) -> frozenset[str]:
        """Names of those whose new queries are no reason to rebalance, for the time being.

        The blocked are not among them: what is left of their queries stays for good, and load that
        stays has to be balanced.
        """
        return frozenset(self.quarantine)

    @property
    def quarantine(self) -> dict[str, int]:
        """By name of a quarantined user, the round in which he was found.

        Only queries that were registered after that round are no reason to rebalance. Those before
        were there already; and if they made a hotspot, it was balanced.
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
        """Keys of users, for whoever counts by them."""
        return keys_of(users, self._users.secret)

    def evictions(self) -> dict[str, tuple[int, int]]:
        """By name, key and position of those whose queries are still to be ended."""
        return self._blocks.evictions()

    def evicted(self, key: int) -> bool:
        """Note that a user's queries are ended; False where they were before."""
        return self._blocks.evicted(key)

    def quarantined_mask(self, users: pa.Array, rounds: NDArray[np.int64] | None = None) -> Mask:
        """Whether queries of some users are no reason to rebalance.

        Parameters
        ----------
        users
            User of each query.
        rounds
            Round in which each was registered; without it, all are taken to be new.
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

    def _in_quarantine(self, entry: Listed) -> bool:
        return not entry.stays and self.round - entry.found <= self.settings.quarantine_rounds

    def block(
        self, user: str, position: int, reason: str = BY_OPERATOR, *, evict: bool = False
    ) -> None:
        """Refuse a user's requests after a log position, but none that was judged before."""
        event = Event(self._not_before(position), True, self.round, reason, evict)
        key = self._key(user)
        self._blocks.add([(key, shown(user, key))], event)

    def unblock(self, user: str, position: int, reason: str = BY_OPERATOR) -> bool:
        """Admit a user's requests after a log position again; False where nobody was blocked.

        What the detector knew of the user is forgotten: it needs two new findings to block again.
        """
        key = self._key(user)
        if self._blocks.now(key) is None:
            return False
        event = Event(self._not_before(position), False, self.round, reason)
        self._blocks.add([(key, shown(user, key))], event)
        rows = self._users.find(np.array([key], np.uint64))
        self._users.numbers[rows[rows >= 0]] = 0.0
        self._listed = tuple(left for e in self._listed if (left := e.without({key})).users)
        return True

    def _not_before(self, position: int) -> int:
        """Last position that was judged, if that is later: a replay must judge the same."""
        return max(position, self.gate.counted - 1)

    def _key(self, user: str) -> int:
        """Key of a user by name, or by the shortened name that listings show."""
        key = int(keys_of(pa.array([user], pa.string()), self._users.secret)[0])
        if len(user) <= NAME_MAX or self._blocks.now(key) is not None:
            return key
        if user in self._users.names:
            return int(self._users.keys[self._users.names.index(user)])
        return self._blocks.named(user) or key

    def listing(self) -> dict[str, Any]:
        """Who is or was blocked and who is suspicious, as plain data for an operator."""
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
        """Memory of what grows with the number of users, without their names."""
        return self._users.nbytes

    def to_bytes(self) -> bytes:
        """Return the whole state, compressed."""
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
    def from_bytes(cls, data: bytes, settings: Settings = Settings()) -> Guard:  # noqa: B008
        """Inverse of :meth:`to_bytes`; settings may have changed since.

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
        made._listed = tuple(Listed.from_json(entry) for entry in state["listed"])
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
