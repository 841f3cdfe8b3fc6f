"""Replay of new entries of the query log: which requests pass the guard, and what is counted.

The guard checks entries one by one, before neighbours are joined to the blocks that admission reads
at once. So requests of blocked users cost the time of the gate and no more, however small the
entries are: they are neither admitted nor joined, and leave one dead-letter record for each user.

A request counts for its user once it is admitted. A registration must also have become a query that
can still match: otherwise queries that expire before they begin, or before the stream reaches them,
or that are terminated in the same block, would be a free way to appear active elsewhere.

Spark counts requests of a stream as they are sent. The replay corrects these counts by the result
of admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.guard import Guard
from roost.guard.loops import REFUSED, REGISTERS, TERMINATES, UNCOUNTED
from roost.guard.tally import Tally
from roost.guard.users import shown_name
from roost.model.columns import convert, record_at
from roost.model.records import TIME_MIN, Reason
from roost.queries.admission import Admission, Refused
from roost.queries.log import Kind, kind_of

# Operation of an entry that terminates a user's queries, and the column with the user.
EVICT, EVICTED = "evict", "evicted"

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Passed:
    """Requests that passed the guard, with their log positions; ``counted`` by Spark or not."""

    block: pa.Table
    positions: NDArray[np.int64]
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Eviction:
    """A log position from which on a blocked user has no queries."""

    key: int


@dataclass(slots=True)
class _Rejection:
    count: int
    first: int
    last: int
    record: str


class Replay:
    """One replay of log entries.

    Parameters
    ----------
    first
        Requests before the first entry.
    guard
        Blocks users; None admits all of them and counts nothing.
    now
        Event time that the stream has reached.

    Attributes
    ----------
    rows
        Requests up to the last entry that was read.
    """

    def __init__(self, first: int, guard: Guard | None = None, now: int = TIME_MIN) -> None:
        self.rows = first
        self._guard = guard
        self._now = now
        self._tallies: list[Tally] = []
        self._rejections: dict[str, _Rejection] = {}

    def parts(self, blocks: Iterable[pa.Table]) -> Iterator[Passed | Eviction]:
        """Yield the requests that pass, neighbours of one schema joined, and evictions."""
        waiting: list[Passed] = []
        for item in self._passing(blocks):
            joins = isinstance(item, Passed) and bool(waiting) and _alike(waiting[0], item)
            if waiting and not joins:
                yield _joined(waiting)
                waiting = []
            if isinstance(item, Passed):
                waiting.append(item)
            else:
                yield item
        if waiting:
            yield _joined(waiting)

    def _passing(self, blocks: Iterable[pa.Table]) -> Iterator[Passed | Eviction]:
        for block in blocks:
            first, self.rows = self.rows, self.rows + block.num_rows
            kind = kind_of(block)
            if kind is Kind.TALLY:
                self._add_tally(Tally.from_table(block), first)
            elif block.num_rows:
                positions = first + np.arange(block.num_rows)
                part = Passed(block, positions, kind is Kind.COUNTED)
                yield from [part] if self._guard is None else self._judged(part, self._guard)

    def _judged(self, part: Passed, guard: Guard) -> Iterator[Passed | Eviction]:
        """Check a block of requests, and cut it at evictions."""
        users = _texts(part.block, "user_id")
        admitted = guard.gate.judge(users, int(part.positions[0]))
        admitted[_mask(users.is_null())] = (
            True  # without a user; admission rejects it with a reason
        )
        evictions = self._evictions(part, guard)
        admitted[list(evictions)] = True
        if not admitted.all():
            self._refuse(part, users, admitted)
        start = 0
        for row, eviction in evictions.items():
            yield from _taken(part, start, row, admitted)
            yield eviction
            start = row + 1
        yield from _taken(part, start, part.block.num_rows, admitted)

    def _evictions(self, part: Passed, guard: Guard) -> dict[int, Eviction]:
        """Return the rows that terminate the queries of a user who is to be evicted."""
        pending = guard.evictions()
        if not pending or EVICTED not in part.block.column_names:
            return {}
        users = _texts(part.block, EVICTED)
        asked = pc.equal(_texts(part.block, "op"), EVICT)
        named = pc.is_in(users, value_set=pa.array(list(pending), pa.string()))
        found = {}
        for row in np.flatnonzero(_mask(pc.and_kleene(asked, named))).tolist():
            key, since = pending[users[row].as_py()]
            if int(part.positions[row]) > since and guard.evicted(key):
                found[row] = Eviction(key)
        return found

    def _refuse(self, part: Passed, users: pa.Array, admitted: Mask) -> None:
        """Count rejected requests; the log has the requests themselves."""
        rows = np.flatnonzero(~admitted)
        kinds = np.where(admitted, np.int8(UNCOUNTED), np.int8(REFUSED))
        self._tallies.append(self._tally(users, kinds))
        codes = users.take(pa.array(rows)).dictionary_encode()
        indices = np.asarray(codes.indices)
        order = np.argsort(indices, kind="stable")
        pieces = np.split(rows[order], np.cumsum(np.bincount(indices))[:-1])
        for user, mine in zip(codes.dictionary.to_pylist(), pieces, strict=True):
            first, last = part.positions[mine[[0, -1]]].tolist()
            self._write(user, len(mine), first, last, part.block, int(mine[0]))

    def _write(
        self, user: str, count: int, first: int, last: int, block: pa.Table | None, row: int
    ) -> None:
        known = self._rejections.get(user)
        if known is None:
            record = "{}" if block is None else record_at(block, row)
            self._rejections[user] = _Rejection(count, first, last, record)
        else:
            known.count += count
            known.last = last

    def _add_tally(self, tally: Tally, first: int) -> None:
        """Add the counts of Spark."""
        if self._guard is None:
            return
        self._tallies.append(tally)
        for row in np.flatnonzero(tally.counts[:, 2]).tolist():
            count = int(tally.counts[row, 2])
            self._write(tally.names[row].as_py(), count, first + row, first + row, None, 0)

    def count(self, part: Passed, admission: Admission) -> None:
        """Count the requests of a block that were admitted."""
        if self._guard is None:
            return
        users, operations = _texts(part.block, "user_id"), _texts(part.block, "op")
        registers, ends = (_mask(pc.equal(operations, op)) for op in ("register", "terminate"))
        refused = np.array([item.position for item in admission.refused], np.int64)
        kinds = np.zeros(len(users), np.int8)
        kinds[ends & ~np.isin(part.positions, refused)] = TERMINATES
        kinds[np.isin(part.positions, _lasting(admission, self._now))] = REGISTERS
        named = ~_mask(users.is_null())
        kinds[~named] = UNCOUNTED
        if part.counted:
            sent = np.zeros(len(users), np.int8)
            sent[registers & named] = REGISTERS
            sent[ends & named] = TERMINATES
            other = sent != kinds
            self._tallies.append(self._tally(users, np.where(other, sent, 0)).negated())
            kinds[~other] = UNCOUNTED
        self._tallies.append(self._tally(users, kinds))

    def _tally(self, users: pa.Array, kinds: NDArray[np.int8]) -> Tally:
        assert self._guard is not None, "only a guard counts"
        return Tally.of(users, self._guard.keys_of(users), kinds)[0]

    def tally(self) -> Tally:
        """Return all counts of this replay."""
        return Tally.summed(self._tallies)

    def rejections(self) -> list[Refused]:
        """Return a dead-letter record for each user who was rejected."""
        guard = self._guard
        if guard is None:
            return []
        found = []
        for user, rejection in self._rejections.items():
            since = guard.gate.refusal(user) or "at that time"
            detail = (
                f"user {shown_name(user)!r} is blocked {since}: {rejection.count} requests at "
                f"positions {rejection.first} to {rejection.last}"
            )
            found.append(Refused(rejection.first, Reason.BLOCKED, detail, rejection.record))
        return found


def _texts(block: pa.Table, name: str) -> pa.Array:
    if name not in block.column_names:
        return pa.nulls(block.num_rows, pa.string())
    return convert(block[name], pa.string())[0]


def _mask(values: pa.Array) -> Mask:
    return np.asarray(pc.fill_null(values, False).to_numpy(zero_copy_only=False), bool)


def _alike(one: Passed, other: Passed) -> bool:
    same: bool = one.counted == other.counted and one.block.schema == other.block.schema
    return same


def _joined(parts: list[Passed]) -> Passed:
    if len(parts) == 1:
        return parts[0]
    return Passed(
        pa.concat_tables([part.block for part in parts]),
        np.concatenate([part.positions for part in parts]),
        parts[0].counted,
    )


def _taken(part: Passed, start: int, stop: int, admitted: Mask) -> Iterator[Passed]:
    """Yield the admitted rows of a range, if there are any."""
    mine = admitted[start:stop]
    if mine.any():
        block = part.block.slice(start, stop - start)
        if not mine.all():
            block = block.filter(pa.array(mine))
        yield Passed(block, part.positions[start:stop][mine], part.counted)


def _lasting(admission: Admission, now: int) -> NDArray[np.int64]:
    """Return the log positions of registrations that became queries which can still match."""
    queries = admission.queries
    born = queries["created_position"].to_numpy()
    until = queries["live_until"].to_numpy()
    lasting: NDArray[np.int64] = born[
        (until > queries["live_from"].to_numpy()) & (until > now)
    ].astype(np.int64)
    return lasting
