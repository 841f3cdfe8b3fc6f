"""Loads in rounds: a city's day, with hotspots that begin and end.

The background is a mean day: the pickups of a whole quarter by their time of day, in slots of
fifteen minutes, so that each round has the places of its hour. A hotspot redirects a share of a
round's points into a square, as in figures 6.6 to 6.10 of the dissertation, and has queries of its
own, which are registered when it begins and terminated when it ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.bench.cases import SIDE_SHARE, Pickups, box_requests, boxes_of, point_table
from roost.model.arrays import Floats
from roost.model.schemas import TIMESTAMP
from roost.model.space import Rect, Space

SLOTS = 96
SLOT_S = 900
FIRST_SLOT = 20  # of the first round
AROUND = range(-2, 3)  # a round draws from neighbouring slots too: a single one has few points
UTC_OFFSET_S = -4 * 3600  # local time of the city in the quarter of the data
HOTSPOT_SIDE = 0.15
NORMAL_SPREAD = 0.2  # the paper's "variance of 20 % of the side", read as the deviation
HISTORY_POINTS = 400_000
LOWER_LEFT = (0.02, 0.02)
UPPER_RIGHT = (0.83, 0.83)
SEED = 6


@dataclass(frozen=True)
class LoadHotspot:
    """A square that receives a share of the points for some rounds.

    There are as many more queries, relative to the standing ones, as the share says.
    """

    begin: float  # as a fraction of the timeline
    end: float  # not included
    share: float  # the largest
    corner: tuple[float, float]  # lower left, in fractions of the space's sides
    normal: bool = False  # distribution of the points; uniform otherwise
    step: bool = False  # the share is constant; otherwise it rises and falls

    def active(self, place: float) -> bool:
        """Return whether the hotspot exists at a place of the timeline."""
        return self.begin <= place < self.end

    def share_at(self, place: float) -> float:
        """Return the share of the points at a place of the timeline."""
        if not self.active(place):
            return 0.0
        if self.step:
            return self.share
        middle, width = (self.begin + self.end) / 2, (self.end - self.begin) / 5
        return self.share * math.exp(-0.5 * ((place - middle) / width) ** 2)


SCENARIOS: dict[str, tuple[LoadHotspot, ...]] = {
    "uniform (6.6)": (LoadHotspot(0.2, 0.8, 0.4, LOWER_LEFT),),
    "normal (6.7)": (LoadHotspot(0.2, 0.8, 0.4, LOWER_LEFT, normal=True),),
    "step (6.8)": (LoadHotspot(0.2, 0.8, 0.4, LOWER_LEFT, step=True),),
    "overlapping (6.9)": (
        LoadHotspot(0.2, 0.65, 0.2, LOWER_LEFT),
        LoadHotspot(0.35, 0.8, 0.2, UPPER_RIGHT),
    ),
    "consecutive (6.10)": (
        LoadHotspot(0.2, 0.5, 0.2, LOWER_LEFT),
        LoadHotspot(0.5, 0.8, 0.2, UPPER_RIGHT),
    ),
}


class Step(NamedTuple):
    """One round: its points, the requests before it, and the number of queries in it."""

    points: pa.Table
    requests: pa.Table | None
    queries: int


class TimedLoad(ABC):
    """Rounds of ``points`` points and some requests, the same for every strategy.

    A round takes ``round_s`` seconds of event time.
    """

    def __init__(self, pickups: Pickups, rounds: int, points: int, round_s: int) -> None:
        self.space = Space(Rect(*pickups.bounds))
        self.rounds, self.points, self.round_s = rounds, points, round_s
        self.pickups = pickups

    @abstractmethod
    def standing(self) -> pa.Table:
        """Return requests for the queries that exist before the first round."""

    @abstractmethod
    def history(self) -> NDArray[np.int64]:
        """Return which pickups a static plan is computed from."""

    @abstractmethod
    def step(self, number: int) -> Step:
        """Make one round."""

    def sample(self, columns: list[str]) -> pa.Table:
        """Return the points that a static plan is computed from."""
        at = self.history()
        places = (self.pickups.lon[at], self.pickups.lat[at])
        return pa.table(dict(zip(columns, places, strict=True)))

    def place(self, parts: Floats) -> tuple[Floats, Floats]:
        """Return coordinates of rows of places in the unit square."""
        bounds = self.space.bounds
        return bounds.x0 + bounds.width * parts[:, 0], bounds.y0 + bounds.height * parts[:, 1]

    def table(self, number: int, lon: Floats, lat: Floats) -> pa.Table:
        """Return the points of a round, with identifiers and event times."""
        row, round_us = np.arange(self.points), self.round_s * 1_000_000
        times = number * round_us + row * (round_us // self.points)
        return point_table(number * self.points + row, pa.array(times).cast(TIMESTAMP), lon, lat)


def slots_of(pickups: Pickups) -> list[NDArray[np.int64]]:
    """Return the pickups that the rounds of each slot of a day draw from."""
    times = pickups.event_time.cast(pa.int64()).to_numpy() // 1_000_000 + UTC_OFFSET_S
    slots = (times // SLOT_S) % SLOTS
    order = np.argsort(slots, kind="stable")
    by_slot = np.split(order, np.searchsorted(slots[order], np.arange(1, SLOTS)))
    return [np.concatenate([by_slot[(k + j) % SLOTS] for j in AROUND]) for k in range(SLOTS)]


def slot_at(number: int, rounds: int) -> int:
    """Return the slot of a round; more rounds than slots still are one day."""
    return (FIRST_SLOT + number * min(SLOTS, rounds) // rounds) % SLOTS


class MovingLoad(TimedLoad):
    """A day of the city with hotspots; ``queries`` does not include those of hotspots."""

    def __init__(
        self,
        pickups: Pickups,
        queries: int,
        rounds: int,
        points: int,
        hotspots: tuple[LoadHotspot, ...] = (),
        seed: int = SEED,
    ) -> None:
        super().__init__(pickups, rounds, points, SLOT_S)
        self.queries = queries
        self._seed = seed
        self._hotspots = hotspots
        self._slots = slots_of(pickups)
        self.boxes = boxes_of(pickups, queries, np.random.default_rng(self._seed))

    def standing(self) -> pa.Table:
        """Return requests for the standing queries."""
        return box_requests(self.boxes)

    def history(self) -> NDArray[np.int64]:
        """Return pickups of all hours."""
        count = len(self.pickups.lon)
        random = np.random.default_rng(self._seed)
        return random.choice(count, min(HISTORY_POINTS, count), replace=False)

    def step(self, number: int) -> Step:
        """Make one round."""
        random = np.random.default_rng([self._seed, number])
        now, before = number / self.rounds, (number - 1) / self.rounds
        slot = self._slots[slot_at(number, self.rounds)]
        at = slot[random.integers(0, slot.size, self.points)]
        x, y = self.pickups.lon[at], self.pickups.lat[at]
        free = random.permutation(self.points)
        requests, live = [], self.queries
        for index, hotspot in enumerate(self._hotspots):
            hot, free = np.split(free, [int(hotspot.share_at(now) * self.points)])
            x[hot], y[hot] = self._inside(hotspot, hot.size, random)
            count = int(self.queries * hotspot.share)
            begins = hotspot.begin <= now and not hotspot.begin <= before
            ends = hotspot.end <= now and not hotspot.end <= before
            live += count if hotspot.active(now) else 0
            if begins or ends:
                requests.append(self._hot_requests(index, hotspot, count, begins))
        found = pa.concat_tables(requests) if requests else None
        return Step(self.table(number, x, y), found, live)

    def _inside(
        self, hotspot: LoadHotspot, count: int, random: np.random.Generator
    ) -> tuple[Floats, Floats]:
        if hotspot.normal:
            parts = 0.5 + random.normal(0.0, NORMAL_SPREAD, (2, count))
            while (outside := (parts < 0.0) | (parts > 1.0)).any():
                parts[outside] = 0.5 + random.normal(0.0, NORMAL_SPREAD, int(outside.sum()))
        else:
            parts = random.random((2, count))
        return self.place(np.array(hotspot.corner) + HOTSPOT_SIDE * parts.T)

    def _hot_requests(self, index: int, hotspot: LoadHotspot, count: int, begins: bool) -> pa.Table:
        first = self.queries + index * count
        x, y = self._inside(hotspot, count, np.random.default_rng([self._seed, 1_000 + index]))
        half_x = self.space.bounds.width * SIDE_SHARE / 2
        half_y = self.space.bounds.height * SIDE_SHARE / 2
        columns: dict[str, Any] = {
            "op": pa.array(["register" if begins else "terminate"] * count),
            "query_id": np.arange(first, first + count),
            "user_id": pa.array([f"hot{index}"] * count),
        }
        boxes = {"x0": x - half_x, "y0": y - half_y, "x1": x + half_x, "y1": y + half_y}
        nothing = pa.nulls(count, pa.float64())
        columns |= {name: pa.array(v) if begins else nothing for name, v in boxes.items()}
        return pa.table(columns)
