"""Running totals of a state directory: one row for its batches, one for its rounds.

Each is updated in the transaction that commits a batch or records a round, so the rows of old
batches and rounds can be deleted without losing what they add up to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOTALS, BATCHES, ROUNDS = "totals", "batches", "rounds"
DATAFLOW = "dataflow"
HOMES = "homes"
# Rows, and bytes because of moved buckets; other metrics of a dataflow replace older ones.
FLOW_SUMS = ("sources", "sinks", "dead", "moved")
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


def add_nested(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Add numbers in mappings of mappings, name by name.

    Examples
    --------
    >>> add_nested({"a": {"x": 1}}, {"a": {"x": 2, "y": 1}, "b": {}})
    {'a': {'x': 3, 'y': 1}, 'b': {}}
    """
    found = dict(old)
    for name, value in new.items():
        if isinstance(value, Mapping):
            found[name] = add_nested(found.get(name, {}), value)
        else:
            found[name] = found.get(name, 0) + value
    return found


def _add_flow(old: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals of a dataflow: sums of rows, and the newest watermarks and state."""
    sums = {name: add_nested(old.get(name, {}), batch.get(name, {})) for name in FLOW_SUMS}
    return {**old, **batch, **sums}


def add_batch(old: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals with the metrics of a batch added."""
    machines: dict[str, dict[str, Any]] = dict(old.get("machines", {}))
    for row in figures.get("machines", ()):
        known = machines.get(str(row["machine"]), {})
        machines[str(row["machine"])] = {k: known.get(k, 0) + row[k] for k in MACHINE_METRICS}
    # A state directory of an earlier version has only the newest time.
    median = old.get("time_median", old.get("time_max"))
    flow = {}
    if DATAFLOW in old or DATAFLOW in figures:
        flow[DATAFLOW] = _add_flow(old.get(DATAFLOW, {}), figures.get(DATAFLOW, {}))
    homes = add_nested(old.get(HOMES, {}), figures.get(HOMES, {}))
    return {
        **{name: old.get(name, 0) + figures.get(name, 0) for name in SUMMED},
        "batches": old.get("batches", 0) + 1,
        "time_max": _later(old.get("time_max"), figures.get("time_max")),
        "time_median": _later(median, figures.get("time_median")),
        "machines": machines,
        **flow,
        **({HOMES: homes} if homes else {}),
    }


def _later(*times: int | None) -> int | None:
    return max((time for time in times if time is not None), default=None)


def add_round(old: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals with the record of a round added."""
    error = row.get("model_error")
    return {
        "rounds": old.get("rounds", 0) + 1,
        "plan_changes": old.get("plan_changes", 0) + (row["next_epoch"] is not None),
        "decision_seconds": old.get("decision_seconds", 0) + row.get("seconds", 0),
        "bytes_sent": old.get("bytes_sent", 0) + row.get("bytes_sent", 0),
        "model_error": old.get("model_error") if error is None else error,
        "last_reason": row["reason"],
    }
