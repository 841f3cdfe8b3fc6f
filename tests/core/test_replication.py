"""Adaptive strategies replicate the plan while the queries fit into memory, else divide space."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from window_points import PLANE

from balance_checks import plans_of, recorded
from layouts import random_layout
from roost import RunConfig
from roost.balance import Partition, Plan, initial_plan
from roost.balance.changes import NoChange, Rebalance, apply_changes, overlap_cells
from roost.balance.replication import IndexMemory, replan
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.runtime.balancing import FittingPolicy
from roost.runtime.executor import InProcessExecutor
from roost.runtime.records import commits, intent, last_commit
from roost.runtime.rounds import BALANCE, HiddenQueries, Proposal, RoundSnapshot
from roost.stages.routing import SpatialRouting
from roost.stages.statistics import STATISTICS
from roost.storage.memory import file_memory
from roost.testing import InProcessPipeline
from stage_scenario import BATCHES, STEPS, Killed, Scenario
from window_scenario import WindowScenario, check_outputs

LARGE = 1 << 40
ADAPTIVE = ("swarm", "global")


class Hosts(InProcessExecutor):
    """Three executors whose memory changes before some batches, from ``rooms`` by batch."""

    def __init__(
        self, rooms: dict[int, int | None], count: int = 3, small: Sequence[str] = ()
    ) -> None:
        names = [str(number) for number in range(count)]
        super().__init__(names=names, room=lambda name: 1 if name in small else self.now)
        self.rooms = rooms
        self.now: int | None = rooms.get(0)

    def on_step(self, step: str, number: int) -> None:
        if step == "intent":
            before = [self.rooms[batch] for batch in sorted(self.rooms) if batch <= number]
            self.now = before[-1]


def undivided(scenario: Scenario) -> list[bool]:
    """Return for each batch whether its plan is replicated."""
    state = scenario.config().out.state_dir
    plans = {plan.epoch: plan for plan in plans_of(state)}
    with closing(scenario.store()) as store:
        found = [intent(store, number) for number in range(BATCHES)]
    return [plans[one.epochs["space"]].undivided for one in found if one is not None]


def started(
    folder: Path, strategy: str, hosts: Callable[[], InProcessExecutor], **settings: object
) -> Scenario:
    return Scenario(folder, {"engine.strategy": strategy, **settings}, executor=hosts)


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_the_plan_follows_the_memory_of_the_hosts(tmp_path: Path, strategy: str) -> None:
    hosts = Hosts({0: LARGE, 3: 0})
    scenario = started(tmp_path, strategy, lambda: hosts)
    scenario.on_step = hosts.on_step
    scenario.live()
    # A change takes effect with the batch after the round in which it was seen.
    assert undivided(scenario) == [False, True, True, True, False, False]
    state = scenario.config().out.state_dir
    reasons = [row["reason"] for row in recorded(state, "rounds")]
    assert "every machine has all queries from now on" in reasons[0]
    assert "every machine has all queries:" in reasons[1]
    assert "space is divided" in reasons[3] and "room for 0 on a host" in reasons[3]
    with closing(scenario.store()) as store:
        found = [STATISTICS in commit.figures["stages"] for commit in commits(store)]
    assert found == [True, False, False, False, True, True]
    scenario.check()
    for plan in plans_of(state):
        plan.check_invariants()


def test_statistics_start_anew_when_space_is_divided_again(tmp_path: Path) -> None:
    hosts, seen = Hosts({0: LARGE, 3: 0}), []
    scenario = started(tmp_path, "swarm", lambda: hosts)

    def on_step(step: str, number: int) -> None:
        hosts.on_step(step, number)
        if step == "end":
            with closing(scenario.store()) as store:
                row = store.get(STATISTICS, "trio")
            seen.append((row["first"], len(row["files"]), row["rows"] is None))

    scenario.on_step = on_step
    scenario.live()
    # Else requests that came meanwhile would count as those of one round.
    assert seen == [(0, 3, False), *[(None, 0, True)] * 3, (4, 3, False), (4, 3, False)]


class Noted:
    """A policy that notes nothing but how it was built."""

    name = BALANCE

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self.saved = dict(saved)

    def propose(self, snapshot: RoundSnapshot) -> Proposal:
        return Proposal(NoChange("noted"), {"model": 3, "per_query_s": 0.5, "swarm": 7, "rate": 1})

    def hottest(self, plan: Plan, machine: int) -> None:
        return None


def test_costs_that_were_learnt_survive_and_the_rest_does_not() -> None:
    built: list[Noted] = []

    def build(saved: Mapping[str, Any]) -> Noted:
        built.append(Noted(saved))
        return built[-1]

    first = partial(initial_plan, Strategy.UNIFORM, PLANE.grid)
    policy = FittingPolicy(build, first, {})
    none = np.zeros(2)
    routing, memories = SpatialRouting(first(2), PLANE), []
    for room in (LARGE, LARGE, 0, 0):
        memory = IndexMemory(10, room, 2)
        snapshot = RoundSnapshot(
            routing, none, none, 0, (), HiddenQueries(), routing.machines, memory
        )
        proposal = policy.propose(snapshot)
        memories.append(proposal.memory)
        if isinstance(proposal.decision, Rebalance):
            routing = routing.apply(proposal.decision.changes, proposal.decision.machines)
    learnt = {"model": 3, "per_query_s": 0.5}
    assert [one.saved for one in built] == [{}, learnt]
    assert memories[:3] == [learnt] * 3 and memories[3]["swarm"] == 7
    # A restart while the plan is replicated.
    assert FittingPolicy(build, first, {**learnt, "round": 4})._learnt == learnt


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("step", STEPS)
def test_drivers_die_around_both_changes(tmp_path: Path, strategy: str, step: str) -> None:
    hosts = Hosts({0: LARGE, 2: 0, 3: LARGE})
    scenario = started(tmp_path, strategy, lambda: hosts)
    left = {(step, 0), (step, 3)}

    def on_step(now: str, number: int) -> None:
        hosts.on_step(now, number)
        if (now, number) in left:
            left.remove((now, number))
            raise Killed

    scenario.on_step = on_step
    assert scenario.to_the_end() == 2
    # A round that was not recorded ends with the next batch.
    late = step in ("publish", "cleanup", "round")
    assert undivided(scenario) == [False, not late, True, False, not late, True]
    scenario.check()


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("kind", [("time", 35.0), ("count", 170)])
def test_a_window_outlives_both_changes(
    tmp_path: Path, strategy: str, kind: tuple[str, float]
) -> None:
    """Standing queries, nearest points and joins see points that were stored under other plans."""
    scenario = WindowScenario(11, *kind)
    hosts = Hosts({0: LARGE, 3: 0, 6: LARGE, 9: 0})
    settings = {"engine.strategy": strategy, "balance.round": 1.0}
    config = scenario.config(tmp_path, **settings)
    with InProcessPipeline(
        config,
        executor=hosts,
        on_step=hosts.on_step,
        on_batch=lambda commit: scenario.prepare(tmp_path, pipeline),
    ) as pipeline:
        scenario.prepare(tmp_path, pipeline)
        pipeline.run()
    found = [plan.undivided for plan in plans_of(config.out.state_dir)]
    assert found.count(True) == 2 and not found[0] and not found[-1]
    check_outputs(scenario, tmp_path / "out")


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [
        (lambda: Hosts({0: LARGE}, count=1), {}),
        (lambda: Hosts({0: None}), {}),
        (lambda: Hosts({0: 0}), {}),
        *((lambda name=name: Hosts({0: LARGE}, small=[name]), {}) for name in "012"),
        (lambda: Hosts({0: LARGE}), {"balance.exchange": "always"}),
        (lambda: Hosts({0: LARGE}), {"guard.enabled": True}),
    ],
    ids=["one executor", "unknown memory", "little memory", *"012", "always", "guard"],
)
def test_space_stays_divided(
    tmp_path: Path, hosts: Callable[[], Hosts], settings: dict[str, object]
) -> None:
    scenario = started(tmp_path, "global", hosts, **settings)
    scenario.live()
    assert undivided(scenario) == [False] * BATCHES
    scenario.check()


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_restart_that_always_exchanges_divides_space(tmp_path: Path, strategy: str) -> None:
    scenario = started(tmp_path, strategy, lambda: Hosts({0: LARGE}))

    def die(step: str, number: int) -> None:
        if (step, number) == ("intent", 3):
            raise Killed

    scenario.on_step = die
    with pytest.raises(Killed):
        scenario.live()
    with closing(scenario.store()) as store:
        assert last_commit(store) is not None
    scenario.settings = {**scenario.settings, "balance.exchange": "always"}
    scenario.on_step = lambda step, number: None
    scenario.live()
    assert undivided(scenario) == [False, True, True, False, False, False]
    scenario.check()


def test_another_value_of_the_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"balance\.exchange.*auto or always"):
        RunConfig(balance={"exchange": "never"})


def test_memory_between_both_limits_changes_nothing() -> None:
    assert IndexMemory(100, 125, 2).fits(replicated=False)
    assert not IndexMemory(100, 124, 2).fits(replicated=False)
    assert IndexMemory(100, 100, 2).fits(replicated=True)
    assert not IndexMemory(100, 99, 2).fits(replicated=True)
    assert not IndexMemory(0, LARGE, 1).fits(replicated=False)
    assert IndexMemory(0, LARGE, 1).fits(replicated=True)


@pytest.mark.parametrize("seed", range(10))
def test_a_new_division_has_the_old_partitions_as_parents(seed: int) -> None:
    chance = random.Random(seed)
    plans = []
    for _ in range(2):
        layout = random_layout(chance, 12, 9, 5)
        parts = tuple(Partition(n, *s, (chance.randrange(3),)) for n, s in enumerate(layout))
        plans.append(Plan(0, 12, 9, 3, parts, len(parts)))
    before, target = plans
    after = apply_changes(before, [replan(before, target)])
    after.check_invariants()
    assert [(p.bounds, p.machines) for p in after.partitions] == [
        (p.bounds, p.machines) for p in target.partitions
    ]
    known = {p.partition_id: p for p in before.partitions}
    for p in after.partitions:
        assert p.partition_id not in known
        assert set(p.parents) == {n for n, old in known.items() if overlap_cells(old, p)}


# --------------------------------------------------------------------------- memory of a host


def group(folder: Path, version: int, limit: str | None, private: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "total_rss"), 2: ("memory.max", "anon")}[version]
    if limit is not None:
        (folder / names[0]).write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"file 7\n{names[1]} {private}\nslab 3\n")


def own_groups(folder: Path, text: str) -> Path:
    path = folder / "own"
    path.write_text(text)
    return path


def test_memory_is_the_least_of_the_groups_above(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups, 2, None, 9_000)
    group(groups / "pod", 2, "6000", 4_500)
    group(groups / "pod" / "worker", 2, "max", 1_000)
    own = own_groups(tmp_path, "0::/pod/worker\n")
    assert file_memory(groups, own) == 1_500
    group(groups / "pod" / "worker", 2, "2000", 1_000)
    assert file_memory(groups, own) == 1_000
    group(groups / "pod" / "worker", 2, "2000", 2_500)
    assert file_memory(groups, own) == 0


def test_memory_of_groups_of_version_1(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "memory", 1, "9223372036854771712", 9_000)
    group(groups / "memory" / "a", 1, "5000", 2_000)
    own = own_groups(tmp_path, "9:cpu,cpuacct:/b\n4:memory:/a\n0::/\n")
    assert file_memory(groups, own) == 3_000


def test_in_a_container_the_root_is_its_own_group(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "memory", 1, "5000", 2_000)
    assert file_memory(groups, own_groups(tmp_path, "4:memory:/docker/0123\n")) == 3_000


def test_memory_is_that_of_the_machine_without_groups(tmp_path: Path) -> None:
    found = file_memory(tmp_path, own_groups(tmp_path, "0::/\n"))
    assert found is not None and found > 1 << 20
    assert file_memory(tmp_path, tmp_path / "missing") is None
