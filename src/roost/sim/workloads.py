"""Load on a grid of cells, drawn round by round: how many points in each cell, which queries.

The problem: a cluster simulator needs the load that the papers describe (skewed in space, with
hotspots that come and go, and queries that come with them) for grids and machine counts that no
data set has. Points one by one would be far too many.

The idea: a round is a table of weights, one number a cell, and its points are one multinomial draw
from it. Every draw of a round has a random generator of its own, keyed by seed, round and purpose.
So two strategies that admit the same number of points see the very same ones, however many random
numbers they use themselves.

This module knows nothing of machines, and it does not draw coordinates: a cell is all there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Ranges = NDArray[np.int32]

_POINTS, _QUERIES, _TOWNS = 1, 2, 3
_BASE_TAG = -1
# A normal hotspot's life spans three deviations to either side, as the generators' do.
_DEVIATIONS = 6.0
# "All queries in a hotspot are instantiated during one minute": four rounds of 15 seconds.
_REGISTER_ROUNDS = 4
_CAPACITY_MIN = 1024


@dataclass(frozen=True, slots=True)
class CellHotspot:
    """A square that takes a share of all points, and brings queries, while it lives.

    Parameters
    ----------
    center
        Column and row of its middle, as parts of the grid's sides.
    start, stop
        Rounds, the second exclusive.
    share
        Largest share of all points that it takes.
    side
        Side of the square as a part of the grid's side.
    spread
        Points evenly in the square, or normal around its middle with a deviation of ``side / 5``.
    intensity
        Full share at once, or rising and falling as a bell over its life.
    queries
        Registered in its first four rounds, ended when it stops.
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
        """Share of all points in a round."""
        if not self.start <= number < self.stop:
            return 0.0
        if self.intensity == "step":
            return self.share
        middle = (self.start + self.stop - 1) / 2
        deviation = (self.stop - self.start) / _DEVIATIONS
        return float(self.share * np.exp(-0.5 * ((number - middle) / deviation) ** 2))

    def weights(self, columns: int, rows: int) -> Floats:
        """Weights of its cells, ``(rows, columns)``, that sum to one."""
        x = (np.arange(columns) + 0.5) / columns - self.center[0]
        y = (np.arange(rows) + 0.5) / rows - self.center[1]
        if self.spread == "normal":
            deviation = self.side / 5.0
            along_x, along_y = (np.exp(-0.5 * (d / deviation) ** 2) for d in (x, y))
        else:
            along_x, along_y = ((np.abs(d) <= self.side / 2).astype(np.float64) for d in (x, y))
        # A square smaller than a cell still has the cell that is nearest to its middle.
        along_x[np.argmin(np.abs(x))] = max(1.0, along_x.max())
        along_y[np.argmin(np.abs(y))] = max(1.0, along_y.max())
        both = np.outer(along_y, along_x)
        weights: Floats = both / both.sum()
        return weights


@dataclass(frozen=True, slots=True)
class Load:
    """What comes in.

    Parameters
    ----------
    points_per_round
        Offered in each round; back-pressure may admit fewer.
    queries
        Live from the first round on.
    query_side
        Mean side of a query's range, as a part of the grid's side.
    towns
        Skew of the usual load: it lies around this many places whose sizes fall off as 1/rank, over
        an even floor. Zero means an even load.
    churn
        Queries that end, and as many that are registered, in each round.
    hotspots
        Squares that take a share of the points for some rounds.
    swing
        This share of all points jumps between two opposite corners every round.
    """

    points_per_round: int = 200_000
    queries: int = 5_000
    query_side: float = 0.02
    towns: int = 40
    churn: int = 0
    hotspots: tuple[CellHotspot, ...] = ()
    swing: float = 0.0


class QueryBook:
    """All queries that ever were, by id, and how many live ones lie over each cell (the truth).

    An id is a row number of :attr:`ranges`; inclusive ``column0, row0, column1, row1``.
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
        """Ids of the live queries, of one hotspot (its number) if asked."""
        chosen = self.live if tag is None else self.live & (self._tags[: self.size] == tag)
        return np.flatnonzero(chosen)

    def live_ranges(self) -> Ranges:
        """Ranges of the live queries."""
        return self.ranges[self.live]

    def within(self, column0: int, row0: int, column1: int, row1: int) -> Ids:
        """Ids of the live queries that overlap a half-open rectangle, by comparing every one."""
        r = self.ranges
        wide = (r[:, 0] < column1) & (r[:, 2] >= column0)
        return np.flatnonzero(self.live & wide & (r[:, 1] < row1) & (r[:, 3] >= row0))

    def counts(self, rects: Ids) -> Ids:
        """How many live queries overlap each of many half-open rectangles ``(k, 4)``.

        All, without those that end before it or begin beyond it on an axis; those that miss it on
        both axes were then taken away twice.
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
        """Add queries; returns their ids."""
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
        """End queries."""
        assert bool(self._live[ids].all()), "a query is ended twice"
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
    """Draws the points and requests of each round of a :class:`Load`."""

    def __init__(self, load: Load, columns: int, rows: int, seed: int) -> None:
        self.load = load
        self.columns, self.rows = columns, rows
        self._seed = seed
        self._base = _towns(load.towns, columns, rows, np.random.default_rng([seed, 0, _TOWNS]))
        self._spots = [spot.weights(columns, rows) for spot in load.hotspots]
        corners = (CellHotspot((0.2, 0.2), 0, 1), CellHotspot((0.8, 0.8), 0, 1))
        self._corners = [corner.weights(columns, rows) for corner in corners]

    def usual_weights(self) -> Floats:
        """Weights of the load without hotspots, ``(rows, columns)``: what a sample would show."""
        return self._base

    def weights(self, number: int) -> Floats:
        """Weights of a round, ``(rows, columns)``, that sum to one."""
        shares = [spot.share_at(number) for spot in self.load.hotspots]
        usual = 1.0 - sum(shares) - self.load.swing
        assert usual >= -1e-9, "hotspots take more than all points"
        total = self._base * max(usual, 0.0)
        for share, weights in zip(shares, self._spots, strict=True):
            if share:
                total = total + share * weights
        if self.load.swing:
            total = total + self.load.swing * self._corners[number % 2]
        return total

    def points(self, number: int, admitted: int) -> Ids:
        """Points in each cell of a round, row-major."""
        weights = self.weights(number).reshape(-1)
        random = np.random.default_rng([self._seed, number, _POINTS])
        return random.multinomial(admitted, weights / weights.sum())

    def requests(self, number: int, book: QueryBook) -> tuple[Ids, Ids]:
        """Ids of the queries that are registered and that end before a round, done in the book."""
        random = np.random.default_rng([self._seed, number, _QUERIES])
        ended = [
            book.live_ids(k) for k, spot in enumerate(self.load.hotspots) if spot.stop == number
        ]
        usual = book.live_ids(_BASE_TAG)
        churn = min(self.load.churn, len(usual)) if number else 0
        ended.append(np.sort(random.choice(usual, churn, replace=False)))
        gone = np.concatenate(ended).astype(np.int64)
        book.end(gone)
        new = [
            book.register(self._draw(random, churn if number else self.load.queries, self._base))
        ]
        for k, (spot, weights) in enumerate(zip(self.load.hotspots, self._spots, strict=True)):
            count = spot.queries // _REGISTER_ROUNDS if number < spot.stop else 0
            if spot.start <= number < spot.start + _REGISTER_ROUNDS and count:
                new.append(book.register(self._draw(random, count, weights), k))
        return np.concatenate(new), gone

    def _draw(self, random: np.random.Generator, count: int, weights: Floats) -> Ranges:
        """Ranges around cells drawn by weight, with sides from a geometric distribution."""
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
    """Lay towns over an even floor that has a tenth of everything.

    A town's area grows with its size, so that large towns are wide and not infinitely dense.
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
        # In a coarse grid a town may lie between the middles of cells.
        mass = along_x.sum() * along_y.sum()
        if mass > 0:
            total += np.outer(along_y, along_x / (rank * mass))
    return 0.1 * even + 0.9 * total / total.sum() if total.any() else even


def hotspot_loads(
    rounds: int = 80, load: Load | None = None, queries: int = 1_000
) -> dict[str, Load]:
    """Return the papers' loads by name: the five hotspot figures, a steady load and a swinging one.

    Hotspots live in the middle half of the rounds. The figures are 6.6 to 6.10 of the dissertation:
    ``rise``, ``rise-normal``, ``step``, ``two-at-once`` and ``two-in-turn``.
    """
    usual = load or Load()
    start, stop = rounds // 4, 3 * rounds // 4
    middle = (start + stop) // 2
    low, high = (0.15, 0.15), (0.85, 0.85)

    def step(center: tuple[float, float], first: int, last: int, part: float) -> CellHotspot:
        return CellHotspot(center, first, last, 0.4 * part, queries=int(queries * part))

    def rise(center: tuple[float, float], first: int, last: int, part: float) -> CellHotspot:
        return replace(step(center, first, last, part), intensity="normal")

    spots: dict[str, tuple[CellHotspot, ...]] = {
        "steady": (),
        "rise": (rise(low, start, stop, 1.0),),
        "rise-normal": (replace(rise(low, start, stop, 1.0), spread="normal"),),
        "step": (step(low, start, stop, 1.0),),
        "two-at-once": (rise(low, start, stop, 0.5), rise(high, start, stop, 0.5)),
        "two-in-turn": (rise(low, start, middle, 0.5), rise(high, middle, stop, 0.5)),
    }
    loads = {name: replace(usual, hotspots=value) for name, value in spots.items()}
    return loads | {"swing": replace(usual, swing=0.3)}
