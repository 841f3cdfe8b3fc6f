"""The driver is killed at every step of a batch, and the output has each match once.

Each chain starts processes that kill themselves at one moment after the other; a last run
completes. Their output must equal, row by row and batch by batch, the output of an undisturbed run,
which in turn must equal brute force.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from cases import PLANE, Case, as_time, pairs, point_table, random_case, read_folder, settle
from crash_driver import Run, Spec, tagged_processes
from pyspark.sql import SparkSession

from roost.model.choices import Strategy

pytestmark = pytest.mark.spark

DRIVER = Path(__file__).with_name("crash_driver.py")
TAG = "ROOST_TEST_RUN"
DEADLINE_S = 300
BATCH_ROWS = 40
BATCHES = 5
STEPS = (
    "intent",
    "apply",
    "run",
    "after",
    "deliver",
    "commit",
    "publish",
    "cleanup",
    "round",
    "end",
)
BEFORE_COMMIT = (
    *("intent", "apply", "run", "run+30", "run+staged"),
    *("after", "deliver", "commit"),
)
MOMENTS = (*BEFORE_COMMIT, "publish", "cleanup", "round", "end")
KILLED_BATCHES = 3

Kill = tuple[int, str]


def one_by_one(moments: Sequence[str]) -> list[list[Kill]]:
    """Return chains of one kill per batch, at another moment each; together, all moments."""
    return [
        [(number, moments[(turn + number) % len(moments)]) for number in range(KILLED_BATCHES)]
        for turn in range(len(moments))
    ]


def repeatedly(moments: Sequence[str]) -> list[Kill]:
    """Return a chain of kills at all moments of a batch, then at those of the next."""
    return list(itertools.product(range(KILLED_BATCHES), moments))


def test_the_chains_cover_every_moment_of_every_batch() -> None:
    covered = [kill for kills in one_by_one(MOMENTS) for kill in kills]
    assert sorted(covered) == sorted(itertools.product(range(KILLED_BATCHES), MOMENTS))
    assert {moment.partition("+")[0] for moment in MOMENTS} == set(STEPS)


# --------------------------------------------------------------------------- the scenario


@dataclass(frozen=True)
class Scenario:
    """Points, some invalid, and requests that arrive while they are matched."""

    spec: Spec
    case: Case


def scenario(folder: Path, strategy: str, *, streaming: bool = False) -> Scenario:
    case = random_case(41, BATCH_ROWS * BATCHES, 60, timestamps=False, text_ids=True)
    for row in range(3, len(case.points), 17):
        case.points[row].update(x=math.nan, expect="not_finite")
    folder.mkdir(parents=True, exist_ok=True)
    spec = Spec(
        points=str(write_points(folder, case, streaming=streaming)),
        out=str(folder / "out"),
        strategy=strategy,
        machines=5,
        batch_rows=BATCH_ROWS,
        bounds=[PLANE.x0, PLANE.y0, PLANE.x1, PLANE.y1],
        requests=blocks(case.requests),
        streaming=streaming,
    )
    return Scenario(spec, case)


def blocks(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Distribute requests: most hold from a batch on, some are rejected, some name a time.

    The log is empty at the start: the first batch is matched at log position 0.
    """
    names = [f"{kind}-{k}" for k in range(BATCHES - 1) for kind in ("during", "after")]
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    share = math.ceil(len(requests) / len(names))
    for number, request in enumerate(requests):
        made[names[number // share]].append(request)
    return made


def write_points(folder: Path, case: Case, *, streaming: bool) -> Path:
    if not streaming:
        path = folder / "points.parquet"
        pq.write_table(point_table(case), path, row_group_size=64)
        return path
    path = folder / "points"
    path.mkdir()
    for number in range(BATCHES):
        rows = case.points[number * BATCH_ROWS : (number + 1) * BATCH_ROWS]
        file = path / f"{number}.parquet"
        pq.write_table(point_table(case, rows), file)
        # Spark reads older files first.
        os.utime(file, (1_000_000_000 + number, 1_000_000_000 + number))
    return path


def brute(scenario: Scenario) -> list[tuple[int, Any, Any]]:
    """Return (batch, query, point) by brute force, batch by batch."""
    found: list[tuple[int, Any, Any]] = []
    logged: list[dict[str, Any]] = []
    for number in range(BATCHES):
        queries = settle(logged)[0]
        points = scenario.case.points[number * BATCH_ROWS : (number + 1) * BATCH_ROWS]
        found += [(number, q, p) for q, p in pairs(points, queries, False)]
        for kind in ("during", "after"):
            logged += scenario.spec.requests.get(f"{kind}-{number}", [])
    return sorted(found)


Left = tuple[Counter[tuple[Any, ...]], Counter[tuple[Any, ...]]]


def left_behind(out: Path) -> Left:
    """Return every published row with its multiplicity."""
    matches = Counter(
        (m["batch_id"], m["query_id"], m["point_id"], as_time(m["event_time"]))
        for m in read_folder(out / "matches")
    )
    dead = Counter(tuple(sorted(d.items())) for d in read_folder(out / "dead"))
    return matches, dead


def check_dead(scenario: Scenario, dead: Counter[tuple[Any, ...]]) -> None:
    rows = [dict(row) for row in dead.elements()]
    bad = sum(1 for point in scenario.case.points if point.get("expect"))
    assert sum(1 for row in rows if row["origin"] == "point") == bad > 10
    refused = sorted((r["position"], r["reason"]) for r in rows if r["origin"] == "request")
    logged = [r for name in scenario.spec.requests for r in scenario.spec.requests[name]]
    assert refused == settle(logged)[1]
    assert len(refused) > 5


# --------------------------------------------------------------------------- chains of crashes


class Chain:
    """Consecutive processes on one state directory, and their output."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._folder = folder
        self._tag = uuid.uuid4().hex
        self._environment = {**environment, TAG: self._tag}

    def run(self, *specs: Spec) -> subprocess.CompletedProcess[str]:
        paths = [
            spec.to_file(self._folder / f"spec-{number}.json") for number, spec in enumerate(specs)
        ]
        # To files, not pipes: orphans of a killed driver would hold a pipe open.
        said, complained = self._folder / "out.txt", self._folder / "err.txt"
        with said.open("w") as out, complained.open("w") as err:
            done = subprocess.run(
                [sys.executable, str(DRIVER), *map(str, paths)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **self._environment},
                timeout=DEADLINE_S,
                check=False,
            )
        return subprocess.CompletedProcess(
            done.args, done.returncode, said.read_text(), complained.read_text()
        )

    def kill(self, spec: Spec, kills: Sequence[Kill]) -> None:
        """Run one process for each moment, killed at that moment."""
        for kill in kills:
            done = self.run(replace(spec, kill=kill))
            assert done.returncode == -signal.SIGKILL, f"at {kill}: {done.stderr[-3000:]}"

    def orphans(self) -> list[psutil.Process]:
        """Return processes that outlive their drivers for too long."""
        _, alive = psutil.wait_procs(list(tagged_processes(TAG, self._tag)), timeout=60)
        return alive


def undisturbed(spark: SparkSession, folder: Path, strategy: str, *, streaming: bool) -> Left:
    calm = scenario(folder, strategy, streaming=streaming)
    run = Run(calm.spec, kill=lambda: None)
    run.go(spark)
    assert run.steps == list(itertools.product(range(BATCHES), STEPS))
    left = left_behind(Path(calm.spec.out))
    assert sorted(match[:3] for match in left[0].elements()) == brute(calm)
    check_dead(calm, left[1])
    return left


class Crash(BaseException):
    """Simulates a crash of the driver: the files stay as they are."""


def crash() -> None:
    raise Crash


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy, marks=() if strategy is Strategy.UNIFORM else pytest.mark.full)
        for strategy in Strategy
    ],
)
def test_crash_at_every_step_of_every_batch(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, full: bool
) -> None:
    """The same sweep without processes, which is fast enough for all steps."""
    calm = undisturbed(spark, tmp_path / "calm", strategy, streaming=False)
    chains = [*one_by_one(STEPS), repeatedly([s for s in BEFORE_COMMIT if s in STEPS])]
    if not full:
        chains = chains[: len(STEPS) : KILLED_BATCHES]  # each step once
    for number, kills in enumerate(chains):
        rough = scenario(tmp_path / f"rough-{number}", strategy)
        for kill in kills:
            with pytest.raises(Crash):
                Run(replace(rough.spec, kill=kill), crash).go(spark)
        check_left(rough, calm, Run(rough.spec, crash).go(spark))


def check_left(rough: Scenario, calm: Left, report: dict[str, Any]) -> None:
    out = Path(rough.spec.out)
    matches, dead = left_behind(out)
    assert matches == calm[0]
    assert dead == calm[1]
    assert report["matches"] == matches.total()
    assert report["points"] + report["dead_points"] == len(rough.case.points)
    assert report["batches"] == BATCHES
    for kind in ("matches", "dead"):
        assert list((out / kind / "_staging").iterdir()) == []


def sweep(
    spark: SparkSession, folder: Path, strategy: str, kills: Sequence[Kill], *, streaming: bool
) -> None:
    calm = undisturbed(spark, folder / "calm", strategy, streaming=streaming)
    rough = scenario(folder / "rough", strategy, streaming=streaming)
    chain = Chain(folder / "rough")
    chain.kill(rough.spec, kills)
    # The last run is in this process, which has a session already.
    check_left(rough, calm, Run(rough.spec, crash).go(spark))
    assert chain.orphans() == []


def test_killed_while_tasks_run_and_around_the_commit(spark: SparkSession, tmp_path: Path) -> None:
    kills = [(0, "run+staged"), (2, "commit"), (3, "publish")]
    sweep(spark, tmp_path, "uniform", kills, streaming=False)


def test_killed_while_streaming(spark: SparkSession, tmp_path: Path) -> None:
    sweep(spark, tmp_path, "replicated", [(1, "commit")], streaming=True)


@pytest.mark.full
@pytest.mark.parametrize("kills", one_by_one(MOMENTS), ids=lambda kills: kills[0][1])
@pytest.mark.parametrize(
    ("strategy", "streaming"),
    [
        *(pytest.param(strategy, False, id=strategy.value) for strategy in Strategy),
        pytest.param(Strategy.UNIFORM, True, id="streaming"),
    ],
)
def test_killed_at_every_moment_of_every_batch(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, streaming: bool, kills: list[Kill]
) -> None:
    sweep(spark, tmp_path, strategy, kills, streaming=streaming)


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "streaming"),
    [
        pytest.param(Strategy.UNIFORM, False, id="files"),
        pytest.param(Strategy.REPLICATED, True, id="streaming"),
    ],
)
def test_killed_repeatedly(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, streaming: bool
) -> None:
    sweep(spark, tmp_path, strategy, repeatedly(BEFORE_COMMIT), streaming=streaming)
