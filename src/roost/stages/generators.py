"""Generators of random points around populated places, call records, tweets and ratings.

Problem: a stream source must produce any range of rows on any worker, also after a restart, and the
rows must be the same. A generator with mutable state cannot do that.

Idea: a counter-based random generator (Philox) whose counter *is* the row number. One step of the
counter gives four 64-bit words, which suffice for a row, so row ``k`` depends only on the seed and
``k``. The words of a row are used like this::

                      points                                calls
    word 0            place, by weight                      caller (both halves, if normal)
    word 1  low half  radius of the offset (or its x,       the same
                      if a hotspot is uniform)
            high half angle of the offset  (or its y)       the same
    word 2  low half  hotspot that receives the row         callee
            high half the value                             duration
    word 3  low half                                        displacement of the start
            high half                                       whether and where the caller roams

                      tweets                                ratings
    word 0            topics 1 and 2, a half each           user
    word 1            topics 3 and 4                        item
    word 2            topics 5 and 6                        rating (low half)
    word 3  low half  number of topics
            high half user

Rows arrive at a constant rate. Points may have temporary, drifting hotspots, which change their
location, not their number. The generators do not move individual objects (rows are independent) and
ignore streets and coasts. A caller may begin a call while another one of theirs is not over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from roost.errors import ConfigError
from roost.model.arrays import Floats, Ints

Words = npt.NDArray[np.uint64]

VALUE_MEAN = 20.0  # of the exponentially distributed ``value`` column

_WORDS_PER_ROW = 4
# Rows processed at a time: their temporaries fit into a core's L2 cache.
_STRIDE_ROWS = 16_384
# The side of a normal hotspot, and the lifetime of a normal intensity, span six deviations.
_DEVIATIONS = 6.0
_US_PER_S = 1e6
_UNIT_32 = np.float64(2.0**-32)
_UNIT_53 = np.float64(2.0**-53)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)


class Generator(Protocol):
    """An infinite stream of rows with random access to any range of them."""

    @property
    def rate_per_s(self) -> float:
        """Rows per second of event time."""

    def block(self, start_row: int, stop_row: int) -> pa.Table:
        """Return rows ``start_row`` to ``stop_row - 1``."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places around which points are drawn, in degrees, with the relative share of the points."""

    lon: Floats
    lat: Floats
    weight: Floats

    def __post_init__(self) -> None:
        if not len(self.lon) == len(self.lat) == len(self.weight) > 0:
            lengths = (len(self.lon), len(self.lat), len(self.weight))
            raise ConfigError("generator.places", lengths, "three arrays of one length, not empty")
        usable = np.isfinite(self.weight).all() and (self.weight >= 0).all()
        if not usable or not self.weight.any():
            raise ConfigError("generator.places", "weights", "finite weights >= 0, not all zero")


def load_places() -> Places:
    """Return the bundled places: the 2,000 most populous of GeoNames, weighted by population."""
    with (resources.files("roost") / "data" / "cities.csv").open("rb") as file:
        table = pa.csv.read_csv(file)
    columns = (table[name].to_numpy().astype(np.float64) for name in ("lon", "lat", "population"))
    return Places(*columns)


@dataclass(frozen=True, slots=True)
class Hotspot:
    """A temporary hotspot: a square that receives a share of all points.

    Times are event times in microseconds since 1970 UTC.
    """

    center: tuple[float, float]  # longitude and latitude at ``start_us``
    side: float  # in degrees; holds 99.7 % of a normal hotspot's points on each axis
    share: float  # of all points, in (0, 1]; at the peak, if the intensity is normal
    start_us: int
    stop_us: int
    spread: str = "uniform"  # of its points in the square; or "normal"
    intensity: str = "step"  # over its lifetime; or "normal", with its peak in the middle
    drift_deg_per_s: tuple[float, float] = (0.0, 0.0)  # of the centre

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("hotspot.share", self.share, "a number in (0, 1]")
        if not 0 <= self.side < np.inf:
            raise ConfigError("hotspot.side", self.side, "degrees, 0 or more")
        if self.start_us >= self.stop_us:
            expected = f"more than start_us {self.start_us}"
            raise ConfigError("hotspot.stop_us", self.stop_us, expected)
        if self.spread not in ("uniform", "normal"):
            raise ConfigError("hotspot.spread", self.spread, "uniform or normal")
        if self.intensity not in ("step", "normal"):
            raise ConfigError("hotspot.intensity", self.intensity, "step or normal")

    def share_at(self, time_us: Ints) -> Floats:
        """Return its share of all points at each time."""
        alive = (time_us >= self.start_us) & (time_us < self.stop_us)
        if self.intensity == "step":
            return np.where(alive, self.share, 0.0)
        middle_us = (self.start_us + self.stop_us) / 2
        deviation_us = (self.stop_us - self.start_us) / _DEVIATIONS
        bell = np.exp(-0.5 * ((time_us - middle_us) / deviation_us) ** 2)
        return np.where(alive, self.share * bell, 0.0)

    def _place(self, time_us: Ints, offset: Words) -> tuple[Floats, Floats]:
        age_s = (time_us - self.start_us) / _US_PER_S
        if self.spread == "uniform":
            x, y = _halves(offset)
            dx, dy = (x - 0.5) * self.side, (y - 0.5) * self.side
        else:
            dx, dy = _normal_pair(offset, self.side / _DEVIATIONS)
        lon = self.center[0] + self.drift_deg_per_s[0] * age_s + dx
        lat = self.center[1] + self.drift_deg_per_s[1] * age_s + dy
        return lon, lat


@dataclass(frozen=True, slots=True, eq=False)
class PointGenerator:
    """An infinite stream of points with random access to any range of rows.

    Examples
    --------
    >>> generator = PointGenerator(load_places(), rate_per_s=1_000, start_us=0, seed=7)
    >>> generator.block(5, 8).column_names
    ['id', 'event_time', 'lon', 'lat', 'value']
    >>> generator.block(5, 8).equals(generator.block(0, 100).slice(5, 3))
    True
    """

    places: Places
    rate_per_s: float  # points per second of event time
    start_us: int  # event time of row 0, microseconds since 1970 UTC
    seed: int
    hotspots: tuple[Hotspot, ...] = ()  # their shares sum to at most 1 at any time
    spread_deg: float = 0.1  # standard deviation of a point around its place, on each axis
    _keep: Floats = field(init=False, repr=False)
    _other: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_stream(self.rate_per_s, self.seed)
        if not 0 <= self.spread_deg < np.inf:
            raise ConfigError("generator.spread_deg", self.spread_deg, "degrees, 0 or more")
        object.__setattr__(self, "hotspots", tuple(self.hotspots))
        for at in self.hotspots:
            together = sum(h.share for h in self.hotspots if h.start_us <= at.start_us < h.stop_us)
            if together > 1 + 1e-9:
                raise ConfigError("generator.hotspots", together, "shares of at most 1 together")
        keep, other = _alias_table(self.places.weight)
        object.__setattr__(self, "_keep", keep)
        object.__setattr__(self, "_other", other)

    def time_us(self, rows: Ints) -> Ints:
        """Return the event times of rows, microseconds since 1970 UTC; never decreasing."""
        return _times_us(rows, self.rate_per_s, self.start_us)

    def block(self, start_row: int, stop_row: int) -> pa.Table:
        """Return rows ``start_row`` to ``stop_row - 1``; ``id`` is the row number."""
        ids = _row_numbers(start_row, stop_row)
        times_us = self.time_us(ids)
        lon, lat, value = np.empty((3, len(ids)), dtype=np.float64)
        for start in range(0, len(ids), _STRIDE_ROWS):
            part = slice(start, start + _STRIDE_ROWS)
            self._fill(start_row + start, times_us[part], lon[part], lat[part], value[part])
        stamps = _stamps(times_us)
        names = ["id", "event_time", "lon", "lat", "value"]
        return pa.table([pa.array(ids), stamps, lon, lat, value], names=names)

    def _fill(self, first_row: int, time_us: Ints, lon: Floats, lat: Floats, value: Floats) -> None:
        words = _words(self.seed, first_row, len(time_us))
        which = self._choose(_unit(words[:, 0]))
        dx, dy = _normal_pair(words[:, 1], self.spread_deg)
        np.add(self.places.lon[which], dx, out=lon)
        np.add(self.places.lat[which], dy, out=lat)
        pick, chance = _halves(words[:, 2])
        self._redirect(time_us, words[:, 1], pick, lon, lat)
        _onto_globe(lon, lat)
        np.multiply(-VALUE_MEAN, np.log(1.0 - chance), out=value)

    def _choose(self, chance: Floats) -> Ints:
        scaled = chance * len(self._keep)
        slot = scaled.astype(np.int64)
        return np.where(scaled - slot < self._keep[slot], slot, self._other[slot])

    def _redirect(
        self, time_us: Ints, offset: Words, pick: Floats, lon: Floats, lat: Floats
    ) -> None:
        """Move the rows whose pick is in a hotspot's slice of [0, 1) to that hotspot."""
        floor = np.zeros(len(pick))
        for hotspot in self.hotspots:
            if time_us[-1] < hotspot.start_us or time_us[0] >= hotspot.stop_us:
                continue
            ceiling = floor + hotspot.share_at(time_us)
            moved = np.flatnonzero((pick >= floor) & (pick < ceiling))
            lon[moved], lat[moved] = hotspot._place(time_us[moved], offset[moved])
            floor = ceiling


@dataclass(frozen=True, slots=True)
class Skew:
    """How rows are distributed over callers, topics, users or items, which are numbered from 0.

    ``zipf``: number ``k`` has a share of about ``(k + 1) ** -exponent``; 0 is uniform.
    ``normal``: numbers are normal around ``mean``, clipped to the first and the last one.
    """

    kind: str = "zipf"
    exponent: float = 0.0
    mean: float = 0.0
    deviation: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("zipf", "normal"):
            raise ConfigError("skew.kind", self.kind, "zipf or normal")
        for name in ("exponent", "mean", "deviation"):
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise ConfigError(f"skew.{name}", value, "a number, 0 or more")

    def choose(self, words: Words, count: int) -> Ints:
        """Return a number below ``count`` for each row."""
        if self.kind == "normal":
            position = self.mean + _normal_pair(words, self.deviation)[0]
            return np.clip(np.floor(position), 0, count - 1).astype(np.int64)
        return self.ranked(_unit(words), count)

    def ranked(self, chance: Floats, count: int) -> Ints:
        """Invert the distribution with density ``x ** -exponent`` on [1, count + 1).

        It needs no table of the numbers; there may be millions of them.
        """
        rest = 1.0 - self.exponent
        if abs(rest) < 1e-9:
            ranks = np.exp(chance * np.log1p(count))
        else:
            ranks = (1.0 + chance * ((count + 1.0) ** rest - 1.0)) ** (1.0 / rest)
        return np.asarray(np.clip(np.floor(ranks - 1.0), 0, count - 1), np.int64)


FIRST_NUMBER = 1_000_000_000  # of the callers; all numbers have ten digits
CALLERS_MAX = 1_000_000_000
ROAMING = 0.05  # share of the calls from another district than the caller's own


@dataclass(frozen=True, slots=True, eq=False)
class CallGenerator:
    """An infinite stream of call records with random access to any range of rows.

    The columns are those of StreamCloud's evaluation: numbers of caller and callee, start and end
    of the call, district and position of the caller, and the time of emission, which is the end.
    Starts ascend with the row number unless ``disorder_s`` displaces them. Each caller belongs to a
    district, and each district is the surroundings of a place.

    Examples
    --------
    >>> generator = CallGenerator(load_places(), rate_per_s=1_000, start_us=0, seed=7)
    >>> generator.block(5, 8).column_names
    ['src', 'dst', 'start', 'end', 'district', 'lat', 'lon', 'ts']
    >>> generator.block(5, 8).equals(generator.block(0, 100).slice(5, 3))
    True
    """

    places: Places
    rate_per_s: float  # calls per second of event time
    start_us: int  # start of the first call, microseconds since 1970 UTC
    seed: int
    callers: int = 10_000
    districts: int = 100  # the first of the places
    skew: Skew = Skew(exponent=0.8)
    duration_s: float = 120.0  # mean of the exponential distribution, before the cap
    longest_s: float = 3_600.0
    disorder_s: float = 0.0  # a start is displaced by less than this
    spread_deg: float = 0.1  # standard deviation of a caller around a place, on each axis

    def __post_init__(self) -> None:
        _check_stream(self.rate_per_s, self.seed)
        if not 2 <= self.callers <= CALLERS_MAX:
            raise ConfigError("generator.callers", self.callers, f"from 2 to {CALLERS_MAX}")
        if not 1 <= self.districts <= len(self.places.lon):
            most = len(self.places.lon)
            raise ConfigError("generator.districts", self.districts, f"from 1 to {most}")
        if not 0 <= self.spread_deg < np.inf:
            raise ConfigError("generator.spread_deg", self.spread_deg, "degrees, 0 or more")
        for name in ("duration_s", "longest_s"):
            if not 0 < getattr(self, name) < np.inf:
                raise ConfigError(f"generator.{name}", getattr(self, name), "seconds, above 0")
        if not 0 <= self.disorder_s < np.inf:
            raise ConfigError("generator.disorder_s", self.disorder_s, "seconds, 0 or more")

    def block(self, start_row: int, stop_row: int) -> pa.Table:
        """Return rows ``start_row`` to ``stop_row - 1``."""
        rows = _row_numbers(start_row, stop_row)
        words = _words(self.seed, start_row, len(rows))
        callee, duration = _halves(words[:, 2])
        displacement, roaming = _halves(words[:, 3])
        src = self.skew.choose(words[:, 0], self.callers)
        dst = (callee * (self.callers - 1)).astype(np.int64)
        dst += dst >= src  # a caller never calls itself
        district = np.where(
            roaming < ROAMING,
            (roaming * (self.districts / ROAMING)).astype(np.int64),
            src % self.districts,
        )
        dx, dy = _normal_pair(words[:, 1], self.spread_deg)
        lon, lat = self.places.lon[district] + dx, self.places.lat[district] + dy
        _onto_globe(lon, lat)
        start = _times_us(rows, self.rate_per_s, self.start_us)
        start += (displacement * (self.disorder_s * _US_PER_S)).astype(np.int64)
        seconds = np.minimum(-self.duration_s * np.log(1.0 - duration), self.longest_s)
        end = start + (seconds * _US_PER_S).astype(np.int64)
        stamps = [_stamps(times) for times in (start, end)]
        numbers = [pa.array(FIRST_NUMBER + each).cast(pa.string()) for each in (src, dst)]
        columns = [*numbers, *stamps, pa.array(district), lat, lon, stamps[1]]
        return pa.table(
            columns, names=["src", "dst", "start", "end", "district", "lat", "lon", "ts"]
        )


TOPICS_MAX = 6  # of a tweet
NUMBERS_MAX = 1_000_000_000  # of topics, users and items


@dataclass(frozen=True, slots=True, eq=False)
class TweetGenerator:
    """An infinite stream of tweets with random access to any range of rows.

    A tweet mentions one to ``most`` topics as hashtags in its text, equally likely numbers of them.

    Examples
    --------
    >>> generator = TweetGenerator(rate_per_s=1_000, start_us=0, seed=7)
    >>> generator.block(5, 8).column_names
    ['id', 'at', 'user', 'text']
    >>> generator.block(5, 8).equals(generator.block(0, 100).slice(5, 3))
    True
    """

    rate_per_s: float  # tweets per second of event time
    start_us: int  # time of the first tweet, microseconds since 1970 UTC
    seed: int
    topics: int = 5_000
    skew: Skew = Skew(exponent=0.5)  # of the topics
    most: int = 5
    users: int = 100_000

    def __post_init__(self) -> None:
        _check_stream(self.rate_per_s, self.seed)
        _check_counts(self, "topics", "users")
        if self.skew.kind != "zipf":
            raise ConfigError("generator.skew", self.skew.kind, "uniform or zipf")
        if not 1 <= self.most <= TOPICS_MAX:
            raise ConfigError("generator.most", self.most, f"from 1 to {TOPICS_MAX}")

    def block(self, start_row: int, stop_row: int) -> pa.Table:
        """Return rows ``start_row`` to ``stop_row - 1``; ``id`` is the row number."""
        ids = _row_numbers(start_row, stop_row)
        words = _words(self.seed, start_row, len(ids))
        count, user = _halves(words[:, 3])
        chances = np.stack([half for k in range(3) for half in _halves(words[:, k])], axis=1)
        mentioned = np.arange(TOPICS_MAX) < 1 + np.floor(count * self.most)[:, np.newaxis]
        chosen = pa.array(self.skew.ranked(chances[mentioned], self.topics)).cast(pa.string())
        tags = pc.binary_join_element_wise("#topic", chosen, "")
        ends = np.concatenate([[0], np.cumsum(mentioned.sum(axis=1))]).astype(np.int32)
        text = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), tags), " ")
        at = _stamps(_times_us(ids, self.rate_per_s, self.start_us))
        users = (user * self.users).astype(np.int64)
        return pa.table([pa.array(ids), at, pa.array(users), text], ["id", "at", "user", "text"])


# Shares of the ratings 1 to 5; somewhat more than half of them make a fan.
RATING_SHARES = (0.05, 0.10, 0.29, 0.33, 0.23)


@dataclass(frozen=True, slots=True, eq=False)
class RatingGenerator:
    """An infinite stream of ratings with random access to any range of rows.

    A user may rate an item several times, as in logs of ratings.

    Examples
    --------
    >>> generator = RatingGenerator(rate_per_s=1_000, start_us=0, seed=7)
    >>> generator.block(5, 8).column_names
    ['user', 'item', 'rating', 'at']
    >>> generator.block(5, 8).equals(generator.block(0, 100).slice(5, 3))
    True
    """

    rate_per_s: float  # ratings per second of event time
    start_us: int  # time of the first rating, microseconds since 1970 UTC
    seed: int
    users: int = 10_000
    items: int = 2_000
    skew: Skew = Skew(exponent=0.8)  # of the items
    activity: Skew = Skew(exponent=0.5)  # of the users

    def __post_init__(self) -> None:
        _check_stream(self.rate_per_s, self.seed)
        _check_counts(self, "users", "items")

    def block(self, start_row: int, stop_row: int) -> pa.Table:
        """Return rows ``start_row`` to ``stop_row - 1``."""
        rows = _row_numbers(start_row, stop_row)
        words = _words(self.seed, start_row, len(rows))
        limits = np.cumsum(RATING_SHARES)[:-1]
        columns = [
            self.activity.choose(words[:, 0], self.users),
            self.skew.choose(words[:, 1], self.items),
            1 + np.searchsorted(limits, _halves(words[:, 2])[0], side="right"),
        ]
        at = _stamps(_times_us(rows, self.rate_per_s, self.start_us))
        return pa.table([*map(pa.array, columns), at], ["user", "item", "rating", "at"])


def _check_counts(generator: object, *names: str) -> None:
    for name in names:
        if not 1 <= getattr(generator, name) <= NUMBERS_MAX:
            expected = f"from 1 to {NUMBERS_MAX}"
            raise ConfigError(f"generator.{name}", getattr(generator, name), expected)


def _stamps(times_us: Ints) -> pa.Array:
    return pa.array(times_us).cast(pa.timestamp("us", tz="UTC"))


def _check_stream(rate_per_s: float, seed: int) -> None:
    if not 0 < rate_per_s < np.inf:
        raise ConfigError("generator.rate_per_s", rate_per_s, "a number above 0")
    if not 0 <= seed < 2**128:
        raise ConfigError("generator.seed", seed, "an integer from 0 to 2**128 - 1")


def _row_numbers(start_row: int, stop_row: int) -> Ints:
    if not 0 <= start_row <= stop_row:
        raise ValueError(f"rows {start_row} to {stop_row} are not a range of rows")
    return np.arange(start_row, stop_row, dtype=np.int64)


def _times_us(rows: Ints, rate_per_s: float, start_us: int) -> Ints:
    age_us: Ints = np.floor(rows * (_US_PER_S / rate_per_s)).astype(np.int64)
    return age_us + start_us


def _alias_table(weight: Floats) -> tuple[Floats, Ints]:
    """Divide weights into equal slots of at most two owners each (Walker's alias method).

    Slot ``k`` belongs to ``k`` up to ``keep[k]`` of its width, and to ``other[k]`` beyond. A draw
    costs two look-ups; a search in cumulative weights would take half of the total time.
    """
    keep = weight / weight.sum() * len(weight)
    other = np.arange(len(weight), dtype=np.int64)
    small = [k for k, width in enumerate(keep) if width < 1]
    large = [k for k, width in enumerate(keep) if width >= 1]
    while small and large:
        poor, rich = small.pop(), large[-1]
        other[poor] = rich
        keep[rich] -= 1 - keep[poor]
        if keep[rich] < 1:
            small.append(large.pop())
    # Remaining small slots are full up to rounding.
    keep[small] = 1.0
    return keep, other


def _words(seed: int, first_row: int, rows: int) -> Words:
    source = np.random.Philox(key=seed, counter=first_row)
    return source.random_raw(_WORDS_PER_ROW * rows).reshape(rows, _WORDS_PER_ROW)


def _unit(words: Words) -> Floats:
    """Convert words to numbers in [0, 1)."""
    return (words >> np.uint64(11)) * _UNIT_53


def _halves(words: Words) -> tuple[Floats, Floats]:
    """Convert each word to two independent numbers in [0, 1)."""
    return (words & _LOW) * _UNIT_32, (words >> _HALF) * _UNIT_32


def _normal_pair(words: Words, deviation: float) -> tuple[Floats, Floats]:
    """Convert each word to two independent normal numbers (Box-Muller transform)."""
    u, v = _halves(words)
    radius = deviation * np.sqrt(-2.0 * np.log(1.0 - u))
    angle = 2.0 * np.pi * v
    return radius * np.cos(angle), radius * np.sin(angle)


def _onto_globe(lon: Floats, lat: Floats) -> None:
    """Wrap longitudes across the antimeridian, and clip latitudes at the poles."""
    over = np.flatnonzero(np.abs(lon) > 180.0)
    lon[over] = (lon[over] + 180.0) % 360.0 - 180.0
    np.clip(lat, -90.0, 90.0, out=lat)
