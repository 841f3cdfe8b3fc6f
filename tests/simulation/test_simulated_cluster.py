"""The simulated cluster under the papers' loads, and with faults."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from chaos import SMALL_COSTS, random_faults
from loads import hotspot_loads

from roost.balance.costs import ProductCost
from roost.balance.plan import Plan
from roost.balance.rules import PAIRS, SwarmRules, variants
from roost.balance.swarm import Swarm
from roost.sim import cluster
from roost.sim.cluster import simulate
from roost.sim.policies import GlobalDriver, Network, SimulatedRound, SwarmDriver
from roost.sim.scenario import (
    STRATEGIES,
    CoordinatorCrash,
    Faults,
    MachineCrash,
    Moment,
    Scenario,
    Straggler,
    Trace,
)
from roost.sim.workloads import CellHotspot, LoadSpec, QueryTable

LOADS = hotspot_loads(60)
HOTSPOTS = ("rise", "rise-normal", "step", "two-at-once", "two-in-turn")
START, STOP = 15, 45
# Sixteen equal partitions under a uniform load: no change is a gain.
QUIET = Scenario(
    machines=16, columns=64, rows=64, rounds=60, initial="uniform", load=LoadSpec(towns=0)
)


@cache
def traced(name: str, strategy: str, seed: int = 0) -> Trace:
    """Run a scenario once for all tests; a trace is immutable."""
    return simulate(Scenario(strategy=strategy, rounds=60, load=LOADS[name], seed=seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_scenario_always_gives_the_same_trace(strategy: str) -> None:
    faults = random_faults(np.random.default_rng(2), 6, 20)
    scenario = Scenario(strategy, 6, 20, 20, 20, seed=4, load=LOADS["step"], faults=faults)
    first, second = simulate(scenario), simulate(scenario)
    assert first == second
    assert simulate(replace(scenario, seed=5)).rows != first.rows


def test_only_an_injected_clock_is_read() -> None:
    ticks = iter(range(1_000))
    trace = simulate(replace(QUIET, rounds=3), clock=lambda: float(next(ticks)))
    assert trace.column("decision_s").tolist() == [1.0, 1.0, 1.0]
    assert simulate(replace(QUIET, rounds=3)).column("decision_s").tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("strategy", ["swarm", "global"])
def test_a_quiet_load_moves_nothing(strategy: str) -> None:
    trace = simulate(replace(QUIET, strategy=strategy))
    assert trace.plan_changes == 0
    assert trace.column("moved_queries").sum() == 0


def test_an_oscillating_load_does_not_change_the_global_plan() -> None:
    for seed in range(3):
        trace = traced("swing", "global", seed)
        assert trace.plan_changes <= 6
        assert trace.column("changes")[12:].sum() <= 1
        assert trace.column("imbalance")[12:].max() < 1.25


def test_swarm_moves_little_under_an_oscillating_load() -> None:
    scenario = replace(QUIET, strategy="swarm", load=replace(QUIET.load, swing=0.3), rounds=120)
    assert simulate(scenario).plan_changes <= 12


@pytest.mark.parametrize("name", HOTSPOTS)
def test_global_balances_every_hotspot(name: str) -> None:
    history, adaptive = traced(name, "history"), traced(name, "global")
    hot = slice(START, STOP)
    units = [trace.column("units_per_s")[hot].mean() for trace in (history, adaptive)]
    assert units[1] > 1.2 * units[0]
    assert adaptive.column("imbalance")[hot].mean() < 1.45
    assert adaptive.rows[-1].backlog == 0
    assert adaptive.column("partitions").max() < 10 * adaptive.scenario.machines


def test_global_recovers_from_a_step_in_three_rounds() -> None:
    for seed in range(5):
        recovered = traced("step", "global", seed).rounds_to_recover(START)
        assert recovered is not None and recovered <= 3, f"seed {seed}: {recovered}"


def test_swarm_does_better_than_history_in_a_step() -> None:
    units = [
        traced("step", name).column("units_per_s")[START:STOP] for name in ("history", "swarm")
    ]
    assert units[1].mean() > 1.5 * units[0].mean()


LONG = hotspot_loads(240)


@pytest.mark.parametrize("name", ["rise", "step"])
def test_swarm_is_no_worse_than_history_after_a_hotspot(name: str) -> None:
    """Plans made by splits settle: the cost of pieces is that of the whole (fault of N * Q * R)."""
    plain = Scenario(rounds=240, load=LONG[name])
    product = SwarmRules(cost=ProductCost(), measured=False)  # counted work would mend the cost
    made = (
        replace(plain, strategy="history"),
        replace(plain, strategy="swarm"),
        replace(plain, strategy="swarm", swarm=product),
    )
    history, swarm, published = (
        [units[:60].mean(), units[60:180].mean(), units[180:].mean()]
        for units in (simulate(scenario).column("units_per_s") for scenario in made)
    )
    # The backlog of a hotspot lets history admit more than is offered afterwards.
    for before, after in zip(history, swarm, strict=True):
        assert after >= 0.95 * before
    assert swarm[1] > 1.5 * history[1]
    assert published[2] < 0.9 * history[2]


def test_swarm_as_published_runs_with_each_change_alone() -> None:
    load = replace(LONG["step"], points_per_round=20_000)
    found = {
        name: simulate(Scenario(strategy="swarm", rounds=30, load=load, swarm=rules))
        for name, rules in variants().items()
    }
    assert len({str(trace.plan) for trace in found.values()}) > 4
    assert found["paper"].rows[0].partitions == 22


def test_a_hot_cell_is_shared() -> None:
    spot = CellHotspot((0.3, 0.7), 5, 40, share=0.4, side=0.001)
    load = LoadSpec(towns=0, hotspots=(spot,))
    trace = simulate(Scenario(machines=10, columns=40, rows=40, rounds=20, load=load))
    assert trace.column("imbalance")[10:].max() < 1.3
    assert max(len(p.machines) for p in trace.plan.partitions) >= 4
    swarm = simulate(replace(trace.scenario, strategy="swarm"))
    assert swarm.column("imbalance")[-1] > 2


def test_back_pressure_holds_the_source_to_the_slowest_machine() -> None:
    scenario = Scenario("uniform", 4, 16, 16, 20, load=LoadSpec(towns=0), noise=0.0)
    usual = simulate(scenario)
    assert usual.rows[-1].backlog == 0
    slow = simulate(replace(scenario, faults=Faults(stragglers=(Straggler(2, 5, 10, 7.0),))))
    admitted, imbalance = slow.column("admitted"), slow.column("imbalance")
    # At 0.7 of capacity, a machine that is 7 times as slow processes about a fifth of the points.
    assert admitted[6:10].mean() == pytest.approx(admitted[0] / (0.7 * 7), rel=0.1)
    assert imbalance[5:10].min() > 2.5
    assert slow.rows[9].backlog > 0 == slow.rows[-1].backlog
    assert admitted.sum() == usual.column("admitted").sum()
    assert bool(np.all(slow.column("busiest_s")[6:10] <= 1.3 * scenario.round_s))


def test_moving_queries_costs_time() -> None:
    costs = replace(Scenario().costs, per_query_moved=1e-2)
    scenario = Scenario(rounds=30, load=hotspot_loads(30)["step"])
    cheap, expensive = simulate(scenario), simulate(replace(scenario, costs=costs))
    assert expensive.column("units_per_s").sum() < cheap.column("units_per_s").sum()
    moved = cheap.column("moved_queries")
    assert moved.sum() > 0
    assert bool(np.all((moved > 0) <= (cheap.column("changes") > 0)))


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("strategy", ["swarm", "global"])
def test_a_new_coordinator_continues_from_the_last_plan(strategy: str, moment: Moment) -> None:
    crashes = tuple(CoordinatorCrash(number, moment) for number in (16, 18, 30))
    scenario = Scenario(strategy, rounds=60, load=LOADS["step"])
    trace = simulate(replace(scenario, faults=Faults(coordinator_crashes=crashes)))
    epochs = trace.column("epoch")
    assert bool(np.all(np.diff(epochs) >= 0))
    assert epochs[-1] > epochs[30] or trace.column("imbalance")[31:STOP].max() < 1.3
    if moment is not Moment.AFTER_WRITE:
        assert all(trace.rows[k].changes == 0 for k in (16, 18, 30))
        assert trace.rows[16].reason.startswith("coordinator lost")
    assert trace.column("imbalance")[40:STOP].mean() < 3


def test_lost_machines_recover() -> None:
    crashes = tuple(MachineCrash(machine, 20 + machine) for machine in range(5))
    for strategy in ("swarm", "global"):
        sound = traced("step", strategy)
        trace = simulate(replace(sound.scenario, faults=Faults(machine_crashes=crashes)))
        assert trace.column("units_per_s").sum() > 0.7 * sound.column("units_per_s").sum()


@pytest.mark.parametrize("strategy", ["swarm", "global"])
def test_without_any_message_nothing_changes(strategy: str) -> None:
    scenario = Scenario(strategy, rounds=40, load=LOADS["step"], faults=Faults(loss=1.0))
    trace = simulate(scenario)
    assert trace.plan_changes == 0


def test_repeated_messages_change_nothing() -> None:
    """Reports, requests and responses that all arrive twice lead to the same plans."""
    for strategy in ("swarm", "global"):
        once = traced("step", strategy)
        twice = simulate(replace(once.scenario, faults=Faults(repeat=1.0)))
        assert twice.plan == once.plan
        assert twice.column("epoch").tolist() == once.column("epoch").tolist()


@pytest.mark.parametrize("strategy", ["swarm", "global"])
def test_a_poor_network_still_leads_to_balance(strategy: str) -> None:
    scenario = Scenario(strategy, rounds=60, load=LOADS["step"])
    poor = simulate(replace(scenario, faults=Faults(loss=0.05, repeat=0.1)))
    history = traced("step", "history")
    hot = slice(START, STOP)
    assert poor.column("units_per_s")[hot].mean() > 1.5 * history.column("units_per_s")[hot].mean()


class _Restarted(SwarmDriver):
    """Serialises and restores the policy's state in every round."""

    def collect(self, view: SimulatedRound) -> None:
        super().collect(view)
        self.swarm = Swarm.from_json(json.loads(json.dumps(self.swarm.to_json())))


def test_swarm_round_trips_through_json() -> None:
    once = traced("two-in-turn", "swarm")
    restarted = simulate(once.scenario, driver=lambda *a: _Restarted(*a, once.scenario))
    assert restarted.rows == once.rows


def test_the_model_learns_the_true_costs() -> None:
    drivers: list[GlobalDriver] = []

    def make(plan: Plan, query_table: QueryTable, network: Network) -> GlobalDriver:
        drivers.append(GlobalDriver(query_table, network))
        return drivers[0]

    costs = replace(SMALL_COSTS, per_partition=1e-3)
    scenario = Scenario(rounds=60, load=LOADS["rise"], costs=costs, capacity=1.0)
    trace = simulate(scenario, driver=make)
    assert trace.rows[-1].model_error < 0.03
    partition, point, check = drivers[0].model.coefficients.tolist()
    assert point == pytest.approx(costs.per_point, rel=0.1)
    assert check == pytest.approx(costs.per_check, rel=0.1)
    assert partition < 0.1  # a small part of any machine's seconds, so hard to estimate


@pytest.mark.full
@pytest.mark.sweep([1], 0, 20)
@pytest.mark.parametrize("name", HOTSPOTS)
def test_global_balances_every_hotspot_for_many_seeds(name: str, seed: int) -> None:
    hot = slice(START, STOP)
    history, adaptive = traced(name, "history", seed), traced(name, "global", seed)
    units = [trace.column("units_per_s")[hot].mean() for trace in (history, adaptive)]
    assert units[1] > units[0]


def ten_thousand_machines(strategy: str) -> Trace:
    from roost.bench.scale import scenario

    trace = simulate(replace(scenario(10_000, strategy, 1_000), rounds=14))
    trace.plan.check_invariants()
    return trace


@pytest.mark.full
def test_global_balances_ten_thousand_machines() -> None:
    assert ten_thousand_machines("global").column("imbalance")[-1] < 2.0


@pytest.mark.full
def test_swarm_relieves_pairs_of_ten_thousand_machines_in_a_round() -> None:
    from roost.bench.scale import HOTSPOT_ROUND

    trace = ten_thousand_machines("swarm")
    changed = trace.column("changes") > 0
    assert changed.sum() >= 7
    assert changed[HOTSPOT_ROUND:].any()
    # A split adds one partition, and a machine sheds load to one other.
    added = np.diff(trace.column("partitions"), prepend=10_000)
    assert ((added > 0) <= changed).all() and added.max() <= PAIRS
    assert trace.column("imbalance")[:HOTSPOT_ROUND].max() < 1.5
    worst = trace.column("imbalance")[HOTSPOT_ROUND:]
    assert worst[-1] < worst[0]


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(AssertionError, match="none of"):
        simulate(Scenario("best"))


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(cluster)
    assert results.attempted and not results.failed
