"""Forecasts of ``roost bench synopsis``, replayed over the data.

A forecast is repeated by a scope that ends when it would have been made: rows after that do not
matter. It is compared with the better of two naive ones: the last value, and the value a day before
the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.bench.common import Row
from roost.bench.synopsis_cases import HOUR_US, Weather
from roost.model.arrays import Floats
from roost.model.records import Box
from roost.synopsis import Scope
from roost.synopsis.reader import SynopsisReader

LEAD_HOURS = 6
FORECASTS, FORECASTS_QUICK = 4_000, 400
WARM_UP_HOURS = 72  # a forecast requires two or three days
TARGET = "temp_c"


def hourly(weather: Weather, name: str) -> tuple[Floats, int]:
    """Return a feature by site and hour, NaN where there is none, and the first hour."""
    position = np.stack([np.asarray(weather.table[column]) for column in ("lon", "lat")], axis=1)
    site = np.unique(position, axis=0, return_inverse=True)[1]
    hour = np.asarray(weather.table["event_time"].cast(pa.int64())) // HOUR_US
    first = int(hour.min())
    values = np.full((len(weather.sites), int(hour.max()) - first + 1), np.nan)
    values[site, hour - first] = np.asarray(
        weather.table[name].cast(pa.float64()).fill_null(np.nan)
    )
    return values, first


def measure_forecasts(reader: SynopsisReader, weather: Weather, seed: int, quick: bool) -> Row:
    """Forecast the temperature of random sites at random hours; returns errors and coverage.

    Cases in which a naive forecast has no value are left out.
    """
    values, first = hourly(weather, TARGET)
    rng = np.random.default_rng(seed)
    errors: list[tuple[float, float, float]] = []
    held = []
    for _ in range(FORECASTS_QUICK if quick else FORECASTS):
        site = int(rng.integers(len(values)))
        now = int(rng.integers(WARM_UP_HOURS, values.shape[1] - LEAD_HOURS))
        known = values[site, [now + LEAD_HOURS, now, now + LEAD_HOURS - 24]]
        x, y = weather.sites[site].tolist()
        scope = Scope(Box(x, y, x, y), until=(first + now + 1) * HOUR_US)
        at = (first + now + LEAD_HOURS) * HOUR_US
        result = reader.query("forecast", feature=TARGET, at=at, scope=scope).result
        if result.value is None or result.low is None or result.high is None:
            continue
        if np.isfinite(known).all():
            truth, last, day_before = known.tolist()
            errors.append((truth - result.value, truth - last, truth - day_before))
            held.append(result.low <= truth <= result.high)
    own, last, day_before = _rmse(np.array(errors).T)
    return {
        "forecast_ratio_vs_naive": own / min(last, day_before),
        "forecast_coverage": float(np.mean(held)),
        "forecast_rmse": own,
        "forecasts": len(held),
    }


def _rmse(errors: NDArray[np.float64]) -> Sequence[float]:
    rmse: Sequence[float] = np.sqrt((errors * errors).mean(axis=1)).tolist()
    return rmse
