"""Simulated load on a grid of cells, round by round: points per cell, and queries.

The load is that of the papers (skewed in space, with temporary hotspots and their queries) for
grids and machine counts that no data set has. Single points would be far too many, so a round is a
table of weights, one per cell, and its points are one multinomial draw from it. Every draw has its
own random generator, keyed by seed, round and purpose: two strategies that admit the same number of
points see the same points, however many random numbers they draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints
from roost.workload.histogram import EulerHistogram

Ranges = NDArray[np.int32]
# Half-open column0, row0, column1, row1.
Rect = tuple[int, ...]

_POINTS, _QUERIES, _TOWNS = 1, 2, 3
_BASE_TAG = -1
# A normal hotspot's lifetime spans three deviations to either side, like those of the generators.
_DEVIATIONS = 6.0
# "All queries in a hotspot are instantiated during one minute": four rounds of 15 seconds.
_REGISTER_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class CellHotspot:
    """A temporary hotspot: a square with up to a share of all points, and queries.

    Parameters
    ----------
    center, side
        Column and row of its centre, and its side, as fractions of the grid's sides.
    spread
        Points uniform in the square, or normal around its centre with a deviation of ``side / 5``.
    intensity
        Full share at once, or a bell curve over its lifetime.
    queries
        Number of queries, registered in its first four rounds, terminated when it stops.
    """

    center: tuple[float, float]
    start: int
    stop: int
    share: float = 0.4
    side: float = 0.15
    spread: Literal["uniform", "normal"] = "uniform"
    intensity: Literal["step", "normal"] = "step"
    queries: int = 0

    def share_at(self, number: int) -> float:
        """Return its share of all points in a round."""
        if not self.start <= number < self.stop:
            return 0.0
        if self.intensity == "step":
            return self.share
        middle = (self.start + self.stop - 1) / 2
        deviation = (self.stop - self.start) / _DEVIATIONS
        return float(self.share * np.exp(-0.5 * ((number - middle) / deviation) ** 2))

    def weights(self, columns: int, rows: int) -> Floats:
        """Return the weights of its cells, ``(rows, columns)``, which sum to one."""
        axes = []
        for count, center in zip((rows, columns), reversed(self.center), strict=True):
            distance = np.abs((np.arange(count) + 0.5) / count - center)
            axis = (distance <= self.side / 2).astype(np.float64)
            if self.spread == "normal":
                axis = np.exp(-0.5 * (distance / (self.side / 5.0)) ** 2)
            # A square smaller than a cell covers the cell nearest to its centre.
            axis[np.argmin(distance)] = max(1.0, axis.max())
            axes.append(axis)
        both = np.outer(*axes)
        weights: Floats = both / both.sum()
        return weights


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Offered load.

    Parameters
    ----------
    points_per_round
        Points offered in each round; back-pressure may admit fewer.
    queries, churn
        Queries live from the first round on, and how many are replaced in each round.
    query_side
        Mean side of a query's range, as a fraction of the grid's side.
    towns
        Skew of the base load: number of centres whose sizes are proportional to 1/rank, over a
        uniform floor. Zero means a uniform load.
    swing
        Share of all points that alternates between two opposite corners every round.
    """

    points_per_round: int = 200_000
    queries: int = 5_000
    query_side: float = 0.02
    towns: int = 40
    churn: int = 0
    hotspots: tuple[CellHotspot, ...] = ()
    swing: float = 0.0


def overlap(ranges: Ranges, rect: Rect) -> NDArray[np.bool_]:
    """Return whether each query overlaps a rectangle."""
    column0, row0, column1, row1 = rect
    left, low, right, high = ranges.T
    over: NDArray[np.bool_] = (left < column1) & (right >= column0) & (low < row1) & (high >= row0)
    return over


class QueryTable:
    """All queries by id, and the true number of live ones over each cell.

    An id is a row number of :attr:`ranges`: inclusive ``column0, row0, column1, row1``.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.ranges: Ranges = np.empty((0, 4), np.int32)
        self.live = np.empty(0, np.bool_)
        self._tags = np.empty(0, np.int32)
        self._histogram = EulerHistogram(columns, rows)
        self.over = self._histogram.per_cell()

    def live_ids(self, tag: int | None = None) -> Ints:
        """Return the ids of live queries, of one hotspot (its number) if given."""
        return np.flatnonzero(self.live if tag is None else self.live & (self._tags == tag))

    def live_ranges(self) -> Ranges:
        """Return the ranges of live queries."""
        return self.ranges[self.live]

    def within(self, *rect: int) -> Ints:
        """Return the ids of live queries that overlap a half-open rectangle, by brute force."""
        return np.flatnonzero(self.live & overlap(self.ranges, rect))

    def counts(self, rects: Ints) -> Ints:
        """Count the live queries over each of many half-open rectangles ``(k, 4)``."""
        return self._histogram.count_many(rects)

    def register(self, ranges: Ranges, tag: int = _BASE_TAG) -> Ints:
        """Add queries and return their ids."""
        start, count = len(self.live), len(ranges)
        if count == 0:
            return np.empty(0, np.int64)
        self.ranges = np.concatenate([self.ranges, ranges])
        self.live = np.append(self.live, np.ones(count, np.bool_))
        self._tags = np.append(self._tags, np.full(count, tag, np.int32))
        self._count(ranges, 1)
        return np.arange(start, start + count)

    def end(self, ids: Ints) -> None:
        """Terminate queries."""
        assert bool(self.live[ids].all()), "a query is terminated twice"
        self.live[ids] = False
        if len(ids):
            self._count(self.ranges[ids], -1)

    def _count(self, ranges: Ranges, sign: int) -> None:
        self._histogram.add(ranges, sign)
        self.over = self._histogram.per_cell()


class LoadSource:
    """Draws the points and requests of each round of a :class:`LoadSpec`.

    ``usual_weights`` are the weights of cells without hotspots, ``(rows, columns)``.
    """

    def __init__(self, load: LoadSpec, columns: int, rows: int, seed: int) -> None:
        self.load = load
        self.columns, self.rows = columns, rows
        self._seed = seed
        random = np.random.default_rng([seed, 0, _TOWNS])
        self.usual_weights = _towns(load.towns, columns, rows, random)
        self._spots = [spot.weights(columns, rows) for spot in load.hotspots]
        corners = (CellHotspot((0.2, 0.2), 0, 1), CellHotspot((0.8, 0.8), 0, 1))
        self._corners = [corner.weights(columns, rows) for corner in corners]

    def weights(self, number: int) -> Floats:
        """Return the weights of a round, ``(rows, columns)``, which sum to one."""
        shares = [spot.share_at(number) for spot in self.load.hotspots]
        usual = 1.0 - sum(shares) - self.load.swing
        assert usual >= -1e-9, "the shares of hotspots exceed 1"
        total = self.usual_weights * max(usual, 0.0)
        for share, weights in zip(shares, self._spots, strict=True):
            if share:
                total = total + share * weights
        if self.load.swing:
            total = total + self.load.swing * self._corners[number % 2]
        return total

    def points(self, number: int, admitted: int) -> Ints:
        """Draw the points in each cell of a round, row-major."""
        weights = self.weights(number).reshape(-1)
        random = np.random.default_rng([self._seed, number, _POINTS])
        return random.multinomial(admitted, weights / weights.sum())

    def requests(self, number: int, query_table: QueryTable) -> tuple[Ints, Ints]:
        """Apply the requests before a round; return the ids registered and terminated."""
        random = np.random.default_rng([self._seed, number, _QUERIES])
        ended = [
            query_table.live_ids(k)
            for k, spot in enumerate(self.load.hotspots)
            if spot.stop == number
        ]
        usual = query_table.live_ids(_BASE_TAG)
        churn = min(self.load.churn, len(usual)) if number else 0
        ended.append(np.sort(random.choice(usual, churn, replace=False)))
        terminated = np.concatenate(ended).astype(np.int64)
        query_table.end(terminated)
        count = churn if number else self.load.queries
        registered = [query_table.register(self._draw(random, count, self.usual_weights))]
        for k, (spot, weights) in enumerate(zip(self.load.hotspots, self._spots, strict=True)):
            count = spot.queries // _REGISTER_ROUNDS if number < spot.stop else 0
            if spot.start <= number < spot.start + _REGISTER_ROUNDS and count:
                registered.append(query_table.register(self._draw(random, count, weights), k))
        return np.concatenate(registered), terminated

    def _draw(self, random: np.random.Generator, count: int, weights: Floats) -> Ranges:
        """Draw ranges around cells by weight, with geometrically distributed sides."""
        sums = np.cumsum(weights.reshape(-1))
        cells = np.searchsorted(sums, random.random(count) * sums[-1], side="right")
        row, column = np.divmod(np.minimum(cells, sums.size - 1), self.columns)
        ranges = np.empty((count, 4), np.int32)
        for axis, (middle, side) in enumerate(((column, self.columns), (row, self.rows))):
            length = random.geometric(1.0 / max(1.0, self.load.query_side * side), count)
            low = np.maximum(middle - (length - 1) // 2, 0)
            ranges[:, axis] = low
            ranges[:, axis + 2] = np.minimum(np.maximum(low + length - 1, middle), side - 1)
        return ranges


def _towns(count: int, columns: int, rows: int, random: np.random.Generator) -> Floats:
    """Return weights of towns over a uniform floor that has a tenth of the total.

    A town's area grows with its size, so that large towns are wide rather than dense.
    """
    even = np.full((rows, columns), 1.0 / (rows * columns))
    if not count:
        return even
    x, y = (np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows
    total = np.zeros((rows, columns))
    for rank in range(1, count + 1):
        place = random.random(2)
        width = 0.05 * (0.5 + random.random()) / np.sqrt(rank)
        along_x = np.exp(-0.5 * ((x - place[0]) / width) ** 2)
        along_y = np.exp(-0.5 * ((y - place[1]) / width) ** 2)
        # In a coarse grid a town may lie between the centres of cells.
        mass = along_x.sum() * along_y.sum()
        if mass > 0:
            total += np.outer(along_y, along_x / (rank * mass))
    return 0.1 * even + 0.9 * total / total.sum() if total.any() else even
