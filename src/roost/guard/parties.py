"""Groups of users: normal ones, attackers, and three that look like attackers and are none.

Normal users register queries where the data is, their activity falls off by rank so that a fifth of
them does four fifths, and end as many as they register. An attack moves a fixed stock of queries
from one target to the next, by turns of registering there and ending its oldest; targets are drawn
from the data, so that its queries meet many points. A rate of 600 means that 600 queries are
moved a second: so many registrations, and as many endings.

The others are a crowd (many users, one place, one time), a newcomer who brings many queries at
once, and a user who moves house. Places lie in the unit square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Random = np.random.Generator

# The next target must be elsewhere, or the attack would not move.
_TARGET_APART = 0.1
_TARGET_TRIES = 50


@dataclass(frozen=True, eq=False)
class Step:
    """What a party does in a tick.

    Parameters
    ----------
    owners, places
        Users and middles of new queries.
    ended
        How many queries end, at most.
    enders
        Only queries of the first so many users end; of all users if None.
    """

    owners: Ids
    places: Floats
    ended: int = 0
    enders: int | None = None


class Party(Protocol):
    """A group of users. Its queries end oldest first or, where ``mixed``, by chance."""

    users: int
    name: str
    malicious: bool
    mixed: bool

    def scaled(self, factor: float) -> Party:
        """Return the same with fewer requests and queries, by as many users."""

    def begin(self, random: Random, data: Floats) -> Step:
        """Return the queries that are there before the first tick."""

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Act for one tick; ``held`` of its queries are live."""


@dataclass
class Normal:
    """Users who register queries where the data is."""

    users: int = 100
    rate: float = 600.0
    queries: int = 900_000
    name: str = "normal"
    malicious = False
    mixed = True

    def scaled(self, factor: float) -> Normal:
        """Fewer requests and queries."""
        return replace(self, rate=self.rate * factor, queries=int(self.queries * factor))

    def begin(self, random: Random, data: Floats) -> Step:
        """All queries, over the users by rank."""
        return Step(self._owners(random, self.queries), drawn(random, data, self.queries))

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Register and end as many."""
        count = int(random.poisson(self.rate * tick_s))
        return Step(self._owners(random, count), drawn(random, data, count), count)

    def _owners(self, random: Random, count: int) -> Ids:
        weights = rank_weights(self.users)
        return random.choice(self.users, count, p=weights)


@dataclass
class Attack:
    """Users who make hotspots, one after the other.

    Parameters
    ----------
    users
        Who share the work evenly.
    rate
        Queries moved a second.
    queries
        Stock that is moved to each target.
    start, stop
        Ticks, the second exclusive.
    stagger
        Ticks between one user's first request and the next one's.
    normal_part
        Part of the registrations that are made as normal users make them.
    pause
        Ticks of rest after each target.
    uneven
        Whether users share the work as normal users do, and not evenly.
    side
        Of the square around a target.
    """

    users: int = 10
    rate: float = 600.0
    queries: int = 100_000
    start: int = 20
    stop: int = 1 << 30
    stagger: int = 0
    normal_part: float = 0.0
    pause: int = 0
    uneven: bool = False
    side: float = 0.02
    name: str = "attacker"
    malicious = True
    mixed = False

    def __post_init__(self) -> None:
        """Begin without a target."""
        self.targets: list[tuple[int, Floats]] = []
        self._placed = 0
        self._rest_until = 0

    def scaled(self, factor: float) -> Attack:
        """Fewer requests and queries."""
        return replace(self, rate=self.rate * factor, queries=int(self.queries * factor))

    def begin(self, random: Random, data: Floats) -> Step:
        """Place the stock as if it were normal."""
        return Step(
            self._owners(random, self.queries, self.users), drawn(random, data, self.queries)
        )

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Move queries to the target."""
        if not self.start <= tick < self.stop or tick < self._rest_until:
            return nothing()
        if not self.targets or self._placed >= self.queries:
            self.targets.append((tick, self._next_target(random, data)))
            self._placed = 0
        joined = self.users
        if self.stagger:
            joined = min(1 + (tick - self.start) // self.stagger, self.users)
        count = int(random.poisson(self.rate * tick_s * joined / self.users))
        self._placed += count
        if self._placed >= self.queries and self.pause:
            self._rest_until = tick + 1 + self.pause
        places = around(random, self.targets[-1][1], self.side, count)
        normal = random.random(count) < self.normal_part
        places[normal] = drawn(random, data, int(normal.sum()))
        return Step(self._owners(random, count, joined), places, count, joined)

    def _owners(self, random: Random, count: int, joined: int) -> Ids:
        if self.uneven:
            return random.choice(joined, count, p=rank_weights(joined))
        return random.integers(0, joined, count)

    def _next_target(self, random: Random, data: Floats) -> Floats:
        target: Floats = drawn(random, data, 1)[0]
        for _ in range(_TARGET_TRIES):
            if not self.targets or np.hypot(*(target - self.targets[-1][1])) > _TARGET_APART:
                break
            target = drawn(random, data, 1)[0]
        return target


@dataclass
class Crowd:
    """Many users at one place for some time: they come within ``rise`` ticks and go again."""

    users: int = 400
    queries_each: int = 25
    start: int = 20
    stop: int = 80
    rise: int = 12
    side: float = 0.02
    name: str = "crowd"
    malicious = False
    mixed = False

    def __post_init__(self) -> None:
        """Begin without a place."""
        self._place: Floats | None = None

    def scaled(self, factor: float) -> Crowd:
        """As many users with fewer queries."""
        return replace(self, queries_each=max(round(self.queries_each * factor), 1))

    def begin(self, random: Random, data: Floats) -> Step:
        """Nothing; the place is drawn."""
        self._place = drawn(random, data, 1)[0]
        return nothing()

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Come, stay or go."""
        assert self._place is not None, "a party begins before its first tick"
        if tick >= self.stop:
            return Step(np.empty(0, np.int64), np.empty((0, 2)), held // 4 + 1)
        if not self.start <= tick < self.start + self.rise:
            return nothing()
        turn = tick - self.start
        coming = np.arange(turn * self.users // self.rise, (turn + 1) * self.users // self.rise)
        owners = np.repeat(coming, self.queries_each)
        return Step(owners, around(random, self._place, self.side, len(owners)))


@dataclass
class Newcomer:
    """One new user who registers many queries, in a town of his own or all over.

    ``town`` is the side of the square that he is interested in; 1 is everywhere.
    """

    rate: float = 300.0
    queries: int = 50_000
    start: int = 20
    town: float = 0.05
    name: str = "newcomer"
    users = 1
    malicious = False
    mixed = False

    def __post_init__(self) -> None:
        """Begin without a place."""
        self._place: Floats | None = None
        self._placed = 0

    def scaled(self, factor: float) -> Newcomer:
        """Fewer requests and queries."""
        return replace(self, rate=self.rate * factor, queries=int(self.queries * factor))

    def begin(self, random: Random, data: Floats) -> Step:
        """Nothing; the town is drawn."""
        self._place = drawn(random, data, 1)[0]
        return nothing()

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Register until all are there."""
        assert self._place is not None, "a party begins before its first tick"
        wanted = int(random.poisson(self.rate * tick_s)) if tick >= self.start else 0
        count = min(wanted, self.queries - self._placed)
        self._placed += count
        if self.town >= 1.0:
            return Step(np.zeros(count, np.int64), drawn(random, data, count))
        return Step(np.zeros(count, np.int64), around(random, self._place, self.town, count))


@dataclass
class Mover:
    """One user whose queries are all at home, and who moves house."""

    rate: float = 300.0
    queries: int = 20_000
    start: int = 20
    side: float = 0.02
    name: str = "mover"
    users = 1
    malicious = False
    mixed = False

    def __post_init__(self) -> None:
        """Begin without a house."""
        self._houses: Floats = np.empty((0, 2))
        self._moved = 0

    def scaled(self, factor: float) -> Mover:
        """Fewer requests and queries."""
        return replace(self, rate=self.rate * factor, queries=int(self.queries * factor))

    def begin(self, random: Random, data: Floats) -> Step:
        """All queries at home."""
        self._houses = drawn(random, data, 2)
        places = around(random, self._houses[0], self.side, self.queries)
        return Step(np.zeros(self.queries, np.int64), places)

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Move until all are there."""
        wanted = int(random.poisson(self.rate * tick_s)) if tick >= self.start else 0
        count = min(wanted, self.queries - self._moved)
        self._moved += count
        places = around(random, self._houses[1], self.side, count)
        return Step(np.zeros(count, np.int64), places, count)


@dataclass
class Leaver:
    """Users who have queries as attackers do, and end them all instead of attacking."""

    users: int = 10
    queries: int = 100_000
    stop: int = 20
    name: str = "leaver"
    malicious = False
    mixed = False

    def scaled(self, factor: float) -> Leaver:
        """Fewer queries."""
        return replace(self, queries=int(self.queries * factor))

    def begin(self, random: Random, data: Floats) -> Step:
        """All queries, where the data is."""
        owners = random.integers(0, self.users, self.queries)
        return Step(owners, drawn(random, data, self.queries))

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Stay, and go at once."""
        gone = held if tick >= self.stop else 0
        return Step(np.empty(0, np.int64), np.empty((0, 2)), gone)


def nothing() -> Step:
    """Return a tick without requests."""
    return Step(np.empty(0, np.int64), np.empty((0, 2)))


def drawn(random: Random, data: Floats, count: int) -> Floats:
    """Places where the data is."""
    places: Floats = data[random.integers(0, len(data), count)]
    return places


def around(random: Random, place: Floats, side: float, count: int) -> Floats:
    """Places in a square."""
    return place + side * (random.random((count, 2)) - 0.5)


@lru_cache(maxsize=8)
def rank_weights(users: int, top: float = 0.2, part: float = 0.8) -> Floats:
    """Weights that fall off as a power of the rank, such that the top fifth has four fifths.

    Examples
    --------
    >>> weights = rank_weights(100)
    >>> round(float(weights[:20].sum()), 3), round(float(weights.sum()), 3)
    (0.8, 1.0)
    """
    ranks = np.arange(1, users + 1, dtype=np.float64)
    first = max(int(top * users), 1)
    low, high = 0.0, 4.0
    for _ in range(40):
        power = (low + high) / 2
        weights = ranks**-power
        if weights[:first].sum() < part * weights.sum():
            low = power
        else:
            high = power
    weights = ranks**-low
    scaled: Floats = weights / weights.sum()
    return scaled
