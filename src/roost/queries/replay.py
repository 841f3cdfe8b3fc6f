"""Replay of new entries of the query log: passes requests through the guard, and counts them.

The guard checks entries one by one, before neighbours are joined to the blocks that admission reads
at once. So requests of blocked users cost only the time of the gate, however small the entries are,
and leave one dead-letter record for each user.

A request counts for its user once it is admitted. A registration must also have become a query that
can still match: otherwise queries that expire before they begin, or before the stream reaches them,
or that are terminated in the same block, would be a free way to appear active elsewhere. Spark
counts requests of a stream as they are sent; the replay corrects these counts after admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from roost.guard import Guard
from roost.guard.loops import REFUSED, REGISTERS, TERMINATES, UNCOUNTED
from roost.guard.tally import Tally
from roost.guard.users import shown
from roost.model.arrays import Mask
from roost.model.columns import convert, record_at
from roost.model.records import TIME_MIN, DeadLetter, Reason
from roost.queries.admission import Admission
from roost.queries.log import EntryKind, kind_of

# Operation of an entry that terminates a user's queries, and the column with the user.
EVICT, EVICTED = "evict", "evicted"


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
    """Rejected requests of a user: positions, number, and the first of them."""

    first: int
    record: str
    last: int = 0
    count: int = 0

    def add(self, count: int, last: int) -> None:
        self.count += count
        self.last = last


class Replay:
    """One replay of log entries, at the event time that the stream has reached.

    :attr:`rows` counts requests up to the last entry that was read, ``first`` before it. Without a
    guard, all users are admitted and no request is counted.
    """

    def __init__(self, first: int, guard: Guard | None = None, now: int = TIME_MIN) -> None:
        self.rows = first
        self._guard = guard
        self._now = now
        self._tallies: list[Tally] = []
        self._rejections: dict[str, _Rejection] = {}

    def parts(self, blocks: Iterable[pa.Table]) -> Iterator[Passed | Eviction]:
        """Yield the requests that pass, neighbours of one schema joined, and evictions."""
        for alike, group in groupby(self._passing(blocks), _schema_of):
            if alike is None:
                yield from group
            else:
                yield _joined([item for item in group if isinstance(item, Passed)])

    def _passing(self, blocks: Iterable[pa.Table]) -> Iterator[Passed | Eviction]:
        for block in blocks:
            first, self.rows = self.rows, self.rows + block.num_rows
            kind = kind_of(block)
            if kind is EntryKind.TALLY:
                self._add_tally(Tally.from_table(block), first)
            elif block.num_rows:
                positions = first + np.arange(block.num_rows)
                part = Passed(block, positions, kind is EntryKind.COUNTED)
                yield from [part] if self._guard is None else self._judged(part, self._guard)

    def _judged(self, part: Passed, guard: Guard) -> Iterator[Passed | Eviction]:
        """Check a block of requests, and cut it at evictions."""
        users = _texts(part.block, "user_id")
        admitted = guard.gate.judge(users, int(part.positions[0]))
        admitted[_mask(users.is_null())] = True  # admission refuses requests without a user
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
        pending = guard.blocks.evictions()
        if not pending or EVICTED not in part.block.column_names:
            return {}
        users = _texts(part.block, EVICTED)
        evict = pc.equal(_texts(part.block, "op"), EVICT)
        named = pc.is_in(users, value_set=pa.array(list(pending), pa.string()))
        found = {}
        for row in np.flatnonzero(_mask(pc.and_kleene(evict, named))).tolist():
            key, since = pending[users[row].as_py()]
            if int(part.positions[row]) > since and guard.blocks.record_eviction(key):
                found[row] = Eviction(key)
        return found

    def _refuse(self, part: Passed, users: pa.Array, admitted: Mask) -> None:
        """Count rejected requests."""
        rows = np.flatnonzero(~admitted)
        kinds = np.where(admitted, np.int8(UNCOUNTED), np.int8(REFUSED))
        self._tallies.append(self._tally(users, kinds))
        codes = users.take(pa.array(rows)).dictionary_encode()
        indices = np.asarray(codes.indices)
        order = np.argsort(indices, kind="stable")
        pieces = np.split(rows[order], np.cumsum(np.bincount(indices))[:-1])
        for user, selected in zip(codes.dictionary.to_pylist(), pieces, strict=True):
            first, last = part.positions[selected[[0, -1]]].tolist()
            if user not in self._rejections:
                self._rejections[user] = _Rejection(first, record_at(part.block, int(selected[0])))
            self._rejections[user].add(len(selected), last)

    def _add_tally(self, tally: Tally, first: int) -> None:
        """Add the counts of Spark."""
        if self._guard is None:
            return
        self._tallies.append(tally)
        for row in np.flatnonzero(tally.counts[:, 2]).tolist():
            known = _Rejection(first + row, "{}")
            rejection = self._rejections.setdefault(tally.names[row].as_py(), known)
            rejection.add(int(tally.counts[row, 2]), first + row)

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

    def rejections(self) -> list[DeadLetter]:
        """Return a dead-letter record for each user who was rejected."""
        found = []
        for user, rejection in self._rejections.items():
            assert self._guard is not None, "only a guard rejects"
            since = self._guard.gate.refusal(user) or "at that time"
            detail = (
                f"user {shown(user)!r} is blocked {since}: {rejection.count} requests at "
                f"positions {rejection.first} to {rejection.last}"
            )
            found.append(DeadLetter(rejection.first, Reason.BLOCKED, detail, rejection.record))
        return found


def _texts(block: pa.Table, name: str) -> pa.Array:
    if name not in block.column_names:
        return pa.nulls(block.num_rows, pa.string())
    return convert(block[name], pa.string())[0]


def _mask(values: pa.Array) -> Mask:
    return np.asarray(pc.fill_null(values, False).to_numpy(zero_copy_only=False), bool)


def _schema_of(item: Passed | Eviction) -> tuple[bool, pa.Schema] | None:
    """Return what requests must have in common to be joined."""
    return (item.counted, item.block.schema) if isinstance(item, Passed) else None


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
    selected = admitted[start:stop]
    if selected.any():
        block = part.block.slice(start, stop - start)
        if not selected.all():
            block = block.filter(pa.array(selected))
        yield Passed(block, part.positions[start:stop][selected], part.counted)


def _lasting(admission: Admission, now: int) -> NDArray[np.int64]:
    """Return the log positions of registrations that became queries which can still match."""
    queries = admission.queries
    positions, start, until = (
        queries[name].to_numpy() for name in ("created_position", "live_from", "live_until")
    )
    lasting: NDArray[np.int64] = positions[(until > start) & (until > now)].astype(np.int64)
    return lasting
