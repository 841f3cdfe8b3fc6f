"""Bins, keys, packed leaves and planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError, SourceError
from roost.model.space import Coordinates, Rect, Space
from roost.synopsis import BinLearner, BinRule, SynopsisSpec, build, count, fit_memory, learn_bins
from roost.synopsis.bins import place_edges
from roost.synopsis.leaves import Paths, pack, unpack
from roost.synopsis.planes import estimate_distinct, predict
from roost.synopsis.spec import places_of, run_keys, split_group_keys
from synopsis_tables import Rows, make_spec, make_table

TABLE = make_table(3, 3_000)
SPEC = make_spec(TABLE)


def codes_of(values: Any, edges: Any) -> Any:
    return np.searchsorted(edges, values, side="right")


@pytest.mark.parametrize("rule", list(BinRule))
def test_a_heavy_value_has_a_bin_of_its_own(rule: BinRule) -> None:
    rng = np.random.default_rng(0)
    grid = np.sort(np.concatenate([np.full(2_000, 3.5), rng.normal(3.0, 2.0, 2_000)]))
    edges = place_edges(grid, 16, rule, pa.float32())
    assert edges.size <= 15
    code = codes_of(np.float64(3.5), edges)
    others = codes_of(grid[grid != 3.5], edges)
    assert code not in others
    assert len(set(others)) >= 12


@pytest.mark.parametrize("rule", list(BinRule))
@pytest.mark.parametrize("type_", [pa.float32(), pa.float64(), pa.int16()], ids=str)
def test_edges_are_values_that_the_column_can_store(rule: BinRule, type_: pa.DataType) -> None:
    rng = np.random.default_rng(1)
    grid = np.sort(rng.gamma(2.0, 30.0, 4_000))
    grid = np.asarray(pa.array(grid).cast(type_, safe=False)).astype(np.float64)
    edges = place_edges(grid, 32, rule, type_)
    stored = np.asarray(pa.array(edges).cast(type_)).astype(np.float64)
    assert stored.tolist() == edges.tolist()
    assert (np.diff(edges) > 0).all() and 20 <= edges.size <= 31


def test_equal_density_bins_have_equal_shares() -> None:
    grid = np.sort(np.random.default_rng(2).normal(0.0, 1.0, 4_097))
    edges = place_edges(grid, 32, BinRule.EQUAL_DENSITY, pa.float64())
    shares = np.bincount(codes_of(grid, edges)) / grid.size
    assert shares.min() > 0.5 / 32 and shares.max() < 1.5 / 32


def test_cube_root_bins_have_the_smaller_error() -> None:
    grid = np.sort(np.random.default_rng(3).normal(0.0, 1.0, 4_097))
    errors = {}
    for rule in BinRule:
        codes = codes_of(grid, place_edges(grid, 32, rule, pa.float64()))
        means = np.bincount(codes, grid) / np.bincount(codes)
        errors[rule] = np.sqrt(np.mean((grid - means[codes]) ** 2))
    assert errors[BinRule.CUBE_ROOT] < 0.8 * errors[BinRule.EQUAL_DENSITY]


def test_learners_can_be_merged() -> None:
    one, two = BinLearner(SPEC), BinLearner(SPEC)
    one.update(TABLE.slice(0, 1_500))
    two.update(TABLE.slice(1_500))
    one.merge(two)
    merged, whole = one.bins(), learn_bins(TABLE, SPEC)
    assert merged.categories == whole.categories
    for a, b in zip(merged.edges, whole.edges, strict=True):
        assert abs(a.size - b.size) <= 2
    assert merged.edges[0] == pytest.approx(whole.edges[0], abs=1.0)


def test_a_feature_without_values_and_a_constant_one_have_one_bin() -> None:
    table = TABLE.set_column(3, "temp", pa.nulls(TABLE.num_rows, pa.float32()))
    bins = learn_bins(table, SPEC)
    assert bins.counts[0] == 1 and bins.counts[4] == 1
    assert count(build(table, SPEC)).value == TABLE.num_rows


def test_planes_are_ordered_by_ascending_fan_out() -> None:
    bins = learn_bins(TABLE, SPEC)
    counts = [bins.plane_counts[k] for k in bins.plane_order]
    assert counts == sorted(counts) and len(set(counts)) > 2


@given(st.integers(0, 2**32))
def test_packing_loses_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs, features = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    sizes = rng.integers(1, 40, runs)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    high = int(rng.choice([1, 2, 17, 250]))
    codes = rng.integers(0, high + 1, (total, features)).astype(np.uint8)
    codes[:, 0] = rng.choice([0, 9, 250])
    steps = np.concatenate([np.sort(rng.integers(0, 3_000, size)) for size in sizes])
    counts = rng.choice([1, 1, 2, 70_000], total)
    marks = (rng.random(total) < rng.choice([0.0, 0.3])).astype(np.uint8)
    paths = Paths(np.arange(runs), starts, steps, counts, marks, codes)
    leaves = pack(paths, np.zeros(runs, np.uint32))
    chosen = np.flatnonzero(rng.random(runs) < 0.7)
    found = unpack(leaves, chosen, chosen)
    kept = np.isin(np.repeat(np.arange(runs), sizes), chosen)
    for a, b in zip(found[2:], paths[2:], strict=True):
        assert np.array_equal(a, b[kept])


def test_keys_follow_the_calendar_and_the_place() -> None:
    spec = make_spec(TABLE, prefix_bits=6, place_bits=16, bucket_days=2, slots=8, step_s=600)
    hour = 3_600_000_000
    times = np.array([0, 3 * hour, 25 * hour, 48 * hour, -1, 600_000_000])
    x, y = np.array([10.0, 10.0, 10.0, 10.0, 10.0, -170.0]), np.full(6, 50.0)
    keys, steps = np.empty(6, np.int64), np.empty(6, np.int64)
    run_keys(x, y, times, spec.layout, keys, steps)
    prefix, bucket, slot = split_group_keys(keys >> spec.rest_bits)
    assert bucket.tolist() == [0, 0, 0, 1, -1, 0]
    assert slot.tolist() == [0, 1, 0, 0, 7, 0]
    assert steps.tolist() == [0, 0, 18 + 6, 0, 35, 1]
    assert len(set(prefix[:5])) == 1 and prefix[5] != prefix[0]
    places = places_of(keys, spec)
    # A geohash alternates between halves of the longitudes and of the latitudes: 10 degrees east
    # is in the upper half, 50 degrees north in the upper half.
    assert places[0] >> 14 == 0b11 and places[5] >> 14 == 0b01


def test_a_plane_is_divided_within_its_bounds() -> None:
    space = Space(Rect(0.0, 0.0, 100.0, 10.0), coordinates=Coordinates.PLANE)
    spec = make_spec(TABLE, space=space, prefix_bits=2, place_bits=4)
    x, y = np.array([1.0, 99.0, 1.0, 1e9]), np.array([1.0, 1.0, 9.0, 9.0])
    keys, steps = np.empty(4, np.int64), np.empty(4, np.int64)
    run_keys(x, y, np.zeros(4, np.int64), spec.layout, keys, steps)
    assert (places_of(keys, spec) >> 2).tolist() == [0b00, 0b10, 0b01, 0b11]


def test_the_prediction_of_leaves_is_close() -> None:
    synopsis = build(TABLE, SPEC)
    paths = synopsis.paths()
    bins = synopsis.bins
    for _ in range(6):
        prediction = predict(paths, bins)
        distinct = {
            (int(run), int(step), *(bins.planes[f][code] for f, code in enumerate(row)))
            for run, step, row in zip(
                np.repeat(paths.run_keys, np.diff(paths.starts)),
                paths.steps,
                paths.codes,
                strict=True,
            )
        }
        assert prediction.leaves == pytest.approx(len(distinct), rel=0.06)
        bins = bins.halved(int(np.argmax(bins.plane_counts)))


def test_distinct_counts_of_a_hyperloglog() -> None:
    assert estimate_distinct(np.zeros(4096, np.uint8)) == 0.0
    full = np.full(4096, 11, np.uint8)
    assert estimate_distinct(full) == pytest.approx(0.7213 * 4096 * 2**11, rel=0.01)


def test_the_planes_fit_the_memory() -> None:
    synopsis = build(TABLE, SPEC)
    words = synopsis.leaves.words.nbytes
    for share in (0.9, 0.7, 0.5):
        memory = synopsis.nbytes - int(words * (1 - share))
        fitted = fit_memory(synopsis, memory)
        assert 0.9 * memory < fitted.nbytes <= memory
        assert fitted.count == synopsis.count
        assert fitted.leaf_count <= synopsis.leaf_count
    assert fit_memory(synopsis, 1 << 30) is synopsis
    with pytest.raises(ConfigError, match=r"synopsis\.memory: got 1000"):
        fit_memory(synopsis, 1000)


def test_refused_specs_name_the_setting() -> None:
    wrong: dict[str, Any] = {
        "prefix_bits": 40,
        "place_bits": 7,
        "bucket_days": 0,
        "interval_days": 3,
        "slots": 7,
        "step_s": 7,
        "bins": 1,
    }
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"synopsis.{name}"):
            make_spec(TABLE, **{name: value})
    with pytest.raises(ConfigError, match="a divisor of 24"):
        make_spec(TABLE, slots=16, step_s=600)  # divides a day, but not into hours
    with pytest.raises(ConfigError, match=r"'tmp'.*temp"):
        SynopsisSpec.of(TABLE.schema, ["tmp"])
    with pytest.raises(ConfigError, match="features: event_time"):
        SynopsisSpec.of(TABLE.schema, ["event_time"])
    with pytest.raises(ConfigError, match="distinct"):
        SynopsisSpec.of(TABLE.schema, ["temp", "temp"])


def test_refused_rows_name_the_row_or_the_column() -> None:
    lon = TABLE["lon"].to_pylist()
    lon[17] = None
    with pytest.raises(SourceError, match="row 17"):
        build(TABLE.set_column(0, "lon", pa.array(lon)), SPEC)
    with pytest.raises(ConfigError, match="'wind'"):
        build(TABLE.drop_columns(["wind"]), SPEC)
    huge = TABLE.set_column(6, "level", pa.array(np.full(TABLE.num_rows, 2**60)))
    with pytest.raises(SourceError, match="feature level"):
        build(huge, make_spec(huge))


def test_infinite_values_count_as_null() -> None:
    wind = Rows(TABLE).column("wind")
    wind = np.where(np.arange(wind.size) < 50, np.inf, wind)
    table = TABLE.set_column(5, "wind", pa.array(wind))
    synopsis = build(table, SPEC)
    present = int(synopsis.groups.present[:, 2, 2].sum(dtype=np.int64))
    present += int(np.isfinite(synopsis.rows.values[:, 2]).sum())
    assert present == TABLE.num_rows - 50
