"""Generator of requests of normal users, attackers and crowds, tick by tick, from a seed.

A world consists of parties, groups of users. Normal users register queries where the data is and
terminate as many; their activity follows a power law, so that a fifth of them sends four fifths of
the requests. An attack moves a fixed number of queries from one target to the next, by registering
queries there and terminating its oldest; targets are drawn from the data, so that its queries match
many points. A rate of 600 means that 600 queries move per second: as many registrations, and as
many terminations. The other parties look like attackers and are not.

Places lie in the unit square. Requests do not react to the guard: blocked users continue to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.model.arrays import Floats, Ints, frozen
from roost.model.space import Rect

Random = np.random.Generator

# Minimum distance of the next target; else the attack would not move.
_TARGET_DISTANCE_MIN = 0.1
_TARGET_TRIES = 50


class Tick(NamedTuple):
    """A unit of time: its number and length, and the number of live queries of the party."""

    number: int
    seconds: float
    live: int
    random: Random
    data: Floats


class Actions(NamedTuple):
    """Actions of a party in a tick: new queries by user and centre, and how many to terminate.

    Only the first ``users`` terminate queries; all users if None.
    """

    owners: Ints = np.empty(0, np.int64)
    places: Floats = np.empty((0, 2))
    terminated: int = 0
    users: int | None = None


@dataclass
class Party:
    """A group of users, who register or move ``rate`` queries per second from tick ``start`` on."""

    users: int = 1
    rate: float = 300.0
    queries: int = 100_000
    start: int = 20
    name: str = "party"
    malicious: ClassVar[bool] = False
    oldest_first: ClassVar[bool] = True
    """Whether their oldest queries are terminated first, rather than random ones."""
    _placed: int = field(init=False, default=0)

    def scaled(self, factor: float) -> Self:
        """Return the party with fewer requests and queries, by the same number of users."""
        return replace(self, queries=int(self.queries * factor), rate=self.rate * factor)

    def begin(self, random: Random, data: Floats) -> Actions:
        """Register queries before the first tick: all, where the data is."""
        owners = self._owners(random, self.queries, self.users)
        return Actions(owners, drawn(random, data, self.queries))

    def step(self, tick: Tick) -> Actions:
        """Return the actions of one tick."""
        raise NotImplementedError

    def _owners(self, random: Random, count: int, users: int) -> Ints:
        """Draw the users of queries, of the first ``users`` evenly."""
        return random.integers(0, users, count)

    def _due(self, tick: Tick) -> int:
        """Return the number of queries to place in a tick, until all are placed."""
        due = int(tick.random.poisson(self.rate * tick.seconds)) if tick.number >= self.start else 0
        count = min(due, self.queries - self._placed)
        self._placed += count
        return count


@dataclass
class Normal(Party):
    """Users who register queries where the data is."""

    users: int = 100
    rate: float = 600.0
    queries: int = 900_000
    name: str = "normal"
    oldest_first = False

    def step(self, tick: Tick) -> Actions:
        """Register queries and terminate as many."""
        count = int(tick.random.poisson(self.rate * tick.seconds))
        owners = self._owners(tick.random, count, self.users)
        return Actions(owners, drawn(tick.random, tick.data, count), count)

    def _owners(self, random: Random, count: int, users: int) -> Ints:
        return random.choice(users, count, p=rank_weights(users))


@dataclass
class Attack(Party):
    """Users who create hotspots, one after the other.

    Parameters
    ----------
    queries
        Number of queries that move to each target.
    stagger
        Ticks between the first requests of successive users.
    normal_part
        Share of the registrations that are like those of normal users.
    pause
        Ticks of rest after each target.
    side
        Side of the square around a target.
    """

    users: int = 10
    rate: float = 600.0
    stagger: int = 0
    normal_part: float = 0.0
    pause: int = 0
    side: float = 0.02
    name: str = "attacker"
    malicious = True
    targets: list[tuple[int, Floats]] = field(init=False, default_factory=list)
    _rest_until: int = field(init=False, default=0)

    def step(self, tick: Tick) -> Actions:
        """Move queries to the target."""
        number, random = tick.number, tick.random
        if number < max(self.start, self._rest_until):
            return Actions()
        if not self.targets or self._placed >= self.queries:
            self.targets.append((number, self._next_target(random, tick.data)))
            self._placed = 0
        joined = self.users
        if self.stagger:
            joined = min(1 + (number - self.start) // self.stagger, self.users)
        count = int(random.poisson(self.rate * tick.seconds * joined / self.users))
        self._placed += count
        if self._placed >= self.queries and self.pause:
            self._rest_until = number + 1 + self.pause
        places = around(random, self.targets[-1][1], self.side, count)
        normal = random.random(count) < self.normal_part
        places[normal] = drawn(random, tick.data, int(normal.sum()))
        return Actions(self._owners(random, count, joined), places, count, joined)

    def _next_target(self, random: Random, data: Floats) -> Floats:
        for _ in range(_TARGET_TRIES):
            target: Floats = drawn(random, data, 1)[0]
            if not self.targets or np.hypot(*(target - self.targets[-1][1])) > _TARGET_DISTANCE_MIN:
                break
        return target


@dataclass
class _Arriving(Party):
    """Users who have no queries at first, and then register them around one place."""

    _place: Floats = field(init=False, repr=False)

    def begin(self, random: Random, data: Floats) -> Actions:
        """Register nothing; draw the place."""
        self._place = drawn(random, data, 1)[0]
        return Actions()


@dataclass
class Crowd(_Arriving):
    """Many users at one place for some time: they arrive within ``rise`` ticks, then leave."""

    users: int = 400
    queries_each: int = 25
    stop: int = 80
    rise: int = 12
    side: float = 0.02
    name: str = "crowd"

    def scaled(self, factor: float) -> Self:
        """Return the crowd with as many users and fewer queries."""
        return replace(self, queries_each=max(round(self.queries_each * factor), 1))

    def step(self, tick: Tick) -> Actions:
        """Arrive, stay or leave."""
        turn = tick.number - self.start
        if tick.number >= self.stop:
            return Actions(terminated=tick.live // 4 + 1)
        if not 0 <= turn < self.rise:
            return Actions()
        coming = np.arange(turn * self.users // self.rise, (turn + 1) * self.users // self.rise)
        owners = np.repeat(coming, self.queries_each)
        return Actions(owners, around(tick.random, self._place, self.side, len(owners)))


@dataclass
class Newcomer(_Arriving):
    """One new user who registers many queries, in one town or everywhere.

    ``town`` is the side of the square that has the queries; 1 is everywhere.
    """

    queries: int = 50_000
    town: float = 0.05
    name: str = "newcomer"

    def step(self, tick: Tick) -> Actions:
        """Register queries until all are there."""
        count = self._due(tick)
        if self.town >= 1.0:
            return Actions(np.zeros(count, np.int64), drawn(tick.random, tick.data, count))
        places = around(tick.random, self._place, self.town, count)
        return Actions(np.zeros(count, np.int64), places)


@dataclass
class Mover(Party):
    """One user whose queries are all at one place, and move to another one."""

    queries: int = 20_000
    side: float = 0.02
    name: str = "mover"
    _places: Floats = field(init=False, repr=False)

    def begin(self, random: Random, data: Floats) -> Actions:
        """Register all queries at the first place."""
        self._places = drawn(random, data, 2)
        places = around(random, self._places[0], self.side, self.queries)
        return Actions(np.zeros(self.queries, np.int64), places)

    def step(self, tick: Tick) -> Actions:
        """Move queries until all are at the second place."""
        count = self._due(tick)
        places = around(tick.random, self._places[1], self.side, count)
        return Actions(np.zeros(count, np.int64), places, count)


@dataclass
class Leaver(Party):
    """Users who have queries like attackers, and terminate them all instead of attacking."""

    users: int = 10
    name: str = "leaver"

    def step(self, tick: Tick) -> Actions:
        """Stay, then terminate all queries at once."""
        return Actions(terminated=tick.live if tick.number >= self.start else 0)


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in order: to register queries with these numbers, or to terminate them.

    ``codes`` are the users, as indices into the world's names. ``boxes`` are ``x0, y0, x1, y1`` in
    the unit square, NaN for terminations.
    """

    codes: NDArray[np.int32]
    registers: NDArray[np.bool_]
    queries: Ints
    boxes: Floats

    def __len__(self) -> int:
        return len(self.codes)

    def table(self, names: Sequence[str], bounds: Rect, *, numbered: bool = False) -> pa.Table:
        """Return a block for the query log, scaled to the given bounds.

        Query identifiers are texts, or integers if ``numbered``.
        """
        low = np.array([bounds.x0, bounds.y0] * 2)
        size = np.array([bounds.x1 - bounds.x0, bounds.y1 - bounds.y0] * 2)
        boxes = low + self.boxes * size
        ids = pa.array(self.queries)
        if not numbered:
            ids = pc.binary_join_element_wise("q", ids.cast(pa.string()), "")
        return pa.table(
            {
                "op": pa.array(np.where(self.registers, "register", "terminate")),
                "query_id": ids,
                "user_id": pa.array(names).take(pa.array(self.codes)),
                **{
                    name: pa.array(np.ascontiguousarray(boxes[:, k]), mask=~self.registers)
                    for k, name in enumerate(("x0", "y0", "x1", "y1"))
                },
            }
        )


class World:
    """Parties together, tick by tick.

    ``data`` is a sample of the data in the unit square, ``(n, 2)``. A tick has ``tick_s`` seconds
    of stream time.
    """

    def __init__(
        self,
        parties: Sequence[Party],
        data: Floats,
        seed: int,
        tick_s: float = 15.0,
        query_side: float = 0.0016,
    ) -> None:
        self._parties = parties
        self._data = data
        self._random = np.random.default_rng([seed, 77])
        self._tick_s = tick_s
        self._query_side = query_side
        self.tick = 0
        sizes = [party.users for party in parties]
        self._first = np.concatenate([[0], np.cumsum(sizes)])
        self.names = tuple(f"{party.name}-{k}" for party in parties for k in range(party.users))
        self.malicious = np.repeat([party.malicious for party in parties], sizes)
        # User of each query by number, and numbers of each party's live queries, oldest first.
        self._codes = np.empty(0, np.int32)
        self._live: list[Ints] = [np.empty(0, np.int64)] * len(parties)

    @property
    def targets(self) -> list[Floats]:
        """Targets of all attacks so far, in order."""
        found = [t for party in self._parties if isinstance(party, Attack) for t in party.targets]
        return [place for _, place in sorted(found, key=lambda target: target[0])]

    def begin(self) -> Requests:
        """Return the requests before the first tick."""
        steps = [party.begin(self._random, self._data) for party in self._parties]
        return _joined([self._registered(k, step) for k, step in enumerate(steps)])

    def next(self) -> Requests:
        """Return the requests of the next tick, shuffled over the parties."""
        blocks = []
        for k, party in enumerate(self._parties):
            live = len(self._live[k])
            step = party.step(Tick(self.tick, self._tick_s, live, self._random, self._data))
            blocks.append(self._terminated(k, step))
            blocks.append(self._registered(k, step))
        self.tick += 1
        joined = _joined(blocks)
        # Any order is valid: a terminated query was registered in an earlier tick.
        order = self._random.permutation(len(joined))
        return Requests(*(getattr(joined, column.name)[order] for column in fields(Requests)))

    def _registered(self, k: int, step: Actions) -> Requests:
        count = len(step.owners)
        numbers = len(self._codes) + np.arange(count)
        codes = (step.owners + self._first[k]).astype(np.int32)
        self._codes = np.append(self._codes, codes)
        self._live[k] = np.append(self._live[k], numbers)
        half = self._query_side / 2
        low, high = np.clip(step.places - half, 0, 1), np.clip(step.places + half, 0, 1)
        return Requests(codes, np.ones(count, np.bool_), numbers, np.hstack([low, high]))

    def _terminated(self, k: int, step: Actions) -> Requests:
        own = live = self._live[k]
        if step.users is not None:
            own = own[self._codes[own] < self._first[k] + step.users]
        count = min(step.terminated, len(own))
        if not self._parties[k].oldest_first:
            own = self._random.choice(own, count, replace=False)
        own = np.sort(own[:count])
        self._live[k] = np.delete(live, np.searchsorted(live, own))
        boxes = np.full((count, 4), np.nan)
        return Requests(self._codes[own], np.zeros(count, np.bool_), own, boxes)


def _joined(blocks: Sequence[Requests]) -> Requests:
    columns = ([getattr(block, column.name) for block in blocks] for column in fields(Requests))
    return Requests(*map(np.concatenate, columns))


def drawn(random: Random, data: Floats, count: int) -> Floats:
    """Draw places where the data is."""
    places: Floats = data[random.integers(0, len(data), count)]
    return places


def around(random: Random, place: Floats, side: float, count: int) -> Floats:
    """Draw places in a square."""
    return place + side * (random.random((count, 2)) - 0.5)


@lru_cache(maxsize=8)
def rank_weights(users: int) -> Floats:
    """Return power-law weights by rank, such that the top fifth has four fifths.

    Examples
    --------
    >>> weights = rank_weights(100)
    >>> round(float(weights[:20].sum()), 3), round(float(weights.sum()), 3)
    (0.8, 1.0)
    """
    ranks = np.arange(1, users + 1, dtype=np.float64)
    first = max(int(0.2 * users), 1)
    low, high = 0.0, 4.0
    for _ in range(40):
        power = (low + high) / 2
        weights = ranks**-power
        if weights[:first].sum() < 0.8 * weights.sum():
            low = power
        else:
            high = power
    weights = ranks**-low
    return frozen(weights / weights.sum())
