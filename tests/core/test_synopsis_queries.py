"""Every guaranteed bound of a synopsis contains what brute force over the rows computes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.model.records import Box, Circle
from roost.synopsis import (
    Bands,
    BoundKind,
    Resolution,
    Scope,
    Synopsis,
    SynopsisResult,
    SynopsisSpec,
    build,
    coarsen,
    contrast,
    correlation,
    count,
    density,
    fit_memory,
    mean,
    outliers,
    probability,
    quantiles,
    split_at,
    stddev,
)
from synopsis_tables import DAY_US, NUMBERS, START_US, Rows, draw_scope, make_spec, make_table

TABLE = make_table(1)
ROWS = Rows(TABLE)
BUILT = build(TABLE, make_spec(TABLE))
COARSE = fit_memory(BUILT, BUILT.nbytes - 5_000)
DROPPED = coarsen(BUILT, Resolution((1, 8, 8, 8, 8, 8, 0), 2, 12, 14, 10_800, 2))
NOTHING = coarsen(BUILT, Resolution((8,) * 7, 4, 16, 7, 3_600, 4))
OLD, RECENT = split_at(BUILT, START_US + 18 * DAY_US)
SYNOPSES = {
    "all bins": BUILT,
    "merged bins": COARSE,
    "dropped planes": DROPPED,
    "no planes": NOTHING,
    "bands": Bands((RECENT, coarsen(OLD, Resolution((2, 8, 2, 8, 2, 8, 0), 3, 12, 14, 3_600, 4)))),
}


def contains(result: SynopsisResult, truth: float | None) -> None:
    assert result.kind is BoundKind.GUARANTEED
    if result.value is not None:
        assert result.low <= result.value <= result.high
    if truth is None or not math.isfinite(truth):
        return
    assert result.low is not None and result.high is not None, truth
    assert result.low <= truth <= result.high, (truth, result)


def values(name: str, found: Any) -> Any:
    column = ROWS.column(name)[found]
    return column[np.isfinite(column)]


def spread(column: Any) -> float | None:
    return float(np.std(column, ddof=1)) if column.size > 1 else None


scopes = draw_scope(ROWS)
synopses = st.sampled_from(sorted(SYNOPSES))
numbers = st.sampled_from(NUMBERS)


def test_the_tables_have_groups_of_both_kinds_and_merged_bins() -> None:
    assert BUILT.rows.x.size > 50 and BUILT.groups.keys.size > 20
    assert BUILT.count == TABLE.num_rows
    assert any(COARSE.bins.halvings) and COARSE.nbytes < BUILT.nbytes - 4_000


@given(scopes, synopses)
def test_counts(drawn: Any, kind: str) -> None:
    scope, found = drawn
    contains(count(SYNOPSES[kind], scope), float(found.sum()))


@given(scopes, synopses, numbers)
def test_means_and_deviations(drawn: Any, kind: str, name: str) -> None:
    scope, found = drawn
    column = values(name, found)
    contains(mean(SYNOPSES[kind], name, scope), column.mean() if column.size else None)
    contains(stddev(SYNOPSES[kind], name, scope), spread(column))


@given(scopes, synopses, numbers, numbers)
def test_correlations(drawn: Any, kind: str, a: str, b: str) -> None:
    scope, found = drawn
    pair = np.stack([ROWS.column(a)[found], ROWS.column(b)[found]])
    pair = pair[:, np.isfinite(pair).all(axis=0)]
    truth = None
    if pair.shape[1] > 1 and (pair.std(axis=1) > 1e-12).all():
        truth = float(np.corrcoef(pair)[0, 1])
    result = correlation(SYNOPSES[kind], a, b, scope)
    contains(result, None if truth is None else np.clip(truth, -1, 1) * (1 - 1e-12))


@given(scopes, synopses, numbers, st.floats(0.0, 1.0))
def test_quantiles(drawn: Any, kind: str, name: str, rank: float) -> None:
    scope, found = drawn
    column = values(name, found)
    (result,) = quantiles(SYNOPSES[kind], name, [rank], scope)
    contains(result, float(np.quantile(column, rank)) if column.size else None)


@given(scopes, synopses, numbers, st.floats(0.1, 5.0), st.floats(-5.0, 40.0))
def test_densities(drawn: Any, kind: str, name: str, bandwidth: float, point: float) -> None:
    scope, found = drawn
    column = values(name, found)
    (result,) = density(SYNOPSES[kind], name, [point], scope, bandwidth)
    truth = None
    if column.size:
        kernels = np.exp(-0.5 * ((point - column) / bandwidth) ** 2)
        truth = float(kernels.mean() / (bandwidth * math.sqrt(2.0 * math.pi)))
    contains(result, truth)


@given(scopes, synopses, st.floats(-5.0, 40.0))
def test_probabilities(drawn: Any, kind: str, limit: float) -> None:
    scope, found = drawn
    column = values("temp", found)
    truth = float((column > limit).mean()) if column.size else None
    contains(probability(SYNOPSES[kind], f"temp > {limit!r}", scope), truth)


@given(scopes, synopses, numbers, st.floats(0.01, 0.9))
def test_outliers(drawn: Any, kind: str, name: str, share: float) -> None:
    scope, found = drawn
    column = values(name, found)
    result = outliers(SYNOPSES[kind], name, share, scope)
    if result is None:
        return
    contains(result.count, float(((column < result.low) | (column > result.high)).sum()))


@given(scopes, scopes)
def test_contrasts(drawn: Any, other: Any) -> None:
    columns = [values("temp", found) for _, found in (drawn, other)]
    truth = columns[0].mean() - columns[1].mean() if all(c.size for c in columns) else None
    contains(contrast(BUILT, partial(mean, feature="temp"), drawn[0], other[0]), truth)


def test_results_without_a_cut_are_exact() -> None:
    everything = np.ones(TABLE.num_rows, bool)
    for name in ("temp", "rain", "wind", "level"):
        column = values(name, everything)
        result = mean(BUILT, name)
        assert result.value == pytest.approx(column.mean(), rel=1e-12)
        # Rows of small groups are exact, too: the bounds differ by rounding only.
        assert result.high - result.low < 1e-8
        assert stddev(BUILT, name).value == pytest.approx(spread(column), rel=1e-9)
    pair = np.stack([ROWS.column("temp"), ROWS.column("level")])
    pair = pair[:, np.isfinite(pair).all(axis=0)]
    result = correlation(BUILT, "temp", "level")
    assert result.value == pytest.approx(np.corrcoef(pair)[0, 1], rel=1e-9)
    assert result.high - result.low < 1e-6


def test_bounds_are_narrow() -> None:
    widths = []
    for low in range(5, 25):
        scope = Scope(predicate=f"temp > {low} and wind > 2", hours=(6, 12))
        result = count(BUILT, scope)
        widths.append((result.high - result.low) / max(result.value, 1.0))
    assert 0.0 < np.median(widths) < 0.25


def test_a_constant_feature_has_no_correlation() -> None:
    result = correlation(BUILT, "fixed", "temp")
    assert result.value is None
    assert stddev(BUILT, "fixed").high < 1e-6
    assert mean(BUILT, "fixed").value == pytest.approx(7.25)
    (point,) = density(BUILT, "fixed", [7.25])
    assert point.value is None


def test_an_empty_region_and_times_before_the_first_row_give_no_value() -> None:
    for scope in (Scope(Box(0.0, 0.0, 1.0, 1.0)), Scope(until=START_US - 1)):
        assert (count(BUILT, scope).low, count(BUILT, scope).high) == (0.0, 0.0)
        assert mean(BUILT, "temp", scope).value is None
        assert stddev(BUILT, "temp", scope).high is None
        assert correlation(BUILT, "temp", "wind", scope).value is None
        assert quantiles(BUILT, "temp", [0.5], scope)[0].value is None
        assert density(BUILT, "temp", [1.0], scope)[0].value is None
        assert probability(BUILT, "temp > 1", scope).value is None
        assert outliers(BUILT, "temp", 0.1, scope) is None


def test_a_circle_reaches_across_the_antimeridian() -> None:
    scope = Scope(Circle(180.0, 0.0, 50_000.0))
    found = ROWS.inside(scope)
    longitudes = ROWS.column("lon")[found]
    assert longitudes.min() < -179.0 and longitudes.max() > 179.0
    result = count(BUILT, scope)
    assert result.low == result.high == found.sum()


def test_categories_are_exact_where_they_have_a_bin() -> None:
    kinds = ROWS.column("kind")
    result = count(BUILT, Scope(predicate="kind = 'sun'"))
    assert result.low == result.high == (kinds == "sun").sum()
    rare = count(BUILT, Scope(predicate="kind = 'other20'"))
    assert rare.low <= (kinds == "other20").sum() <= rare.high
    assert count(BUILT, Scope(predicate="kind is null")).value == sum(k is None for k in kinds)
    wet = count(BUILT, Scope(predicate="wet and not (rain = 0)"))
    contains(wet, float(((ROWS.column("wet") == True) & (ROWS.column("rain") > 0)).sum()))  # noqa: E712


def test_a_heavy_value_is_counted_exactly() -> None:
    rain = ROWS.column("rain")
    result = count(BUILT, Scope(predicate="rain = 0"))
    assert result.low == result.high == (rain == 0).sum()
    result = count(BUILT, Scope(predicate="rain > 0"))
    assert result.low == result.high == (rain > 0).sum()


def test_records_used_are_reported() -> None:
    assert count(BUILT).records == BUILT.groups.keys.size + BUILT.rows.x.size
    cut = count(BUILT, Scope(predicate="temp > 10"))
    assert cut.records == BUILT.leaf_count + BUILT.rows.x.size


def test_a_synopsis_without_rows_has_results() -> None:
    empty: Synopsis = build(TABLE.slice(0, 0), make_spec(TABLE))
    assert count(empty).value == 0
    assert mean(empty, "temp").value is None


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_squares_that_no_float_can_hold_give_no_wrong_bounds() -> None:
    numbers = [float(n) for n in TABLE["wind"].fill_null(0.0).to_pylist()]
    wide = TABLE.append_column("wide", pa.array(np.array(numbers) * 1e160))
    own = build(wide, SynopsisSpec.of(wide.schema, ["wide", "temp"], bins=16))
    scope = Scope(predicate="temp > 15.02")
    inside = Rows(wide).column("wide")[Rows(TABLE).column("temp") > 15.02]
    result = mean(own, "wide", scope)
    assert result.low <= inside.mean() <= result.high
    result = stddev(own, "wide", scope)
    assert result.low <= np.std(inside * 1e-160, ddof=1) * 1e160 <= result.high
    result = correlation(own, "wide", "temp", scope)
    assert (result.value, result.low, result.high) == (None, -1.0, 1.0)
