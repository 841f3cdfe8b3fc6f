"""``roost bench peers``: Roost compared with other systems that can do the same.

Each system runs each case in a process of its own, one after the other, on the same two cores: the
same points and queries, once counted and once, on fewer points, written as Parquet. All systems
must find the same number of matches and, where matches are written, the same digest over all rows;
else the run fails.

A system that is unavailable is reported before the first case. The row of a system that is
unavailable or fails has the reason instead of a rate, the summary lists it under ``failed``, and
the exit code is non-zero after all others are measured. A failure of Roost itself ends the run.
Each metric of the summary is the worst of the counted cases.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import roost
from roost.bench import cases, check_writable
from roost.bench.cases import Case, Kind
from roost.bench.common import CORES, Measured, Plot, Row
from roost.bench.rivals import environment as environments
from roost.bench.rivals.environment import Unavailable
from roost.bench.rivals.protocol import MATCH_COLUMNS, Mode, match_files
from roost.engine.kafka_jars import cache_dir
from roost.errors import RoostError

RUN_SECONDS_MAX = 900.0
MODES: tuple[Mode, ...] = ("count", "write")
RIVALS = ("spark_sql", "sedona", "duckdb", "strtree")
Maker = Callable[[], list[str]]
Command = list[str] | Unavailable


class UnequalMatches(RoostError):
    """Two systems found different matches in the same case."""


@dataclass(frozen=True, slots=True)
class System:
    """A measured system."""

    name: str
    command: Maker  # returns the start of the command line; raises Unavailable if it cannot run
    polygons: Maker | None = None  # the same for polygons, if it differs
    modes: tuple[Mode, ...] = MODES
    required: bool = False  # whether a failure ends the benchmark

    def maker(self, kind: Kind) -> Maker:
        """Return what makes the command line for a kind of queries."""
        return self.polygons if kind == "polygons" and self.polygons else self.command


def _module(*words: str) -> Maker:
    return lambda: [sys.executable, "-m", *words]


SYSTEMS = (
    System("roost", _module("roost.bench.own", "--system", "roost"), required=True),
    System(
        "kernel", _module("roost.bench.own", "--system", "kernel"), modes=("count",), required=True
    ),
    System("spark_sql", _module("roost.bench.rivals.spark_sql_rival")),
    System("sedona", environments.sedona_command),
    System(
        "duckdb",
        _module("roost.bench.rivals.duckdb_rival"),
        polygons=environments.duckdb_spatial_command,
    ),
    System("strtree", _module("roost.bench.rivals.strtree")),
)


def run(quick: bool) -> Measured:
    """Measure all systems on all cases."""
    specs = cases.QUICK if quick else cases.FULL
    check_writable(cache_dir(), "environments of rivals", "XDG_CACHE_HOME names another place")
    kinds = list(dict.fromkeys(spec.kind for spec in specs))
    commands = prepare(SYSTEMS, kinds)
    console = Console(stderr=True)
    for system, kind in itertools.product(SYSTEMS, kinds):
        if isinstance(reason := commands[system.maker(kind)], Unavailable):
            console.print(f"unavailable: {system.name}, {kind}: {reason}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory(prefix="roost-peers-") as folder,
        Progress(*columns, TimeElapsedColumn(), console=console) as shown,
    ):
        task = shown.add_task("cases", total=None)
        made = cases.make_cases(specs, Path(folder), cases.data_dir())
        work = [
            (case, mode, system)
            for case in made
            for mode in MODES
            if mode == "count" or case.write_points
            for system in SYSTEMS
            if mode in system.modes
        ]
        shown.update(task, total=len(work))
        rows = []
        for case, mode, system in work:
            shown.update(task, description=f"{case.name} · {mode} · {system.name}")
            command = commands[system.maker(case.kind)]
            rows.append(run_one(case, mode, system, command, Path(folder)))
            shown.console.print(_line(rows[-1]))
            shown.advance(task)
    check_equal(rows)
    failed = [
        f"{row['system']}, {row['case']}, {row['mode']}: {row['skipped']}"
        for row in rows
        if row["skipped"] is not None
    ]
    return Measured(
        rows,
        {**summarise(rows), "failed": failed},
        {"": Plot("points per second", _panels(rows), columns=len(MODES), log=True)},
        table={
            "case": ("case", ""),
            "mode": ("mode", ""),
            "system": ("system", ""),
            "points/s": ("points_per_s", ",.0f"),
            "matches": ("matches", ",d"),
            "notes": ("notes", ""),
        },
        environment={"bench_cores": CORES, "data": made[0].data},
    )


def prepare(systems: Iterable[System], kinds: Iterable[Kind]) -> dict[Maker, Command]:
    """Make each command line once, whether that succeeds or fails."""
    made: dict[Maker, Command] = {}
    for maker in dict.fromkeys(s.maker(kind) for s, kind in itertools.product(systems, kinds)):
        try:
            made[maker] = maker()
        except Unavailable as reason:
            made[maker] = reason
    return made


def run_one(case: Case, mode: Mode, system: System, command: Command, folder: Path) -> Row:
    """Run one system on one case; return its row."""
    row: Row = {"case": case.name, "mode": mode, "system": system.name, "queries": case.queries}
    try:
        if isinstance(command, Unavailable):
            raise command
        return {**row, **_measured(case, mode, command, folder), "skipped": None}
    except Unavailable as error:
        if system.required:
            raise RoostError(f"{system.name} failed on {case.name}, {mode}: {error}") from error
        unmeasured = {"points_per_s": None, "matches": None, "notes": f"failed: {error}"}
        return {**row, **unmeasured, "skipped": str(error)}


def _measured(case: Case, mode: Mode, command: list[str], folder: Path) -> Row:
    out, path = folder / "out", folder / "result.json"
    path.unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    options = {
        "--case": Path(case.queries_path).with_name("case.json"),
        "--mode": mode,
        "--out": out,
        "--json": path,
    }
    words = [str(word) for option in options.items() for word in option]
    sources = str(Path(roost.__file__).parents[1])
    search = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": search}
    environ.pop("SPARK_HOME", None)  # it would lead another environment to our Spark
    environments.run([*command, *words], RUN_SECONDS_MAX, env=environ, cwd=folder)
    if not path.is_file():
        raise Unavailable("it wrote no result")
    result: Row = json.loads(path.read_text())
    row = {key: value for key, value in result.items() if key not in ("system", "case", "mode")}
    if mode == "write":
        row["digest"] = digest(out)
        shutil.rmtree(out, ignore_errors=True)
    return row


def digest(out: Path) -> str:
    """Sum a hash over all written matches; the order of the rows does not matter."""
    total = 0
    for path in match_files(out):
        for batch in pq.ParquetFile(path).iter_batches(columns=list(MATCH_COLUMNS)):
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
    """Raise if systems that ran found different matches."""
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


def summarise(rows: Iterable[Row]) -> Row:
    """Return the metrics of each counted case, and the worst over these cases."""
    rates: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["mode"] == "count" and row["points_per_s"] is not None:
            rates.setdefault(row["case"], {})[row["system"]] = row["points_per_s"]
    by_case = {case: _ratios(of) for case, of in rates.items()}
    worst: dict[str, float | None] = {}
    for key in _ratios({}):
        known = [value for of in by_case.values() if (value := of[key]) is not None]
        worst[key] = min(known, default=None)
    return {**worst, **by_case}


def _ratios(rates: Mapping[str, float]) -> dict[str, float | None]:
    def over(other: str, times: int = 1) -> float | None:
        return rates["roost"] / (rates[other] * times) if {"roost", other} <= rates.keys() else None

    ratios = {f"ratio_vs_{name}": over(name) for name in RIVALS}
    return {**ratios, "kernel_efficiency": over("kernel", CORES)}


def _panels(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["points_per_s"] is not None:
            panel = "matches counted" if row["mode"] == "count" else "matches written"
            bars = panels.setdefault(panel, {}).setdefault(row["system"], {})
            bars[row["case"]] = row["points_per_s"]
    return panels


def _line(row: Row) -> str:
    found = row["notes"]
    if row["skipped"] is None:
        found = f"{row['points_per_s']:,.0f} points/s, {row['matches']:,} matches"
    return f"{row['case']} {row['mode']} {row['system']}: {found}"
