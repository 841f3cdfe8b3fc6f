"""Commands on the terminal: flags in, printed tables out."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from roost.commands.explain import explain_flow
from roost.commands.flags import read_numbers, request_of, snapshot_query_of
from roost.commands.flow_state import FlowSummary, SourceProgress, SubqueryState
from roost.commands.guard import guard_listing, guard_log, send_command
from roost.commands.inspect import StateSummary, inspect_state
from roost.commands.queries import LiveQuery, QueryService
from roost.commands.snapshot import check_format, run_snapshot, write_result
from roost.commands.synopsis import (
    explain_query,
    has_file,
    outcome_json,
    outcome_rows,
    query_json,
    run_query,
    save_result,
)
from roost.errors import ConfigError
from roost.model.records import TIME_MAX, TIME_MIN
from roost.queries.guard_state import BLOCK, GuardReader
from roost.queries.rules import rules_of
from roost.storage.store import Store
from roost.storage.totals import DATAFLOW
from roost.synopsis.catalogue import Catalogue
from roost.synopsis.reader import Explained
from roost.window.view import WindowView

if TYPE_CHECKING:
    from roost.engine.snapshot import SnapshotResult

BATCHES_SHOWN = 10
CHANGES_SHOWN = 10
NAMES_SHOWN = 5
MACHINES_SHOWN = 8
FILE_COLUMNS = 240  # of output that is not for a terminal


def _print(*items: object, soft_wrap: bool = False) -> None:
    """Print names and predicates literally, brackets and colons too."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_COLUMNS  # of 80, tables would leave out digits and names
    console.print(*items, sep="\n", soft_wrap=soft_wrap)


def _table(
    columns: Sequence[str], rows: Iterable[Iterable[Any]], title: str | None = None
) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_text(value) for value in row))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.10g}"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _printable(user: str) -> str:
    """Escape characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in user)


# -- roost query


def query_command(arguments: argparse.Namespace) -> None:
    """Run ``roost query register|terminate|list``."""
    with closing(QueryService(arguments.state, create=arguments.action == "register")) as service:
        if arguments.action == "list":
            _print_queries(*service.live(max(arguments.limit, 0)))
            return
        position = service.submit(request_of(arguments, service.rules))
    done = "registered" if arguments.action == "register" else "terminated"
    _print(f"{done} {arguments.query_id} at log position {position}")


def _print_queries(live: list[LiveQuery], total: int) -> None:
    rows = (
        (q.query_id, q.user_id, _shape(q), q.predicate or "", q.result or "matches", q.start, q.end)
        for q in live
    )
    columns = ("query", "user", "shape", "where", "result", "from", "until")
    _print(_table(columns, rows), f"{total:,} queries, {len(live):,} shown")


def _shape(query: LiveQuery) -> str:
    numbers = [f"{number:g}" for number in query.numbers]
    if query.shape == "circle":
        return f"circle {numbers[0]},{numbers[1]} radius {numbers[2]}"
    return f"{'box' if query.shape == 'box' else 'polygon in'} {','.join(numbers)}"


# -- roost snapshot


def snapshot_command(arguments: argparse.Namespace) -> None:
    """Run ``roost snapshot``, and print the result or write it to a file."""
    if arguments.out is not None:
        check_format(arguments.out)
    if not (arguments.state / "state.db").exists():
        takes = "a state directory: it has no state.db"
        raise ConfigError("STATE_DIR", str(arguments.state), takes)
    with closing(Store(arguments.state, durable=False)) as store:
        query = snapshot_query_of(arguments, rules_of(store))
        GuardReader(store).reject_blocked([query.user_id])  # before Spark starts
    result = run_snapshot(arguments.state, query, arguments.master, encrypt=arguments.encrypt)
    if arguments.out is None:
        _print_result(result, arguments.limit)
    else:
        write_result(result.table, arguments.out)
        print(f"{_summary(result)}, written to {arguments.out}", file=sys.stderr)


def _summary(result: SnapshotResult) -> str:
    return f"{result.table.num_rows:,} rows as of batch {result.batch_id}"


def _print_result(result: SnapshotResult, limit: int) -> None:
    table = result.table.select(result.table.column_names[1:])  # the first is the batch
    rows = (row.values() for row in table.slice(0, limit).to_pylist())
    left = table.num_rows - limit
    more = f" ({left:,} more; see --limit and --out)" if left > 0 else ""
    _print(_table(table.column_names, rows), f"{_summary(result)}{more}")


# -- roost synopsis


def synopsis_command(arguments: argparse.Namespace) -> None:
    """Run ``roost synopsis``."""
    scope = {name: getattr(arguments, name) for name in ("polygon", "since", "until")}
    for name, size in (("box", 4), ("circle", 3), ("hours", 2)):
        text = getattr(arguments, name)
        expected = f"{size} numbers separated by commas"
        scope[name] = None if text is None else read_numbers(text, size, f"--{name}", expected)
    scope["predicate"] = arguments.where
    data = query_json(arguments.query, arguments.arguments, scope)
    if arguments.explain:
        _print_explained(explain_query(arguments.state, data), json_form=arguments.json)
        return
    outcome = run_query(arguments.state, data)
    if arguments.out is not None:
        save_result(outcome, arguments.out)
        return
    suffix = None if arguments.json else has_file(outcome)
    if suffix is not None:
        raise ConfigError("--out", None, f"a {suffix} file, or --json for its data")
    if arguments.json:
        _print(json.dumps(outcome_json(outcome)), soft_wrap=True)
        return
    rows, more = outcome_rows(outcome)
    if rows:
        _print(_table(list(rows[0]), (row.values() for row in rows)))
    names = [f"{name} {_text(value)}" for name, value in more.items()]
    names.append(f"{'as' if rows else 'no result as'} of batch {outcome.batch_id}")
    _print(", ".join(names), soft_wrap=True)


def _print_explained(found: Explained, *, json_form: bool) -> None:
    if json_form:
        _print(json.dumps(dataclasses.asdict(found)), soft_wrap=True)
        return
    rows = [(name, "read") for name in found.read] + [(name, "pruned") for name in found.pruned]
    counts = f"{len(found.read)} read, {len(found.pruned)} pruned"
    _print(_table(("file", ""), rows), f"{counts}, as of batch {found.batch_id}")


# -- roost flow


def flow_command(arguments: argparse.Namespace) -> None:
    """Run ``roost flow explain``."""
    for name in ("machines", "rows"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name}", given, "a whole number from 1 up")
    found = explain_flow(
        arguments.flow, arguments.machines, arguments.points, arguments.layout, arguments.rows
    )
    _print(str(found), soft_wrap=True)


# -- roost guard


def guard_command(arguments: argparse.Namespace) -> None:
    """Run ``roost guard list|log|block|unblock``."""
    action = arguments.action
    with closing(QueryService(arguments.state)) as service:
        if action == "list":
            listing = guard_listing(service.store)
            if arguments.json:
                _print(json.dumps(listing), soft_wrap=True)
            else:
                _print_listing(listing)
        elif action == "log":
            rows = guard_log(service.store, arguments.limit)
            if arguments.json:
                for row in rows:
                    _print(json.dumps(row), soft_wrap=True)
            else:
                _print_log(rows)
        else:
            evict = action == BLOCK and arguments.evict
            send_command(service.store, action, arguments.user, arguments.reason, evict=evict)
            _print(f"{_printable(arguments.user)} is {action}ed from the next batch on")


def _print_listing(listing: dict[str, Any]) -> None:
    blocks = []
    for item in listing["blocked"]:
        if item["blocked"]:
            last = item["events"][-1]
            numbers = (last["position"], last["round"], item["refused"])
            blocks.append((_printable(item["user"]), *(f"{n:,}" for n in numbers), last["reason"]))
    suspects = (
        (_names(s["users"]), s["found"], s["until"], "yes" if s["quarantined"] else "no")
        for s in listing["suspects"]
    )
    _print(
        _table(("user", "since position", "round", "refused", "reason"), blocks, "blocked"),
        _table(("users", "found in round", "until", "quarantined"), suspects, "suspicious"),
        *(f"pending    {c['action']} {_printable(c['user'])}" for c in listing["waiting"]),
        f"round {listing['round']}, {listing['users']:,} users known, "
        f"{listing['forgotten']:,} evicted from the user table",
    )


def _print_log(rows: list[dict[str, Any]]) -> None:
    cells = (
        (r["round"], r["decision"], _names(r.get("users", [])), r["reason"], _evidence(r))
        for r in rows
    )
    columns = ("round", "decision", "users", "reason", "evidence")
    _print(_table(columns, cells), "--json prints all evidence")


def _names(users: list[str]) -> str:
    more = len(users) - NAMES_SHOWN
    shown = ", ".join(_printable(user) for user in users[:NAMES_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def _evidence(row: dict[str, Any]) -> str:
    """Return the evidence that is a single number or text."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.get("evidence", {}).items()
        if isinstance(value, int | float | str)
    )


# -- roost inspect


def inspect_command(arguments: argparse.Namespace) -> None:
    """Run ``roost inspect``."""
    _print(f"state      {arguments.state}", *_contents(inspect_state(arguments.state)))


def _contents(found: StateSummary) -> Iterator[Table | str]:
    space, plan, last, guard = found.space, found.plan, found.last_round, found.guard
    if space is not None:
        bounds = ",".join(f"{value:g}" for value in space["bounds"])
        grid = f"grid {space['columns']}x{space['rows']}"
        yield f"space      {bounds} ({space['coordinates']}), {grid}, outside {space['outside']}"
    yield f"query log  position {found.position}"
    if plan is None:
        yield "plan       none yet"
    else:
        size = f"{plan.machines} machines, {len(plan.partitions)} partitions"
        yield f"plan       epoch {plan.epoch}, {found.strategy}, {size}"
    if last is not None:
        imbalance = f"busiest machine {last['imbalance']:.2f} of the mean"
        yield f"balance    round {last['round']}, {imbalance}: {last['reason']}"
    if guard is not None:
        users = f"{guard['blocked']} users blocked, {guard['suspects']} suspicious clusters"
        yield f"guard      round {guard['round']}, {users}"
    rows = (
        (file, f"{count:,}", f"{size:,}", ended or "")
        for file, count, size, ended in found.segments
    )
    yield _table(("segment", "queries", "bytes", "terminated"), rows, "segments")
    if found.window is not None:
        yield _window_line(found.window)
    if found.sketch.files:
        yield _synopsis_line(found.sketch)
    if found.dataflow is not None:
        yield from _dataflow(found.dataflow)
    if found.homes is not None:
        yield "homes      {tasks:,} tasks, {misplaced:,} elsewhere, {moved:,} moves".format(
            **found.homes
        )
    if found.executors is not None:
        yield from _executors(found.executors)
    yield _batches(found)
    if found.open_batch is not None:
        what = f"batch {found.open_batch} was begun and not committed"
        yield f"{what}: it runs, or the next run repeats it"
    if found.dead:
        records = ((*key, f"{count:,}") for key, count in found.dead.items())
        yield _table(("origin", "reason", "records"), records, "dead letters")
    else:
        yield "dead       none"


def _executors(summary: dict[str, Any]) -> Iterator[Table | str]:
    counts = "{planned} planned, {requested} requested, {observed} observed".format(**summary)
    yield f"executors  {counts}, {summary['hours']:.2f} executor hours"
    yield f"last round {summary['reason']}"
    rows = (
        (_wall_time(change["clock"]), change["decision"], str(change["planned"]), change["reason"])
        for change in summary["changes"][-CHANGES_SHOWN:]
    )
    columns = ("time (UTC)", "decision", "executors", "reason")
    yield _table(columns, rows, "executors: decisions")
    present = [count for _, count in summary["over_time"]]
    steps = [
        (_wall_time(clock), str(count))
        for (clock, count), before in zip(summary["over_time"], [None, *present], strict=False)
        if count != before
    ]
    yield _table(("since (UTC)", "executors"), steps[-CHANGES_SHOWN:], "executors: present")
    if summary["groups"] is not None:
        yield from _groups(summary["groups"])


def _wall_time(clock: float) -> str:
    return dt.datetime.fromtimestamp(clock, dt.UTC).isoformat(" ", "seconds")


def _groups(found: dict[str, Any]) -> Iterator[Table | str]:
    sizes = (
        (
            name,
            *(str(size[key]) for key in ("planned", "requested", "observed")),
            "" if size["load"] is None else f"{size['load']:.2f}",
            ", ".join(sorted(n for n, group in found["mapping"].items() if group == name)),
        )
        for name, size in found["executors"].items()
    )
    columns = ("group", "planned", "requested", "observed", "load", "operators")
    yield _table(columns, sizes, "executor groups")
    changes = (
        (
            _wall_time(change["clock"]),
            change["group"],
            change["decision"],
            str(change["planned"]),
            change["reason"],
        )
        for change in found["changes"][-CHANGES_SHOWN:]
    )
    titles = ("time (UTC)", "group", "decision", "executors", "reason")
    yield _table(titles, changes, "executors of other groups: decisions")
    yield f"placement  {found['reason']}"
    moves = (
        (
            _wall_time(move["clock"]),
            move["operator"],
            move["before"] or "",
            move["after"],
            move["reason"],
        )
        for move in found["moves"][-CHANGES_SHOWN:]
    )
    yield _table(("time (UTC)", "operator", "from", "to", "reason"), moves, "operators that moved")


def _window_line(window: WindowView) -> str:
    files = [file for batch in window.batches for file in batch.files]
    spec = window.spec
    kind = f"{'tumbling' if spec.tumbling else 'sliding'} by {spec.kind.value}, {spec.length:,}"
    points, size = sum(file.points for file in files), sum(file.nbytes for file in files)
    batches = f"{len(window.batches)} batches in {len(files)} files"
    return f"window     {kind}: {points:,} points of {batches}, {size:,} bytes"


def _synopsis_line(sketch: Catalogue) -> str:
    kinds = Counter(file.kind.value for file in sketch.files)
    files = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    size = sum(file.nbytes for file in sketch.files)
    return f"synopsis   {sketch.rows:,} points in {size:,} bytes, files: {files}"


def _dataflow(flow: FlowSummary) -> Iterator[Table | str]:
    sources = (
        (s.name, s.kind, f"{s.rows:,}" if s.rows is not None else None, *_times(s))
        for s in flow.sources
    )
    columns = ("source", "kind", "rows", "newest", "watermark", "last rows", "ended")
    yield _table(columns, sources, "dataflow: sources")
    subqueries = (
        (
            s.operator,
            s.kind,
            s.window,
            s.keys,
            f"epoch {s.epoch}",
            _dealt(s.buckets),
            f"{s.files:,}",
            f"{s.rows:,}",
            f"{s.nbytes:,}",
            _event_time(s.watermark, s.timestamps),
        )
        for s in flow.subqueries
    )
    headings = ("subquery", "kind", "window", "keys", "bucket map", "buckets per machine",
               "files", "rows", "bytes", "watermark")  # fmt: skip
    yield _table(headings, subqueries, "dataflow: subqueries")
    moves = [row for s in flow.subqueries for row in _moves(s)]
    if moves:
        about = ("subquery", "buckets", "from", "to", "recreates", "start", "switch", "end")
        yield _table((*about, "reason"), moves, "dataflow: moves under way")


def _moves(subquery: SubqueryState) -> Iterator[tuple[str | None, ...]]:
    """Yield the moves of a subquery; those that differ by their bucket only are one row."""
    alike = Counter(dataclasses.replace(move, bucket=0) for move in subquery.moves)
    for move, count in alike.items():
        found = (move.start, move.switch, move.end)
        times = (_event_time(time, subquery.timestamps) for time in found)
        owners = str(move.old), str(move.new)
        yield subquery.operator, f"{count:,}", *owners, move.protocol.value, *times, move.reason


def _times(source: SourceProgress) -> tuple[str | None, str | None, str | None, str]:
    heard = None if source.heard is None else dt.datetime.fromtimestamp(source.heard, dt.UTC)
    last = None if heard is None else heard.isoformat(timespec="seconds")
    times = (_event_time(time, source.timestamps) for time in (source.newest, source.watermark))
    newest, watermark = times
    return newest, watermark, last, "yes" if source.ended else "no"


def _event_time(time: int | None, timestamps: bool) -> str | None:
    """Return an event time as text, a timestamp in UTC."""
    if time is None or time == TIME_MIN:
        return None
    if time == TIME_MAX:
        return "end"
    if not timestamps:
        return f"{time:,}"
    return str(np.datetime64(time, "us")).removesuffix(".000000")


def _dealt(buckets: Sequence[int]) -> str:
    """Return how many buckets each machine owns; equal ones once."""
    if len(set(buckets)) == 1:
        return f"{len(buckets)} x {buckets[0]}"
    shown = ", ".join(map(str, buckets[:MACHINES_SHOWN]))
    return shown + (", …" if len(buckets) > MACHINES_SHOWN else "")


def _batches(found: StateSummary) -> Table:
    shown = found.commits[-BATCHES_SHOWN:]
    rows = []
    for commit in shown:
        metrics = commit.figures
        dead = metrics["dead_points"] + metrics["dead_requests"]
        cells = [commit.batch_id, metrics["points"], metrics["matches"]]
        if found.dataflow is not None:
            flow = metrics.get(DATAFLOW, {})
            cells += [sum(flow.get(kind, {}).values()) for kind in ("sources", "sinks")]
            dead += sum(sum(reasons.values()) for reasons in flow.get("dead", {}).values())
        cells.append(dead)
        rows.append((*(f"{cell:,}" for cell in cells), f"{metrics['seconds']:.3f}"))
    title = f"batches ({found.batches}, the last {len(shown)} shown)"
    more = () if found.dataflow is None else ("tuples", "results")
    return _table(("batch", "points", "matches", *more, "dead", "seconds"), rows, title)


COMMANDS = {
    "query": query_command,
    "snapshot": snapshot_command,
    "synopsis": synopsis_command,
    "flow": flow_command,
    "guard": guard_command,
    "inspect": inspect_command,
}
