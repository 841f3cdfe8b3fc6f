"""What TrioStat keeps and sends against AQWA: the dissertation's figures 6.2 to 6.4.

Sizes are those of the objects themselves up to a thousand partitions and a side of 1600 cells, and
worked out beyond. TrioStat keeps eight numbers for each row and column of every partition: fewest
where partitions are squares, most where they are strips one cell wide. It keeps them as float64,
AQWA most of its own as int32, so a ratio of bytes says less for TrioStat than one of numbers.
"""

from __future__ import annotations

from typing import Any

from roost.balance.plan import Plan
from roost.balance.strategies import initial_plan
from roost.bench.aqwa import NUMBERS_PER_CELL, AqwaStats
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect
from roost.workload import MachineStats, PartitionStats
from roost.workload.loops import LINES

Row = dict[str, Any]

MACHINES = 22
GRID_SIDE = 1000
BYTES_PER_REPORT = 16
PARTITIONS_MADE = 1000
SIDE_MADE = 1600


def machine_stats(plan: Plan) -> list[MachineStats]:
    """Empty statistics of every machine of a plan."""
    owned: list[list[PartitionStats]] = [[] for _ in range(plan.machines)]
    for p in plan.partitions:
        for machine in p.machines:
            owned[machine].append(
                PartitionStats(p.partition_id, p.column0, p.row0, p.column1, p.row1)
            )
    return [MachineStats(parts) for parts in owned]


def lines_kept(side: int, partitions: int, square: bool) -> int:
    """Rows and columns of all partitions of a grid: as few as can be, or as many."""
    if square:
        return int(2 * side * partitions**0.5 + 0.5)
    strips = min(partitions, side)
    rest = side - (strips - 1)
    return (strips - 1) * (side + 1) + side + rest + (partitions - strips)


def trio_bytes(side: int, partitions: int, square: bool) -> int:
    """Storage of TrioStat's numbers."""
    if partitions > PARTITIONS_MADE or partitions > side:
        return lines_kept(side, partitions, square) * LINES * 8
    if square:
        plan = initial_plan(Strategy.UNIFORM, Grid(Rect(0, 0, 1, 1), side, side), partitions)
        return sum(machine.nbytes for machine in machine_stats(plan))
    strips = [PartitionStats(k, k, 0, k + 1, side).nbytes for k in range(partitions - 1)]
    return sum(strips) + PartitionStats(partitions, partitions - 1, 0, side, side).nbytes


def aqwa_bytes(side: int) -> tuple[int, int]:
    """Storage of AQWA's numbers, and what is sent of them each round."""
    made = AqwaStats(min(side, SIDE_MADE), min(side, SIDE_MADE))
    times = (side / min(side, SIDE_MADE)) ** 2
    return round(made.nbytes * times), round(made.bytes_per_round * times)


def _storage_row(side: int, partitions: int, varied: str) -> Row:
    best, worst = (trio_bytes(side, partitions, square) for square in (True, False))
    lines = [lines_kept(side, partitions, square) for square in (True, False)]
    theirs = aqwa_bytes(side)[0]
    return {
        "case": f"storage-by-{varied}",
        "system": "trio",
        "side": side,
        "partitions": partitions,
        "best_bytes": best,
        "worst_bytes": worst,
        "aqwa_bytes": theirs,
        "best_numbers": LINES * lines[0],
        "worst_numbers": LINES * lines[1],
        "aqwa_numbers": 2 * NUMBERS_PER_CELL * side * side,
        "ratio_best": theirs / best,
        "ratio_worst": theirs / worst,
    }


def storage_by_partitions() -> list[Row]:
    """Figure 6.3: a grid of a million cells, in ever more partitions."""
    return [_storage_row(GRID_SIDE, 10**k, "partitions") for k in range(7)]


def storage_by_side() -> list[Row]:
    """Figure 6.4: a thousand partitions, on ever finer grids."""
    return [_storage_row(100 * 2**k, 1000, "side") for k in range(7)]


def bytes_by_machines() -> list[Row]:
    """Figure 6.2: what has to reach the coordinator each round before it can decide."""
    sent = aqwa_bytes(GRID_SIDE)[1]
    return [
        {
            "case": "bytes-per-round",
            "system": "trio",
            "machines": machines,
            "bytes": BYTES_PER_REPORT * machines,
            "aqwa_bytes": sent,
            "ratio": sent / (BYTES_PER_REPORT * machines),
        }
        for machines in (MACHINES, 100, 1000, 10_000)
    ]
