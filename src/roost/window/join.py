"""Points of two streams that are near each other in space and time.

Both streams come in as one: two predicates tell which points are of the left and which of the
right, and a point may be both. At each batch the result is every pair of a left and a right point
that are within a distance and a time of each other, both in the window, at least one of them
new. A pair is found at the batch of its later half and never again.

Points stay where they are, so every segment of the batch is joined with every segment of the
window: new left with older right, new right with older left, and new left with new right of the
same batch. Each pair is then found exactly once. A segment whose zones are all too far or too
old costs a look at their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from roost.errors import ConfigError, PredicateError
from roost.kernel.arrays import as_arrow
from roost.model import TIME_MAX
from roost.predicate import check, parse
from roost.space import Coordinates
from roost.window.evaluate import Live, on_live_side, satisfying
from roost.window.grouped_loops import frozen
from roost.window.near import near_chunks, reach_of, times_near
from roost.window.segment import ZONE_ROWS, Rows, WindowSegment, first_time

TURN_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """Which points are joined.

    Parameters
    ----------
    left, right
        Predicates that say which points are on either side; None takes all. A point that is on
        both joins others from both, but never itself.
    distance
        Greatest distance, inclusive: metres on lon/lat, plain units on a plane.
    within
        Greatest difference of event times, inclusive.

    Raises
    ------
    ConfigError
        If a predicate does not parse or a limit is none.

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
        """Refuse what cannot be joined by."""
        for key, predicate in (("join.left", self.left), ("join.right", self.right)):
            if predicate is not None:
                try:
                    parse(predicate)
                except PredicateError as error:
                    raise ConfigError(key, predicate, f"a predicate ({error})") from None
        distance, within = self.distance, self.within
        number = isinstance(distance, int | float) and not isinstance(distance, bool)
        if not number or not 0.0 <= distance < math.inf:
            raise ConfigError("join.distance", distance, "a finite number from 0 up")
        whole = isinstance(within, int) and not isinstance(within, bool)
        if not whole or not 0 <= within <= TIME_MAX:
            raise ConfigError("join.within", within, "a whole number from 0 up")

    def check(self, attributes: pa.Schema) -> None:
        """Hold the predicates against the points' attributes.

        Raises
        ------
        ConfigError
            If one does not fit.
        """
        for key, predicate in (("join.left", self.left), ("join.right", self.right)):
            if predicate is not None:
                try:
                    check(parse(predicate), attributes)
                except PredicateError as error:
                    raise ConfigError(key, predicate, f"a predicate ({error})") from None

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state directory."""
        return {
            "left": self.left,
            "right": self.right,
            "distance": self.distance,
            "within": self.within,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JoinSpec:
        """Inverse of :meth:`to_json`."""
        return cls(data["left"], data["right"], data["distance"], data["within"])


def join_schema(id_type: pa.DataType) -> pa.Schema:
    """Columns of the joined pairs."""
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
    """Some joined pairs as rows.

    Parameters
    ----------
    left, right
        Row of each half. Left rows are of the new segment and right ones of the other, or, where
        it is ``swapped``, the other way round.
    distances
        How far the halves are apart.
    swapped
        Whether left rows are of the other segment.
    """

    left: Rows
    right: Rows
    distances: NDArray[np.float64]
    swapped: bool


@njit(cache=True, nogil=True)
def _mark_near(
    boxes: NDArray[np.float64],
    low_y: NDArray[np.float64],
    high_y: NDArray[np.float64],
    beside: NDArray[np.float64],
    low_t: NDArray[np.int64],
    high_t: NDArray[np.int64],
    other_boxes: NDArray[np.float64],
    other_times: NDArray[np.int64],
    lonlat: bool,
    mine: NDArray[np.bool_],
    theirs: NDArray[np.bool_],
) -> None:  # pragma: no cover - compiled
    """Mark the zones of two segments that are near some zone of the other."""
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
                # Whether the ranges meet any number of turns apart.
                last = math.floor((other_boxes[b, 2] - left) / 360.0 + TURN_SLACK)
                near = last >= math.ceil((other_boxes[b, 0] - right) / 360.0 - TURN_SLACK)
            if near:
                mine[a] = theirs[b] = True


def _near_zones(
    new: WindowSegment, other: WindowSegment, spec: JoinSpec
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Zones of both segments that may have pairs."""
    boxes, times = new.zone_boxes, new.zone_times
    lonlat = new.space.coordinates is Coordinates.LONLAT
    reach = reach_of(boxes[:, 1], boxes[:, 3], float(spec.distance), lonlat)
    near_times = times_near(times[:, 0], times[:, 1], spec.within)
    read = (boxes, *reach, *near_times, other.zone_boxes, other.zone_times)
    mine, theirs = np.zeros(len(boxes), bool), np.zeros(len(other.zone_boxes), bool)
    arguments: Any = (*map(frozen, read), lonlat, mine, theirs)
    _mark_near(*arguments)
    return mine, theirs


def _live_rows(segment: WindowSegment, zones: NDArray[np.bool_], live: Live) -> Rows:
    """Live rows of some zones."""
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
    """Join a segment of the batch with a segment of the window, as rows.

    Takes what :func:`join_segment` takes, and yields what it says.
    """
    zones = _near_zones(new, other, spec)
    rows = _live_rows(new, zones[0], new_live)
    other_rows = _live_rows(other, zones[1], other_live)
    passes: list[tuple[str | None, str | None, tuple[bool, ...]]] = [
        (spec.left, spec.right, (False,))
    ]
    if not same_batch and spec.left == spec.right:
        # Both sides are the same points: what is found once is a pair both ways.
        passes = [(spec.left, spec.right, (False, True))]
    elif not same_batch:
        passes.append((spec.right, spec.left, (True,)))
    lonlat = new.space.coordinates is Coordinates.LONLAT
    for predicate, other_predicate, ways in passes:
        mine = satisfying(new, rows, predicate)
        theirs = satisfying(other, other_rows, other_predicate)
        here = (new.x[mine], new.y[mine], new.time[mine])
        there = (other.x[theirs], other.y[theirs], other.time[theirs])
        limits = (float(spec.distance), spec.within, lonlat)
        for i, j, distances in near_chunks(*here, *there, *limits):
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

    Over all segments of the batch, each with all segments of the window and of the batch itself
    (with each of these both ways round, and with itself), every pair is found exactly once.

    Parameters
    ----------
    new, new_live
        A segment of the batch, and what of it is in the window.
    other, other_live
        Any segment of the window, and what of it is.
    spec
        What is joined.
    same_batch
        Whether the other segment is of the same batch: then only new left points are joined with
        its right ones, since the other way round is found when the two change places.
    same_segment
        Whether both are the same segment; need not be said where they are the same object.

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
