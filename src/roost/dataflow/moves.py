"""Moves of buckets between machines: typed values, their event times, and the cheaper protocol.

A bucket moves in one of two ways. *State recreation*: the new owner reads the bucket's slices of
the state when its first batch begins, and gets all tuples from then on. *Window recreation*: no
state is read; the old owner computes the windows that begin before an event time, ``switch``, and
the new owner the others, so tuples of both go to both machines for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roost.dataflow.operators import Aggregate, Join, Product, WindowBy
from roost.dataflow.schema import Node


class Recreation(StrEnum):
    """How a new owner gets the state of a bucket."""

    STATE = "state"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class BucketMove:
    """A bucket that gets a new owner; state recreation has no event times.

    ``start`` is at least the newest event time of any batch before the map's first. Windows that
    begin before ``switch``, and pairs whose earlier tuple is before it, are the old owner's. Tuples
    before ``switch`` go to the old owner, from ``end`` on to the new one, between them to both.
    """

    bucket: int
    old: int
    new: int
    protocol: Recreation
    reason: str
    start: int | None = None
    switch: int | None = None
    end: int | None = None

    @property
    def times(self) -> tuple[int, int]:
        """Switch and end of window recreation."""
        assert self.switch is not None and self.end is not None
        return self.switch, self.end

    def to_json(self) -> list[Any]:
        """Return the move as JSON."""
        return [
            self.bucket,
            self.old,
            self.new,
            self.protocol.value,
            self.reason,
            self.start,
            self.switch,
            self.end,
        ]

    @classmethod
    def from_json(cls, data: Any) -> BucketMove:
        """Invert :meth:`to_json`."""
        bucket, old, new, protocol, *rest = data
        return cls(bucket, old, new, Recreation(protocol), *rest)


@dataclass(frozen=True)
class MapChange:
    """Decision of a policy: give buckets of a subquery to other machines.

    ``machines`` is their number from then on, if it changes; without a ``protocol``, each move uses
    the cheaper one. Buckets of a machine that leaves always move by state recreation.
    """

    subquery: str
    owners: Mapping[int, int]  # new machine by bucket
    reason: str
    machines: int | None = None
    protocol: Recreation | None = None


def has_time_windows(node: Node) -> bool:
    """Return whether buckets of an operator may move by window recreation."""
    operator = node.operator
    assert isinstance(operator, Aggregate | Join | Product)
    return operator.window.by is WindowBy.TIME


def window_times(node: Node, start: int) -> tuple[int, int]:
    """Return switch and end of a move by window recreation.

    Windows of an Aggregate begin at multiples of the advance. The pairs of a Join or Product whose
    earlier tuple is at ``start`` end before ``start`` plus the size.
    """
    assert node.size is not None
    if not isinstance(node.operator, Aggregate):
        return start + 1, start + node.size
    assert node.advance is not None
    last = start // node.advance * node.advance  # start of the last window of the old owner
    return last + node.advance, last + node.size


def planned_move(
    node: Node,
    bucket: int,
    owners: tuple[int, int],
    protocol: Recreation,
    newest: int | None,
    reason: str,
) -> BucketMove:
    """Return the move of a bucket between two owners, old and new.

    ``newest`` is the newest event time so far on any input of the operator. Without one, no tuple
    has arrived, and there is no state to read.
    """
    if protocol is Recreation.STATE or newest is None:
        return BucketMove(bucket, *owners, Recreation.STATE, reason)
    return BucketMove(bucket, *owners, protocol, reason, newest, *window_times(node, newest))


# --------------------------------------------------------------------------- the cheaper protocol


@dataclass(frozen=True)
class MoveForecast:
    """What the cost of a move is predicted from; seconds are of the batches' clock."""

    state_bytes: float  # of the bucket
    read_speed: float  # bytes per second that are not in memory
    tuples_per_s: float  # of the bucket
    tuple_bytes: float
    batch_s: float  # from one batch to the next
    window_s: float  # until the watermark passes ``end``; infinite if it does not advance
    shared_s: float  # in which tuples go to both owners

    def cost(self, protocol: Recreation) -> float:
        """Return the seconds until the move is complete, plus its bytes at the read speed.

        A move is complete at the end of a batch: state recreation with the new owner's first one,
        window recreation with the one that closes the last window of the old owner. Its bytes are
        the state that is read, or the tuples that are sent twice.
        """
        if protocol is Recreation.STATE:
            return self.batch_s + self.state_bytes / self.read_speed
        if math.isinf(self.window_s):
            return math.inf
        batches = max(math.ceil(self.window_s / self.batch_s), 1) if self.batch_s else 1
        twice = self.tuples_per_s * self.shared_s * self.tuple_bytes
        return max(batches * self.batch_s, self.window_s) + twice / self.read_speed


def cheaper(forecast: MoveForecast) -> Recreation:
    """Return the protocol that costs less; of equal ones, the one that is complete at once.

    Examples
    --------
    >>> small = MoveForecast(1e4, 1e9, 100.0, 50.0, batch_s=1.0, window_s=5.0, shared_s=4.0)
    >>> large = MoveForecast(9e9, 1e9, 100.0, 50.0, batch_s=1.0, window_s=5.0, shared_s=4.0)
    >>> cheaper(small).value, cheaper(large).value
    ('state', 'window')
    """
    return min(Recreation, key=forecast.cost)
