"""Register, terminate and list queries of a state directory, without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from roost.errors import RequestError, StateError
from roost.kernel import Segment
from roost.model.records import (
    BOX,
    CIRCLE,
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
from roost.storage.store import Store


@dataclass(frozen=True, slots=True)
class LiveQuery:
    """A query that has not terminated.

    Parameters
    ----------
    query_id, user_id
        Its identifier and owner.
    shape
        ``box``, ``circle`` or ``polygon``.
    numbers
        Center and radius of a circle; otherwise the bounds ``x0, y0, x1, y1``.
    predicate
        Condition on the attributes.
    result
        Aggregates or nearest points that it requests; None for matches.
    start, end
        Event times between which it matches.
    """

    query_id: str | int
    user_id: str
    shape: str
    numbers: tuple[float, ...]
    predicate: str | None
    result: str | None
    start: Instant | None
    end: Instant | None


class QueryService:
    """Validates requests at once: the rules of a batch, applied to the current log.

    The log is replayed in memory only; the run that owns the state directory records it.
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

        Raises
        ------
        RequestError
            With the reason that a batch would refuse the request for; it is not appended.
        """
        block = pa.Table.from_pylist([request_record(request)])
        guard = GuardState.preview(self.store)
        if guard is not None:
            guard.reject_blocked([request.user_id])
        queries = self.queries()
        admission = admit(block, queries.version.rows, self.rules, queries.lookup)
        if admission.refused:
            refused = admission.refused[0]
            raise RequestError(refused.reason.value, refused.detail)
        return self.log.append(block)

    def queries(self) -> QuerySet:
        """Return the queries at the end of the log."""
        guard = GuardState.preview(self.store)
        queries = QuerySet(self.store, self.log, self.rules, keep=False, guard=guard)
        queries.advance(self.log.end())
        return queries

    def live(self) -> Iterator[LiveQuery]:
        """Yield the queries that have not terminated."""
        for _, segment, ended in self.queries().segments():
            for slot in range(segment.size):
                end = ended.get(slot, TIME_MAX)
                if segment.live_until is not None:
                    end = min(end, int(segment.live_until[slot]))
                start = TIME_MIN if segment.live_from is None else int(segment.live_from[slot])
                if start < end:
                    yield _live_query(segment, slot, start, end, self.rules)


def _live_query(segment: Segment, slot: int, start: int, end: int, rules: Rules) -> LiveQuery:
    numbers = tuple(segment.boxes[slot].tolist())
    kind = segment.kinds[slot]
    if kind == CIRCLE:
        assert segment.radius is not None
        numbers = (*numbers[:2], float(segment.radius[slot]))
    predicate = -1 if segment.predicate is None else int(segment.predicate[slot])
    result = -1 if segment.outputs is None else int(segment.outputs[slot])
    return LiveQuery(
        segment.ids[slot].as_py(),
        segment.users[slot].as_py(),
        "box" if kind == BOX else "circle" if kind == CIRCLE else "polygon",
        numbers,
        None if predicate < 0 else segment.predicate_texts[predicate],
        None if result < 0 else segment.output_texts[result],
        _instant(start, rules),
        _instant(end, rules),
    )


def _instant(value: int, rules: Rules) -> Instant | None:
    if value in (TIME_MIN, TIME_MAX):
        return None
    if rules.time_type == pa.int64():
        return value
    return dt.datetime.fromtimestamp(value / 1e6, dt.UTC)
