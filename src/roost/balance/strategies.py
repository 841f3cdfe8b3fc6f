"""Balancing strategies and their initial plans.

Three strategies are static. ``replicated``: every machine has every query, and points alternate
between machines. ``uniform``: the largest partition by area is halved across its longer side until
there is one per machine. ``history``: the costliest partition of a sample is split where the costs
of the parts differ least.

Two strategies adapt the plan while the stream runs: ``swarm`` starts from the uniform plan, as in
the paper; ``global`` from a sample, if there is one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roost.balance.plan import Partition, Plan
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.model.space import Grid
from roost.workload import overlap_counts, query_ranges


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


@dataclass(frozen=True)
class History:
    """Cost of each cell, from a sample of points and queries.

    A point costs one look-up and one check for every query that overlaps its cell.
    """

    cost: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        grid: Grid,
        x: NDArray[np.float64],
        y: NDArray[np.float64],
        boxes: NDArray[np.float64],
    ) -> History:
        """Compute costs from point coordinates and query bounds ``x0, y0, x1, y1``."""
        points = np.bincount(grid.locate(x, y), minlength=grid.cells).astype(np.float64)
        queries = overlap_counts(grid.columns, grid.rows, query_ranges(grid, boxes))
        return cls((points * (1.0 + queries.reshape(-1))).reshape(grid.rows, grid.columns))


def initial_plan(
    strategy: Strategy, grid: Grid, machines: int, history: History | None = None
) -> Plan:
    """Build the plan of epoch 0.

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
    if strategy in (Strategy.UNIFORM, Strategy.SWARM) or (
        strategy is Strategy.GLOBAL and history is None
    ):
        partitions = _halve(grid, machines)
    else:
        if history is None:
            takes = "a sample of points to learn from"
            raise ConfigError("engine.strategy", strategy.value, takes)
        partitions = _split_by_cost(grid, machines, history.cost)
    owned = tuple(replace(p, machines=(m,)) for m, p in enumerate(partitions))
    next_id = max(p.partition_id for p in owned) + 1
    return Plan(0, grid.columns, grid.rows, machines, owned, next_id)


def _cut(p: Partition, vertical: bool, at: int, next_id: int) -> tuple[Partition, Partition]:
    if vertical:
        first, second = replace(p, column1=at), replace(p, column0=at)
    else:
        first, second = replace(p, row1=at), replace(p, row0=at)
    return replace(first, partition_id=next_id), replace(second, partition_id=next_id + 1)


def _halve(grid: Grid, machines: int) -> list[Partition]:
    """Halve the partition of the largest area; ties are broken by the lower id."""
    heap = [(-grid.cells, 0, Partition(0, 0, 0, grid.columns, grid.rows, ()))]
    next_id = 1
    while len(heap) < machines:
        _, _, p = heapq.heappop(heap)
        vertical = p.column1 - p.column0 >= p.row1 - p.row0
        middle = (p.column0 + p.column1) // 2 if vertical else (p.row0 + p.row1) // 2
        for part in _cut(p, vertical, middle, next_id):
            heapq.heappush(heap, (-part.cells, part.partition_id, part))
        next_id += 2
    return [p for _, _, p in sorted(heap, key=lambda item: item[1])]


def _split_by_cost(grid: Grid, machines: int, cost: NDArray[np.float64]) -> list[Partition]:
    """Split the costliest partition where the costs of its parts differ least."""
    sums = np.pad(cost.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def total(p: Partition) -> float:
        return float(
            sums[p.row1, p.column1]
            - sums[p.row0, p.column1]
            - sums[p.row1, p.column0]
            + sums[p.row0, p.column0]
        )

    def entry(p: Partition) -> tuple[bool, float, int, Partition]:
        return (p.cells == 1, -total(p), p.partition_id, p)

    heap = [entry(Partition(0, 0, 0, grid.columns, grid.rows, ()))]
    next_id = 1
    while len(heap) < machines:
        _, negative, _, p = heapq.heappop(heap)
        vertical, at = _best_cut(p, sums, -negative)
        for part in _cut(p, vertical, at, next_id):
            heapq.heappush(heap, entry(part))
        next_id += 2
    return [p for _, _, _, p in sorted(heap, key=lambda item: item[2])]


def _best_cut(p: Partition, sums: NDArray[np.float64], total: float) -> tuple[bool, int]:
    """Return the cut with the least difference; ties go to the middle, then to columns."""
    best = (float("inf"), float("inf"), False, 0)
    for vertical in (True, False):
        low, high = (p.column0, p.column1) if vertical else (p.row0, p.row1)
        if high - low < 2:
            continue
        lines = np.arange(low + 1, high)
        if vertical:
            left = sums[p.row1, lines] - sums[p.row0, lines]
            left = left - (sums[p.row1, low] - sums[p.row0, low])
        else:
            left = sums[lines, p.column1] - sums[lines, p.column0]
            left = left - (sums[low, p.column1] - sums[low, p.column0])
        difference = np.abs(total - 2.0 * left)
        off_centre = np.abs(lines - (low + high) / 2.0)
        place = np.lexsort((off_centre, difference))[0]
        best = min(
            best,
            (float(difference[place]), float(off_centre[place]), not vertical, int(lines[place])),
        )
    return not best[2], best[3]
