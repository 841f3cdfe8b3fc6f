"""How a measured system talks to the benchmark.

Each system runs in its own process, so that memory, JVM, compiled code and cores are its own::

    python -m <module> --case case.json --mode count|write --out DIR --json result.json

What is timed is the same for all: whole passes over the case's point file, from opening it until
the count is known or the last Parquet file is closed. Loading and indexing the queries comes
before, and so does a warm-up of some seconds on a small file. Passes repeat until they add up to a
few seconds, so a fast system is not judged by its first breath; ``passes`` is in the result.

In write mode a match is a row ``query_id, point_id, event_time``; the matches of the last pass
stay in ``--out`` for the benchmark to check, and ``matches`` is counted from those files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from roost.bench.cases import Case

Mode = Literal["count", "write"]
Clock = Callable[[], float]

CORES = 2
PASSES_MAX = 64
WARM_PASSES_MIN = 3


@dataclass(frozen=True, slots=True)
class Job:
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


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found; ``seconds`` covers all passes, ``matches`` a single one."""

    system: str
    case: str
    mode: Mode
    points: int
    passes: int
    seconds: float
    points_per_s: float
    matches: int
    version: str
    notes: str


def parser(description: str) -> argparse.ArgumentParser:
    """Return the argument parser that every system shares."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--case", type=Path, required=True, help="case.json of the workload")
    made.add_argument("--mode", choices=("count", "write"), required=True)
    made.add_argument("--out", type=Path, required=True, help="folder for written matches")
    made.add_argument("--json", type=Path, required=True, help="where the result goes")
    return made


def job_of(args: argparse.Namespace) -> Job:
    """Turn parsed arguments into a job."""
    return Job(Case.load(args.case), args.mode, args.out, args.json)


def read_job(description: str, argv: Sequence[str] | None = None) -> Job:
    """Parse the arguments of a system that has no further ones."""
    return job_of(parser(description).parse_args(argv))


def measure(
    job: Job,
    system: str,
    version: str,
    notes: str,
    run: Callable[[str, Path | None], int],
    clock: Clock = time.perf_counter,
) -> Result:
    """Warm up, time whole passes, and write the result.

    Parameters
    ----------
    job
        What to run.
    system, version, notes
        For the report.
    run
        ``run(points_path, out)`` does one pass. With ``out`` None it returns the number of
        matches; otherwise it writes them into that folder, which does not exist yet, and what it
        returns is not used.
    clock
        Seconds, rising.
    """
    _warm(job, run, clock)
    seconds, passes, matches = 0.0, 0, 0
    while passes == 0 or (seconds < job.case.timed_s and passes < PASSES_MAX):
        _clear(job.out)
        started = clock()
        counted = run(job.points_path, job.out if job.mode == "write" else None)
        seconds += clock() - started
        found = counted if job.mode == "count" else written_rows(job.out)
        assert passes == 0 or found == matches, "two passes over one file found different matches"
        matches = found
        passes += 1
    rate = job.points * passes / seconds
    result = Result(
        system, job.case.name, job.mode, job.points, passes, seconds, rate, matches, version, notes
    )
    job.json_path.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return result


def _warm(job: Job, run: Callable[[str, Path | None], int], clock: Clock) -> None:
    started, passes = clock(), 0
    while passes < WARM_PASSES_MIN or clock() - started < job.case.warm_s:
        _clear(job.out)
        run(job.case.warm_points_path, job.out if job.mode == "write" else None)
        passes += 1


def _clear(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)


def match_files(out: Path) -> list[Path]:
    """Return the Parquet files below a folder that hold matches."""
    wanted = {"query_id", "point_id", "event_time"}
    return [
        path for path in sorted(out.rglob("*.parquet")) if wanted <= set(pq.read_schema(path).names)
    ]


def written_rows(out: Path) -> int:
    """Count the matches written below a folder."""
    return sum(int(pq.read_metadata(path).num_rows) for path in match_files(out))
