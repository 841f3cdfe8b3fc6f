"""Summarize a state directory: plan, segments, window, guard, dataflow, batches, dead letters."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from roost.balance import Plan
from roost.commands.flow_state import FlowSummary, summarize_flow
from roost.commands.queries import QueryService
from roost.queries.guard_state import load_guard
from roost.queries.versions import segment_files, version_at
from roost.runtime import records
from roost.runtime.records import Commit
from roost.runtime.report import executor_summary
from roost.storage.agreement import agreed
from roost.storage.store import Store
from roost.storage.totals import BATCHES, HOMES, TOTALS
from roost.synopsis.catalogue import Catalogue, read_catalogue
from roost.window.view import WindowView, find_view


@dataclass(frozen=True)
class StateSummary:
    """Contents of a state directory; None stands for what it does not have yet."""

    space: dict[str, Any] | None
    position: int  # end of the query log
    plan: Plan | None
    strategy: str | None
    last_round: dict[str, Any] | None  # of the balancer
    guard: dict[str, int] | None  # round, number of blocked users and of suspicious clusters
    segments: list[tuple[str, int, int, str | None]]  # file, queries, bytes, terminated queries
    window: WindowView | None
    batches: int  # committed in total
    commits: list[Commit]  # that are still stored
    open_batch: int | None  # begun and not committed
    dead: dict[tuple[str, str], int]  # records by origin and reason
    sketch: Catalogue
    dataflow: FlowSummary | None = None
    homes: dict[str, int] | None = None  # totals: see runtime/homes.py: home_metrics
    executors: dict[str, Any] | None = None  # as in the report


def inspect_state(folder: Path) -> StateSummary:
    """Read the contents of a state directory."""
    with closing(QueryService(folder)) as service:
        store, position, guard = service.store, service.log.end(), _guard(service.store)
        with store.view() as view:
            meta, epoch = agreed(view), records.last_epoch(view)
            body = None if epoch is None else records.plan_of(view, epoch)
            version, last = version_at(view, position), records.last_intent(view)
            begun = None if last is None else last.batch_id
            commits, totals = records.commits(view), view.get(TOTALS, BATCHES) or {}
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
                read_catalogue(view),
                summarize_flow(view),
                totals.get(HOMES),
                executor_summary(view),
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
    counts: Counter[tuple[str, str]] = Counter()
    for path in (folder.parent / "dead").glob("*.parquet"):
        rows = pq.read_table(path, columns=["origin", "reason"]).to_pylist()
        counts.update((row["origin"], row["reason"]) for row in rows)
    return dict(sorted(counts.items()))
