"""The ``roost`` command: flags, settings and exit codes.

Commands import their code when they run, so that ``roost --help`` is fast.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost import __version__
from roost.errors import ConfigError, RequestError, RoostError
from roost.model.choices import LayoutName
from roost.model.settings import KEYS, RunConfig, load_config, with_settings

if TYPE_CHECKING:
    from roost import Dataflow

FAILED, USAGE, REFUSED, INTERRUPTED = 1, 2, 3, 130

MASTER = "Spark master (default: local[*])"
ENCRYPT = "encrypt data that Spark sends between processes or spills"
WHERE = 'condition on attributes, such as "fare > 50"'
AGGREGATE = 'aggregates over the window, such as "count, avg(fare), quantile(fare, 0.5)"'
NEAREST = "the K points of the window nearest to the circle's centre"
# Flag of `run`, key of its setting, placeholder of its value (none for a switch), help.
RUN_FLAGS = (
    (
        "--points",
        "points.path",
        "PATH",
        "points: a Parquet, CSV or JSON-lines file, a directory of them, "
        "generate:rows=N,rate=R,seed=S or kafka://HOST:PORT/TOPIC (default: the bundled sample)",
    ),
    ("--queries", "queries.path", "PATH", "requests: Parquet, CSV or JSON lines"),
    ("--flow", "dataflow.flow", "FILE.py:NAME", "dataflow to run, with matching or without"),
    ("--source", "dataflow.sources", "NAME=PATH", "path of a source of the dataflow; repeatable"),
    ("--flow-lateness", "dataflow.lateness", "S", "seconds a tuple may be late (default: 0)"),
    ("--flow-idle", "dataflow.idle", "S", "seconds until a silent source is idle (default: off)"),
    ("--flow-machines", "dataflow.machines", "M", "tasks per subquery (default: --machines)"),
    ("--flow-buckets", "dataflow.buckets", "B", "buckets of keys per subquery (default: 256)"),
    ("--flow-layout", "dataflow.layout", "NAME", "which operators share machines (default: auto)"),
    ("--flow-balance", "dataflow.balance", "P", "planner, greedy or off (default: planner)"),
    ("--out", "out.dir", "DIR", "output directory (default: roost-out)"),
    ("--state", "out.state", "DIR", "state directory to create or resume (default: OUT/state)"),
    (
        "--strategy",
        "engine.strategy",
        "S",
        "placement of work on machines: replicated, uniform, history, swarm or global "
        "(default: replicated on one host, global on a cluster)",
    ),
    ("--machines", "engine.machines", "M", "matching tasks per batch (default: number of cores)"),
    ("--bounds", "space.bounds", "x0,y0,x1,y1", "area of the grid (default: of most points)"),
    ("--grid", "space.grid", "CxR", "columns and rows of the grid (default: 1000x1000)"),
    ("--coordinates", "space.coordinates", "KIND", "lonlat or plane (default: by column names)"),
    ("--outside", "space.outside", "RULE", "outside the bounds: exact (default) or dead (reject)"),
    ("--synopsis", "synopsis.features", "NAMES", "columns of a synopsis (default: none)"),
    ("--window", "window.kind", "KIND", "retain points by time, count or bytes (default: none)"),
    ("--window-length", "window.length", "N", "seconds of event time, points or bytes"),
    ("--lateness", "window.lateness", "S", "seconds a point may be late (default: the length)"),
    ("--batch-rows", "engine.batch_rows", "N", "maximum points per batch (default: 16000000)"),
    ("--speed", "points.speed", "F", "event seconds per second, or max (default)"),
    ("--elastic", "elastic.max", "MIN:MAX", "limits of the executors to request (default: fixed)"),
    ("--sink", "out.sink", "KIND", "parquet (default), count, console or kafka"),
    ("--topic", "out.topic", "URL", "kafka://HOST:PORT/TOPIC for --sink kafka"),
    ("--query-log", "queries.log", "URL", "kafka://HOST:PORT/TOPIC (default: SQLite in STATE)"),
    ("--master", "engine.master", "URL", MASTER),
    ("--report", "out.report", "FILE.json", "report of the run (default: OUT/report.json)"),
    ("--available-now", "engine.available_now", None, "process the available points, then exit"),
    ("--guard", "guard.enabled", None, "block attacks on the balancer (with swarm or global)"),
    ("--encrypt", "engine.encrypt", None, ENCRYPT),
)
SAMPLE_BATCH_ROWS = 50_000
DATA = Path(__file__).parent / "data"


class _Pairs(argparse.Action):
    """Collects ``NAME=VALUE`` from a flag that may be repeated."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name, separator, value = values.partition("=")
        if not (name and separator and value):
            raise argparse.ArgumentError(self, f"got {values!r}, expected {self.metavar}")
        pairs = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**pairs, name: value})


class _Limits(argparse.Action):
    """Reads ``MIN:MAX`` into two settings."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        low, _, high = values.partition(":")
        try:
            limits = int(low), int(high)
        except ValueError:
            raise argparse.ArgumentError(self, f"got {values!r}, expected {self.metavar}") from None
        for key, limit in zip(("elastic.min", "elastic.max"), limits, strict=True):
            setattr(namespace, key, limit)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and flags."""
    parser = argparse.ArgumentParser(
        prog="roost",
        description="Continuous spatial queries over streams of points, on Apache Spark.",
        epilog="Exit codes: 0 success, 1 failure, 2 usage error, 3 request refused, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"roost {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_bench(commands)
    _add_query(commands)
    _add_snapshot(commands)
    _add_synopsis(commands)
    _add_guard(commands)
    commands.add_parser("compile", help="compile all loops once, ahead of the first run")
    _add_flow(commands)
    inspect = commands.add_parser(
        "inspect",
        help="show the plan, batches, segments, dataflow and dead letters of a state directory",
    )
    inspect.add_argument("state", type=Path, metavar="STATE_DIR")
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="match points with queries, or run a dataflow",
        description="Match points with queries, or run a dataflow, or both, batch by batch, each "
        "result exactly once. Without arguments, replay the bundled sample. A stopped or killed "
        "run resumes from its state.",
    )
    run.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags override")
    for flag, key, metavar, text in RUN_FLAGS:
        kind = KEYS[key].metadata["flag_type"]
        value: dict[str, Any] = {"type": kind, "metavar": metavar}
        if kind is bool:
            value = {"action": "store_true", "default": None}
        if kind is dict:
            value = {"action": _Pairs, "metavar": metavar}
        if metavar == "MIN:MAX":
            value = {"action": _Limits, "metavar": metavar}
        run.add_argument(flag, dest=key, help=text, **value)
    run.add_argument("--quiet", action="store_true", help="print only errors")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="run a benchmark",
        description="Run a benchmark; larger data sets come from ROOST_DATA.",
    )
    names = "peers, latency, load, trio, swarm, hotspots, scale, snapshot, guard, strategies, "
    names += "reconfigure, operators, synopsis, elastic, memory, dodo or recommend"
    bench.add_argument("name", metavar="NAME", help=names)
    bench.add_argument("--quick", action="store_true", help="smaller, takes minutes")
    bench.add_argument(
        "--json", type=Path, metavar="FILE", help="result file; plots are written beside it"
    )
    bench.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=(),
        metavar="LIST",
        help="experiments of synopsis, separated by commas; they are added to the result file",
    )


def _add_query(commands: Any) -> None:
    query = commands.add_parser(
        "query", help="register, terminate or list queries of a state directory"
    )
    actions = query.add_subparsers(dest="action", metavar="ACTION", required=True)
    register = actions.add_parser("register", help="register a query")
    terminate = actions.add_parser("terminate", help="terminate a query")
    for action in (register, terminate):
        action.add_argument("query_id", metavar="QUERY_ID", help="identifier of the query")
        action.add_argument("--user", default="local", help="owner (default: local)")
        action.add_argument("--at", metavar="TIME", help="event time from which it applies")
    _add_shapes(register.add_mutually_exclusive_group(required=True))
    register.add_argument("--where", metavar="PREDICATE", help=WHERE)
    register.add_argument("--expires-at", metavar="TIME", help="event time at which it ends")
    register.add_argument("--aggregate", metavar="LIST", help=f"instead of matches, {AGGREGATE}")
    register.add_argument("--nearest", type=int, metavar="K", help=f"instead of matches, {NEAREST}")
    _add_limit(actions.add_parser("list", help="list queries"), "queries")
    _add_state(actions)


def _add_shapes(group: Any) -> None:
    group.add_argument("--box", metavar="x0,y0,x1,y1", help="corners")
    group.add_argument("--circle", metavar="cx,cy,radius", help="radius in metres on lon/lat")
    group.add_argument("--polygon", metavar="TEXT", help="WKT or GeoJSON")


def _add_limit(parser: argparse.ArgumentParser, rows: str) -> None:
    text = f"maximum {rows} to print (default: 50)"
    parser.add_argument("--limit", type=int, default=50, help=text)


def _add_state(actions: Any) -> None:
    for action in actions.choices.values():
        action.add_argument(
            "--state", type=Path, required=True, metavar="DIR", help="state directory"
        )


def _add_snapshot(commands: Any) -> None:
    snapshot = commands.add_parser(
        "snapshot",
        help="query the current window",
        description="Query the window of a state directory: points in a shape, the nearest points, "
        "or aggregates. The stream may be running; the result names the batch that it reflects.",
    )
    snapshot.add_argument("state", type=Path, metavar="STATE_DIR")
    shape = snapshot.add_mutually_exclusive_group()
    _add_shapes(shape)
    shape.add_argument("--at", metavar="x,y", help="with --nearest: at any distance")
    snapshot.add_argument("--where", metavar="PREDICATE", help=WHERE)
    snapshot.add_argument("--since", metavar="TIME", help="only points of this time or later")
    snapshot.add_argument("--until", metavar="TIME", help="only points before this time")
    snapshot.add_argument("--nearest", type=int, metavar="K", help=NEAREST)
    snapshot.add_argument("--aggregate", metavar="LIST", help=AGGREGATE)
    snapshot.add_argument(
        "--out", type=Path, metavar="FILE", help="write a .parquet, .csv or .jsonl file instead"
    )
    _add_limit(snapshot, "rows")
    snapshot.add_argument("--user", default="local", help="user of the query (default: local)")
    snapshot.add_argument("--master", metavar="URL", help=MASTER)
    snapshot.add_argument("--encrypt", action="store_true", help=ENCRYPT)


def _add_synopsis(commands: Any) -> None:
    synopsis = commands.add_parser(
        "synopsis",
        help="query the synopsis of all points so far",
        description="Query the synopsis of a state directory: statistics and densities of any "
        "place, time and hours, with bounds. The stream may be running; the result names the "
        "batch that it reflects.",
        epilog="Example: roost synopsis roost-out/state mean feature=temp_c "
        "--circle=-46.6,-23.5,100000 --hours 14,17",
    )
    synopsis.add_argument("state", type=Path, metavar="STATE_DIR")
    synopsis.add_argument(
        "query", metavar="QUERY", help="count, mean, quantiles, chart, map, … or a JSON object"
    )
    synopsis.add_argument(
        "arguments", nargs="*", metavar="NAME=VALUE", help="arguments of the query, in JSON or text"
    )
    _add_shapes(synopsis.add_mutually_exclusive_group())
    synopsis.add_argument("--since", metavar="TIME", help="only points of this time or later")
    synopsis.add_argument("--until", metavar="TIME", help="only points before this time")
    synopsis.add_argument("--hours", metavar="FROM,TO", help="only these hours of the day, in UTC")
    synopsis.add_argument("--where", metavar="PREDICATE", help=WHERE)
    synopsis.add_argument("--explain", action="store_true", help="list the files it would read")
    synopsis.add_argument("--json", action="store_true", help="print JSON")
    text = "write chart and map as .png, rows of select and synthesize as .parquet, .csv or .jsonl"
    synopsis.add_argument("--out", type=Path, metavar="FILE", help=text)


def _add_flow(commands: Any) -> None:
    flow = commands.add_parser("flow", help="explain a dataflow")
    actions = flow.add_subparsers(dest="action", metavar="ACTION", required=True)
    explain = actions.add_parser(
        "explain",
        help="show subqueries, keys, hops and the cost of layouts",
        description="Show how a dataflow is divided into subqueries, and the hops, fan-out, "
        "channels and cost of each layout. The cost of exchanges is measured on this host.",
    )
    explain.add_argument("flow", metavar="FILE.py:NAME")
    text = "machines to divide (default: number of cores)"
    explain.add_argument("--machines", type=int, metavar="N", help=text)
    text = "Parquet file or generate:… of a dataflow that reads points (default: the sample)"
    explain.add_argument("--points", metavar="PATH", help=text)
    text = "layout to explain (default: auto)"
    layouts = [name.value for name in LayoutName]  # messages show the names
    explain.add_argument("--layout", choices=layouts, help=text)
    text = "tuples of a batch for which costs are compared (default: %(default)s)"
    explain.add_argument("--rows", type=int, default=1_000_000, metavar="N", help=text)


def _add_guard(commands: Any) -> None:
    guard = commands.add_parser(
        "guard",
        help="list suspicious and blocked users; block and unblock users",
        description="Inspect the guard of a state directory, block and unblock users. Commands "
        "take effect with the next batch, also while a run is active.",
    )
    actions = guard.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list blocked and suspicious users")
    log = actions.add_parser("log", help="list decisions with their reasons")
    _add_limit(log, "decisions")
    for action in (listing, log):
        action.add_argument("--json", action="store_true", help="print all fields as JSON")
    block = actions.add_parser("block", help="refuse a user's requests")
    block.add_argument("--evict", action="store_true", help="terminate the user's queries, too")
    unblock = actions.add_parser("unblock", help="accept a user's requests again")
    for action in (block, unblock):
        action.add_argument("user", metavar="USER")
        action.add_argument("--reason", metavar="TEXT", help="recorded in the log")
    _add_state(actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    arguments = build_parser().parse_args(_join_negatives(sys.argv[1:] if argv is None else argv))
    try:
        return _execute(arguments)
    except ConfigError as error:
        return _print_error(f"{error}", USAGE)
    except RequestError as error:
        return _print_error(f"refused, {error}", REFUSED)
    except RoostError as error:
        return _print_error(f"{error}", FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_error(message: str, exit_code: int) -> int:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    console.print(f"roost: {message}", style="red", markup=False, highlight=False)
    return exit_code


def _join_negatives(argv: Sequence[str]) -> list[str]:
    """Join ``--box -74,40,-73,41`` with ``=``: argparse reads two flags otherwise."""
    joined: list[str] = []
    for word in argv:
        if joined and re.match(r"-[\d.]", word) and re.fullmatch("--[^=]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def run_config(arguments: argparse.Namespace) -> tuple[RunConfig, Dataflow | None]:
    """Build the settings of a run from the bundled sample, the file and the flags.

    The dataflow that they name is loaded: a run without points replays the sample only if the
    dataflow reads points.
    """
    given = {key: value for key in KEYS if (value := getattr(arguments, key, None)) is not None}
    if arguments.config:
        config = load_config(arguments.config, given)
    else:
        config = with_settings(RunConfig(), given)
    flow = None
    if config.dataflow.flow is not None:
        from roost.dataflow.loading import load_flow

        flow = load_flow(config.dataflow.flow)
    if config.points.path is not None or (flow is not None and not flow.reads_points):
        return config, flow
    sample: dict[str, Any] = {"points.path": DATA / "sample_points.parquet"}
    if flow is None:  # else the end of the sample closes the windows of the dataflow
        sample["engine.available_now"] = True
    if config.queries.path is None:
        sample["queries.path"] = DATA / "sample_requests.parquet"
    if "engine.batch_rows" not in given:
        sample["engine.batch_rows"] = SAMPLE_BATCH_ROWS  # the sample in several batches
    return with_settings(config, sample), flow


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        config, flow = run_config(arguments)  # before the import: wrong settings fail at once
        from roost.engine.console import run_with_progress

        return run_with_progress(config, flow, quiet=arguments.quiet)
    if arguments.command == "bench":
        from roost.bench import run_bench

        how = {"quick": arguments.quick, "json_path": arguments.json, "only": arguments.only}
        return run_bench(arguments.name, **how)
    if arguments.command == "compile":
        from roost.commands.compile import compile_all

        for package, seconds in compile_all():
            print(f"{package} compiled in {seconds:.1f} s")
        return 0
    from roost.commands.terminal import COMMANDS

    COMMANDS[arguments.command](arguments)
    return 0
