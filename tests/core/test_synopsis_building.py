"""What a synopsis is built from, against numpy: keys, codes, sums, owners; and folds at once."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.model.arrays import Floats
from roost.synopsis import Synopsis, SynopsisSpec, build, learn_bins
from roost.synopsis.ageing import Band, add, add_all
from roost.synopsis.bins import Bins
from roost.synopsis.spec import places_of, run_keys
from roost.synopsis.synopsis import SmallRows, build_owned, from_rows, read_rows
from roost.synopsis.tree import PrefixTree
from synopsis_tables import START_US, make_spec, make_table

TABLE = make_table(11, 3_000)
SPEC = make_spec(TABLE)
BINS = learn_bins(TABLE, SPEC)
HOUR_US = 3_600_000_000

magnitudes = st.sampled_from([1e-300, 1e-3, 1.0, 1e6, 1e300])
edge_lists = st.lists(st.integers(-60, 60), min_size=0, max_size=40, unique=True).map(sorted)


def equal(a: Synopsis, b: Synopsis) -> bool:
    others = b.arrays()
    return all(
        np.array_equal(array, others[name], equal_nan=array.dtype.kind == "f")
        for name, array in a.arrays().items()
    )


@given(edge_lists, magnitudes, st.floats(-3.0, 3.0), st.integers(0, 2**32))
def test_codes_are_those_of_a_binary_search(
    steps: list[int], scale: float, power: float, seed: int
) -> None:
    """Edges are unevenly spaced; values are at the edges, next to them, between, and beyond."""
    edges = np.unique(np.sign(steps) * np.abs(np.array(steps, float)) ** 2.0**power * scale)
    rng = np.random.default_rng(seed)
    near = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)])
    low, high = (edges[0], edges[-1]) if edges.size else (0.0, 1.0)
    more = [rng.uniform(low, high, 50), [np.nan, np.inf, -np.inf, 1e305, -1e305]]
    values = rng.permutation(np.concatenate([near, *more]))
    codes, synopsis = build_values(values, edges)
    known = np.isfinite(values)
    expected = np.where(known, np.searchsorted(edges, values, side="right") + 1, 0)
    assert codes.tolist() == expected.tolist()
    counts = np.bincount(expected, minlength=edges.size + 2)
    assert synopsis.bin_records.counts[0].tolist() == counts.tolist()
    for code in np.unique(expected[known]).tolist():
        own = values[expected == code]
        extremes = synopsis.bin_records.lows[0, code], synopsis.bin_records.highs[0, code]
        assert extremes == (own.min(), own.max())
    ends = synopsis.groups.lows.min(), synopsis.groups.highs.max()
    assert ends == (values[known].min(), values[known].max())


def build_values(values: Floats, edges: Floats) -> tuple[np.ndarray, Synopsis]:
    """Build from values of one feature, each at an hour of its own; returns their codes."""
    spec = SynopsisSpec.of(pa.schema([("a", pa.float64())]), ["a"], slots=1)
    bins = Bins((edges,), (None,), np.zeros(1), (0,))
    hours = np.arange(values.size)
    place = np.zeros(values.size)
    rows = SmallRows(place, place, START_US + hours * HOUR_US, values[:, None])
    with np.errstate(over="ignore", invalid="ignore"):  # squares of values near 1e300
        synopsis = from_rows(rows, spec, bins, small=False)
    return synopsis.paths().codes[:, 0], synopsis


@given(st.integers(0, 2**32), st.sampled_from([600, 3600]))
def test_the_key_of_a_row_does_not_depend_on_other_rows(seed: int, step_s: int) -> None:
    rng = np.random.default_rng(seed)
    layout = make_spec(TABLE, step_s=step_s).layout
    near = START_US + rng.integers(-2, 3, 60) * step_s * 1_000_000 + rng.integers(-1, 2, 60)
    times = np.where(rng.random(60) < 0.7, near, rng.integers(-(10**15), 10**15, 60))
    x, y = rng.uniform(-180, 180, 60), rng.uniform(-90, 90, 60)
    keys, steps = np.empty(60, np.int64), np.empty(60, np.int64)
    run_keys(x, y, times, layout, keys, steps)
    for k in range(60):
        key, step = np.empty(1, np.int64), np.empty(1, np.int64)
        run_keys(x[k : k + 1], y[k : k + 1], times[k : k + 1], layout, key, step)
        assert (keys[k], steps[k]) == (key[0], step[0])


@pytest.mark.parametrize("interval_days", [None, 1])
@pytest.mark.parametrize("ordered", [True, False])
def test_each_owner_has_the_synopsis_of_its_rows(ordered: bool, interval_days: int | None) -> None:
    spec = make_spec(TABLE, interval_days=interval_days)
    by_time = TABLE.sort_by("event_time")
    shuffled = TABLE.take(np.random.default_rng(3).permutation(TABLE.num_rows))
    table = by_time if ordered else shuffled
    rows = read_rows(table, spec, BINS)
    keys, steps = np.empty(rows.x.size, np.int64), np.empty(rows.x.size, np.int64)
    run_keys(rows.x, rows.y, rows.time, spec.layout, keys, steps)
    places = places_of(keys, spec)
    tree = PrefixTree.even(3, spec.place_bits, places)
    owners_of = partial(tree.owners_of, place_bits=spec.place_bits)
    owners = owners_of(places)
    assert set(owners.tolist()) == {0, 1, 2}
    built = dict(build_owned(table, spec, BINS, owners_of))
    assert sorted(built) == [0, 1, 2]
    for owner, synopsis in built.items():
        alone = build(table.filter(pa.array(owners == owner)), spec, BINS)
        assert synopsis.groups.keys.size and synopsis.rows.x.size
        assert equal(synopsis, alone)


def test_bands_that_are_added_at_once_are_those_added_one_by_one() -> None:
    other = learn_bins(TABLE.slice(0, 1_000), make_spec(TABLE, bins=7))
    parts = [build(TABLE.slice(k * 500, 500), SPEC, BINS) for k in range(4)]
    parts += [build(TABLE.slice(2_000 + k * 500, 500), SPEC, other) for k in range(2)]
    added = [Band(level, parts[k]) for k, level in ((0, 1), (1, 0), (4, 0), (2, 0), (5, 0), (3, 1))]
    slowly: list[Band] = [Band(0, parts[1])]
    for band in added:
        slowly = add(slowly, band)
    quickly = add_all([Band(0, parts[1])], added)
    found = {(band.level, band.synopsis.bins.text): band.synopsis for band in quickly}
    assert len(found) == len(quickly) == len(slowly) == 3
    for band in slowly:
        mine = found[band.level, band.synopsis.bins.text]
        assert mine.rows.x.size == band.synopsis.rows.x.size  # in another order
        for name, array in band.synopsis.arrays().items():
            if not name.startswith("rows."):
                np.testing.assert_allclose(mine.arrays()[name], array, 1e-9, 1e-9)


def test_bins_are_pickled_with_their_tables() -> None:
    prepared = Bins.from_json(BINS.to_json()).prepared()
    assert {"coding", "text"} <= set(vars(pickle.loads(pickle.dumps(prepared))))
    assert equal(build(TABLE, SPEC, pickle.loads(pickle.dumps(prepared))), build(TABLE, SPEC, BINS))
