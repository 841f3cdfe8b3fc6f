"""Console output of ``roost run``: progress while it runs, a summary at its end."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from roost.engine.pipeline import Pipeline
from roost.model.settings import RunConfig
from roost.runtime.records import Commit
from roost.runtime.report import write_report

PLAIN_INTERVAL_S = 2.0
SHOWN = ("points", "matches", "dead_points", "dead_requests")


def run_with_progress(config: RunConfig, *, quiet: bool = False) -> int:
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
    printed = 0.0

    def show(commit: Commit) -> None:
        nonlocal printed
        metrics = commit.figures
        totals.update({key: metrics[key] for key in SHOWN})
        rate = metrics["points"] / metrics["seconds"] if metrics["seconds"] else 0.0
        text = (
            f"{totals['points']:,} points  {totals['matches']:,} matches  {rate:,.0f} points/s"
            f"  {totals['dead_points'] + totals['dead_requests']:,} dead"
        )
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
            console.print(f"batch {commit.batch_id}: {text}", highlight=False)

    with Pipeline(config, on_batch=show) as pipeline:
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


def _print_report(console: Console, config: RunConfig, report: dict[str, Any]) -> None:
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
    dead = report["dead_points"] + report["dead_requests"]
    if config.out.sink == "parquet":
        console.print(f"matches  {config.out.dir / 'matches'}", highlight=False)
    if dead:
        console.print(f"dead     {config.out.dir / 'dead'}  {dead:,} records", highlight=False)
