"""Inspect the guard, block and unblock users.

Commands are appended to the state directory and hold from the next batch on, whether or not a run
has the guard in memory.
"""

from __future__ import annotations

from typing import Any

from roost.errors import ConfigError, StateError
from roost.guard import Guard
from roost.guard.guard import BY_OPERATOR
from roost.queries.guard_state import (
    BLOCK,
    SNAPSHOT,
    UNBLOCK,
    GuardCommand,
    GuardState,
    decisions,
    load_guard,
    pending,
    send,
)
from roost.storage.store import Store


def _loaded(store: Store) -> tuple[Guard, int]:
    loaded = load_guard(store)
    if loaded is None:
        raise StateError(f"{store.folder} has no guard: run with guard.enabled = true first")
    return loaded


def send_command(
    store: Store, action: str, user: str, reason: str | None = None, *, evict: bool = False
) -> int:
    """``BLOCK`` or ``UNBLOCK`` a user from the next batch on; returns the number of the command.

    The reason is for the decision log. With ``evict``, the user's queries are terminated, too.
    """
    _loaded(store)
    try:
        user.encode()
    except UnicodeEncodeError:
        raise ConfigError("USER", user, "text in UTF-8") from None
    if action == UNBLOCK:
        state = GuardState.preview(store)
        assert state is not None, "it was loaded above"
        if state.guard.gate.refusal(user) is None and user not in state.guard.blocked:
            raise StateError(f"user {user!r} is not blocked")
    why = BY_OPERATOR if reason is None else f"{BY_OPERATOR}: {reason}"
    return send(store, GuardCommand(action, user, why, evict=evict and action == BLOCK))


def guard_listing(store: Store) -> dict[str, Any]:
    """Return blocked users, suspicious clusters, and commands that no batch has applied yet."""
    guard, applied = _loaded(store)
    return {
        **guard.listing(),
        "round": guard.round,
        "waiting": [
            {"action": command.action, "user": command.user, "reason": command.reason}
            for _, command in pending(store, applied)
            if command.action != SNAPSHOT
        ],
    }


def guard_log(store: Store, limit: int) -> list[dict[str, Any]]:
    """Return the last decisions of the guard and of operators, oldest first."""
    if limit < 0:
        raise ConfigError("--limit", limit, "a whole number from 0 up")
    _loaded(store)
    return decisions(store, limit)
