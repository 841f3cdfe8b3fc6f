"""What a state directory keeps of the guard: its state, its decisions, and orders to it.

The whole state is written when the guard has decided or looked at something. In between it only
counts requests, and what it counted in a fold is one small row in the same transaction as
the index version. So a request that is folded once is counted once, and a flood of them does not
write the whole state again and again.

Operators leave orders, also while a run has the guard in its memory; the run obeys at its next
batch. Nothing here judges.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK, UNBLOCK = "block", "unblock"
_TABLES = (
    "create table if not exists guard_state"
    " (one integer primary key check (one = 1), body blob, obeyed integer);"
    "create table if not exists guard_tallies"
    " (number integer primary key, counted integer, body blob);"
    "create table if not exists guard_log (number integer primary key, body text);"
    "create table if not exists guard_orders (number integer primary key, body text);"
)


@dataclass(frozen=True, slots=True)
class GuardChange:
    """The guard as it is from now on.

    Parameters
    ----------
    state
        All that it knows.
    obeyed
        Number of the last order that it has obeyed.
    decisions
        What was decided on the way here, for the log.
    """

    state: bytes
    obeyed: int = 0
    decisions: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """What an operator wants: ``BLOCK`` or ``UNBLOCK`` a user, and why."""

    action: str
    user: str
    reason: str
    evict: bool = False
    number: int = 0


class GuardBook:
    """The guard's tables.

    Methods that write are called within somebody else's transaction, except :meth:`order`.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.executescript(f"begin immediate; {_TABLES} commit;")

    def write(self, change: GuardChange) -> None:
        """Keep the whole state; what was counted before is in it."""
        self._db.execute(
            "insert or replace into guard_state values (1, ?, ?)", (change.state, change.obeyed)
        )
        self._db.execute("delete from guard_tallies")
        rows = [(json.dumps(decision),) for decision in change.decisions]
        self._db.executemany("insert into guard_log (body) values (?)", rows)

    def write_tallies(self, tallies: Sequence[tuple[int, bytes]]) -> None:
        """Keep what was counted up to some positions."""
        statement = "insert into guard_tallies (counted, body) values (?, ?)"
        self._db.executemany(statement, tallies)

    def read(self) -> tuple[GuardChange, list[tuple[int, bytes]]] | None:
        """Return the last state and what was counted since; None where there was never any."""
        # One statement, so that both are of the same moment.
        rows = self._db.execute(
            "select null, body, obeyed from guard_state union all"
            " select number, body, counted from guard_tallies order by 1"
        ).fetchall()
        states = [row for row in rows if row[0] is None]
        if not states:
            return None
        _, body, obeyed = states[0]
        change = GuardChange(bytes(body), obeyed)
        return change, [(row[2], bytes(row[1])) for row in rows if row[0] is not None]

    def log(self, limit: int = -1) -> list[dict[str, Any]]:
        """Return the last decisions of the guard and of operators, in order; with -1 all."""
        rows = self._db.execute(
            "select body from guard_log order by number desc limit ?", (limit,)
        ).fetchall()
        return [json.loads(body) for (body,) in reversed(rows)]

    def stamp(self) -> tuple[int, int, int]:
        """Return what changes whenever who is blocked may have changed."""
        row = self._db.execute(
            "select (select coalesce(max(number), 0) from guard_log),"
            " (select coalesce(max(number), 0) from guard_orders), count(*) from guard_state"
        ).fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def order(self, order: Order) -> None:
        """Leave an order for whoever runs the guard."""
        body = {
            "action": order.action,
            "user": order.user,
            "reason": order.reason,
            "evict": order.evict,
        }
        with self._db:
            self._db.execute("insert into guard_orders (body) values (?)", (json.dumps(body),))

    def orders(self, after: int) -> list[Order]:
        """Orders that came after one, in order."""
        rows = self._db.execute(
            "select number, body from guard_orders where number > ? order by number", (after,)
        )
        return [Order(number=number, **json.loads(body)) for number, body in rows]
