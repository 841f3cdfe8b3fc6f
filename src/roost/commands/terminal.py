"""Commands on the terminal: flags in, printed tables out."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from roost.commands.flags import question_of, request_of
from roost.commands.guard import guard_listing, guard_log, send_command
from roost.commands.inspect import StateSummary, inspect_state
from roost.commands.queries import LiveQuery, QueryService
from roost.commands.snapshot import check_format, run_snapshot, write_result
from roost.errors import ConfigError
from roost.model.records import Instant
from roost.queries.guard_state import BLOCK
from roost.queries.rules import rules_of
from roost.storage.store import Store
from roost.window.view import WindowView

if TYPE_CHECKING:
    from roost.engine.snapshot import Answer

BATCHES_SHOWN = 10
NAMES_SHOWN = 5


def _console() -> Console:
    """Return a console that prints names and predicates literally, brackets and colons too."""
    return Console(markup=False, emoji=False, highlight=False)


# -- roost query


def query_command(arguments: argparse.Namespace) -> int:
    """Run ``roost query register|terminate|list``."""
    console = _console()
    with closing(QueryService(arguments.state, create=arguments.action == "register")) as service:
        if arguments.action == "list":
            _print_queries(service, arguments.limit, console)
            return 0
        position = service.submit(request_of(arguments, service.rules))
    done = "registered" if arguments.action == "register" else "terminated"
    console.print(f"{done} {arguments.query_id} at log position {position}")
    return 0


def _print_queries(service: QueryService, limit: int, console: Console) -> None:
    table = Table("query", "user", "shape", "where", "result", "from", "until")
    live = service.live()
    for query in islice(live, max(limit, 0)):
        table.add_row(
            str(query.query_id),
            str(query.user_id),
            _shape_text(query),
            query.predicate or "",
            query.result or "matches",
            _time_text(query.start),
            _time_text(query.end),
        )
    console.print(table)
    total = table.row_count + sum(1 for _ in live)
    console.print(f"{total:,} queries, {table.row_count:,} shown")


def _shape_text(query: LiveQuery) -> str:
    numbers = [f"{number:g}" for number in query.numbers]
    if query.shape == "circle":
        return f"circle {numbers[0]},{numbers[1]} radius {numbers[2]}"
    return f"{'box' if query.shape == 'box' else 'polygon in'} {','.join(numbers)}"


def _time_text(value: Instant | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else value.isoformat()


# -- roost snapshot


def snapshot_command(arguments: argparse.Namespace) -> int:
    """Run ``roost snapshot``, and print the result or write it to a file."""
    if arguments.out is not None:
        check_format(arguments.out)
    if not (arguments.state / "state.db").exists():
        takes = "a state directory: it has no state.db"
        raise ConfigError("STATE_DIR", str(arguments.state), takes)
    with closing(Store(arguments.state, durable=False)) as store:
        question = question_of(arguments, rules_of(store))
    answer = run_snapshot(arguments.state, question, arguments.master, encrypt=arguments.encrypt)
    if arguments.out is None:
        _print_result(answer, arguments.limit)
    else:
        write_result(answer.table, arguments.out)
        print(f"{_summary(answer)}, in {arguments.out}", file=sys.stderr)
    return 0


def _summary(answer: Answer) -> str:
    return f"{answer.table.num_rows:,} rows, true at batch {answer.batch_id}"


def _print_result(answer: Answer, limit: int) -> None:
    table = answer.table.select(answer.table.column_names[1:])  # the first is the batch
    shown = Table(*table.column_names)
    for row in table.slice(0, limit).to_pylist():
        shown.add_row(*(_text(value) for value in row.values()))
    console = _console()
    console.print(shown)
    left = table.num_rows - limit
    more = f" ({left:,} more; see --limit and --out)" if left > 0 else ""
    console.print(f"{_summary(answer)}{more}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.10g}"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# -- roost guard


def guard_command(arguments: argparse.Namespace) -> int:
    """Run ``roost guard list|log|block|unblock``."""
    console = _console()
    with closing(QueryService(arguments.state)) as service:
        store, action = service.store, arguments.action
        if action == "list":
            listing = guard_listing(store)
            if arguments.json:
                console.print(json.dumps(listing), soft_wrap=True)
            else:
                _print_listing(listing, console)
        elif action == "log":
            rows = guard_log(store, arguments.limit)
            if arguments.json:
                for row in rows:
                    console.print(json.dumps(row), soft_wrap=True)
            else:
                _print_log(rows, console)
        else:
            evict = action == BLOCK and arguments.evict
            send_command(store, action, arguments.user, arguments.reason, evict=evict)
            console.print(f"{_printable(arguments.user)} is {action}ed from the next batch on")
    return 0


def _print_listing(listing: dict[str, Any], console: Console) -> None:
    table = Table("user", "since position", "round", "refused", "why", title="blocked")
    for item in listing["blocked"]:
        if item["blocked"]:
            last = item["events"][-1]
            cells = (last["position"], last["round"], item["refused"])
            user = _printable(item["user"])
            table.add_row(user, *(f"{cell:,}" for cell in cells), last["reason"])
    console.print(table)
    table = Table("users", "found in round", "until", "quarantined", title="suspicious")
    for item in listing["suspects"]:
        quarantined = "yes" if item["quarantined"] else "no"
        table.add_row(_names(item["users"]), str(item["found"]), str(item["until"]), quarantined)
    console.print(table)
    for command in listing["waiting"]:
        console.print(f"waiting    {command['action']} {_printable(command['user'])}")
    console.print(
        f"round {listing['round']}, {listing['users']:,} users known, "
        f"{listing['forgotten']:,} evicted from the user table"
    )


def _print_log(rows: list[dict[str, Any]], console: Console) -> None:
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
    console.print("--json prints all evidence")


def _names(users: list[str]) -> str:
    more = len(users) - NAMES_SHOWN
    shown = ", ".join(_printable(user) for user in users[:NAMES_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def _printable(user: str) -> str:
    """Escape characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in user)


def _evidence(evidence: dict[str, Any]) -> str:
    """Return the evidence that is a single number or text."""
    scalars = {k: v for k, v in evidence.items() if isinstance(v, int | float | str)}
    return ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in scalars.items()
    )


# -- roost inspect


def inspect_command(arguments: argparse.Namespace) -> int:
    """Run ``roost inspect``."""
    console, found = _console(), inspect_state(arguments.state)
    console.print(f"state      {arguments.state}")
    if found.space is not None:
        space = found.space
        bounds = ",".join(f"{value:g}" for value in space["bounds"])
        console.print(
            f"space      {bounds} ({space['coordinates']}), grid "
            f"{space['columns']}x{space['rows']}, outside {space['outside']}",
        )
    console.print(f"query log  position {found.position}")
    _print_plan(found, console)
    table = Table("segment", "queries", "bytes", "ended file", title="segments")
    for file, queries, size, ended in found.segments:
        table.add_row(file, f"{queries:,}", f"{size:,}", ended or "")
    console.print(_left(table))
    _print_window(found.window, console)
    _print_batches(found, console)
    if not found.dead:
        console.print("dead       none")
        return 0
    table = Table("origin", "reason", "records", title="dead letters")
    for (origin, reason), count in found.dead.items():
        table.add_row(origin, reason, f"{count:,}")
    console.print(_left(table))
    return 0


def _left(table: Table) -> Table:
    table.title_justify = "left"
    return table


def _print_plan(found: StateSummary, console: Console) -> None:
    plan, last, guard = found.plan, found.last_round, found.guard
    if plan is None:
        console.print("plan       none yet")
    else:
        console.print(
            f"plan       epoch {plan.epoch}, {found.strategy}, {plan.machines} machines, "
            f"{len(plan.partitions)} partitions"
        )
    if last is not None:
        console.print(
            f"balance    round {last['round']}, busiest machine {last['imbalance']:.2f} of the "
            f"mean: {last['reason']}"
        )
    if guard is not None:
        console.print(
            f"guard      round {guard['round']}, {guard['blocked']} users blocked, "
            f"{guard['suspects']} suspicious clusters"
        )


def _print_window(window: WindowView | None, console: Console) -> None:
    if window is None:
        return
    files = [file for batch in window.batches for file in batch.files]
    spec = window.spec
    kind = f"{'tumbling' if spec.tumbling else 'sliding'} by {spec.kind.value}, {spec.length:,}"
    console.print(
        f"window     {kind}: {sum(file.points for file in files):,} points of "
        f"{len(window.batches)} batches in {len(files)} files, "
        f"{sum(file.nbytes for file in files):,} bytes"
    )


def _print_batches(found: StateSummary, console: Console) -> None:
    table = Table("batch", "points", "matches", "dead", "seconds")
    shown = found.commits[-BATCHES_SHOWN:]
    table.title = f"batches ({found.batches}, the last {len(shown)} shown)"
    for commit in shown:
        figures = commit.figures
        dead = figures["dead_points"] + figures["dead_requests"]
        cells = (commit.batch_id, figures["points"], figures["matches"], dead)
        table.add_row(*(f"{cell:,}" for cell in cells), f"{figures['seconds']:.3f}")
    console.print(_left(table))
    if found.open_batch is not None:
        console.print(f"batch {found.open_batch} was begun and not committed: a run will repeat it")
