"""What a window is, and what of it is live at a batch.

A window is a rule about which of the points so far count: those of the last hour, the last
million, or the last gigabyte; or, where it tumbles, those since the last full hour, million or
gigabyte. It is decided from a few facts about each batch, never from the points, and every rule
only ever moves forward: what has left a window never comes back. So what is not live at a batch
may be deleted.

One thing facts cannot tell. A count may cut through the middle of a batch; which of its points
stay is then settled where the points are (see :mod:`roost.window.evaluate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roost.errors import ConfigError
from roost.model import TIME_MIN


class WindowKind(StrEnum):
    """What a window's length is counted in."""

    TIME = "time"  # units of event time
    COUNT = "count"  # points
    BYTES = "bytes"  # of stored window data, in whole batches


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A rule about which points count.

    Parameters
    ----------
    kind
        What the length is counted in.
    length
        How much the window holds.
    tumbling
        Whether the window begins anew at each multiple of its length, instead of sliding.
    lateness
        How far behind the newest event time of the batches before it a point may come; windows
        by time only.

    Examples
    --------
    >>> WindowSpec(WindowKind.TIME, 3600, lateness=60).watermark(1_000)
    940
    """

    kind: WindowKind
    length: int
    tumbling: bool = False
    lateness: int = 0

    def __post_init__(self) -> None:
        """Refuse windows that can hold nothing."""
        if self.length < 1:
            raise ConfigError("window.length", self.length, "a whole number from 1 up")
        if self.lateness < 0:
            raise ConfigError("window.lateness", self.lateness, "a whole number from 0 up")
        if self.lateness and self.kind is not WindowKind.TIME:
            raise ConfigError("window.lateness", self.lateness, "0 unless the window is by time")

    def watermark(self, now: int | None) -> int | None:
        """Event time below which a point is late, None where none is.

        Parameters
        ----------
        now
            Newest event time of all batches before the point's own, or None before the first.
        """
        if now is None or self.kind is not WindowKind.TIME:
            return None
        return max(now - self.lateness, TIME_MIN)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state directory."""
        return {
            "kind": self.kind.value,
            "length": self.length,
            "tumbling": self.tumbling,
            "lateness": self.lateness,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WindowSpec:
        """Inverse of :meth:`to_json`."""
        return cls(WindowKind(data["kind"]), data["length"], data["tumbling"], data["lateness"])


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a window must know of a batch; times are those of its points, None without points."""

    batch_id: int
    points: int
    nbytes: int
    time_min: int | None
    time_max: int | None


@dataclass(frozen=True, slots=True)
class Past:
    """Totals of the batches that came before those still listed.

    Tumbling counts and bytes are measured from the stream's beginning, but nobody should have to
    keep the facts of every batch there ever was.

    Examples
    --------
    >>> Past().with_batches([BatchFacts(0, 10, 400, 1, 2)])
    Past(points=10, nbytes=400)
    """

    points: int = 0
    nbytes: int = 0

    def with_batches(self, batches: Iterable[BatchFacts]) -> Past:
        """Return the totals when some further batches are no longer listed."""
        points, nbytes = self.points, self.nbytes
        for batch in batches:
            if batch.points:
                points += batch.points
                nbytes += batch.nbytes
        return Past(points, nbytes)


NOTHING_BEFORE = Past()


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch of which only the newest points are live, by event time and then identifier."""

    batch_id: int
    keep: int


@dataclass(frozen=True, slots=True)
class Extent:
    """What of a window is live at a batch.

    Parameters
    ----------
    first_batch, last_batch
        The batches that may have live points, inclusive; an empty window has its first after its
        last.
    time_after
        Only points with a greater event time are live; None takes all.
    cut
        The oldest live batch, where not all its points are live.
    """

    first_batch: int
    last_batch: int
    time_after: int | None = None
    cut: Cut | None = None

    def holds(self, batch_id: int) -> bool:
        """Whether a batch may have live points."""
        return self.first_batch <= batch_id <= self.last_batch


def extent(spec: WindowSpec, batches: Sequence[BatchFacts], past: Past = NOTHING_BEFORE) -> Extent:
    """Tell what is live at the last of some batches.

    Parameters
    ----------
    spec
        The window.
    batches
        Facts in order of batches. Those that :func:`expired` has named may be left out, if
        ``past`` has them.
    past
        Totals of the batches left out.

    Examples
    --------
    >>> batches = [BatchFacts(0, 4, 100, 0, 9), BatchFacts(1, 4, 100, 10, 19)]
    >>> extent(WindowSpec(WindowKind.COUNT, 5), batches).cut
    Cut(batch_id=0, keep=1)
    >>> extent(WindowSpec(WindowKind.TIME, 10), batches)
    Extent(first_batch=1, last_batch=1, time_after=9, cut=None)
    """
    last = batches[-1].batch_id if batches else -1
    live, time_after, cut = _live(spec, [b for b in batches if b.points], past)
    if not live:
        return Extent(last + 1, last)
    return Extent(live[0].batch_id, last, time_after, cut)


def expired(
    spec: WindowSpec, batches: Sequence[BatchFacts], past: Past = NOTHING_BEFORE
) -> list[int]:
    """Name the batches whose points no window of this or a later batch can need.

    The newest batch is never named, so that there is always one to say where the stream is.
    """
    live, _, _ = _live(spec, [b for b in batches if b.points], past)
    kept = {b.batch_id for b in live}
    return [b.batch_id for b in batches[:-1] if b.batch_id not in kept]


_Live = tuple[list[BatchFacts], int | None, Cut | None]


def _live(spec: WindowSpec, full: list[BatchFacts], past: Past) -> _Live:
    """Live batches out of those with points, with the limits inside them."""
    if not full:
        return [], None, None
    if spec.kind is WindowKind.TIME:
        return _live_by_time(spec, full)
    if spec.kind is WindowKind.COUNT:
        return _live_by_count(spec, full, past)
    return _live_by_bytes(spec, full, past), None, None


def _live_by_time(spec: WindowSpec, full: list[BatchFacts]) -> _Live:
    now = max(_newest(batch) for batch in full)
    after = now // spec.length * spec.length - 1 if spec.tumbling else now - spec.length
    live = [batch for batch in full if _newest(batch) > after]
    return live, after if after >= TIME_MIN else None, None


def _newest(batch: BatchFacts) -> int:
    assert batch.time_max is not None, f"batch {batch.batch_id} has points but no times"
    return batch.time_max


def _live_by_count(spec: WindowSpec, full: list[BatchFacts], past: Past) -> _Live:
    wanted = spec.length
    if spec.tumbling:
        total = past.points + sum(batch.points for batch in full)
        wanted = (total - 1) % spec.length + 1
    for place in range(len(full) - 1, -1, -1):
        batch = full[place]
        if batch.points >= wanted:
            whole = batch.points == wanted
            return full[place:], None, None if whole else Cut(batch.batch_id, wanted)
        wanted -= batch.points
    return full, None, None


def _live_by_bytes(spec: WindowSpec, full: list[BatchFacts], past: Past) -> list[BatchFacts]:
    first = len(full) - 1
    if spec.tumbling:
        start = past.nbytes + sum(batch.nbytes for batch in full[:-1])
        begun = start // spec.length * spec.length  # where the newest batch's window begins
        while first and start - full[first - 1].nbytes >= begun:
            first -= 1
            start -= full[first].nbytes
        return full[first:]
    total = full[first].nbytes
    while first and total + full[first - 1].nbytes <= spec.length:
        first -= 1
        total += full[first].nbytes
    return full[first:]
