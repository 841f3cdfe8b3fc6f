"""The guard benchmark on one case: its rows, summary and plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roost.bench import guard, run_bench
from roost.bench.guard_pipeline import DEFENCES, AttackSize
from roost.sim.guarded_cases import normal_users


def test_the_benchmark_writes_rows_a_summary_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "QUICK_CASES", ("1200/s",))
    monkeypatch.setattr(guard, "MINUTES", 9)
    monkeypatch.setattr(guard, "GATE_USERS", (110, 500))
    monkeypatch.setattr(guard, "GATE_BLOCKS", 3)
    monkeypatch.setattr(guard, "other_attacks", dict)
    monkeypatch.setattr(guard, "crowds", lambda: {"normal users": normal_users()})
    small = AttackSize(6, 2_000, 2, 0.01, {"1200/s": tuple(DEFENCES)})
    monkeypatch.setattr(guard, "QUICK", small)
    path = tmp_path / "guard.json"
    assert run_bench("guard", quick=True, json_path=path) == 0
    written = json.loads(path.read_text())
    (row,) = written["rows"]
    named = {"throughput_gain", "availability_gain", "min_availability_gain", "rounds_to_block"}
    assert named | {"fp", "fn"} <= row.keys()
    assert (row["fp"], row["fn"]) == (0, 0) and row["rounds_to_block"] <= 2
    assert written["summary"].keys() == {
        "fp",
        "fn",
        "rounds_to_block",
        "us_per_request",
        "throughput_with_guard",
        "throughput_with_quarantine",
        "throughput_saturated_with_guard",
        "throughput_saturated_with_quarantine",
        "detection_ms",
        "pipeline_fp",
        "pipeline_fn",
        "pipeline_throughput_with_guard",
    }
    assert written["summary"]["pipeline_fp"] == 0
    assert written["summary"]["throughput_with_guard"] == row["throughput_with_guard_worst"]
    (saturated,) = written["saturated"]
    assert saturated.keys() == row.keys()
    assert saturated["availability_without_attack"] < row["availability_without_attack"]
    assert [case["case"] for case in written["others"]] == ["normal users"]
    assert [gate["users"] for gate in written["gate"]] == [110, 500]
    assert path.with_suffix(".png").stat().st_size > 1_000
    (measured,) = written["pipeline"]
    assert named | {"fp", "fn"} <= measured.keys()
    assert measured["timeline"].keys() == {"no attack", *DEFENCES}
    assert {len(line) for line in measured["timeline"].values()} == {6}
    assert min(min(line) for line in measured["timeline"].values()) > 0
    assert (tmp_path / "guard-pipeline.png").stat().st_size > 1_000
    assert 0 < written["flood"]["us_per_request"] < 50
