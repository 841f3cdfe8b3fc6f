"""The benchmark of elastic policies on a short season: its rows, summary and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roost.bench import elastic, run_bench
from roost.elastic import ElasticRules
from roost.elastic.group import HOUR_S
from roost.errors import SourceError
from roost.model.arrays import Floats
from roost.sim.executor_scenario import ExecutorScenario
from roost.sim.executors import simulate_executors
from roost.sim.load_curves import hourly


def three_days() -> Floats:
    """Return pickups of days with two peaks, the second day with half of them."""
    hours = np.arange(72)
    shape = 2.0 + np.sin(hours / 12 * np.pi) ** 2 * np.where(hours % 24 < 12, 6.0, 10.0)
    return np.round(100.0 * shape * np.where(hours // 24 == 1, 0.5, 1.0))


def test_the_benchmark_writes_rows_a_summary_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "pickups_by_hour", lambda weeks: three_days())
    monkeypatch.setattr(elastic, "BATCH_S", 30.0)
    monkeypatch.setattr(elastic, "ROUND_S", 180.0)
    path = tmp_path / "elastic.json"
    assert run_bench("elastic", quick=True, json_path=path) == 0
    written = json.loads(path.read_text())
    summary, targets, rows = written["summary"], written["targets"], written["rows"]
    assert targets.keys() <= {*summary, *summary["not_measured"]}
    assert summary["ramp_sizes"][:7] == elastic.PAPER_SIZES
    assert summary["steps_to_target"] == 1 and summary["steps_per_doubling"] <= 2
    assert summary["late_batches"] == 0 and summary["ring_moved"] <= targets["ring_moved"]
    assert summary["executor_hours_saved"] >= targets["executor_hours_saved"]
    assert summary["hours_over_clairvoyant"] <= targets["hours_over_clairvoyant"]
    by_case = {(row["part"], row["case"]): row for row in rows}
    policies = ("load_aware", "individual", "spark")
    assert [key for key in by_case if key[0] in ("ramp", "step")] == [
        (part, policy) for part in ("ramp", "step") for policy in policies
    ]
    # By hand: executors for a utilisation of 0.6, where the busiest hour needs 40.
    needed = [max(int(np.ceil(round(40 * one / three_days().max(), 9))), 1) for one in three_days()]
    peaks = [max(needed[24 * d : 24 * d + 24]) for d in range(3)]
    hours = {
        name: by_case["season", name]["executor_hours"] for _, name in by_case if _ == "season"
    }
    assert hours["clairvoyant"] == sum(needed) and hours["each day's peak"] == 24 * sum(peaks)
    assert hours["overall peak"] == 72 * 40
    mine = by_case["season", "default"]
    assert mine["saved"] == pytest.approx(1 - hours["default"] / (24 * sum(peaks)))
    assert mine["over_clairvoyant"] == pytest.approx(hours["default"] / sum(needed))
    assert {(row["batch_s"], row["round_s"]) for row in rows if row["part"] == "season"} == {
        (elastic.BATCH_S, elastic.ROUND_S)
    }
    for suffix in (".png", "-season.png"):
        assert path.with_name(f"elastic{suffix}").stat().st_size > 1_000


def test_without_the_data_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_DATA", str(tmp_path))
    with pytest.raises(SourceError, match=r"set ROOST_DATA to its folder"):
        elastic.pickups_by_hour(1)
    since = np.datetime64("2014-04-01T04:00:00", "us")
    times = since + np.arange(300) * np.timedelta64(50, "m")
    table = pa.table({"event_time": pa.array(times, pa.timestamp("us", "UTC"))})
    pq.write_table(table, tmp_path / elastic.POINTS_FILE)
    counts = elastic.pickups_by_hour(1)
    assert counts.size == 168 and counts[:6].tolist() == [2, 1, 1, 1, 1, 2]


def test_steps_for_each_doubling() -> None:
    assert elastic.steps_per_doubling([1, 2, 4, 7, 11, 17, 26]) == 2
    assert elastic.steps_per_doubling([1, 2, 3, 4, 5, 6]) == 3
    assert elastic.steps_per_doubling([4]) == 0


def test_a_schedule_is_ahead_of_its_hours() -> None:
    sizes, loads = np.array([2, 5, 3]), np.array([0.5, 2.5, 1.0])
    rules = ElasticRules(max=9)
    scenario = ExecutorScenario(hourly(loads), rules, 3 * HOUR_S, executors=2, batch_s=10.0)
    trace = simulate_executors(replace(scenario, round_s=60.0), elastic.Schedule(sizes, 90.0))
    assert trace.sizes == [2, 5, 3]
    changed = [row.clock for a, row in pairwise(trace.rows) if a.planned != row.planned]
    assert HOUR_S - 90.0 <= changed[0] < HOUR_S <= 2 * HOUR_S <= changed[1] < 2 * HOUR_S + 70.0


def test_the_ring_moves_a_tenth_and_modulo_nearly_all() -> None:
    ring, modulo = elastic.ring_moved()
    assert 0.08 < ring["moved"] < 0.12 < ring["moved_worst"] < 0.25
    assert 0.15 < ring["deviation"] < 0.23 and 0.85 < modulo["moved"] < 0.95
