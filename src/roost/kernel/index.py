"""Matching index: finds the live queries that each point of a block satisfies.

An index is a list of segments and, for each, the slots terminated since it was written. To match
a block, it sorts the points by cell, runs the compiled loops over every segment and level, lets
GEOS decide unsure pairs, and drops pairs whose query was not live at the point's event time or
whose predicate is not true. Pairs come in chunks of bounded size, so memory does not grow with the
number of matches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import shapely
from numba import njit
from numpy.typing import NDArray

from roost.kernel.boxes import CHUNK, BoxPostings, PairBuffers, Slots, match_boxes
from roost.kernel.cells import LEVELS, IndexGrid, SortedPoints, sort_points
from roost.kernel.segment import Segment
from roost.kernel.shapes import match_shapes
from roost.model.arrays import Ints, frozen
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Space
from roost.predicate import PredicateSet

PAIRS_MAX = 1 << 18

# Terminated slots with the first event time for which they are not live: a mapping or two arrays.
Ended = Mapping[int, int] | tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Matches of one segment; the arrays are views that the next chunk overwrites."""

    segment: Segment
    slots: Slots
    rows: Slots


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _place(slot: int, table: Ints) -> int:
    """Return the place of a slot in a hash table, or the free place where it belongs."""
    place = slot & (table.size - 1)
    while table[place] >= 0 and table[place] != slot:
        place = (place + 1) & (table.size - 1)
    return place


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _fill(slots: Ints, until: Ints, table: Ints, table_until: Ints) -> None:
    """Enter slots and their times into an empty hash table."""
    for i in range(slots.size):
        place = _place(slots[i], table)
        table[place] = slots[i]
        table_until[place] = until[i]


class Times(NamedTuple):
    """Event times for which slots are live: those of the segment, and of later terminations.

    An array is empty if it limits no slot. ``has_ended`` has a byte for each slot, of pages that
    the system provides only where a query was terminated. ``ended`` is a hash table of these slots,
    with free places of -1; ``ended_until`` has the event time of termination at the same place.
    """

    timed: NDArray[np.bool_]
    live_from: Ints
    live_until: Ints
    has_ended: NDArray[np.bool_]
    ended: Ints
    ended_until: Ints

    @classmethod
    def of(cls, segment: Segment, ended: Ended) -> Times | None:
        """Return the times of a segment, or None if nothing limits its queries."""
        if isinstance(ended, Mapping):
            slots = frozen(np.fromiter(ended.keys(), np.int64, len(ended)))
            until = frozen(np.fromiter(ended.values(), np.int64, len(ended)))
        else:
            slots, until = frozen(ended[0]), frozen(ended[1])
        if segment.timed is None and not slots.size:
            return None
        table = np.full(2 << int(slots.size).bit_length(), -1, np.int64)
        table_until = np.empty(table.size, np.int64)
        _fill(slots, until, table, table_until)
        has_ended = np.zeros(segment.size if slots.size else 0, np.bool_)
        has_ended[slots] = True
        nothing = np.empty(0, np.int64)
        return cls(
            frozen(np.empty(0, np.bool_) if segment.timed is None else segment.timed),
            frozen(nothing if segment.live_from is None else segment.live_from),
            frozen(nothing if segment.live_until is None else segment.live_until),
            frozen(has_ended),
            frozen(table),
            frozen(table_until),
        )


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _keep_live(slots: Slots, rows: Slots, time: Ints, times: Times) -> int:
    """Move the pairs whose query is live at the point's time to the front; return their number."""
    timed, live_from, live_until, has_ended, ended, ended_until = times
    kept = 0
    for i in range(slots.size):
        slot, row = slots[i], rows[i]
        slots[kept] = slot
        rows[kept] = row
        live = True
        # Most queries are unlimited in time, which one byte of a small table shows.
        if timed.size and timed[slot]:
            live = (live_from.size == 0 or live_from[slot] <= time[row]) and (
                live_until.size == 0 or time[row] < live_until[slot]
            )
        if has_ended.size and has_ended[slot]:
            live &= time[row] < ended_until[_place(slot, ended)]
        kept += live
    return kept


@dataclass
class OpenSegment:
    """A segment with parsed polygons and predicates, which versions of the index share."""

    segment: Segment
    polygons: dict[int, shapely.Geometry] = field(default_factory=dict)
    predicates: tuple[pa.Schema, PredicateSet] | None = None

    def polygon(self, slot: int) -> shapely.Geometry:
        """Return the prepared polygon of a slot."""
        if slot not in self.polygons:
            assert self.segment.wkb is not None
            geometry = shapely.from_wkb(self.segment.wkb[slot].as_py())
            shapely.prepare(geometry)
            self.polygons[slot] = geometry
        return self.polygons[slot]

    def predicate_set(self, schema: pa.Schema) -> PredicateSet:
        """Return the predicates, parsed for attributes of a schema."""
        if self.predicates is None or self.predicates[0] != schema:
            self.predicates = (schema, PredicateSet(self.segment.predicate_texts, schema))
        return self.predicates[1]


class Index:
    """Live queries, indexed for matching with blocks of points.

    Attributes
    ----------
    checks
        Candidate tests so far; matches divided by checks is the selectivity of the index.
    """

    def __init__(
        self, space: Space, segments: Sequence[tuple[Segment | OpenSegment, Ended]]
    ) -> None:
        self.grid = IndexGrid.over(space.bounds)
        self.lonlat = space.coordinates is Coordinates.LONLAT
        self._live: list[tuple[OpenSegment, Times | None]] = []
        for found, ended in segments:
            opened = OpenSegment(found) if isinstance(found, Segment) else found
            self._live.append((opened, Times.of(opened.segment, ended)))
        self.segments = [opened.segment for opened, _ in self._live]
        longest = max((segment.longest_list for segment in self.segments), default=0)
        self._room = max(PAIRS_MAX, longest + 1)
        self._reset()

    def _reset(self) -> None:
        self.checks = 0
        self._slots = np.empty(self._room, np.int32)
        self._rows = np.empty(self._room, np.int32)
        self._buffers = PairBuffers(self._slots, self._rows, np.empty(CHUNK, np.int16))

    def for_task(self) -> Index:
        """Return an index of the same queries with buffers and a counter of its own.

        Tasks share what a worker caches, and may not change it.
        """
        made = copy.copy(self)
        made._reset()
        return made

    def match(self, block: PointBlock) -> Iterator[Pairs]:
        """Yield every (query, point) pair of a block once, in chunks."""
        if block.size == 0 or not self.segments:
            return
        points = sort_points(block.x, block.y, self.grid)
        for opened, times in self._live:
            for count in self._candidates(opened, points, block):
                kept = self._filter(opened, times, count, block)
                if kept:
                    yield Pairs(opened.segment, self._slots[:kept], self._rows[:kept])

    def _candidates(
        self, opened: OpenSegment, points: SortedPoints, block: PointBlock
    ) -> Iterator[int]:
        """Run the matching loops over all levels; yield the number of pairs in the buffers."""
        boxes, out = opened.segment.boxes, self._buffers
        for lists in opened.segment.postings:
            for level in range(LEVELS):
                first, last = lists.level_start[level : level + 2].tolist()
                cursor = np.array([0, first, 0, 0], np.int64)
                while first < last and cursor[0] < block.size:
                    if isinstance(lists, BoxPostings):
                        args = (lists, boxes, self.grid, points, cursor, out)
                        count = int(match_boxes(level, last, *args))
                    else:
                        cursor[3] = 0
                        rest = (lists, self.lonlat, points, cursor, out)
                        count = int(match_shapes(level, last, *rest))
                        if cursor[3]:
                            count = self._resolve_unsure(opened, count, block)
                    yield count
                self.checks += int(cursor[2])

    def _resolve_unsure(self, opened: OpenSegment, count: int, block: PointBlock) -> int:
        """Let GEOS decide the pairs that the compiled tests marked unsure."""
        slots, rows = self._slots[:count], self._rows[:count]
        keep = slots >= 0
        unsure = np.flatnonzero(~keep)
        polygons = -1 - slots[unsure]
        for slot in np.unique(polygons).tolist():
            mine = unsure[polygons == slot]
            where = rows[mine]
            keep[mine] = shapely.intersects_xy(opened.polygon(slot), block.x[where], block.y[where])
        slots[unsure] = polygons
        return self._compress(keep)

    def _filter(
        self, opened: OpenSegment, times: Times | None, count: int, block: PointBlock
    ) -> int:
        if times is not None and count:
            pairs = (self._slots[:count], self._rows[:count])
            count = _keep_live(*pairs, frozen(block.time), times)
        predicate = opened.segment.predicate
        if predicate is None or not count:
            return count
        ids = predicate[self._slots[:count]]
        conditional = np.flatnonzero(ids >= 0)
        if not conditional.size:
            return count
        schema = pa.schema([(name, array.type) for name, array in block.attributes.items()])
        keep = np.ones(count, bool)
        keep[conditional] = opened.predicate_set(schema).evaluate(
            ids[conditional], self._rows[conditional], block.attributes
        )
        return self._compress(keep)

    def _compress(self, keep: NDArray[np.bool_]) -> int:
        kept = int(np.count_nonzero(keep))
        if kept < keep.size:
            self._slots[:kept] = self._slots[: keep.size][keep]
            self._rows[:kept] = self._rows[: keep.size][keep]
        return kept
