"""The driver's facts with types: intents, commits, plans and rounds.

An *intent* is recorded before any work of a batch, a *commit* after all of it. A *plan* belongs to
an epoch. A *round* has the decisions at its end, with reasons.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from roost.errors import StateError
from roost.stages.reading import ReadingStage
from roost.stages.routing import PLANS
from roost.storage.store import Fact, Store, View
from roost.storage.totals import BATCHES, TOTALS

INTENTS, COMMITS, ROUNDS = "intents", "commits", "rounds"


@dataclass(frozen=True, slots=True)
class Intent:
    """What a batch is about to do; a repeated batch does the same."""

    batch_id: int
    epochs: dict[str, int]  # of every routing
    position: int  # of the query log that the batch is matched against
    # Which rows it reads, by reading stage: start and stop; empty where Spark stores them.
    offsets: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)  # what each stage decided
    ended: list[str] = field(default_factory=list)  # sources that bring no more rows

    def rows_of(self, stage: str) -> tuple[int, int]:
        """Return the rows that a stage reads; version 0.1 had offsets of the points only."""
        start, stop = self.offsets.get(stage) or (0, 0)
        if stage == ReadingStage.name and "start" in self.offsets:
            start, stop = self.offsets["start"], self.offsets["stop"]
        return int(start), int(stop)


@dataclass(frozen=True, slots=True)
class Commit:
    """Result of a batch: staged files with their final names, and metrics."""

    batch_id: int
    files: tuple[tuple[str, str], ...]
    figures: dict[str, Any]


def begin(store: Store, planned: Intent) -> Intent:
    """Record an intent unless the batch has one; returns the intent that holds."""
    found = intent(store, planned.batch_id)
    if found is None:
        store.record(Fact(INTENTS, planned.batch_id, asdict(planned)))
    return found or planned


def intent(view: View, batch_id: int) -> Intent | None:
    """Return the intent of a batch."""
    body = view.get(INTENTS, batch_id)
    return None if body is None else Intent(**body)


def last_intent(view: View) -> Intent | None:
    """Return the intent of the newest batch, committed or not."""
    found = view.last(INTENTS)
    return None if found is None else Intent(**found[1])


def commit_fact(commit: Commit) -> Fact:
    """Return the row whose transaction commits a batch."""
    return Fact(COMMITS, commit.batch_id, asdict(commit))


def commit_of(view: View, batch_id: int) -> Commit | None:
    """Return the commit of a batch; None while it is not committed."""
    body = view.get(COMMITS, batch_id)
    return None if body is None else _commit(body)


def commits(view: View) -> list[Commit]:
    """Return all commits, in order."""
    return [_commit(body) for _, body in view.items(COMMITS)]


def last_commit(view: View) -> Commit | None:
    """Return the newest commit."""
    found = view.last(COMMITS)
    return None if found is None else _commit(found[1])


def _commit(body: dict[str, Any]) -> Commit:
    files = tuple((staged, final) for staged, final in body["files"])
    return Commit(body["batch_id"], files, body["figures"])


def reached(view: View) -> int | None:
    """Return the largest event time of any committed batch."""
    found: int | None = (view.get(TOTALS, BATCHES) or {}).get("time_max")
    return found


def median_reached(view: View) -> int | None:
    """Return the event time that most points of a committed batch have reached: their median.

    One point far in the future does not change it.
    """
    totals = view.get(TOTALS, BATCHES) or {}
    found: int | None = totals.get("time_median", totals.get("time_max"))
    return found


def plan_of(view: View, epoch: int) -> dict[str, Any]:
    """Return the plan of an epoch."""
    plan: dict[str, Any] | None = view.get(PLANS, epoch)
    if plan is None:
        raise StateError(f"state has no plan of epoch {epoch}")
    return plan


def last_epoch(view: View) -> int | None:
    """Return the newest plan epoch."""
    found = view.last(PLANS)
    return None if found is None else found[0]


def last_round(view: View, table: str = ROUNDS) -> dict[str, Any] | None:
    """Return the newest round of the spatial plan, or of another table of rounds."""
    found = view.last(table)
    return None if found is None else found[1]
