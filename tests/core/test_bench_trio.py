"""The trio benchmark: its computations, and a small run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from roost.bench import run_bench, trio
from roost.bench.trio import aqwa_bytes, line_count, trio_bytes


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param([1, 2, 3, 4], [10, 20, 30, 40], 1.0, id="the same order"),
        pytest.param([1, 2, 3, 4], [4, 3, 2, 1], -1.0, id="the opposite order"),
        pytest.param([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6, id="one pair exchanged"),
        pytest.param([1, 1, 2], [1, 2, 3], 2 / np.sqrt(6), id="a tie counts for neither order"),
        pytest.param([5, 5, 5], [1, 2, 3], 0.0, id="no order at all"),
    ],
)
def test_kendall(first, second, expected) -> None:
    found = trio.kendall(np.array(first, float), np.array(second, float))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("side", "partitions"), [(64, 1), (64, 4), (64, 16), (64, 64)])
def test_computed_sizes_are_those_of_the_objects(side, partitions, square) -> None:
    numbers = line_count(side, partitions, square) * 10  # numbers of a row or column
    header = 5 * partitions
    assert trio_bytes(side, partitions, square) == (numbers + header) * 8


def test_beyond_a_partition_a_column_each_cut_adds_one_line() -> None:
    assert line_count(10, 10, False) == 10 * 11
    assert line_count(10, 13, False) == 10 * 11 + 3
    assert line_count(10, 100, False) == line_count(10, 100, True) == 200


def test_sizes_of_large_grids_are_computed_from_smaller_ones() -> None:
    cells, sums = 100**2, 101**2
    assert aqwa_bytes(100) == (5 * 4 * cells + (8 + 4 * 4) * sums, 5 * 4 * cells)
    stored, sent = aqwa_bytes(6400)
    assert sent == 5 * 4 * 6400**2
    assert stored == pytest.approx(44 * 6400**2, rel=0.01)


def test_a_run_writes_its_result_and_plots(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("ROOST_DATA", raising=False)
    monkeypatch.setattr(trio, "QUICK", trio.Sizes((2_000,), 20_000, 3_000, 1, 3, 20_000))
    assert run_bench("trio", quick=True, json_path=tmp_path / "trio.json") == 0
    result = json.loads((tmp_path / "trio.json").read_text())
    assert (tmp_path / "trio.png").stat().st_size > 0
    assert (tmp_path / "trio-busy.png").stat().st_size > 0
    assert set(result["summary"]) == {
        "us_per_point",
        "us_per_point_engine",
        "busy_share_engine",
        "round_close_us",
        "kendall",
        "bytes_ratio_vs_aqwa",
    }
    assert result["environment"]["cores"]
    ranked = [row for row in result["rows"] if row["case"].startswith("busy")]
    assert {row["system"] for row in ranked} == {trio.NUMERATOR, trio.TRIO, trio.CELLS}
    assert all(-1.0 <= row["kendall"] <= 1.0 for row in ranked)
