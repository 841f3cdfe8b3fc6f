"""Running totals of a state directory, and the report of a run.

Totals are one row each, updated in the transaction that commits a batch or records a round. So the
rows of old batches and rounds can be deleted without losing what they add up to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roost.balance.planner import imbalance
from roost.runtime.records import TOTALS, commits
from roost.storage.store import Fact, View

BATCHES, ROUNDS = "batches", "rounds"
MACHINE_METRICS = ("points", "checks", "matches", "busy_s")
SUMMED = (
    "points",
    "matches",
    "checks",
    "dead_points",
    "dead_requests",
    "seconds",
    "loaded_queries",
    "loaded_bytes",
    "load_s",
)
BATCH_METRICS = (*SUMMED[:6], "epoch", *SUMMED[6:])


def add_batch(view: View, figures: Mapping[str, Any]) -> Fact:
    """Return the totals with a batch added."""
    old = view.get(TOTALS, BATCHES) or {}
    machines: dict[str, dict[str, Any]] = dict(old.get("machines", {}))
    for row in figures["machines"]:
        known = machines.get(str(row["machine"]), {})
        machines[str(row["machine"])] = {k: known.get(k, 0) + row[k] for k in MACHINE_METRICS}
    times = [time for time in (old.get("time_max"), figures["time_max"]) if time is not None]
    totals = {
        **{name: old.get(name, 0) + figures[name] for name in SUMMED},
        "batches": old.get("batches", 0) + 1,
        "time_max": max(times, default=None),
        "machines": machines,
    }
    return Fact(TOTALS, BATCHES, totals)


def add_round(view: View, row: Mapping[str, Any]) -> Fact:
    """Return the totals with a round added."""
    old = view.get(TOTALS, ROUNDS) or {}
    error = row.get("model_error")
    totals = {
        "rounds": old.get("rounds", 0) + 1,
        "plan_changes": old.get("plan_changes", 0) + (row["next_epoch"] is not None),
        "decision_seconds": old.get("decision_seconds", 0) + row["seconds"],
        "bytes_sent": old.get("bytes_sent", 0) + row["bytes_sent"],
        "model_error": old.get("model_error") if error is None else error,
        "last_reason": row["reason"],
    }
    return Fact(TOTALS, ROUNDS, totals)


def build_report(view: View) -> dict[str, Any]:
    """Sum up all batches and rounds; ``per_batch`` has those whose rows are still stored."""
    totals: dict[str, Any] = view.get(TOTALS, BATCHES) or {}
    batches = []
    for commit in commits(view):
        busy = np.array([row["busy_s"] for row in commit.figures["machines"]])
        metrics = {key: commit.figures[key] for key in BATCH_METRICS}
        batches.append({"batch_id": commit.batch_id, **metrics, "imbalance": imbalance(busy)})
    summed = {name: totals.get(name, 0) for name in SUMMED}
    points, seconds = summed["points"], summed["seconds"]
    checks, matches = summed["checks"], summed["matches"]
    machines = {int(number): row for number, row in totals.get("machines", {}).items()}
    return {
        "points": points,
        "matches": matches,
        "checks": checks,
        "checks_per_match": checks / matches if matches else None,
        "dead_points": summed["dead_points"],
        "dead_requests": summed["dead_requests"],
        "batches": totals.get("batches", 0),
        "seconds": seconds,
        "batch_seconds": [batch["seconds"] for batch in batches],
        "points_per_s": points / seconds if seconds else None,
        "machines": [_machine(number, machines[number]) for number in sorted(machines)],
        "per_batch": batches,
        "balance": _balance(summed, view.get(TOTALS, ROUNDS) or {}),
    }


def _balance(summed: Mapping[str, Any], rounds: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the balancer did and what it cost."""
    return {
        "rounds": rounds.get("rounds", 0),
        "plan_changes": rounds.get("plan_changes", 0),
        "moved_queries": summed["loaded_queries"],
        "moved_bytes": summed["loaded_bytes"],
        "move_seconds": summed["load_s"],
        "decision_seconds": rounds.get("decision_seconds", 0),
        "bytes_sent": rounds.get("bytes_sent", 0),
        "model_error": rounds.get("model_error"),
        "last_reason": rounds.get("last_reason"),
    }


def _machine(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    named = {"busy_seconds" if key == "busy_s" else key: value for key, value in row.items()}
    return {"machine": number, **named}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
