"""The number of machines changes while points are matched: no match and no window does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_checks import (
    InProcessCounted,
    Scenario,
    Truth,
    inside,
    jumping,
    plans_of,
    read_matches,
    recorded,
    scenario_config,
    simulated_seconds,
)
from flow_runs import RandomResizes
from layouts import layouts
from properties import examples
from roost import Box, RunConfig
from roost.balance import Plan
from roost.balance.changes import NoChange, Rebalance, Resize, apply_changes
from roost.balance.planner import CostRates, GlobalPlanner
from roost.balance.resizing import emptied, replicated
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.runtime import records
from roost.runtime.records import Commit
from roost.runtime.rounds import Proposal, Resizing
from roost.stages.window import WindowStage
from roost.storage.store import Store
from roost.testing import InProcessPipeline
from roost.window.snapshot import Columns, SnapshotQuery, merge_results, plan_scans, run_scans
from roost.window.view import WindowFiles, read_view
from roost.workload import EulerHistogram
from stage_scenario import STEPS, Killed

WINDOW = 150
COLUMNS = Columns("x", "y", "event_time", "id", pa.int64(), pa.int64(), pa.schema([]))
SIZED = (Strategy.REPLICATED, Strategy.SWARM, Strategy.GLOBAL)


@dataclass
class Run:
    """A state directory, and drivers on it that follow each other."""

    folder: Path
    scenario: Scenario
    strategy: Strategy
    resize: Any
    more: dict[str, Any] = field(default_factory=dict)
    snapshots: int = 0

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
            {"strategy": self.strategy, "machines": 2},
            {"round": self.scenario.rows - 1.0, "tolerance": 1.05},
            window={"kind": "count", "length": WINDOW},
            out={"dir": self.out},
            **self.more,
        )

    def drive(self, kills: Sequence[tuple[str, int]] = ()) -> None:
        """Run to the end; drivers are killed before steps of batches, and others follow."""
        left = list(kills)
        while not self._live(left):
            pass

    def _live(self, kills: list[tuple[str, int]]) -> bool:
        scenario = self.scenario

        def on_step(step: str, number: int) -> None:
            if (step, number) in kills:
                kills.remove((step, number))
                raise Killed
            if step == "end":
                self._check_window(pipeline, number)

        def after(commit: Commit) -> None:
            following = commit.batch_id + 1
            if following < scenario.batches and scenario.requests[following]:
                pipeline.log.append(scenario.block(following), tag=f"before-{following}")

        executor = InProcessCounted(simulated_seconds, None, lambda number: None)
        pipeline = InProcessPipeline(
            self.config(),
            executor=executor,
            on_batch=after,
            on_step=on_step,
            resize=self.resize,
        )
        try:
            with pipeline:
                pipeline.log.append(scenario.block(0), tag="before-0")
                for commit in records.commits(pipeline.store):
                    after(commit)
                pipeline.run()
                return True
        except Killed:
            return False

    def _check_window(self, pipeline: InProcessPipeline, number: int) -> None:
        """Compare snapshot queries with the last points of the stream."""
        (stage,) = (one for one in pipeline.stages if isinstance(one, WindowStage))
        view, files = read_view(pipeline.store), WindowFiles(stage.files, stage.cache)
        for box in (None, (5.0, 5.0, 26.0, 31.0), (18.0, 0.0, 40.0, 22.0)):
            query = SnapshotQuery(None if box is None else Box(*box))
            results = [
                run_scans(query, COLUMNS, plan_scans(view, files, stage.space, query), files)
            ]
            found = merge_results(query, COLUMNS, results, number)["id"].to_pylist()
            xy = self.scenario.xy[: number + 1].reshape(-1, 2)
            live = np.arange(len(xy))[-WINDOW:]
            if box is not None:
                live = live[inside(dict(zip(("x0", "y0", "x1", "y1"), box, strict=True)), xy[live])]
            assert sorted(found) == live.tolist()
            self.snapshots += 1

    def check(self, truth: Truth) -> list[int]:
        """Check matches, plans and the machines of each batch; returns their numbers."""
        assert read_matches(self.out) == truth.all_matches
        plans = {plan.epoch: plan for plan in plans_of(self.state)}
        known: set[int] = set()
        for plan in plans.values():
            plan.check_invariants()
            fresh = {p.partition_id for p in plan.partitions} - known
            assert min(fresh, default=1 << 30) > max(known, default=-1), "an id was reused"
            known |= fresh
        with closing(Store(self.state)) as store:
            figures = [commit.figures for commit in records.commits(store)]
        sizes = [plans[one["epoch"]].machines for one in figures]
        assert [len(one["machines"]) for one in figures] == sizes
        assert len(figures) == self.scenario.batches
        return sizes


@dataclass
class AtRounds:
    """Proposes sizes after some batches, by event time; later ones until the plan has them."""

    sizes: dict[int, int]
    rows: int
    name: str = "resize"

    def propose(self, snapshot: Any) -> Proposal:
        batch = (snapshot.now - 1000) // self.rows
        size = max((item for item in self.sizes.items() if item[0] <= batch), default=(0, 0))[1]
        if not size or snapshot.has_size(size):
            return Proposal(NoChange("the plan has it"))
        return Proposal(Resize(size, "script"))


def short(seed: int = 3) -> Scenario:
    return jumping(seed, batches=8, rows=60, stay=3, standing=40)


@pytest.mark.parametrize("strategy", SIZED)
def test_a_plan_grows_and_shrinks_in_a_running_pipeline(strategy: Strategy, tmp_path: Path) -> None:
    scenario = jumping(4, batches=10, rows=150, stay=4, standing=60)
    run = Run(tmp_path, scenario, strategy, AtRounds({1: 5, 3: 6, 5: 1, 7: 3}, 150))
    run.drive()
    assert run.check(Truth(scenario)) == [2, 2, 5, 5, 6, 6, 1, 1, 3, 3]
    assert run.snapshots == 30
    plans = plans_of(run.state)
    for before, after in pairwise(plans):
        if after.machines > before.machines:  # new machines got something to do at once
            used = {machine for p in after.partitions for machine in p.machines}
            new = set(range(before.machines, after.machines))
            assert used & new if strategy is Strategy.GLOBAL else new <= used
    rounds = recorded(run.state, "rounds")
    assert [row["machines"] for row in rounds] == [2, 5, 5, 6, 6, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("strategy", SIZED)
@pytest.mark.parametrize("step", STEPS)
def test_a_driver_killed_at_any_step_around_a_resize(
    step: str, strategy: Strategy, tmp_path: Path
) -> None:
    """The driver dies in the batches before, at and after a resize up, and one down."""
    scenario = short()
    run = Run(tmp_path, scenario, strategy, AtRounds({1: 4, 4: 2}, 60))
    run.drive([(step, number) for number in range(1, 7)])
    sizes = run.check(Truth(scenario))
    if step in ("publish", "cleanup", "round"):  # these rounds are lost with the driver
        assert set(sizes[:7]) == {2}
    else:
        assert sizes == [2, 2, 4, 4, 4, 2, 2, 2]


@pytest.mark.sweep([7, 8], 1, 200)
@pytest.mark.parametrize("strategy", SIZED)
def test_random_resizes_change_no_match(strategy: Strategy, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    scenario = jumping(seed, batches=12, rows=70, stay=3, standing=40)
    run = Run(tmp_path, scenario, strategy, RandomResizes(chance))
    kills = [(chance.choice(STEPS), chance.randrange(12)) for _ in range(5)]
    run.drive(sorted(set(kills), key=lambda kill: kill[1]))
    assert len(set(run.check(Truth(scenario)))) >= 2


@pytest.mark.parametrize("strategy", [Strategy.UNIFORM, Strategy.HISTORY])
def test_static_strategies_are_refused(strategy: Strategy, tmp_path: Path) -> None:
    run = Run(tmp_path, short(), strategy, Resizing(lambda: 3))
    with pytest.raises(ConfigError, match=r"engine\.strategy.*global, swarm or replicated"):
        run.drive()


def test_a_resize_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    class Nothing:
        name = "resize"

        def propose(self, snapshot: Any) -> Proposal:
            return Proposal(Resize(0, "none"))

    run = Run(tmp_path, short(), Strategy.GLOBAL, Nothing())
    run.drive()
    run.check(Truth(run.scenario))
    verdicts = [row["verdicts"][0] for row in recorded(run.state, "rounds")]
    assert {v["verdict"] for v in verdicts} == {"refused"}


# --------------------------------------------------------------------------- plans


@given(layouts(), st.integers(1, 7), st.integers(0, 2**32))
@examples(60)
def test_machines_that_leave_are_emptied_evenly(plan: Plan, machines: int, seed: int) -> None:
    """Only partitions of machines that leave move, each to the machine with the least load then."""
    chance = random.Random(seed)
    costs = {p.partition_id: chance.choice([0.0, 1.0, 5.0, 20.0]) for p in plan.partitions}
    after = apply_changes(plan, emptied(plan, machines, costs), machines)
    after.check_invariants()
    assert after.machines == machines and after.next_id == plan.next_id
    for old, new in zip(plan.partitions, after.partitions, strict=True):
        assert replace(old, machines=()) == replace(new, machines=())
        if old.machines[0] < machines:
            assert old.machines == new.machines
    loads, had = Counter[int](), Counter[int]()
    for old, new in zip(plan.partitions, after.partitions, strict=True):
        loads[new.machines[0]] += costs[new.partition_id]
        had[new.machines[0]] += costs[new.partition_id] * (old.machines[0] < machines)
    received = [machine for machine in range(machines) if loads[machine] > had[machine]]
    heaviest = max(costs.values(), default=0.0)
    assert all(loads[m] - heaviest <= min(loads[k] for k in range(machines)) for m in received)


@given(layouts(), st.integers(1, 9), st.integers(0, 2**32))
@examples(40)
def test_the_planner_resizes_any_plan(plan: Plan, machines: int, seed: int) -> None:
    """Also one without some machines, with shared cells, or with one machine."""
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 200, plan.rows * plan.columns).astype(float)
    queries = EulerHistogram(plan.columns, plan.rows)
    rates = CostRates(1.0, 1.0, 0.0, 0.0)  # floats: loops are compiled for these
    decision = GlobalPlanner().resize(plan, machines, [points], queries, rates)
    after = apply_changes(plan, decision.changes, decision.machines)
    after.check_invariants()
    assert after.machines == machines


def test_a_shared_partition_loses_machines_that_leave() -> None:
    (part,) = (p for p in layouts_one().partitions)
    plan = replace(layouts_one(), partitions=(replace(part, machines=(0, 2, 3)),))
    kept = apply_changes(plan, emptied(plan, 3, {}), 3)
    assert kept.partitions[0].machines == (0, 2)
    change = replicated(plan, 2)
    assert isinstance(change, Rebalance)
    assert apply_changes(plan, change.changes, change.machines).fully_replicated
    with pytest.raises(ValueError, match="no such machines"):
        apply_changes(plan, (), 3)
    with pytest.raises(ValueError, match="a plan needs a machine"):
        apply_changes(plan, (), 0)


def layouts_one() -> Plan:
    from roost.balance import Partition

    return Plan(0, 4, 4, 4, (Partition(0, 0, 0, 4, 4, (0,)),), 1)
