"""Homes: fair shares with few moves, executors that come and go, and what batches report."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from roost.commands.inspect import inspect_state
from roost.commands.terminal import _contents
from roost.model.elastic import DEFAULT_GROUP
from roost.runtime import records
from roost.runtime.chain import Placement
from roost.runtime.executor import InProcessExecutor
from roost.runtime.homes import assign
from roost.runtime.report import build_report
from roost.stages.contract import Report
from stage_scenario import BATCHES, Killed, Scenario


def fair(homes: Sequence[str], executors: Sequence[str]) -> bool:
    loads = [homes.count(executor) for executor in executors]
    return max(loads) - min(loads) <= 1


def fewest_moves(before: Mapping[int, str], count: int, executors: Sequence[str]) -> int:
    """Return the least number of machines that change their home in any fair assignment."""
    return min(
        sum(before.get(machine) != home for machine, home in enumerate(homes))
        for homes in product(executors, repeat=count)
        if fair(homes, executors)
    )


@pytest.mark.sweep(range(40), 20, 2_000)
def test_shares_are_equal_and_moves_are_few(seed: int) -> None:
    chance = random.Random(seed)
    machines = {name: chance.randint(1, 6) for name in ("space", "key")}
    executors = [str(number) for number in range(chance.randint(1, 4))]
    gone = [f"gone {number}" for number in range(chance.randint(0, 2))]
    before = {
        name: {
            machine: chance.choice([*executors, *gone])
            for machine in range(chance.randint(0, 8))
            if chance.random() < 0.8
        }
        for name in machines
    }
    after = assign(before, machines, executors, level=True)
    shuffled = chance.sample(executors, len(executors))
    assert assign(before, machines, shuffled, level=True) == after
    for name, count in machines.items():
        homes = [after[name][machine] for machine in range(count)]
        assert len(after[name]) == count and fair(homes, executors)
        moves = sum(before[name].get(machine) != home for machine, home in enumerate(homes))
        assert moves == fewest_moves(before[name], count, executors)
    assert assign(after, machines, executors, level=True) == after


@pytest.mark.sweep(range(40), 20, 2_000)
def test_between_rounds_only_machines_without_a_home_move(seed: int) -> None:
    chance = random.Random(seed)
    count, executors = chance.randint(1, 12), [str(n) for n in range(chance.randint(1, 12))]
    known = {m: chance.choice([*executors, "gone"]) for m in range(count) if chance.random() < 0.7}
    after = assign({"space": known}, {"space": count}, executors, level=False)["space"]
    assert sorted(after) == list(range(count)) and set(after.values()) <= set(executors)
    kept = {machine: home for machine, home in known.items() if home in executors}
    assert {machine: after[machine] for machine in kept} == kept
    loads, old = Counter(after.values()), Counter(kept.values())
    least = min(loads[executor] for executor in executors)
    assert all(loads[e] <= least + 1 for e in executors if loads[e] > old[e])


def test_an_executor_that_joins_gets_machines_when_homes_are_levelled() -> None:
    before = {"space": {0: "1", 1: "2", 2: "1", 3: "2"}}
    machines, executors = {"space": 4}, ["1", "2", "10"]
    assert assign(before, machines, executors, level=False) == before
    after = assign(before, machines, executors, level=True)["space"]
    assert sorted(Counter(after.values()).items()) == [("1", 2), ("10", 1), ("2", 1)]


def test_machines_of_several_routings_are_spread() -> None:
    homes = assign({}, {"space": 1, "a": 1, "b": 2}, ["1", "2"], level=True)
    assert Counter(home for mine in homes.values() for home in mine.values()) == {"1": 2, "2": 2}


def test_without_executors_there_are_no_homes() -> None:
    assert assign({"space": {0: "1"}}, {"space": 2}, [], level=True) == {"space": {}}


# --------------------------------------------------------------------------- in a run


class Cluster(InProcessExecutor):
    """Executors that come and go, and may be too late to run what prefers them."""

    def __init__(self, names: Sequence[str], late: Sequence[str] = ()) -> None:
        super().__init__(names=names)
        self.late = late
        self.ran: list[dict[tuple[str, int], str]] = []  # by batch: executor of each part
        self.placements: list[Placement] = []

    def place(self, part: int, home: str | None, group: str = DEFAULT_GROUP) -> str:
        others = [name for name in self.names if name != home]
        return others[part % len(others)] if home in self.late else super().place(part, home, group)

    def run(self, inputs: Any, chain: Any, tasks: Any, placement: Placement) -> Any:
        found: dict[str, list[Report]] = super().run(inputs, chain, tasks, placement)
        self.ran.append({(r.stage, r.machine): r.executor for mine in found.values() for r in mine})
        self.placements.append(placement)
        return found


def started(tmp_path: Path, cluster: Cluster, **more: Any) -> Scenario:
    settings = {"engine.strategy": "uniform", "engine.machines": 4}
    return Scenario(tmp_path, settings, executor=lambda: cluster, three_levels=True, **more)


def figures(scenario: Scenario) -> list[dict[str, int] | None]:
    with closing(scenario.store()) as store:
        return [commit.figures.get("homes") for commit in records.commits(store)]


def test_tasks_of_every_routing_run_at_their_homes_while_executors_change(tmp_path: Path) -> None:
    cluster = Cluster(["1", "2", "3"])
    names = {2: ["1", "3"], 4: ["1", "3", "4", "5"]}  # 2 is lost, 4 and 5 join

    def on_step(step: str, number: int) -> None:
        if step == "run":
            cluster.names = names.get(number, cluster.names)

    scenario = started(tmp_path, cluster, on_step=on_step)
    scenario.live()
    space, keys, checks = [], [], []
    for placement, ran in zip(cluster.placements, cluster.ran, strict=True):
        homes = placement.homes
        space.append([homes["space"][machine] for machine in range(4)])
        keys.append([homes["key"][machine] for machine in range(3)])
        checks.append(len(homes["check"]))
        for stage, routing in (("matching", "space"), ("key totals", "key")):
            assert {m: e for (s, m), e in ran.items() if s == stage} == homes[routing]
    assert space[0] == space[1] and set(space[0]) == {"1", "2", "3"}
    assert [a for a, b in zip(space[2], space[0], strict=True) if b != "2"] == [
        home for home in space[0] if home != "2"
    ]
    assert sorted(space[2]) == ["1", "1", "3", "3"] and sorted(space[4]) == ["1", "3", "4", "5"]
    assert sorted(keys[0]) == ["1", "2", "3"] and len(set(keys[4])) == 3
    found = figures(scenario)
    assert [row and row["misplaced"] for row in found] == [0] * BATCHES
    assert all(row and row["tasks"] == 4 + 3 + checks[0] for row in found)
    moved = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairwise(space)]
    assert [row and row["moved"] > 0 for row in found] == [False, False, True, False, True, False]
    assert [count > 0 for count in moved] == [False, True, False, True, False]
    scenario.check()


def test_tasks_that_run_elsewhere_are_counted_and_reported(tmp_path: Path) -> None:
    scenario = started(tmp_path, Cluster(["1", "2"], late=["2"]))
    scenario.live()
    found = figures(scenario)
    assert all(row is not None and 0 < row["misplaced"] < row["tasks"] for row in found)
    totals = {key: sum(row[key] for row in found if row) for key in ("tasks", "misplaced", "moved")}
    with closing(scenario.store()) as store:
        assert build_report(store)["homes"] == totals
    lines = [str(line) for line in _contents(inspect_state(scenario.config().out.state_dir))]
    shown = f"homes      {totals['tasks']} tasks, {totals['misplaced']} elsewhere, 0 moves"
    assert shown in lines
    scenario.check()


def test_one_executor_has_no_homes_and_nothing_to_report(tmp_path: Path) -> None:
    cluster = Cluster(["1"])
    scenario = started(tmp_path, cluster)
    scenario.live()
    assert [placement.homes for placement in cluster.placements] == [{}] * BATCHES
    assert figures(scenario) == [None] * BATCHES
    with closing(scenario.store()) as store:
        assert build_report(store)["homes"] is None


def test_a_replicated_plan_has_no_homes(tmp_path: Path) -> None:
    cluster = Cluster(["1", "2"])
    settings = {"engine.strategy": "replicated"}
    scenario = Scenario(tmp_path, settings, executor=lambda: cluster)
    scenario.live()
    assert all(set(placement.homes) == {"key"} for placement in cluster.placements)


def test_a_joining_executor_waits_for_the_end_of_a_round(tmp_path: Path) -> None:
    cluster = Cluster(["1", "2"])
    rounds: list[int | None] = []

    def on_step(step: str, number: int) -> None:
        if (step, number) == ("run", 1):
            cluster.names = ["1", "2", "3"]
        if step == "end":
            with closing(scenario.store()) as store:
                last = records.last_round(store)
            rounds.append(None if last is None else last["batch_id"])

    # A round has several batches.
    settings = {"engine.strategy": "swarm", "engine.machines": 4, "balance.round": 99.0}
    scenario = Scenario(tmp_path, settings, executor=lambda: cluster, on_step=on_step)
    scenario.live()
    first = next(number for number in rounds if number is not None)
    assert 1 < first < BATCHES - 1
    used = [set(placement.homes["space"].values()) for placement in cluster.placements]
    later = BATCHES - 1 - first
    assert used == [{"1", "2"}] * (first + 1) + [{"1", "2", "3"}] * later


def test_a_new_driver_begins_without_homes(tmp_path: Path) -> None:
    clusters = [Cluster(["1", "2"]), Cluster(["3", "4"])]
    waiting = list(clusters)

    def on_step(step: str, number: int) -> None:
        if (step, number) == ("commit", 2) and len(waiting) == 1:
            raise Killed

    settings = {"engine.strategy": "uniform"}
    scenario = Scenario(tmp_path, settings, executor=lambda: waiting.pop(0), on_step=on_step)
    with pytest.raises(Killed):
        scenario.live()
    scenario.on_step = lambda step, number: None
    scenario.live()
    for cluster in clusters:
        homes = {h for p in cluster.placements for mine in p.homes.values() for h in mine.values()}
        assert homes == set(cluster.names)
    assert len(clusters[1].placements) == BATCHES - 2  # batch 2 is repeated with other homes
    scenario.check()
