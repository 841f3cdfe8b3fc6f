"""``roost run`` for a person: a progress line while it runs, figures when it ends."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from roost.engine.pipeline import Pipeline
from roost.model.settings import RunConfig
from roost.runtime.records import Commit
from roost.runtime.report import write_report

PLAIN_EVERY_S = 2.0


class _Shown:
    """Progress of a run: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, pipeline: Pipeline, console: Console, quiet: bool) -> None:
        self._pipeline = pipeline
        self._console = console
        self._quiet = quiet
        self._live = console.is_terminal and not quiet
        self._points = self._matches = self._dead = 0
        self._started = time.perf_counter()
        self._printed = 0.0
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._task = self.progress.add_task("starting Spark", total=None, figures="")

    def batch(self, commit: Commit) -> None:
        """Show a batch."""
        figures = commit.figures
        self._points += figures["points"]
        self._matches += figures["matches"]
        self._dead += figures["dead_points"] + figures["dead_requests"]
        rate = figures["points"] / figures["seconds"] if figures["seconds"] else 0.0
        text = (
            f"{self._points:,} points  {self._matches:,} matches  {rate:,.0f} points/s"
            f"  {self._dead:,} dead"
        )
        source = self._pipeline.source
        total = source.total() if source is not None else None
        self.progress.update(
            self._task,
            description=f"batch {commit.batch_id}",
            completed=self._points,
            total=total,
            figures=text,
        )
        now = time.perf_counter()
        if not self._live and not self._quiet and now - self._printed >= PLAIN_EVERY_S:
            self._printed = now
            self._console.print(f"batch {commit.batch_id}: {text}", highlight=False)


def run_with_progress(config: RunConfig, *, quiet: bool = False) -> int:
    """Run a pipeline to its end and say what came of it; returns the exit code."""
    console = Console()
    shown: _Shown
    with Pipeline(config, on_batch=lambda commit: shown.batch(commit)) as pipeline:
        shown = _Shown(pipeline, console, quiet)

        def stop(number: int, frame: FrameType | None) -> None:
            pipeline.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with shown.progress:
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
