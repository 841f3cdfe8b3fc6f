"""Number of live queries by cell, updated as queries come and go.

The global planner reads it every round. Only segments and slots that have changed since the
previous round are counted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.kernel import Segment
from roost.model.space import Space
from roost.queries.versions import SegmentRef
from roost.workload import EulerHistogram, query_ranges


@dataclass
class _Counted:
    owners: NDArray[np.int64]
    ranges: NDArray[np.int32]
    counted: NDArray[np.bool_]  # by slot


class QueryCounts:
    """Histogram of the live queries of a version.

    Parameters
    ----------
    space
        Bounds and grid.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._segments: dict[str, _Counted] = {}
        self.histogram = EulerHistogram(space.columns, space.rows)

    def update(
        self, members: Iterable[tuple[SegmentRef, Segment, dict[int, int]]], now: int
    ) -> EulerHistogram:
        """Count the queries of these segments that are live at an event time."""
        seen: set[str] = set()
        for ref, segment, ended in members:
            seen.add(ref.file)
            known = self._segments.get(ref.file)
            if known is None:
                owners, bounds = segment.bounds(self._space)
                ranges = query_ranges(self._space.grid, bounds)
                known = _Counted(owners, ranges, np.zeros(segment.size, np.bool_))
                self._segments[ref.file] = known
            self._count(known, _live_slots(segment, ended, now))
        for file in set(self._segments) - seen:
            known = self._segments.pop(file)
            self._count(known, np.zeros_like(known.counted))
        return self.histogram

    def _count(self, known: _Counted, live: NDArray[np.bool_]) -> None:
        for sign, changed in ((1, live & ~known.counted), (-1, known.counted & ~live)):
            if changed.any():
                self.histogram.add(known.ranges[changed[known.owners]], sign)
        known.counted = live


def _live_slots(segment: Segment, ended: dict[int, int], now: int) -> NDArray[np.bool_]:
    live = np.ones(segment.size, np.bool_)
    if segment.live_until is not None:
        live &= segment.live_until > now
    slots = [slot for slot, until in ended.items() if until <= now]
    live[slots] = False
    return live
