"""The scale benchmark on few machines: its rows, summary and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roost.bench import run_bench, scale


def test_the_benchmark_writes_rows_a_summary_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "MACHINES", (3, 6, 9_999))
    monkeypatch.setattr(scale, "WARM_MACHINES", (2,))
    monkeypatch.setattr(scale, "SIDE", 30)
    path = tmp_path / "scale.json"
    assert run_bench("scale", quick=True, json_path=path) == 0
    written = json.loads(path.read_text())
    assert [(row["machines"], row["strategy"]) for row in written["rows"]] == [
        (machines, strategy) for machines in (3, 6) for strategy in scale.STRATEGIES
    ]
    assert written["summary"].keys() == {"imbalance", "decision_s", "bytes_per_round"}
    own = written["rows"][-1]
    assert own["strategy"] == scale.DEFAULT
    assert {key: own[key] for key in written["summary"]} == written["summary"]
    assert path.with_suffix(".png").stat().st_size > 1_000
