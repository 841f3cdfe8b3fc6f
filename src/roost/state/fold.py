"""One pass over new entries of the query log: who may pass, and what is counted.

Entries are judged one by one, before neighbours are joined to blocks that admission takes at once.
So what blocked users send costs the gate's time and no more, in whatever pieces it comes: it is
neither admitted nor joined, and leaves one dead letter a user for the whole pass.

A request counts for its user once admission has taken it. A registration must also have become a
query that can still match: one that is over before it begins, or before the stream has got there,
or that is ended in the same block, would be a free way to look busy elsewhere.

Requests of a stream were counted by Spark as they were sent. What came of them is put right here.
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
from roost.model import TIME_MIN, Reason
from roost.state.admission import Admission, Refused
from roost.state.columns import convert, record_at
from roost.state.querylog import Kind, kind_of

# Operation of an entry that ends queries, and its column with whose.
EVICT, EVICTED = "evict", "evicted"

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Part:
    """Requests that may pass, with their places in the log; ``counted`` by Spark or not."""

    block: pa.Table
    positions: NDArray[np.int64]
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Eviction:
    """A place in the log from which on a blocked user has no queries."""

    key: int


@dataclass(slots=True)
class _Letter:
    count: int
    first: int
    last: int
    record: str


class Fold:
    """A pass over the log.

    Parameters
    ----------
    first
        Requests before the first entry.
    guard
        Who is blocked; None lets everybody pass and counts nothing.
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
        self._letters: dict[str, _Letter] = {}

    def parts(self, blocks: Iterable[pa.Table]) -> Iterator[Part | Eviction]:
        """Yield what passes, neighbours of one schema joined, and where queries are to end."""
        waiting: list[Part] = []
        for item in self._passing(blocks):
            joins = isinstance(item, Part) and bool(waiting) and _alike(waiting[0], item)
            if waiting and not joins:
                yield _joined(waiting)
                waiting = []
            if isinstance(item, Part):
                waiting.append(item)
            else:
                yield item
        if waiting:
            yield _joined(waiting)

    def _passing(self, blocks: Iterable[pa.Table]) -> Iterator[Part | Eviction]:
        for block in blocks:
            first, self.rows = self.rows, self.rows + block.num_rows
            kind = kind_of(block)
            if kind is Kind.TALLY:
                self._add_tally(Tally.from_table(block), first)
            elif block.num_rows:
                positions = first + np.arange(block.num_rows)
                part = Part(block, positions, kind is Kind.COUNTED)
                yield from [part] if self._guard is None else self._judged(part, self._guard)

    def _judged(self, part: Part, guard: Guard) -> Iterator[Part | Eviction]:
        """Judge a part, cut where queries are to end."""
        users = _texts(part.block, "user_id")
        admitted = guard.gate.judge(users, int(part.positions[0]))
        admitted[_mask(users.is_null())] = True  # nobody's: admission says what is wrong with it
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

    def _evictions(self, part: Part, guard: Guard) -> dict[int, Eviction]:
        """Find the rows at which the queries of somebody who is to be evicted end."""
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

    def _refuse(self, part: Part, users: pa.Array, admitted: Mask) -> None:
        """Note what was refused: the log has the requests."""
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
        known = self._letters.get(user)
        if known is None:
            record = "{}" if block is None else record_at(block, row)
            self._letters[user] = _Letter(count, first, last, record)
        else:
            known.count += count
            known.last = last

    def _add_tally(self, tally: Tally, first: int) -> None:
        """Take over what Spark has counted."""
        if self._guard is None:
            return
        self._tallies.append(tally)
        for row in np.flatnonzero(tally.counts[:, 2]).tolist():
            count = int(tally.counts[row, 2])
            self._write(tally.names[row].as_py(), count, first + row, first + row, None, 0)

    def count(self, part: Part, admission: Admission) -> None:
        """Count what admission has taken of a part."""
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
        """Return everything that was counted in this pass."""
        return Tally.summed(self._tallies)

    def letters(self) -> list[Refused]:
        """Return a dead letter for each user who was refused."""
        guard = self._guard
        if guard is None:
            return []
        found = []
        for user, letter in self._letters.items():
            since = guard.gate.refusal(user) or "at that time"
            detail = (
                f"user {shown_name(user)!r} is blocked {since}: {letter.count} requests at "
                f"positions {letter.first} to {letter.last}"
            )
            found.append(Refused(letter.first, Reason.BLOCKED, detail, letter.record))
        return found


def _texts(block: pa.Table, name: str) -> pa.Array:
    if name not in block.column_names:
        return pa.nulls(block.num_rows, pa.string())
    return convert(block[name], pa.string())[0]


def _mask(values: pa.Array) -> Mask:
    return np.asarray(pc.fill_null(values, False).to_numpy(zero_copy_only=False), bool)


def _alike(one: Part, other: Part) -> bool:
    same: bool = one.counted == other.counted and one.block.schema == other.block.schema
    return same


def _joined(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return Part(
        pa.concat_tables([part.block for part in parts]),
        np.concatenate([part.positions for part in parts]),
        parts[0].counted,
    )


def _taken(part: Part, start: int, stop: int, admitted: Mask) -> Iterator[Part]:
    """Yield the admitted rows of a stretch, if there are any."""
    mine = admitted[start:stop]
    if mine.any():
        block = part.block.slice(start, stop - start)
        if not mine.all():
            block = block.filter(pa.array(mine))
        yield Part(block, part.positions[start:stop][mine], part.counted)


def _lasting(admission: Admission, now: int) -> NDArray[np.int64]:
    """Places in the log of registrations that became queries which can still match."""
    queries = admission.queries
    born = queries["born"].to_numpy()
    until = queries["live_until"].to_numpy()
    lasting: NDArray[np.int64] = born[
        (until > queries["live_from"].to_numpy()) & (until > now)
    ].astype(np.int64)
    return lasting
