"""What an operator does with a state directory, without Spark: ask for queries and look inside."""

from __future__ import annotations

import argparse
import datetime as dt
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from roost.balance import Plan
from roost.errors import ConfigError, RequestError, StateError
from roost.kernel import Segment
from roost.model import (
    BOX,
    CIRCLE,
    TIME_MAX,
    TIME_MIN,
    TIMESTAMP,
    Box,
    Circle,
    Instant,
    Polygon,
    Query,
    Request,
    Terminate,
    request_record,
)
from roost.space import Coordinates, Rect, Space
from roost.state.admission import POLYGON_VERTICES_MAX, Rules, admit
from roost.state.columns import parse_time
from roost.state.guard_keeper import GuardKeeper
from roost.state.queries import QuerySet
from roost.state.querylog import SqliteQueryLog
from roost.state.store import Store

WORLD = Rect(-180.0, -90.0, 180.0, 90.0)
BATCHES_SHOWN = 10


def attribute_schema(pairs: list[list[str]]) -> pa.Schema | None:
    """Rebuild the schema of the points' attributes as the state directory notes it."""
    fields = []
    for name, text in pairs:
        try:
            fields.append((name, pa.type_for_alias(text)))
        except ValueError:
            if not text.startswith("timestamp"):
                return None  # an exotic type: leave the check to the run
            fields.append((name, TIMESTAMP))
    return pa.schema(fields)


def rules_of(store: Store) -> Rules:
    """Rules that a state directory judges requests by; before its first run, the loosest."""
    meta = store.meta()
    if meta is None:
        space = Space(WORLD, coordinates=Coordinates.PLANE)
        return Rules(space, pa.string(), TIMESTAMP)
    id_type = pa.int64() if meta["query_id_type"] == "int64" else pa.string()
    time_type = pa.int64() if meta["types"][1] == "int64" else TIMESTAMP
    attributes = attribute_schema(meta["attributes"])
    return Rules(
        Space.from_json(meta["space"]),
        id_type,
        time_type,
        attributes,
        meta.get("polygon_vertices_max", POLYGON_VERTICES_MAX),
        "window" in meta,
        _kept(meta, attributes),
        pa.int64() if meta["types"][0] == "int64" else pa.string(),
    )


def _kept(meta: dict[str, Any], attributes: pa.Schema | None) -> pa.Schema | None:
    """Attributes that the window keeps, as far as that is known."""
    if "window" not in meta or attributes is None:
        return None
    return pa.schema([attributes.field(name) for name in meta["window_attributes"]])


def plain_console() -> Console:
    """Make a console that prints names and predicates as they are, brackets and colons too."""
    return Console(markup=False, emoji=False)


class Desk:
    """Answers requests at once: the same rules as a batch, over the log as it is now.

    The log is folded in memory only; the run that owns the state directory folds it for good.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        if not create and not (folder / "state.db").exists():
            raise StateError(f"{folder} is not a state directory: it has no state.db")
        self.store = Store(folder)
        self.log = SqliteQueryLog(folder / "queries.db")
        self.rules = rules_of(self.store)

    def close(self) -> None:
        """Release the files."""
        self.store.close()
        self.log.close()

    def submit(self, request: Request) -> int:
        """Append a request to the log, or raise what it would be refused for."""
        block = pa.Table.from_pylist([request_record(request)])
        keeper = GuardKeeper.onlooking(self.store)
        if keeper is not None:
            keeper.refuse([request.user_id])
        queries = self.queries()
        admission = admit(block, queries.version.rows, self.rules, queries.lookup)
        if admission.refused:
            refused = admission.refused[0]
            raise RequestError(refused.reason.value, refused.detail)
        return self.log.append(block)

    def queries(self) -> QuerySet:
        """Return the queries as the log has them now."""
        keeper = GuardKeeper.onlooking(self.store)
        queries = QuerySet(self.store, self.log, self.rules, keep=False, keeper=keeper)
        queries.advance(self.log.end())
        return queries


def read_numbers(text: str, count: int, key: str, takes: str) -> list[float]:
    """Read numbers with commas between; the key names the flag in the error."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ConfigError(key, text, takes)
    return numbers


def read_shape(arguments: argparse.Namespace) -> Box | Circle | Polygon | None:
    """Make a shape of the flags ``--box``, ``--circle`` and ``--polygon``; None without any."""
    if arguments.box is not None:
        return Box(*read_numbers(arguments.box, 4, "--box", "x0,y0,x1,y1"))
    if arguments.circle is not None:
        return Circle(*read_numbers(arguments.circle, 3, "--circle", "cx,cy,radius"))
    return None if arguments.polygon is None else Polygon(arguments.polygon)


def read_instant(text: str | None, rules: Rules, key: str) -> Instant | None:
    """Read an event time of a stream."""
    if text is None:
        return None
    try:
        return int(text) if rules.time_type == pa.int64() else parse_time(text)
    except ValueError:
        takes = "a whole number" if rules.time_type == pa.int64() else "an ISO time"
        raise ConfigError(key, text, takes) from None


def _request(arguments: argparse.Namespace, rules: Rules) -> Request:
    query_id: str | int = arguments.query_id
    if rules.id_type == pa.int64():
        try:
            query_id = int(query_id)
        except ValueError:
            raise ConfigError("QUERY_ID", query_id, "a whole number in this state") from None
    at = read_instant(arguments.at, rules, "--at")
    if arguments.action == "terminate":
        return Terminate(query_id, arguments.user, at)
    shape = read_shape(arguments)
    assert shape is not None, "the parser asks for one"
    expires_at = read_instant(arguments.expires_at, rules, "--expires-at")
    return Query(
        query_id,
        shape,
        arguments.user,
        arguments.where,
        at,
        expires_at,
        arguments.aggregate,
        arguments.nearest,
    )


def query_command(arguments: argparse.Namespace) -> int:
    """``roost query register|terminate|list``."""
    console = plain_console()
    with closing(Desk(arguments.state, create=arguments.action == "register")) as desk:
        if arguments.action == "list":
            _list_queries(desk, arguments.limit, console)
            return 0
        position = desk.submit(_request(arguments, desk.rules))
    done = "registered" if arguments.action == "register" else "terminated"
    console.print(f"{done} {arguments.query_id} at log position {position}")
    return 0


def _shape_text(segment: Segment, slot: int) -> str:
    x0, y0, x1, y1 = segment.boxes[slot].tolist()
    if segment.kinds[slot] == BOX:
        return f"box {x0:g},{y0:g},{x1:g},{y1:g}"
    if segment.kinds[slot] == CIRCLE:
        assert segment.radius is not None
        return f"circle {x0:g},{y0:g} radius {segment.radius[slot]:g}"
    return f"polygon in {x0:g},{y0:g},{x1:g},{y1:g}"


def _wants_text(segment: Segment, slot: int) -> str:
    code = -1 if segment.wants is None else int(segment.wants[slot])
    return "matches" if code < 0 else segment.wants_texts[code]


def _time_text(value: int, rules: Rules) -> str:
    if value in (TIME_MIN, TIME_MAX):
        return "-"
    if rules.time_type == pa.int64():
        return str(value)
    return dt.datetime.fromtimestamp(value / 1e6, dt.UTC).isoformat()


def _list_queries(desk: Desk, limit: int, console: Console) -> None:
    table = Table("query", "user", "shape", "where", "wants", "from", "until")
    live = shown = 0
    for _, segment, ended in desk.queries().segments():
        for slot in range(segment.size):
            end = ended.get(slot, TIME_MAX)
            if segment.live_until is not None:
                end = min(end, int(segment.live_until[slot]))
            start = TIME_MIN if segment.live_from is None else int(segment.live_from[slot])
            if end <= start:
                continue
            live += 1
            if shown >= limit:
                continue
            shown += 1
            code = -1 if segment.predicate is None else int(segment.predicate[slot])
            table.add_row(
                str(segment.ids[slot].as_py()),
                str(segment.users[slot].as_py()),
                _shape_text(segment, slot),
                "" if code < 0 else segment.predicate_texts[code],
                _wants_text(segment, slot),
                _time_text(start, desk.rules),
                _time_text(end, desk.rules),
            )
    console.print(table)
    console.print(f"{live:,} queries, {shown:,} shown")


def inspect_state(folder: Path, console: Console) -> None:
    """Print what a state directory holds."""
    with closing(Desk(folder)) as desk:
        _print_space(folder, desk.store.meta(), console)
        end = desk.log.end()
        console.print(f"query log  position {end}")
        _print_plan(desk.store, console)
        _print_guard(desk.store, console)
        _print_segments(desk.store, end, console)
        _print_window(desk.store, console)
        _print_batches(desk.store, console)
        _print_dead(folder, console)


def _print_space(folder: Path, meta: dict[str, Any] | None, console: Console) -> None:
    console.print(f"state      {folder}")
    if meta:
        space = meta["space"]
        bounds = ",".join(f"{value:g}" for value in space["bounds"])
        console.print(
            f"space      {bounds} ({space['coordinates']}), grid "
            f"{space['columns']}x{space['rows']}, outside {space['outside']}",
        )


def _print_plan(store: Store, console: Console) -> None:
    epoch = store.last_epoch()
    if epoch is None:
        console.print("plan       none yet")
        return
    body = store.plan(epoch)
    plan = Plan.from_json(body)
    console.print(
        f"plan       epoch {epoch}, {body['strategy']}, {plan.machines} machines, "
        f"{len(plan.partitions)} partitions",
        highlight=False,
    )
    last = store.last_round()
    if last is not None:
        console.print(
            f"balance    round {last['round']}, busiest machine {last['imbalance']:.2f} of the "
            f"mean: {last['reason']}",
            highlight=False,
        )


def _print_guard(store: Store, console: Console) -> None:
    keeper = GuardKeeper.load(store)
    if keeper is not None:
        listing = keeper.guard.listing()
        blocked = sum(item["blocked"] for item in listing["blocked"])
        console.print(
            f"guard      round {keeper.guard.round}, {blocked} users blocked, "
            f"{len(listing['suspects'])} suspicious clusters",
            highlight=False,
        )


def _print_segments(store: Store, end: int, console: Console) -> None:
    version = store.version_at(end)
    refs = () if version is None else version.segments
    table = Table(
        "segment", "queries", "bytes", "ended file", title="segments", title_justify="left"
    )
    for ref in refs:
        size = (store.segment_folder / ref.file).stat().st_size
        table.add_row(ref.file, f"{ref.size:,}", f"{size:,}", ref.ended or "")
    console.print(table)


def _print_window(store: Store, console: Console) -> None:
    rows, state = store.window()
    if state is None:
        return
    files = [file for row in rows for file in row["files"]]
    spec = state["spec"]
    kind = f"{'tumbling' if spec['tumbling'] else 'sliding'} by {spec['kind']}, {spec['length']:,}"
    console.print(
        f"window     {kind}: {sum(file['points'] for file in files):,} points of "
        f"{len(rows)} batches in {len(files)} files, "
        f"{sum(file['nbytes'] for file in files):,} bytes",
        highlight=False,
    )


def _print_batches(store: Store, console: Console) -> None:
    commits = store.commits()
    table = Table("batch", "points", "matches", "dead", "seconds", title_justify="left")
    table.title = f"batches ({len(commits)}, the last {min(len(commits), BATCHES_SHOWN)} shown)"
    for commit in commits[-BATCHES_SHOWN:]:
        figures = commit.figures
        dead = figures["dead_points"] + figures["dead_requests"]
        cells = (commit.batch_id, figures["points"], figures["matches"], dead)
        table.add_row(*(f"{cell:,}" for cell in cells), f"{figures['seconds']:.3f}")
    console.print(table)
    last = store.last_intent()
    if last is not None and store.commit(last.batch_id) is None:
        console.print(f"batch {last.batch_id} was begun and not committed: a run will repeat it")


def _print_dead(folder: Path, console: Console) -> None:
    """Count dead letters by reason; they lie beside a state directory in its usual place."""
    dead = folder.parent / "dead"
    counts: Counter[tuple[Any, Any]] = Counter()
    for path in sorted(dead.glob("*.parquet")) if dead.is_dir() else []:
        rows = pq.read_table(path, columns=["origin", "reason"]).to_pylist()
        counts.update((row["origin"], row["reason"]) for row in rows)
    if not counts:
        console.print("dead       none")
        return
    table = Table("origin", "reason", "records", title="dead letters", title_justify="left")
    for (origin, reason), count in sorted(counts.items()):
        table.add_row(origin, reason, f"{count:,}")
    console.print(table)
