"""Forecasts of a synopsis against the same rule written out over the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binomtest

from roost.errors import ConfigError
from roost.model.records import Box
from roost.synopsis import (
    BoundKind,
    Scope,
    Synopsis,
    SynopsisResult,
    SynopsisSpec,
    build,
    count,
    forecast,
    learn_bins,
    merge,
)
from synopsis_tables import START_US

HOUR_US = 3_600_000_000
DAYS = 70
STATIONS = ((10.0, 50.0), (11.0, 50.5), (10.5, 49.0))


def make_series(seed: int, days: int = DAYS, missing: float = 0.1) -> np.ndarray:
    """Whole degrees by station and hour: a day's course and an anomaly that decays."""
    rng = np.random.default_rng(seed)
    hours = np.arange(24 * days)
    anomaly = np.zeros((len(STATIONS), hours.size))
    for t in range(1, hours.size):
        anomaly[:, t] = 0.93 * anomaly[:, t - 1] + rng.normal(0.0, 1.0, len(STATIONS))
    values = np.round(20.0 + 6.0 * np.sin(hours / 24.0 * 2.0 * np.pi) + anomaly)
    values[rng.random(values.shape) < missing] = np.nan
    return values


def make_table(series: np.ndarray, nulls: bool = True) -> pa.Table:
    """One row for each station and hour; missing values are null, or have no row."""
    station, hour = np.indices(series.shape).reshape(2, -1)
    values = series.ravel()
    kept = np.ones(values.size, bool) if nulls else np.isfinite(values)
    order = np.argsort(hour[kept], kind="stable")
    station, hour, values = (column[kept][order] for column in (station, hour, values))
    positions = np.array(STATIONS)[station]
    return pa.table(
        {
            "lon": positions[:, 0],
            "lat": positions[:, 1],
            "event_time": pa.array(START_US + hour * HOUR_US, pa.timestamp("us", "UTC")),
            "temp": pa.array(values, pa.float32(), mask=~np.isfinite(values)),
        }
    )


SERIES = make_series(1)
TABLE = make_table(SERIES)
SPEC = SynopsisSpec.of(TABLE.schema, ["temp"], bins=200, place_bits=20)
BINS = learn_bins(TABLE, SPEC)
BUILT = build(TABLE, SPEC, BINS)


def place(station: int) -> Box:
    x, y = STATIONS[station]
    return Box(x, y, x, y)


def at_hour(hour: int) -> int:
    return START_US + hour * HOUR_US


def oracle(series: np.ndarray, now: int, target: int) -> tuple[float, list[float]] | None:
    """The forecast for an hour from the values up to another one, and the past errors."""

    def profile(hour: int, newest: int) -> float:
        total = weight = 0.0
        for k in range(14):
            earlier = hour - 24 * (newest + k)
            if start <= earlier <= now and math.isfinite(series[earlier]):
                total += 0.8**k * series[earlier]
                weight += 0.8**k
        return total / weight if weight else math.nan

    # Values of 43 days and as long as the target is ahead, from the begin of a day on.
    start = max((now + 1 - 43 * 24 - (target - now - 1)) // 24 * 24, 0)
    last = next(
        (h for h in range(now, start - 1, -1) if math.isfinite(series[h] - profile(h, 1))), None
    )
    if last is None:
        return None
    lead = target - last
    days = -(-lead // 24)
    pairs = []
    for hour in range(max(last - 28 * 24, start + lead), last + 1):
        before = series[hour - lead] - profile(hour - lead, 1)
        after = series[hour] - profile(hour, days)
        if math.isfinite(before) and math.isfinite(after):
            pairs.append((before, after))
    if len(pairs) < 20 or not math.isfinite(profile(target, days)):
        return None
    share = sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs)
    value = profile(target, days) + share * (series[last] - profile(last, 1))
    return value, sorted(b - share * a for a, b in pairs)


def test_bins_hold_one_value_each() -> None:
    records = BUILT.bin_records
    used = records.counts > 0
    used[:, 0] = False
    assert np.array_equal(records.lows[used], records.highs[used]) and used.sum() > 20


@pytest.mark.parametrize("lead", [1, 6, 24, 30, 60])
@pytest.mark.parametrize("now", [80, 700, 1500])
def test_forecasts_are_those_of_the_rule(now: int, lead: int) -> None:
    for station in range(len(STATIONS)):
        scope = Scope(place(station), until=at_hour(now + 1))
        result = forecast(BUILT, "temp", at_hour(now + lead), scope)
        expected = oracle(SERIES[station], now, now + lead)
        if expected is None:
            assert result.value is None and now == 80
            continue
        value, errors = expected
        assert result.value == pytest.approx(value, rel=1e-9)
        outside = max(int((len(errors) + 1) * 0.025), 1)
        assert result.low == pytest.approx(value + errors[outside - 1], rel=1e-9)
        assert result.high == pytest.approx(value + errors[-outside], rel=1e-9)
        assert result.kind is BoundKind.PROBABLE
        assert result.confidence == min(0.95, 1.0 - 2.0 * outside / (len(errors) + 1))


def test_later_rows_do_not_matter() -> None:
    now, target = 1_000, at_hour(1_006)
    before = build(TABLE.slice(0, 3 * (now + 1)), SPEC, BINS)
    late = forecast(BUILT, "temp", target, Scope(place(1), until=at_hour(now + 1)))
    for own in (Scope(place(1)), Scope(place(1), until=at_hour(now + 1))):
        assert same(forecast(before, "temp", target, own), late)
    # Without ``until``, the rows up to the target's step count.
    near = forecast(BUILT, "temp", target, Scope(place(1)))
    assert not same(near, late)
    assert same(near, forecast(BUILT, "temp", target, Scope(place(1), until=target)))
    assert near == forecast(BUILT, "temp", target + HOUR_US // 2, Scope(place(1)))


def same(a: SynopsisResult, b: SynopsisResult) -> bool:
    columns = [(x.value, x.low, x.high, x.confidence) for x in (a, b)]
    return columns[0] == pytest.approx(columns[1], rel=1e-9)


def test_a_scope_of_several_places_forecasts_their_mean() -> None:
    full = make_series(5, missing=0.0)
    table = make_table(full)
    built = build(table, SPEC, learn_bins(table, SPEC))
    whole = forecast(built, "temp", at_hour(1_206), Scope(until=at_hour(1_201)))
    expected = oracle(full.mean(axis=0), 1_200, 1_206)
    assert expected is not None and whole.value == pytest.approx(expected[0], rel=1e-9)


def test_merged_synopses_and_small_groups_have_the_same_forecasts() -> None:
    scope, target = Scope(place(2), until=at_hour(1_501)), at_hour(1_506)
    expected = forecast(BUILT, "temp", target, scope)
    parts = [build(TABLE.slice(k, 400), SPEC, BINS) for k in range(0, TABLE.num_rows, 400)]
    assert same(forecast(merge(parts), "temp", target, scope), expected)
    fine = SynopsisSpec.of(TABLE.schema, ["temp"], bins=200, place_bits=20, bucket_days=1)
    rows = build(TABLE, fine, BINS)
    assert rows.rows.x.size == TABLE.num_rows and count(rows).value == count(BUILT).value
    assert same(forecast(rows, "temp", target, scope), expected)
    absent = build(make_table(SERIES, nulls=False), SPEC, BINS)
    assert same(forecast(absent, "temp", target, scope), expected)


def test_intervals_hold_and_forecasts_beat_naive_ones() -> None:
    held, errors, last, before = 0, [], [], []
    for seed in range(40):
        series = make_series(100 + seed, 45, 0.0)
        table = make_table(series)
        built = build(table, SPEC, learn_bins(table, SPEC))
        for station in range(len(STATIONS)):
            now = 24 * 45 - 7 - seed
            scope = Scope(place(station), until=at_hour(now + 1))
            result = forecast(built, "temp", at_hour(now + 6), scope)
            truth = series[station, now + 6]
            held += result.low <= truth <= result.high
            errors.append(truth - result.value)
            last.append(truth - series[station, now])
            before.append(truth - series[station, now - 18])
    assert binomtest(held, len(errors), 0.95).pvalue > 0.01
    assert np.std(errors) < 0.85 * min(np.std(last), np.std(before))


def test_few_values_give_less_confidence_or_no_forecast() -> None:
    young: Synopsis = build(TABLE.slice(0, 3 * 70), SPEC, BINS)
    result = forecast(young, "temp", at_hour(72), Scope(place(0)))
    assert result.value is not None and 0.8 < result.confidence < 0.95
    assert forecast(young, "temp", at_hour(72), Scope(place(0)), 0.5).confidence == 0.5
    nothing = [
        forecast(young, "temp", at_hour(20)),
        forecast(young, "temp", at_hour(24 * 60)),
        forecast(young, "temp", at_hour(-100)),
        forecast(young, "temp", at_hour(72), Scope(Box(0.0, 0.0, 1.0, 1.0))),
        forecast(BUILT, "temp", at_hour(720), Scope(since=at_hour(718))),
    ]
    assert [own.value for own in nothing] == [None] * 5


def test_refused_forecasts_name_the_part() -> None:
    calls: list[tuple[Any, str]] = [
        (lambda: forecast(BUILT, "snow", 0), "'snow'"),
        (lambda: forecast(BUILT, "temp", 0, confidence=2.0), "confidence"),
        (lambda: forecast(BUILT, "temp", at_hour(10_000), Scope(until=START_US)), "366 days"),
    ]
    for call, named in calls:
        with pytest.raises(ConfigError, match=named):
            call()
