"""Generators of tweets and ratings: the same rows in any ranges, and the given distributions."""

from __future__ import annotations

import doctest
import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError
from roost.stages import generators
from roost.stages.generators import RATING_SHARES, RatingGenerator, Skew, TweetGenerator
from roost.stages.sources import GENERATOR_START_US, parse_generator
from roost.storage.cache import WorkerCache

RATE = 200.0
KINDS = {"tweets": TweetGenerator, "ratings": RatingGenerator}


@pytest.mark.parametrize("kind", KINDS)
@examples(40)
@given(
    start=st.one_of(st.integers(0, 200_000), st.integers(2**40, 2**40 + 10)),
    lengths=st.lists(st.integers(0, 3_000), min_size=1, max_size=5),
)
def test_any_cut_gives_the_same_rows(kind: str, start: int, lengths: list[int]) -> None:
    generator = KINDS[kind](RATE, GENERATOR_START_US, 3)
    cuts = np.concatenate([[start], start + np.cumsum(lengths)]).tolist()
    parts = [generator.block(a, b) for a, b in pairwise(cuts)]
    whole = generator.block(cuts[0], cuts[-1])
    assert pa.concat_tables(parts).combine_chunks().equals(whole.combine_chunks())
    assert pickle.loads(pickle.dumps(generator)).block(5, 9).equals(generator.block(5, 9))


def test_topics_follow_the_skew_and_tweets_have_one_to_most_of_them() -> None:
    rows, topics = 60_000, 5_000
    table = TweetGenerator(RATE, GENERATOR_START_US, 3).block(0, rows)
    tags = [text.split(" ") for text in table["text"].to_pylist()]
    lengths = Counter(map(len, tags))
    assert sorted(lengths) == [1, 2, 3, 4, 5]
    assert max(abs(count - rows / 5) for count in lengths.values()) < 6 * np.sqrt(rows / 5)
    numbers = np.array([int(tag.removeprefix("#topic")) for row in tags for tag in row])
    counts = np.bincount(numbers, minlength=topics)
    assert counts.size == topics
    # The integral of x ** -0.5 is 2 * sqrt(x).
    scale = np.sqrt(topics + 1.0) - 1.0
    for low, high in ((0, 10), (10, 100), (100, 1_000), (1_000, 5_000)):
        part = (np.sqrt(high + 1.0) - np.sqrt(low + 1.0)) / scale
        assert counts[low:high].sum() / numbers.size == pytest.approx(part, rel=0.05)
    # The places in a tweet are independent.
    pairs = np.array([row[:2] for row in tags if len(row) > 1])
    assert (pairs[:, 0] == pairs[:, 1]).mean() < 0.002


def test_ratings_have_their_shares_and_skews() -> None:
    rows = 100_000
    made = RatingGenerator(RATE, GENERATOR_START_US, 3, users=500, items=50)
    table = made.block(0, rows)
    counts = np.bincount(table["rating"].to_numpy(), minlength=6)
    assert counts[0] == 0 and counts.size == 6
    assert counts[1:] / rows == pytest.approx(np.array(RATING_SHARES), abs=0.01)
    users, items = (np.bincount(table[name].to_numpy()) for name in ("user", "item"))
    assert users.size == 500 and items.size == 50
    assert users[:5].sum() > 2 * users[-5:].sum() and items[0] > 5 * items[-1]
    times = table["at"].cast(pa.int64()).to_numpy()
    assert times.tolist()[:3] == [GENERATOR_START_US + k * 5_000 for k in range(3)]


def test_a_path_names_the_generator_and_its_options() -> None:
    cases = {
        "generate:tweets,rows=50,rate=20,seed=9,topics=7,skew=zipf:1.2,most=2,users=3": (
            TweetGenerator(
                20.0, GENERATOR_START_US, 9, topics=7, skew=Skew("zipf", 1.2), most=2, users=3
            )
        ),
        "generate:ratings,rows=50,rate=20,seed=9,users=7,items=5,skew=uniform,activity=zipf:1": (
            RatingGenerator(
                20.0, GENERATOR_START_US, 9, users=7, items=5, skew=Skew(), activity=Skew("zipf", 1)
            )
        ),
    }
    for text, generator in cases.items():
        source = parse_generator(text, lambda: 0.0)
        assert source.total() == 50
        (item,) = source.again(10, 30)
        expected = generator.block(10, 30)
        assert item.read(expected.column_names, WorkerCache()).equals(expected)


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("generate:tweets,callers=3", "here.path", "topics"),
        ("generate:ratings,spread=1", "here.path", "activity"),
        ("generate:tweets,most=0", "generator.most", "from 1 to 6"),
        ("generate:tweets,most=7", "generator.most", "from 1 to 6"),
        ("generate:tweets,topics=0", "generator.topics", "from 1 to"),
        ("generate:tweets,skew=normal:3:1", "generator.skew", "uniform or zipf"),
        ("generate:ratings,users=0", "generator.users", "from 1 to"),
        ("generate:ratings,items=0", "generator.items", "from 1 to"),
        ("generate:ratings,rate=0", "generator.rate_per_s", "above 0"),
    ],
)
def test_wrong_options_name_their_key(text: str, key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_generator(text, lambda: 0.0, "here.path")
    assert problem.value.key == key
    assert expected in str(problem.value)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(generators).failed == 0
