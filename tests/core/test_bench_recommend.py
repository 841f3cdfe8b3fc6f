"""The benchmark of recommendations: what needs no Spark."""

from __future__ import annotations

import doctest
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost.bench import applications, recommend
from roost.bench.streams import BatchTimes
from roost.errors import RoostError


def _rate(asked: Counter[int], needed: int, machines: int) -> float:
    asked[machines] += 1
    return float(machines >= needed)


def test_the_fewest_machines_are_found_by_bisection() -> None:
    for needed in (1, 2, 3, 23, 63, 64):
        asked = Counter[int]()
        assert recommend.fewest(partial(_rate, asked, needed), 1.0) == needed
        assert asked.total() <= 13
    assert recommend.fewest(lambda machines: machines / 100.0, 1.0) is None
    assert doctest.testmod(recommend).failed == 0


def test_seconds_are_those_from_the_micro_batch_with_the_first_of_the_last_ratings() -> None:
    """25 ratings in micro-batches of 10, and one more batch in which windows close."""
    clock = iter(range(100))
    times = BatchTimes(lambda: float(next(clock)))
    for number in range(4):
        for step in ("intent", "end"):
            times.on_step(step, number)
    assert recommend.seconds_of_last(times, 25, 1, 10) == 7.0 - 4.0
    assert recommend.seconds_of_last(times, 25, 6, 10) == 7.0 - 2.0
    assert recommend.seconds_of_last(times, 25, 25, 10) == 7.0


def test_the_newest_list_of_each_item_counts(tmp_path: Path) -> None:
    rows = [(1, 7, 1, 8, 3), (2, 7, 2, 8, 3), (2, 7, 1, 9, 4), (1, 8, 1, 7, 3)]
    names = ["at", "item", "rank", "other", "fans"]
    columns = zip(*rows, strict=True)
    table = pa.table(dict(zip(names, columns, strict=True)))
    pq.write_table(table, tmp_path / "0.parquet")
    assert recommend.newest(tmp_path) == {7: [(9, 4), (8, 3)], 8: [(7, 3)]}
    batch = table.filter(pa.array([False, True, True, True])).drop_columns(["at"])
    pq.write_table(batch, tmp_path / "0.parquet")
    assert recommend.newest(tmp_path) == {7: [(9, 4), (8, 3)], 8: [(7, 3)]}


def test_more_machines_process_more_ratings() -> None:
    size = recommend.RatingsSize(3_000, 1_000, 300, 60, 100)
    ratings = size.ratings(6_000)
    assert ratings.column_names == recommend.COLUMNS
    assert recommend.emulated_rate(size, ratings, 2, 2) > 0.0


def test_applications_need_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "EXAMPLES", tmp_path)
    with pytest.raises(RoostError, match=r"examples/top_topics.py: start it in the repository"):
        applications.application("top_topics", "generate:tweets")
