"""Cost of a partition and of both sides of any cut, as a machine computes it from its statistics.

The papers' cost is a product, ``N * Q * R``. It falls to a quarter when a partition is halved,
although the machine has the same work: a machine with many partitions looks idle and receives more,
so a plan made by splits is never at rest. *Work* is an estimate of what a machine did in a round,
and is additive: objects received, each ``PER_OBJECT`` checks, and pairs of an object and a query
over its cell. Rows alone give the pairs if all queries were as wide as the partition; columns give
the share of the width that they have. So pairs are ``by row * by column / (R * Q)``, which is exact
if rows and columns are independent.

Why pieces cost what the whole did: a cut divides the sum over rows (or columns) without a rest,
because the queries over a line do not depend on the partition's borders, and under independence
the other factor is the same on both sides. The papers' cost has three factors that all shrink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roost.workload.loops import axis_work
from roost.workload.trio import AxisStats, PartitionStats

# Checks of a query that take as long as the rest of an object: to route, sort and look it up.
PER_OBJECT = 50.0

# Costs of both sides of a cut, by orientation and first line of the second side.
Sides = Callable[[bool, int], tuple[float, float]]


class Cost(Protocol):
    """How costly a partition is."""

    #: Power of the input to which costs are proportional: by how much a spread of loads grows.
    power: float

    def of(self, stats: PartitionStats) -> float:
        """Return the cost of a partition."""

    def sides(self, stats: PartitionStats) -> Sides:
        """Return a function that gives the costs of both sides of a cut in constant time."""


@dataclass(frozen=True, slots=True)
class ProductCost:
    """The papers' cost, before the division by R(S)."""

    power = 2.0  # N and R are both proportional to the input

    def of(self, stats: PartitionStats) -> float:
        """Return the cost of a partition."""
        return stats.total().numerator

    def sides(self, stats: PartitionStats) -> Sides:
        """Return the costs of both sides of a cut."""

        def sides(vertical: bool, at: int) -> tuple[float, float]:
            first, second = stats.split(vertical, at)
            return first.numerator, second.numerator

        return sides


@dataclass(frozen=True, slots=True)
class WorkCost:
    """Work of the last round, in checks of a query; ``per_object`` for each object received."""

    per_object: float = PER_OBJECT
    power = 1.0

    def of(self, stats: PartitionStats) -> float:
        """Return the cost of a partition."""
        total = stats.total()
        by_row, by_column = (float(self._pairs(axis)[-1]) for axis in (stats.rows, stats.columns))
        pairs = by_row * by_column / (total.r * total.q) if total.r * total.q > 0.0 else 0.0
        return self.per_object * total.r + pairs

    def sides(self, stats: PartitionStats) -> Sides:
        """Return the costs of both sides of a cut."""
        total = stats.total()
        by_row, by_column = self._pairs(stats.rows), self._pairs(stats.columns)
        known = total.r * total.q

        def sides(vertical: bool, at: int) -> tuple[float, float]:
            along, across = (by_column, by_row) if vertical else (by_row, by_column)
            before = along[at - (stats.column0 if vertical else stats.row0) - 1]
            share = float(across[-1]) / known if known > 0.0 else 0.0
            first, second = stats.split(vertical, at)
            return (
                self.per_object * first.r + float(before) * share,
                self.per_object * second.r + float(along[-1] - before) * share,
            )

        return sides

    @staticmethod
    def _pairs(axis: AxisStats) -> NDArray[np.float64]:
        """Sum objects times queries over their line, up to each line."""
        return axis_work(axis.numbers)
