"""The shortcuts of compiled queries: cut runs, greatest means, frames of addresses."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roost.model.records import Circle
from roost.synopsis import (
    Bands,
    Resolution,
    Scope,
    Synopsis,
    SynopsisSpec,
    build,
    coarsen,
    correlation,
    count,
    mean,
    quantiles,
    select,
    stddev,
)
from roost.synopsis.bins import DROPPED
from roost.synopsis.bounds import greatest_mean
from roost.synopsis.leaves import EVERY_STEP
from roost.synopsis.narrowing import GroupMoments, narrow_mean, narrow_square
from synopsis_tables import START_US, make_spec, make_table

HOUR_US = 3_600_000_000
DAYS = 20
SENSORS = 6


def sensor_table(days: int) -> tuple[pa.Table, SynopsisSpec]:
    """Hourly rows with few distinct values; runs have 8 leaves for each day of a bucket, or more.

    Sensors from 3 on skip hours. 4 sends each row twice. 2 sends two rows in one hour of
    every third day: they are leaves of one step.
    """
    rng = np.random.default_rng(days)
    hours = np.repeat(np.arange(DAYS * 24), SENSORS)
    sensor = np.tile(np.arange(SENSORS), DAYS * 24)
    kept = (sensor < 3) | (rng.random(hours.size) < 0.9)
    kept &= ~((sensor == 1) & (hours < 24 * 9 + 3))
    twice = (sensor == 4) | (sensor == 2) & (hours % 72 == 33)
    at = np.repeat(np.flatnonzero(kept), np.where(twice[kept], 2, 1))
    a, b = rng.integers(0, 5, (2, at.size)).astype(np.float64)
    again = np.append(False, at[1:] == at[:-1]) & (sensor[at] == 4)
    a[again], b[again] = a[np.flatnonzero(again) - 1], b[np.flatnonzero(again) - 1]
    null = (rng.random(hours.size)[at] < 0.1) & (sensor[at] > 1)
    table = pa.table(
        {
            "lon": 10.0 + sensor[at] / 10.0,
            "lat": np.full(at.size, 50.0),
            "event_time": pa.array(START_US + hours[at] * HOUR_US, pa.timestamp("us", "UTC")),
            "a": pa.array(a, mask=null),
            "b": b,
        }
    )
    spec = SynopsisSpec.of(table.schema, ["a", "b"], bins=8, slots=3, bucket_days=days)
    return table, spec


SENSED = {days: sensor_table(days) for days in (7, 8, 9)}
SKETCHES = {days: build(*pair) for days, pair in SENSED.items()}


def test_the_tables_have_runs_of_every_kind() -> None:
    leaves, widths = SKETCHES[8].leaves, SKETCHES[8].leaves.widths
    assert 64 in leaves.sizes and leaves.sizes.max() > 64
    assert {2, EVERY_STEP} <= set(widths[:, 0].tolist())
    assert {0, 1} <= set(widths[:, 1].tolist()), "leaves with several rows, and without"
    assert set((widths[:, 3] >> 7).tolist()) == {0, 1}, "runs with nulls, and without"


@given(
    st.sampled_from(sorted(SKETCHES)),
    st.tuples(st.integers(-5, DAYS * 24), st.integers(1, DAYS * 24)),
    st.sampled_from([None, (0, 8), (16, 8), (8, 24), (3, 11)]),
    st.sampled_from([None, Circle(10.0, 50.0, 3_000.0), Circle(10.4, 50.0, 3_000.0)]),
)
def test_queries_that_cut_runs_are_exact(
    days: int, hours: tuple[int, int], of_day: tuple[int, int] | None, shape: Circle | None
) -> None:
    table, sketch = SENSED[days][0], SKETCHES[days]
    since, until = START_US + hours[0] * HOUR_US, START_US + (hours[0] + hours[1]) * HOUR_US
    scope = Scope(shape, since, until, of_day)
    times = np.asarray(table["event_time"].cast(pa.int64()))
    found = (times >= since) & (times < until)
    if of_day is not None:
        hour = times // HOUR_US % 24
        after, before = hour >= of_day[0], hour < of_day[1]
        found &= (after & before) if of_day[0] < of_day[1] else (after | before)
    if shape is not None:
        found &= np.isclose(np.asarray(table["lon"]), shape.cx)
    a = np.asarray(table["a"].cast(pa.float64()).fill_null(np.nan))
    b = np.asarray(table["b"])
    result = count(sketch, scope)
    assert result.low == result.value == result.high == found.sum()
    a, b = a[found & np.isfinite(a)], b[found & np.isfinite(a)]
    # Every value has a bin of its own.
    result = mean(sketch, "a", scope)
    if not a.size:
        assert result.value is None
        return
    assert (result.low, result.high) == pytest.approx((a.mean(), a.mean()), abs=1e-9)
    (middle,) = quantiles(sketch, "a", [0.5], scope)
    ends = [np.quantile(a, 0.5, method=method) for method in ("lower", "higher")]
    assert (middle.low, middle.high) == pytest.approx(ends, abs=1e-9)
    if a.size > 2 and a.std() > 0.0 and b.std() > 0.0:
        result = correlation(sketch, "a", "b", scope)
        truth = np.corrcoef(a, b)[0, 1]
        assert (result.low, result.high) == pytest.approx((truth, truth), abs=1e-6)
    # A part of a synopsis has the same leaves.
    assert count(select(sketch, scope)).value == found.sum()


terms = st.tuples(st.integers(-5, 5), st.integers(0, 3))


@given(st.integers(0, 4), st.integers(-20, 20), st.lists(terms, max_size=6))
def test_the_greatest_mean_is_that_of_the_best_selection(
    rows: int, total: int, more: list[tuple[int, int]]
) -> None:
    total = total if rows else 0
    best = -np.inf
    for chosen in itertools.product(*(range(number + 1) for _, number in more)):
        number = rows + sum(chosen)
        if number:
            added = sum(value * k for (value, _), k in zip(more, chosen, strict=True))
            best = max(best, (total + added) / number)
    values = np.array([value for value, _ in more], np.float64)
    counts = np.array([number for _, number in more], np.float64)
    assert greatest_mean(float(total), float(rows), values, counts) == pytest.approx(best)


def test_a_copy_of_a_synopsis_has_a_frame_of_its_own() -> None:
    table = make_table(3, 3_000)
    first = build(table, make_spec(table))
    scope = Scope(Circle(10.0, 50.0, 50_000.0), hours=(3, 15))
    expected = mean(first, "temp", scope)  # a query computes the frame
    copied: Synopsis = pickle.loads(pickle.dumps(first))
    assert "frame" in vars(copied)
    filled = copied.frame.addresses[copied.frame.addresses[:, 1] > 0]
    assert not set(filled[:, 0].tolist()) & set(first.frame.addresses[:, 0].tolist())
    del first
    assert mean(copied, "temp", scope) == expected


@example([0, 0, 0, 1], {3}, 0)
@given(
    st.lists(st.integers(-20, 20), min_size=4, max_size=9),
    st.sets(st.integers(0, 3), min_size=1),
    st.integers(-5, 5),
)
def test_moments_of_a_group_bound_any_part(values: list[int], part: set[int], centre: int) -> None:
    x = np.array(values, np.float64)
    own, squares = x[sorted(part)] - centre, (x - centre) ** 2
    total = ((x - x.mean()) ** 2).sum()
    numbers = (float(x.size), x.mean(), total, 1e-12, 1e-12)
    groups = GroupMoments(*(np.array([number]) for number in numbers))
    ends = (x - centre).min(), (x - centre).max()
    low, high = narrow_mean.py_func(groups, 0, float(own.size), float(centre), *ends)
    assert low - 1e-9 <= own.mean() <= high + 1e-9
    ends = squares.min(), squares.max()
    low, high = narrow_square.py_func(groups, 0, float(own.size), float(centre), *ends)
    assert low - 1e-9 <= (own**2).mean() <= high + 1e-9


def test_the_order_of_bands_with_dropped_planes_does_not_matter() -> None:
    table = make_table(4, 3_000)
    spec = make_spec(table)
    fine = build(table.slice(0, 1_500), spec)
    other = build(table.slice(1_500), spec, fine.bins)
    halvings = (DROPPED,) * len(spec.features)
    coarse = coarsen(other, replace(Resolution.of(spec, fine.bins), halvings=halvings))
    scope = Scope(since=START_US + 5 * 24 * HOUR_US + 1, until=START_US + 36 * 24 * HOUR_US - 1)
    for statistic in (mean, stddev):
        results = [
            statistic(Bands(parts), "temp", scope) for parts in ((fine, coarse), (coarse, fine))
        ]
        ends = [(result.low, result.value, result.high) for result in results]
        assert ends[0] == pytest.approx(ends[1], rel=1e-9)
