"""Point generator: the same rows in any ranges, and the requested distributions."""

from __future__ import annotations

import doctest
import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.stages import generators
from roost.stages.generators import Hotspot, Places, PointGenerator, load_places

HOUR_US = 3_600_000_000
START_US = 1_400_000_000_000_000
# Far from each other compared with the spread, so that a point shows which place it came from.
PLACES = Places(
    lon=np.array([0.0, 20.0, 40.0, 60.0, 80.0]),
    lat=np.array([10.0, 10.0, 10.0, -10.0, -10.0]),
    weight=np.array([5.0, 1.0, 0.0, 3.0, 0.5]),
)
DRIFTING = Hotspot(
    center=(-100.0, 40.0),
    side=2.0,
    share=0.3,
    start_us=START_US + HOUR_US // 4,
    stop_us=START_US + HOUR_US // 2,
    drift_deg_per_s=(0.01, -0.02),
)
BELL = Hotspot(
    center=(-50.0, 0.0),
    side=1.0,
    share=0.5,
    start_us=START_US,
    stop_us=START_US + HOUR_US,
    spread="normal",
    intensity="normal",
)


def make(*hotspots: Hotspot, seed: int = 3, rate_per_s: float = 100.0) -> PointGenerator:
    return PointGenerator(PLACES, rate_per_s, START_US, seed, hotspots, spread_deg=0.05)


def columns(table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    time_us = table["event_time"].cast(pa.int64()).to_numpy()
    return time_us, table["lon"].to_numpy(), table["lat"].to_numpy()


def test_schema() -> None:
    assert make().block(0, 3).schema == pa.schema(
        [
            ("id", pa.int64()),
            ("event_time", pa.timestamp("us", tz="UTC")),
            ("lon", pa.float64()),
            ("lat", pa.float64()),
            ("value", pa.float64()),
        ]
    )


@examples(60)
@given(
    start=st.one_of(st.integers(0, 200_000), st.integers(2**40, 2**40 + 10)),
    lengths=st.lists(st.integers(0, 40_000), min_size=1, max_size=6),
)
def test_any_cut_gives_the_same_rows(start: int, lengths: list[int]) -> None:
    generator = make(DRIFTING, BELL)
    cuts = np.concatenate([[start], start + np.cumsum(lengths)]).tolist()
    parts = [generator.block(a, b) for a, b in pairwise(cuts)]
    whole = generator.block(cuts[0], cuts[-1])
    assert pa.concat_tables(parts).combine_chunks().equals(whole.combine_chunks())
    assert whole["id"].to_pylist() == list(range(cuts[0], cuts[-1]))


def test_single_rows_equal_the_block() -> None:
    generator = make(DRIFTING, BELL)
    rows = [generator.block(k, k + 1) for k in range(120_000, 120_050)]
    assert pa.concat_tables(rows).combine_chunks().equals(generator.block(120_000, 120_050))


def test_a_copy_in_another_process_would_give_the_same_rows() -> None:
    generator = make(DRIFTING, BELL)
    copy = pickle.loads(pickle.dumps(generator))
    assert copy.block(90_000, 99_000).equals(generator.block(90_000, 99_000))


def test_another_seed_is_another_stream() -> None:
    lon, other = make(seed=3).block(0, 1_000)["lon"], make(seed=4).block(0, 1_000)["lon"]
    assert np.mean(lon.to_numpy() == other.to_numpy()) < 0.01


def test_rows_do_not_repeat() -> None:
    values = make().block(0, 100_000)["value"].to_numpy()
    # Values have 32 random bits: among 100,000 about one pair is equal by chance.
    assert len(np.unique(values)) > 99_980


def nearest_place(lon: np.ndarray) -> np.ndarray:
    return np.abs(lon[:, None] - PLACES.lon[None, :]).argmin(axis=1)


def test_places_are_drawn_by_weight() -> None:
    rows = 400_000
    _, lon, _ = columns(make().block(0, rows))
    seen = np.bincount(nearest_place(lon), minlength=5)
    expected = PLACES.weight / PLACES.weight.sum() * rows
    assert seen[2] == 0
    drawn = expected > 0
    chi_square = ((seen - expected)[drawn] ** 2 / expected[drawn]).sum()
    # Three degrees of freedom: 21.1 is passed once in ten thousand seeds.
    assert chi_square < 21.1


def test_bundled_places_are_drawn_by_population() -> None:
    places = load_places()
    rows = 1_000_000
    generator = PointGenerator(places, 1e6, 0, seed=1, spread_deg=0.0)
    _, lon, lat = columns(generator.block(0, rows))
    index = {(x, y): k for k, (x, y) in enumerate(zip(places.lon, places.lat, strict=True))}
    assert len(index) == len(places.lon) == 2_000
    seen = np.bincount([index[xy] for xy in zip(lon, lat, strict=True)], minlength=2_000)
    expected = places.weight / places.weight.sum() * rows
    chi_square = ((seen - expected) ** 2 / expected).sum()
    # Chi-square of 1,999 degrees has mean 1,999 and deviation 63: five deviations.
    assert abs(chi_square - 1_999) < 5 * 63


def test_points_lie_normally_around_their_place() -> None:
    rows = 200_000
    _, lon, lat = columns(make().block(0, rows))
    place = nearest_place(lon)
    for offset in (lon - PLACES.lon[place], lat - PLACES.lat[place]):
        assert abs(offset.mean()) < 5 * 0.05 / np.sqrt(rows)
        assert offset.std() == pytest.approx(0.05, rel=0.01)
        within = np.mean(np.abs(offset) < 0.05)
        assert within == pytest.approx(0.6827, abs=0.005)
    assert abs(np.corrcoef(lon - PLACES.lon[place], lat - PLACES.lat[place])[0, 1]) < 0.012


def test_values_are_exponential_and_independent_of_place() -> None:
    table = make().block(0, 200_000)
    value = table["value"].to_numpy()
    assert value.min() >= 0
    assert value.mean() == pytest.approx(20.0, rel=0.02)
    assert np.mean(value > 50) == pytest.approx(np.exp(-2.5), abs=0.003)
    assert abs(np.corrcoef(value, table["lon"].to_numpy())[0, 1]) < 0.012


@pytest.mark.parametrize("rate_per_s", [0.3, 7.0, 1_000.0, 2_500_000.0])
def test_time_never_goes_back_and_keeps_the_rate(rate_per_s: float) -> None:
    generator = make(rate_per_s=rate_per_s)
    time_us, _, _ = columns(generator.block(0, 50_000))
    assert time_us[0] == START_US
    assert (np.diff(time_us) >= 0).all()
    assert time_us[-1] - START_US == pytest.approx(49_999 * 1e6 / rate_per_s, abs=1)


def share_in(generator: PointGenerator, hotspot: Hotspot, start_us: int, stop_us: int) -> float:
    """Share of the points of a time span that lie on the hotspot's half of the world."""
    first, last = ((t - START_US) * 100 // 1_000_000 for t in (start_us, stop_us))
    time_us, lon, _ = columns(generator.block(int(first), int(last)))
    assert start_us <= time_us[0] and time_us[-1] < stop_us
    return float(np.mean(np.abs(lon - hotspot.center[0]) < 15))


def test_a_step_hotspot_has_its_share_during_its_lifetime_only() -> None:
    generator = make(DRIFTING)
    quarter_us = HOUR_US // 4
    shares = [
        share_in(generator, DRIFTING, START_US + k * quarter_us, START_US + (k + 1) * quarter_us)
        for k in range(4)
    ]
    # 90,000 points a quarter: a deviation of the share is 0.0015.
    assert shares == [0.0, pytest.approx(0.3, abs=0.0075), 0.0, 0.0]


def test_step_intensity_is_flat_and_normal_intensity_is_a_bell() -> None:
    flat = Hotspot((-50.0, 0.0), 1.0, 0.5, START_US, START_US + HOUR_US)
    span_us = HOUR_US // 12
    spans = [(START_US + k * span_us, START_US + (k + 1) * span_us) for k in range(12)]
    step = [share_in(make(flat), flat, *span) for span in spans]
    bell = [share_in(make(BELL), BELL, *span) for span in spans]
    assert step == pytest.approx([0.5] * 12, abs=0.015)
    middle = np.array([(a + b) / 2 for a, b in spans])
    z = (middle - (START_US + HOUR_US / 2)) / (HOUR_US / 6)
    assert bell == pytest.approx((0.5 * np.exp(-(z**2) / 2)).tolist(), abs=0.02)
    assert bell[0] < 0.02 < 0.45 < max(bell)


def test_a_drifting_hotspot_moves_with_its_velocity() -> None:
    time_us, lon, lat = columns(make(DRIFTING).block(90_000, 180_000))
    mine = lon < -50
    age_s = (time_us[mine] - DRIFTING.start_us) / 1e6
    dx = lon[mine] - (-100.0 + 0.01 * age_s)
    dy = lat[mine] - (40.0 - 0.02 * age_s)
    for offset in (dx, dy):
        assert np.abs(offset).max() <= 1.0 + 1e-9
        assert offset.std() == pytest.approx(2.0 / np.sqrt(12), rel=0.02)
    assert np.ptp(lon[mine]) > 8


def test_a_normal_hotspot_has_a_sixth_of_its_side_as_deviation() -> None:
    _, lon, lat = columns(make(BELL).block(0, 360_000))
    mine = lon < -25
    assert (lon[mine] + 50).std() == pytest.approx(1 / 6, rel=0.02)
    assert lat[mine].std() == pytest.approx(1 / 6, rel=0.02)


def test_two_hotspots_share_the_points() -> None:
    other = Hotspot((-170.0, 0.0), 1.0, 0.6, START_US, START_US + HOUR_US)
    generator = make(DRIFTING, other)
    start_us, stop_us = DRIFTING.start_us, DRIFTING.stop_us
    assert share_in(generator, DRIFTING, start_us, stop_us) == pytest.approx(0.3, abs=0.01)
    assert share_in(generator, other, start_us, stop_us) == pytest.approx(0.6, abs=0.01)


def test_a_hotspot_leaves_the_other_points_where_they_were() -> None:
    _, plain, _ = columns(make().block(90_000, 180_000))
    _, with_hotspot, _ = columns(make(DRIFTING).block(90_000, 180_000))
    kept = with_hotspot > -50
    assert 0 < kept.sum() < len(kept)
    assert (plain[kept] == with_hotspot[kept]).all()


def test_points_stay_on_the_globe() -> None:
    def draw(lon: float, lat: float) -> tuple[np.ndarray, np.ndarray]:
        place = Places(np.array([lon]), np.array([lat]), np.ones(1))
        generator = PointGenerator(place, 1e3, 0, seed=1, spread_deg=1.0)
        return columns(generator.block(0, 20_000))[1:]

    dx, dy = draw(0.0, 0.0)
    for side in (1.0, -1.0):
        lon, lat = draw(side * 179.9, side * 89.5)
        assert np.abs(lon).max() <= 180
        assert 0.4 < np.mean(side * lon < 0) < 0.5
        # On the circle, every point is as far from its place as it would be anywhere else.
        moved = np.radians(side * 179.9 + dx)
        assert np.cos(np.radians(lon) - moved) == pytest.approx(1.0, abs=1e-12)
        assert lat == pytest.approx(np.clip(side * 89.5 + dy, -90, 90), abs=1e-9)


LIFETIME = {"start_us": 0, "stop_us": 10}


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        pytest.param(lambda: make(rate_per_s=0), "generator.rate_per_s", id="no rate"),
        pytest.param(lambda: make(seed=-1), "generator.seed", id="negative seed"),
        pytest.param(
            lambda: PointGenerator(PLACES, 1, 0, 1, spread_deg=float("nan")),
            "generator.spread_deg",
            id="spread is not a number",
        ),
        pytest.param(lambda: make(BELL, BELL, BELL), "generator.hotspots", id="shares above one"),
        pytest.param(
            lambda: Hotspot((0, 0), 1, 1.5, **LIFETIME), "hotspot.share", id="share above one"
        ),
        pytest.param(
            lambda: Hotspot((0, 0), -1, 0.5, **LIFETIME), "hotspot.side", id="negative side"
        ),
        pytest.param(lambda: Hotspot((0, 0), 1, 0.5, 10, 10), "hotspot.stop_us", id="no lifetime"),
        pytest.param(
            lambda: Hotspot((0, 0), 1, 0.5, **LIFETIME, spread="round"),
            "hotspot.spread",
            id="spread",
        ),
        pytest.param(
            lambda: Hotspot((0, 0), 1, 0.5, **LIFETIME, intensity="loud"),
            "hotspot.intensity",
            id="intensity",
        ),
        pytest.param(
            lambda: Places(np.zeros(2), np.zeros(2), np.zeros(2)),
            "generator.places",
            id="no weight",
        ),
        pytest.param(
            lambda: Places(np.zeros(2), np.zeros(1), np.ones(2)), "generator.places", id="lengths"
        ),
    ],
)
def test_wrong_settings_name_their_key(wrong, key: str) -> None:
    with pytest.raises(ConfigError) as problem:
        wrong()
    assert problem.value.key == key


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4)])
def test_rows_must_be_a_range(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a range"):
        make().block(start, stop)


def test_no_rows_is_an_empty_table() -> None:
    assert make(BELL).block(7, 7).num_rows == 0


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(generators)
    assert results.attempted > 0
    assert results.failed == 0
