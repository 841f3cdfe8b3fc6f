"""Bands give the results of their merge, and coarsening commutes with building and merging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.synopsis import (
    Bands,
    Resolution,
    Scope,
    Sketch,
    Synopsis,
    SynopsisResult,
    SynopsisSpec,
    build,
    coarsen,
    correlation,
    count,
    density,
    learn_bins,
    mean,
    merge,
    quantiles,
    record_batches,
    select,
    split_at,
    stddev,
)
from roost.synopsis.leaves import Paths
from roost.synopsis.paths import COUNT_MAX, combine
from synopsis_tables import (
    DAY_US,
    FEATURES,
    NUMBERS,
    START_US,
    Rows,
    draw_scope,
    make_spec,
    make_table,
)

TABLE = make_table(5, 2_500)
ROWS = Rows(TABLE)
SPEC = make_spec(TABLE)
BINS = learn_bins(TABLE, SPEC)
WHOLE = build(TABLE, SPEC, BINS)
scopes = draw_scope(ROWS)
resolutions = st.builds(
    Resolution,
    st.tuples(*(st.sampled_from([0, 0, 1, 2, 8]) for _ in FEATURES)),
    st.integers(0, 4),
    st.sampled_from([4, 8, 14, 16]),
    st.sampled_from([7, 14, 28, 280]),
    st.sampled_from([3_600, 10_800, 21_600]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 7, 14]),
)


def pieces(seed: int, number: int) -> list[Synopsis]:
    owner = np.random.default_rng(seed).integers(0, number, TABLE.num_rows)
    return [build(TABLE.filter(pa.array(owner == k)), SPEC, BINS) for k in range(number)]


def results(sketch: Sketch, scope: Scope, name: str) -> list[SynopsisResult]:
    return [
        count(sketch, scope),
        mean(sketch, name, scope),
        stddev(sketch, name, scope),
        correlation(sketch, name, "wind", scope),
        *quantiles(sketch, name, [0.1, 0.9], scope),
        *density(sketch, name, [12.0], scope, 2.0),
    ]


def assert_same(sketch: Sketch, other: Sketch, scope: Scope, name: str) -> None:
    for a, b in zip(results(sketch, scope, name), results(other, scope, name), strict=True):
        for x, y in ((a.value, b.value), (a.low, b.low), (a.high, b.high)):
            assert x is y or x == pytest.approx(y, rel=1e-9, abs=1e-7), (a, b)


def assert_equal(a: Synopsis, b: Synopsis) -> None:
    """Compare all state; sums up to rounding."""
    assert a.spec == b.spec and a.bins.halvings == b.bins.halvings
    for name, own in a.arrays().items():
        other = b.arrays()[name]
        if name == "head":
            continue
        if name.startswith("rows."):
            own, other = np.sort(own, axis=0), np.sort(other, axis=0)
        if own.dtype == np.float64:
            assert np.allclose(own, other, rtol=1e-11, atol=1e-7, equal_nan=True), name
        else:
            assert np.array_equal(own, other), name


@examples(40)
@given(st.integers(0, 2**32), st.integers(2, 5), scopes, st.sampled_from(NUMBERS[:4]))
def test_parts_of_one_resolution_give_the_results_of_their_merge(
    seed: int, number: int, drawn: Any, name: str
) -> None:
    assert_same(Bands(tuple(pieces(seed, number))), WHOLE, drawn[0], name)


@examples(40)
@given(resolutions, st.integers(0, 2**32), st.integers(1, 4))
def test_coarsening_commutes_with_building_and_merging(
    resolution: Resolution, seed: int, number: int
) -> None:
    assume(resolution.prefix_bits <= resolution.place_bits)
    assume(86_400 // resolution.slots % resolution.step_s == 0)
    assume(resolution.bucket_days % (resolution.interval_days or 1) == 0)
    parts = pieces(seed, number)
    coarse = coarsen(merge(parts), resolution)
    assert_equal(coarse, merge([coarsen(part, resolution) for part in parts]))
    spec, bins = resolution.apply(SPEC, BINS)
    assert_equal(coarse, build(TABLE, spec, bins))
    assert coarse.count == TABLE.num_rows


@given(resolutions, resolutions, st.integers(0, 50), scopes, st.sampled_from(NUMBERS))
def test_bounds_hold_under_every_coarsening(
    first: Resolution, second: Resolution, day: int, drawn: Any, name: str
) -> None:
    for resolution in (first, second):
        assume(resolution.prefix_bits <= resolution.place_bits)
        assume(86_400 // resolution.slots % resolution.step_s == 0)
        assume(resolution.bucket_days % (resolution.interval_days or 1) == 0)
    old, recent = split_at(WHOLE, START_US + day * DAY_US)
    bands = Bands((coarsen(recent, first), coarsen(old, second)))
    scope, found = drawn
    column = ROWS.column(name)[found]
    column = column[np.isfinite(column)]
    rows = count(bands, scope)
    assert rows.low <= found.sum() <= rows.high
    if column.size:
        average = mean(bands, name, scope)
        assert average.low <= column.mean() <= average.high
    if column.size > 1:
        spread = stddev(bands, name, scope)
        assert spread.low <= column.std(ddof=1) <= spread.high
    part = select(bands, scope)
    assert count(part).low <= found.sum() <= count(part).high
    leaves = [batch.num_rows for batch in record_batches(part)]
    assert sum(leaves) == sum(own.leaf_count + own.rows.x.size for own in part.parts)


@examples(40)
@given(st.integers(-1, 50), scopes, st.sampled_from(NUMBERS[:4]))
def test_both_sides_of_a_time_give_the_whole(day: int, drawn: Any, name: str) -> None:
    parts = split_at(WHOLE, START_US + day * DAY_US)
    assert sum(part.count for part in parts) == WHOLE.count
    assert_same(Bands(parts), WHOLE, drawn[0], name)
    assert_equal(merge(parts), WHOLE)
    layout = SPEC.layout
    for part, old in zip(parts, (True, False), strict=True):
        buckets = part.groups.times[:, 0] // layout.bucket_us
        ends = (buckets + 1) * layout.bucket_us <= START_US + day * DAY_US
        assert (ends == old).all()


def test_whole_groups_stay_exact_without_planes() -> None:
    none = coarsen(WHOLE, Resolution((8,) * 7, 0, 2, 280, 21_600, 4))
    assert none.nbytes < WHOLE.nbytes / 3
    for result, expected in zip(
        results(none, Scope(), "temp")[:4], results(WHOLE, Scope(), "temp")[:4], strict=True
    ):
        assert result.value == pytest.approx(expected.value, rel=1e-9)
        assert result.high - result.low < 1e-6
    # Marginals keep all bins: one of 16 is cut.
    result = count(none, Scope(predicate="temp > 17.3"))
    assert result.low <= np.nansum(ROWS.column("temp") > 17.3) <= result.high
    assert result.high - result.low < 0.1 * TABLE.num_rows
    assert result.records == none.groups.keys.size + none.rows.x.size


def sketch_of(values: Any) -> Synopsis:
    """One group with one row each second, two bins and no planes."""
    rows = len(values)
    table = pa.table(
        {
            "lon": np.zeros(rows),
            "lat": np.zeros(rows),
            "event_time": pa.array(np.arange(rows) * 1_000_000, pa.timestamp("us", "UTC")),
            "v": pa.array(values, pa.float64()),
        }
    )
    spec = SynopsisSpec.of(table.schema, ["v"], bins=2, slots=1, bucket_days=1, step_s=60)
    built = build(table, spec)
    assert built.groups.keys.size == 1
    return coarsen(built, Resolution((8,), 4, 24, 1, 60, 1))


def test_moments_narrow_a_mean_and_a_deviation() -> None:
    rng = np.random.default_rng(1)
    values = rng.permutation(np.concatenate([rng.normal(0.0, 1.0, 3_998), [-100.0, 100.0]]))
    sketch, scope = sketch_of(values), Scope(until=3_600_000_000)
    inside = values[:3_600]
    reach = values.std() * np.sqrt((4_000 - 3_600) / 3_600)
    result = mean(sketch, "v", scope)
    assert result.low <= inside.mean() <= result.high
    assert result.high - result.low == pytest.approx(2.0 * reach, rel=1e-6)
    spread = stddev(sketch, "v", scope)
    assert spread.low <= inside.std(ddof=1) <= spread.high < values.std() * np.sqrt(4 / 3.5)


OUTLIERS = [3.0, -3.0]
#: Tables whose first 3,630 rows are as far from the others as moments allow. The scope cuts the
#: step of the last 30 of them.
FAR = {
    "higher mean": [1.0] * 3_630 + [0.0] * 368 + OUTLIERS,
    "higher mean with nulls": [None] * 430 + [1.0] * 3_200 + [0.0] * 368 + OUTLIERS,
    "larger squares": [1.0, -1.0] * 1_815 + [0.0] * 368 + OUTLIERS,
    "smaller squares": [0.0] * 3_630 + [1.0, -1.0] * 185,
}


@pytest.mark.parametrize("name", sorted(FAR))
def test_moments_hold_for_the_farthest_part(name: str) -> None:
    sketch, scope = sketch_of(FAR[name]), Scope(until=3_630_000_000)
    inside = np.array([value for value in FAR[name][:3_630] if value is not None])
    average, spread = mean(sketch, "v", scope), stddev(sketch, "v", scope)
    assert average.low <= inside.mean() <= average.high < 1.1
    assert spread.low <= inside.std(ddof=1) <= spread.high < 1.2


def test_conditions_of_dropped_features_are_combined() -> None:
    none = coarsen(WHOLE, Resolution((8,) * 7, 0, 2, 280, 21_600, 4))
    temp, wind = ROWS.column("temp"), ROWS.column("wind")
    for predicate, truth in (
        ("temp > 15 and temp <= 15", 0),
        ("temp > 15 or temp <= 15", np.isfinite(temp).sum()),
        ("temp > 10 and wind > 1", ((temp > 10) & (wind > 1)).sum()),
        ("temp > 20 or wind > 6", ((temp > 20) | (wind > 6)).sum()),
    ):
        result = count(none, Scope(predicate=predicate))
        assert result.low <= truth <= result.high, predicate
    both = count(none, Scope(predicate="temp > 10 and wind > 1"))
    assert both.high - both.low < 0.7 * TABLE.num_rows


def test_a_dropped_plane_has_the_values_of_its_band() -> None:
    none = coarsen(WHOLE, Resolution((8,) * 7, 0, 2, 280, 21_600, 4))
    table = pa.Table.from_batches(list(record_batches(Bands((none,)))))
    temp = ROWS.column("temp")
    lows, highs = (np.asarray(table[f"temp_{end}"]) for end in ("low", "high"))
    assert (lows <= np.nanmin(temp) + 1.0).all() and (highs >= np.nanmax(temp) - 1.0).all()


@pytest.mark.parametrize(
    ("values", "predicate", "most"),
    [
        # Cantelli: variance 1.4, limit 8 above the mean: at most 2.1 % of 402 rows.
        ([0.0, 2.0] * 200 + [-8.0] + [10.0], "v >= 9", 9),
        # Markov: mean 1, minimum 0: at most a tenth is 10 or more.
        ([0.0] * 380 + [20.0] * 20, "v >= 10", 40),
        ([0.0, 2.0] * 200, "v > 2", 0),
    ],
)
def test_moments_narrow_the_rows_in_a_tail(values: Any, predicate: str, most: int) -> None:
    result = count(sketch_of(values), Scope(predicate=predicate))
    limit = float(predicate.split()[-1])
    assert result.low <= (np.array(values) >= limit + (">=" not in predicate)).sum()
    assert result.high <= most


@given(
    st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=5),
    st.lists(st.integers(1, 200), min_size=5, max_size=5),
    st.sampled_from([">", ">=", "<", "<=", "=", "!="]),
    st.floats(-60.0, 60.0) | st.none(),
)
def test_tails_contain_their_rows(
    values: list[float], weights: list[int], operator: str, limit: float | None
) -> None:
    every = np.repeat([*values, values[0]], [*weights[: len(values)], 200])
    constant = values[-1] if limit is None else limit
    compare = {">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal}
    compare |= {"=": np.equal, "!=": np.not_equal}
    truth = int(compare[operator](every, constant).sum())
    result = count(sketch_of(every), Scope(predicate=f"v {operator} {constant!r}"))
    assert result.low <= truth <= result.high


def test_refused_resolutions_and_bands_are_named() -> None:
    fine = Resolution.of(SPEC, BINS)
    for change in (
        {"halvings": (0,) * 6},
        {"prefix_bits": 5},
        {"place_bits": 18},
        {"bucket_days": 10},
        {"step_s": 5_400},
        {"slots": 3},
        {"interval_days": 2},
    ):
        with pytest.raises(ConfigError, match=rf"resolution\.{next(iter(change))}"):
            coarsen(WHOLE, replace(fine, **change))
    with pytest.raises(ConfigError, match=r"resolution\.halvings"):
        coarsen(coarsen(WHOLE, replace(fine, halvings=(1,) * 7)), fine)
    with pytest.raises(ConfigError, match="at least one synopsis"):
        Bands(())
    other = build(TABLE, make_spec(TABLE, x="lat", y="lon"), BINS)
    with pytest.raises(ConfigError, match="bands: x"):
        Bands((WHOLE, other))
    moved = build(TABLE, SPEC, replace(BINS, shifts=BINS.shifts + 1.0))
    with pytest.raises(ConfigError, match="shifts of sums"):
        Bands((WHOLE, moved))


def test_a_leaf_with_too_many_rows_is_continued_by_another() -> None:
    counts = np.array([COUNT_MAX - 1, 5, COUNT_MAX], np.int32)
    steps, marks = np.zeros(3, np.int32), np.zeros(3, np.uint8)
    keys, starts = np.zeros(1, np.int64), np.array([0, 3])
    paths = combine(Paths(keys, starts, steps, counts, marks, np.ones((3, 1), np.uint8)))
    assert paths.counts.tolist() == [COUNT_MAX, COUNT_MAX, 4]
