"""``roost guard``: what an operator sees of the guard, and how users are blocked and let in again.

Orders go through the state directory and hold from the next batch on, whether a run has the guard
in its memory or not.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table

from roost.errors import ConfigError, StateError
from roost.guard import Guard
from roost.guard.guard import BY_OPERATOR
from roost.state.guard_book import BLOCK, UNBLOCK, Order
from roost.state.guard_keeper import GuardKeeper, load_guard
from roost.state.operations import Desk, plain_console
from roost.state.store import Store

NAMES_SHOWN = 5


def guard_command(arguments: argparse.Namespace) -> int:
    """``roost guard list|log|block|unblock``."""
    console = plain_console()
    with closing(Desk(arguments.state)) as desk:
        if arguments.action == "list":
            _print_listing(desk.store, console, as_json=arguments.json)
        elif arguments.action == "log":
            if arguments.limit < 0:
                raise ConfigError("--limit", arguments.limit, "a whole number from 0 up")
            _print_log(desk.store, console, arguments.limit, as_json=arguments.json)
        else:
            _order(desk.store, arguments)
            said = "blocked" if arguments.action == BLOCK else "let in again"
            user = _plain(arguments.user)
            console.print(f"{user} is {said} from the next batch on", highlight=False)
    return 0


def _loaded(store: Store) -> tuple[Guard, int]:
    kept = load_guard(store)
    if kept is None:
        raise StateError(f"{store.folder} has no guard: run with guard.enabled = true first")
    return kept[0], kept[1].obeyed


def _order(store: Store, arguments: argparse.Namespace) -> None:
    _loaded(store)
    try:
        arguments.user.encode()
    except UnicodeEncodeError:
        raise ConfigError("USER", arguments.user, "text in UTF-8") from None
    if arguments.action == UNBLOCK:
        keeper = GuardKeeper.onlooking(store)
        assert keeper is not None, "it was loaded just now"
        refused = keeper.guard.gate.refusal(arguments.user) is not None
        if not refused and arguments.user not in keeper.guard.blocked:
            raise StateError(f"user {arguments.user!r} is not blocked")
    reason = BY_OPERATOR if arguments.reason is None else f"{BY_OPERATOR}: {arguments.reason}"
    evict = arguments.action == BLOCK and arguments.evict
    store.guard.order(Order(arguments.action, arguments.user, reason, evict))


def _print_listing(store: Store, console: Console, *, as_json: bool) -> None:
    guard, obeyed = _loaded(store)
    listing: dict[str, Any] = guard.listing()
    listing["round"] = guard.round
    listing["waiting"] = [
        {"action": order.action, "user": order.user, "reason": order.reason}
        for order in store.guard.orders(obeyed)
    ]
    if as_json:
        console.print(json.dumps(listing), soft_wrap=True, highlight=False)
        return
    table = Table("user", "since position", "round", "refused", "why", title="blocked")
    for item in listing["blocked"]:
        if item["blocked"]:
            last = item["events"][-1]
            cells = (last["position"], last["round"], item["refused"])
            table.add_row(_plain(item["user"]), *(f"{cell:,}" for cell in cells), last["reason"])
    console.print(table)
    table = Table("users", "found in round", "until", "quarantined", title="suspicious")
    for item in listing["suspects"]:
        quarantined = "yes" if item["quarantined"] else "no"
        table.add_row(_names(item["users"]), str(item["found"]), str(item["until"]), quarantined)
    console.print(table)
    for order in listing["waiting"]:
        console.print(f"waiting    {order['action']} {_plain(order['user'])}", highlight=False)
    console.print(
        f"round {guard.round}, {listing['users']:,} users known, "
        f"{listing['forgotten']:,} forgotten",
        highlight=False,
    )


def _names(users: list[str]) -> str:
    more = len(users) - NAMES_SHOWN
    shown = ", ".join(_plain(user) for user in users[:NAMES_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def _plain(user: str) -> str:
    """Name without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in user)


def _print_log(store: Store, console: Console, limit: int, *, as_json: bool) -> None:
    _loaded(store)
    rows = store.guard.log(limit)
    if as_json:
        for row in rows:
            console.print(json.dumps(row), soft_wrap=True, highlight=False)
        return
    table = Table("round", "decision", "users", "why", "evidence")
    for row in rows:
        table.add_row(
            str(row["round"]),
            row["decision"],
            _names(row.get("users", [])),
            row["reason"],
            _evidence(row.get("evidence", {})),
        )
    console.print(table)
    console.print("--json shows all of the evidence")


def _evidence(evidence: dict[str, Any]) -> str:
    """Show what is a single number or text."""
    plain = {k: v for k, v in evidence.items() if isinstance(v, int | float | str)}
    return ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items()
    )
