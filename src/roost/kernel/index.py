"""The matching index: which live queries does each point of a block satisfy.

An index is a list of segments and, for each, the slots that have ended since it was written.
Matching a block is: sort it by cell, run the compiled loops over every segment and level, settle
what only GEOS can tell, and drop pairs whose query was not live at the point's event time or
whose predicate says no. Pairs come in chunks of bounded size, so a block with very many matches
never has to be held whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import shapely
from numba import njit
from numpy.typing import NDArray

from roost.kernel.boxes import CHUNK, match_boxes
from roost.kernel.cells import LEVELS, IndexGrid, SortedPoints, sort_points
from roost.kernel.segment import Segment
from roost.kernel.shapes import match_shapes
from roost.model import TIME_MAX, TIME_MIN, PointBlock
from roost.predicate import PredicateSet
from roost.space import Coordinates, Space

PAIRS_MAX = 1 << 18

# Slots that have ended with the event time from which they have: a mapping, or two arrays.
Ended = Mapping[int, int] | tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Matches of one segment. The arrays are views that the next chunk overwrites."""

    segment: Segment
    slots: NDArray[np.int32]
    rows: NDArray[np.int32]


@njit(cache=True, nogil=True)
def _keep_live(
    slots: NDArray[np.int32],
    rows: NDArray[np.int32],
    time: NDArray[np.int64],
    timed: NDArray[np.bool_],
    live_from: NDArray[np.int64],
    live_until: NDArray[np.int64],
) -> int:  # pragma: no cover - compiled
    kept = 0
    for i in range(slots.size):
        slot, row = slots[i], rows[i]
        slots[kept] = slot
        rows[kept] = row
        # Most queries have no times: one byte of a small table says so.
        if timed[slot]:
            kept += (live_from[slot] <= time[row]) & (time[row] < live_until[slot])
        else:
            kept += 1
    return kept


@dataclass
class _Member:
    """A segment with what has changed since it was written."""

    segment: Segment
    live_from: NDArray[np.int64] | None
    live_until: NDArray[np.int64] | None
    timed: NDArray[np.bool_] | None
    polygons: dict[int, shapely.Geometry] = field(default_factory=dict)
    predicates: tuple[pa.Schema, PredicateSet] | None = None

    @classmethod
    def of(cls, segment: Segment, ended: Ended) -> _Member:
        live_from, live_until = segment.live_from, segment.live_until
        if isinstance(ended, Mapping):
            slots = np.fromiter(ended.keys(), np.int64, len(ended))
            until = np.fromiter(ended.values(), np.int64, len(ended))
        else:
            slots, until = ended
        if slots.size:
            live_until = (
                np.full(segment.size, TIME_MAX, np.int64)
                if live_until is None
                else np.array(live_until)
            )
            live_until[slots] = np.minimum(live_until[slots], until)
        if live_from is None and live_until is not None:
            live_from = np.full(segment.size, TIME_MIN, np.int64)
        if live_until is None and live_from is not None:
            live_until = np.full(segment.size, TIME_MAX, np.int64)
        timed = None
        if live_from is not None and live_until is not None:
            timed = (live_from != TIME_MIN) | (live_until != TIME_MAX)
        return cls(segment, live_from, live_until, timed)

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
    """Live queries, ready to be matched with blocks of points.

    Parameters
    ----------
    space
        Bounds and coordinates that the segments were built for.
    segments
        Segments, each with the slots that ended since: slot to the first event time that the
        query is no longer live for.

    Attributes
    ----------
    checks
        Candidate tests made so far; with the matches it tells how selective the index is.
    """

    def __init__(self, space: Space, segments: Sequence[tuple[Segment, Ended]]) -> None:
        self.grid = IndexGrid.over(space.bounds)
        self.lonlat = space.coordinates is Coordinates.LONLAT
        self.members = [_Member.of(segment, ended) for segment, ended in segments]
        self.checks = 0
        longest = [
            postings.longest + 1
            for segment, _ in segments
            for postings in (segment.box_postings, segment.shape_postings)
            if postings is not None
        ]
        room = max([PAIRS_MAX, *longest])
        self._slots = np.empty(room, np.int32)
        self._rows = np.empty(room, np.int32)
        self._mask = np.empty(CHUNK, np.int16)

    @property
    def size(self) -> int:
        """Number of slots, ended ones included."""
        return sum(member.segment.size for member in self.members)

    def match(self, block: PointBlock) -> Iterator[Pairs]:
        """Yield every (query, point) pair of a block once, in chunks."""
        if block.size == 0 or not self.members:
            return
        points = sort_points(block.x, block.y, self.grid)
        for member in self.members:
            for count in self._candidates(member, points, block):
                kept = self._filter(member, count, block)
                if kept:
                    yield Pairs(member.segment, self._slots[:kept], self._rows[:kept])

    def _candidates(
        self, member: _Member, points: SortedPoints, block: PointBlock
    ) -> Iterator[int]:
        sorted_columns = (points.x, points.y, points.codes, points.order)
        boxes = member.segment.box_postings
        for level in range(LEVELS if boxes is not None else 0):
            assert boxes is not None
            first, last = int(boxes.level_start[level]), int(boxes.level_start[level + 1])
            cursor = np.array([0, first, 0, 0], np.int64)
            while first < last and cursor[0] < block.size:
                count = match_boxes(
                    level,
                    first,
                    last,
                    boxes.cells,
                    boxes.starts,
                    boxes.parts,
                    boxes.slots,
                    boxes.low_x,
                    boxes.high_x,
                    boxes.low_y,
                    boxes.high_y,
                    member.segment.boxes,
                    self.grid.edges_x,
                    self.grid.edges_y,
                    *sorted_columns,
                    cursor,
                    self._mask,
                    self._slots,
                    self._rows,
                )
                yield int(count)
            self.checks += int(cursor[2])
        shapes = member.segment.shape_postings
        for level in range(LEVELS if shapes is not None else 0):
            assert shapes is not None
            first, last = int(shapes.level_start[level]), int(shapes.level_start[level + 1])
            cursor = np.array([0, first, 0, 0], np.int64)
            while first < last and cursor[0] < block.size:
                cursor[3] = 0
                count = match_shapes(
                    level,
                    first,
                    last,
                    shapes.cells,
                    shapes.starts,
                    shapes.postings,
                    shapes.slots,
                    shapes.kinds,
                    shapes.circles,
                    shapes.first_row,
                    shapes.band_at,
                    shapes.band_start,
                    shapes.band_edges,
                    self.lonlat,
                    *sorted_columns,
                    cursor,
                    self._slots,
                    self._rows,
                )
                yield self._settle(member, count, block) if cursor[3] else count
            self.checks += int(cursor[2])

    def _settle(self, member: _Member, count: int, block: PointBlock) -> int:
        """Ask GEOS about the pairs that the compiled tests left open."""
        slots, rows = self._slots[:count], self._rows[:count]
        keep = slots >= 0
        open_pairs = np.flatnonzero(~keep)
        asked = -1 - slots[open_pairs]
        for slot in np.unique(asked).tolist():
            mine = open_pairs[asked == slot]
            where = rows[mine]
            keep[mine] = shapely.intersects_xy(member.polygon(slot), block.x[where], block.y[where])
        slots[open_pairs] = asked
        return self._compress(keep)

    def _filter(self, member: _Member, count: int, block: PointBlock) -> int:
        if member.timed is not None and count:
            assert member.live_from is not None and member.live_until is not None
            count = _keep_live(
                self._slots[:count],
                self._rows[:count],
                block.time,
                member.timed,
                member.live_from,
                member.live_until,
            )
        predicate = member.segment.predicate
        if predicate is None or not count:
            return count
        ids = predicate[self._slots[:count]]
        asked = np.flatnonzero(ids >= 0)
        if not asked.size:
            return count
        schema = pa.schema([(name, array.type) for name, array in block.attributes.items()])
        keep = np.ones(count, bool)
        keep[asked] = member.predicate_set(schema).evaluate(
            ids[asked], self._rows[asked], block.attributes
        )
        return self._compress(keep)

    def _compress(self, keep: NDArray[np.bool_]) -> int:
        kept = int(np.count_nonzero(keep))
        if kept < keep.size:
            self._slots[:kept] = self._slots[: keep.size][keep]
            self._rows[:kept] = self._rows[: keep.size][keep]
        return kept
