"""Load of a stream over time, in executors that it would keep busy: functions of clock seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from roost.elastic.group import HOUR_S
from roost.model.arrays import Floats

Curve = Callable[[Floats], Floats]
DAY_S = 86_400.0


def step(before: float, after: float, at: float) -> Curve:
    """Change at once."""
    return lambda clock: np.where(clock < at, before, after)


def ramp(points: Sequence[tuple[float, float]]) -> Curve:
    """Change linearly between pairs of clock and load."""
    clocks, loads = (np.array(column, np.float64) for column in zip(*points, strict=True))
    return lambda clock: np.interp(clock, clocks, loads)


def day(low: float, high: float, length_s: float = DAY_S) -> Curve:
    """Rise from midnight until noon and fall until midnight, as a cosine."""
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    return lambda clock: middle - half * np.cos(2.0 * np.pi * clock / length_s)


def spike(usual: float, high: float, at: float, length_s: float) -> Curve:
    """Have another load for a while."""
    return lambda clock: np.where((clock >= at) & (clock < at + length_s), high, usual)


def swing(first: float, second: float, period_s: float) -> Curve:
    """Alternate between two loads, each for half a period."""
    return lambda clock: np.where(clock % period_s < period_s / 2.0, first, second)


def hourly(loads: Floats, *, steps: bool = False) -> Curve:
    """Follow the mean load of each hour: through the middles of the hours, or in steps."""
    if steps:
        hours = loads.size - 1
        return lambda clock: loads[np.minimum((clock // HOUR_S).astype(np.int64), hours)]
    middles = (np.arange(loads.size) + 0.5) * HOUR_S
    return lambda clock: np.interp(clock, middles, loads)
