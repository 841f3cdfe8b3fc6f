"""The forecast: what it predicts, and that it is used only while it is better than a constant."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from roost.elastic.forecast import COMPARED_MIN, DAY_S, Forecast

HORIZON_S = 600.0
ROUND_S = 60.0


def run(load: Callable[[float], float], seconds: float, since: float = 0.0) -> Forecast:
    forecast = Forecast()
    for clock in np.arange(since, since + seconds, ROUND_S).tolist():
        forecast = forecast.observed(clock, load(clock), HORIZON_S)
    return forecast


def daily(clock: float) -> float:
    return float(10.0 - 6.0 * np.cos(2 * np.pi * clock / DAY_S))


def test_a_trend_is_continued() -> None:
    forecast = run(lambda clock: 1.0 + 0.002 * clock, 3_600.0)
    clock, load = forecast.recent[-1]
    assert clock == 3_540.0
    assert forecast.newest == pytest.approx(load + 0.002 * HORIZON_S)
    assert all(one.forecast < 0.1 * one.constant for one in forecast.errors)
    falling = run(lambda clock: 5.0 - 0.001 * clock, 4_980.0)
    assert falling.newest == 0.0, "no load is negative"


def test_a_constant_load_needs_no_forecast() -> None:
    assert run(lambda clock: 3.0, 7_200.0).newest is None
    random = np.random.default_rng(3)
    forecast, used = Forecast(), 0
    for number in range(500):
        forecast = forecast.observed(number * ROUND_S, 3.0 + 0.1 * random.standard_normal(), 120.0)
        used += forecast.newest is not None
    assert used < 100


def test_it_is_used_only_after_it_was_compared() -> None:
    forecast, clock = Forecast(), 0.0
    while forecast.newest is None:
        clock += ROUND_S
        forecast = forecast.observed(clock, 0.01 * clock, HORIZON_S)
    assert len(forecast.errors) >= COMPARED_MIN
    # A load that turns makes the trend wrong, so it is not used for a while.
    for _ in range(14):
        clock += ROUND_S
        forecast = forecast.observed(clock, 0.01 * clock, HORIZON_S)
    top = 0.01 * clock
    for number in range(1, 16):
        forecast = forecast.observed(clock + number * ROUND_S, top, HORIZON_S)
    assert forecast.newest is None


def test_a_step_is_no_trend() -> None:
    forecast = run(lambda clock: 1.0 if clock < 1_800 else 12.0, 1_920.0)
    assert forecast.predicted(HORIZON_S) == 12.0


def test_earlier_days_show_what_comes() -> None:
    """Each day, the load is four times as high from eight o'clock on."""

    def office(clock: float) -> float:
        return 8.0 if 8 * 3_600 <= clock % DAY_S < 18 * 3_600 else 2.0

    forecast = run(office, 5 * DAY_S + 8 * 3_600 - 300.0)
    assert office(forecast.recent[-1].clock) == 2.0
    assert forecast.predicted(900.0) > 4.0
    flat = run(office, 8 * 3_600 - 300.0, since=0.0)
    assert flat.predicted(900.0) == 2.0, "there was no earlier day"


def test_a_day_that_repeats_is_predicted_better_than_by_a_constant() -> None:
    forecast, mine, constant = Forecast(), [], []
    for clock in np.arange(0.0, 4 * DAY_S, ROUND_S).tolist():
        forecast = forecast.observed(clock, daily(clock), HORIZON_S)
        if clock > 2 * DAY_S:
            true = daily(clock + HORIZON_S)
            mine.append(abs(forecast.predicted(HORIZON_S) - true))
            constant.append(abs(daily(clock) - true))
    assert np.mean(mine) < 0.2 * np.mean(constant)


def test_new_days_count_more() -> None:
    forecast = run(lambda clock: 2.0 if clock < 3 * DAY_S else 4.0, 6 * DAY_S)
    value = forecast.profile[40]
    assert value == pytest.approx(4.0 - 2.0 * 0.7**3)


def test_it_survives_json() -> None:
    forecast = run(daily, 1.5 * DAY_S)
    copy = Forecast.from_json(json.loads(json.dumps(forecast.to_json(), allow_nan=False)))
    assert copy == forecast
    assert copy.observed(1e6, 3.0, 60.0) == forecast.observed(1e6, 3.0, 60.0)
