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
from roost.kernel.segment import Segment, or_full
from roost.kernel.shapes import match_shapes
from roost.model.arrays import Ints, frozen
from roost.model.records import TIME_MAX, TIME_MIN
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


class Times(NamedTuple):
    """Event times for which each slot is live, and whether they limit it at all."""

    live_from: Ints
    live_until: Ints
    timed: NDArray[np.bool_]


@njit(cache=True, nogil=True)  # pragma: no cover - compiled
def _keep_live(slots: Slots, rows: Slots, time: Ints, times: Times) -> int:
    """Move the pairs whose query is live at the point's time to the front; return their number."""
    live_from, live_until, timed = times
    kept = 0
    for i in range(slots.size):
        slot, row = slots[i], rows[i]
        slots[kept] = slot
        rows[kept] = row
        # Most queries are unlimited in time, which one byte of a small table shows.
        if timed[slot]:
            kept += (live_from[slot] <= time[row]) & (time[row] < live_until[slot])
        else:
            kept += 1
    return kept


@dataclass
class _LiveSegment:
    """A segment, the terminations since it was written, and parsed polygons and predicates."""

    segment: Segment
    times: Times | None
    polygons: dict[int, shapely.Geometry] = field(default_factory=dict)
    predicates: tuple[pa.Schema, PredicateSet] | None = None

    @classmethod
    def of(cls, segment: Segment, ended: Ended) -> _LiveSegment:
        if isinstance(ended, Mapping):
            slots = np.fromiter(ended.keys(), np.int64, len(ended))
            until = np.fromiter(ended.values(), np.int64, len(ended))
        else:
            slots, until = ended
        if not slots.size and segment.live_from is None and segment.live_until is None:
            return cls(segment, None)
        live_from = or_full(segment.live_from, segment.size, TIME_MIN)
        live_until = or_full(segment.live_until, segment.size, TIME_MAX)
        if slots.size:
            live_until = np.array(live_until)
            live_until[slots] = np.minimum(live_until[slots], until)
        timed = (live_from != TIME_MIN) | (live_until != TIME_MAX)
        return cls(segment, Times(frozen(live_from), frozen(live_until), timed))

    def polygon(self, slot: int) -> shapely.Geometry:
        if slot not in self.polygons:
            assert self.segment.wkb is not None
            geometry = shapely.from_wkb(self.segment.wkb[slot].as_py())
            shapely.prepare(geometry)
            self.polygons[slot] = geometry
        return self.polygons[slot]

    def predicate_set(self, schema: pa.Schema) -> PredicateSet:
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

    def __init__(self, space: Space, segments: Sequence[tuple[Segment, Ended]]) -> None:
        self.grid = IndexGrid.over(space.bounds)
        self.lonlat = space.coordinates is Coordinates.LONLAT
        self.segments = [segment for segment, _ in segments]
        self._live = [_LiveSegment.of(segment, ended) for segment, ended in segments]
        lists = [postings.starts for segment in self.segments for postings in segment.postings]
        longest = max((int(np.diff(starts).max(initial=0)) for starts in lists), default=0)
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
        for live in self._live:
            for count in self._candidates(live, points, block):
                kept = self._filter(live, count, block)
                if kept:
                    yield Pairs(live.segment, self._slots[:kept], self._rows[:kept])

    def _candidates(
        self, live: _LiveSegment, points: SortedPoints, block: PointBlock
    ) -> Iterator[int]:
        """Run the matching loops over all levels; yield the number of pairs in the buffers."""
        boxes, out = live.segment.boxes, self._buffers
        for lists in live.segment.postings:
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
                            count = self._resolve_unsure(live, count, block)
                    yield count
                self.checks += int(cursor[2])

    def _resolve_unsure(self, live: _LiveSegment, count: int, block: PointBlock) -> int:
        """Let GEOS decide the pairs that the compiled tests marked unsure."""
        slots, rows = self._slots[:count], self._rows[:count]
        keep = slots >= 0
        unsure = np.flatnonzero(~keep)
        polygons = -1 - slots[unsure]
        for slot in np.unique(polygons).tolist():
            mine = unsure[polygons == slot]
            where = rows[mine]
            keep[mine] = shapely.intersects_xy(live.polygon(slot), block.x[where], block.y[where])
        slots[unsure] = polygons
        return self._compress(keep)

    def _filter(self, live: _LiveSegment, count: int, block: PointBlock) -> int:
        if live.times is not None and count:
            pairs = (self._slots[:count], self._rows[:count])
            count = _keep_live(*pairs, frozen(block.time), live.times)
        predicate = live.segment.predicate
        if predicate is None or not count:
            return count
        ids = predicate[self._slots[:count]]
        conditional = np.flatnonzero(ids >= 0)
        if not conditional.size:
            return count
        schema = pa.schema([(name, array.type) for name, array in block.attributes.items()])
        keep = np.ones(count, bool)
        keep[conditional] = live.predicate_set(schema).evaluate(
            ids[conditional], self._rows[conditional], block.attributes
        )
        return self._compress(keep)

    def _compress(self, keep: NDArray[np.bool_]) -> int:
        kept = int(np.count_nonzero(keep))
        if kept < keep.size:
            self._slots[:kept] = self._slots[: keep.size][keep]
            self._rows[:kept] = self._rows[: keep.size][keep]
        return kept
