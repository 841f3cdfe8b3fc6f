"""The guard of a state directory: loaded, told what requests come, obeying operators, saved.

The guard itself (:mod:`roost.guard`) knows neither files nor the query log. Whoever folds the log
asks the keeper who may pass, and the keeper notes what was counted, for the transaction that
records the fold. Blocks hold from a position of the log on, also in a run whose detection is
switched off.

A blocked user's queries can be ended as well. That is a request like any other, with the operation
``evict``, which the keeper appends to the log: so it has a position, and every batch and every
replay agrees on it. Anybody could write one. It is obeyed only where its user is blocked at that
position.

Requests that come as a stream were counted by Spark. They are in the log with the mark ``counted``,
and after them the tally, as rows with the operation ``tally``. Whoever could write those could hide
what he does, so they are believed only in a log that nobody else writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.errors import RequestError
from roost.guard import Decision, Guard, Settings
from roost.guard.gate import kinds_of
from roost.guard.loops import UNCOUNTED
from roost.guard.tally import Tally
from roost.model import Reason
from roost.state.admission import Refused
from roost.state.columns import convert, record_json
from roost.state.guard_book import BLOCK, GuardChange, Order
from roost.state.querylog import QueryLog
from roost.state.store import Store

# Folds after which the whole state is written: where nothing is decided, tallies would pile up.
FOLDS_MAX = 64
EVICT, TALLY = "evict", "tally"
COUNTED = "counted"

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Asked:
    """A block of requests as the gate sees it.

    Parameters
    ----------
    users
        Who asks.
    operations
        For what.
    counted
        Whether a request is in a tally of this log already.
    """

    users: pa.Array
    operations: pa.Array
    counted: Mask

    @classmethod
    def of(cls, block: pa.Table, *, private: bool) -> Asked:
        """Look at who asks for what; only in a private log is anything counted already."""
        users, operations = (
            convert(block[name], pa.string())[0]
            if name in block.column_names
            else pa.nulls(block.num_rows, pa.string())
            for name in ("user_id", "op")
        )
        counted = np.zeros(block.num_rows, np.bool_)
        if private and COUNTED in block.column_names:
            counted = _mask(convert(block[COUNTED], pa.bool_())[0])
        return cls(users, operations, counted)

    def are(self, operation: str) -> Mask:
        """Whether each request asks for an operation."""
        return _mask(pc.equal(self.operations, operation))


def _mask(values: pa.Array) -> Mask:
    return np.asarray(values.fill_null(False).to_numpy(zero_copy_only=False), bool)


def load_guard(store: Store, settings: Settings | None = None) -> tuple[Guard, GuardChange] | None:
    """Read the guard as it was after the last fold; None where there never was one."""
    kept = store.guard.read()
    if kept is None:
        return None
    change, tallies = kept
    guard = Guard.from_bytes(change.state, settings or Settings())
    for counted, data in tallies:
        guard.gate.add(Tally.from_bytes(data), counted, guard.round)
    return guard, change


class GuardKeeper:
    """Stands between a guard and the state directory.

    Parameters
    ----------
    store
        Where everything is kept.
    guard
        The guard, up to date with the store.
    obeyed, evicting
        As in :class:`GuardChange`.
    """

    def __init__(
        self, store: Store, guard: Guard, obeyed: int = 0, evicting: Iterable[str] = ()
    ) -> None:
        self.guard = guard
        self._store = store
        self._obeyed = obeyed
        self._evicting = list(evicting)
        self._tallies: list[tuple[int, bytes]] = []
        self._folds = 0

    @classmethod
    def load(cls, store: Store) -> GuardKeeper | None:
        """Go on with the guard of a state directory; None where there never was one."""
        kept = load_guard(store)
        if kept is None:
            return None
        guard, change = kept
        return cls(store, guard, change.obeyed, change.evicting)

    @classmethod
    def onlooking(cls, store: Store) -> GuardKeeper | None:
        """Look at the guard as it will be at the next batch, and change nothing."""
        keeper = cls.load(store)
        if keeper is not None:
            for order in store.guard.orders(keeper._obeyed):
                keeper._obeyed_order(order)
        return keeper

    @classmethod
    def begin(cls, store: Store, seed: int, users_max: int) -> GuardKeeper:
        """Start a guard at the position that was folded last."""
        version = store.version_at(1 << 62)
        position = 0 if version is None else version.rows
        made = cls(store, Guard(seed, users_max=users_max, position=position))
        made.save()
        return made

    # -- what folds the log

    def judge(self, asked: Asked, first: int) -> Mask:
        """Tell which requests may pass."""
        return self.guard.gate.judge(asked.users, first)

    def count(self, asked: Asked, admitted: Mask, valid: Mask, first: int) -> None:
        """Count a block that was judged, and note it for the transaction of the fold."""
        gate, number = self.guard.gate, self.guard.round
        registers = asked.are("register")
        kinds = kinds_of(registers, admitted, valid)
        if asked.counted.any():
            # A tally has these as they were sent. What came of them may be something else.
            sent = kinds_of(registers, admitted | True, registers | asked.are("terminate"))
            unnamed = _mask(asked.users.is_null())
            sent[~asked.counted | unnamed | (sent == kinds)] = UNCOUNTED
            kinds[asked.counted & (sent == UNCOUNTED)] = UNCOUNTED
            if sent.any():
                taken, _ = Tally.of(asked.users, self.guard.keys_of(asked.users), sent)
                self.add(taken.negated(), gate.counted)
        tally = gate.count(asked.users, kinds, first, number)
        self._tallies.append((gate.counted, tally.to_bytes()))

    def add(self, tally: Tally, counted: int) -> None:
        """Add what was counted elsewhere, and note it for the transaction of the fold."""
        self.guard.gate.add(tally, counted, self.guard.round)
        self._tallies.append((counted, tally.to_bytes()))

    def add_rows(self, block: pa.Table, first: int) -> list[Refused]:
        """Add tallies that are in the log; returns dead letters for what they have as refused."""
        tally = Tally.from_table(block)
        self.add(tally, first + block.num_rows)
        letters = []
        for row in np.flatnonzero(tally.counts[:, 2]).tolist():
            user = tally.names[row].as_py()
            count = int(tally.counts[row, 2])
            letters.append(self._letter(user, first + row, f"{count} requests of a stream"))
        return letters

    def taken_tallies(self) -> list[tuple[int, bytes]]:
        """Hand over what was counted since the last time."""
        taken, self._tallies = self._tallies, []
        self._folds += 1
        return taken

    def evicts(self, user: str | None, position: int) -> Callable[[pa.Array], Mask] | None:
        """Tell whose queries are to be ended, by their users; None where the user may stay."""
        if user is None or self.guard.judge_one(user, position):
            return None
        return lambda users: self.guard.same_user(users, user)

    def refused(self, block: pa.Table, asked: Asked, admitted: Mask, first: int) -> list[Refused]:
        """Sum up what was refused of a block, a dead letter a user: the log has the requests."""
        rows = np.flatnonzero(~admitted)
        codes = asked.users.take(pa.array(rows)).dictionary_encode()
        order = np.argsort(np.asarray(codes.indices), kind="stable")
        ends = np.cumsum(np.bincount(np.asarray(codes.indices)))
        letters = []
        for user, mine in zip(
            codes.dictionary.to_pylist(), np.split(rows[order], ends[:-1]), strict=True
        ):
            span = f"{len(mine)} requests at positions {first + mine[0]} to {first + mine[-1]}"
            record = record_json(block.slice(int(mine[0]), 1).to_pylist()[0])
            letters.append(self._letter(user, first + int(mine[0]), span, record))
        return letters

    def _letter(self, user: str, position: int, what: str, record: str = "{}") -> Refused:
        since = self.guard.gate.refusal(user) or "at that time"
        detail = f"user {user!r} is blocked {since}: {what}"
        return Refused(position, Reason.BLOCKED, detail, record)

    # -- orders and decisions

    def obey(self, log: QueryLog) -> None:
        """Do what operators have ordered since, and end the queries of those who are to go."""
        decisions = [self._obeyed_order(order) for order in self._store.guard.orders(self._obeyed)]
        if decisions or self._folds >= FOLDS_MAX:
            self.save(decisions)
        if self._evicting:
            users = pa.array(self._evicting, pa.string())
            block = pa.table({"op": pa.array([EVICT] * len(users)), "user_id": users})
            # To end them twice does no harm, to forget it would.
            log.append(block)
            self._evicting = []
            self.save()

    def _obeyed_order(self, order: Order) -> dict[str, object]:
        """Obey an order; returns its row for the log. It holds for what is folded from now on."""
        position = self.guard.gate.counted - 1
        if order.action == BLOCK:
            self.guard.block(order.user, position, order.reason)
            self._evicting += [order.user] if order.evict else []
        else:
            self.guard.unblock(order.user, position, order.reason)
            self._evicting = [user for user in self._evicting if user != order.user]
        self._obeyed = order.number
        return {
            "decision": order.action,
            "users": [order.user],
            "round": self.guard.round,
            "position": position,
            "reason": order.reason,
            "evidence": {"order": order.number, "evict": order.evict},
        }

    def refuse(self, users: Iterable[str]) -> None:
        """Raise where one of some users who ask now is blocked."""
        for user in dict.fromkeys(users):
            why = self.guard.gate.refusal(user)
            if why is not None:
                raise RequestError(Reason.BLOCKED.value, f"user {user!r} is blocked {why}")

    def evict(self, users: Iterable[str]) -> None:
        """Have the queries of blocked users ended at the next batch."""
        self._evicting += users

    def change(self, decisions: Iterable[dict[str, object]] = ()) -> GuardChange:
        """Return the guard as it is now, for somebody's transaction."""
        self._folds = 0
        return GuardChange(
            self.guard.to_bytes(), self._obeyed, tuple(self._evicting), tuple(decisions)
        )

    def save(self, decisions: Iterable[dict[str, object]] = ()) -> None:
        """Write the guard in a transaction of its own."""
        assert not self._tallies, "what was counted goes with its fold"
        self._store.put_guard(self.change(decisions))


def decision_row(decision: Decision) -> dict[str, object]:
    """Make a decision of the detector a row of the log."""
    fields = {name: getattr(decision, name) for name in decision.__dataclass_fields__}
    return {"decision": type(decision).__name__.lower(), **fields}
