"""Synthetic rows belong to leaves and scopes, and have the statistics of the original rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError
from roost.model.records import Box
from roost.synopsis import (
    BinRule,
    Scope,
    Synopsis,
    SynopsisSpec,
    build,
    count,
    learn_bins,
    merge,
    select,
)
from roost.synopsis import synthesize as draw_rows
from roost.synopsis.planes import merge_planes
from roost.synopsis.synopsis import from_rows, read_rows
from synopsis_tables import FEATURES, START_US, Rows, draw_scope, make_spec, make_table

TABLE = make_table(11, 6_000)
ROWS = Rows(TABLE)
SPEC = make_spec(TABLE)
BINS = learn_bins(TABLE, SPEC)
BUILT = build(TABLE, SPEC, BINS)
scopes = draw_scope(ROWS)


def coarsest(synopsis: Synopsis) -> Synopsis:
    """All planes have one bin: only the records of the groups tell anything."""
    bins = synopsis.bins
    while max(bins.plane_counts) > 1:
        bins = bins.halved(int(np.argmax(bins.plane_counts)))
    return merge_planes(synopsis, synopsis.paths(), bins)


def paths_of(synopsis: Synopsis) -> set[tuple[int, ...]]:
    paths = synopsis.paths()
    keys = np.repeat(paths.run_keys, np.diff(paths.starts))
    return set(zip(keys.tolist(), paths.steps.tolist(), *paths.codes.T.tolist(), strict=True))


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("share", [0.2, 1.0, 2.5])
def test_every_row_belongs_to_a_leaf_or_is_a_row_of_a_small_group(
    coarse: bool, share: float
) -> None:
    synopsis = coarsest(BUILT) if coarse else BUILT
    table = draw_rows(synopsis, share, seed=3)
    assert table.num_rows == round(share * TABLE.num_rows)
    assert table.schema.names == ["event_time", "lon", "lat", *FEATURES]
    assert all(table.schema.field(name).type == TABLE.schema.field(name).type for name in FEATURES)
    assert (np.diff(Rows(table).column("event_time")) >= 0).all()
    small = {row[:3] for row in zip(*synopsis.rows[2::-1], strict=True)}  # time, y, x
    time, x, y = (Rows(table).column(name) for name in ("event_time", "lon", "lat"))
    of_small = np.array([row in small for row in zip(time, y, x, strict=True)])
    # As many as their part of all rows, up to one for each border between strata.
    assert abs(of_small.sum() - share * synopsis.rows.x.size) <= 1.0
    rows = read_rows(table.filter(pa.array(~of_small)), SPEC, synopsis.bins)
    if coarse:  # the last category has no name, and its rows are null
        rows.values[:, FEATURES.index("kind")] = 1.0
    found = paths_of(from_rows(rows, SPEC, synopsis.bins, small=False))
    known = paths_of(synopsis)
    if coarse:
        at = 2 + FEATURES.index("kind")
        known = {(*path[:at], 1, *path[at + 1 :]) for path in known}
    else:
        at = 2 + FEATURES.index("kind")
        other = len(BINS.categories[FEATURES.index("kind")] or ()) + 1
        known |= {(*path[:at], 0, *path[at + 1 :]) for path in known if path[at] == other}
    assert found <= known
    if share >= 1.0 and not coarse:
        # Stratified sampling of more than all rows draws nearly all leaves.
        assert len(found) > 0.9 * len(paths_of(BUILT))


@given(scopes, st.integers(0, 1_000))
def test_rows_are_inside_the_scope(drawn: Any, seed: int) -> None:
    scope, _ = drawn
    table = draw_rows(BUILT, 0.5, scope, seed=seed)
    assert Rows(table).inside(scope).all()
    if table.num_rows:
        assert count(build(table, SPEC, BINS), scope).high == table.num_rows
    rows = count(BUILT, scope)
    # Rows of leaves on the border are dropped if they are hardly ever inside.
    assert 0.4 * rows.low - 10.0 <= table.num_rows <= round(0.5 * rows.value)


def test_predicates_hold_for_every_row() -> None:
    limit = float(np.nanmedian(ROWS.column("temp"))) + 0.03  # inside a bin
    scope = Scope(predicate=f"temp > {limit!r} and wind <= 3.21 or level is null", hours=(3, 20))
    table = draw_rows(BUILT, 1.0, scope, seed=5)
    rows = Rows(table)
    temp, wind, level = (rows.column(name) for name in ("temp", "wind", "level"))
    assert (((temp > limit) & (wind <= 3.21)) | np.isnan(level)).all()
    assert rows.inside(Scope(hours=(3, 20))).all()
    columns = (ROWS.column(name) for name in ("temp", "wind", "level"))
    t, w, v = columns
    truth = (((t > limit) & (w <= 3.21)) | np.isnan(v)) & ROWS.inside(Scope(hours=(3, 20)))
    assert table.num_rows == pytest.approx(truth.sum(), rel=0.05)


@pytest.mark.parametrize("coarse", [False, True])
def test_statistics_are_those_of_the_rows(coarse: bool) -> None:
    synopsis = coarsest(BUILT) if coarse else BUILT
    rows = Rows(draw_rows(synopsis, 1.0, seed=1))
    for name in ("temp", "rain", "wind", "level", "fixed"):
        a, b = rows.column(name), ROWS.column(name)
        assert np.isnan(a).sum() == np.isnan(b).sum()
        a, b = a[np.isfinite(a)], b[np.isfinite(b)]
        assert a.mean() == pytest.approx(b.mean(), rel=0.02, abs=0.05)
        assert a.std() == pytest.approx(b.std(), rel=0.1, abs=1e-9)
        ranks = [0.05, 0.25, 0.5, 0.75, 0.95]
        assert np.quantile(a, ranks) == pytest.approx(np.quantile(b, ranks), rel=0.08, abs=0.1)
    for column in ("kind", "wet"):
        a, b = rows.column(column), ROWS.column(column)
        for value in ("sun", "rain", True, False):
            assert (a == value).sum() == pytest.approx((b == value).sum(), rel=0.08, abs=10)
    correlations = []
    for own in (rows, ROWS):
        pair = np.ma.masked_invalid([own.column("temp"), own.column("level")])
        correlations.append(float(np.ma.corrcoef(pair)[0, 1]))
    # Without planes the correlations of the groups are all that is known.
    assert correlations[0] == pytest.approx(correlations[1], abs=0.02)


def test_places_and_times_have_their_share() -> None:
    def counts(table: pa.Table) -> np.ndarray:
        built = from_rows(read_rows(table, SPEC, BINS), SPEC, BINS, small=False)
        at = np.repeat(built.leaves.places, built.leaves.sizes)
        found = np.bincount(at, built.paths().counts, built.places.cells.size)
        by_place = dict(zip(built.places.cells.tolist(), found, strict=True))
        days = Rows(table).column("event_time") // (7 * 86_400_000_000)
        return np.array(
            [*(by_place.get(k, 0.0) for k in largest), *np.unique(days, return_counts=True)[1]]
        )

    largest: list[int] = []
    whole = from_rows(read_rows(TABLE, SPEC, BINS), SPEC, BINS, small=False)
    at = np.repeat(whole.leaves.places, whole.leaves.sizes)
    sizes = np.bincount(at, whole.paths().counts)
    largest += whole.places.cells[np.argsort(-sizes)[:4]].tolist()
    truth = 0.1 * counts(TABLE)
    assert truth.min() > 20.0
    off = np.array([counts(draw_rows(BUILT, 0.1, seed=seed)) - truth for seed in range(20)])
    # A random sample is off by the root of 90 % of each count.
    assert (np.sqrt((off**2).mean(axis=0)) < 0.8 * np.sqrt(0.9 * truth)).all()


def test_hourly_data_stay_hourly_and_other_times_do_not() -> None:
    hour = 3_600_000_000
    times = ROWS.column("event_time")
    hourly = TABLE.filter(pa.array(times % hour == 0))
    drawn = Rows(draw_rows(build(hourly, SPEC, BINS), 0.5)).column("event_time")
    assert (drawn % hour == 0).all()
    assert (Rows(draw_rows(BUILT, 0.5)).column("event_time") % hour != 0).mean() > 0.5


def test_the_seed_decides() -> None:
    first = draw_rows(BUILT, rows=500, seed=7)
    assert first.num_rows == 500 and first.equals(draw_rows(BUILT, rows=500, seed=7))
    assert not first.equals(draw_rows(BUILT, rows=500, seed=8))


def test_any_split_gives_the_same_rows() -> None:
    owner = np.random.default_rng(2).integers(0, 3, TABLE.num_rows)
    merged = merge([build(TABLE.filter(pa.array(owner == k)), SPEC, BINS) for k in range(3)])
    scope = Scope(hours=(2, 11), predicate="wind > 2")
    for own in (Scope(), scope):
        a, b = (Rows(draw_rows(synopsis, 0.3, own, seed=4)) for synopsis in (merged, BUILT))
        for name in ("lon", "lat", "event_time", "temp", "rain", "wind", "level"):
            assert np.allclose(a.column(name), b.column(name), rtol=1e-6, equal_nan=True)


def test_parts_and_empty_scopes_have_rows_or_none() -> None:
    assert draw_rows(BUILT, 0.5, Scope(Box(0.0, 0.0, 1.0, 1.0))).num_rows == 0
    assert draw_rows(BUILT, 0.0).num_rows == draw_rows(build(TABLE[:0], SPEC, BINS), 1.0).num_rows
    part = select(BUILT, Scope(hours=(1, 10), predicate="temp > 10"))
    assert not part.groups.exact.all()
    rows = Rows(draw_rows(part, 1.0))
    assert rows.inside(Scope(hours=(1, 10))).all() and rows.table.num_rows > 500
    assert np.nanmin(rows.column("temp")) > 7.0  # leaves on the border are as wide as bins


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "one of them"),
        ({"share": 0.1, "rows": 5}, "one of them"),
        ({"share": -0.1}, "share"),
        ({"share": float("nan")}, "share"),
        ({"rows": -1}, "rows"),
        ({"share": 0.1, "scope": Scope(predicate="snow > 1")}, "snow"),
    ],
)
def test_refused_draws_name_the_part(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception, match=named) as caught:
        draw_rows(BUILT, **settings)
    assert type(caught.value).__module__ == ConfigError.__module__


def test_moving_points_are_drawn_inside_their_place() -> None:
    rng = np.random.default_rng(0)
    columns = {"lon": rng.uniform(9.0, 12.0, 3_000), "lat": rng.uniform(48.0, 51.0, 3_000)}
    columns |= {"event_time": np.full(3_000, START_US), "a": rng.normal(size=3_000)}
    table = pa.table(columns)
    built = build(table, SynopsisSpec.of(table.schema, ["a"], place_bits=16))
    drawn = Rows(draw_rows(built, 1.0))
    x, y = drawn.column("lon"), drawn.column("lat")
    bounds = built.places.bounds
    inside = (bounds[:, None, :2] <= np.stack([x, y], 1)) & (
        np.stack([x, y], 1) <= bounds[:, None, 2:]
    )
    assert inside.all(axis=2).any(axis=0).all() and len(np.unique(x)) > 2_900
    assert x.mean() == pytest.approx(columns["lon"].mean(), abs=0.02)


def test_skewed_values_keep_the_means_of_wide_bins() -> None:
    values = np.random.default_rng(0).exponential(size=TABLE.num_rows) ** 2
    table = TABLE.select(["lon", "lat", "event_time"]).append_column("a", pa.array(values))
    built = build(table, SynopsisSpec.of(table.schema, ["a"], bins=3, rule=BinRule.EQUAL_DENSITY))
    lows, highs, counts = (
        part[0, 1:4] for part in (*built.bin_records[3:], built.bin_records.counts)
    )
    assert counts @ (lows + highs) / 2.0 > 3.0 * values.sum()
    assert Rows(draw_rows(built, 1.0)).column("a").mean() == pytest.approx(values.mean(), rel=0.05)
