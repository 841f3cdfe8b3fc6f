"""Forecast of a load from the same time of earlier days and the trend of the last rounds.

A forecast is useful only while it beats the assumption that the load stays as it is. So every
forecast is compared with the load that was measured when it was due, and so is that assumption.
It is not used until enough were compared, nor while the assumption was the better one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

DAY_S = 86_400
BINS = 144  # of a day
BIN_S = DAY_S // BINS
TREND_ROUNDS = 7  # a step changes at most two of the differences between them
COMPARED_MIN, COMPARED = 6, 12  # forecasts that are compared
NEW_DAY_WEIGHT = 0.3
RATIO_MAX = 4.0  # by which a profile may change the load within the horizon
UNKNOWN = -1.0


class Reading(NamedTuple):
    """A measured load, and when."""

    clock: float
    load: float


class Bin(NamedTuple):
    """The part of the day that has begun: its number, and the sum and number of its readings."""

    number: int = 0
    total: float = 0.0
    readings: int = 0


class Issued(NamedTuple):
    """A forecast that is not due yet, and the load when it was made."""

    due: float
    forecast: float
    load: float


class Errors(NamedTuple):
    """Absolute errors of a forecast, and of assuming that the load stays as it is."""

    forecast: float
    constant: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """All that a forecast is made from; immutable.

    ``profile`` is the mean load of earlier days, by time of day, new days counting more.
    """

    profile: tuple[float, ...] = (UNKNOWN,) * BINS
    bin: Bin = field(default_factory=Bin)
    recent: tuple[Reading, ...] = ()
    issued: tuple[Issued, ...] = ()
    errors: tuple[Errors, ...] = ()

    def observed(self, clock: float, load: float, horizon_s: float) -> Forecast:
        """Return the forecast after a measured load, with a new one for the horizon."""
        due = [one for one in self.issued if one.due <= clock]
        compared = [Errors(abs(one.forecast - load), abs(one.load - load)) for one in due]
        recent = (*self.recent, Reading(clock, load))[-TREND_ROUNDS:]
        profile, current = self._binned(clock, load)
        after = replace(
            self,
            profile=profile,
            bin=current,
            recent=recent,
            issued=self.issued[len(due) :],
            errors=(*self.errors, *compared)[-COMPARED:],
        )
        issued = Issued(clock + horizon_s, after.predicted(horizon_s), load)
        return replace(after, issued=(*after.issued, issued))

    def _binned(self, clock: float, load: float) -> tuple[tuple[float, ...], Bin]:
        """Return the profile, with the bin that has ended, and the current bin."""
        number, (last, total, count) = int(clock % DAY_S // BIN_S), self.bin
        if number == last:
            return self.profile, Bin(number, total + load, count + 1)
        current = Bin(number, load, 1)
        if not count:
            return self.profile, current
        known, mean = self.profile[last], total / count
        value = mean if known == UNKNOWN else known + NEW_DAY_WEIGHT * (mean - known)
        return (*self.profile[:last], value, *self.profile[last + 1 :]), current

    def predicted(self, horizon_s: float) -> float:
        """Return the load after the horizon: by trend, and by profile if earlier days are known."""
        clock, load = self.recent[-1]
        trend = max(load + _slope(self.recent) * horizon_s, 0.0)
        now, then = self._usual(clock), self._usual(clock + horizon_s)
        if now is None or then is None or now <= 0.0:
            return trend
        ratio = min(max(then / now, 1.0 / RATIO_MAX), RATIO_MAX)
        return 0.5 * (trend + load * ratio)

    def _usual(self, clock: float) -> float | None:
        """Return the usual load at a time of day, between the middles of two bins."""
        place, part = divmod(clock % DAY_S / BIN_S - 0.5, 1.0)
        first = self.profile[int(place) % BINS]
        second = self.profile[(int(place) + 1) % BINS]
        if UNKNOWN in (first, second):
            return None
        return first + part * (second - first)

    @property
    def newest(self) -> float | None:
        """The newest forecast if it should be used: it was better than a constant load."""
        if len(self.errors) < COMPARED_MIN or not self.issued:
            return None
        mine, constant = (sum(column) for column in zip(*self.errors, strict=True))
        return self.issued[-1].forecast if mine < constant else None

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON."""
        return {
            "profile": list(self.profile),
            "bin": list(self.bin),
            "recent": [list(one) for one in self.recent],
            "issued": [list(one) for one in self.issued],
            "errors": [list(one) for one in self.errors],
        }

    @classmethod
    def from_json(cls, data: Any) -> Forecast:
        """Invert :meth:`to_json`."""
        return cls(
            tuple(data["profile"]),
            Bin(*data["bin"]),
            tuple(Reading(*one) for one in data["recent"]),
            tuple(Issued(*one) for one in data["issued"]),
            tuple(Errors(*one) for one in data["errors"]),
        )


def _slope(readings: Sequence[Reading]) -> float:
    """Return the median change per second from one reading to the next: a step is no trend."""
    pairs = pairwise(readings)
    changes = [(b.load - a.load) / (b.clock - a.clock) for a, b in pairs if b.clock > a.clock]
    return median(changes) if len(changes) >= TREND_ROUNDS - 1 else 0.0
