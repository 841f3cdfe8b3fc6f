"""Simulated load on a grid of cells, round by round: points per cell, and queries.

Problem: the simulator needs the load that the papers describe (skewed in space, with temporary
hotspots and their queries) for grids and machine counts that no data set has. Single points would
be far too many.

Idea: a round is a table of weights, one per cell, and its points are one multinomial draw from it.
Every draw has its own random generator, keyed by seed, round and purpose. So two strategies that
admit the same number of points see the same points, however many random numbers they draw.

This module does not model machines and draws no coordinates, only cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Ranges = NDArray[np.int32]

_POINTS, _QUERIES, _TOWNS = 1, 2, 3
_BASE_TAG = -1
# A normal hotspot's lifetime spans three deviations to either side, like those of the generators.
_DEVIATIONS = 6.0
# "All queries in a hotspot are instantiated during one minute": four rounds of 15 seconds.
_REGISTER_ROUNDS = 4
_CAPACITY_MIN = 1024


@dataclass(frozen=True, slots=True)
class CellHotspot:
    """A temporary hotspot: a square with a share of all points, and queries.

    Parameters
    ----------
    center
        Column and row of its centre, as fractions of the grid's sides.
    start, stop
        Rounds, the second exclusive.
    share
        Maximum share of all points.
    side
        Side of the square as a fraction of the grid's side.
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
        x = (np.arange(columns) + 0.5) / columns - self.center[0]
        y = (np.arange(rows) + 0.5) / rows - self.center[1]
        if self.spread == "normal":
            deviation = self.side / 5.0
            along_x, along_y = (np.exp(-0.5 * (d / deviation) ** 2) for d in (x, y))
        else:
            along_x, along_y = ((np.abs(d) <= self.side / 2).astype(np.float64) for d in (x, y))
        # A square smaller than a cell covers the cell nearest to its centre.
        along_x[np.argmin(np.abs(x))] = max(1.0, along_x.max())
        along_y[np.argmin(np.abs(y))] = max(1.0, along_y.max())
        both = np.outer(along_y, along_x)
        weights: Floats = both / both.sum()
        return weights


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Offered load.

    Parameters
    ----------
    points_per_round
        Points offered in each round; back-pressure may admit fewer.
    queries
        Queries live from the first round on.
    query_side
        Mean side of a query's range, as a fraction of the grid's side.
    towns
        Skew of the base load: number of centres whose sizes are proportional to 1/rank, over a
        uniform floor. Zero means a uniform load.
    churn
        Queries terminated, and as many registered, in each round.
    hotspots
        Temporary hotspots.
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


class QueryTable:
    """All queries by id, and the true number of live ones over each cell.

    An id is a row number of :attr:`ranges`: inclusive ``column0, row0, column1, row1``.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.over: Floats = np.zeros((rows, columns))
        self.size = 0
        self._ranges: Ranges = np.zeros((_CAPACITY_MIN, 4), np.int32)
        self._live = np.zeros(_CAPACITY_MIN, np.bool_)
        self._tags = np.zeros(_CAPACITY_MIN, np.int32)

    @property
    def ranges(self) -> Ranges:
        """Ranges of all queries, live or not."""
        return self._ranges[: self.size]

    @property
    def live(self) -> NDArray[np.bool_]:
        """Whether each query is live."""
        return self._live[: self.size]

    def live_ids(self, tag: int | None = None) -> Ids:
        """Return the ids of live queries, of one hotspot (its number) if given."""
        chosen = self.live if tag is None else self.live & (self._tags[: self.size] == tag)
        return np.flatnonzero(chosen)

    def live_ranges(self) -> Ranges:
        """Return the ranges of live queries."""
        return self.ranges[self.live]

    def within(self, column0: int, row0: int, column1: int, row1: int) -> Ids:
        """Return the ids of live queries that overlap a half-open rectangle, by brute force."""
        r = self.ranges
        wide = (r[:, 0] < column1) & (r[:, 2] >= column0)
        return np.flatnonzero(self.live & wide & (r[:, 1] < row1) & (r[:, 3] >= row0))

    def counts(self, rects: Ids) -> Ids:
        """Count the live queries over each of many half-open rectangles ``(k, 4)``.

        By inclusion and exclusion: all, minus those that miss the rectangle on an axis, plus those
        that miss it on both.
        """
        column0, row0, column1, row1 = rects.T
        r = self.live_ranges()
        sums = {}
        for x, y in ((0, 1), (0, 3), (2, 1), (2, 3)):
            flat = np.bincount(
                r[:, y].astype(np.int64) * self.columns + r[:, x], minlength=self.over.size
            )
            sums[x, y] = np.pad(flat.reshape(self.over.shape).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        every = len(r)
        left, below = sums[2, 3][-1, column0], sums[2, 3][row0, -1]
        right, above = every - sums[0, 1][-1, column1], every - sums[0, 1][row1, -1]
        both = sums[2, 3][row0, column0]
        both = both + sums[2, 1][-1, column0] - sums[2, 1][row1, column0]
        both = both + sums[0, 3][row0, -1] - sums[0, 3][row0, column1]
        both = (
            both
            + every
            - sums[0, 1][-1, column1]
            - sums[0, 1][row1, -1]
            + sums[0, 1][row1, column1]
        )
        found: Ids = every - left - below - right - above + both
        return found

    def register(self, ranges: Ranges, tag: int = _BASE_TAG) -> Ids:
        """Add queries and return their ids."""
        start, stop = self.size, self.size + len(ranges)
        if stop > len(self._live):
            room = max(stop, 2 * len(self._live))
            self._ranges = np.resize(self._ranges, (room, 4))
            self._live = np.resize(self._live, room)
            self._tags = np.resize(self._tags, room)
        self._ranges[start:stop] = ranges
        self._live[start:stop] = True
        self._tags[start:stop] = tag
        self.size = stop
        self._mark(ranges, 1.0)
        return np.arange(start, stop)

    def end(self, ids: Ids) -> None:
        """Terminate queries."""
        assert bool(self._live[ids].all()), "a query is terminated twice"
        self._live[ids] = False
        self._mark(self._ranges[ids], -1.0)

    def _mark(self, ranges: Ranges, sign: float) -> None:
        if len(ranges) == 0:
            return
        marks = np.zeros((self.rows + 1, self.columns + 1))
        column0, row0, column1, row1 = ranges.T
        np.add.at(marks, (row0, column0), sign)
        np.add.at(marks, (row0, column1 + 1), -sign)
        np.add.at(marks, (row1 + 1, column0), -sign)
        np.add.at(marks, (row1 + 1, column1 + 1), sign)
        self.over += marks.cumsum(0).cumsum(1)[:-1, :-1]


class LoadSource:
    """Draws the points and requests of each round of a :class:`LoadSpec`."""

    def __init__(self, load: LoadSpec, columns: int, rows: int, seed: int) -> None:
        self.load = load
        self.columns, self.rows = columns, rows
        self._seed = seed
        self._base = _towns(load.towns, columns, rows, np.random.default_rng([seed, 0, _TOWNS]))
        self._spots = [spot.weights(columns, rows) for spot in load.hotspots]
        corners = (CellHotspot((0.2, 0.2), 0, 1), CellHotspot((0.8, 0.8), 0, 1))
        self._corners = [corner.weights(columns, rows) for corner in corners]

    def usual_weights(self) -> Floats:
        """Return the weights of the load without hotspots, ``(rows, columns)``."""
        return self._base

    def weights(self, number: int) -> Floats:
        """Return the weights of a round, ``(rows, columns)``, which sum to one."""
        shares = [spot.share_at(number) for spot in self.load.hotspots]
        usual = 1.0 - sum(shares) - self.load.swing
        assert usual >= -1e-9, "the shares of hotspots exceed 1"
        total = self._base * max(usual, 0.0)
        for share, weights in zip(shares, self._spots, strict=True):
            if share:
                total = total + share * weights
        if self.load.swing:
            total = total + self.load.swing * self._corners[number % 2]
        return total

    def points(self, number: int, admitted: int) -> Ids:
        """Draw the points in each cell of a round, row-major."""
        weights = self.weights(number).reshape(-1)
        random = np.random.default_rng([self._seed, number, _POINTS])
        return random.multinomial(admitted, weights / weights.sum())

    def requests(self, number: int, query_table: QueryTable) -> tuple[Ids, Ids]:
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
        gone = np.concatenate(ended).astype(np.int64)
        query_table.end(gone)
        new = [
            query_table.register(
                self._draw(random, churn if number else self.load.queries, self._base)
            )
        ]
        for k, (spot, weights) in enumerate(zip(self.load.hotspots, self._spots, strict=True)):
            count = spot.queries // _REGISTER_ROUNDS if number < spot.stop else 0
            if spot.start <= number < spot.start + _REGISTER_ROUNDS and count:
                new.append(query_table.register(self._draw(random, count, weights), k))
        return np.concatenate(new), gone

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
