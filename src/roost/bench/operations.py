"""Microseconds of what SWARM's machines do, as in figures 6.12 and 6.13 of the dissertation.

Each operation is the engine's own code, on one core, and its time is the minimum of some passes:
routing of points and queries, admission of queries to the index, search for a reduction on the
costliest machine, and receipt of a partition by its new machine. Files are in the page cache.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan
from roost.balance.global_index import GlobalIndex
from roost.balance.strategies import initial_plan, sampled_costs
from roost.balance.swarm import ShedRequest, ShedTarget, machine_cost, shed
from roost.bench.common import Row
from roost.bench.moving import MovingLoad
from roost.bench.streams import admit
from roost.kernel import Index, preload
from roost.model.choices import Strategy
from roost.model.schemas import PointBlock
from roost.queries.partitions import bounds_of
from roost.stages.routing import SpatialRouting
from roost.storage.cache import WorkerCache
from roost.workload import CellCounter, MachineStats, PartitionStats
from roost.workload.cells import query_ranges

PASSES = 5


def operation_rows(load: MovingLoad, machines: int) -> list[Row]:
    """Measure the operations on the first round of a load."""
    space, grid = load.space, load.space.grid
    ranges = query_ranges(grid, load.boxes)
    sample = load.history()
    places = load.pickups.lon[sample], load.pickups.lat[sample]
    plan = initial_plan(Strategy.HISTORY, grid, machines, sampled_costs(grid, *places, load.boxes))
    block = _block(load.step(0).points)
    routing, cache = SpatialRouting(plan, space), WorkerCache()
    index = GlobalIndex(plan)
    stats = _statistics(plan, grid.locate(block.x, block.y), ranges)
    costs = [machine_cost(one) for one in stats]
    high, low = int(np.argmax(costs)), int(np.argmin(costs))
    received = sum(one.received() for one in stats)
    request = ShedRequest((ShedTarget(low, costs[low] / received),), received, plan.next_id)
    given = max(plan.of_machine(high), key=lambda p: p.cells)
    arrays = stats[high].to_arrays()
    with tempfile.TemporaryDirectory() as name:
        numbers = iter(range(PASSES + 1))

        def admitted() -> Index:
            return Index(space, admit(Path(name) / str(next(numbers)), space, load.standing()))

        found = admitted()
        corners = np.array([bounds_of(given, space)])
        measured = {
            "routing of a point": (lambda: list(routing.split("", block, cache)), block.size),
            "routing of a query": (lambda: index.overlaps_many(ranges), len(ranges)),
            "admission of a query to the index": (admitted, len(ranges)),
            "statistics of a query": (lambda: stats[high].add_queries(ranges), len(ranges)),
            "search for a reduction": (lambda: shed(stats[high], high, request), 1),
            "receipt of a partition: queries": (lambda: preload(found, corners), 1),
            "receipt of a partition: statistics": (lambda: MachineStats.from_arrays(arrays), 1),
        }
        return [
            {
                "load": "operations",
                "machines": machines,
                "queries": load.queries,
                "operation": operation,
                "microseconds": 1e6 * _least(call) / count,
            }
            for operation, (call, count) in measured.items()
        ]


def _least(call: Callable[[], object]) -> float:
    """Return the processor seconds of a call: the minimum, after one that compiles and maps."""
    spent = []
    for _ in range(PASSES):
        begun = time.process_time()
        call()
        spent.append(time.process_time() - begun)
    return min(spent)


def _block(points: pa.Table) -> PointBlock:
    x, y = points["lon"].to_numpy(), points["lat"].to_numpy()
    times = points["event_time"].cast(pa.int64()).to_numpy()
    return PointBlock(x, y, times, points["id"].combine_chunks(), {})


def _statistics(
    plan: Plan, cells: NDArray[np.int32], ranges: NDArray[np.int32]
) -> list[MachineStats]:
    """Return each machine's statistics after one round."""
    counter = CellCounter(plan.columns * plan.rows)
    counter.add(cells)
    counts = counter.take()
    found = []
    for machine in range(plan.machines):
        parts = [PartitionStats(p.partition_id, *p.bounds) for p in plan.of_machine(machine)]
        own = MachineStats(parts)
        own.add_cells(counts, plan.columns)
        own.add_queries(ranges)
        own.close_round()
        found.append(own)
    return found
