"""Regressions of a synopsis against least squares over the rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.linear_model import LinearRegression

from roost.errors import ConfigError
from roost.model.records import Box
from roost.synopsis import (
    Bands,
    BoundKind,
    Regression,
    Resolution,
    Scope,
    build,
    coarsen,
    learn_bins,
    merge,
    regress,
    split_at,
)
from roost.synopsis.bins import DROPPED
from synopsis_tables import NUMBERS, Rows, draw_scope, make_spec, make_table

TABLE = make_table(6)
ROWS = Rows(TABLE)
SPEC = make_spec(TABLE)
BUILT = build(TABLE, SPEC)
VARYING = [name for name in NUMBERS if name != "fixed"]
scopes = draw_scope(ROWS)


def fit(rows: Rows, target: str, features: list[str], found: Any) -> tuple[Any, Any]:
    """Return scikit-learn's model of the rows without a null, and these rows."""
    data = np.stack([rows.column(name)[found] for name in (*features, target)], axis=1)
    data = data[np.isfinite(data).all(axis=1)]
    model = LinearRegression().fit(data[:, :-1], data[:, -1]) if len(data) else None
    return model, data


def close(result: Regression, rows: Rows, target: str, features: list[str], rel: float) -> None:
    """The regression is that of the rows up to a relative error."""
    model, data = fit(rows, target, features, np.ones(rows.table.num_rows, bool))
    assert result.rows == len(data)
    slopes = [result.coefficients[name].value for name in features]
    assert slopes == pytest.approx(model.coef_, rel=rel)
    assert result.intercept.value == pytest.approx(model.intercept_, rel=rel)
    assert result.r2 == pytest.approx(model.score(data[:, :-1], data[:, -1]), rel=rel)
    residuals = data[:, -1] - model.predict(data[:, :-1])
    spare = len(data) - len(features) - 1
    assert result.deviation == pytest.approx(math.sqrt(residuals @ residuals / spare), rel=rel)


@pytest.mark.parametrize("target", VARYING)
@pytest.mark.parametrize("feature", VARYING)
def test_one_feature_is_exact_in_whole_groups_whatever_the_nulls(target: str, feature: str) -> None:
    if target != feature:
        close(regress(BUILT, target, [feature]), ROWS, target, [feature], 1e-9)


def noisy_table(nulls: bool) -> pa.Table:
    """Wind depends on three features; rain is null where it is warm."""
    rng, temp, rain = np.random.default_rng(9), ROWS.column("temp"), ROWS.column("rain")
    temp, rain = (np.where(np.isfinite(v), v, np.nanmean(v)) for v in (temp, rain))
    level = rng.normal(50.0, 20.0, temp.size).astype(int) + (2 * rain).astype(int)
    wind = 0.5 * temp - 0.3 * rain + 0.1 * level + rng.normal(0.0, 3.0, temp.size)
    wind[temp > 18.0] += 2.0 * rain[temp > 18.0]
    masks = [rng.random(temp.size) < 0.1, temp > 18.0, rng.random(temp.size) < 0.2]
    table = TABLE.drop_columns(["temp", "rain", "level", "wind"])
    columns = {"temp": temp, "rain": rain, "level": level.astype(float)}
    for (name, values), mask in zip(columns.items(), masks, strict=True):
        table = table.append_column(name, pa.array(values, mask=mask if nulls else None))
    return table.append_column("wind", pa.array(wind))


THREE = ["temp", "rain", "level"]


def test_several_features_are_exact_without_nulls() -> None:
    table = noisy_table(nulls=False)
    close(regress(build(table, make_spec(table)), "wind", THREE), Rows(table), "wind", THREE, 1e-9)


def test_rows_with_some_of_several_features_are_left_out() -> None:
    table = noisy_table(nulls=True)
    rows = Rows(table)
    result = regress(build(table, make_spec(table, bins=96)), "wind", THREE)
    model, data = fit(rows, "wind", THREE, np.ones(table.num_rows, bool))
    assert result.rows == len(data) < 0.6 * table.num_rows
    for name, truth in zip(THREE, model.coef_, strict=True):
        own = result.coefficients[name]
        assert own.low <= truth <= own.high
        assert own.value == pytest.approx(truth, rel=0.03)
    assert result.intercept.low <= model.intercept_ <= result.intercept.high
    assert result.r2 == pytest.approx(model.score(data[:, :-1], data[:, -1]), rel=0.03)
    # Taking pairs of columns as they are is something else.
    columns = np.ma.masked_invalid(np.stack([rows.column(n) for n in (*THREE, "wind")]))
    pairs = np.asarray(np.ma.cov(columns))
    naive = np.linalg.solve(pairs[:-1, :-1], pairs[:-1, -1])
    assert np.abs(naive / model.coef_ - 1.0).max() > 0.1


@given(scopes, st.sampled_from(VARYING), st.lists(st.sampled_from(VARYING), min_size=1, max_size=3))
def test_intervals_contain_the_coefficients_over_the_rows(
    drawn: Any, target: str, features: list[str]
) -> None:
    scope, found = drawn
    features = [name for name in dict.fromkeys(features) if name != target]
    if not features:
        return
    result = regress(BUILT, target, features, scope)
    model, data = fit(ROWS, target, features, found)
    if len(data) < 30 or abs(result.rows - len(data)) > 0.02 * len(data):
        return  # the scope cuts leaves
    for name, truth in zip(features, model.coef_, strict=True):
        own = result.coefficients[name]
        if own.value is not None:
            assert own.kind is BoundKind.PROBABLE and own.confidence == 0.95
            assert own.low <= truth <= own.high


@pytest.mark.parametrize("bins", [8, 96])
def test_intervals_hold_as_often_as_they_claim(bins: int) -> None:
    """Of a known law with noise; groups are cut, and small ones are rows."""
    rng, trials, held, predicted = np.random.default_rng(bins), 150, 0, 0
    table = make_table(1, 600)
    spec = make_spec(table, bins=bins)
    known = {name: table[name] for name in ("lon", "lat", "event_time", "rain", "kind", "wet")}
    for _ in range(trials):
        wind, fixed = rng.normal(0.0, 3.0, 600), rng.normal(5.0, 2.0, 600)
        temp = 4.0 + 0.5 * wind - 0.2 * fixed + rng.normal(0.0, 2.0, 600)
        columns = {
            "temp": pa.array(temp, pa.float32(), mask=rng.random(600) < 0.1),
            "wind": pa.array(wind, mask=rng.random(600) < 0.1),
            "fixed": pa.array(fixed, mask=rng.random(600) < 0.1),
            "level": pa.array(np.arange(600), pa.int32()),
        }
        result = regress(
            build(pa.table(known | columns), spec), "temp", ["wind", "fixed"], Scope(hours=(1, 23))
        )
        slope = result.coefficients["wind"]
        held += slope.low <= 0.5 <= slope.high
        x = rng.normal(0.0, 3.0), rng.normal(5.0, 2.0)
        point = result.predict({"wind": x[0], "fixed": x[1]})
        truth = 4.0 + 0.5 * x[0] - 0.2 * x[1] + rng.normal(0.0, 2.0)
        predicted += point.low <= truth <= point.high
    assert binomtest(held, trials, 0.95, alternative="less").pvalue > 0.01
    assert binomtest(predicted, trials, 0.95).pvalue > 0.01


def test_merging_any_split_gives_the_same_regression() -> None:
    bins, rng = learn_bins(TABLE, SPEC), np.random.default_rng(4)
    owner = rng.integers(0, 4, TABLE.num_rows)
    parts = [build(TABLE.filter(pa.array(owner == k)), SPEC, bins) for k in range(4)]
    scope = Scope(hours=(5, 21), predicate="wind > 1.5")
    for own in (Scope(), scope):
        a, b = (
            regress(synopsis, "temp", ["rain", "wind", "level"], own)
            for synopsis in (merge(parts), build(TABLE, SPEC, bins))
        )
        assert a.rows == pytest.approx(b.rows, rel=1e-9)
        assert a.deviation == pytest.approx(b.deviation, rel=1e-9)
        for name, result in a.coefficients.items():
            other = b.coefficients[name]
            assert result.value == pytest.approx(other.value, rel=1e-9)
            assert (result.low, result.high) == pytest.approx((other.low, other.high), rel=1e-9)


def test_wide_bins_of_a_feature_do_not_bias_and_those_of_the_target_widen_the_interval() -> None:
    rng, rows = np.random.default_rng(2), TABLE.num_rows
    wind = rng.random(rows)
    columns = {
        "wind": wind,
        "fixed": rng.binomial(2, wind).astype(float),  # three values: no bin has two
        "rain": 3.0 * wind + rng.normal(0.0, 0.2, rows),
    }
    table = TABLE.drop_columns(list(columns))
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    everything = Scope(predicate="wind >= 0")  # the leaves of all groups are read
    for target, biased in (("fixed", False), ("rain", True)):
        model, _ = fit(Rows(table), target, ["wind"], np.ones(rows, bool))
        ratios = []
        for bins in (4, 96):
            built = build(table, make_spec(table, bins=bins))
            own = regress(built, target, ["wind"], everything).coefficients["wind"]
            assert own.low <= model.coef_[0] <= own.high
            ratios.append(own.value / model.coef_[0])
        assert ratios[1] == pytest.approx(1.0, abs=0.005)
        assert (ratios[0] < 0.97) if biased else (ratios[0] == pytest.approx(1.0, abs=0.02))


def test_what_is_not_determined_has_no_value() -> None:
    result = regress(BUILT, "level", ["temp", "fixed"])
    assert result.coefficients["fixed"].value is None and result.intercept.value is None
    model, _ = fit(ROWS, "level", ["temp"], np.isfinite(ROWS.column("fixed")))
    slope = result.coefficients["temp"]
    assert slope.low <= model.coef_[0] <= slope.high
    assert result.r2 is not None and result.predict({"temp": 1.0, "fixed": 7.25}).value is None
    twice = TABLE.append_column("again", TABLE["temp"])
    spec = make_spec(TABLE)
    both = build(twice, type(spec).of(twice.schema, ["level", "temp", "again", "wind"]))
    result = regress(both, "level", ["temp", "again", "wind"])
    assert [own.value is None for own in result.coefficients.values()] == [True, True, False]
    constant = regress(BUILT, "fixed", ["temp"])
    assert constant.r2 is None and constant.coefficients["temp"].value is None
    empty = regress(BUILT, "temp", ["wind"], Scope(Box(0.0, 0.0, 1.0, 1.0)))
    assert (empty.rows, empty.r2, empty.deviation) == (0.0, None, None)
    assert empty.predict({"wind": 1.0}).value is None


@pytest.mark.parametrize(
    ("target", "features", "named"),
    [
        ("temp", [], "features"),
        ("temp", ["temp"], "other than temp"),
        ("temp", ["wind", "wind"], "distinct"),
        ("kind", ["temp"], "a number"),
        ("temp", ["snow"], "'snow'"),
    ],
)
def test_refused_regressions_name_the_part(target: str, features: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        regress(BUILT, target, features)
    with pytest.raises(ConfigError, match="confidence"):
        regress(BUILT, "temp", ["wind"], confidence=95.0)
    with pytest.raises(ConfigError, match="'wind'"):
        regress(BUILT, "temp", ["wind"]).predict({"temp": 1.0})


def test_several_synopses_give_the_regression_of_their_merge() -> None:
    """A part without the bins of a feature is refused, unless the scope leaves it out."""
    middle = split_time(ROWS)
    halves = split_at(BUILT, middle)
    whole = regress(BUILT, "wind", ["temp"])
    found = regress(Bands(halves), "wind", ["temp"])
    assert found.rows == whole.rows
    assert found.coefficients["temp"].value == pytest.approx(whole.coefficients["temp"].value)
    resolution = Resolution.of(BUILT.spec, BUILT.bins)
    coarse = coarsen(halves[0], replace(resolution, halvings=(DROPPED,) * len(BUILT.bins.edges)))
    bands = Bands((coarse, halves[1]))
    with pytest.raises(ConfigError, match="still has the bins of the feature"):
        regress(bands, "wind", ["temp"])
    recent = Scope(since=middle)
    expected = regress(BUILT, "wind", ["temp"], recent)
    assert regress(bands, "wind", ["temp"], recent).rows == expected.rows > 0


def split_time(rows: Rows) -> int:
    """Return the beginning of the calendar bucket in the middle of the rows."""
    bucket_us = SPEC.layout.bucket_us
    return int(np.median(rows.column("event_time"))) // bucket_us * bucket_us
