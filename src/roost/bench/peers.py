"""``roost bench peers``: Roost beside what else could do its job.

Each case runs on each system in a process of its own, one after the other, on the same two cores:
the same points, the same queries, once counted and once, on fewer points, written as Parquet. A
comparison of speed is void if the answers differ, so the number of matches must be equal across
systems, and where matches are written a digest over all rows as well; else the run fails.

A system that is unavailable is named before the first case. If it is unavailable or fails, its row
has no rate but the reason, the summary lists it under ``failed``, and the benchmark ends with a
non-zero exit code once all others are measured; a failure of Roost itself ends it at once. The
summary takes for each figure the worst of the counted cases.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import roost
from roost.bench import cases, check_writable
from roost.bench.cases import Case, CaseSpec
from roost.bench.common import environment, save_bars_plot, write_json
from roost.bench.rivals import environment as environments
from roost.bench.rivals.environment import Unavailable, own_command, telling_line
from roost.bench.rivals.protocol import CORES, Mode, match_files
from roost.errors import RoostError

RUN_SECONDS_MAX = 900.0
MODES: tuple[Mode, ...] = ("count", "write")
MATCH_COLUMNS = ["query_id", "point_id", "event_time"]
RIVALS = ("spark_sql", "sedona", "duckdb", "strtree")
Row = dict[str, Any]


class UnequalMatches(RoostError):
    """Two systems gave different answers to the same case."""


@dataclass(frozen=True, slots=True)
class System:
    """A system that is measured.

    Parameters
    ----------
    name
        Its name in the rows.
    command
        Returns the start of its command line for a case; raises ``Unavailable`` where it cannot
        run.
    modes
        What it can do.
    required
        Whether a failure ends the benchmark.
    """

    name: str
    command: Callable[[Case | CaseSpec], list[str]]
    modes: tuple[Mode, ...] = MODES
    required: bool = False


def _own(system: str, *more: str) -> Callable[[Case | CaseSpec], list[str]]:
    return lambda case: [*own_command("roost.bench.own"), "--system", system, *more]


def _rival(module: str) -> Callable[[Case | CaseSpec], list[str]]:
    return lambda case: own_command(f"roost.bench.rivals.{module}")


def _sedona(case: Case | CaseSpec) -> list[str]:
    return _once(environments.sedona_command)


def _duckdb(case: Case | CaseSpec) -> list[str]:
    if case.kind == "polygons":
        return _once(environments.duckdb_spatial_command)
    return own_command("roost.bench.rivals.duckdb_rival")


def _once(make: Callable[[], list[str]]) -> list[str]:
    """Make an environment once in this process, whether that succeeds or not."""
    found = _attempt(make)
    if isinstance(found, Unavailable):
        raise found
    return found


@cache
def _attempt(make: Callable[[], list[str]]) -> list[str] | Unavailable:
    try:
        return make()
    except Unavailable as reason:
        return reason


SYSTEMS = {
    system.name: system
    for system in (
        System("roost", _own("roost"), required=True),
        System("kernel", _own("kernel"), modes=("count",), required=True),
        System("spark_sql", _rival("spark_sql_rival")),
        System("sedona", _sedona),
        System("duckdb", _duckdb),
        System("strtree", _rival("strtree")),
        System("roost-uniform", _own("roost", "--strategy", "uniform"), required=True),
        System("roost-history", _own("roost", "--strategy", "history"), required=True),
    )
}
DEFAULT_SYSTEMS = ("roost", "kernel", *RIVALS)


def run(
    quick: bool,
    json_path: Path,
    *,
    systems: Iterable[str] = DEFAULT_SYSTEMS,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure all systems on all cases; write the result and its plot.

    Parameters
    ----------
    quick
        Small cases, for a first look and for tests of the benchmark itself.
    json_path
        Where the result goes; the plot goes beside it.
    systems
        Names out of ``SYSTEMS``.
    console
        Where progress goes.

    Returns
    -------
    The result as written: ``rows``, ``environment``, ``summary``.
    """
    chosen = [SYSTEMS[name] for name in systems]
    console = console or Console(stderr=True)
    data = cases.data_dir()
    described = environment()
    specs = cases.QUICK if quick else cases.FULL
    check_writable(
        environments.cache_dir(), "environments of rivals", "XDG_CACHE_HOME names another place"
    )
    for reason in unavailable(chosen, specs):
        console.print(f"unavailable: {reason}")
    with tempfile.TemporaryDirectory(prefix="roost-peers-") as folder, _progress(console) as shown:
        task = shown.add_task("cases", total=None)
        made = cases.make_cases(specs, Path(folder), data)
        work = [
            (case, mode, system)
            for case in made
            for mode in MODES
            if mode == "count" or case.write_points
            for system in chosen
            if mode in system.modes
        ]
        shown.update(task, total=len(work))
        rows = []
        for case, mode, system in work:
            shown.update(task, description=f"{case.name} · {mode} · {system.name}")
            rows.append(run_one(case, mode, system, Path(folder)))
            shown.console.print(_line(rows[-1]))
            shown.advance(task)
    check_equal(rows)
    result = {
        "bench": "peers",
        "quick": quick,
        "rows": rows,
        "environment": {**described, "bench_cores": CORES, "data": made[0].data},
        "summary": {**summarise(rows), "failed": failures(rows)},
    }
    write_json(json_path, result)
    save_bars_plot(json_path.with_suffix(".png"), "points per second", _panels(rows))
    console.print(_table(rows))
    return result


def unavailable(systems: Iterable[System], specs: Iterable[CaseSpec]) -> list[str]:
    """Prepare all systems; return those that cannot run, with their reasons."""
    reasons: dict[str, None] = {}
    for system, spec in itertools.product(systems, specs):
        try:
            system.command(spec)
        except Unavailable as reason:
            reasons[f"{system.name}, {spec.kind}: {reason}"] = None
    return list(reasons)


def failures(rows: Iterable[Row]) -> list[str]:
    """Return what was not measured, with the reasons."""
    return [
        f"{row['system']}, {row['case']}, {row['mode']}: {row['skipped']}"
        for row in rows
        if row["skipped"] is not None
    ]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def run_one(case: Case, mode: Mode, system: System, folder: Path) -> Row:
    """Run one system on one case; return its row."""
    row: Row = {"case": case.name, "mode": mode, "system": system.name, "queries": case.queries}
    try:
        return {**row, **_measured(case, mode, system, folder), "skipped": None}
    except Unavailable as error:
        if system.required:
            raise RoostError(f"{system.name} failed on {case.name}, {mode}: {error}") from error
        return {**row, "points_per_s": None, "matches": None, "skipped": str(error)}


def _measured(case: Case, mode: Mode, system: System, folder: Path) -> Row:
    out, answer = folder / "out", folder / "result.json"
    answer.unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    command = [
        *system.command(case),
        "--case",
        str(Path(case.queries_path).with_name("case.json")),
        "--mode",
        mode,
        "--out",
        str(out),
        "--json",
        str(answer),
    ]
    _run(command, folder)
    if not answer.is_file():
        raise Unavailable("it ended with no result")
    result: Row = json.loads(answer.read_text())
    row = {key: value for key, value in result.items() if key not in ("system", "case", "mode")}
    if mode == "write":
        row["digest"] = digest(out)
        shutil.rmtree(out, ignore_errors=True)
    return row


def _run(command: list[str], folder: Path) -> None:
    environ = dict(os.environ)
    source = str(Path(roost.__file__).parents[1])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environ.get("PYTHONPATH")]))
    # Another environment's Spark must not be led to ours.
    environ.pop("SPARK_HOME", None)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            check=False,
            env=environ,
            cwd=folder,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"not done in {RUN_SECONDS_MAX:.0f} s") from error
    if done.returncode != 0:
        raise Unavailable(telling_line(done.stderr))


def digest(out: Path) -> str:
    """Sum a hash over all written matches: equal sets of rows give equal digests, in any order."""
    total = 0
    for path in match_files(out):
        for batch in pq.ParquetFile(path).iter_batches(columns=MATCH_COLUMNS):
            total += int(_hashes(batch).sum(dtype=np.uint64))
    return f"{total % 2**64:016x}"


def _hashes(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.uint64]]:
    time = pc.cast(batch["event_time"], pa.timestamp("us", tz="UTC"), safe=False)
    columns = [batch["query_id"], batch["point_id"], pc.cast(time, pa.int64())]
    mixed = np.zeros(batch.num_rows, np.uint64)
    for column in columns:
        value = pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False).view(np.uint64)
        mixed = (mixed ^ value) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def check_equal(rows: Iterable[Row]) -> None:
    """Raise where systems that ran differ in their matches."""
    seen: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["skipped"] is not None:
            continue
        first = seen.setdefault((row["case"], row["mode"]), row)
        for key in ("points", "matches", "digest"):
            if first.get(key) != row.get(key):
                raise UnequalMatches(
                    f"{row['case']}, {row['mode']}: {first['system']} has {key} {first.get(key)}, "
                    f"{row['system']} has {row.get(key)}"
                )


@dataclass(slots=True)
class _Worst:
    """The least value of each figure over the cases."""

    values: dict[str, float | None] = field(default_factory=dict)

    def add(self, figures: Mapping[str, float | None]) -> None:
        for name, value in figures.items():
            known = self.values.get(name)
            if value is not None and (known is None or value < known):
                self.values[name] = value
            self.values.setdefault(name, None)


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the issue's figures: the worst over the counted cases, and each case's own."""
    rates: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["mode"] == "count" and row["points_per_s"] is not None:
            rates.setdefault(row["case"], {})[row["system"]] = row["points_per_s"]
    worst, by_case = _Worst(), {}
    for case, of in rates.items():
        by_case[case] = _figures(of)
        worst.add(by_case[case])
    return {**worst.values, **by_case}


def _figures(of: Mapping[str, float]) -> dict[str, float | None]:
    def over(other: str, times: int = 1) -> float | None:
        return of["roost"] / (of[other] * times) if {"roost", other} <= of.keys() else None

    ratios = {f"ratio_vs_{name}": over(name) for name in RIVALS}
    return {**ratios, "kernel_efficiency": over("kernel", CORES)}


def _panels(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["points_per_s"] is not None:
            panel = "matches counted" if row["mode"] == "count" else "matches written"
            group = panels.setdefault(panel, {}).setdefault(row["case"], {})
            group[row["system"]] = row["points_per_s"]
    return panels


def _line(row: Row) -> str:
    if row["skipped"] is not None:
        return f"{row['case']} {row['mode']} {row['system']}: failed: {row['skipped']}"
    found = f"{row['points_per_s']:,.0f} points/s, {row['matches']:,} matches"
    return f"{row['case']} {row['mode']} {row['system']}: {found}"


def _table(rows: Iterable[Row]) -> Table:
    table = Table("case", "mode", "system", "points/s", "matches", "notes")
    for row in rows:
        rate, matches = row["points_per_s"], row["matches"]
        table.add_row(
            row["case"],
            row["mode"],
            row["system"],
            "-" if rate is None else f"{rate:,.0f}",
            "-" if matches is None else f"{matches:,}",
            row["notes"] if row["skipped"] is None else f"failed: {row['skipped']}",
        )
    return table
