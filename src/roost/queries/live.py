"""The live queries at a log position, as versioned segments.

Registering adds a small segment. A large one is rebuilt only when the small ones together have
grown to a share of it (each segment is at least ``TIER`` times as large as the next). Terminating a
query adds its slot to a side file of its segment. Every version is recorded before it is used, so
any process can open any version that a batch may still require.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.kernel import (
    Index,
    OpenSegment,
    Segment,
    build_segment,
    order_by_place,
    pack,
    unpack,
)
from roost.model.records import CIRCLE, TIME_MAX, TIME_MIN, DeadLetter
from roost.model.space import Space
from roost.queries.admission import Known, Rules, admit
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
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Store

TIER = 4
ORDERED = 1 << 14
"""Queries from which a segment is in order of place; smaller ones have few pages anyway."""
OPEN_SEGMENT = "open segment"


def load_ended(files: Files, ref: SegmentRef) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the terminated slots of a segment, and the event times of termination."""
    if ref.ended is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    arrays = files.map(ref.ended)
    return arrays["slots"], arrays["until"]


def open_index(
    files: Files,
    refs: tuple[SegmentRef, ...],
    space: Space,
    cache: WorkerCache,
    *,
    sparse: bool = False,
) -> Index:
    """Open the index of a version; segments that an earlier version had stay open.

    ``sparse`` is for machines of a part of space: see :func:`roost.storage.files.map_arrays`.
    """
    opened = [open_segment(files, ref.file, cache, sparse=sparse) for ref in refs]
    live = {(files, ref.file, sparse) for ref in refs}
    cache.drop(OPEN_SEGMENT, lambda key: key[0] == files and key not in live)
    ended = (load_ended(files, ref) for ref in refs)
    return Index(space, list(zip(opened, ended, strict=True)))


def open_segment(files: Files, file: str, cache: WorkerCache, *, sparse: bool) -> OpenSegment:
    """Map a segment, unless the worker has done so."""

    def build() -> OpenSegment:
        return OpenSegment(unpack(files.map(file, sparse=sparse)))

    return cache.get(OPEN_SEGMENT, (files, file, sparse), build)


class LiveSegment(NamedTuple):
    """A segment of the live queries, with the end times of terminated slots."""

    ref: SegmentRef
    segment: Segment
    ended: dict[int, int]

    @classmethod
    def open(cls, files: Files, ref: SegmentRef) -> LiveSegment:
        """Map a segment of a recorded version."""
        slots, until = load_ended(files, ref)
        ended = dict(zip(slots.tolist(), until.tolist(), strict=True))
        return cls(ref, unpack(files.map(ref.file)), ended)

    def live_at(self, now: int) -> NDArray[np.bool_]:
        """Return whether the query of each slot is live at an event time."""
        live = np.ones(self.segment.size, np.bool_)
        if self.segment.live_until is not None:
            live &= self.segment.live_until > now
        live[[slot for slot, until in self.ended.items() if until <= now]] = False
        return live

    def survivors(self) -> pa.Table:
        """Return the queries that a point may still match, with their end times."""
        queries = self.segment.queries()
        until = np.array(queries["live_until"].to_numpy())
        for slot, end in self.ended.items():
            until[slot] = min(until[slot], end)
        start = queries["live_from"].to_numpy()
        column = queries.schema.get_field_index("live_until")
        queries = queries.set_column(column, queries.schema.field(column), pa.array(until))
        return queries.filter(pa.array(until > start))


class QuerySet:
    """Live queries of a state directory at the newest log position that was applied.

    With ``record`` false, versions are not recorded: a reader replays the log in memory only.
    ``guard`` blocks users and counts the requests of each; None admits all users.
    """

    def __init__(
        self,
        store: Store,
        log: QueryLog,
        rules: Rules,
        *,
        record: bool = True,
        guard: GuardState | None = None,
    ) -> None:
        self._record = record
        self.guard = guard
        self._store = store
        self._log = log
        self._rules = rules
        self._files = segment_files(store)
        self.version = version_at(store) or IndexVersion(0, 0, ())
        self.segments = [LiveSegment.open(self._files, ref) for ref in self.version.segments]
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
        replay = Replay(self.version.rows)
        if self.guard is not None:
            replay = Replay(self.version.rows, self.guard.guard, self.guard.now)
        refused: list[DeadLetter] = []
        touched: set[str] = set()
        for item in replay.parts(self._log.read(self.version.position, upto)):
            if isinstance(item, Eviction):
                touched |= self._evict(item.key)
                continue
            admission = admit(item.block, self._rules, self.lookup, item.positions)
            replay.count(item, admission)
            refused += admission.refused
            touched |= self._end(admission.ended)
            if admission.queries.num_rows:
                self._add(admission.queries)
        if self._record:
            self._write_ended(touched, upto)
        counted = [] if self.guard is None else self.guard.count(replay, record=self._record)
        refused = sorted([*refused, *replay.rejections()], key=lambda item: item.position)
        self.version = IndexVersion(
            upto,
            replay.rows,
            tuple(ref for ref, _, _ in self.segments),
            tuple(dataclasses.astuple(item) for item in refused),
        )
        if self._record:
            self._store.record(self.version.fact(), *counted)
        return self.version

    def _evict(self, key: int) -> set[str]:
        """Terminate all queries of a user; returns the segments they are in."""
        assert self.guard is not None, "only a guard evicts"
        keys_of = self.guard.guard.keys_of
        ended = {
            (number, slot): TIME_MIN
            for number, (_, segment, _) in enumerate(self.segments)
            for slot in np.flatnonzero(keys_of(segment.users) == np.uint64(key)).tolist()
        }
        return self._end(ended)

    def refused_between(self, after: int, upto: int) -> list[DeadLetter]:
        """Return the requests refused in ``(after, upto]``."""
        return [
            DeadLetter(*fields)
            for version in versions_between(self._store, after, upto)
            for fields in version.refused
        ]

    def bounds(self, limit: int) -> NDArray[np.float64]:
        """Return the bounds ``x0, y0, x1, y1`` of a sample of queries, for estimates."""
        found = [np.empty((0, 4))]
        step = max(1, -(-self.size // limit))
        for _, segment, _ in self.segments:
            boxes = np.array(segment.boxes[::step])
            circle = segment.kinds[::step] == CIRCLE
            boxes[circle, 2:] = boxes[circle, :2]
            found.append(boxes)
        return np.concatenate(found)

    @property
    def size(self) -> int:
        """Number of queries in segments, including terminated ones."""
        return sum(ref.size for ref, _, _ in self.segments)

    def predicates(self, file: str) -> tuple[str, ...]:
        """Return the distinct predicate texts of a segment."""
        for ref, segment, _ in self.segments:
            if ref.file == file:
                return segment.predicate_texts
        return unpack(self._files.map(file)).predicate_texts

    def lookup(self, ids: pa.Array) -> dict[int, list[Known]]:
        """Return the earlier queries of some identifiers, by index in the array."""
        known: dict[int, list[Known]] = defaultdict(list)
        for number, (_, segment, ended) in enumerate(self.segments):
            indices, slots = segment.find(ids)
            for index, slot in zip(indices.tolist(), slots.tolist(), strict=True):
                start = TIME_MIN if segment.live_from is None else int(segment.live_from[slot])
                until = ended.get(slot, TIME_MAX)
                if segment.live_until is not None:
                    until = min(until, int(segment.live_until[slot]))
                if start < until:
                    user_id = segment.users[slot].as_py()
                    known[index].append(Known((number, slot), user_id, start, until))
        for lives in known.values():
            # Each life ends before the next begins; slots need not be in order of registration.
            lives.sort(key=lambda life: life.live_from)
        return known

    def _end(self, ended: Mapping[tuple[int, int], int]) -> set[str]:
        for (number, slot), until in ended.items():
            self.segments[number].ended[slot] = until
        return {self.segments[number].ref.file for number, _ in ended}

    def _add(self, queries: pa.Table) -> None:
        """Build a segment of new queries, merged with the smaller segments before it."""
        start = len(self.segments)
        total = queries.num_rows
        while start > 0 and self.segments[start - 1].ref.size < TIER * total:
            start -= 1
            total += self.segments[start].ref.size
        absorbed = [live.survivors() for live in self.segments[start:]]
        merged = pa.concat_tables([*absorbed, queries])
        if total >= ORDERED:
            merged = order_by_place(merged, self._rules.space)
        segment = build_segment(merged, self._rules.space)
        ref = SegmentRef(f"{self._next_file:010d}.seg", None, segment.size)
        self._next_file += 1
        if self._record:
            self._files.write(ref.file, pack(segment))
            # The kernel can evict pages of the mapped copy, but not of the one in memory.
            segment = unpack(self._files.map(ref.file))
        self.segments[start:] = [LiveSegment(ref, segment, {})]

    def _write_ended(self, touched: set[str], position: int) -> None:
        for number, (ref, segment, ended) in enumerate(self.segments):
            if ref.file in touched:
                name = f"{Path(ref.file).stem}-{position}.seg"
                slots = np.fromiter(ended.keys(), np.int64, len(ended))
                until = np.fromiter(ended.values(), np.int64, len(ended))
                self._files.write(name, {"slots": slots, "until": until})
                changed = dataclasses.replace(ref, ended=name)
                self.segments[number] = LiveSegment(changed, segment, ended)
