"""How a machine sheds load: whole partitions that fit, or a part of one.

Both searches want two machines to cost the same afterwards. Whole partitions come first, for they
move as they are: a subset sum, solved greedily from the largest down. Where no subset does, one
partition is cut.

Along an axis the cost of the part that moves grows with the cut, and what stays behind shrinks,
so the place where the two machines meet is found by binary search: once for each axis and each
of the two sides that might move. Statistics in which queries ended in the last round may break
that order (fewer objects are received in more rows); then the cut that is found can be off, never
the cost that it is judged by.

The papers take the cut with the smallest difference between the machines. That passes over a
better cut: costs are products, so a cut that parts queries well may leave both machines cheaper,
though not alike. Here the cut with the lowest *higher* cost wins; equal ones by difference.

A cost is ``(N * Q * R) ** power / R(S)``. The papers' is with a power of one; ``swarm.py`` says why
there is another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roost.workload.trio import PartitionStats, Trio

PAPER_POWER = 1.0


def cost_of(trio: Trio, received_total: float, power: float = PAPER_POWER) -> float:
    """Cost of a partition, or of a part of one."""
    cost: float = trio.numerator**power / received_total
    return cost


def best_subset(costs: Mapping[int, float], limit: float) -> list[int]:
    """Choose partitions that cost at most ``limit`` together, the costliest first.

    Partitions that cost nothing are never chosen: moving them gains nothing.

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
    """A cut, which side of it moves, and what both machines cost afterwards."""

    vertical: bool
    at: int
    move_first: bool
    cost_high: float
    cost_low: float

    @property
    def higher(self) -> float:
        """What the costlier machine of the two costs."""
        return max(self.cost_high, self.cost_low)

    @property
    def difference(self) -> float:
        """By how much the machines differ."""
        return abs(self.cost_high - self.cost_low)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Every cut of one partition along one axis, with one side moved; costs are looked up."""

    stats: PartitionStats
    rest: float  # what the machine with the higher cost has beside this partition
    low: float
    received_total: float
    power: float
    vertical: bool
    move_first: bool

    @property
    def lines(self) -> range:
        """Where the second part may begin."""
        s = self.stats
        start, stop = (s.column0, s.column1) if self.vertical else (s.row0, s.row1)
        return range(start + 1, stop)

    def at(self, line: int) -> SplitChoice:
        """Costs with the second part beginning at ``line``."""
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
        """Cuts on both sides of where the machines would cost the same."""
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

    def all(self) -> Iterable[SplitChoice]:
        """Every cut there is."""
        return map(self.at, self.lines)


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
        Of the partition to cut.
    cost_high, cost_low
        What the machine that has it and the machine that is to get a part of it cost now.
    received_total
        R(S), by which a numerator is divided.
    power
        Of the numerator.

    Returns
    -------
    SplitChoice or None
        None where the partition is a single cell, or no cut found lowers the higher cost.
    """
    sides = _sides(stats, cost_high, cost_low, received_total, power)
    return _best([choice for cuts in sides for choice in cuts.by_search()], cost_high)


def exhaustive_split(
    stats: PartitionStats,
    cost_high: float,
    cost_low: float,
    received_total: float,
    power: float = PAPER_POWER,
) -> SplitChoice | None:
    """Find the best cut by trying every one: what :func:`best_split` is measured against."""
    sides = _sides(stats, cost_high, cost_low, received_total, power)
    return _best([choice for cuts in sides for choice in cuts.all()], cost_high)


def _sides(
    stats: PartitionStats, cost_high: float, cost_low: float, received_total: float, power: float
) -> list[_Cuts]:
    rest = cost_high - cost_of(stats.total(), received_total, power)
    return [
        _Cuts(stats, rest, cost_low, received_total, power, vertical, move_first)
        for vertical in (True, False)
        for move_first in (True, False)
    ]


def _best(choices: list[SplitChoice], cost_high: float) -> SplitChoice | None:
    """Lowest higher cost; ties by difference, then columns before rows, then the lower line."""
    better = [choice for choice in choices if choice.higher < cost_high]
    if not better:
        return None
    return min(
        better, key=lambda c: (c.higher, c.difference, not c.vertical, c.at, not c.move_first)
    )
