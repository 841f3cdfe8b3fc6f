"""Console output of ``roost run``: progress while it runs, a summary at its end."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from roost.dataflow.flow import Dataflow
from roost.engine.pipeline import Pipeline
from roost.model.elastic import DEFAULT_GROUP
from roost.model.settings import RunConfig
from roost.runtime.group_rounds import GROUP_ROUNDS
from roost.runtime.operator_placement import PLACEMENT
from roost.runtime.records import Commit, last_round
from roost.runtime.report import group_sizes, write_report
from roost.storage.totals import DATAFLOW

PLAIN_INTERVAL_S = 2.0
SHOWN = ("points", "matches", "dead_points", "dead_requests")


def run_with_progress(
    config: RunConfig, flow: Dataflow | None = None, *, quiet: bool = False
) -> int:
    """Run a pipeline to its end and print a summary; returns the exit code.

    Progress is a live bar on a terminal, and a periodic line elsewhere.
    """
    console = Console()
    live = console.is_terminal and not quiet
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not live,
    )
    shown = progress.add_task("starting Spark", total=None, metrics="")
    totals: Counter[str] = Counter()
    printed, printed_round = 0.0, -1

    def show(commit: Commit) -> None:
        nonlocal printed, printed_round
        metrics = commit.figures
        totals.update({key: metrics[key] for key in SHOWN})
        totals.update(_flow_rows(metrics.get(DATAFLOW)))
        text = _progress(totals, metrics, matching=config.points.path is not None)
        row = None if config.elastic.max is None else last_round(pipeline.store, GROUP_ROUNDS)
        if row is not None:
            text += f"  {executor_counts(row)}"
            if row["round"] != printed_round:
                printed_round = row["round"]
                for line in [] if quiet else round_lines(row):
                    progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
        progress.update(
            shown,
            description=f"batch {commit.batch_id}",
            completed=totals["points"],
            total=pipeline.source.total() if pipeline.source is not None else None,
            metrics=text,
        )
        now = time.perf_counter()
        if not live and not quiet and now - printed >= PLAIN_INTERVAL_S:
            printed = now
            console.print(f"batch {commit.batch_id}: {text}", highlight=False, soft_wrap=True)

    with Pipeline(config, flow=flow, on_batch=show) as pipeline:
        earlier = last_round(pipeline.store, GROUP_ROUNDS)
        printed_round = -1 if earlier is None else earlier["round"]
        before = {
            number: signal.signal(number, lambda *received: pipeline.stop())
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with progress:
                report = pipeline.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    path = config.out.report or config.out.dir / "report.json"
    write_report(path, report)
    if not quiet:
        _print_report(console, config, report)
        console.print(f"report   {path}", highlight=False)
    return 0


def executor_counts(row: dict[str, Any]) -> str:
    """Return the executors at the end of a round, by group if there are several."""
    counts = {
        name: f"{size['observed']} of {size['planned']}" for name, size in group_sizes(row).items()
    }
    if len(counts) == 1:
        return f"{counts[DEFAULT_GROUP]} executors"
    return "executors: " + ", ".join(f"{name} {count}" for name, count in counts.items())


def round_lines(row: dict[str, Any]) -> Iterator[str]:
    """Return what a round of the executors decided, and why."""
    sizes = group_sizes(row)
    for name, size in sizes.items():
        if size["decision"] != "NoChange":
            group = "" if len(sizes) == 1 else f" of group {name}"
            yield f"executors{group}: {size['decision']} {size['planned']}, {size['reason']}"
    placed = row.get(PLACEMENT, {"moves": ()})
    for move in placed["moves"]:
        before = "" if move["before"] is None else f" from {move['before']}"
        yield f"operator {move['operator']}{before} to {move['after']}: {placed['reason']}"


def _flow_rows(metrics: dict[str, Any] | None) -> dict[str, int]:
    """Return how many rows a dataflow read, wrote and rejected."""
    if metrics is None:
        return {}
    return {
        "read": sum(metrics.get("sources", {}).values()),
        "written": sum(metrics.get("sinks", {}).values()),
        "rejected": sum(sum(rows.values()) for rows in metrics.get("dead", {}).values()),
    }


def _progress(totals: Counter[str], metrics: dict[str, Any], *, matching: bool) -> str:
    parts = []
    seconds = metrics["seconds"]
    if matching:
        rate = metrics["points"] / seconds if seconds else 0.0
        parts.append(f"{totals['points']:,} points  {totals['matches']:,} matches")
        parts.append(f"{rate:,.0f} points/s")
    if metrics.get(DATAFLOW) is not None:
        parts.append(f"{totals['read']:,} rows read  {totals['written']:,} rows written")
        if not matching:
            read = _flow_rows(metrics[DATAFLOW])["read"]
            parts.append(f"{read / seconds if seconds else 0.0:,.0f} rows/s")
    dead = totals["dead_points"] + totals["dead_requests"] + totals["rejected"]
    return "  ".join([*parts, f"{dead:,} dead"])


def _print_report(console: Console, config: RunConfig, report: dict[str, Any]) -> None:
    if config.points.path is not None:
        _print_matching(console, config, report)
    else:
        text = f"{report['batches']} batches, {report['seconds']:.1f} s"
        console.print(text, highlight=False)
    if report["dataflow"] is not None:
        _print_dataflow(console, config, report["dataflow"])
    _print_executors(console, report)
    rejected = _flow_rows(report["dataflow"]).get("rejected", 0)
    dead = report["dead_points"] + report["dead_requests"] + rejected
    if dead:
        console.print(f"dead     {config.out.dir / 'dead'}  {dead:,} records", highlight=False)


def _print_executors(console: Console, report: dict[str, Any]) -> None:
    homes = report["homes"]
    if homes is not None:
        console.print(
            f"homes    {homes['tasks']:,} tasks, {homes['misplaced']:,} ran elsewhere, "
            f"{homes['moved']:,} moves of machines",
            highlight=False,
        )
    found = report["executors"]
    if found is None:
        return
    parts = [f"executors {found['hours']:.2f} executor hours"]
    parts += [f"{n} {kind}" for kind, n in found["decisions"].items() if kind != "NoChange"]
    if found["groups"] is not None:
        mapping = sorted(found["groups"]["mapping"].items())
        parts += [f"{name} in {group}" for name, group in mapping]
    console.print(", ".join(parts), highlight=False, markup=False, soft_wrap=True)


def _print_dataflow(console: Console, config: RunConfig, flow: dict[str, Any]) -> None:
    table = Table("dataflow", "name", "rows", "bytes", "watermark")
    for name, rows in flow["sources"].items():
        table.add_row("source", name, f"{rows:,}", "", str(flow["watermarks"].get(name)))
    for name, state in flow["state"].items():
        size = f"{state['bytes']:,}"
        table.add_row("state", name, f"{state['rows']:,}", size, str(flow["watermarks"].get(name)))
    for name, rows in flow["sinks"].items():
        table.add_row("sink", name, f"{rows:,}", "", "")
    for name, reasons in flow["dead"].items():
        for reason, rows in reasons.items():
            table.add_row("dead", f"{name}: {reason}", f"{rows:,}", "", "")
    console.print(table)
    for name in flow["sinks"]:
        console.print(f"results  {config.out.dir / name}", highlight=False, markup=False)


def _print_matching(console: Console, config: RunConfig, report: dict[str, Any]) -> None:
    rate = report["points_per_s"] or 0.0
    console.print(
        f"{report['points']:,} points, {report['matches']:,} matches, "
        f"{report['batches']} batches, {report['seconds']:.1f} s, {rate:,.0f} points/s",
        highlight=False,
    )
    table = Table("machine", "points", "checks", "matches", "busy s")
    for row in report["machines"]:
        cells = (f"{row[key]:,}" for key in ("machine", "points", "checks", "matches"))
        table.add_row(*cells, f"{row['busy_seconds']:.2f}")
    console.print(table)
    balance = report["balance"]
    if balance["rounds"]:
        console.print(
            f"balance  {balance['rounds']} rounds, {balance['plan_changes']} plan changes, "
            f"{balance['moved_queries']:,} queries moved in {balance['move_seconds']:.2f} s",
            highlight=False,
        )
    if config.out.sink == "parquet":
        console.print(f"matches  {config.out.dir / 'matches'}", highlight=False)
