"""Cases, comparison and metrics of the operator benchmark; operators on emulated machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost.bench import growth, operators
from roost.bench.call_contest import check_equal
from roost.bench.calls import PAIR, TYPES, CallCase, write_calls
from roost.bench.common import UnequalResults
from roost.bench.growth import AFTER, BEFORE, Half, by_executor, row_of, stateful_tasks
from roost.bench.operator_scaling import COVERED_S, OPERATORS, emulated, scale
from roost.engine.local_cluster import TaskTime

CASES = operators.cases(quick=True)
GROWTH = growth.case_of(quick=True)
BY_NAME = {operator.name: operator for operator in OPERATORS}


def test_files_hold_one_batch_each_and_the_same_calls(tmp_path: Path) -> None:
    case = CallCase("c", "k", "rate=10,callers=50,districts=3", 250, 100, "src", 60, 10)
    folder = write_calls(case, tmp_path, groups=2)
    files = sorted(folder.iterdir())
    assert [pq.read_metadata(path).num_rows for path in files] == [100, 100, 50]
    assert all(pq.read_metadata(path).num_row_groups == 2 for path in files)
    whole = CallCase("c", "k", "rate=10,callers=50,districts=3", 250, 250, "src", 60, 10)
    (one,) = write_calls(whole, tmp_path / "whole").iterdir()
    calls = pa.concat_tables([pq.read_table(path) for path in files])
    assert calls.select(["src", "district"]) == pq.read_table(one).select(["src", "district"])
    assert set(calls.column_names) == set(TYPES)


def test_each_metric_has_the_cases_of_the_issue() -> None:
    keys = [case.key for case in CASES]
    assert keys.count(operators.SLIDING) == 3
    assert keys.count(operators.AGGREGATE) == keys.count(operators.JOIN) == 1
    for full, quick in zip(operators.cases(quick=False), CASES, strict=True):
        assert (full.name, full.size_s, full.advance_s) == (
            quick.name,
            quick.size_s,
            quick.advance_s,
        )
        assert full.rows > quick.rows


def pairs(metres: float = 1.0, src: str = "a") -> pa.Table:
    return pa.table([[src], [0], [1], [metres]], schema=PAIR)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (pairs(src="b"), "differ in src"),
        (pairs(metres=1.1), "differ in metres"),
        (pa.concat_tables([pairs(), pairs()]), "1 results, rival 2"),
    ],
)
def test_different_results_end_the_comparison(other: pa.Table, problem: str) -> None:
    case = CASES[-1]
    check_equal(case, pairs(), pairs(1.0 + 1e-12), "rival")
    with pytest.raises(UnequalResults, match=problem):
        check_equal(case, pairs(), other, "rival")


def test_metrics_are_the_worst_of_their_cases() -> None:
    rows = [
        {"part": "spark", "case": "a", "key": operators.SLIDING, "ratio": 4.0},
        {"part": "spark", "case": "b", "key": operators.SLIDING, "ratio": 2.5},
        {"part": "spark", "case": "c", "key": operators.JOIN, "ratio": 7.0},
    ]
    for name, many in (("map", 3.9), ("product", 3.6)):
        for machines, rate in ((1, 0.1), (20, 2.0), (40, many), (40, many - 1.0)):
            row = {"part": "emulated", "operator": name, "machines": machines, "per_s": rate}
            rows.append(row)
    summary = operators.summarise(rows)
    assert summary[operators.SLIDING] == 2.5 and summary[operators.JOIN] == 7.0
    assert summary[operators.AGGREGATE] is None
    assert summary["scaling_20_to_40"] == pytest.approx(1.8)
    assert summary["comparisons_per_s"] == 0.1
    assert summary["missed"] == [operators.SLIDING, "comparisons_per_s", "scaling_20_to_40"]


def test_comparisons_are_pairs_within_the_window_with_a_new_tuple() -> None:
    product, rows = BY_NAME["product"], 40
    starts = np.arange(2 * rows) * (COVERED_S / rows)
    counted = sum(
        abs(starts[a] - starts[b]) < COVERED_S
        for a in range(2 * rows)
        for b in range(2 * rows)
        if max(a, b) >= rows
    )
    assert product.work(rows) == counted


@pytest.mark.parametrize("name", BY_NAME)
def test_operators_run_on_emulated_machines(name: str) -> None:
    rows = scale(BY_NAME[name], 200, (1, 3), (0.5, 1.0))
    assert [(row["machines"], row["load"]) for row in rows] == [
        (1, 0.5), (1, 1.0), (3, 0.5), (3, 1.0),
    ]  # fmt: skip
    assert all(0 < row["per_s"] <= row["offered_per_s"] for row in rows)
    for few, many in pairwise(rows):
        assert few["machines"] != many["machines"] or few["offered_per_s"] < many["offered_per_s"]
    assert emulated(BY_NAME[name], 2, 300) > 0


# --------------------------------------------------------------------------- a growing cluster


def test_the_hottest_caller_fits_on_a_machine_and_no_hash_balances_the_rest(
    tmp_path: Path,
) -> None:
    folder = write_calls(replace(GROWTH, rows=GROWTH.batch_rows), tmp_path)
    callers = pq.read_table(folder)["src"].value_counts().to_pylist()
    shares = sorted((caller["counts"] / GROWTH.batch_rows for caller in callers), reverse=True)
    assert 1 / AFTER > shares[0] > 0.15
    assert len(shares) > 100


def test_each_half_is_longer_than_what_is_measured_and_closes_windows() -> None:
    for case in (GROWTH, growth.case_of(quick=False)):
        batches = case.rows // case.batch_rows
        assert batches // 2 - case.settled >= 2, "growing and moving buckets is not measured"
        rate = float(case.calls.split(",")[0].removeprefix("rate="))
        assert case.rows / 2 / rate > 1.5 * case.size_s


def test_medians_interpolate() -> None:
    assert growth.Median().whole(pa.array([4.0, 1.0, 2.0, 8.0])) == 3.0


def test_the_busiest_task_and_executor_of_settled_batches() -> None:
    def task(job: int, stage: int, executor: str, seconds: float) -> TaskTime:
        return TaskTime(job, stage, executor, 2 * seconds, seconds)

    times = [task(1, 1, "a", 9.0), task(1, 2, "a", 3.0), task(1, 2, "b", 1.0), task(2, 4, "b", 4.0)]
    assert stateful_tasks(times) == [[3.0, 1.0], [4.0]]
    assert by_executor(times) == {"a": 24.0, "b": 10.0}
    before = Half([9.0, 2.0, 2.0], 2, [[4.0], [4.0]], {"a": 1.0})
    after = Half([9.0, 1.0, 1.0], 2, [[1.0, 1.0, 2.0], [2.0, 1.0, 1.0]], {"a": 1.0, "b": 3.0})
    row = row_of(GROWTH, "roost", before, after)
    assert row["ratio"] == 2.0 and row["per_s"] == GROWTH.batch_rows
    assert row["before"]["busiest_task_share"] == BEFORE
    assert operators.summarise([row])["growth"] == {
        "roost": {
            "rows_per_s_after_over_before": 2.0,
            "busiest_task_s_after_over_before": 0.5,
            "busiest_task_share": 0.5,
            "busiest_executor_share": 0.75,
        }
    }
