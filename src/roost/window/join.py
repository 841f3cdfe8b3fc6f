"""Window join: pairs of points of two streams that are near each other in space and time.

Both streams arrive as one: two predicates select the left and the right points, and a point may be
both. The result of a batch is every pair of a left and a right point within a distance and a time
of each other, both in the window, at least one of them new. A pair is emitted at the batch of its
later point and never again.

Points are not moved, so every segment of the batch is joined with every segment of the window: new
left with older right, new right with older left, and new left with new right of the same batch.
Each pair is therefore found exactly once. A segment whose zones are all too far or too old costs
only a comparison of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from roost.errors import ConfigError, PredicateError
from roost.model.arrays import as_arrow
from roost.model.records import TIME_MAX
from roost.model.settings import JoinSettings
from roost.model.space import Coordinates
from roost.predicate import check, parse
from roost.window.evaluate import Live, on_live_side, satisfying
from roost.window.grouped_loops import frozen
from roost.window.near import near_chunks, reach_of, times_near
from roost.window.segment import (
    ZONE_ROWS,
    PointColumns,
    Rows,
    WindowSegment,
    ZoneMaps,
    first_time,
)

TURN_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """Settings of a join.

    Parameters
    ----------
    left, right
        Predicates that select the points of either side; None selects all. A point on both sides
        joins others from both, but never itself.
    distance
        Maximum distance, inclusive: metres on lon/lat, coordinate units on a plane.
    within
        Maximum difference of event times, inclusive.

    Raises
    ------
    ConfigError
        If a predicate does not parse or a limit is invalid.

    Examples
    --------
    >>> JoinSpec("kind = 'taxi'", "kind = 'rider'", 200.0, 60_000_000).distance
    200.0
    """

    left: str | None
    right: str | None
    distance: float
    within: int

    def __post_init__(self) -> None:
        """Validate the settings."""
        self._check_predicates(None)
        distance, within = self.distance, self.within
        number = isinstance(distance, int | float) and not isinstance(distance, bool)
        if not number or not 0.0 <= distance < math.inf:
            raise ConfigError("join.distance", distance, "a finite number from 0 up")
        whole = isinstance(within, int) and not isinstance(within, bool)
        if not whole or not 0 <= within <= TIME_MAX:
            raise ConfigError("join.within", within, "a whole number from 0 up")

    def check(self, attributes: pa.Schema) -> None:
        """Check the predicates against the points' attributes.

        Raises
        ------
        ConfigError
            If a predicate names an unknown attribute or does not fit its type.
        """
        self._check_predicates(attributes)

    def _check_predicates(self, attributes: pa.Schema | None) -> None:
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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JoinSpec:
        """Invert :meth:`to_json`."""
        return cls(**data)


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


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """A chunk of joined pairs, as row numbers.

    Parameters
    ----------
    left, right
        Rows of the new segment and of the other one; the other way round if ``swapped``.
    distances
        Distance of each pair.
    swapped
        Whether left rows are of the other segment.
    """

    left: Rows
    right: Rows
    distances: NDArray[np.float64]
    swapped: bool


class _ZoneReach(NamedTuple):
    """Zones of a segment, with the coordinates and times that are near each."""

    boxes: NDArray[np.float64]
    low_y: NDArray[np.float64]
    high_y: NDArray[np.float64]
    beside: NDArray[np.float64]
    low_time: NDArray[np.int64]
    high_time: NDArray[np.int64]


@njit(cache=True, nogil=True)
def _mark_near(
    zones: _ZoneReach,
    others: ZoneMaps,
    lonlat: bool,
    mine: NDArray[np.bool_],
    theirs: NDArray[np.bool_],
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


def _near_zones(
    new: WindowSegment, other: WindowSegment, spec: JoinSpec
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which zones of both segments may have pairs."""
    boxes, times = new.zone_boxes, new.zone_times
    lonlat = new.space.coordinates is Coordinates.LONLAT
    reach = reach_of(boxes[:, 1], boxes[:, 3], float(spec.distance), lonlat)
    near_times = times_near(times[:, 0], times[:, 1], spec.within)
    zones = _ZoneReach(*map(frozen, (boxes, *reach, *near_times)))
    others = ZoneMaps(frozen(other.zone_boxes), frozen(other.zone_times))
    mine, theirs = np.zeros(len(boxes), bool), np.zeros(len(other.zone_boxes), bool)
    _mark_near(zones, others, lonlat, mine, theirs)
    return mine, theirs


def _live_rows(segment: WindowSegment, zones: NDArray[np.bool_], live: Live) -> Rows:
    """Return the live rows of some zones."""
    since = first_time(live.time_after)
    if since is None:
        return np.empty(0, np.int64)
    zones = zones & (segment.zone_times[:, 1] >= since)
    rows = np.flatnonzero(np.repeat(zones, ZONE_ROWS)[: segment.size])
    return on_live_side(segment, rows[segment.time[rows] >= since], live)


def join_rows(
    new: WindowSegment,
    new_live: Live,
    other: WindowSegment,
    other_live: Live,
    spec: JoinSpec,
    *,
    same_batch: bool,
    same_segment: bool = False,
) -> Iterator[JoinedRows]:
    """Join a segment of the batch with a segment of the window; yield row numbers.

    The parameters are those of :func:`join_segment`.
    """
    zones = _near_zones(new, other, spec)
    rows = _live_rows(new, zones[0], new_live)
    other_rows = _live_rows(other, zones[1], other_live)
    passes: list[tuple[str | None, str | None, tuple[bool, ...]]] = [
        (spec.left, spec.right, (False,))
    ]
    if not same_batch and spec.left == spec.right:
        # Both sides select the same points, so each pair found is a result both ways.
        passes = [(spec.left, spec.right, (False, True))]
    elif not same_batch:
        passes.append((spec.right, spec.left, (True,)))
    lonlat = new.space.coordinates is Coordinates.LONLAT
    for predicate, other_predicate, ways in passes:
        mine = satisfying(new, rows, predicate)
        theirs = satisfying(other, other_rows, other_predicate)
        here = PointColumns(new.x[mine], new.y[mine], new.time[mine])
        there = PointColumns(other.x[theirs], other.y[theirs], other.time[theirs])
        limits = (float(spec.distance), spec.within, lonlat)
        for i, j, distances in near_chunks(here, there, *limits):
            one, two = mine[i], theirs[j]
            if same_segment or new is other:
                apart = one != two
                one, two, distances = one[apart], two[apart], distances[apart]
            for swapped in ways:
                left, right = (two, one) if swapped else (one, two)
                yield JoinedRows(left, right, distances, swapped)


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
    """Join a segment of the batch with a segment of the window.

    A caller joins each segment of the batch with every segment of the window and of the batch
    (both ways round, and with itself); every pair is then found exactly once.

    Parameters
    ----------
    new, new_live
        A segment of the batch, and its live rows.
    other, other_live
        Any segment of the window, and its live rows.
    spec
        Settings of the join.
    same_batch
        Whether the other segment is of the same batch: then only new left points are joined with
        its right ones; the caller swaps the segments for the reverse direction.
    same_segment
        Whether both are the same segment; implied if they are the same object.

    Yields
    ------
    pyarrow.RecordBatch
        Pairs in chunks, with the columns of :func:`join_schema`.

    Raises
    ------
    PredicateError
        If a predicate does not fit the attributes.
    """
    schema = join_schema(new.ids.type)
    roles = {"same_batch": same_batch, "same_segment": same_segment}
    for pairs in join_rows(new, new_live, other, other_live, spec, **roles):
        left, right = (other, new) if pairs.swapped else (new, other)
        columns = [
            left.ids.take(as_arrow(pairs.left)),
            right.ids.take(as_arrow(pairs.right)),
            as_arrow(left.time[pairs.left]),
            as_arrow(right.time[pairs.right]),
            as_arrow(pairs.distances),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
