"""A load that moves: a city's day, and hotspots that come and go in it.

The background is a mean day: the pickups of a whole quarter by their time of day, in steps of
fifteen minutes, so that each round has the city's own places at that hour. A hotspot redirects a
share of a round's points into a square, as in figures 6.6 to 6.10 of the dissertation, and brings
queries of its own, which are registered when it begins and terminated when it ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.bench.cases import SIDE_SHARE, Pickups, box_requests, boxes_of
from roost.model.schemas import TIMESTAMP
from roost.model.space import Rect, Space

SLOTS = 96
SLOT_S = 900
WINDOW_SLOTS = 2  # a round draws from the slots around it too: single ones are mostly chance
UTC_OFFSET_S = -4 * 3600  # the city's clock in the quarter of the data
HOTSPOT_SIDE = 0.15
NORMAL_SPREAD = 0.2  # the paper's "variance of 20 % of the side", read as the deviation
HOT_QUERIES = 1.0  # a hotspot of 40 % of the points brings 40 % as many queries as there are
HISTORY_POINTS = 400_000
HISTORY_QUERIES = 200_000
LOWER_LEFT = (0.02, 0.02)
UPPER_RIGHT = (0.83, 0.83)
SEED = 6


@dataclass(frozen=True)
class Hotspot:
    """A square that takes a share of the points for some rounds.

    Parameters
    ----------
    begin, end
        Rounds, the end not included, as parts of the whole timeline.
    share
        Of the points, at its height.
    corner
        Lower left corner of the square, in parts of the space's sides.
    normal
        Whether points gather in its middle, or lie evenly.
    step
        Whether it is there at full height at once, or rises and falls.
    """

    begin: float
    end: float
    share: float
    corner: tuple[float, float]
    normal: bool = False
    step: bool = False

    def share_at(self, place: float) -> float:
        """Share of the points at a place of the timeline."""
        if not self.begin <= place < self.end:
            return 0.0
        if self.step:
            return self.share
        middle, width = (self.begin + self.end) / 2, (self.end - self.begin) / 5
        return self.share * math.exp(-0.5 * ((place - middle) / width) ** 2)


SCENARIOS: dict[str, tuple[Hotspot, ...]] = {
    "uniform (6.6)": (Hotspot(0.2, 0.8, 0.4, LOWER_LEFT),),
    "normal (6.7)": (Hotspot(0.2, 0.8, 0.4, LOWER_LEFT, normal=True),),
    "step (6.8)": (Hotspot(0.2, 0.8, 0.4, LOWER_LEFT, step=True),),
    "overlapping (6.9)": (
        Hotspot(0.2, 0.65, 0.2, LOWER_LEFT),
        Hotspot(0.35, 0.8, 0.2, UPPER_RIGHT),
    ),
    "consecutive (6.10)": (
        Hotspot(0.2, 0.5, 0.2, LOWER_LEFT),
        Hotspot(0.5, 0.8, 0.2, UPPER_RIGHT),
    ),
}


@dataclass(frozen=True)
class Step:
    """One round: its points, requests that come before it, and how much of it is hotspot."""

    points: pa.Table
    requests: pa.Table | None
    queries: int
    hot_share: float


class MovingLoad:
    """Rounds of points and requests, the same for every strategy.

    Parameters
    ----------
    pickups
        The city.
    queries
        Standing queries, beside those of hotspots.
    rounds, points
        How many rounds, and points in each.
    hotspots
        What comes and goes.
    start
        Slot of the day of the first round.
    """

    def __init__(
        self,
        pickups: Pickups,
        queries: int,
        rounds: int,
        points: int,
        hotspots: tuple[Hotspot, ...] = (),
        start: int = 20,
    ) -> None:
        self.space = Space(Rect(*pickups.bounds))
        self.rounds, self.points, self.queries = rounds, points, queries
        self._pickups = pickups
        self._hotspots = hotspots
        self._start = start
        times = pickups.event_time.cast(pa.int64()).to_numpy() // 1_000_000 + UTC_OFFSET_S
        slots = (times // SLOT_S) % SLOTS
        order = np.argsort(slots, kind="stable")
        borders = np.searchsorted(slots[order], np.arange(SLOTS + 1))
        around = range(-WINDOW_SLOTS, WINDOW_SLOTS + 1)
        self._slots = [
            np.concatenate(
                [order[borders[(k + j) % SLOTS] : borders[(k + j) % SLOTS + 1]] for j in around]
            )
            for k in range(SLOTS)
        ]
        self.boxes = boxes_of(pickups, queries, np.random.default_rng(SEED))

    @property
    def batch_us(self) -> int:
        """Event time of a round."""
        return SLOT_S * 1_000_000

    def standing(self) -> pa.Table:
        """Return requests for the standing queries."""
        return box_requests(self.boxes)

    def history(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Sample that a static plan may learn from: points of all hours, and standing queries."""
        count = len(self._pickups.lon)
        rng = np.random.default_rng(SEED)
        at = rng.choice(count, min(HISTORY_POINTS, count), replace=False)
        return self._pickups.lon[at], self._pickups.lat[at], self.boxes[:HISTORY_QUERIES]

    def step(self, number: int) -> Step:
        """Make one round."""
        rng = np.random.default_rng([SEED, number])
        place = number / self.rounds
        slot = self._slots[(self._start + number) % SLOTS]
        at = slot[rng.integers(0, slot.size, self.points)]
        x, y = self._pickups.lon[at].copy(), self._pickups.lat[at].copy()
        free = rng.permutation(self.points)
        hot_share, requests, live = 0.0, [], self.queries
        for index, hotspot in enumerate(self._hotspots):
            share = hotspot.share_at(place)
            taken, free = np.split(free, [int(share * self.points)])
            x[taken], y[taken] = self._inside(hotspot, taken.size, rng)
            hot_share += share
            count = int(self.queries * HOT_QUERIES * hotspot.share)
            before = (number - 1) / self.rounds
            begins = hotspot.begin <= place and not hotspot.begin <= before
            ends = hotspot.end <= place and not hotspot.end <= before
            live += count if hotspot.begin <= place < hotspot.end else 0
            if begins or ends:
                requests.append(self._hot_requests(index, hotspot, count, begins))
        stamp = (number * self.points + np.arange(self.points)) * (
            SLOT_S * 1_000_000 // self.points
        )
        table = pa.table(
            {
                "id": number * self.points + np.arange(self.points),
                "event_time": pa.array(stamp).cast(TIMESTAMP),
                "lon": x,
                "lat": y,
            }
        )
        return Step(table, pa.concat_tables(requests) if requests else None, live, hot_share)

    def _inside(
        self, hotspot: Hotspot, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        bounds = self.space.bounds
        if hotspot.normal:
            parts = 0.5 + rng.normal(0.0, NORMAL_SPREAD, (2, count))
            while (outside := (parts < 0.0) | (parts > 1.0)).any():
                parts[outside] = 0.5 + rng.normal(0.0, NORMAL_SPREAD, int(outside.sum()))
        else:
            parts = rng.random((2, count))
        x = bounds.x0 + bounds.width * (hotspot.corner[0] + HOTSPOT_SIDE * parts[0])
        y = bounds.y0 + bounds.height * (hotspot.corner[1] + HOTSPOT_SIDE * parts[1])
        return x, y

    def _hot_requests(self, index: int, hotspot: Hotspot, count: int, begins: bool) -> pa.Table:
        first = self.queries + index * count
        rng = np.random.default_rng([SEED, 1_000 + index])
        x, y = self._inside(hotspot, count, rng)
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
