"""Summarize the dataflow of a state directory: sources, subqueries, buckets, state, watermarks.

Everything comes from the store: the Python file of the dataflow is not needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.dataflow.buckets import BucketMap
from roost.dataflow.compiler import window_text
from roost.dataflow.moves import BucketMove
from roost.dataflow.operators import SourceKind, Window, WindowBy
from roost.dataflow.watermarks import Progress
from roost.runtime.records import intent, last_commit
from roost.stages.flow_routing import FLOW, LAYOUT, maps_of, stage_of
from roost.stages.flow_subquery import STATE, StateEntry
from roost.storage.store import View
from roost.storage.totals import BATCHES, DATAFLOW, TOTALS

Operators = Mapping[str, Mapping[str, Any]]  # as the store describes them, by name


@dataclass(frozen=True)
class SourceProgress:
    """How far a source is read; times are event times, ``heard`` is the clock of a batch."""

    name: str
    kind: str  # records, points or matches
    rows: int | None  # read in committed batches; None before the first
    newest: int | None
    watermark: int | None
    heard: float | None
    ended: bool
    timestamps: bool = False  # whether event times are microseconds since 1970


@dataclass(frozen=True)
class SubqueryState:
    """A stateful operator, its bucket map and its state files."""

    operator: str
    kind: str
    window: str
    keys: str  # columns of an Aggregate, condition of a Join or Product
    epoch: int | None  # of the newest bucket map
    buckets: tuple[int, ...]  # owned by each machine
    files: int
    rows: int
    nbytes: int
    watermark: int | None  # of its output
    moves: tuple[BucketMove, ...] = ()  # that are not complete
    timestamps: bool = False  # whether event times are microseconds since 1970


@dataclass(frozen=True)
class FlowSummary:
    """The dataflow of a state directory."""

    sources: tuple[SourceProgress, ...]
    subqueries: tuple[SubqueryState, ...]


def summarize_flow(view: View) -> FlowSummary | None:
    """Read the dataflow of a state directory; None if it has none."""
    operators: Operators | None = view.get(FLOW, "operators")
    if operators is None:
        return None
    found = view.get(FLOW, "progress")
    progress = Progress() if found is None else Progress.from_json(found)
    return FlowSummary(
        tuple(
            _source(view, name, operators, progress)
            for name, about in operators.items()
            if about["kind"] == "Source"
        ),
        tuple(
            _subquery(view, name, operators, progress)
            for name, about in operators.items()
            if "window" in about
        ),
    )


def _has_timestamps(operators: Operators, name: str) -> bool:
    """Return whether event times of an operator are known to be timestamps."""
    about = operators[name]
    if about["kind"] != "Source":
        return _has_timestamps(operators, about["inputs"][0][0])
    if about["source"] != SourceKind.RECORDS:
        return False  # the columns of points are not stored
    kind = dict(about["schema"]).get(about["time"], "")  # without a time column, the clock
    return not kind.startswith(("int", "uint"))


def _source(view: View, name: str, operators: Operators, progress: Progress) -> SourceProgress:
    totals = (view.get(TOTALS, BATCHES) or {}).get(DATAFLOW, {})
    return SourceProgress(
        name,
        operators[name]["source"],
        totals.get("sources", {}).get(name),
        progress.newest.get(name),
        progress.watermarks.get(name),
        progress.heard.get(name),
        name in progress.ended,
        _has_timestamps(operators, name),
    )


def _subquery(view: View, name: str, operators: Operators, progress: Progress) -> SubqueryState:
    about = operators[name]
    by, size, advance = about["window"]
    epoch, owned, moves = _buckets(view, name)
    entries = map(StateEntry.from_json, view.get(STATE, name) or [])
    files = [file for entry in entries for file in entry.files]
    return SubqueryState(
        name,
        about["kind"],
        window_text(Window(WindowBy(by), size, advance)),
        ", ".join(about["by"]) if "by" in about else about["condition"],
        epoch,
        owned,
        len(files),
        sum(file.rows for file in files),
        sum(file.nbytes for file in files),
        progress.watermarks.get(name),
        moves,
        _has_timestamps(operators, name),
    )


def _buckets(view: View, name: str) -> tuple[int | None, tuple[int, ...], tuple[BucketMove, ...]]:
    """Return the newest bucket map: epoch, buckets of each machine, and moves under way.

    The map may be that of another operator. A move by state recreation is complete with the first
    batch that uses the map.
    """
    shared = (view.get(FLOW, LAYOUT) or {"shared": {}})["shared"]
    root, *_ = shared.get(name, (name, ()))
    last = view.last(maps_of(root))
    if last is None:
        return None, (), ()
    known = BucketMap.from_json(*last)
    counts = Counter(known.owners)
    commit = last_commit(view)
    done = None if commit is None else intent(view, commit.batch_id)
    used = done is not None and done.epochs.get(stage_of(root)) == known.epoch
    owned = tuple(counts[machine] for machine in range(known.machines))
    return known.epoch, owned, known.under_way if used else known.moves
