"""Summarize a state directory: plan, segments, window, guard, batches and dead-letter records."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from roost.balance import Plan
from roost.commands.queries import QueryService
from roost.queries.guard_state import load_guard
from roost.queries.versions import segment_files, version_at
from roost.runtime import records
from roost.runtime.records import Commit
from roost.storage.agreement import agreed
from roost.storage.store import Store
from roost.window.view import WindowView, find_view


@dataclass(frozen=True)
class StateSummary:
    """Contents of a state directory; None stands for what it does not have yet.

    Parameters
    ----------
    space
        Bounds and grid.
    position
        End of the query log.
    plan, strategy
        The newest plan.
    last_round
        The newest round of the balancer.
    guard
        Round, number of blocked users and of suspicious clusters.
    segments
        File, queries, bytes and file of terminated queries of each segment.
    window
        The window of the newest batch.
    batches
        Number of committed batches.
    commits
        Commits that are still stored.
    open_batch
        A batch that was begun and not committed.
    dead
        Number of dead-letter records by origin and reason.
    """

    space: dict[str, Any] | None
    position: int
    plan: Plan | None
    strategy: str | None
    last_round: dict[str, Any] | None
    guard: dict[str, int] | None
    segments: list[tuple[str, int, int, str | None]]
    window: WindowView | None
    batches: int
    commits: list[Commit]
    open_batch: int | None
    dead: dict[tuple[str, str], int]


def inspect_state(folder: Path) -> StateSummary:
    """Read the contents of a state directory."""
    with closing(QueryService(folder)) as service:
        store, position, guard = service.store, service.log.end(), _guard(service.store)
        with store.view() as view:
            meta, epoch = agreed(view), records.last_epoch(view)
            body = None if epoch is None else records.plan_of(view, epoch)
            version, last = version_at(view, position), records.last_intent(view)
            begun = None if last is None else last.batch_id
            commits, totals = records.commits(view), view.get(records.TOTALS, "batches") or {}
            refs = () if version is None else version.segments
            sizes = [segment_files(store).path(ref.file).stat().st_size for ref in refs]
            return StateSummary(
                None if meta is None else meta["space"],
                position,
                None if body is None else Plan.from_json(body),
                None if body is None else body["strategy"],
                records.last_round(view),
                guard,
                [(r.file, r.size, size, r.ended) for r, size in zip(refs, sizes, strict=True)],
                find_view(view),
                totals.get("batches", len(commits)),
                commits,
                begun if begun is not None and records.commit_of(view, begun) is None else None,
                _dead(folder),
            )


def _guard(store: Store) -> dict[str, int] | None:
    loaded = load_guard(store)
    if loaded is None:
        return None
    listing = loaded[0].listing()
    blocked = sum(item["blocked"] for item in listing["blocked"])
    return {"round": loaded[0].round, "blocked": blocked, "suspects": len(listing["suspects"])}


def _dead(folder: Path) -> dict[tuple[str, str], int]:
    """Count dead-letter records, which are beside a state directory in its default place."""
    dead = folder.parent / "dead"
    counts: Counter[tuple[str, str]] = Counter()
    for path in sorted(dead.glob("*.parquet")) if dead.is_dir() else []:
        rows = pq.read_table(path, columns=["origin", "reason"]).to_pylist()
        counts.update((row["origin"], row["reason"]) for row in rows)
    return dict(sorted(counts.items()))
