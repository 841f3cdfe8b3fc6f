"""Plan changes on Spark: exact matches, correct reports and recovery from every crash.

``tests/core/test_balancer.py`` tests the same in one process, with many more batches.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from balance_driver import Run, Spec, config_of
from counted import CountedExecutor
from crash_driver import tagged_processes
from pyspark.sql import SparkSession

from balance_checks import (
    Reference,
    Scenario,
    Seen,
    Truth,
    assigned_partitions,
    check_history,
    check_rounds,
    check_statistics,
    even,
    in_partition,
    jumping,
    plans_of,
    read_matches,
    recorded,
    rect_of,
    simulated_seconds,
)
from roost import Pipeline
from roost.engine import pipeline as engine
from roost.model.choices import Strategy
from roost.runtime import assembly
from roost.runtime.records import Commit

pytestmark = pytest.mark.spark

DRIVER = Path(__file__).with_name("balance_driver.py")
TAG = "ROOST_TEST_RUN"
DEADLINE_S = 200
MACHINES = 4
ADAPTIVE = (Strategy.SWARM, Strategy.GLOBAL)


class DriverKilled(BaseException):
    """Simulates a crash of the driver: the files stay as they are."""


def crash() -> None:
    raise DriverKilled


# --------------------------------------------------------------------------- shared runs


@dataclass
class Ran:
    out: Path
    report: dict[str, Any]
    seen: list[Seen]

    @property
    def state(self) -> Path:
        return self.out / "state"

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return recorded(self.state, "rounds")


def spec_of(folder: Path, scenario: Scenario, strategy: Strategy, **more: Any) -> Spec:
    points = scenario.write(folder)
    settings = {"machines": MACHINES, "batch_rows": scenario.rows, "requests": scenario.requests}
    return Spec(str(points), str(folder / "out"), strategy.value, **{**settings, **more})


def run(
    spark: SparkSession,
    spec: Spec,
    *,
    steady: bool = True,
    upto: int | None = None,
    watched: bool = True,
    kill: Callable[[], None] = crash,
    **settings: Any,
) -> Ran:
    """Run on Spark and record every batch; ``steady`` computes busy times instead of measuring."""
    seen: list[Seen] = []

    busy, noted = simulated_seconds if steady else None, seen if watched else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SparkExecutor", partial(CountedExecutor, busy=busy, seen=noted))
        report = Run(spec, kill, upto).go(spark, **settings)
    return Ran(Path(spec.out), report, seen)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return jumping(10, batches=14, rows=250, stay=5, standing=90)


@pytest.fixture(scope="module")
def truth(scenario: Scenario) -> Truth:
    found = Truth(scenario)
    assert len(found.all_matches) > 4_000
    return found


@pytest.fixture(scope="module")
def runs(
    spark: SparkSession, scenario: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> dict[Strategy, Ran]:
    """With computed busy times: for few points, the task itself dominates measured ones."""
    made = {}
    for strategy in (Strategy.UNIFORM, *ADAPTIVE):
        spec = spec_of(tmp_path_factory.mktemp(strategy.value), scenario, strategy)
        made[strategy] = run(spark, spec, watched=strategy.adaptive)
    return made


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_plans_change_and_matches_do_not(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    ran = runs[strategy]
    assert len(check_rounds(ran.state)) >= 2
    epochs = [batch["epoch"] for batch in ran.report["per_batch"]]
    assert len(set(epochs)) >= 3 and epochs == sorted(epochs)
    assert read_matches(ran.out) == truth.all_matches
    assert read_matches(runs[Strategy.UNIFORM].out) == truth.all_matches
    assert ran.report["points"] == truth.scenario.batches * truth.scenario.rows


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_every_plan_is_complete_and_partitions_have_their_queries(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    check_history(runs[strategy].state, MACHINES)
    for one in runs[strategy].seen:
        counted_now = truth.counted(one.batch_id)
        ever = {
            n: truth.range_of(live_query.query)
            for n, live_query in truth.live_queries(one.batch_id).items()
        }
        for p in one.plan.partitions:
            found = one.slots[p.partition_id]
            assert found & set(counted_now) == in_partition(counted_now, p)
            assert found <= in_partition(ever, p)


def test_statistics_equal_the_counts_of_every_split(
    runs: dict[Strategy, Ran], truth: Truth
) -> None:
    ran = runs[Strategy.SWARM]
    done = check_statistics(truth, ran.seen, {row["batch_id"] for row in ran.rounds})
    assert min(done.values()) > 10, done


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_only_machines_that_receive_a_partition_load_queries(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    ran = runs[strategy]
    plans = plans_of(ran.state)
    loaded = 0
    for before, one in zip([None, *ran.seen[:-1]], ran.seen, strict=True):
        given = {} if before is None else assigned_partitions(before.plan, one.plan)
        assert one.plan == plans[one.plan.epoch]
        now = truth.counted(one.batch_id)
        for result in one.results:
            mine = given.get(result.machine, [])
            expected = sum(len(in_partition(now, p)) for p in mine)
            if not mine:
                assert (result.loaded_queries, result.loaded_bytes, result.load_s) == (0, 0, 0.0)
            elif expected:
                assert result.loaded_bytes > 0 and result.load_s >= 0.0
                loaded += 1
            if strategy is Strategy.SWARM:
                assert result.loaded_queries == expected
    assert loaded >= 2
    for one, batch in zip(ran.seen, ran.report["per_batch"], strict=True):
        for key in ("loaded_queries", "loaded_bytes", "load_s"):
            assert batch[key] == pytest.approx(sum(getattr(r, key) for r in one.results))


def test_report(runs: dict[Strategy, Ran], truth: Truth) -> None:
    for strategy in ADAPTIVE:
        ran = runs[strategy]
        balance, rounds = ran.report["balance"], ran.rounds
        assert balance["rounds"] == len(rounds) == truth.scenario.batches - 1
        assert balance["plan_changes"] == len(check_rounds(ran.state)) >= 2
        assert balance["last_reason"] == rounds[-1]["reason"]
        assert balance["bytes_sent"] == sum(row["bytes_sent"] for row in rounds)
        for key, name in (("moved_queries", "loaded_queries"), ("moved_bytes", "loaded_bytes")):
            assert balance[key] == sum(batch[name] for batch in ran.report["per_batch"]) > 0
    swarm, planned = runs[Strategy.SWARM], runs[Strategy.GLOBAL]
    for row in swarm.rounds:
        assert 16 * MACHINES <= row["bytes_sent"] <= (16 + 256) * MACHINES
        if row["reason"] in ("the stages say to do nothing", "balanced"):
            assert row["bytes_sent"] == 16 * MACHINES
    assert swarm.report["balance"]["model_error"] is None
    errors = [row["model_error"] for row in planned.rounds]
    assert all(isinstance(error, float) for error in errors)
    assert planned.report["balance"]["model_error"] == errors[-1] < 0.3
    assert runs[Strategy.UNIFORM].report["balance"]["rounds"] == 0


def test_the_model_learns_from_measured_times(
    spark: SparkSession, tmp_path: Path, scenario: Scenario
) -> None:
    short = replace(scenario, xy=scenario.xy[:10], requests=scenario.requests[:10])
    ran = run(spark, spec_of(tmp_path, short, Strategy.GLOBAL), steady=False, watched=False)
    assert read_matches(ran.out) == Truth(short).all_matches
    errors = [row["model_error"] for row in ran.rounds]
    assert len(errors) == 9 and all(error > 0.0 for error in errors)
    assert ran.report["balance"]["model_error"] == errors[-1]
    # Other processes may disturb a round or two.
    assert float(np.median(errors[3:])) < 1.0


# --------------------------------------------------------------------------- changes of strategy


@pytest.mark.full
def test_every_strategy_continues_a_state_of_another(
    spark: SparkSession, tmp_path: Path, scenario: Scenario, truth: Truth
) -> None:
    spec = spec_of(tmp_path, scenario, Strategy.UNIFORM)
    seen: list[Seen] = []
    course = [
        (Strategy.UNIFORM, 2),
        (Strategy.GLOBAL, 6),
        (Strategy.SWARM, 12),
        (Strategy.REPLICATED, scenario.batches),
    ]
    for strategy, upto in course:
        ran = run(spark, replace(spec, strategy=strategy.value), upto=upto)
        seen += ran.seen
        assert ran.report["batches"] == upto
    assert read_matches(Path(spec.out)) == truth.all_matches
    check_history(Path(spec.out) / "state", MACHINES)
    check_rounds(Path(spec.out) / "state")
    used = [row["strategy"] for row in recorded(Path(spec.out) / "state", "plans")]
    assert list(dict.fromkeys(used)) == ["uniform", "global", "swarm", "replicated"]
    assert used.count("global") > 1
    for one in seen[2:12]:
        now = truth.counted(one.batch_id)
        for p in one.plan.partitions:
            assert one.slots[p.partition_id] & set(now) == in_partition(now, p)


# --------------------------------------------------------------------------- streaming DataFrames


def stream_files(scenario: Scenario, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(scenario.batches):
        path = folder / f"{number:03d}.parquet"
        pq.write_table(scenario.table(number, number + 1), path)
        # Spark reads older files first.
        os.utime(path, (1_000_000_000 + number,) * 2)
    return folder


def stream(
    spark: SparkSession, scenario: Scenario, strategy: Strategy, folder: Path, **hooks: Any
) -> Ran:
    """Run on Spark's file source, one file per batch."""
    spec = spec_of(folder, scenario, strategy)
    points = stream_files(scenario, folder / "points")
    seen: list[Seen] = []

    def after(commit: Commit) -> None:
        if commit.batch_id + 1 < scenario.batches:
            pipeline.log.append(scenario.block(commit.batch_id + 1))

    schema = spark.read.parquet(str(points)).schema
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SparkExecutor", partial(CountedExecutor, seen=seen))
        config = config_of(spec, **{"points.path": None, "points.id": "id"})
        pipeline = Pipeline(config, spark=spark, on_batch=after, **hooks)
        with pipeline:
            pipeline.log.append(scenario.block(0))
            pipeline.start(reader.parquet(str(points))).awaitTermination()
            report = pipeline.report()
    return Ran(Path(spec.out), report, seen)


def crowded(batches: int) -> Scenario:
    """All points in one corner, so that most machines have none at first."""
    scenario = jumping(10, batches, rows=250, stay=batches, standing=90)
    return replace(scenario, xy=np.random.default_rng(3).uniform(2.0, 22.0, scenario.xy.shape))


@pytest.mark.parametrize(
    "strategy", [Strategy.SWARM, pytest.param(Strategy.GLOBAL, marks=pytest.mark.full)]
)
def test_machines_without_points_participate(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """With slices and DataFrames, every machine reports, closes its rounds and receives load."""
    # Without a sample, as for a DataFrame, SWARM starts from equal areas.
    monkeypatch.setattr(assembly._Assembly, "_history", lambda self, source: None)
    scenario = crowded(5)
    truth = Truth(scenario)
    made = [
        run(spark, spec_of(tmp_path / "slices", scenario, Strategy(strategy))),
        stream(spark, scenario, strategy, tmp_path / "stream"),
    ]
    for ran in made:
        assert read_matches(ran.out) == truth.all_matches
        check_history(ran.state, MACHINES)
        for one in ran.seen:
            assert sorted(result.machine for result in one.results) == list(range(MACHINES))
            table = truth.cells(one.batch_id)
            for result in one.results:
                own = [p for p in one.plan.of_machine(result.machine) if len(p.machines) == 1]
                least = sum(Reference.points(rect_of(p), table) for p in own)
                assert result.points >= least
        if strategy is Strategy.SWARM:
            assert sorted(result.points for result in ran.seen[0].results)[:-1] == [0, 0, 0]
        if strategy is Strategy.SWARM:
            check_statistics(truth, ran.seen, {row["batch_id"] for row in ran.rounds})
    # Busy times are computed: both decide the same.
    slices, frames = ([one.plan for one in ran.seen] for ran in made)
    if strategy is Strategy.SWARM:
        assert slices == frames


# --------------------------------------------------------------------------- crashes


class Chain:
    """Consecutive processes on one state directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tag = uuid.uuid4().hex

    def run(self, spec: Spec) -> int:
        path = spec.to_file(self._folder / "spec.json")
        # To files, not pipes: orphans of a killed driver would hold a pipe open.
        with (self._folder / "err.txt").open("w") as err:
            done = subprocess.run(
                [sys.executable, str(DRIVER), str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**os.environ, TAG: self._tag},
                timeout=DEADLINE_S,
                check=False,
            )
        return done.returncode

    def complaints(self) -> str:
        return (self._folder / "err.txt").read_text()[-3000:]

    def orphans(self) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(list(tagged_processes(TAG, self._tag)), timeout=60)
        return alive


def epochs_of(state: Path) -> Iterator[tuple[int, int, bool]]:
    """Return (batch, epoch, whether it was committed) of every intent, read without Roost."""
    db = sqlite3.connect(state / "state.db")
    try:
        statement = (
            "select i.value, c.value from facts i left join facts c"
            " on c.tbl = 'commits' and c.key = i.key where i.tbl = 'intents' order by i.key"
        )
        rows = db.execute(statement).fetchall()
    finally:
        db.close()
    for intent, done in rows:
        body = json.loads(intent)
        yield body["batch_id"], body["epochs"]["space"], done is not None


def check_crash(state: Path, moment: str, known: int) -> int:
    """Check that the plan change is complete; returns the epoch to continue with."""
    changed = check_rounds(state)
    plans = check_history(state, MACHINES)
    last = plans[-1].epoch
    assert last == known + 1 and changed[-1]["next_epoch"] == last
    *_, (batch, epoch, done) = epochs_of(state)
    following = moment not in ("end", "intent")
    assert done != following
    assert batch == changed[-1]["batch_id"] + following
    assert epoch == (last if following else known)
    return last


def sweep(spark: SparkSession, folder: Path, strategy: Strategy, moments: list[str]) -> None:
    """Crash at one moment after the other, each after another plan change.

    At the last of them the driver is a process, which is killed.
    """
    scenario = jumping(10, batches=8, rows=250, stay=5, standing=90)
    spec = spec_of(folder, scenario, strategy)
    state = Path(spec.out) / "state"
    chain = Chain(folder)
    known = 0
    *simulated, killed = moments
    for moment in simulated:
        with pytest.raises(DriverKilled):
            run(spark, replace(spec, kill=moment), watched=False)
        known = check_crash(state, moment, known)
    assert chain.run(replace(spec, kill=killed)) == -signal.SIGKILL, chain.complaints()
    known = check_crash(state, killed, known)
    before = list(epochs_of(state))
    # The last run is in this process, which has a session already.
    ran = run(spark, spec)
    assert ran.seen[0].plan.epoch == known
    assert ran.seen[0].batch_id == before[-1][0] + before[-1][2]
    assert read_matches(ran.out) == Truth(scenario).all_matches
    assert all(done for _, _, done in epochs_of(state))
    assert ran.report["batches"] == scenario.batches
    check_history(state, MACHINES)
    check_rounds(state)
    assert list((ran.out / "matches" / "_staging").iterdir()) == []
    assert chain.orphans() == []


def test_killed_around_a_plan_change(spark: SparkSession, tmp_path: Path) -> None:
    sweep(spark, tmp_path, Strategy.SWARM, ["end", "run+staged"])


@pytest.mark.full
@pytest.mark.parametrize("moment", ["end", "intent", "apply", "run", "run+staged", "commit"])
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_killed_at_every_moment_around_a_plan_change(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, moment: str
) -> None:
    sweep(spark, tmp_path, strategy, [moment])


@pytest.mark.full
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_crash_at_every_plan_change(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, truth: Truth, scenario: Scenario
) -> None:
    """The same without processes: each run raises at its first plan change."""
    spec = spec_of(tmp_path, scenario, strategy)
    state = Path(spec.out) / "state"
    steps = ["end", "intent", "apply", "run", "commit"]
    crashes = 0
    while True:
        try:
            run(spark, replace(spec, kill=steps[crashes % len(steps)]), watched=False)
            break
        except DriverKilled:
            assert check_crash(state, steps[crashes % len(steps)], crashes) == crashes + 1
            crashes += 1
    assert crashes >= 1
    assert read_matches(Path(spec.out)) == truth.all_matches
    check_history(state, MACHINES)


# --------------------------------------------------------------------------- long runs


@pytest.mark.full
@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("machines", [2, 7])
def test_long_runs_with_measured_times(
    spark: SparkSession, tmp_path: Path, strategy: Strategy, machines: int
) -> None:
    scenario = jumping(50 + machines, batches=45, rows=400, stay=6)
    spec = spec_of(tmp_path, scenario, strategy, machines=machines)
    ran = run(spark, spec, steady=False)
    truth = Truth(scenario)
    assert read_matches(ran.out) == truth.all_matches
    assert len(check_rounds(ran.state)) >= 1
    check_history(ran.state, machines)
    if strategy is Strategy.SWARM:
        check_statistics(truth, ran.seen, {row["batch_id"] for row in ran.rounds})


@pytest.mark.full
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_steady_load_changes_no_plan(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    spec = spec_of(tmp_path, even(3, batches=40, rows=1_000), strategy)
    ran = run(spark, spec, **{"balance.tolerance": 1.1}, watched=False)
    assert check_rounds(ran.state) == [] and len(ran.rounds) == 39
    assert ran.report["balance"]["moved_bytes"] == 0
