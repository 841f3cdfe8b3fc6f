"""Compile the loops of the statistics and the planner."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, NoChange, Rebalance, apply_changes
from roost.balance.global_index import GlobalIndex
from roost.balance.plan import Plan
from roost.balance.planner import CellLoad, CostRates, GlobalPlanner
from roost.balance.strategies import History, initial_plan
from roost.balance.swarm import LoadReport, ShedRequest, Swarm, shed
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect
from roost.workload import CellCounter, EulerHistogram, MachineStats, PartitionStats

SIDE = 40
MACHINES = 6
RATES = CostRates(1e-7, 2e-9, 1e-5, 1e-8)


def compile_loops() -> None:
    """Balance small clusters by both policies, and count queries as the first plan does."""
    rng = np.random.default_rng(1)
    grid = Grid(Rect(0.0, 0.0, 1.0, 1.0), SIDE, SIDE)
    ranges = _ranges(SIDE, rng)
    hotspots = []
    for corner in (0, 15, 30, 38):
        points = rng.poisson(3.0, (SIDE, SIDE)).astype(np.float64)
        points[corner : corner + 6, corner : corner + 6] += 400.0
        hotspots.append(points.reshape(-1))
    changes = _plan_rounds(grid, hotspots, ranges)
    # Cells that no machine can hold alone are shared, and then the grid is divided anew.
    small = Grid(grid.bounds, 8, 8)
    skewed = [rng.permutation(np.geomspace(1.0, 1e7, small.cells)) for _ in range(3)]
    changes += _plan_rounds(small, skewed, _ranges(8, rng))
    plan = initial_plan(Strategy.SWARM, grid, MACHINES)
    changes += _shed_once(plan, ranges, rng)
    assert changes > 0, "no policy changed a plan"
    GlobalIndex(plan).overlaps_many(ranges)
    History.of(grid, rng.random(9), rng.random(9), np.array([[0.1, 0.1, 0.2, 0.2]]))


def _ranges(side: int, rng: np.random.Generator) -> NDArray[np.int32]:
    low = rng.integers(0, side - 2, (400, 2)).astype(np.int32)
    return np.hstack([low, low + 1]).astype(np.int32)


def _plan_rounds(grid: Grid, loads: list[NDArray[np.float64]], ranges: NDArray[np.int32]) -> int:
    """Let the global planner see each load for one and for two rounds; count its changes."""
    queries = EulerHistogram(grid.columns, grid.rows)
    queries.add(ranges)
    queries.count_many(ranges)
    plan = initial_plan(Strategy.UNIFORM, grid, MACHINES)
    planner = GlobalPlanner()
    changes = 0
    for points in loads:
        load = CellLoad(points)
        for rounds in ([load], [load, load]):
            decision = planner.decide(plan, rounds, queries, RATES)
            if isinstance(decision, Rebalance):
                plan = apply_changes(plan, decision.changes)
                changes += 1
    return changes


def _shed_once(plan: Plan, ranges: NDArray[np.int32], rng: np.random.Generator) -> int:
    counter = CellCounter(SIDE * SIDE)
    counter.add(rng.integers(0, SIDE * SIDE // 8, 20_000).astype(np.int32))
    counts = counter.take()
    machines = []
    for machine in range(MACHINES):
        stats = MachineStats(
            PartitionStats(p.partition_id, p.column0, p.row0, p.column1, p.row1)
            for p in plan.of_machine(machine)
        )
        stats.add_queries(ranges)
        stats.add_cells(counts, SIDE)
        stats.features()
        stats.close_round()
        machines.append(stats)
    reports = [
        LoadReport(m, stats.numerator(), stats.received()) for m, stats in enumerate(machines)
    ]

    def send(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        return shed(machines[machine], machine, request)

    decision = Swarm().decide(plan, reports, 1.0, send)
    return 0 if isinstance(decision, NoChange) else 1
