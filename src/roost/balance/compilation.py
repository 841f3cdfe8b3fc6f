"""Compile the loops of the statistics and the planner."""

from __future__ import annotations

import numpy as np

from roost.balance.changes import Rebalance, apply_changes
from roost.balance.global_index import GlobalIndex
from roost.balance.planner import CostRates, GlobalPlanner
from roost.balance.strategies import initial_plan, sampled_costs
from roost.balance.swarm import ShedRequest, ShedTarget, shed
from roost.model.arrays import Floats, frozen
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect
from roost.workload import CellCounter, EulerHistogram, MachineStats, PartitionStats
from roost.workload.query_loops import changed_rows, cut_boxes, differing_slots, live_rows

SIDE = 8
MACHINES = 6


def compile_loops() -> None:
    """Plan rounds of skewed load, shed load of one machine, count queries and their changes."""
    rng = np.random.default_rng(1)
    grid = Grid(Rect(0.0, 0.0, 1.0, 1.0), SIDE, SIDE)
    low = rng.integers(0, SIDE - 2, (400, 2))
    ranges = np.hstack([low, low + 1]).astype(np.int32)
    queries = EulerHistogram(SIDE, SIDE)
    queries.add(ranges)
    queries.count_many(ranges)
    plan = initial_plan(Strategy.UNIFORM, grid, MACHINES)
    rounds: list[Floats] = []
    rates = CostRates(1e-7, 2e-9, 1e-5, 1e-8)
    for _ in range(3):
        # Cells that no machine can hold alone are shared, and then the grid is divided again.
        rounds.append(rng.permutation(np.geomspace(1.0, 1e7, grid.cells)))
        decision = GlobalPlanner().decide(plan, rounds, queries, rates)
        assert isinstance(decision, Rebalance), "the planner changed nothing"
        plan = apply_changes(plan, decision.changes)
    GlobalIndex(plan).overlaps_many(ranges)
    sampled_costs(grid, rng.random(9), rng.random(9), np.array([[0.1, 0.1, 0.2, 0.2]]))

    counter = CellCounter(grid.cells)
    counter.add(rng.integers(0, grid.cells // 8, 20_000).astype(np.int32))
    stats = MachineStats([PartitionStats(0, 0, 0, SIDE, SIDE)])
    stats.add_queries(ranges)
    stats.add_cells(counter.take(), SIDE)
    stats.features()
    stats.close_round()
    for part in stats.partitions.values():
        part.change_queries(ranges[:2], ranges[2:4], np.array([True, False]))
    assert shed(stats, 0, ShedRequest((ShedTarget(1, 0.0),), 1.0, 1)), "no load was shed"

    boxes, numbers = frozen(np.array([[0.1, 0.1, 0.2, 0.2]])), np.arange(1)
    cut_boxes(boxes, numbers, (0.0, 0.0, 1.0, 1.0), (grid.edges_x, grid.edges_y))
    live_rows(numbers, numbers, numbers, 0)
    slots, returned = differing_slots(numbers, numbers + 1)
    changed_rows(numbers, numbers, numbers, slots, returned, numbers, 0, 1)
