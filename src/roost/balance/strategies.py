"""Balancing strategies and their initial plans.

Three strategies are static. ``replicated``: every machine has every query and processes a share of
all points. ``uniform``: the largest partition by area is halved across its longer side until
there is one per machine. ``history``: the costliest partition of a sample is split where the costs
of the parts differ least.

Two strategies adapt the plan while the stream runs, ``swarm`` and ``global``. They start from a
sample, if there is one; the papers' SWARM starts from equal areas.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from roost.balance.plan import Partition, Plan
from roost.errors import ConfigError
from roost.model.arrays import Floats
from roost.model.choices import Strategy
from roost.model.space import Grid
from roost.workload import EulerHistogram, query_ranges


def default_strategy(master: str) -> Strategy:
    """Return the default strategy for a Spark master.

    On one host all workers share one copy of the queries, and alternating points between machines
    balances any load without a shuffle. On several hosts, work must be placed and balanced.

    Examples
    --------
    >>> default_strategy("local[4]").value, default_strategy("yarn").value
    ('replicated', 'global')
    """
    one_host = master == "local" or master.startswith("local[")
    return Strategy.REPLICATED if one_host else Strategy.GLOBAL


def sampled_costs(grid: Grid, x: Floats, y: Floats, boxes: Floats) -> Floats:
    """Return the cost of each cell, from point coordinates and query bounds ``x0, y0, x1, y1``.

    A point costs one look-up and one check for every query that overlaps its cell.
    """
    points = np.bincount(grid.locate(x, y), minlength=grid.cells).astype(np.float64)
    queries = EulerHistogram(grid.columns, grid.rows)
    queries.add(query_ranges(grid, boxes))
    return points.reshape(grid.rows, grid.columns) * (1.0 + queries.per_cell())


def initial_plan(
    strategy: Strategy, grid: Grid, machines: int, costs: Floats | None = None
) -> Plan:
    """Build the plan of epoch 0, from the cost of each cell if the strategy uses it.

    Examples
    --------
    >>> from roost.model.space import Rect
    >>> plan = initial_plan(Strategy.UNIFORM, Grid(Rect(0, 0, 1, 1), 10, 10), 4)
    >>> sorted(p.cells for p in plan.partitions)
    [25, 25, 25, 25]
    """
    if strategy is Strategy.REPLICATED:
        whole = Partition(0, 0, 0, grid.columns, grid.rows, tuple(range(machines)))
        return Plan(0, grid.columns, grid.rows, machines, (whole,), 1)
    if machines > grid.cells:
        takes = f"at most one a cell, the grid has {grid.cells}"
        raise ConfigError("engine.machines", machines, takes)
    if strategy is Strategy.HISTORY and costs is None:
        takes = "a sample of points to learn from"
        raise ConfigError("engine.strategy", strategy, takes)
    if costs is None or strategy is Strategy.UNIFORM:
        partitions = _divide(grid, machines, lambda p: (-p.cells,), _halve)
    else:
        sums = np.pad(costs.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        partitions = _divide(
            grid,
            machines,
            lambda p: (p.cells == 1, -_total(p, sums)),
            lambda p: _best_cut(p, sums, _total(p, sums)),
        )
    owned = tuple(replace(p, machines=(m,)) for m, p in enumerate(partitions))
    next_id = max(p.partition_id for p in owned) + 1
    return Plan(0, grid.columns, grid.rows, machines, owned, next_id)


def _divide(
    grid: Grid,
    machines: int,
    rank: Callable[[Partition], tuple[float, ...]],
    best_cut: Callable[[Partition], tuple[bool, int]],
) -> list[Partition]:
    """Cut the partition of the lowest rank until there is one per machine; ties by lower id."""

    def entry(p: Partition) -> tuple[tuple[float, ...], int, Partition]:
        return rank(p), p.partition_id, p

    heap = [entry(Partition(0, 0, 0, grid.columns, grid.rows, ()))]
    for first_id in range(1, 2 * machines - 1, 2):
        _, _, p = heapq.heappop(heap)
        vertical, at = best_cut(p)
        if vertical:
            sides = replace(p, column1=at), replace(p, column0=at)
        else:
            sides = replace(p, row1=at), replace(p, row0=at)
        for number, side in enumerate(sides, first_id):
            heapq.heappush(heap, entry(replace(side, partition_id=number)))
    return [p for _, _, p in sorted(heap, key=lambda item: item[1])]


def _halve(p: Partition) -> tuple[bool, int]:
    """Return the cut in the middle of the longer side."""
    vertical = p.column1 - p.column0 >= p.row1 - p.row0
    return vertical, (p.column0 + p.column1) // 2 if vertical else (p.row0 + p.row1) // 2


def _total(p: Partition, sums: Floats) -> float:
    above = sums[p.row1, p.column1] - sums[p.row0, p.column1]
    return float(above - sums[p.row1, p.column0] + sums[p.row0, p.column0])


def _best_cut(p: Partition, sums: Floats, total: float) -> tuple[bool, int]:
    """Return the cut with the least difference; ties go to the middle, then to columns."""
    best = (float("inf"), float("inf"), False, 0)
    for vertical in (True, False):
        low, high = (p.column0, p.column1) if vertical else (p.row0, p.row1)
        if high - low < 2:
            continue
        if vertical:
            line_sums = sums[p.row1, low:high] - sums[p.row0, low:high]
        else:
            line_sums = sums[low:high, p.column1] - sums[low:high, p.column0]
        lines = np.arange(low + 1, high)
        difference = np.abs(total - 2.0 * (line_sums[1:] - line_sums[0]))
        off_centre = np.abs(lines - (low + high) / 2.0)
        place = np.lexsort((off_centre, difference))[0]
        best = min(
            best,
            (float(difference[place]), float(off_centre[place]), not vertical, int(lines[place])),
        )
    return not best[2], best[3]
