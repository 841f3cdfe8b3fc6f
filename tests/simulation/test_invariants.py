"""Invariants 1, 2, 5 and 6 under load, faults and plan changes drawn from seeds.

A failure names its seed and round: ``run("swarm", seed)`` repeats it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chaos import ChaosDriver, drawn_scenario

from roost.balance.changes import Move, Rebalance, apply_changes
from roost.balance.global_index import GlobalIndex
from roost.balance.plan import Partition, Plan
from roost.balance.rules import SwarmRules
from roost.sim import checks
from roost.sim.checks import InvariantError
from roost.sim.cluster import simulate
from roost.sim.policies import Network, SimulatedRound, SwarmDriver
from roost.sim.scenario import Faults, Scenario, Trace
from roost.sim.slots import PlanSlots
from roost.sim.statistics import ClusterStatistics
from roost.sim.workloads import QueryTable
from roost.window import Lineage
from roost.workload.cells import CellCounts
from roost.workload.trio import PartitionStats

SEEDS = range(10)


def run(strategy: str, seed: int) -> Trace:
    scenario = drawn_scenario(seed, "global" if strategy == "chaos" else strategy)
    if strategy != "chaos":
        return simulate(scenario)
    return simulate(scenario, driver=lambda *a: ChaosDriver(*a, scenario.fade, seed))


@pytest.mark.parametrize("strategy", ["swarm", "global", "chaos"])
@pytest.mark.sweep(SEEDS, 2, 400)
def test_invariants_hold(strategy: str, seed: int) -> None:
    trace = run(strategy, seed)
    assert len(trace.rows) == trace.scenario.rounds


def test_the_fixed_seeds_make_every_kind_of_change() -> None:
    kinds: set[str] = set()
    for seed in SEEDS:
        scenario = replace(drawn_scenario(seed, "global"), check=False)
        drivers: list[ChaosDriver] = []

        def make(*a, seed=seed, fade=scenario.fade, drivers=drivers):
            drivers.append(ChaosDriver(*a, fade, seed))
            return drivers[0]

        simulate(scenario, driver=make)
        kinds |= drivers[0].kinds
    assert kinds == {"Move", "Split", "Merge", "Replan"}


# Every check must be able to fail: the tests break the code that it checks.

BROKEN = replace(drawn_scenario(3, "global"), machines=4, columns=8, rows=8, initial="uniform")


def broken_run(scenario: Scenario = BROKEN) -> None:
    simulate(scenario, driver=lambda *a: ChaosDriver(*a, scenario.fade, 5))


def test_an_unbroken_run_passes() -> None:
    broken_run()


def test_a_partition_that_is_not_covered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shrunk(plan: Plan, changes: object) -> Plan:
        after = apply_changes(plan, changes)
        last = max(after.partitions, key=lambda p: p.cells)
        smaller = replace(last, row1=last.row1 - 1)
        return replace(
            after, partitions=tuple(smaller if p is last else p for p in after.partitions)
        )

    monkeypatch.setattr("roost.sim.cluster.apply_changes", shrunk)
    with pytest.raises(InvariantError, match="invariant 1, seed 3, round"):
        broken_run()


def test_a_router_that_misses_a_partition_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GlobalIndex.query_overlap
    monkeypatch.setattr(GlobalIndex, "query_overlap", lambda self, *range: sound(self, *range)[1:])
    with pytest.raises(InvariantError, match="invariant 2, seed 3, round"):
        broken_run(replace(BROKEN, load=replace(BROKEN.load, churn=5, queries=60)))


def test_missing_arrivals_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "arrivals", lambda before, after: {})
    with pytest.raises(InvariantError, match="invariant 6, seed 3, round"):
        broken_run()


def test_statistics_that_are_off_by_one_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = PartitionStats.add_cells

    def add(self: PartitionStats, counts: object, columns: int) -> None:
        sound(self, counts, columns)
        self.columns.n_new[0] += 1

    monkeypatch.setattr(PartitionStats, "add_cells", add)
    with pytest.raises(InvariantError, match="invariant 5, seed 3, round"):
        broken_run()


def test_a_lineage_that_expires_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Lineage.expire
    monkeypatch.setattr(Lineage, "expire", lambda self, held: sound(self, set()))
    with pytest.raises(InvariantError, match=r"invariant 6, seed 3, round .*snapshot"):
        broken_run()


def test_parents_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def orphaned(plan: Plan, changes: object) -> Plan:
        after = apply_changes(plan, changes)
        return replace(after, partitions=tuple(replace(p, parents=()) for p in after.partitions))

    monkeypatch.setattr("roost.sim.cluster.apply_changes", orphaned)
    with pytest.raises(InvariantError, match="invariant 6, seed 3, round"):
        broken_run()


def test_a_change_that_touches_more_than_it_names_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(plan: Plan, changes: object) -> Plan:
        after = apply_changes(plan, changes)
        moved = tuple(replace(p, machines=(0,)) for p in after.partitions)
        return replace(after, partitions=moved)

    monkeypatch.setattr("roost.sim.cluster.apply_changes", careless)
    with pytest.raises(InvariantError, match="invariant 6, seed 3, round"):
        broken_run()


def test_a_response_applied_twice_is_refused_or_changes_nothing() -> None:
    halves = (Partition(0, 0, 0, 2, 2, (0,)), Partition(1, 2, 0, 4, 2, (0,)))
    plan = Plan(0, 4, 2, 2, halves, 2)
    moved = Rebalance((Move(1, (1,)),), "once")
    after = apply_changes(plan, moved.changes)
    assert apply_changes(after, moved.changes).partitions == after.partitions
    random = np.random.default_rng(1)
    driver = ChaosDriver.__new__(ChaosDriver)
    driver._random = random
    split = driver._split(after)
    assert split is not None
    with pytest.raises(ValueError, match="no partition"):
        apply_changes(apply_changes(after, [split]), [split])


def test_quarantined_queries_are_no_part_of_statistics() -> None:
    """Statistics without some queries equal those of a cluster that never received them."""
    scenario = Scenario(strategy="swarm", machines=4, columns=12, rows=9, rounds=1)
    for seed in range(5):
        random = np.random.default_rng(seed)
        plan = simulate(replace(scenario, seed=seed)).plan
        low = random.integers(0, (12, 9), (60, 2))
        ranges = np.hstack([low, np.minimum(low + random.integers(0, 5, (60, 2)), (11, 8))])
        ranges = ranges.astype(np.int32)
        hidden = random.random(60) < 0.4
        found = []
        for kept in (np.ones(60, np.bool_), ~hidden):
            table = QueryTable(12, 9)
            old = table.register(ranges[:40][kept[:40]])
            statistics = ClusterStatistics(plan, table, 0.5)
            new = table.register(ranges[40:][kept[40:]])
            statistics.requests(new, np.empty(0, np.int64))
            points = np.random.default_rng(seed).integers(0, 9, 12 * 9)
            statistics.collect(plan, PlanSlots(plan).distribute(CellCounts.of(points), 0))
            found.append(statistics)
            assert len(old) + len(new) == kept.sum()
        whole, expected = found
        ids = np.flatnonzero(hidden)
        without = whole.without(ids, ids >= 40)
        for mine, other in zip(without, expected.machines, strict=True):
            for number, stats in mine.partitions.items():
                for at in range(stats.column0 + 1, stats.column1):
                    assert stats.split(True, at) == other.partitions[number].split(True, at)
                assert stats.total() == other.partitions[number].total()
            assert mine.received() == other.received()


def test_the_simulated_coordinator_decides_without_quarantined_queries() -> None:
    """The costs that machines report are those of a cluster that never received the queries."""
    rules = SwarmRules(measured=False)  # counted work includes hidden queries
    scenario = Scenario(strategy="swarm", machines=4, columns=12, rows=9, rounds=1, swarm=rules)
    plan = simulate(scenario).plan
    random = np.random.default_rng(8)
    low = random.integers(0, (12, 9), (60, 2))
    ranges = np.hstack([low, np.minimum(low + random.integers(0, 5, (60, 2)), (11, 8))])
    hidden = random.random(60) < 0.4
    points = PlanSlots(plan).distribute(CellCounts.of(random.integers(0, 9, 12 * 9)), 0)
    view = SimulatedRound(plan, points, np.ones(4), np.ones(4), 1.0)
    costs = []
    for kept, quarantined in ((~hidden, ()), (hidden | ~hidden, np.flatnonzero(hidden))):
        table = QueryTable(12, 9)
        driver = SwarmDriver(plan, table, Network(Faults(), random), scenario)
        driver.requests(table.register(ranges[kept].astype(np.int32)), np.empty(0, np.int64))
        driver.collect(view)
        ids = np.array(quarantined, np.int64)
        driver.decide(view, ids, np.ones(len(ids), np.bool_))
        costs.append(driver.swarm.costs)
    assert costs[1] == pytest.approx(costs[0]) and min(costs[0].values()) > 0.0
