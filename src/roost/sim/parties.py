"""Groups of users: normal users, attackers, and groups that only look like attackers.

Normal users register queries where the data is and terminate as many; their activity follows a
power law, so that a fifth of them sends four fifths of the requests. An attack moves a fixed number
of queries from one target to the next, by registering queries there and terminating its oldest;
targets are drawn from the data, so that its queries match many points. A rate of 600 means that 600
queries move per second: as many registrations, and as many terminations.

The others are a crowd (many users, one place, one time), a newcomer who registers many queries at
once, a user who moves to another place, and users who leave. Places lie in the unit square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Random = np.random.Generator

# Minimum distance of the next target; else the attack would not move.
_TARGET_APART = 0.1
_TARGET_TRIES = 50


@dataclass(frozen=True, eq=False)
class Step:
    """Actions of a party in a tick.

    Parameters
    ----------
    owners, places
        Users and centres of new queries.
    ended
        Maximum number of queries to terminate.
    enders
        Only the first ``enders`` users terminate queries; all users if None.
    """

    owners: Ids
    places: Floats
    ended: int = 0
    enders: int | None = None


class Party(Protocol):
    """A group of users. Its oldest queries are terminated first or, if ``mixed``, random ones."""

    users: int
    name: str
    malicious: bool
    mixed: bool

    def scaled(self, factor: float) -> Party:
        """Return the party with fewer requests and queries, by the same number of users."""

    def begin(self, random: Random, data: Floats) -> Step:
        """Return the queries before the first tick."""

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Return the actions of one tick; ``held`` of its queries are live."""


class _ScalableParty:
    """Implements :meth:`Party.scaled` for parties with a number of queries and perhaps a rate."""

    malicious = False
    mixed = False

    def scaled(self, factor: float) -> Self:
        """Return the party with fewer requests and queries."""
        party: Any = self
        rate = {"rate": party.rate * factor} if hasattr(party, "rate") else {}
        scaled: Self = replace(party, queries=int(party.queries * factor), **rate)
        return scaled


@dataclass
class Normal(_ScalableParty):
    """Users who register queries where the data is."""

    users: int = 100
    rate: float = 600.0
    queries: int = 900_000
    name: str = "normal"
    mixed = True

    def begin(self, random: Random, data: Floats) -> Step:
        """Register all queries, over the users by rank."""
        return Step(self._owners(random, self.queries), drawn(random, data, self.queries))

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Register queries and terminate as many."""
        count = int(random.poisson(self.rate * tick_s))
        return Step(self._owners(random, count), drawn(random, data, count), count)

    def _owners(self, random: Random, count: int) -> Ids:
        weights = rank_weights(self.users)
        return random.choice(self.users, count, p=weights)


@dataclass
class Attack(_ScalableParty):
    """Users who create hotspots, one after the other.

    Parameters
    ----------
    users
        Attackers, who share the work evenly.
    rate
        Queries moved per second.
    queries
        Number of queries that move to each target.
    start, stop
        Ticks, the second exclusive.
    stagger
        Ticks between the first requests of successive users.
    normal_part
        Share of the registrations that are like those of normal users.
    pause
        Ticks of rest after each target.
    uneven
        Whether the work is distributed like that of normal users, instead of evenly.
    side
        Side of the square around a target.
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

    def __post_init__(self) -> None:
        """Start without a target."""
        self.targets: list[tuple[int, Floats]] = []
        self._placed = 0
        self._rest_until = 0

    def begin(self, random: Random, data: Floats) -> Step:
        """Register all queries like normal users."""
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
    """Many users at one place for some time: they arrive within ``rise`` ticks, then leave."""

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
        """Start without a place."""
        self._place: Floats | None = None

    def scaled(self, factor: float) -> Crowd:
        """Return the crowd with as many users and fewer queries."""
        return replace(self, queries_each=max(round(self.queries_each * factor), 1))

    def begin(self, random: Random, data: Floats) -> Step:
        """Register nothing; draw the place."""
        self._place = drawn(random, data, 1)[0]
        return nothing()

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Arrive, stay or leave."""
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
class Newcomer(_ScalableParty):
    """One new user who registers many queries, in one town or everywhere.

    ``town`` is the side of the square that has the queries; 1 is everywhere.
    """

    rate: float = 300.0
    queries: int = 50_000
    start: int = 20
    town: float = 0.05
    name: str = "newcomer"
    users = 1

    def __post_init__(self) -> None:
        """Start without a place."""
        self._place: Floats | None = None
        self._placed = 0

    def begin(self, random: Random, data: Floats) -> Step:
        """Register nothing; draw the town."""
        self._place = drawn(random, data, 1)[0]
        return nothing()

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Register queries until all are there."""
        assert self._place is not None, "a party begins before its first tick"
        wanted = int(random.poisson(self.rate * tick_s)) if tick >= self.start else 0
        count = min(wanted, self.queries - self._placed)
        self._placed += count
        if self.town >= 1.0:
            return Step(np.zeros(count, np.int64), drawn(random, data, count))
        return Step(np.zeros(count, np.int64), around(random, self._place, self.town, count))


@dataclass
class Mover(_ScalableParty):
    """One user whose queries are all at one place, and move to another one."""

    rate: float = 300.0
    queries: int = 20_000
    start: int = 20
    side: float = 0.02
    name: str = "mover"
    users = 1

    def __post_init__(self) -> None:
        """Start without a place."""
        self._houses: Floats = np.empty((0, 2))
        self._moved = 0

    def begin(self, random: Random, data: Floats) -> Step:
        """Register all queries at the first place."""
        self._houses = drawn(random, data, 2)
        places = around(random, self._houses[0], self.side, self.queries)
        return Step(np.zeros(self.queries, np.int64), places)

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Move queries until all are at the second place."""
        wanted = int(random.poisson(self.rate * tick_s)) if tick >= self.start else 0
        count = min(wanted, self.queries - self._moved)
        self._moved += count
        places = around(random, self._houses[1], self.side, count)
        return Step(np.zeros(count, np.int64), places, count)


@dataclass
class Leaver(_ScalableParty):
    """Users who have queries like attackers, and terminate them all instead of attacking."""

    users: int = 10
    queries: int = 100_000
    stop: int = 20
    name: str = "leaver"

    def begin(self, random: Random, data: Floats) -> Step:
        """Register all queries where the data is."""
        owners = random.integers(0, self.users, self.queries)
        return Step(owners, drawn(random, data, self.queries))

    def step(self, tick: int, tick_s: float, held: int, random: Random, data: Floats) -> Step:
        """Stay, then terminate all queries at once."""
        gone = held if tick >= self.stop else 0
        return Step(np.empty(0, np.int64), np.empty((0, 2)), gone)


def nothing() -> Step:
    """Return a tick without requests."""
    return Step(np.empty(0, np.int64), np.empty((0, 2)))


def drawn(random: Random, data: Floats, count: int) -> Floats:
    """Draw places where the data is."""
    places: Floats = data[random.integers(0, len(data), count)]
    return places


def around(random: Random, place: Floats, side: float, count: int) -> Floats:
    """Draw places in a square."""
    return place + side * (random.random((count, 2)) - 0.5)


@lru_cache(maxsize=8)
def rank_weights(users: int, top: float = 0.2, part: float = 0.8) -> Floats:
    """Return power-law weights by rank, such that the top fifth has four fifths.

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
