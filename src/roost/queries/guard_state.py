"""Loads, updates and persists the guard's state.

The guard itself (:mod:`roost.guard`) knows neither files nor the query log. The counts of a replay
are recorded in the transaction that records the index version, so each request is counted once. The
full state is one large file. It is written when the guard has decided or observed something; until
then each replay of the log adds one small row of counts.

Operators append commands, also while a run has the guard in memory; the run applies them before
its next batch. So do snapshot queries, which are in no query log: their commands are only counted.

To terminate a blocked user's queries, the run appends a request with the operation ``evict`` to the
log. So the eviction has a position on which every batch and every replay agrees. Any program could
append one; it is applied only if the guard decided so, and once.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from roost.errors import RequestError, StateError
from roost.guard import Guard, GuardDecision
from roost.guard.loops import REGISTERS
from roost.guard.tally import Tally
from roost.guard.users import shown
from roost.model.records import TIME_MIN, Reason
from roost.queries.log import QueryLog
from roost.queries.replay import EVICT, EVICTED, Replay
from roost.queries.versions import version_at
from roost.storage.files import Files
from roost.storage.store import Fact, Store, View

BLOCK, UNBLOCK, SNAPSHOT = "block", "unblock", "snapshot"
STATE, TALLIES, LOG = "guard", "guard_tallies", "guard_log"
# Replays after which the full state is written, so that the number of tallies is bounded.
REPLAYS_MAX = 64
INLINE_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class GuardCommand:
    """Command of an operator to ``BLOCK`` or ``UNBLOCK`` a user, or a ``SNAPSHOT`` query of one."""

    action: str
    user: str
    reason: str = ""
    evict: bool = False


def guard_files(store: Store) -> Files:
    """Return the files with the guard's state."""
    return store.files("guard")


def send(store: Store, command: GuardCommand) -> int:
    """Append a command for the run; returns its number."""
    return store.commands.append(asdict(command))


def pending(store: Store, applied: int) -> list[tuple[int, GuardCommand]]:
    """Return the commands after the last one applied, with their numbers."""
    return [(number, GuardCommand(**body)) for number, body in store.commands.after(applied)]


def decisions(view: View, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the last decisions of the guard and of operators, oldest first."""
    last = view.last(LOG)
    after = None if last is None or limit is None else last[0] - limit
    return [row for _, row in view.items(LOG, after)]


def load_guard(store: Store) -> tuple[Guard, int] | None:
    """Read the guard as of the last replay, and the last command applied; None without a guard."""
    while True:
        with store.view() as view:
            state, tallies = view.get(STATE, "state"), view.items(TALLIES)
        if state is None:
            return None
        try:
            guard = Guard.from_bytes(_read(store, state))
            for _, row in tallies:
                tally = Tally.from_bytes(_read(store, row))
                guard.gate.add(tally, row["counted"], guard.round)
        except StateError:
            if state == store.get(STATE, "state"):
                raise
            continue  # the run has replaced the files meanwhile
        return guard, int(state["applied"])


def _read(store: Store, row: dict[str, Any]) -> bytes:
    if "file" in row:
        return guard_files(store).map(row["file"])["bytes"].tobytes()
    return base64.b64decode(row["bytes"])


def _written(files: Files, data: bytes, label: str, *, inline: int = 0) -> dict[str, Any]:
    """Return the fields of a row with these bytes, or with the file that they are written to."""
    if len(data) <= inline:
        return {"bytes": base64.b64encode(data).decode()}
    name = files.name("", label, ".guard")
    files.write(name, {"bytes": np.frombuffer(data, np.uint8)})
    return {"file": name}


class GuardState:
    """The guard of a state directory, up to date with the store."""

    def __init__(self, store: Store, guard: Guard, applied: int = 0) -> None:
        self.guard = guard
        self.now = TIME_MIN  # event time that the stream has reached
        self._store = store
        self._files = guard_files(store)
        self._applied = applied  # number of the last command
        self._appended: set[str] = set()  # evictions, by this process
        self._replays = 0

    @classmethod
    def load(cls, store: Store) -> GuardState | None:
        """Load the guard of a state directory; None if it has none."""
        loaded = load_guard(store)
        return None if loaded is None else cls(store, *loaded)

    @classmethod
    def preview(cls, store: Store) -> GuardState | None:
        """Load the guard as it will be at the next batch, without changing the store."""
        found = cls.load(store)
        if found is not None:
            found.foresee()
        return found

    def foresee(self) -> None:
        """Apply new commands as the next batch will, without changing the store."""
        self._apply_all(pending(self._store, self._applied))

    @classmethod
    def begin(cls, store: Store, seed: int, users_max: int) -> GuardState:
        """Start a guard at the log position that was applied last."""
        version = version_at(store)
        position = 0 if version is None else version.rows
        made = cls(store, Guard(seed, users_max=users_max, position=position))
        made.save()
        return made

    def count(self, replay: Replay, *, record: bool = True) -> list[Fact]:
        """Add the counts of a replay; returns the facts to record with its index version."""
        tally = replay.tally()
        self.guard.gate.add(tally, replay.rows, self.guard.round)
        return [self._tallied(tally)] if record else []

    def _tallied(self, tally: Tally) -> Fact:
        """Return the fact that records counts which the gate has added."""
        self._replays += 1
        last = self._store.last(TALLIES)
        number = 1 if last is None else last[0] + 1
        row = _written(self._files, tally.to_bytes(), "tally", inline=INLINE_MAX)
        return Fact(TALLIES, number, {"counted": self.guard.gate.counted, **row})

    def apply_commands(self, log: QueryLog) -> None:
        """Apply and record commands, and append pending evictions to the log."""
        before = self._applied
        commands = pending(self._store, before)
        rows = self._apply_all(commands)
        users = [command.user for _, command in commands if command.action == SNAPSHOT]
        counts = self._count_snapshots(users) if users else None
        if rows or self._replays >= REPLAYS_MAX:
            self.save(rows)
        elif counts is not None:
            state = {**self._store.get(STATE, "state"), "applied": self._applied}
            self._store.record(self._tallied(counts), Fact(STATE, "state", state))
        if commands:
            # A reader may just have loaded the state before this one.
            self._store.commands.trim(before)
        for user, (key, position) in sorted(self.guard.blocks.evictions().items()):
            tag = f"{EVICT}:{key:016x}:{position}"
            if tag not in self._appended:
                log.append(pa.table({"op": [EVICT], EVICTED: [user]}), tag=tag)
                self._appended.add(tag)

    def _apply_all(self, commands: Iterable[tuple[int, GuardCommand]]) -> list[dict[str, object]]:
        """Apply the commands of operators; returns their rows for the decision log."""
        rows = []
        for number, command in commands:
            self._applied = number
            if command.action != SNAPSHOT:
                rows.append(self._apply(number, command))
        return rows

    def _count_snapshots(self, users: list[str]) -> Tally:
        """Count snapshot queries as requests of the open round."""
        names = pa.array(users, pa.string())
        kinds = np.full(len(users), REGISTERS, np.int8)
        tally, _ = Tally.of(names, self.guard.keys_of(names), kinds)
        self.guard.gate.add(tally, self.guard.gate.counted, self.guard.round)
        return tally

    def _apply(self, number: int, command: GuardCommand) -> dict[str, object]:
        """Apply a command to requests from now on; returns its row for the decision log."""
        position = self.guard.gate.counted - 1
        done = True
        if command.action == BLOCK:
            self.guard.block(command.user, position, command.reason, evict=command.evict)
        else:
            done = self.guard.unblock(command.user, position, command.reason)
        return {
            "decision": command.action if done else f"{command.action}, which changes nothing",
            "users": [command.user],
            "round": self.guard.round,
            "position": position,
            "reason": command.reason,
            "evidence": {"order": number, "evict": command.evict},
        }

    def reject_blocked(self, users: Iterable[str]) -> None:
        """Raise :class:`RequestError` if one of the users is blocked."""
        for user in dict.fromkeys(map(str, users)):
            try:
                why = self.guard.gate.refusal(user)
            except UnicodeEncodeError:
                detail = f"user_id takes text in UTF-8, got {user!r}"
                raise RequestError(Reason.WRONG_TYPE.value, detail) from None
            if why is not None:
                detail = f"user {shown(user)!r} is blocked {why}"
                raise RequestError(Reason.BLOCKED.value, detail)

    def facts(self, rows: Iterable[dict[str, object]] = ()) -> list[Fact]:
        """Return the facts that record the full state and the decisions that led to it.

        Call it once for each transaction: files that the store does not list are deleted here.
        """
        self._replays = 0
        with self._store.view() as view:
            tallies, last = view.items(TALLIES), view.last(LOG)
            listed = [view.get(STATE, "state"), *(row for _, row in tallies)]
        self._files.delete("", {row["file"] for row in listed if row and "file" in row})
        state = _written(self._files, self.guard.to_bytes(), "state")
        first = 1 if last is None else last[0] + 1
        return [
            Fact(STATE, "state", {**state, "applied": self._applied}),
            *(Fact(TALLIES, number, None) for number, _ in tallies),
            *(Fact(LOG, number, row) for number, row in enumerate(rows, first)),
        ]

    def save(self, rows: Iterable[dict[str, object]] = ()) -> None:
        """Record the full state in a transaction of its own."""
        self._store.record(*self.facts(rows))


class GuardReader:
    """Reads the guard of a state directory as it will be at the next batch.

    Reading it again costs little unless a decision was recorded meanwhile.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decided: int | None = None  # last decision that is known
        self._state: GuardState | None = None

    def state(self) -> GuardState | None:
        """Return the guard; None if the state directory has none."""
        last = self._store.last(LOG)
        decided = None if last is None else last[0]
        if self._state is None or decided != self._decided:
            self._state = GuardState.preview(self._store)
            self._decided = decided
        else:
            self._state.foresee()
        return self._state

    def reject_blocked(self, users: Iterable[str]) -> None:
        """Raise :class:`RequestError` if one of the users is blocked."""
        state = self.state()
        if state is not None:
            state.reject_blocked(users)

    def count_snapshot(self, user: str) -> None:
        """Count a snapshot query as a request of its user, with the next batch."""
        if self._state is not None:
            send(self._store, GuardCommand(SNAPSHOT, str(user)))


def decision_row(decision: GuardDecision) -> dict[str, object]:
    """Return the row of the decision log for a decision of the detector."""
    return {"decision": type(decision).__name__.lower(), **asdict(decision)}
