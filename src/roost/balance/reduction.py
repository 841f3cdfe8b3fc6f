"""Load reduction: which partitions, or which part of one, a machine sheds.

Both searches try to equalise the cost of two machines. Whole partitions are preferred, because they
move unchanged: a subset sum, solved greedily from the largest down. If no subset fits, one
partition is split.

Along an axis, the cost of the part that moves grows with the cut and the rest shrinks, so the cut
that equalises the machines is found by binary search: once for each axis and each side that may
move.

The papers choose the cut with the smallest *difference* between the machines. That misses better
cuts: a cut that separates queries well may leave both machines cheaper, but not equal. The other
criterion is the lowest *higher* cost; ties are broken by difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roost.balance.costs import Cost
from roost.workload.trio import PartitionStats


def best_subset(costs: Mapping[int, float], limit: float) -> list[int]:
    """Choose partitions that cost at most ``limit`` together, the costliest first.

    Partitions without cost are never chosen.

    Examples
    --------
    >>> best_subset({0: 7.0, 1: 5.0, 2: 4.0, 3: 0.0}, 10.0)
    [0]
    >>> best_subset({0: 7.0, 1: 3.0, 2: 4.0}, 10.0)
    [0, 1]
    """
    chosen: list[int] = []
    total = 0.0
    for number in sorted(costs, key=lambda number: (-costs[number], number)):
        if costs[number] > 0.0 and total + costs[number] <= limit:
            total += costs[number]
            chosen.append(number)
    return chosen


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """A cut, the side that moves, and the cost of both machines afterwards."""

    vertical: bool
    at: int
    move_first: bool
    cost_high: float
    cost_low: float

    @property
    def higher(self) -> float:
        """Cost of the costlier machine."""
        return max(self.cost_high, self.cost_low)

    @property
    def difference(self) -> float:
        """Difference between the machines' costs."""
        return abs(self.cost_high - self.cost_low)


def best_split(
    stats: PartitionStats,
    cost_high: float,
    cost_low: float,
    received_total: float,
    cost: Cost,
    *,
    least_higher: bool = True,
) -> SplitChoice | None:
    """Find the best cut of a partition by at most four binary searches.

    ``cost_high`` and ``cost_low`` are the present costs of the machine that owns the partition and
    of the machine that receives a part; ``received_total`` is R(S), by which costs are divided.
    With ``least_higher``, the cut with the lowest higher cost is the best, and ties are broken by
    difference; otherwise that with the smallest difference. Further ties go to columns before rows,
    then to the lower line. Returns None if the partition is a single cell, or no cut found lowers
    the higher cost.
    """
    rest = cost_high - cost.of(stats) / received_total
    sides = cost.sides(stats)

    def cut(vertical: bool, move_first: bool, line: int) -> SplitChoice:
        first, second = (side / received_total for side in sides(vertical, line))
        moved, kept = (first, second) if move_first else (second, first)
        return SplitChoice(vertical, line, move_first, rest + kept, cost_low + moved)

    def search(vertical: bool, move_first: bool) -> Iterator[SplitChoice]:
        """Yield the cuts on both sides of the point where the machines cost the same."""
        start, stop = (stats.column0, stats.column1) if vertical else (stats.row0, stats.row1)
        lines = range(start + 1, stop)[:: 1 if move_first else -1]
        low, high = 0, len(lines)
        while low < high:
            middle = (low + high) // 2
            choice = cut(vertical, move_first, lines[middle])
            if choice.cost_low < choice.cost_high:
                low = middle + 1
            else:
                high = middle
        for line in lines[max(low - 1, 0) : low + 1]:
            yield cut(vertical, move_first, line)

    searches = ((vertical, first) for vertical in (True, False) for first in (True, False))
    choices = [c for each in searches for c in search(*each) if c.higher < cost_high]

    def rank(c: SplitChoice) -> tuple[float, float]:
        return (c.higher, c.difference) if least_higher else (c.difference, c.higher)

    return min(
        choices, key=lambda c: (*rank(c), not c.vertical, c.at, not c.move_first), default=None
    )
