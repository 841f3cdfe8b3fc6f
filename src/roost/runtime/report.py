"""The report of a run: the running totals of its state directory, and the batches still stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roost.balance.planner import imbalance
from roost.model.elastic import DEFAULT_GROUP
from roost.model.records import TIME_MAX, TIME_MIN
from roost.runtime.flow_balancing import BALANCING
from roost.runtime.group_rounds import EXECUTORS, GROUP_ROUNDS, GROUPS
from roost.runtime.operator_placement import PLACEMENT
from roost.runtime.records import commits, last_round
from roost.runtime.scaling import ELASTIC
from roost.storage.store import View
from roost.storage.totals import BATCHES, DATAFLOW, FLOW_SUMS, HOMES, ROUNDS, SUMMED, TOTALS

BATCH_METRICS = (*SUMMED[:6], "epoch", *SUMMED[6:])


def build_report(view: View) -> dict[str, Any]:
    """Sum up all batches and rounds; ``per_batch`` has those whose rows are still stored."""
    totals: dict[str, Any] = view.get(TOTALS, BATCHES) or {}
    rounds: dict[str, Any] = view.get(TOTALS, ROUNDS) or {}
    batches = []
    for commit in commits(view):
        # A run without matching has no machines of a plan.
        busy = np.array([row["busy_s"] for row in commit.figures.get("machines", [])] or [0.0])
        metrics = {key: commit.figures[key] for key in BATCH_METRICS}
        batches.append({"batch_id": commit.batch_id, **metrics, "imbalance": imbalance(busy)})
    summed = {name: totals.get(name, 0) for name in SUMMED}
    points, matches, seconds = summed["points"], summed["matches"], summed["seconds"]
    machines = {int(number): row for number, row in totals.get("machines", {}).items()}
    return {
        "points": points,
        "matches": matches,
        "checks": summed["checks"],
        "checks_per_match": summed["checks"] / matches if matches else None,
        "dead_points": summed["dead_points"],
        "dead_requests": summed["dead_requests"],
        "batches": totals.get("batches", 0),
        "seconds": seconds,
        "batch_seconds": [batch["seconds"] for batch in batches],
        "points_per_s": points / seconds if seconds else None,
        "machines": [
            {
                "machine": number,
                "points": machines[number]["points"],
                "checks": machines[number]["checks"],
                "matches": machines[number]["matches"],
                "busy_seconds": machines[number]["busy_s"],
            }
            for number in sorted(machines)
        ],
        "per_batch": batches,
        "balance": {
            "rounds": rounds.get("rounds", 0),
            "plan_changes": rounds.get("plan_changes", 0),
            "moved_queries": summed["loaded_queries"],
            "moved_bytes": summed["loaded_bytes"],
            "move_seconds": summed["load_s"],
            "decision_seconds": rounds.get("decision_seconds", 0),
            "bytes_sent": rounds.get("bytes_sent", 0),
            "model_error": rounds.get("model_error"),
            "last_reason": rounds.get("last_reason"),
        },
        "homes": totals.get(HOMES),
        "dataflow": _dataflow(totals.get(DATAFLOW), view),
        "executors": executor_summary(view),
    }


def executor_summary(view: View) -> dict[str, Any] | None:
    """Return what is known of the executors; None if the run never changes their number.

    ``changes`` are the rounds, among those still stored, that decided more than to change nothing;
    ``forecast_error`` is the mean error of the last forecasts over that of a constant load.
    """
    totals, last = view.get(TOTALS, EXECUTORS), last_round(view, GROUP_ROUNDS)
    if totals is None or last is None:
        return None
    shown = ("clock", "decision", "planned", "observed", "load", "backlog", "reason")
    rows = [row for _, row in view.items(GROUP_ROUNDS)]
    errors = np.array(last.get(ELASTIC, {}).get("forecast", {}).get("errors", [])).reshape(-1, 2)
    mine, constant = errors.sum(axis=0).tolist()
    return {
        **totals,
        **{name: last[name] for name in ("planned", "requested", "observed", "load", "reason")},
        "over_time": [[row["clock"], row["observed"]] for row in rows],
        "changes": [
            {name: row[name] for name in shown} for row in rows if row["decision"] != "NoChange"
        ],
        "forecast_error": mine / constant if constant else None,
        "groups": _groups(rows, last),
    }


def group_sizes(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a round of the executors decided about the size of each group."""
    return {DEFAULT_GROUP: row, **row.get(GROUPS, {})}


def _groups(rows: Sequence[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any] | None:
    """Return sizes and mapping of several executor groups; None if there is one."""
    if GROUPS not in last:
        return None
    sizes = ("planned", "requested", "observed", "load", "decision", "reason")
    named = group_sizes(last)
    changes = [
        {"clock": row["clock"], "group": name, **{key: size[key] for key in sizes}}
        for row in rows
        for name, size in row.get(GROUPS, {}).items()
        if size["decision"] != "NoChange"
    ]
    placement = [{"clock": row["clock"], **row[PLACEMENT]} for row in rows if PLACEMENT in row]
    return {
        "executors": {name: {key: size[key] for key in sizes} for name, size in named.items()},
        "mapping": last[PLACEMENT]["mapping"],
        "loads": last[PLACEMENT]["loads"],
        "reason": last[PLACEMENT]["reason"],
        "changes": changes,
        "moves": [
            {"clock": row["clock"], "reason": row["reason"], **move}
            for row in placement
            for move in row["moves"]
        ],
    }


def _dataflow(totals: dict[str, Any] | None, view: View) -> dict[str, Any] | None:
    """Return the totals of a dataflow; None if the state directory has none.

    ``balancing`` is what the last round showed of each subquery.
    """
    if totals is None:
        return None
    return {
        **{name: totals.get(name, {}) for name in (*FLOW_SUMS, "state")},
        "watermarks": {
            name: None if time == TIME_MIN else "end" if time == TIME_MAX else time
            for name, time in totals.get("watermarks", {}).items()
        },
        "balancing": dict(view.items(BALANCING)),
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
