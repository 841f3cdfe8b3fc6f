"""The live queries at a log position, as versioned segments.

Registering adds a small segment. A large one is rebuilt only when the small ones together have
grown to a share of it (each segment is at least ``TIER`` times as large as the next). Terminating a
query adds its slot to a side file of its segment. Every version is recorded before it is used, so
any process can open any version that a batch may still require.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.kernel import Index, Segment, build_segment, pack, unpack
from roost.model.records import CIRCLE, TIME_MAX, TIME_MIN
from roost.model.space import Space
from roost.queries.admission import Known, Refused, Rules, admit
from roost.queries.guard_state import GuardState
from roost.queries.log import QueryLog
from roost.queries.replay import Eviction, Replay
from roost.queries.versions import (
    IndexVersion,
    SegmentRef,
    segment_files,
    version_at,
    versions_between,
)
from roost.storage.files import Files
from roost.storage.store import Store

TIER = 4


def load_ended(files: Files, ref: SegmentRef) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the terminated slots of a segment, and the event times of termination."""
    if ref.ended is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    arrays = files.map(ref.ended)
    return arrays["slots"], arrays["until"]


def open_index(files: Files, refs: tuple[SegmentRef, ...], space: Space) -> Index:
    """Map the segments of a version."""
    members = [(unpack(files.map(ref.file)), load_ended(files, ref)) for ref in refs]
    return Index(space, members)


def _ended_of(files: Files, ref: SegmentRef) -> dict[int, int]:
    slots, until = load_ended(files, ref)
    return dict(zip(slots.tolist(), until.tolist(), strict=True))


@dataclass
class _Member:
    ref: SegmentRef
    segment: Segment
    ended: dict[int, int]


class QuerySet:
    """Live queries of a state directory at the newest log position that was applied.

    Parameters
    ----------
    store
        Records versions.
    log
        Source of requests.
    rules
        Decide which requests are admitted.
    keep
        Whether versions are recorded; a reader replays the log in memory only.
    guard
        Blocks users and counts the requests of each; None admits all users.
    """

    def __init__(
        self,
        store: Store,
        log: QueryLog,
        rules: Rules,
        *,
        keep: bool = True,
        guard: GuardState | None = None,
    ) -> None:
        self._keep = keep
        self.guard = guard
        self._store = store
        self._log = log
        self._rules = rules
        self._files = segment_files(store)
        self._members: list[_Member] = []
        self._next_file = 0
        self.version = IndexVersion(0, 0, ())
        self._load(version_at(store) or self.version)

    def _load(self, version: IndexVersion) -> None:
        self.version = version
        self._members = [
            _Member(ref, unpack(self._files.map(ref.file)), _ended_of(self._files, ref))
            for ref in version.segments
        ]
        used = [int(Path(name).stem.split("-")[0]) for name in self._files.names()]
        self._next_file = max(used, default=0) + 1

    def advance(self, upto: int) -> IndexVersion:
        """Apply the log up to a position, or return the version that was recorded there."""
        if upto < self.version.position:
            version = IndexVersion(0, 0, ()) if upto == 0 else version_at(self._store, upto)
            assert version is not None, f"version of log position {upto} was dropped too early"
            assert version.position == upto, f"log position {upto} has no version"
            return version
        if upto == self.version.position:
            return self.version
        first = self.version.rows
        replay = Replay(first) if self.guard is None else self.guard.replay(first)
        refused: list[Refused] = []
        touched: set[str] = set()
        for item in replay.parts(self._log.read(self.version.position, upto)):
            if isinstance(item, Eviction):
                touched |= self._evict(item.key)
                continue
            admission = admit(item.block, 0, self._rules, self.lookup).placed(item.positions)
            replay.count(item, admission)
            refused += admission.refused
            touched |= self._end(admission.ended)
            if admission.queries.num_rows:
                self._add(admission.queries)
        if self._keep:
            self._write_ended(touched, upto)
        counted = [] if self.guard is None else self.guard.count(replay, record=self._keep)
        refused = sorted([*refused, *replay.rejections()], key=lambda item: item.position)
        self.version = IndexVersion(
            upto,
            replay.rows,
            tuple(member.ref for member in self._members),
            tuple(dataclasses.astuple(item) for item in refused),
        )
        if self._keep:
            self._store.record(self.version.fact(), *counted)
        return self.version

    def _evict(self, key: int) -> set[str]:
        """Terminate all queries of a user; returns the segments they are in."""
        assert self.guard is not None, "only a guard evicts"
        keys_of = self.guard.guard.keys_of
        ended = {
            (number, slot): TIME_MIN
            for number, member in enumerate(self._members)
            for slot in np.flatnonzero(keys_of(member.segment.users) == np.uint64(key)).tolist()
        }
        return self._end(ended)

    def refused_between(self, after: int, upto: int) -> list[Refused]:
        """Return the requests refused in ``(after, upto]``."""
        return [
            Refused(*fields)
            for version in versions_between(self._store, after, upto)
            for fields in version.refused
        ]

    def segments(self) -> Iterator[tuple[SegmentRef, Segment, dict[int, int]]]:
        """Yield each segment with its reference and its terminated slots."""
        for member in self._members:
            yield member.ref, member.segment, member.ended

    def bounds(self, limit: int) -> NDArray[np.float64]:
        """Return the bounds ``x0, y0, x1, y1`` of a sample of queries, for estimates."""
        found = [np.empty((0, 4))]
        for member in self._members:
            segment = member.segment
            step = max(1, -(-self.size // limit))
            boxes = np.array(segment.boxes[::step])
            circle = segment.kinds[::step] == CIRCLE
            boxes[circle, 2:] = boxes[circle, :2]
            found.append(boxes)
        return np.concatenate(found)

    @property
    def size(self) -> int:
        """Number of queries in segments, including terminated ones."""
        return sum(member.ref.size for member in self._members)

    def predicates(self, file: str) -> tuple[str, ...]:
        """Return the distinct predicate texts of a segment."""
        for member in self._members:
            if member.ref.file == file:
                return member.segment.predicate_texts
        return unpack(self._files.map(file)).predicate_texts

    def lookup(self, ids: pa.Array) -> dict[int, list[Known]]:
        """Return the earlier queries of some identifiers, by index in the array."""
        known: dict[int, list[Known]] = defaultdict(list)
        for number, member in enumerate(self._members):
            segment = member.segment
            places, slots = segment.find(ids)
            for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
                start = TIME_MIN if segment.live_from is None else int(segment.live_from[slot])
                until = member.ended.get(slot, TIME_MAX)
                if segment.live_until is not None:
                    until = min(until, int(segment.live_until[slot]))
                if start < until:
                    user_id = segment.users[slot].as_py()
                    known[place].append(Known((number, slot), user_id, start, until))
        return known

    def _end(self, ended: Mapping[tuple[int, int], int]) -> set[str]:
        for (number, slot), until in ended.items():
            self._members[number].ended[slot] = until
        return {self._members[number].ref.file for number, _ in ended}

    def _add(self, queries: pa.Table) -> None:
        """Build a segment of new queries, merged with the smaller segments before it."""
        start = len(self._members)
        total = queries.num_rows
        while start > 0 and self._members[start - 1].ref.size < TIER * total:
            start -= 1
            total += self._members[start].ref.size
        absorbed = [_survivors(member) for member in self._members[start:]]
        segment = build_segment(pa.concat_tables([*absorbed, queries]), self._rules.space)
        name = f"{self._next_file:010d}.seg"
        self._next_file += 1
        size = segment.size
        if self._keep:
            self._files.write(name, pack(segment))
            # The kernel can evict pages of the mapped copy, but not of the one in memory.
            segment = unpack(self._files.map(name))
        self._members[start:] = [_Member(SegmentRef(name, None, size), segment, {})]

    def _write_ended(self, touched: set[str], position: int) -> None:
        for member in self._members:
            if member.ref.file in touched:
                name = f"{Path(member.ref.file).stem}-{position}.seg"
                slots = np.fromiter(member.ended.keys(), np.int64, len(member.ended))
                until = np.fromiter(member.ended.values(), np.int64, len(member.ended))
                self._files.write(name, {"slots": slots, "until": until})
                member.ref = dataclasses.replace(member.ref, ended=name)


def _survivors(member: _Member) -> pa.Table:
    """Return the queries of a segment that a point may still match, with their end times."""
    queries = member.segment.queries()
    until = np.array(queries["live_until"].to_numpy())
    for slot, end in member.ended.items():
        until[slot] = min(until[slot], end)
    start = queries["live_from"].to_numpy()
    place = queries.schema.get_field_index("live_until")
    queries = queries.set_column(place, queries.schema.field(place), pa.array(until))
    return queries.filter(pa.array(until > start))
