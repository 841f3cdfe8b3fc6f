"""The guard of a state directory: loaded, told what requests come, obeying operators, saved.

The guard itself (:mod:`roost.guard`) knows neither files nor the query log. Whoever folds the log
asks the keeper who may pass, and the keeper notes what was counted, for the transaction that
records the fold. Blocks hold from a position of the log on, also in a run whose detection is
switched off.

A blocked user's queries can be ended as well. The keeper then appends a request to the log, with
the operation ``evict``: so it has a position, and every batch and every replay agrees on it.
Anybody could write one. It is obeyed only where the guard has decided so, and once.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from roost.errors import RequestError
from roost.guard import Decision, Guard
from roost.guard.tally import Tally
from roost.guard.users import shown_name
from roost.model import TIME_MIN, Reason
from roost.state.fold import EVICT, EVICTED, Fold
from roost.state.guard_book import BLOCK, GuardChange, Order
from roost.state.querylog import QueryLog
from roost.state.store import Store

# Folds after which the whole state is written: where nothing is decided, tallies would pile up.
FOLDS_MAX = 64


def load_guard(store: Store) -> tuple[Guard, GuardChange] | None:
    """Read the guard as it was after the last fold; None where there never was one."""
    kept = store.guard.read()
    if kept is None:
        return None
    change, tallies = kept
    guard = Guard.from_bytes(change.state)
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
    obeyed
        Number of the last order that was obeyed.

    Attributes
    ----------
    now
        Event time that the stream has reached.
    """

    def __init__(self, store: Store, guard: Guard, obeyed: int = 0) -> None:
        self.guard = guard
        self._store = store
        self._obeyed = obeyed
        # Evictions that the log was told in this life of the driver.
        self._told: set[str] = set()
        self._folds = 0
        self.now = TIME_MIN

    @classmethod
    def load(cls, store: Store) -> GuardKeeper | None:
        """Go on with the guard of a state directory; None where there never was one."""
        kept = load_guard(store)
        if kept is None:
            return None
        guard, change = kept
        return cls(store, guard, change.obeyed)

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

    def fold(self, first: int) -> Fold:
        """Begin a pass over the log."""
        return Fold(first, self.guard, self.now)

    def took(self, fold: Fold) -> list[tuple[int, bytes]]:
        """Count what a pass came to; returns it for the transaction that records the pass."""
        tally = fold.tally()
        self.guard.gate.add(tally, fold.rows, self.guard.round)
        self._folds += 1
        return [(fold.rows, tally.to_bytes())]

    # -- orders and decisions

    def obey(self, log: QueryLog) -> None:
        """Do what operators have ordered since, and end the queries of those who are to go."""
        decisions = [self._obeyed_order(order) for order in self._store.guard.orders(self._obeyed)]
        if decisions or self._folds >= FOLDS_MAX:
            self.save(decisions)
        for user, (key, position) in sorted(self.guard.evictions().items()):
            tag = f"{EVICT}:{key:016x}:{position}"
            if tag not in self._told:
                log.append(pa.table({"op": [EVICT], EVICTED: [user]}), tag=tag)
                self._told.add(tag)

    def _obeyed_order(self, order: Order) -> dict[str, object]:
        """Obey an order; returns its row for the log. It holds for what is folded from now on."""
        position = self.guard.gate.counted - 1
        done = True
        if order.action == BLOCK:
            self.guard.block(order.user, position, order.reason, evict=order.evict)
        else:
            done = self.guard.unblock(order.user, position, order.reason)
        self._obeyed = order.number
        return {
            "decision": order.action if done else f"{order.action}, which changes nothing",
            "users": [order.user],
            "round": self.guard.round,
            "position": position,
            "reason": order.reason,
            "evidence": {"order": order.number, "evict": order.evict},
        }

    def refuse(self, users: Iterable[str]) -> None:
        """Raise where one of some users who ask now is blocked."""
        for user in dict.fromkeys(map(str, users)):
            why = self.guard.gate.refusal(user)
            if why is not None:
                detail = f"user {shown_name(user)!r} is blocked {why}"
                raise RequestError(Reason.BLOCKED.value, detail)

    def change(self, decisions: Iterable[dict[str, object]] = ()) -> GuardChange:
        """Return the guard as it is now, for somebody's transaction."""
        self._folds = 0
        return GuardChange(self.guard.to_bytes(), self._obeyed, tuple(decisions))

    def save(self, decisions: Iterable[dict[str, object]] = ()) -> None:
        """Write the guard in a transaction of its own."""
        self._store.put_guard(self.change(decisions))


def decision_row(decision: Decision) -> dict[str, object]:
    """Make a decision of the detector a row of the log."""
    fields = {name: getattr(decision, name) for name in decision.__dataclass_fields__}
    return {"decision": type(decision).__name__.lower(), **fields}
