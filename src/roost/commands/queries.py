"""Register, terminate and list queries of a state directory, without Spark."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from roost.errors import RequestError, StateError
from roost.model.records import (
    BOX,
    CIRCLE,
    POLYGON,
    TIME_MAX,
    TIME_MIN,
    Instant,
    Request,
    request_record,
)
from roost.queries.admission import Rules, admit
from roost.queries.guard_state import GuardState
from roost.queries.live import QuerySet
from roost.queries.log import SqliteQueryLog
from roost.queries.rules import rules_of
from roost.queries.versions import version_at
from roost.storage.store import Store


@dataclass(frozen=True, slots=True)
class LiveQuery:
    """A query that has not terminated."""

    query_id: str | int
    user_id: str
    shape: str  # box, circle or polygon
    numbers: tuple[float, ...]  # of a circle: centre and radius; otherwise x0, y0, x1, y1
    predicate: str | None
    result: str | None  # aggregates or nearest points; None for matches
    start: Instant | None
    end: Instant | None


class QueryService:
    """Validates requests before they are appended, by the rules that a batch applies.

    The log is replayed in memory only; the run that owns the state directory records versions.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        if not create and not (folder / "state.db").exists():
            raise StateError(f"{folder} is not a state directory: it has no state.db")
        self.store = Store(folder)
        self.log = SqliteQueryLog(folder / "queries.db")
        self.rules = rules_of(self.store)

    def close(self) -> None:
        """Close the files."""
        self.store.close()
        self.log.close()

    def submit(self, request: Request) -> int:
        """Append a request to the log; returns the log position after it.

        Raises :class:`RequestError`, and appends nothing, if a batch would refuse the request.
        """
        block = pa.Table.from_pylist([request_record(request)])
        guard = GuardState.preview(self.store)
        if guard is not None:
            guard.reject_blocked([request.user_id])
        queries = self.queries()
        admission = admit(block, self.rules, queries.lookup)
        if admission.refused:
            refused = admission.refused[0]
            raise RequestError(refused.reason.value, refused.detail)
        return self.log.append(block)

    def queries(self) -> QuerySet:
        """Return the queries at the end of the log."""
        guard = GuardState.preview(self.store)
        while True:
            version = version_at(self.store)
            try:
                queries = QuerySet(self.store, self.log, self.rules, record=False, guard=guard)
            except StateError:
                if version == version_at(self.store):
                    raise
                continue  # the run has replaced the files meanwhile
            queries.advance(self.log.end())
            return queries

    def live(self, limit: int) -> tuple[list[LiveQuery], int]:
        """Return queries that have not terminated, at most ``limit``, and the number of all."""
        tables = [live.survivors() for live in self.queries().segments]
        rows = [row for table in tables for row in table.slice(0, limit).to_pylist()]
        return [_live_query(row, self.rules) for row in rows[:limit]], sum(map(len, tables))


def _live_query(row: dict[str, Any], rules: Rules) -> LiveQuery:
    fields = ("x0", "y0", "radius") if row["kind"] == CIRCLE else ("x0", "y0", "x1", "y1")
    return LiveQuery(
        row["query_id"],
        row["user_id"],
        {BOX: "box", CIRCLE: "circle", POLYGON: "polygon"}[row["kind"]],
        tuple(row[name] for name in fields),
        row["predicate"],
        row["output"],
        _instant(row["live_from"], rules),
        _instant(row["live_until"], rules),
    )


def _instant(value: int, rules: Rules) -> Instant | None:
    if value in (TIME_MIN, TIME_MAX):
        return None
    if rules.time_type == pa.int64():
        return value
    return dt.datetime.fromtimestamp(value / 1e6, dt.UTC)
