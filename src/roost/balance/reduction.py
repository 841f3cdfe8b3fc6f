"""Load reduction: which partitions, or which part of one, a machine sheds.

Both searches try to equalise the cost of two machines. Whole partitions are preferred, because they
move unchanged: a subset sum, solved greedily from the largest down. If no subset fits, one
partition is split.

Along an axis, the cost of the part that moves grows with the cut and the rest shrinks, so the cut
that equalises the machines is found by binary search: once for each axis and each side that may
move. Queries terminated in the last round may break that order (more rows may have received fewer
objects); then the search may miss the best cut, but the cost of the cut it finds is exact.

The papers choose the cut with the smallest difference between the machines. That misses better
cuts: costs are products, so a cut that separates queries well may leave both machines cheaper, but
not equal. Here the cut with the lowest *higher* cost wins; ties are broken by difference.

A cost is ``(N * Q * R) ** power / R(S)``. The power is one in the papers; see ``swarm.py`` for the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roost.workload.trio import PartitionStats, Trio

PAPER_POWER = 1.0


def cost_of(trio: Trio, received_total: float, power: float = PAPER_POWER) -> float:
    """Return the cost of a partition, or of a part of one."""
    cost: float = trio.numerator**power / received_total
    return cost


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


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Every cut of one partition along one axis, with one side moved."""

    stats: PartitionStats
    rest: float  # cost of the other partitions of the costlier machine
    low: float
    received_total: float
    power: float
    vertical: bool
    move_first: bool

    @property
    def lines(self) -> range:
        """Columns or rows where the second part may begin."""
        s = self.stats
        start, stop = (s.column0, s.column1) if self.vertical else (s.row0, s.row1)
        return range(start + 1, stop)

    def at(self, line: int) -> SplitChoice:
        """Return the costs if the second part begins at ``line``."""
        first, second = self.stats.split(self.vertical, line)
        moved, kept = (first, second) if self.move_first else (second, first)
        return SplitChoice(
            self.vertical,
            line,
            self.move_first,
            self.rest + cost_of(kept, self.received_total, self.power),
            self.low + cost_of(moved, self.received_total, self.power),
        )

    def by_search(self) -> Iterable[SplitChoice]:
        """Return the cuts on both sides of the point where the machines cost the same."""
        lines = self.lines if self.move_first else self.lines[::-1]
        low, high = 0, len(lines)
        while low < high:
            middle = (low + high) // 2
            choice = self.at(lines[middle])
            if choice.cost_low < choice.cost_high:
                low = middle + 1
            else:
                high = middle
        return [self.at(line) for line in lines[max(low - 1, 0) : low + 1]]


def best_split(
    stats: PartitionStats,
    cost_high: float,
    cost_low: float,
    received_total: float,
    power: float = PAPER_POWER,
) -> SplitChoice | None:
    """Find the best cut by at most four binary searches.

    Parameters
    ----------
    stats
        Statistics of the partition to cut.
    cost_high, cost_low
        Present cost of the machine that owns it and of the machine that receives a part.
    received_total
        R(S), the divisor of costs.
    power
        Exponent of the numerator.

    Returns
    -------
    SplitChoice or None
        None if the partition is a single cell, or no cut found lowers the higher cost. Ties are
        broken by difference, then columns before rows, then the lower line.
    """
    rest = cost_high - cost_of(stats.total(), received_total, power)
    choices = [
        choice
        for vertical in (True, False)
        for move_first in (True, False)
        for choice in _Cuts(
            stats, rest, cost_low, received_total, power, vertical, move_first
        ).by_search()
        if choice.higher < cost_high
    ]
    return min(
        choices,
        key=lambda c: (c.higher, c.difference, not c.vertical, c.at, not c.move_first),
        default=None,
    )
