"""The benchmark of placement: its rows against the thesis's figures, and what they depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roost.bench import dodo, run_bench
from roost.elastic.placement import Place


@pytest.fixture(scope="module")
def thesis() -> dodo.Results:
    return dodo.Results.of(dodo.cases(), "thesis")


@pytest.mark.parametrize(
    ("case", "policy", "ceiling"),
    [
        ("extreme", "static", 1 / 53e-6),
        ("extreme", "algorithm_1", 6 / 200e-6),
        ("extreme", "best", 6 / 200e-6),
        ("optimal", "static", 6 / 200e-6),
        ("optimal", "algorithm_1", 6 / 200e-6),
        ("optimal", "best", 6 / 200e-6),
        ("table 9", "static", 3 / 243.64e-6),
        ("table 9", "algorithm_1", 3 / 208.33e-6),
        ("table 9", "best", 3 / 208.33e-6),
        ("table 9", "autoscaling, two groups", 4 / 243.64e-6),
        ("table 9", "autoscaling, one group", 15 / 898.2e-6),
    ],
)
def test_throughput_is_what_the_bottleneck_can_do(
    thesis: dodo.Results, case: str, policy: str, ceiling: float
) -> None:
    """By hand: executors of the bottleneck over the costs of its operators."""
    assert thesis.value(case, policy) == pytest.approx(ceiling, rel=2e-3)


def test_operators_move_as_in_the_thesis(thesis: dodo.Results) -> None:
    moved = {
        key: [
            [(move.operator, move.after) for move in row.decision.moves]
            for row in trace.rows
            if isinstance(row.decision, Place)
        ]
        for key, trace in thesis.traces.items()
    }
    assert moved["extreme", "algorithm_1"] == [[("count", dodo.FIRST)]]
    assert moved["optimal", "algorithm_1"] == []
    assert moved["table 9", "algorithm_1"] == [[("rank", dodo.FIRST)]]
    first, second, *_ = moved["extreme", "without capacity"]
    assert first == [("count", dodo.FIRST)] and second == [("extract", dodo.SECOND)]
    assert thesis.value("extreme", "without capacity", "lowest_after_peak") < 6_500
    sizes = thesis.traces["table 9", "autoscaling, two groups"].executors
    assert {name: int(counts[-1]) for name, counts in sizes.items()} == {
        dodo.FIRST: 11,
        dodo.SECOND: 4,
    }


def test_the_benchmark_writes_rows_a_summary_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dodo, "own_costs", lambda tweets: (0.5, 0.3, 0.1))
    path = tmp_path / "dodo.json"
    assert run_bench("dodo", quick=True, json_path=path) == 0
    written: dict[str, Any] = json.loads(path.read_text())
    summary, rows = written["summary"], written["rows"]
    assert written["targets"].keys() <= summary.keys() and summary["missed"] == []
    assert summary["gain_balancing_vs_static"] == pytest.approx(14_400 / 9_500 - 1, abs=1e-3)
    assert summary["gain_autoscaling_vs_static"] == pytest.approx(16_700 / 9_500 - 1, abs=1e-3)
    assert summary["gain_balancing_vs_capacity"] == pytest.approx(0.1695, abs=1e-3)
    assert summary["utilisation_vs_static"] == pytest.approx(0.59, abs=0.01)
    assert 0.0 < summary["minutes_behind_input"] <= 3.0
    assert {row["costs"] for row in rows} == {"thesis", "Roost"}
    assert sum(row["costs"] == "Roost" for row in rows) == len(rows) / 2
    for suffix in (".png", "-utilisation.png", "-executors.png"):
        assert path.with_name(f"dodo{suffix}").stat().st_size > 1_000


def test_gains_follow_from_the_costs() -> None:
    """No constants: with a rank that costs twice as much, count moves, and all gains change."""
    costs = (654.56, 208.33, 2 * 35.31)
    found = dodo.Results.of(dodo.cases(static=costs), "changed")
    static = 3 / 278.95e-6
    assert found.value("table 9", "static") == pytest.approx(static, rel=2e-3)
    gains = found.gains(9_500.0)
    balanced = 12 / 862.89e-6
    assert gains["gain_balancing_vs_capacity"] == pytest.approx(balanced / static - 1, abs=3e-3)
    ceiling = 15 / sum(costs) * 1e6
    assert gains["gain_autoscaling_vs_static"] == pytest.approx(ceiling / 9_500 - 1, abs=3e-3)


def test_minutes_behind_the_input_count_until_the_ceiling(thesis: dodo.Results) -> None:
    trace = thesis.traces["table 9", "autoscaling, one group"]
    whole = dodo.minutes_behind(trace, np.inf)
    before = dodo.minutes_behind(trace, 16_700.0)
    # From the ceiling on, throughput is below the input until the end.
    seconds = float((trace.arrived >= 16_700.0).sum())
    assert whole - before == pytest.approx(seconds / 60.0, abs=0.5)
    assert dodo.minutes_behind(thesis.traces["optimal", "static"], 25_000.0) == 0.0


def test_costs_of_own_operators_are_measured() -> None:
    costs = dodo.own_costs(9_000)
    assert len(costs) == 3 and all(0.0 < cost < 1_000.0 for cost in costs)
