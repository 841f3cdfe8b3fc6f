"""The ``roost`` command.

Exit codes: 0 all is well; 1 Roost or Spark failed; 2 the command line or a setting is wrong;
3 a request was refused; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from roost import __version__
from roost.config import RunConfig, load_config, with_settings
from roost.errors import ConfigError, RequestError, RoostError

OK, FAILED, USAGE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130

# Flag of `run`, key of the configuration, what it takes, help.
RUN_FLAGS = (
    (
        "--points",
        "points.path",
        "PATH",
        "points: a Parquet, CSV or JSON-lines file, a folder of them, "
        "generate:rows=N,rate=R,seed=S or kafka://HOST:PORT/TOPIC (default: the bundled sample)",
    ),
    ("--queries", "queries.path", "PATH", "requests: Parquet, CSV or JSON lines"),
    (
        "--out",
        "out.dir",
        "DIR",
        "where matches/*.parquet and dead/*.parquet go (default: roost-out)",
    ),
    (
        "--state",
        "out.state",
        "DIR",
        "state directory; running again with it goes on where it was (default: OUT/state)",
    ),
    (
        "--strategy",
        "engine.strategy",
        "S",
        "replicated, uniform, history, swarm or global: how machines share out the work "
        "(default: replicated on one host, global on a cluster)",
    ),
    (
        "--machines",
        "engine.machines",
        "M",
        "parallel matching tasks of a batch (default: the cores of the Spark master)",
    ),
    (
        "--bounds",
        "space.bounds",
        "x0,y0,x1,y1",
        "where cells are fine; outside is still exact (default: where most points are)",
    ),
    ("--grid", "space.grid", "CxR", "cells of the plan (default: 1000x1000)"),
    (
        "--coordinates",
        "space.coordinates",
        "KIND",
        "lonlat (radius in metres) or plane (default: by the names of the columns)",
    ),
    (
        "--outside",
        "space.outside",
        "RULE",
        "exact (default) matches what is beyond the bounds, dead refuses it",
    ),
    (
        "--window",
        "window.kind",
        "KIND",
        "time, count or bytes: keep points for snapshots, aggregates and nearest (default: none)",
    ),
    (
        "--window-length",
        "window.length",
        "N",
        "length of the window: seconds of event time, points or bytes",
    ),
    (
        "--lateness",
        "window.lateness",
        "S",
        "seconds a point may be behind the newest (default: the window's length)",
    ),
    ("--batch-rows", "engine.batch_rows", "N", "points of a batch at most (default: 16000000)"),
    ("--speed", "points.speed", "F", "event seconds per second, or max (default)"),
    ("--sink", "out.sink", "KIND", "parquet (default), count, console or kafka"),
    ("--topic", "out.topic", "URL", "kafka://HOST:PORT/TOPIC for --sink kafka"),
    (
        "--query-log",
        "queries.log",
        "URL",
        "kafka://HOST:PORT/TOPIC instead of the SQLite log in the state directory",
    ),
    ("--master", "engine.master", "URL", "Spark master (default: local[*])"),
    ("--report", "out.report", "FILE.json", "write the run's figures here (default: OUT)"),
)
ENCRYPT_HELP = "encrypt what Spark sends between processes and spills to disk"
SAMPLE_BATCH_ROWS = 50_000
WHOLE_NUMBERS = ("engine.machines", "engine.batch_rows")
NUMBERS = ("window.length", "window.lateness")


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="roost",
        description="Continuous spatial queries over streams of points, on Apache Spark.",
        epilog="Exit codes: 0 fine, 1 failed, 2 wrong use, 3 request refused, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"roost {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="match points with queries",
        description=(
            "Match points with queries, batch by batch, each match exactly once. Without arguments "
            "it replays the bundled sample. A run that was stopped or killed goes on where it was."
        ),
    )
    run.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags override")
    for flag, key, metavar, words in RUN_FLAGS:
        kind = int if key in WHOLE_NUMBERS else float if key in NUMBERS else str
        run.add_argument(flag, dest=key, metavar=metavar, help=words, type=kind)
    run.add_argument(
        "--available-now",
        dest="engine.available_now",
        action="store_true",
        default=None,
        help="process what is there and end, instead of waiting for more",
    )
    run.add_argument(
        "--guard",
        dest="guard.enabled",
        action="store_true",
        default=None,
        help="find and block users who attack the balancer (with strategy swarm or global)",
    )
    run.add_argument(
        "--encrypt",
        dest="engine.encrypt",
        action="store_true",
        default=None,
        help=ENCRYPT_HELP,
    )
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")

    bench = commands.add_parser(
        "bench", help="measure", description="Run a benchmark; larger data comes from ROOST_DATA."
    )
    bench.add_argument(
        "name",
        metavar="NAME",
        help="peers, latency, load, trio, swarm, hotspots, scale, snapshot or guard",
    )
    bench.add_argument("--quick", action="store_true", help="smaller, in minutes")
    bench.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result here, plots beside"
    )

    query = commands.add_parser(
        "query", help="register, terminate or list queries of a state directory"
    )
    actions = query.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, words in (("register", "register a query"), ("terminate", "end a query")):
        action = actions.add_parser(name, help=words)
        action.add_argument("query_id", metavar="QUERY_ID")
        action.add_argument("--user", default="local", help="owner (default: local)")
        action.add_argument("--at", metavar="TIME", help="event time from which it holds")
        if name == "register":
            shape = action.add_mutually_exclusive_group(required=True)
            shape.add_argument("--box", metavar="x0,y0,x1,y1")
            shape.add_argument(
                "--circle", metavar="cx,cy,radius", help="radius in metres on lon/lat"
            )
            shape.add_argument("--polygon", metavar="TEXT", help="WKT or GeoJSON")
            action.add_argument("--where", metavar="PREDICATE", help='such as "fare > 50"')
            action.add_argument("--expires-at", metavar="TIME")
            action.add_argument(
                "--aggregate",
                metavar="LIST",
                help='aggregates of the window instead of matches, such as "count, avg(fare)"',
            )
            action.add_argument(
                "--nearest",
                type=int,
                metavar="K",
                help="the K points of the window nearest to the circle's centre, not matches",
            )
    actions.add_parser("list", help="show queries").add_argument(
        "--limit", type=int, default=50, help="how many at most (default: 50)"
    )
    for action in actions.choices.values():
        action.add_argument("--state", type=Path, required=True, metavar="DIR")

    snapshot = commands.add_parser(
        "snapshot",
        help="ask about the window as it is now",
        description=(
            "Ask about the window of a state directory: points in a shape, the nearest ones, or "
            "aggregates. Whoever runs the stream may go on; the answer says of which batch it is."
        ),
    )
    snapshot.add_argument("state", type=Path, metavar="STATE_DIR")
    shape = snapshot.add_mutually_exclusive_group()
    shape.add_argument("--box", metavar="x0,y0,x1,y1")
    shape.add_argument("--circle", metavar="cx,cy,radius", help="radius in metres on lon/lat")
    shape.add_argument("--polygon", metavar="TEXT", help="WKT or GeoJSON")
    shape.add_argument("--at", metavar="x,y", help="with --nearest: however far they are")
    snapshot.add_argument("--where", metavar="PREDICATE", help='such as "fare > 50"')
    snapshot.add_argument("--since", metavar="TIME", help="only points of this time or later")
    snapshot.add_argument("--until", metavar="TIME", help="only points before this time")
    snapshot.add_argument("--nearest", type=int, metavar="K", help="only the K nearest points")
    snapshot.add_argument(
        "--aggregate", metavar="LIST", help='such as "count, avg(fare), quantile(fare, 0.5)"'
    )
    snapshot.add_argument(
        "--out", type=Path, metavar="FILE", help="write .parquet, .csv or .jsonl instead"
    )
    snapshot.add_argument(
        "--limit", type=int, default=50, help="rows to print at most (default: 50)"
    )
    snapshot.add_argument("--master", metavar="URL", help="Spark master (default: local[*])")
    snapshot.add_argument("--encrypt", action="store_true", help=ENCRYPT_HELP)

    guard = commands.add_parser(
        "guard",
        help="see whom the guard suspects and blocks; block and unblock users",
        description=(
            "Look at the guard of a state directory, block users and let them in again. Orders "
            "hold from the next batch on, also while a run goes on."
        ),
    )
    actions = guard.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="who is blocked and who is suspicious")
    log = actions.add_parser("log", help="every decision, with why")
    log.add_argument("--limit", type=int, default=50, help="how many at most (default: 50)")
    for action in (listing, log):
        action.add_argument("--json", action="store_true", help="everything, as JSON")
    block = actions.add_parser("block", help="refuse a user's requests")
    block.add_argument("--evict", action="store_true", help="end the user's queries, too")
    unblock = actions.add_parser("unblock", help="let a user in again")
    for action in (block, unblock):
        action.add_argument("user", metavar="USER")
        action.add_argument("--reason", metavar="TEXT", help="for the log")
    for action in actions.choices.values():
        action.add_argument("--state", type=Path, required=True, metavar="DIR")

    inspect = commands.add_parser(
        "inspect", help="show a state directory: plan, batches, segments, dead letters"
    )
    inspect.add_argument("state", type=Path, metavar="STATE_DIR")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(_with_negatives(given))
    errors = Console(stderr=True, soft_wrap=True)
    try:
        return _COMMANDS[arguments.command](arguments)
    except ConfigError as error:
        errors.print(f"roost: {error}", style="red", markup=False, highlight=False)
        return USAGE
    except RequestError as error:
        errors.print(f"roost: refused, {error}", style="red", markup=False, highlight=False)
        return REFUSED
    except RoostError as error:
        errors.print(f"roost: {error}", style="red", markup=False, highlight=False)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _with_negatives(argv: Sequence[str]) -> list[str]:
    """Join ``--box -74,40,-73,41`` to one word: argparse takes it for two flags otherwise."""
    joined: list[str] = []
    for word in argv:
        number = len(word) > 1 and word[0] == "-" and (word[1].isdigit() or word[1] == ".")
        if number and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def run_config(arguments: argparse.Namespace) -> RunConfig:
    """Gather the settings of a run: the bundled sample, then the file, then the flags."""
    given = {
        key: value for key, value in vars(arguments).items() if "." in key and value is not None
    }
    if isinstance(given.get("points.speed"), str) and given["points.speed"] != "max":
        with contextlib.suppress(ValueError):  # the setting itself says what it takes
            given["points.speed"] = float(given["points.speed"])
    config = load_config(Path(arguments.config)) if arguments.config else RunConfig()
    config = with_settings(config, given)
    if config.points is None:
        data = Path(__file__).parent / "data"
        sample: dict[str, Any] = {
            "points.path": str(data / "sample_points.parquet"),
            "engine.available_now": True,
        }
        if config.queries is None:
            sample["queries.path"] = str(data / "sample_requests.parquet")
        if "engine.batch_rows" not in given:
            sample["engine.batch_rows"] = SAMPLE_BATCH_ROWS  # several batches to look at
        config = with_settings(config, sample)
    return config


def _run(arguments: argparse.Namespace) -> int:
    from roost.engine.console import run_with_progress

    return run_with_progress(run_config(arguments), quiet=arguments.quiet)


def _bench(arguments: argparse.Namespace) -> int:
    from roost.bench import run_bench

    return run_bench(arguments.name, quick=arguments.quick, json_path=arguments.json)


def _query(arguments: argparse.Namespace) -> int:
    from roost.state.operations import query_command

    return query_command(arguments)


def _snapshot(arguments: argparse.Namespace) -> int:
    from roost.engine.snapshot_command import snapshot_command

    return snapshot_command(arguments)


def _guard(arguments: argparse.Namespace) -> int:
    from roost.state.guard_desk import guard_command

    return guard_command(arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    from roost.state.operations import inspect_state, plain_console

    inspect_state(arguments.state, plain_console())
    return OK


_COMMANDS = {
    "run": _run,
    "bench": _bench,
    "query": _query,
    "snapshot": _snapshot,
    "guard": _guard,
    "inspect": _inspect,
}

if __name__ == "__main__":
    sys.exit(main())
