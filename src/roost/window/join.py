"""Window join: pairs of points of two streams that are near each other in space and time.

Both streams arrive as one: two predicates select the left and the right points, and a point may be
both. The result of a batch is every pair of a left and a right point within a distance and a time
of each other, both in the window, at least one of them new. So a pair is emitted exactly once.

Every segment of the batch is joined with every segment of the window: new left with older right,
new right with older left, and new left with new right of the same batch. A segment whose zones are
all too far or too old costs only a comparison of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit

from roost.errors import ConfigError, PredicateError
from roost.model.arrays import Floats, Ints, Mask, as_arrow, frozen
from roost.model.records import TIME_MAX
from roost.model.settings import JoinSettings
from roost.predicate import check, parse
from roost.window.evaluate import Live, on_live_side, satisfying
from roost.window.near import TURN_SLACK, near_chunks, reach_of, times_near
from roost.window.segment import ZONE_ROWS, PointColumns, Rows, WindowSegment, ZoneMaps, first_time


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """Settings of a join; raises :class:`ConfigError` if one is invalid.

    ``left`` and ``right`` are predicates that select the points of either side; None selects all. A
    point on both sides joins others from both, but never itself. ``distance`` (metres on lon/lat,
    coordinate units on a plane) and ``within`` (difference of event times) are inclusive maxima.
    """

    left: str | None
    right: str | None
    distance: float
    within: int

    def __post_init__(self) -> None:
        """Validate the settings."""
        self.check(None)
        distance, within = self.distance, self.within
        number = isinstance(distance, int | float) and not isinstance(distance, bool)
        if not number or not 0.0 <= distance < math.inf:
            raise ConfigError("join.distance", distance, "a finite number from 0 up")
        whole = isinstance(within, int) and not isinstance(within, bool)
        if not whole or not 0 <= within <= TIME_MAX:
            raise ConfigError("join.within", within, "a whole number from 0 up")

    def check(self, attributes: pa.Schema | None) -> None:
        """Check the predicates: their syntax and, if given, the attributes that they read.

        Raises :class:`ConfigError` with the key of the invalid predicate.
        """
        for key, predicate in (("join.left", self.left), ("join.right", self.right)):
            if predicate is not None:
                try:
                    parsed = parse(predicate)
                    if attributes is not None:
                        check(parsed, attributes)
                except PredicateError as error:
                    raise ConfigError(key, predicate, f"a predicate ({error})") from None

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory."""
        return asdict(self)


def join_spec(settings: JoinSettings, unit: int) -> JoinSpec | None:
    """Build the join of a run, None if it has none; ``unit`` is as for ``window_spec``."""
    if settings.distance is None or settings.within is None:
        return None
    within = round(settings.within * unit)
    return JoinSpec(settings.left, settings.right, settings.distance, within)


def join_schema(id_type: pa.DataType) -> pa.Schema:
    """Return the schema of joined pairs."""
    return pa.schema(
        [
            ("left_id", id_type),
            ("right_id", id_type),
            ("left_time", pa.int64()),
            ("right_time", pa.int64()),
            ("distance", pa.float64()),
        ]
    )


class _ZoneReach(NamedTuple):
    """Zones of a segment, with the coordinates and times that are near each."""

    boxes: Floats
    low_y: Floats
    high_y: Floats
    beside: Floats
    low_time: Ints
    high_time: Ints


@njit(cache=True, nogil=True)
def _mark_near(
    zones: _ZoneReach, others: ZoneMaps, lonlat: bool, mine: Mask, theirs: Mask
) -> None:  # pragma: no cover - compiled
    """Mark the zones of two segments that are near a zone of the other one."""
    boxes, low_y, high_y, beside, low_t, high_t = zones
    other_boxes, other_times = others
    for a in range(boxes.shape[0]):
        left, right = boxes[a, 0] - beside[a], boxes[a, 2] + beside[a]
        for b in range(other_boxes.shape[0]):
            if other_times[b, 1] < low_t[a] or other_times[b, 0] > high_t[a]:
                continue
            if other_boxes[b, 3] < low_y[a] or other_boxes[b, 1] > high_y[a]:
                continue
            if not lonlat or math.isinf(beside[a]):
                near = other_boxes[b, 2] >= left and other_boxes[b, 0] <= right
            else:
                # The ranges may overlap any number of turns of 360 degrees apart.
                last = math.floor((other_boxes[b, 2] - left) / 360.0 + TURN_SLACK)
                near = last >= math.ceil((other_boxes[b, 0] - right) / 360.0 - TURN_SLACK)
            if near:
                mine[a] = theirs[b] = True


def _near_zones(new: WindowSegment, other: WindowSegment, spec: JoinSpec) -> tuple[Mask, Mask]:
    """Return which zones of both segments may have pairs."""
    boxes, times = new.zone_boxes, new.zone_times
    reach = reach_of(boxes[:, 1], boxes[:, 3], float(spec.distance), new.lonlat)
    near_times = times_near(times[:, 0], times[:, 1], spec.within)
    zones = _ZoneReach(*map(frozen, (boxes, *reach, *near_times)))
    others = ZoneMaps(frozen(other.zone_boxes), frozen(other.zone_times))
    mine, theirs = np.zeros(len(boxes), bool), np.zeros(len(other.zone_boxes), bool)
    _mark_near(zones, others, new.lonlat, mine, theirs)
    return mine, theirs


def _live_rows(segment: WindowSegment, zones: Mask, live: Live) -> Rows:
    """Return the live rows of some zones."""
    since = first_time(live.time_after)
    if since is None:
        return np.empty(0, np.int64)
    zones = zones & (segment.zone_times[:, 1] >= since)
    rows = np.flatnonzero(np.repeat(zones, ZONE_ROWS)[: segment.size])
    return on_live_side(segment, rows[segment.time[rows] >= since], live)


def join_segment(
    new: WindowSegment,
    new_live: Live,
    other: WindowSegment,
    other_live: Live,
    spec: JoinSpec,
    *,
    same_batch: bool,
    same_segment: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Join a segment of the batch with one of the window; yield columns of ``join_schema``.

    A caller joins each segment of the batch with every segment of the window and of the batch (both
    ways round, and with itself); every pair is then found exactly once. If both segments are of the
    same batch, only new left points are joined with the other's right ones. ``same_segment`` is
    implied if they are the same object.
    """
    zones = _near_zones(new, other, spec)
    rows = _live_rows(new, zones[0], new_live)
    other_rows = _live_rows(other, zones[1], other_live)
    # Predicates of the new and of the other segment, and whether the new points are right ones.
    passes: list[tuple[str | None, str | None, tuple[bool, ...]]] = [
        (spec.left, spec.right, (False,))
    ]
    if not same_batch and spec.left == spec.right:
        # Both sides select the same points, so each pair found is a result both ways.
        passes = [(spec.left, spec.right, (False, True))]
    elif not same_batch:
        passes.append((spec.right, spec.left, (True,)))
    limits = (float(spec.distance), spec.within, new.lonlat)
    for predicate, other_predicate, ways in passes:
        mine = satisfying(new, rows, predicate)
        theirs = satisfying(other, other_rows, other_predicate)
        here = PointColumns(new.x[mine], new.y[mine], new.time[mine])
        there = PointColumns(other.x[theirs], other.y[theirs], other.time[theirs])
        for i, j, distances in near_chunks(here, there, *limits):
            one, two = mine[i], theirs[j]
            if same_segment or new is other:
                different = one != two
                one, two, distances = one[different], two[different], distances[different]
            for swapped in ways:
                pair = ((other, two), (new, one)) if swapped else ((new, one), (other, two))
                yield _joined(*pair, distances)


def _joined(
    left: tuple[WindowSegment, Rows], right: tuple[WindowSegment, Rows], distances: Floats
) -> pa.RecordBatch:
    sides = (left, right)
    columns = [
        *(segment.ids.take(as_arrow(rows)) for segment, rows in sides),
        *(as_arrow(segment.time[rows]) for segment, rows in sides),
        as_arrow(distances),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=join_schema(left[0].ids.type))
