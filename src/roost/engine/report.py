"""What a run came to, as plain data: the report file and the closing lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roost.state.store import Commit

MACHINE_FIGURES = ("points", "checks", "matches", "busy_s")


def build_report(commits: Iterable[Commit]) -> dict[str, Any]:
    """Sum up batches."""
    batches = []
    machines: dict[int, dict[str, Any]] = {}
    for commit in commits:
        figures = commit.figures
        keys = ("points", "matches", "checks", "dead_points", "dead_requests", "seconds", "epoch")
        batches.append({"batch_id": commit.batch_id, **{key: figures[key] for key in keys}})
        for row in figures["machines"]:
            empty = {"machine": row["machine"], **dict.fromkeys(MACHINE_FIGURES, 0)}
            total = machines.setdefault(row["machine"], empty)
            for key in MACHINE_FIGURES:
                total[key] += row[key]
    seconds = sum(batch["seconds"] for batch in batches)
    points = sum(batch["points"] for batch in batches)
    matches = sum(batch["matches"] for batch in batches)
    checks = sum(batch["checks"] for batch in batches)
    return {
        "points": points,
        "matches": matches,
        "checks": checks,
        "checks_per_match": checks / matches if matches else None,
        "dead_points": sum(batch["dead_points"] for batch in batches),
        "dead_requests": sum(batch["dead_requests"] for batch in batches),
        "batches": len(batches),
        "seconds": seconds,
        "batch_seconds": [batch["seconds"] for batch in batches],
        "points_per_s": points / seconds if seconds else None,
        "machines": [_machine(machines[key]) for key in sorted(machines)],
        "per_batch": batches,
    }


def _machine(row: dict[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in row.items() if k != "busy_s"}, "busy_seconds": row["busy_s"]}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
