"""Totals: time ranges that cut calendar buckets read sums by interval instead of leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.synopsis import (
    Bands,
    Scope,
    SynopsisResult,
    build,
    correlation,
    count,
    learn_bins,
    mean,
    merge,
    quantiles,
    regress,
    select,
    stddev,
)
from roost.synopsis.coarsening import split_groups
from roost.synopsis.totals import owners_of
from synopsis_tables import DAY_US, NUMBERS, START_US, Rows, draw_scope, make_spec, make_table

TABLE = make_table(11, 6_000)
ROWS = Rows(TABLE)
SPEC = make_spec(TABLE)
BINS = learn_bins(TABLE, SPEC)
WITH = build(TABLE, SPEC, BINS)
WITHOUT = build(TABLE, make_spec(TABLE, interval_days=None), BINS)
scopes = draw_scope(ROWS)
HOUR_US = 3_600_000_000


def in_days(first: int, last: int, hours: tuple[int, int] | None = (6, 18)) -> Scope:
    return Scope(since=START_US + first * DAY_US, until=START_US + last * DAY_US, hours=hours)


def statistics(sketch: Any, scope: Scope, name: str) -> list[SynopsisResult]:
    return [
        count(sketch, scope),
        mean(sketch, name, scope),
        stddev(sketch, name, scope),
        correlation(sketch, name, "wind", scope),
    ]


@pytest.mark.parametrize("scope", [in_days(3, 32), in_days(9, 11), in_days(2, 30, None)])
def test_whole_intervals_are_exact(scope: Scope) -> None:
    inside = ROWS.inside(scope)
    temp, wind = (ROWS.column(name)[inside] for name in ("temp", "wind"))
    both = np.isfinite(temp) & np.isfinite(wind)
    truths = (
        inside.sum(),
        np.nanmean(temp),
        np.nanstd(temp, ddof=1),
        np.corrcoef(temp[both], wind[both])[0, 1],
    )
    for result, truth in zip(statistics(WITH, scope, "temp"), truths, strict=True):
        assert result.value == pytest.approx(truth, rel=1e-9)
        assert result.low <= truth <= result.high < result.low + 1e-6
    exact = regress(WITH, "temp", ["wind"], scope)
    slope = np.polyfit(wind[both], temp[both], 1)[0]
    assert exact.coefficients["wind"].value == pytest.approx(slope, rel=1e-9)
    # Without totals the leaves of the cut buckets only have bins.
    assert mean(WITHOUT, "temp", scope).high > mean(WITHOUT, "temp", scope).low + 1e-3


def test_regression_on_several_features_subtracts_rows_with_nulls() -> None:
    scope = in_days(3, 32)
    for name, slope in regress(WITH, "temp", ["wind", "rain"], scope).coefficients.items():
        other = regress(WITHOUT, "temp", ["wind", "rain"], scope).coefficients[name]
        assert slope.value == pytest.approx(other.value, rel=1e-9)
        assert slope.high == pytest.approx(other.high, rel=1e-9)


def test_a_cut_interval_reads_its_own_leaves() -> None:
    whole, cut = in_days(7, 26, None), in_days(7, 26, None)
    cut = replace(cut, until=START_US + 26 * DAY_US + 2 * HOUR_US)
    more = count(WITH, cut).value - count(WITH, whole).value
    assert more == ROWS.inside(cut).sum() - ROWS.inside(whole).sum() > 0
    narrow, wide = mean(WITH, "temp", cut), mean(WITHOUT, "temp", cut)
    truth = np.nanmean(ROWS.column("temp")[ROWS.inside(cut)])
    assert wide.low <= narrow.low <= truth <= narrow.high <= wide.high
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)


@given(scopes, st.sampled_from(NUMBERS[:4]), st.integers(0, HOUR_US))
def test_totals_only_narrow_bounds(drawn: Any, name: str, late: int) -> None:
    scope, inside = drawn
    if scope.until is not None and scope.predicate is None and late % 2:  # `inside` has none
        scope = replace(scope, until=scope.until + late)
        inside = ROWS.inside(scope)
    pairs = zip(statistics(WITH, scope, name), statistics(WITHOUT, scope, name), strict=True)
    for narrow, wide in pairs:
        if wide.low is None:
            assert narrow.low is None
            continue
        assert narrow.low >= wide.low - 1e-6 and narrow.high <= wide.high + 1e-6
    values = ROWS.column(name)[inside]
    values = values[np.isfinite(values)]
    if values.size:
        found = mean(WITH, name, scope)
        assert found.low <= values.mean() <= found.high
    # Counts by bin are not among the totals; they are added up in another order.
    (same,), (expected,) = (quantiles(one, name, [0.5], scope) for one in (WITH, WITHOUT))
    assert (same.kind, same.records) == (expected.kind, expected.records)
    for x, y in (
        (same.value, expected.value),
        (same.low, expected.low),
        (same.high, expected.high),
    ):
        assert x == (None if y is None else pytest.approx(y, rel=1e-9))


@given(st.integers(0, 2**32), st.integers(0, 39), st.integers(1, 39), st.sampled_from(NUMBERS[:4]))
def test_groups_take_their_totals_along(seed: int, first: int, days: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.random(WITH.groups.keys.size) < 0.5
    parts = split_groups(WITH, chosen, rng.random(WITH.rows.time.size) < 0.5)
    for part, flags in zip(parts, (chosen, ~chosen), strict=True):
        owners = np.unique(owners_of(part.totals.keys, SPEC))
        assert owners.tolist() == WITH.groups.keys[flags].tolist()
    scope = in_days(first, first + days)
    expected = statistics(WITH, scope, name)
    for sketch in (merge(parts), Bands(parts)):
        for a, b in zip(statistics(sketch, scope, name), expected, strict=True):
            for x, y in ((a.value, b.value), (a.low, b.low), (a.high, b.high)):
                assert x is y or x == pytest.approx(y, rel=1e-9, abs=1e-9)


def test_a_part_has_the_totals_of_whole_groups() -> None:
    part = select(WITH, in_days(3, 32, None))
    exact = part.groups.keys[part.groups.exact]
    assert 0 < exact.size < part.groups.keys.size
    assert np.unique(owners_of(part.totals.keys, SPEC)).tolist() == exact.tolist()
    # Sums of groups that lost leaves are not those of their leaves.
    inner = in_days(4, 30, None)
    truth = np.nanmean(ROWS.column("temp")[ROWS.inside(inner)])
    assert mean(part, "temp", inner).low <= truth <= mean(part, "temp", inner).high
    assert count(part, inner).value == ROWS.inside(inner).sum()


def test_totals_are_the_sums_of_their_groups() -> None:
    owners = np.searchsorted(WITH.groups.keys, owners_of(WITH.totals.keys, SPEC))
    for name in ("counts", "present", "sums", "squares", "products"):
        column, total = getattr(WITH.groups, name), getattr(WITH.totals, name)
        found = np.zeros(column.shape)
        np.add.at(found, owners, total)
        assert np.allclose(found, column, rtol=1e-12, atol=1e-9), name
    assert (np.diff(WITH.totals.keys) > 0).all()
    assert WITHOUT.totals.keys.size == 0
