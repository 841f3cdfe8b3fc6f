"""The set of live queries as versioned segments: what the log comes to at a position.

Registering adds a small segment; it never rebuilds a large one, unless the small ones together
have grown to a share of it (segments keep sizes that fall by ``TIER`` at least). Ending a query
adds its slot to a side file of its segment. Every version is recorded before it is used, so any
process can open any version that a batch may still need.
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
from roost.model import CIRCLE, TIME_MAX, TIME_MIN
from roost.space import Space
from roost.state.admission import Known, Refused, Rules, admit
from roost.state.fold import Eviction, Fold
from roost.state.guard_keeper import GuardKeeper
from roost.state.querylog import QueryLog
from roost.state.segments import map_arrays, write_arrays
from roost.state.store import IndexVersion, SegmentRef, Store

TIER = 4


def load_ended(folder: Path, ref: SegmentRef) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slots of a segment that have ended, with the event times from which they have."""
    if ref.ended is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    arrays = map_arrays(folder / ref.ended)
    return arrays["slots"], arrays["until"]


def open_index(folder: Path, refs: tuple[SegmentRef, ...], space: Space) -> Index:
    """Map the segments of a version."""
    members = [(unpack(map_arrays(folder / ref.file)), load_ended(folder, ref)) for ref in refs]
    return Index(space, members)


def _ended_of(folder: Path, ref: SegmentRef) -> dict[int, int]:
    slots, until = load_ended(folder, ref)
    return dict(zip(slots.tolist(), until.tolist(), strict=True))


@dataclass
class _Member:
    ref: SegmentRef
    segment: Segment
    ended: dict[int, int]


class QuerySet:
    """Live queries of a state directory at its newest folded position.

    Parameters
    ----------
    store
        Where versions are recorded.
    log
        Where requests come from.
    rules
        What admits them.
    keep
        Whether versions are recorded; an onlooker folds the log in memory only.
    keeper
        Who is blocked, and what counts the requests of each user; None admits everybody.
    """

    def __init__(
        self,
        store: Store,
        log: QueryLog,
        rules: Rules,
        *,
        keep: bool = True,
        keeper: GuardKeeper | None = None,
    ) -> None:
        self._keep = keep
        self.keeper = keeper
        self._store = store
        self._log = log
        self._rules = rules
        self._folder = store.segment_folder
        self._members: list[_Member] = []
        self._next_file = 0
        self.version = IndexVersion(0, 0, ())
        self._load(store.version_at(1 << 62) or self.version)

    def _load(self, version: IndexVersion) -> None:
        self.version = version
        self._members = [
            _Member(ref, unpack(map_arrays(self._folder / ref.file)), _ended_of(self._folder, ref))
            for ref in version.segments
        ]
        used = [int(path.stem.split("-")[0]) for path in self._folder.glob("*.seg")]
        self._next_file = max(used, default=0) + 1

    def advance(self, upto: int) -> IndexVersion:
        """Fold the log up to a position, or find the version that was folded there before."""
        if upto < self.version.position:
            version = IndexVersion(0, 0, ()) if upto == 0 else self._store.version_at(upto)
            assert version is not None, f"version of log position {upto} was dropped too early"
            assert version.position == upto, f"log position {upto} was passed over"
            return version
        if upto == self.version.position:
            return self.version
        first = self.version.rows
        fold = Fold(first) if self.keeper is None else self.keeper.fold(first)
        refused: list[Refused] = []
        touched: set[str] = set()
        for item in fold.parts(self._log.read(self.version.position, upto)):
            if isinstance(item, Eviction):
                touched |= self._evict(item.key)
                continue
            admission = admit(item.block, 0, self._rules, self.lookup).placed(item.positions)
            fold.count(item, admission)
            refused += admission.refused
            touched |= self._end(admission.ended)
            if admission.queries.num_rows:
                self._add(admission.queries)
        if self._keep:
            self._write_ended(touched, upto)
        tallies = () if self.keeper is None else self.keeper.took(fold)
        refused = sorted([*refused, *fold.letters()], key=lambda item: item.position)
        self.version = IndexVersion(
            upto,
            fold.rows,
            tuple(member.ref for member in self._members),
            tuple(dataclasses.astuple(item) for item in refused),
        )
        if self._keep:
            self._store.put_version(self.version, tallies)
        return self.version

    def _evict(self, key: int) -> set[str]:
        """End all queries of a user; returns the segments they are in."""
        assert self.keeper is not None, "only a guard evicts"
        keys_of = self.keeper.guard.keys_of
        ended = {
            (number, slot): TIME_MIN
            for number, member in enumerate(self._members)
            for slot in np.flatnonzero(keys_of(member.segment.users) == np.uint64(key)).tolist()
        }
        return self._end(ended)

    def refused_between(self, after: int, upto: int) -> list[Refused]:
        """Find the requests refused while folding ``(after, upto]``."""
        return [
            Refused(*fields)
            for version in self._store.versions_between(after, upto)
            for fields in version.refused
        ]

    def segments(self) -> Iterator[tuple[SegmentRef, Segment, dict[int, int]]]:
        """Yield each segment with its name and the slots that have ended."""
        for member in self._members:
            yield member.ref, member.segment, member.ended

    def bounds(self, limit: int) -> NDArray[np.float64]:
        """Bounds ``x0, y0, x1, y1`` of at most so many queries, for estimates."""
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
        """Number of queries in segments, ended ones included."""
        return sum(member.ref.size for member in self._members)

    def predicates(self, file: str) -> tuple[str, ...]:
        """Distinct predicate texts of a segment."""
        for member in self._members:
            if member.ref.file == file:
                return member.segment.predicate_texts
        return unpack(map_arrays(self._folder / file)).predicate_texts

    def lookup(self, ids: pa.Array) -> dict[int, list[Known]]:
        """Tell what is known of some identifiers, by their place in the array."""
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
        """Build a segment of new queries, joined with those it is large enough to absorb."""
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
            write_arrays(self._folder / name, pack(segment))
            # The system can drop the mapped copy under pressure, the built one it can not.
            segment = unpack(map_arrays(self._folder / name))
        self._members[start:] = [_Member(SegmentRef(name, None, size), segment, {})]

    def _write_ended(self, touched: set[str], position: int) -> None:
        for member in self._members:
            if member.ref.file in touched:
                name = f"{Path(member.ref.file).stem}-{position}.seg"
                slots = np.fromiter(member.ended.keys(), np.int64, len(member.ended))
                until = np.fromiter(member.ended.values(), np.int64, len(member.ended))
                write_arrays(self._folder / name, {"slots": slots, "until": until})
                member.ref = dataclasses.replace(member.ref, ended=name)


def _survivors(member: _Member) -> pa.Table:
    """Take the queries of a segment that some point may still match, with their ends written in."""
    queries = member.segment.queries()
    until = np.array(queries["live_until"].to_numpy())
    for slot, end in member.ended.items():
        until[slot] = min(until[slot], end)
    start = queries["live_from"].to_numpy()
    place = queries.schema.get_field_index("live_until")
    queries = queries.set_column(place, queries.schema.field(place), pa.array(until))
    return queries.filter(pa.array(until > start))
