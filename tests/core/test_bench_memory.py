"""What ``roost bench memory`` makes of its rows, and where it does not run."""

from __future__ import annotations

from typing import Any

from roost.bench import hosts, memory


def row(system: str, queries: int, points_per_s: float, *, fits: bool) -> dict[str, Any]:
    return {
        "system": system,
        "queries": queries,
        "points_per_s": points_per_s,
        "fits": fits,
        "index_bytes": 300,
        "resident_bytes": 110 if system == "swarm" else 100,
    }


def test_the_worse_of_both_strategies_counts():
    rows = [
        row("replicated", 1, 100.0, fits=True),
        row("swarm", 1, 99.0, fits=True),
        row("global", 1, 98.0, fits=True),
        row("replicated", 2, 10.0, fits=False),
        row("history", 2, 1.0, fits=False),
        row("swarm", 2, 40.0, fits=False),
        row("global", 2, 50.0, fits=False),
    ]
    assert memory.summary_of(rows) == {
        "ratio_vs_replicated_beyond_memory": 4.0,
        "ratio_vs_replicated_within_memory": 0.98,
        "bytes_per_host_ratio": 110 / 300,
        "queries_beyond_memory": 2,
    }


def test_the_largest_index_that_replicated_completes_counts():
    rows = [
        row("replicated", 2, 10.0, fits=False),
        row("swarm", 2, 40.0, fits=False),
        {"system": "replicated", "queries": 3, "error": "out of memory"},
        row("swarm", 3, 40.0, fits=False),
    ]
    found = memory.summary_of(rows)
    assert found["ratio_vs_replicated_beyond_memory"] == 4.0
    assert found["queries_beyond_memory"] == 2
    assert found["ratio_vs_replicated_within_memory"] is None


def test_a_system_without_memory_cgroups_is_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "GROUPS", tmp_path)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    measured = memory.run(quick=True)
    assert measured.rows == []
    assert measured.summary == {"skipped": "the system has no memory cgroups of version 1"}
