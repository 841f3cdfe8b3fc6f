"""SWARM: shedding never makes a pair worse, and balanced machines exchange nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio_model import add_points

from properties import examples
from roost.balance import Partition, Plan, initial_plan
from roost.balance.changes import (
    Change,
    Decision,
    Merge,
    Move,
    NoChange,
    Rebalance,
    Replan,
    Split,
    apply_changes,
    arrivals,
)
from roost.balance.costs import ProductCost
from roost.balance.decision import Stages
from roost.balance.rules import MERGE_EVERY, PAPER, QUIET, SwarmRules
from roost.balance.swarm import (
    LoadReport,
    ShedRequest,
    ShedTarget,
    Swarm,
    change_bytes,
    give,
    machine_cost,
    scale_of,
    shed,
    tolerance,
)
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect
from roost.workload.cells import CellCounts
from roost.workload.trio import MachineStats, PartitionStats

SIDE = 24
PRODUCT = SwarmRules(cost=ProductCost())


def stats_of(p: Partition, ranges: np.ndarray) -> PartitionStats:
    stats = PartitionStats(p.partition_id, p.column0, p.row0, p.column1, p.row1)
    stats.add_queries(ranges)
    return stats


class Cluster:
    """Machines with statistics, whose work is one check for each query over a point's cell."""

    def __init__(self, machines: int = 8, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.plan = initial_plan(Strategy.UNIFORM, Grid(Rect(0, 0, 1, 1), SIDE, SIDE), machines)
        # One query in every cell and some larger ones: nearly the same everywhere.
        cells = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), -1).reshape(-1, 2)
        self.ranges = np.concatenate([cells, np.minimum(cells + 1, SIDE - 1)], 1).astype(np.int32)
        self.stats = {p.partition_id: stats_of(p, self.ranges) for p in self.plan.partitions}
        self.swarm = Swarm()
        self.moves = 0

    def machine(self, machine: int) -> MachineStats:
        held = (p for p in self.plan.partitions if machine in p.machines)
        return MachineStats(self.stats[p.partition_id] for p in held)

    def round(self, weights: np.ndarray, points: int = 40_000) -> float:
        """Run one round; return the load of the busiest machine over the mean."""
        counts = self.rng.multinomial(points, weights.reshape(-1) / weights.sum())
        cells = np.flatnonzero(counts).astype(np.int32)
        touched = CellCounts(cells, counts[cells].astype(np.int64))
        busy = np.zeros(self.plan.machines)
        for p in self.plan.partitions:
            part = counts.reshape(SIDE, SIDE)[p.row0 : p.row1, p.column0 : p.column1]
            busy[p.machines[0]] += part.sum()
        for stats in self.stats.values():
            stats.add_cells(touched, SIDE)
            stats.close_round()
        held = [self.machine(m) for m in range(self.plan.machines)]
        reports = [LoadReport(m, machine_cost(s), s.received()) for m, s in enumerate(held)]
        decision = self.swarm.decide(self.plan, reports, points / busy.max(), self.send)
        if isinstance(decision, Rebalance):
            self.apply(decision.changes)
        return float(busy.max() / busy.mean())

    def send(self, machine: int, request: ShedRequest) -> tuple[Change, ...]:
        return shed(self.machine(machine), machine, request)

    def apply(self, changes: Iterable[Change]) -> None:
        after = apply_changes(self.plan, tuple(changes))
        after.check_invariants()
        self.moves += bool(arrivals(self.plan, after))
        self.plan = after
        for change in changes:
            if isinstance(change, Split):
                whole = self.stats.pop(change.partition_id)
                for part in whole.cut(change.vertical, change.at, *change.ids, self.ranges):
                    self.stats[part.partition_id] = part
            elif isinstance(change, Merge):
                parts = [self.stats.pop(number) for number in change.partition_ids]
                whole = PartitionStats.merged(change.new_id, parts, self.ranges)
                assert whole is not None
                self.stats[change.new_id] = whole


def even() -> np.ndarray:
    return np.ones((SIDE, SIDE))


def hot(corner: int) -> np.ndarray:
    """Put most of the points into a ninth of the space."""
    weights = even()
    third = slice(0, SIDE // 3) if corner == 0 else slice(SIDE - SIDE // 3, SIDE)
    weights[third, third] = 12.0
    return weights


@pytest.mark.parametrize("seed", range(3))
def test_a_balanced_load_moves_nothing(seed: int) -> None:
    cluster = Cluster(seed=seed)
    first = cluster.plan
    for _ in range(80):
        cluster.round(even())
    assert cluster.plan == first
    assert cluster.swarm.bytes_sent == 16 * 8


def test_the_noise_of_few_points_moves_nothing() -> None:
    cluster = Cluster()
    for _ in range(60):
        cluster.round(even(), points=100)
    assert cluster.moves == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_region_is_relieved_and_then_left_alone(seed: int) -> None:
    cluster = Cluster(seed=seed)
    for _ in range(5):
        cluster.round(even())
    before = cluster.round(hot(0))
    for _ in range(60):
        cluster.round(hot(0))
    moves = cluster.moves
    assert 0 < moves < 20
    after = [cluster.round(hot(0)) for _ in range(30)]
    assert before > 2.5
    assert np.mean(after) < 1.6
    assert cluster.moves <= moves + 2


@pytest.mark.parametrize("seed", range(3))
def test_an_oscillating_load_does_not_oscillate_the_plan(seed: int) -> None:
    cluster = Cluster(seed=seed)
    for turn in range(60):
        cluster.round(hot(turn % 2))
    early = cluster.moves
    for turn in range(60):
        cluster.round(hot(turn % 2))
    assert early <= 8, "a difference that both states have may be balanced"
    assert cluster.moves <= early + 2


@st.composite
def machines(draw: st.DrawFn) -> tuple[MachineStats, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    stats = []
    for number in range(draw(st.integers(1, 5))):
        wide, high = (int(side) for side in rng.integers(1, 9, 2))
        part = PartitionStats(number, 0, 0, wide, high)
        for _ in range(2):
            count = int(rng.integers(0, 60))
            add_points(part, rng.integers(0, wide, count), rng.integers(0, high, count))
            low = rng.integers(0, (wide, high), (int(rng.integers(0, 12)), 2))
            ranges = np.concatenate([low, low + rng.integers(0, 4, low.shape)], 1)
            collect = part.end_queries if rng.random() < 0.25 else part.add_queries
            collect(ranges.astype(np.int32))
            part.close_round()
        stats.append(part)
    return MachineStats(stats), rng


@given(case=machines(), share=st.floats(0.0, 1.5), kept=st.sets(st.integers(0, 4)))
@examples(200)
def test_shedding_lowers_the_higher_cost_or_does_nothing(
    case: tuple[MachineStats, np.random.Generator], share: float, kept: set[int]
) -> None:
    stats, _ = case
    received = 1000.0
    high = stats.numerator() / received
    low = high * share
    request = ShedRequest((ShedTarget(1, low),), received, 40, tuple(sorted(kept)))
    changes = shed(stats, 3, request, PRODUCT)
    assert shed(stats, 3, request, PRODUCT) == changes, "statistics are only read"
    if share >= 1.0:
        assert changes == ()
    if not changes:
        return
    cost = {n: p.total().numerator / received for n, p in stats.partitions.items()}
    for change in changes:
        assert isinstance(change, Move | Split)
        assert change.partition_id not in kept
        own = cost[change.partition_id]
        high -= own
        if isinstance(change, Move):
            assert change.machines == (1,)
            low += own
        else:
            assert change.ids == (40, 41)
            assert set(change.machines) == {(1,), (3,)}
            trios = stats.partitions[change.partition_id].split(change.vertical, change.at)
            parts = [trio.numerator / received for trio in trios]
            moved, left = parts if change.machines[0] == (1,) else parts[::-1]
            high, low = high + left, low + moved
    assert max(high, low) < sum(cost.values()) * (1 - 0.019)


@given(case=machines(), others=st.lists(st.floats(0.0, 1.2), min_size=1, max_size=5))
@examples(200)
def test_a_machine_fills_others_up_to_the_mean(
    case: tuple[MachineStats, np.random.Generator], others: list[float]
) -> None:
    stats, _ = case
    rules, received = SwarmRules(), 1_000.0
    own = machine_cost(stats, rules) / received
    lows = [own * share for share in sorted(others)]
    mean = (own + sum(lows)) / (1 + len(lows))
    targets = tuple(ShedTarget(4 + number, low) for number, low in enumerate(lows) if low < mean)
    request = ShedRequest(targets, received, 40, (), mean)
    changes = shed(stats, 3, request)
    assert shed(stats, 3, request) == changes, "statistics are only read"
    held, costs = dict(stats.partitions), dict(targets)
    ids = iter(range(40, 60))
    for change in changes:
        gone: dict[int, PartitionStats] = {}
        give(held, gone, 3, change)
        if isinstance(change, Split):
            assert change.ids == (next(ids), next(ids))
        costs[receiver(change)] += sum(map(rules.cost.of, gone.values())) / received
    filled = [target for target in targets if costs[target.machine] > target.cost]
    assert filled == list(targets[: len(filled)]), "the cheapest first"
    for machine, low in filled:
        assert low < costs[machine] < own
    left = machine_cost(MachineStats(held.values()), rules) / received
    assert left < own or not filled


def receiver(change: Change) -> int:
    assert isinstance(change, Move | Split)
    owners = (change.machines,) if isinstance(change, Move) else change.machines
    return next(low for (low,) in owners if low != 3)


def test_one_request_fills_several_machines() -> None:
    """Eight columns of equal work become three for each of three machines, one of which has one."""
    part = PartitionStats(0, 0, 0, 8, 1, np.array([[0, 0, 7, 0]], np.int32))
    add_points(part, np.repeat(np.arange(8), 10), np.zeros(80, np.int64))
    part.close_round()
    stats = MachineStats([part])
    column = machine_cost(stats) / 8
    targets = (ShedTarget(1, 0.0), ShedTarget(2, column))
    changes = shed(stats, 0, ShedRequest(targets, 1.0, 4, (), 3 * column))
    assert changes == (
        Split(0, True, 3, (4, 5), ((1,), (0,))),
        Split(5, True, 5, (6, 7), ((2,), (0,))),
    )
    # A column is too much for a machine that is to have less; it receives one nevertheless.
    (least,) = shed(stats, 0, ShedRequest(targets[:1], 1.0, 4, (), 0.3 * column))
    assert isinstance(least, Split) and least.at in (1, 7)
    # As published, the first would receive half, and the second nothing.
    (only,) = shed(stats, 0, ShedRequest(targets[:1], 1.0, 4))
    assert isinstance(only, Split) and only.at == 4


def busy_machine(costs: dict[int, int], cells: int = 1) -> MachineStats:
    """Partitions with given N, one query, and R = N: they cost N squared."""
    parts = []
    for number, points in costs.items():
        part = PartitionStats(number, 0, number, cells, number + 1)
        part.add_queries(np.array([[0, number, cells, number]], np.int32))
        part.close_round()
        add_points(part, np.arange(points) % cells, np.full(points, number))
        part.close_round()
        parts.append(part)
    return MachineStats(parts)


def to_one(machine: int, cost: float, received: float, next_id: int) -> ShedRequest:
    """Return a request to shed load to one machine, as published."""
    return ShedRequest((ShedTarget(machine, cost),), received, next_id)


def test_whole_partitions_are_moved_where_they_close_half_the_gap() -> None:
    """Partition 0 is too large to move and can be cut, which would balance the machines better."""
    request = to_one(5, 0.0, 1.0, 9)
    # Half the gap that can be closed is a quarter of the costs: 136 of 544, then 130 of 521.
    assert shed(busy_machine({0: 20, 1: 12}, cells=4), 0, request, PRODUCT) == (Move(1, (5,)),)
    (split,) = shed(busy_machine({0: 20, 1: 11}, cells=4), 0, request, PRODUCT)
    assert isinstance(split, Split) and split.partition_id == 0


def test_of_equally_costly_partitions_the_one_with_the_lower_id_is_cut() -> None:
    (split,) = shed(busy_machine({3: 20, 1: 20}, cells=4), 0, to_one(5, 400.0, 1.0, 9), PRODUCT)
    assert isinstance(split, Split) and split.partition_id == 1


def test_a_partition_of_negligible_cost_does_not_prevent_a_split() -> None:
    stats = busy_machine({0: 20, 1: 2}, cells=4)
    (split,) = shed(stats, 0, to_one(5, 0.0, 1.0, 9), PRODUCT)
    assert isinstance(split, Split)
    assert split.partition_id == 0
    assert (split.vertical, split.at) == (True, 2)


def test_beside_a_single_cell_the_other_partitions_are_shed() -> None:
    stats = busy_machine({0: 20, 1: 6})
    assert shed(stats, 0, to_one(5, 0.0, 1.0, 9), PRODUCT) == (Move(1, (5,)),)
    assert shed(busy_machine({0: 20}), 0, to_one(5, 0.0, 1.0, 9), PRODUCT) == ()


def test_a_gain_below_the_minimum_moves_nothing() -> None:
    assert shed(busy_machine({0: 20, 1: 1}), 0, to_one(5, 0.0, 1.0, 9), PRODUCT) == ()


def test_nothing_is_shed_within_the_tolerance_or_to_itself_or_without_arrivals() -> None:
    stats = busy_machine({0: 13, 1: 3})
    assert shed(stats, 0, to_one(5, 155.0, 1.0, 9), PRODUCT) == ()
    loud = replace(PRODUCT, quiet=0.0)
    assert shed(stats, 0, to_one(5, 155.0, 1.0, 9), loud) == (Move(1, (5,)),)
    assert shed(stats, 5, to_one(5, 0.0, 1.0, 9), PRODUCT) == ()
    assert shed(stats, 0, to_one(5, 0.0, 0.0, 9), PRODUCT) == ()
    assert shed(MachineStats(), 0, to_one(5, 0.0, 1.0, 9), PRODUCT) == ()


def test_estimates_are_scaled_to_counted_work() -> None:
    """Partition 0 cannot be cut; the machine costs 178 by its estimates, and really twice that."""
    stats = busy_machine({0: 13, 1: 3})
    request = to_one(5, 155.0, 1.0, 9)
    assert shed(stats, 0, request, PRODUCT) == ()
    assert shed(stats, 0, request, PRODUCT, 2.0) == (Move(1, (5,)),)
    # The moved partition is twice as costly, too: it may not exceed half the gap.
    assert shed(stats, 0, to_one(5, 325.0, 1.0, 9), replace(PRODUCT, quiet=0.0), 2.0) == ()


@pytest.mark.parametrize(
    ("estimate", "received", "checks", "rules", "expected"),
    [
        (1_000.0, 10.0, 1_500.0, SwarmRules(), 2.0),
        (4_000.0, 10.0, 1_500.0, SwarmRules(), 0.5),
        (0.0, 10.0, 1_500.0, SwarmRules(), 1.0),
        (1_000.0, 10.0, 1_500.0, PAPER, 1.0),
    ],
)
def test_the_scale_is_counted_work_over_the_estimate(
    estimate: float, received: float, checks: float, rules: SwarmRules, expected: float
) -> None:
    assert scale_of(estimate, received, checks, rules) == expected


# Every partition can be cut in both directions.
PLAN = Plan(
    3,
    8,
    2,
    4,
    tuple(Partition(number, 2 * number, 0, 2 * number + 2, 2, (number,)) for number in range(4)),
    10,
)
SKEWED = [
    LoadReport(0, 9e6, 1e4),
    LoadReport(1, 5e6, 1e4),
    LoadReport(2, 1e6, 1e4),
    LoadReport(3, 4e6, 1e4),
]


def rebalancing(pairs: int = 1) -> Swarm:
    """Return a coordinator that has seen one skewed round and rebalances in the next."""
    swarm = Swarm(Stages(1, False, 1, 10.0), rules=SwarmRules(pairs=pairs))
    swarm.decide(PLAN, SKEWED, 11.0, never)
    assert not swarm.stages.rebalance
    swarm.stages = Stages(1, False, 1, 10.0)
    return swarm


def never(machine: int, request: ShedRequest) -> tuple[Change, ...]:
    raise AssertionError("no request is expected")


Responses = dict[int, tuple[Change, ...]]


def decide(swarm: Swarm, responses: Responses) -> tuple[Decision, list[int]]:
    """Return the decision and the machines that received a request, in order."""
    requested: list[int] = []

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        requested.append(machine)
        assert request == to_one(2, 1e6 / 4e4, 4e4, 10)
        return responses.get(machine, ())

    return swarm.decide(PLAN, SKEWED, 9.0, send), requested


def test_the_highest_sheds_to_the_lowest() -> None:
    swarm = rebalancing()
    decision, requested = decide(swarm, {0: (Move(0, (2,)),)})
    assert decision == Rebalance((Move(0, (2,)),), "machine 0 sheds load to machine 2")
    assert requested == [0]
    # Reports, a request of five numbers, the response, and the change sent to four machines.
    assert swarm.bytes_sent == 4 * 16 + 40 + 24 + 4 * 24


def test_the_next_highest_receives_a_request_if_one_cannot_shed() -> None:
    decision, requested = decide(rebalancing(), {1: (Move(1, (2,)),)})
    assert isinstance(decision, Rebalance)
    assert requested == [0, 1]


# Requests in order (machine, receiver, first new id), responses, and pairs that are relieved.
PAIRS_CASES = {
    "the next costliest sheds to the next cheapest": (
        2,
        [(0, 2, 10), (1, 3, 10)],
        {0: (Move(0, (2,)),), 1: (Move(1, (3,)),)},
        [(0, 2), (1, 3)],
    ),
    "a split takes the next ids": (
        2,
        [(0, 2, 10), (1, 3, 12)],
        {
            0: (Split(0, True, 1, (10, 11), ((0,), (2,))),),
            1: (Split(1, True, 3, (12, 13), ((1,), (3,))),),
        },
        [(0, 2), (1, 3)],
    ),
    "a receiver of which one machine has no load to shed stays the cheapest": (
        2,
        [(0, 2, 10), (1, 2, 10)],
        {1: (Move(1, (2,)),)},
        [(1, 2)],
    ),
    "a response with ids of the pair before is refused": (
        2,
        [(0, 2, 10), (1, 3, 12)],
        {
            0: (Split(0, True, 1, (10, 11), ((0,), (2,))),),
            1: (Split(1, True, 3, (10, 11), ((1,), (3,))),),
        },
        [(0, 2)],
    ),
    "one pair as published": (1, [(0, 2, 10)], {0: (Move(0, (2,)),)}, [(0, 2)]),
}


@pytest.mark.parametrize("case", list(PAIRS_CASES))
def test_disjoint_pairs_are_relieved_in_one_round(case: str) -> None:
    pairs, expected, responses, relieved = PAIRS_CASES[case]
    reports = [*SKEWED[:3], replace(SKEWED[3], cost=2e6)]
    swarm = rebalancing(pairs)
    swarm.costs = {report.machine: report.cost for report in reports}
    requests: list[tuple[int, int, int]] = []

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        requests.append((machine, request.targets[0].machine, request.next_id))
        return responses.get(machine, ())

    decision = swarm.decide(PLAN, reports, 9.0, send)
    assert requests[: len(expected)] == expected
    assert isinstance(decision, Rebalance)
    changed = tuple(change for high, _ in relieved for change in responses[high])
    assert decision.changes == changed
    shown = [f"machine {high} sheds load to machine {low}" for high, low in relieved]
    assert decision.reason == ", ".join(shown)
    apply_changes(PLAN, decision.changes).check_invariants()


HOT_SPOT = [LoadReport(machine, cost, 1e4) for machine, cost in enumerate((9e6, 2e6, 1e6, 4e6))]


def urged(
    reports: Sequence[LoadReport], responses: Responses, plan: Plan = PLAN, **rules: Any
) -> tuple[Any, Any]:
    """Decide in a round in which the stages say to do nothing; return decision and requests."""
    swarm = Swarm(rules=SwarmRules(**rules))
    swarm.costs = {report.machine: report.cost for report in reports}
    requests: dict[int, ShedRequest] = {}

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        requests[machine] = request
        return responses.get(machine, ())

    decision = swarm.decide(plan, reports, 9.0, send)
    assert not swarm.stages.rebalance
    return decision, requests


def test_a_hotspot_is_shed_to_several_machines_in_one_round_in_any_stage() -> None:
    changes = (
        Split(0, True, 1, (10, 11), ((0,), (2,))),
        Split(10, False, 1, (12, 13), ((1,), (0,))),
    )
    decision, requests = urged(HOT_SPOT, {0: changes})
    shown = "machine 0 sheds load to machine 2, machine 0 sheds load to machine 1"
    assert decision == Rebalance(changes, shown)
    apply_changes(PLAN, changes).check_invariants()
    # The mean is 4e6; what machine 0 has above it fits into machines 1 and 2.
    targets = (ShedTarget(2, 25.0), ShedTarget(1, 50.0))
    assert requests == {0: ShedRequest(targets, 4e4, 10, (), 100.0)}


def test_a_response_for_a_machine_beyond_the_targets_is_refused() -> None:
    decision, _ = urged(HOT_SPOT, {0: (Move(0, (3,)),)})
    assert decision == NoChange("no machine can shed load to machine 2")
    twice = (Split(0, True, 1, (10, 11), ((0,), (2,))), Move(11, (1,)))
    decision, _ = urged(HOT_SPOT, {0: twice})
    assert decision == NoChange("no machine can shed load to machine 2"), "11 is not its own"


@pytest.mark.parametrize(("held", "targets"), [(5, (1,)), (4, (2, 1))])
def test_a_machine_with_many_partitions_receives_no_more(
    held: int, targets: tuple[int, ...]
) -> None:
    """There are two for each machine, so with five the cheapest machine has too many."""
    owners = (0, 1, 3, *[0] * (5 - held), *[2] * held)
    columns = (Partition(k, k, 0, k + 1, 2, (owner,)) for k, owner in enumerate(owners))
    _, requests = urged(HOT_SPOT, {}, replace(PLAN, partitions=tuple(columns)))
    assert tuple(target.machine for target in requests[0].targets) == targets


def test_the_stages_decide_about_smaller_differences() -> None:
    reports = [replace(report, cost=3e6 + 1e5 * report.cost / 1e6) for report in HOT_SPOT]
    decision, requests = urged(reports, {}, urgent=0.3)
    assert decision == NoChange("the stages say to do nothing") and requests == {}
    assert urged(reports, {}, urgent=0.2)[1].keys() == {0}
    assert urged(HOT_SPOT, {}, urgent=math.inf)[1] == {}
    assert PAPER.urgent == math.inf


def test_no_pair_is_relieved_within_the_tolerance() -> None:
    """Machines 0 and 2 are far apart; 1 and 3 are not."""
    reports = [SKEWED[0], SKEWED[1], SKEWED[2], replace(SKEWED[3], cost=4.8e6)]
    swarm = rebalancing(pairs=2)
    swarm.costs = {report.machine: report.cost for report in reports}
    requested: list[int] = []

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        requested.append(machine)
        return (Move(machine, (request.targets[0].machine,)),)

    decision = swarm.decide(PLAN, reports, 9.0, send)
    assert requested == [0] and isinstance(decision, Rebalance)


def test_nothing_changes_if_no_machine_can_shed() -> None:
    swarm = rebalancing()
    decision, requested = decide(swarm, {})
    assert decision == NoChange("no machine can shed load to machine 2")
    assert requested == [0, 1, 3]
    assert swarm.bytes_sent == 4 * 16 + 3 * (40 + 8)


@pytest.mark.parametrize(
    "change",
    [
        Move(0, (2,)),
        Split(0, True, 1, (10, 11), ((0,), (2,))),
        Split(0, False, 1, (10, 11), ((2,), (0,))),
        Split(0, True, 1, (30, 20), ((0,), (2,))),
    ],
    ids=str,
)
def test_a_response_that_fits_the_plan_is_accepted(change: Change) -> None:
    decision, requested = decide(rebalancing(), {0: (change,)})
    assert decision == Rebalance((change,), "machine 0 sheds load to machine 2")
    assert requested == [0]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((Move(7, (2,)),), id="move of an unknown partition"),
        pytest.param((Move(1, (2,)),), id="move of another machine's partition"),
        pytest.param((Move(0, (3,)),), id="move to a third machine"),
        pytest.param((Move(0, (2, 0)),), id="move to two machines"),
        pytest.param(
            (Split(7, True, 1, (10, 11), ((0,), (2,))),), id="split of an unknown partition"
        ),
        pytest.param(
            (Split(1, True, 3, (10, 11), ((0,), (2,))),), id="split of another's partition"
        ),
        pytest.param((Split(0, True, 2, (10, 11), ((0,), (2,))),), id="split at the border"),
        pytest.param(
            (Split(0, True, 1, (4, 11), ((0,), (2,))),), id="split with a first id in use"
        ),
        pytest.param(
            (Split(0, True, 1, (10, 9), ((0,), (2,))),), id="split with a second id in use"
        ),
        pytest.param((Split(0, True, 1, (10, 10), ((0,), (2,))),), id="split with equal ids"),
        pytest.param((Split(0, True, 1, (10, 11), ((0,), (0,))),), id="split that moves nothing"),
        pytest.param(
            (Split(0, True, 1, (10, 11), ((2,), (2,))),), id="split that moves everything"
        ),
        pytest.param((Split(0, True, 1, (10, 11), ((0,), (3,))),), id="split for a third machine"),
        pytest.param((Move(0, (2,)), Move(1, (2,))), id="one good change and a bad one"),
        pytest.param((Merge((0, 1), 10, (2,)),), id="merge"),
        pytest.param((Replan(PLAN.partitions),), id="new layout"),
    ],
)
def test_a_response_that_does_not_fit_the_plan_is_refused(changes: tuple[Change, ...]) -> None:
    decision, requested = decide(rebalancing(), {0: changes})
    assert decision == NoChange("no machine can shed load to machine 2")
    assert requested == [0, 1, 3], "the next machines receive requests instead"


def test_a_difference_must_last_two_rounds() -> None:
    swarm = Swarm(Stages(1, False, 1, 10.0))
    assert swarm.decide(PLAN, SKEWED, 9.0, never) == NoChange("no difference has lasted two rounds")
    turned = [replace(report, cost=1e7 - report.cost) for report in SKEWED]
    assert isinstance(swarm.decide(PLAN, turned, 9.5, never), NoChange)


def test_lost_repeated_and_foreign_reports_do_no_harm() -> None:
    swarm = rebalancing()

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        return (Move(machine, (request.targets[0].machine,)),)

    reports = [SKEWED[0], SKEWED[0], SKEWED[3], LoadReport(9, 1e9, 1e9)]
    decision = swarm.decide(PLAN, reports, 9.0, send)
    assert decision == Rebalance((Move(0, (3,)),), "machine 0 sheds load to machine 3")
    assert isinstance(rebalancing().decide(PLAN, SKEWED[:1], 9.0, never), NoChange)
    assert isinstance(rebalancing().decide(PLAN, [], 9.0, never), NoChange)
    idle = [LoadReport(machine, 0.0, 0.0) for machine in range(4)]
    assert rebalancing().decide(PLAN, idle, 9.0, never) == NoChange("nothing was received")


def test_a_request_lists_shared_partitions_and_a_response_that_moves_them_is_refused() -> None:
    partitions = (replace(PLAN.partitions[0], machines=(0, 3)), *PLAN.partitions[1:])
    plan = replace(PLAN, partitions=partitions)
    kept: dict[int, tuple[int, ...]] = {}

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        kept[machine] = request.keep
        return (Move(0, (2,)),)

    assert isinstance(rebalancing().decide(plan, SKEWED, 9.0, send), NoChange)
    assert kept == {0: (0,), 1: (), 3: (0,)}


def test_neighbours_are_merged_at_intervals_in_any_stage() -> None:
    partitions = (PLAN.partitions[0], replace(PLAN.partitions[1], machines=(0,)))
    plan = replace(PLAN, partitions=(*partitions, *PLAN.partitions[2:]))
    swarm = Swarm(rules=SwarmRules(urgent=math.inf))
    decisions = [swarm.decide(plan, SKEWED, 1.0 + n, never) for n in range(MERGE_EVERY)]
    assert not any(isinstance(d, Rebalance) for d in decisions[:-1])
    assert decisions[-1] == Rebalance((Merge((0, 1), 10, (0,)),), "neighbours of one machine")


def test_a_restarted_coordinator_decides_the_same() -> None:
    swarm = rebalancing()
    again = Swarm.from_json(json.loads(json.dumps(swarm.to_json())), swarm.rules)
    responses: Responses = {0: (Move(0, (2,)),)}
    for _ in range(MERGE_EVERY + 1):
        assert decide(swarm, responses) == decide(again, responses)
        assert again.to_json() == swarm.to_json()


def test_the_tolerance_grows_with_machines_and_falls_with_points() -> None:
    def of(machines: int, received: float, rules: SwarmRules = SwarmRules()) -> float:  # noqa: B008
        return tolerance([LoadReport(m, 1.0, received) for m in range(machines)], rules)

    assert of(8, 1e9) == pytest.approx(QUIET)
    assert of(8, 1e9, PRODUCT) == pytest.approx((1 + QUIET) ** 2 - 1)
    assert of(8, 10.0, PAPER) == 0.0
    assert of(8, 10.0) > of(8, 100.0) > of(8, 10_000.0)
    assert of(1000, 100.0) > of(8, 100.0)


def test_messages_are_counted_by_their_numbers() -> None:
    assert change_bytes([Split(0, True, 1, (10, 11), ((0,), (2,)))]) == 8 * (1 + 7)
    assert change_bytes([Merge((0, 1), 10, (2,)), Move(3, (1, 2))]) == 8 * (1 + 4 + 3)
    assert change_bytes([Replan((Partition(0, 0, 0, 1, 1, (0,), (4, 5)),))]) == 8 * (1 + 8)
