"""Compile the loops of statistics and planning once: ``python -m roost.balance``.

As for the kernel: without this the first rounds of a fresh installation wait for the compiler.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, NoChange, Rebalance, apply_changes
from roost.balance.plan import Plan
from roost.balance.planner import CellLoad, CostRates, GlobalPlanner
from roost.balance.strategies import Strategy, initial_plan
from roost.balance.swarm import Report, ShedRequest, Swarm, shed
from roost.space import Grid, Rect
from roost.workload import CellCounter, EulerHistogram, MachineStats, PartitionStats

SIDE = 40
MACHINES = 6


def warm() -> int:
    """Balance a small cluster under hotspots with both policies; returns the plan changes."""
    rng = np.random.default_rng(1)
    grid = Grid(Rect(0.0, 0.0, 1.0, 1.0), SIDE, SIDE)
    queries = EulerHistogram(SIDE, SIDE)
    low = rng.integers(0, SIDE - 2, (400, 2)).astype(np.int32)
    ranges = np.hstack([low, low + 1]).astype(np.int32)
    queries.add(ranges)
    plan = initial_plan(Strategy.UNIFORM, grid, MACHINES)
    planner = GlobalPlanner()
    changes = 0
    for corner in (0, 15, 30, 38):
        points = rng.poisson(3.0, (SIDE, SIDE)).astype(np.float64)
        points[corner : corner + 6, corner : corner + 6] += 400.0
        load = CellLoad(points.reshape(-1))
        for rounds in ([load], [load, load]):
            rates = CostRates(1e-7, 2e-9, 1e-5, 1e-8)
            decision = planner.decide(plan, rounds, queries, rates)
            if isinstance(decision, Rebalance):
                plan = apply_changes(plan, decision.changes)
                changes += 1
    return changes + _shed_once(initial_plan(Strategy.SWARM, grid, MACHINES), ranges, rng)


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
    reports = [Report(m, stats.numerator(), stats.received()) for m, stats in enumerate(machines)]

    def ask(machine: int, request: ShedRequest) -> tuple[Change, ...]:
        return shed(machines[machine], machine, request)

    decision = Swarm().decide(plan, reports, 1.0, ask)
    return 0 if isinstance(decision, NoChange) else 1


if __name__ == "__main__":
    started = time.perf_counter()
    assert warm() > 0
    print(f"balancer compiled in {time.perf_counter() - started:.1f} s")
