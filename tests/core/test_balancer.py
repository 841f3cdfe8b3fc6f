"""Balancing rounds of a pipeline whose tasks run in this process, many rounds per second.

Plans, statistics, rows and matches are those of the engine. Only Spark and the clock are replaced:
the busy time of a machine is computed from its points and checks, so decisions are reproducible.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balance_checks import (
    CELLS,
    CORNERS,
    SIDE,
    Busy,
    InProcessCounted,
    Reference,
    Scenario,
    Seen,
    Truth,
    assigned_partitions,
    check_history,
    check_partition,
    check_rounds,
    check_statistics,
    drawn,
    even,
    in_partition,
    jumping,
    plans_of,
    read_matches,
    recorded,
    rect_of,
    scenario_config,
    simulated_seconds,
    spread,
)
from roost import RunConfig
from roost.balance import initial_plan
from roost.balance.changes import Rebalance
from roost.balance.planner import GlobalPlanner
from roost.model.choices import Strategy
from roost.model.space import Coordinates, Rect, Space
from roost.queries.live import QuerySet
from roost.runtime import records
from roost.runtime.balancing import GlobalPolicy, SwarmPolicy
from roost.runtime.records import Commit
from roost.runtime.rounds import BatchNotes, HiddenQueries, RoundSnapshot
from roost.stages import point_files
from roost.stages.contract import Report
from roost.stages.point_files import PointFile
from roost.stages.routing import SpatialRouting
from roost.stages.statistics import STATISTICS, CellStage, TrioStage, key_of
from roost.storage.store import Fact, Store
from roost.testing import InProcessPipeline, brute_force
from roost.workload import CellCounts, EulerHistogram

ROWS = 250
SEED = 20
BATCHES = 28
MACHINES = 4
ADAPTIVE = (Strategy.SWARM, Strategy.GLOBAL)


class DriverKilled(BaseException):
    """Simulates a killed driver: the files stay as they are."""


# --------------------------------------------------------------------------- the harness


@dataclass
class Scene:
    """One state directory and any number of driver runs."""

    folder: Path
    scenario: Scenario
    strategy: Strategy
    machines: int = MACHINES
    round_batches: float = 1
    tolerance: float = 1.05
    busy: Busy = simulated_seconds
    watched: bool = True
    sink: str = "parquet"
    executors: tuple[str, ...] = ("local",)
    engine: dict[str, Any] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def state(self) -> Path:
        return self.out / "state"

    def config(self) -> RunConfig:
        return scenario_config(
            self.scenario,
            self.folder,
            {"strategy": self.strategy, "machines": self.machines, **self.engine},
            {
                "round": self.round_batches * self.scenario.rows * self.scenario.tick,
                "tolerance": self.tolerance,
            },
            out={"sink": self.sink, "dir": self.out},
        )

    def executor(self, in_job: Callable[[int], None]) -> InProcessCounted:
        hosts = self.folder / "hosts" if len(self.executors) > 1 else None
        seen = self.seen if self.watched else None
        return InProcessCounted(self.busy, seen, in_job, names=self.executors, hosts=hosts)

    def run_driver(
        self,
        on_step: Callable[[str, int], None] = lambda step, batch_id: None,
        in_job: Callable[[int], None] = lambda batch_id: None,
        upto: int | None = None,
        prepare: Callable[[InProcessPipeline], None] = lambda pipeline: None,
    ) -> dict[str, Any]:
        """Continue from the recorded state: to the end, until killed, or for some batches."""
        scenario = self.scenario

        def after(commit: Commit) -> None:
            following = commit.batch_id + 1
            if following < scenario.batches and scenario.requests[following]:
                pipeline.log.append(scenario.block(following), tag=f"before-{following}")
            if upto is not None and following >= upto:
                pipeline.stop()

        executor = self.executor(in_job)
        pipeline = InProcessPipeline(
            self.config(), executor=executor, on_batch=after, on_step=on_step
        )
        prepare(pipeline)
        with pipeline:
            if scenario.requests[0]:
                pipeline.log.append(scenario.block(0), tag="before-0")
            for commit in records.commits(pipeline.store):
                after(commit)
            return pipeline.run()

    @property
    def epochs(self) -> list[int]:
        """Return the epoch of each committed batch."""
        return self.figures("epoch")

    def figures(self, name: str) -> list[int]:
        """Return a figure of each committed batch."""
        store = Store(self.state)
        try:
            return [commit.figures[name] for commit in records.commits(store)]
        finally:
            store.close()

    def check(self, truth: Truth) -> None:
        """Check that all batches ran once, and that the matches equal brute force."""
        assert read_matches(self.out) == truth.all_matches
        assert len(self.epochs) == self.scenario.batches
        assert self.epochs == sorted(self.epochs)


# --------------------------------------------------------------------------- runs to observe at


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return jumping(SEED, BATCHES, ROWS, stay=5, standing=90)


@pytest.fixture(scope="module")
def truth(scenario: Scenario) -> Truth:
    return Truth(scenario)


@dataclass
class Ran:
    scene: Scene
    report: dict[str, Any]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return recorded(self.scene.state, "rounds")

    @property
    def ended(self) -> set[int]:
        """Return the batches that ended a round."""
        return {row["batch_id"] for row in self.rounds}


@pytest.fixture(scope="module")
def runs(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> dict[Strategy, Ran]:
    made = {}
    for strategy in (Strategy.UNIFORM, *ADAPTIVE):
        folder = tmp_path_factory.mktemp(strategy.value)
        scene = Scene(folder, scenario, strategy, watched=strategy.adaptive)
        made[strategy] = Ran(scene, scene.run_driver())
    return made


def test_the_expected_matches_equal_the_oracle(scenario: Scenario, truth: Truth) -> None:
    for batch in (0, 11):
        queries = [
            {**live_query.query, "live_from": live_query.start, "live_until": live_query.until}
            for live_query in truth.live_queries(batch).values()
        ]
        rows = zip(scenario.xy[batch].tolist(), scenario.times[batch].tolist(), strict=True)
        points = [
            {"id": batch * ROWS + row, "x": x, "y": y, "time": time}
            for row, ((x, y), time) in enumerate(rows)
        ]
        found = brute_force(points, queries, lonlat=False)
        assert sorted(found) == sorted(truth.matches(batch))


def test_the_scenario_covers_all_shapes_and_requests(scenario: Scenario, truth: Truth) -> None:
    """Every shape is matched, and queries are added, terminated and expire during the run."""
    requests = [r for block in scenario.requests for r in block]
    matched = {query for _, query, _ in truth.all_matches}
    for key in ("x0", "radius", "wkt", "expires_at", "at"):
        named = {r["query_id"] for r in requests if r.get(key) is not None}
        assert len(named & matched) > 5, key
    for batch in (10, 20, 27):
        live_queries = truth.live_queries(batch)
        assert len(live_queries) - len(truth.counted(batch)) > 20
    assert len(truth.all_matches) > 8_000


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_plans_change_and_matches_do_not(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    uniform, ran = runs[Strategy.UNIFORM], runs[strategy]
    assert len(check_rounds(ran.scene.state)) >= 4
    assert len(set(ran.scene.epochs)) >= 5
    assert ran.report["balance"]["plan_changes"] >= 4
    ran.scene.check(truth)
    uniform.scene.check(truth)
    assert read_matches(ran.scene.out) == read_matches(uniform.scene.out)
    assert set(uniform.scene.epochs) == {0} and uniform.rounds == []


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_every_plan_is_complete_and_ids_are_never_reused(
    runs: dict[Strategy, Ran], strategy: Strategy
) -> None:
    plans = check_history(runs[strategy].scene.state, MACHINES)
    rects = [rect_of(p) for plan in plans for p in plan.partitions]
    assert len(set(rects)) > 10


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_partitions_have_the_queries_that_overlap_them_and_no_other(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    seen = runs[strategy].scene.seen
    assert len(seen) == truth.scenario.batches
    for one in seen:
        live_queries = truth.live_queries(one.batch_id)
        everything = {
            number: truth.range_of(live_query.query) for number, live_query in live_queries.items()
        }
        counted = truth.counted(one.batch_id)
        for p in one.plan.partitions:
            known, found = in_partition(counted, p), one.slots[p.partition_id]
            assert found & set(counted) == known
            assert found <= in_partition(everything, p)
            if strategy is Strategy.SWARM:
                assert one.live[p.partition_id] == len(known)


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_each_point_goes_to_the_machine_of_its_cell(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    for one in runs[strategy].scene.seen:
        table = truth.cells(one.batch_id)
        least = dict.fromkeys(range(MACHINES), 0.0)
        most = dict.fromkeys(range(MACHINES), 0.0)
        for p in one.plan.partitions:
            inside_p = Reference.points(rect_of(p), table)
            for machine in p.machines:
                most[machine] += inside_p
                least[machine] += inside_p if len(p.machines) == 1 else 0.0
        for result in one.results:
            assert least[result.machine] <= result.points <= most[result.machine]
        assert sum(result.points for result in one.results) == ROWS


# --------------------------------------------------------------------------- statistics


def test_statistics_are_the_true_counts_of_every_split(
    runs: dict[Strategy, Ran], truth: Truth
) -> None:
    ran = runs[Strategy.SWARM]
    done = check_statistics(truth, ran.scene.seen, ran.ended)
    assert min(done.values()) > 50, done


@pytest.mark.sweep([100], 1, 20)
def test_statistics_of_rounds_of_several_batches(tmp_path: Path, seed: int) -> None:
    scenario = jumping(seed, batches=22, rows=250, stay=4, standing=60)
    scene = Scene(tmp_path, scenario, Strategy.SWARM, machines=3, round_batches=1.9)
    ran, truth = Ran(scene, scene.run_driver()), Truth(scenario)
    scene.check(truth)
    changed = check_rounds(scene.state)
    assert len(changed) >= 4 or seed != 100
    batches = sorted(ran.ended)
    assert all(b - a == 2 for a, b in pairwise(batches))
    check_statistics(truth, scene.seen, ran.ended)


def checkpoints(pipeline: InProcessPipeline) -> dict[int, int]:
    """Return the batch of each machine's checkpoint."""
    row = pipeline._loop.store.get(STATISTICS, "trio")
    keys = {int(machine): key_of(name) for machine, name in row["checkpoints"].items()}
    return {machine: key.batch for machine, key in keys.items() if key is not None}


@pytest.mark.sweep([100], 1, 20)
def test_statistics_that_stay_at_several_executors(tmp_path: Path, seed: int) -> None:
    """Partitions move between executors, which see only their own folders and the checkpoints."""
    scenario = jumping(seed, batches=22, rows=250, stay=4, standing=60)
    executors = ("a", "b", "c")
    scene = Scene(tmp_path, scenario, Strategy.SWARM, 3, round_batches=1.9, executors=executors)
    resident: Counter[str] = Counter()
    started: list[InProcessPipeline] = []

    def on_step(step: str, number: int) -> None:
        if step == "end":
            resident.update(
                n for n in executors if list((tmp_path / "hosts" / n).rglob("resident-*"))
            )
            last = records.last_round(started[0]._loop.store)
            if last is not None and last["batch_id"] < number:
                # The first batch of a round leaves a checkpoint.
                assert set(checkpoints(started[0]).values()) == {last["batch_id"] + 1}

    truth = Truth(scenario)
    ran = Ran(scene, scene.run_driver(on_step, prepare=started.append))
    scene.check(truth)
    assert len(check_rounds(scene.state)) >= 2 or seed != 100
    assert set(resident) == set(executors)
    check_statistics(truth, scene.seen, ran.ended)
    assert set(scene.figures("statistics_restarted")) == {0}


def test_statistics_of_a_lost_executor_start_from_the_checkpoint(tmp_path: Path) -> None:
    """Queries are right at once; points and requests since the checkpoint are missing."""
    scenario = jumping(31, batches=9, rows=300, standing=80)
    scene = Scene(tmp_path, scenario, Strategy.SWARM, round_batches=50, executors=("a", "b"))
    lost: list[int] = []
    started: list[InProcessPipeline] = []

    def on_step(step: str, number: int) -> None:
        if (step, number) == ("intent", 5):
            pipeline = started[0]
            homes = pipeline._loop.placement.homes["space"]
            lost.extend(machine for machine, home in homes.items() if home == "b")
            pipeline.executor.names = ("a", "c")
            shutil.rmtree(tmp_path / "hosts" / "b")
        if (step, number) == ("end", 6):
            # A task that found nothing leaves one, too, because the next runs elsewhere perhaps.
            expected = {machine: 5 if machine in lost else 0 for machine in range(4)}
            assert checkpoints(started[0]) == expected

    scene.run_driver(on_step, prepare=started.append)
    truth = Truth(scenario)
    scene.check(truth)
    assert len(lost) == 2
    whole, interrupted = Reference(truth), Reference(truth)
    for one in scene.seen:
        if one.batch_id == 5:
            # The checkpoint is of the first batch, in which no query counts as received.
            interrupted.new = truth.cells(0).astype(float)
            interrupted.received = {}
        for reference in (whole, interrupted):
            reference.batch(one.batch_id, one.plan, closes=False)
        for machine, stats in one.stats.items():
            stats.close_round()
            for found in stats.partitions.values():
                reference = interrupted if machine in lost else whole
                check_partition(reference, found, {"exact": 0, "bounded": 0, "received": 0})
    assert scene.figures("statistics_restarted") == [0, 0, 0, 0, 0, 2, 0, 0, 0]


def test_two_numbers_of_a_machine_whose_partition_was_just_split(
    runs: dict[Strategy, Ran], truth: Truth
) -> None:
    """R(m) counts received points and net new queries, also in a partition's first round."""
    ran = runs[Strategy.SWARM]
    reference = Reference(truth)
    young = 0
    for one in ran.scene.seen:
        reference.batch(one.batch_id, one.plan, one.batch_id - 1 in ran.ended)
        for result in one.results:
            own = one.plan.of_machine(result.machine)
            kinds = [reference.accuracy[p.partition_id] for p in own]
            if any(accuracy.young and not accuracy.merged for accuracy in kinds):
                young += 1
                received = sum(reference.r(rect_of(p)) for p in own)
                assert result.received == pytest.approx(received)
    assert young > 5


@pytest.mark.parametrize("seed", range(3))
def test_hidden_queries_leave_q_and_r_only_if_they_are_new(
    runs: dict[Strategy, Ran], scenario: Scenario, truth: Truth, seed: int
) -> None:
    """What the coordinator sees under quarantine, from the engine's own files of the last round."""
    ran = runs[Strategy.SWARM]
    reference = Reference(truth)
    for one in ran.scene.seen:
        reference.batch(one.batch_id, one.plan, one.batch_id - 1 in ran.ended)
    chance = random.Random(seed)
    live = sorted(reference.queries)
    new = sorted(reference.received)
    hidden = {*chance.sample(live, 20), *chance.sample(new, 3)}
    requests = [r for block in scenario.requests for r in block]
    places = {r["query_id"]: k for k, r in enumerate(requests) if r["op"] == "register"}
    cells = np.array([reference.queries[number] for number in hidden], np.int32)
    positions = np.array([places[number] for number in hidden])
    for number in hidden:
        del reference.queries[number]
        reference.received.pop(number, None)
    store = Store(ran.scene.state)
    space = Space(Rect(0.0, 0.0, SIDE, SIDE), CELLS, CELLS, Coordinates.PLANE)
    stage = TrioStage(space, store.files("segments"), store.files("trio"))
    stage.open(store)
    policy = SwarmPolicy(stage, {})
    plan = ran.scene.seen[-1].plan
    for machine in range(MACHINES):
        rects = [rect_of(p) for p in plan.of_machine(machine)]
        report = policy._report(machine, 1.0, HiddenQueries(cells, positions))
        assert report.received == pytest.approx(sum(map(reference.r, rects)))
        assert report.received >= sum(reference.points(rect, reference.new) for rect in rects)
        assert report.cost == pytest.approx(sum(map(reference.work, rects)))
    store.close()


# --------------------------------------------------------------------------- moves


def moves_of(ran: Ran) -> list[tuple[Seen, dict[int, Any]]]:
    """Return batches with a new plan, and the partitions that each machine must load."""
    found = []
    for before, one in pairwise(ran.scene.seen):
        if before.plan.epoch != one.plan.epoch:
            found.append((one, assigned_partitions(before.plan, one.plan)))
    return found


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_only_machines_with_new_partitions_load_queries(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    ran = runs[strategy]
    moved = {one.batch_id: given for one, given in moves_of(ran)}
    assert len(moved) >= 4 and sum(map(bool, moved.values())) >= 3
    kept_out = 0
    for one in ran.scene.seen:
        given = moved.get(one.batch_id, {})
        counted = truth.counted(one.batch_id)
        for result in one.results:
            mine = given.get(result.machine, [])
            if not mine:
                kept_out += one.batch_id in moved
                assert (result.loaded_queries, result.loaded_bytes, result.load_s) == (0, 0, 0.0)
            elif any(in_partition(counted, p) for p in mine):
                assert result.loaded_bytes > 0
    assert kept_out >= 3
    figures = ran.report["per_batch"]
    for one, batch in zip(ran.scene.seen, figures, strict=True):
        for key in ("loaded_queries", "loaded_bytes"):
            assert batch[key] == sum(getattr(result, key) for result in one.results)
        assert (batch["loaded_bytes"] > 0) == bool(moved.get(one.batch_id))


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_loaded_queries_are_those_of_the_new_partitions(
    runs: dict[Strategy, Ran], truth: Truth, strategy: Strategy
) -> None:
    checked = 0
    for one, given in moves_of(runs[strategy]):
        counted = truth.counted(one.batch_id)
        for result in one.results:
            mine = given.get(result.machine, [])
            expected = sum(len(in_partition(counted, p)) for p in mine)
            assert result.loaded_queries == expected
            checked += expected > 0
    assert checked >= 3


def test_loaded_queries_without_new_requests(tmp_path: Path) -> None:
    """The same for the global strategy, with queries that all exist from the start."""
    original = jumping(9, batches=18, rows=ROWS, stay=5)
    lasting = [r for r in original.requests[0] if not (r.get("at") or r.get("expires_at"))]
    scenario = replace(original, requests=[lasting, *([] for _ in range(17))])
    scene = Scene(tmp_path, scenario, Strategy.GLOBAL)
    ran, truth = Ran(scene, scene.run_driver()), Truth(scenario)
    scene.check(truth)
    moved = moves_of(ran)
    assert len(moved) >= 3
    for one, given in moved:
        counted = truth.counted(one.batch_id)
        assert {result.machine: result.loaded_queries for result in one.results} == {
            machine: sum(len(in_partition(counted, p)) for p in given.get(machine, []))
            for machine in range(MACHINES)
        }


# --------------------------------------------------------------------------- deaths

SHORT = 8
# Where the driver dies, around the end of a batch that changes the plan, and what is left then.
BEFORE, AFTER = "no change", "the change"
MOMENTS = {
    "round": BEFORE,
    "half a row": BEFORE,
    "written": AFTER,
    "end": AFTER,
    "intent of the next": AFTER,
    "apply of the next": AFTER,
    "run of the next": AFTER,
    "files of the next": AFTER,
    "commit of the next": AFTER,
    "publish of the next": AFTER,
}

PART = ("round", "half a row", "written", "intent of the next", "run of the next")


@pytest.fixture(scope="module")
def short() -> Truth:
    truth = Truth(jumping(10, SHORT, ROWS, stay=5, standing=90))
    assert len(truth.all_matches) > 2_000
    return truth


@pytest.fixture(scope="module")
def changing(short: Truth, tmp_path_factory: pytest.TempPathFactory) -> dict[Strategy, int]:
    """Return the first batch that changes the plan, which is the same in every run."""
    found = {}
    for strategy in ADAPTIVE:
        scene = Scene(tmp_path_factory.mktemp("calm"), short.scenario, strategy, watched=False)
        scene.run_driver()
        scene.check(short)
        found[strategy] = check_rounds(scene.state)[0]["batch_id"]
        assert found[strategy] < SHORT - 2
    return found


class Killer:
    """Kills the driver at a step around the end of a batch."""

    def __init__(self, moment: str, batch: int) -> None:
        step, _, following = moment.partition(" of the ")
        self._step = step
        self._batch = batch + bool(following)

    def on_step(self, step: str, batch_id: int) -> None:
        if (step, batch_id) == (self._step, self._batch):
            raise DriverKilled

    def in_job(self, batch_id: int) -> None:
        self.on_step("files", batch_id)

    def prepare(self, pipeline: InProcessPipeline) -> None:
        def recorded(facts: tuple[Fact, ...]) -> None:
            if facts[0].table == records.ROUNDS:
                self.on_step("written", facts[0].value["batch_id"])

        pipeline.store._on_record = recorded
        if self._step == "half a row":
            with pipeline.store._database.writing() as db:
                db.execute(
                    "create temp trigger dies before insert on facts"
                    " when new.tbl = 'plans' and new.key > 0"
                    " begin select raise(abort, 'the disk is full'); end"
                )


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=() if moment in PART else pytest.mark.full, id=moment)
        for moment in MOMENTS
    ],
)
def test_a_change_is_complete_or_absent_after_a_kill(
    tmp_path: Path, short: Truth, changing: dict[Strategy, int], strategy: Strategy, moment: str
) -> None:
    batch = changing[strategy]
    scene = Scene(tmp_path, short.scenario, strategy, watched=False)
    killer = Killer(moment, batch)
    with pytest.raises((DriverKilled, sqlite3.IntegrityError)):
        scene.run_driver(killer.on_step, killer.in_job, prepare=killer.prepare)

    check_rounds(scene.state)
    rounds, plans = recorded(scene.state, "rounds"), recorded(scene.state, "plans")
    if MOMENTS[moment] == BEFORE:
        assert [plan["epoch"] for plan in plans] == [0]
        assert all(row["batch_id"] < batch and row["next_epoch"] is None for row in rounds)
    else:
        assert [plan["epoch"] for plan in plans] == [0, 1]
        assert (rounds[-1]["batch_id"], rounds[-1]["next_epoch"]) == (batch, 1)
    known = len(scene.epochs)
    assert known == batch + 1 + (moment == "publish of the next")

    scene.watched = True
    scene.run_driver()
    scene.check(short)
    check_history(scene.state, MACHINES)
    check_rounds(scene.state)
    assert scene.seen[0].batch_id == known
    assert scene.seen[0].plan.epoch == plans[-1]["epoch"]
    assert scene.epochs[known] == plans[-1]["epoch"]
    assert scene.epochs[: batch + 1] == [0] * (batch + 1)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_driver_that_is_killed_at_every_change(
    tmp_path: Path, truth: Truth, strategy: Strategy
) -> None:
    """Each driver is killed at its first change, at another step than the driver before."""
    steps = ["end", "intent", "run", "commit"]
    scene = Scene(tmp_path, truth.scenario, strategy, watched=False)
    died = 0
    while True:
        step = steps[died % len(steps)]
        kept = plans_of(scene.state)[-1].epoch if died else 0

        def on_step(now: str, batch_id: int, step: str = step, kept: int = kept) -> None:
            if now == step and plans_of(scene.state)[-1].epoch > kept:
                raise DriverKilled

        try:
            scene.run_driver(on_step)
            break
        except DriverKilled:
            died += 1
            assert plans_of(scene.state)[-1].epoch == kept + 1
            check_rounds(scene.state)
    assert died >= 3
    scene.check(truth)
    check_history(scene.state, MACHINES)


def test_statistics_survive_a_restart(tmp_path: Path) -> None:
    """Statistics count every live query, and the points of all batches since the first."""
    scenario = jumping(31, batches=8, rows=300, standing=80)
    lasting = [[r for r in block if not r.get("expires_at")] for block in scenario.requests]
    known = {r["query_id"] for block in lasting for r in block if r["op"] == "register"}
    kept = [[r for r in block if r["query_id"] in known and not r.get("at")] for block in lasting]
    check_restart(tmp_path, replace(scenario, requests=kept))


def test_statistics_after_a_restart_exclude_expired_queries(tmp_path: Path) -> None:
    check_restart(tmp_path, jumping(31, batches=8, rows=300, standing=80))


def check_restart(folder: Path, scenario: Scenario) -> None:
    truth = Truth(scenario)
    scene = Scene(folder, scenario, Strategy.SWARM, round_batches=50)
    scene.run_driver(upto=4)
    scene.seen.clear()
    scene.run_driver()
    scene.check(truth)
    first = scene.seen[0]
    assert first.batch_id == 4
    reference = Reference(truth)
    for number in range(5):
        reference.batch(number, first.plan, closes=False)
    for stats in first.stats.values():
        stats.close_round()
        for found in stats.partitions.values():
            check_partition(reference, found, {"exact": 0, "bounded": 0, "received": 0})


# --------------------------------------------------------------------------- steady and swinging


def plain(centres: Sequence[Any], seed: int, rows: int = ROWS) -> Scenario:
    """Return queries that do not expire, all over the space, and points around the centres."""
    requests = [spread(seed, 300), *([] for _ in centres[1:])]
    return Scenario(drawn(seed, centres, rows), requests)


def check_quiet(folder: Path, scenario: Scenario, strategy: Strategy) -> None:
    scene = Scene(folder, scenario, strategy, tolerance=1.1, watched=False, sink="count")
    report = scene.run_driver()
    assert len(recorded(scene.state, "rounds")) == scenario.batches - 1
    assert check_rounds(scene.state) == []
    assert report["balance"]["plan_changes"] == report["balance"]["moved_bytes"] == 0


@pytest.mark.sweep([0], 0, 8)
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_balanced_load_changes_nothing(
    tmp_path: Path, strategy: Strategy, seed: int, full: bool
) -> None:
    scenario = even(seed, 120 if full else 31, 1_000 if full else ROWS)
    check_quiet(tmp_path, scenario, strategy)


@pytest.mark.full
@pytest.mark.sweep([0], 0, 8)
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_balanced_load_of_few_points_changes_nothing(
    tmp_path: Path, strategy: Strategy, seed: int
) -> None:
    check_quiet(tmp_path, even(seed, 120, ROWS), strategy)


def changes_of_oscillation(folder: Path, strategy: Strategy, seed: int) -> int:
    """Count the changes in thirty rounds of a hotspot that alternates between two corners.

    Returns how often the plan was changed once both states had been seen and settled on.
    """
    scenario = plain([CORNERS[k % 2 * 2] for k in range(31)], seed, rows=2_000)
    place = folder / str(seed)
    scene = Scene(place, scenario, strategy, tolerance=1.1, watched=False, sink="count")
    scene.run_driver()
    assert len(recorded(scene.state, "rounds")) == 30
    return sum(row["round"] > 2 for row in check_rounds(scene.state))


@pytest.mark.sweep([1], 0, 8)
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_an_oscillating_load_does_not_oscillate_the_plan(
    tmp_path: Path, strategy: Strategy, seed: int
) -> None:
    assert changes_of_oscillation(tmp_path, strategy, seed) <= 1


def test_first_tasks_that_load_code_do_not_hide_the_load() -> None:
    """Where machines with few points take longer, the model gives points no cost at all."""
    space = Space(Rect(0.0, 0.0, SIDE, SIDE), CELLS, CELLS, Coordinates.PLANE)
    stage = CellStage(QuerySet.__new__(QuerySet), space)
    queries = EulerHistogram(CELLS, CELLS)
    queries.add(np.array([[0, 0, CELLS - 1, CELLS - 1]]))
    stage.histogram = lambda now: queries  # type: ignore[method-assign]
    policy = GlobalPolicy(stage, GlobalPlanner(tolerance=1.1), {})
    plan = initial_plan(Strategy.UNIFORM, space.grid, 2)
    own = [np.flatnonzero(plan.cell_table().reshape(-1) == place) for place in (0, 1)]
    counts = {
        p.machines[0]: CellCounts(cells.astype(np.int32), np.full(cells.size, points))
        for p, cells, points in zip(plan.partitions, own, (900, 10), strict=True)
    }
    busy = np.array([1.0, 3.0] if 0 in plan.partitions[0].machines else [3.0, 1.0])
    proposal = policy.propose(
        RoundSnapshot(
            SpatialRouting(plan, space),
            busy,
            np.zeros(2),
            0,
            [BatchNotes(counts, 0, 0.0)],
            HiddenQueries(),
            2,
        )
    )
    assert proposal.memory["model"]["coefficients"][1:] == [0.0, 0.0], "the load was not hidden"
    assert isinstance(proposal.decision, Rebalance), proposal.decision


def test_a_hot_cell_is_shared_and_each_of_its_points_matched_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    xy = rng.uniform(0, SIDE, (14, 500, 2))
    hot = rng.random((14, 500)) < 0.9
    xy[hot] = rng.uniform(20.0, 25.0, (int(hot.sum()), 2))
    scenario = Scenario(xy, [spread(5, 400), *([] for _ in range(13))])
    scene = Scene(tmp_path, scenario, Strategy.GLOBAL)
    scene.run_driver()
    scene.check(Truth(scenario))
    plans = check_history(scene.state, MACHINES)
    last = plans[-1]
    (shared,) = (p for p in last.partitions if len(p.machines) > 1)
    assert rect_of(shared) == (4, 4, 5, 5) and len(shared.machines) >= 3
    points = [result.points for result in scene.seen[-1].results]
    assert scene.seen[-1].plan.epoch == last.epoch
    assert max(points) < 1.5 * sum(points) / MACHINES


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_point_far_in_the_future_does_not_stop_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """Rounds follow the median of a batch, and the statistics count queries that end later."""

    def as_they_are(paths: Sequence[Path], form: str, time: str, first: int) -> list[PointFile]:
        """Read a file out of order, like a stream."""
        return [PointFile(str(path), first + BATCHES // 2 * ROWS, first) for path in paths]

    monkeypatch.setattr(point_files, "_in_order", as_they_are)
    scenario = jumping(10, 14, ROWS, stay=5, standing=90)
    times = scenario.times.copy()
    times[2, 7] += 1_000_000
    scenario.__dict__["times"] = times
    truth = Truth(scenario)
    scene = Scene(tmp_path, scenario, strategy, round_batches=0.9)
    ran = Ran(scene, scene.run_driver())
    scene.check(truth)
    assert [row["batch_id"] for row in ran.rounds] == list(range(14))
    if strategy is Strategy.SWARM:
        check_statistics(truth, scene.seen, ran.ended)


# --------------------------------------------------------------------------- other placements


def test_the_strategy_may_change_between_runs(tmp_path: Path, truth: Truth) -> None:
    def slowing(number: int, report: Report) -> float:
        """Make SWARM consider rebalancing soon."""
        return (1.0 + 0.3 * number) * simulated_seconds(number, report)

    scene = Scene(tmp_path, truth.scenario, Strategy.UNIFORM, busy=slowing)
    course = [
        (Strategy.UNIFORM, 4, 2),
        (Strategy.GLOBAL, 4, 8),
        (Strategy.SWARM, 4, 20),
        (Strategy.SWARM, 3, 22),
        (Strategy.REPLICATED, 4, 24),
        (Strategy.GLOBAL, 4, BATCHES),
    ]
    for strategy, machines, upto in course:
        scene.strategy, scene.machines = strategy, machines
        scene.run_driver(upto=upto)
        assert recorded(scene.state, "plans")[-1]["strategy"] == strategy.value
        assert len(scene.epochs) == upto
    scene.check(truth)
    check_history(scene.state)
    check_rounds(scene.state)
    plans = recorded(scene.state, "plans")
    used = [plan["strategy"] for plan in plans]
    assert used.count("global") > 3 and used.count("swarm") > 3
    for one in scene.seen:
        if one.plan.fully_replicated:
            continue
        counted = truth.counted(one.batch_id)
        for p in one.plan.partitions:
            assert one.slots[p.partition_id] & set(counted) == in_partition(counted, p)


def test_a_batch_begun_under_another_strategy_is_repeated_under_its_plan(
    tmp_path: Path, short: Truth
) -> None:
    scene = Scene(tmp_path, short.scenario, Strategy.UNIFORM)
    for strategy, batch in ((Strategy.GLOBAL, 1), (Strategy.SWARM, 3), (Strategy.GLOBAL, 5)):
        killer = Killer("commit", batch)
        with pytest.raises(DriverKilled):
            scene.run_driver(killer.on_step)
        epoch = plans_of(scene.state)[-1].epoch
        scene.strategy = strategy
        scene.run_driver(upto=batch + 1)
        assert scene.epochs[batch] == epoch
        assert plans_of(scene.state)[-1].epoch > epoch
    scene.run_driver()
    scene.check(short)
    check_history(scene.state, MACHINES)
    check_rounds(scene.state)


# --------------------------------------------------------------------------- what is reported


def test_the_metrics_of_swarm(runs: dict[Strategy, Ran]) -> None:
    ran = runs[Strategy.SWARM]
    least = 16 * MACHINES
    for row in ran.rounds:
        if row["reason"] in ("the stages say to do nothing", "balanced"):
            assert row["bytes_sent"] == least
        if row["next_epoch"] is None:  # requests without a response, at most one per machine
            assert least <= row["bytes_sent"] <= least + 64 * MACHINES
        assert least <= row["bytes_sent"] <= least + 256 * MACHINES
        assert row.get("model_error") is None
        assert row["rate"] > 0.0
    kinds = {change["kind"] for row in ran.rounds for change in row["changes"]}
    assert kinds <= {"move", "split", "merge"} and kinds >= {"split", "merge"}
    reasons = {row["reason"] for row in ran.rounds if row["next_epoch"] is not None}
    assert any("sheds load to machine" in reason for reason in reasons)
    check_balance(ran)


def test_the_metrics_of_global(runs: dict[Strategy, Ran], truth: Truth) -> None:
    ran = runs[Strategy.GLOBAL]
    errors = [row["model_error"] for row in ran.rounds]
    assert all(isinstance(error, float) for error in errors)
    assert max(errors[8:]) < 0.3 and errors[-1] < 0.1
    assert ran.report["balance"]["model_error"] == errors[-1]
    seen = {one.batch_id: one for one in ran.scene.seen}
    for row in ran.rounds[1:]:  # the first has two batches
        cells = int(np.count_nonzero(truth.cells(row["batch_id"])))
        if all(len(p.machines) == 1 for p in seen[row["batch_id"]].plan.partitions):
            assert row["bytes_sent"] == 12 * cells
    reasons = [row["reason"] for row in ran.rounds if row["next_epoch"] is not None]
    assert all("busiest machine from" in reason for reason in reasons)
    check_balance(ran)


def check_balance(ran: Ran) -> None:
    """Check that the totals of the report equal the sums over rounds and machines."""
    report, rounds = ran.report["balance"], ran.rounds
    results = [result for one in ran.scene.seen for result in one.results]
    assert report["rounds"] == len(rounds) == ran.scene.scenario.batches - 1
    assert report["plan_changes"] == len(check_rounds(ran.scene.state))
    assert report["moved_queries"] == sum(result.loaded_queries for result in results)
    assert report["moved_bytes"] == sum(result.loaded_bytes for result in results)
    assert report["move_seconds"] == pytest.approx(sum(result.load_s for result in results))
    assert report["bytes_sent"] == sum(row["bytes_sent"] for row in rounds)
    assert report["last_reason"] == rounds[-1]["reason"]
    assert report["decision_seconds"] > 0.0
    for row, one in zip(rounds, ran.scene.seen[1:], strict=True):
        assert (row["batch_id"], row["epoch"]) == (one.batch_id, one.plan.epoch)
    for row, one in zip(rounds[1:], ran.scene.seen[2:], strict=True):
        busy = [result.busy_s - result.load_s for result in one.results]
        assert row["imbalance"] == pytest.approx(max(busy) * MACHINES / sum(busy))


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_rounds_of_a_stream_from_before_1970(tmp_path: Path, strategy: Strategy) -> None:
    """Event times may be negative."""
    counts = []
    for start in (1_000, -1_000_000):
        scenario = replace(plain([None] * 5, 3, 60), start=start)
        scene = Scene(tmp_path / str(start), scenario, strategy, watched=False, sink="count")
        scene.run_driver()
        counts.append([row["batch_id"] for row in recorded(scene.state, "rounds")])
    assert counts[0] == list(range(1, 5))
    assert counts[1] == counts[0]
