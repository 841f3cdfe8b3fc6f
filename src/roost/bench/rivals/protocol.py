"""The command line and the timing of a measured system.

Each system runs in a process of its own, with its own memory, JVM, compiled code and cores::

    python -m <module> --case case.json --mode count|write --out DIR --json result.json

Timed are whole passes over the case's file of points, from opening it until the count is known or
the last Parquet file is closed. Loading and indexing the queries come before, and so does a warm-up
on a small file. Passes are repeated for a few seconds; the result contains their number.

In write mode a match is a row ``query_id, point_id, event_time``. The matches of the last pass
stay in ``--out`` for the benchmark to check, and ``matches`` is counted from those files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from roost.bench.cases import Case
from roost.bench.common import Row

Mode = Literal["count", "write"]
Clock = Callable[[], float]
# Runs one pass over a file of points: returns the number of matches if the folder is None, else
# writes them into that folder, which does not exist yet.
Pass = Callable[[str, Path | None], int]

PASSES_MAX = 64
WARM_PASSES_MIN = 3
MATCH_COLUMNS = ("query_id", "point_id", "event_time")


@dataclass(frozen=True, slots=True)
class RivalJob:
    """One run of one system on one case."""

    case: Case
    mode: Mode
    out: Path
    json_path: Path

    @property
    def points_path(self) -> str:
        """The file whose points are timed."""
        return self.case.points_path if self.mode == "count" else self.case.write_points_path

    @property
    def points(self) -> int:
        """Rows of that file."""
        return self.case.points if self.mode == "count" else self.case.write_points


def parser(description: str) -> argparse.ArgumentParser:
    """Return the argument parser that every system shares."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--case", type=Path, required=True, help="case.json of the workload")
    made.add_argument("--mode", choices=("count", "write"), required=True)
    made.add_argument("--out", type=Path, required=True, help="folder for written matches")
    made.add_argument("--json", type=Path, required=True, help="result file")
    return made


def job_of(args: argparse.Namespace) -> RivalJob:
    """Turn parsed arguments into a job."""
    return RivalJob(Case.load(args.case), args.mode, args.out, args.json)


def save_result(
    job: RivalJob, system: str, version: str, notes: str, passes: int, seconds: float, matches: int
) -> Row:
    """Write the result of a job; ``seconds`` covers all passes, ``matches`` a single one."""
    result = {
        "system": system,
        "case": job.case.name,
        "mode": job.mode,
        "points": job.points,
        "passes": passes,
        "seconds": seconds,
        "points_per_s": job.points * passes / seconds,
        "matches": matches,
        "version": version,
        "notes": notes,
    }
    job.json_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def measure(
    job: RivalJob,
    system: str,
    version: str,
    notes: str,
    run: Pass,
    clock: Clock = time.perf_counter,
) -> Row:
    """Warm up, time whole passes, and write the result."""
    out = job.out if job.mode == "write" else None
    started, passes = clock(), 0
    while passes < WARM_PASSES_MIN or clock() - started < job.case.warm_s:
        _clear(job.out)
        run(job.case.warm_points_path, out)
        passes += 1
    seconds, passes, matches = 0.0, 0, 0
    while passes == 0 or (seconds < job.case.timed_s and passes < PASSES_MAX):
        _clear(job.out)
        started = clock()
        counted = run(job.points_path, out)
        seconds += clock() - started
        found = counted if out is None else written_rows(out)
        assert passes == 0 or found == matches, "two passes over one file found different matches"
        matches = found
        passes += 1
    return save_result(job, system, version, notes, passes, seconds, matches)


def _clear(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)


def match_files(out: Path) -> list[Path]:
    """Return the Parquet files below a folder that contain matches."""
    return [
        path
        for path in sorted(out.rglob("*.parquet"))
        if set(MATCH_COLUMNS) <= set(pq.read_schema(path).names)
    ]


def written_rows(out: Path) -> int:
    """Count the matches written below a folder."""
    return sum(int(pq.read_metadata(path).num_rows) for path in match_files(out))
