"""Call generator: the same rows in any ranges, the requested distributions, and its path."""

from __future__ import annotations

import doctest
import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.stages import sources
from roost.stages.decode import ROW
from roost.stages.generators import CallGenerator, PointGenerator, Skew, load_places
from roost.stages.sources import GENERATOR_START_US, GeneratorSource, parse_generator, parse_skew
from roost.storage.cache import WorkerCache
from roost.testing.oracle import haversine

STAMP = pa.timestamp("us", tz="UTC")
PLACES = load_places()


def make(seed: int = 3, rate_per_s: float = 100.0, **more) -> CallGenerator:
    return CallGenerator(PLACES, rate_per_s, GENERATOR_START_US, seed, **more)


def times_us(table: pa.Table, name: str) -> np.ndarray:
    return table[name].cast(pa.int64()).to_numpy()


def opened(path: str) -> GeneratorSource:
    return parse_generator(path, lambda: 0.0)


def block_of(path: str, start: int, stop: int) -> pa.Table:
    (item,) = opened(path).again(start, stop)
    names = make().block(0, 0).column_names
    return item.read([*names, ROW], WorkerCache())


def test_the_columns_are_those_of_table_ii() -> None:
    assert make().block(0, 3).schema == pa.schema(
        [
            ("src", pa.string()),
            ("dst", pa.string()),
            ("start", STAMP),
            ("end", STAMP),
            ("district", pa.int64()),
            ("lat", pa.float64()),
            ("lon", pa.float64()),
            ("ts", STAMP),
        ]
    )


@examples(40)
@given(
    start=st.one_of(st.integers(0, 200_000), st.integers(2**40, 2**40 + 10)),
    lengths=st.lists(st.integers(0, 20_000), min_size=1, max_size=5),
    skew=st.sampled_from(["uniform", "zipf:0.7", "zipf:1", "normal:2000:100"]),
)
def test_any_cut_gives_the_same_rows(start: int, lengths: list[int], skew: str) -> None:
    generator = make(skew=parse_skew(skew), disorder_s=30.0)
    cuts = np.concatenate([[start], start + np.cumsum(lengths)]).tolist()
    parts = [generator.block(a, b) for a, b in pairwise(cuts)]
    whole = generator.block(cuts[0], cuts[-1])
    assert pa.concat_tables(parts).combine_chunks().equals(whole.combine_chunks())


def test_a_copy_in_another_process_gives_the_same_rows() -> None:
    generator = make(disorder_s=5.0)
    assert pickle.loads(pickle.dumps(generator)).block(7, 99).equals(generator.block(7, 99))
    assert not make(seed=4, disorder_s=5.0).block(7, 99).equals(generator.block(7, 99))


def test_starts_ascend_at_the_rate_and_the_emission_is_the_end() -> None:
    table = make(rate_per_s=250.0).block(0, 20_000)
    start, end = times_us(table, "start"), times_us(table, "end")
    assert start.tolist() == [GENERATOR_START_US + 4_000 * k for k in range(20_000)]
    assert (end >= start).all()
    assert table["ts"].equals(table["end"])


def test_disorder_displaces_starts_by_less_than_its_bound() -> None:
    straight, shuffled = (make(disorder_s=d).block(0, 20_000) for d in (0.0, 30.0))
    moved = times_us(shuffled, "start") - times_us(straight, "start")
    assert moved.min() >= 0 and moved.max() < 30_000_000
    assert moved.mean() == pytest.approx(15_000_000, rel=0.02)
    assert (np.diff(times_us(shuffled, "start")) < 0).mean() > 0.4
    lasted = [times_us(t, "end") - times_us(t, "start") for t in (straight, shuffled)]
    assert np.array_equal(*lasted)
    assert shuffled["src"].equals(straight["src"])


def test_durations_are_exponential_up_to_the_cap() -> None:
    table = make(duration_s=100.0, longest_s=300.0).block(0, 100_000)
    seconds = (times_us(table, "end") - times_us(table, "start")) / 1e6
    assert seconds.max() == 300.0
    assert (seconds == 300.0).mean() == pytest.approx(np.exp(-3.0), rel=0.05)
    for limit in (20.0, 100.0, 250.0):
        assert (seconds > limit).mean() == pytest.approx(np.exp(-limit / 100.0), rel=0.05)


def callers_of(table: pa.Table, column: str = "src") -> np.ndarray:
    return pc.cast(table[column], pa.int64()).to_numpy() - 1_000_000_000


def test_callers_follow_the_skew() -> None:
    rows, callers = 200_000, 500
    uniform = callers_of(make(callers=callers, skew=Skew()).block(0, rows))
    counts = np.bincount(uniform, minlength=callers)
    assert len(counts) == callers and np.abs(counts - rows / callers).max() < 6 * 20
    for exponent in (0.5, 1.0, 1.5):
        table = make(callers=callers, skew=Skew("zipf", exponent)).block(0, rows)
        counts = np.bincount(callers_of(table), minlength=callers)
        assert len(counts) == callers
        # The share of each decade, from numerical integration of the density.
        grid = np.linspace(1.0, callers + 1.0, 2_000_001)
        density = grid**-exponent
        for low, high in ((0, 10), (10, 100), (100, 500)):
            part = density[(grid >= low + 1) & (grid < high + 1)].sum() / density.sum()
            assert counts[low:high].sum() / rows == pytest.approx(part, rel=0.03)
    normal = callers_of(
        make(callers=10_000, skew=Skew("normal", mean=2_000, deviation=100)).block(0, rows)
    )
    assert normal.mean() == pytest.approx(2_000, abs=1.5)
    assert normal.std() == pytest.approx(100, rel=0.02)
    edge = callers_of(make(callers=50, skew=Skew("normal", mean=0, deviation=10)).block(0, 10_000))
    assert edge.min() == 0 and edge.max() < 50 and (edge == 0).mean() > 0.5


def test_callees_are_other_customers() -> None:
    table = make(callers=3, skew=Skew()).block(0, 3_000)
    src, dst = callers_of(table), callers_of(table, "dst")
    assert not (src == dst).any()
    pairs = {pair: 0 for pair in zip(src.tolist(), dst.tolist(), strict=True)}
    assert len(pairs) == 6
    assert {len(number) for number in table["dst"].to_pylist()} == {10}


def test_callers_are_near_their_district_unless_they_roam() -> None:
    table = make(districts=10, spread_deg=0.05).block(0, 20_000)
    district, home = table["district"].to_numpy(), callers_of(table) % 10
    away = district != home
    assert away.mean() == pytest.approx(0.05 * 0.9, abs=0.01)
    assert set(district.tolist()) == set(range(10))
    for row in range(0, 20_000, 500):
        k = district[row]
        lon, lat = table["lon"][row].as_py(), table["lat"][row].as_py()
        assert haversine(PLACES.lon[k], PLACES.lat[k], lon, lat) < 6 * 0.05 * 111_200 * 1.5


def test_a_path_names_the_generator_and_its_options() -> None:
    text = (
        "generate:calls,rows=50,rate=20,seed=9,callers=7,districts=3,skew=zipf:1.2,duration=60,"
        "longest=90,disorder=2,spread=0.2"
    )
    expected = make(
        9, 20.0, callers=7, districts=3, skew=Skew("zipf", 1.2), duration_s=60.0, longest_s=90.0,
        disorder_s=2.0, spread_deg=0.2,
    ).block(10, 30)  # fmt: skip
    assert opened(text).total() == 50
    table = block_of(text, 10, 30)
    assert table.drop_columns([ROW]).equals(expected)
    assert table[ROW].to_pylist() == list(range(10, 30))


def test_a_path_without_a_kind_generates_points() -> None:
    expected = PointGenerator(PLACES, 10_000.0, GENERATOR_START_US, 1).block(0, 5)
    for text in ("generate:rows=5", "generate:points,rows=5", "generate:"):
        (item,) = opened(text).again(0, 5)
        assert item.read(expected.column_names, WorkerCache()).equals(expected), text
    with_rows = item.read(["id", ROW], WorkerCache())
    assert with_rows[ROW].equals(with_rows["id"])


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("generate:lines", "here.path", "points or calls"),
        ("generate:calls,hotspot=1:2:3:0.1:0:9", "here.path", "generate:calls with rows, pace"),
        ("generate:callers=7", "here.path", "generate:points with rows, pace"),
        ("generate:calls,callers", "here.path", "callers"),
        ("generate:calls,callers=many", "here.path", "many"),
        ("generate:calls,rows=-1", "here.path", "rows=0 or more"),
        ("generate:calls,pace=fast", "here.path", "pace=max or pace=live"),
        ("generate:calls,callers=1", "generator.callers", "from 2"),
        ("generate:calls,districts=0", "generator.districts", "from 1 to 2000"),
        ("generate:calls,districts=2001", "generator.districts", "from 1 to 2000"),
        ("generate:calls,duration=0", "generator.duration_s", "above 0"),
        ("generate:calls,longest=inf", "generator.longest_s", "above 0"),
        ("generate:calls,disorder=-1", "generator.disorder_s", "0 or more"),
        ("generate:calls,spread=nan", "generator.spread_deg", "0 or more"),
        ("generate:calls,rate=0", "generator.rate_per_s", "above 0"),
        ("generate:calls,seed=-1", "generator.seed", "from 0"),
        ("generate:calls,skew=pareto:1", "generator.skew", "zipf:EXPONENT"),
        ("generate:calls,skew=zipf", "generator.skew", "zipf:EXPONENT"),
        ("generate:calls,skew=normal:x:1", "generator.skew", "normal:MEAN:DEVIATION"),
        ("generate:calls,skew=zipf:-1", "skew.exponent", "0 or more"),
    ],
)
def test_wrong_options_name_their_key(text: str, key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_generator(text, lambda: 0.0, "here.path")
    assert problem.value.key == key
    assert expected in str(problem.value)


def test_a_skew_has_a_known_kind() -> None:
    with pytest.raises(ConfigError, match="zipf or normal"):
        Skew("pareto")


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(sources).failed == 0
