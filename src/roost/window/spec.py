"""Window definitions, and which batches are live.

A window selects the points of the last hour, the last million points, or the last gigabyte; if it
tumbles, those since the last full hour, million or gigabyte. The decision uses a few facts about
each batch, never the points, and only moves forward: points that are not live at a batch may be
deleted. The boundary of a count window may fall inside a batch; :mod:`roost.window.evaluate` then
decides which of its points are live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roost.errors import ConfigError
from roost.model.choices import WindowKind
from roost.model.records import TIME_MIN
from roost.model.settings import WindowSettings


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Definition of a window; ``kind`` is the unit of its ``length``.

    A ``tumbling`` window starts anew at each multiple of its length, instead of sliding.
    ``lateness`` is by how much a point's event time may be behind the newest of earlier batches;
    time windows only.
    """

    kind: WindowKind
    length: int
    tumbling: bool = False
    lateness: int = 0

    def __post_init__(self) -> None:
        """Validate the settings."""
        if self.length < 1:
            raise ConfigError("window.length", self.length, "a whole number from 1 up")
        if self.lateness < 0:
            raise ConfigError("window.lateness", self.lateness, "a whole number from 0 up")
        if self.lateness and self.kind is not WindowKind.TIME:
            raise ConfigError("window.lateness", self.lateness, "0 unless the window is by time")

    def watermark(self, now: int | None) -> int | None:
        """Return below which time a point is late; ``now`` is the newest of earlier batches."""
        if now is None or self.kind is not WindowKind.TIME:
            return None
        return max(now - self.lateness, TIME_MIN)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory."""
        return asdict(self) | {"kind": self.kind.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WindowSpec:
        """Invert :meth:`to_json`."""
        return cls(**data | {"kind": WindowKind(data["kind"])})


def window_spec(settings: WindowSettings, unit: int) -> WindowSpec | None:
    """Build the window of a run; None if the run has no window.

    ``unit`` is the number of units of event time in a second, 1 where event times are integers.
    """
    if settings.kind is None or settings.length is None:
        return None
    by_time = settings.kind is WindowKind.TIME
    scale = unit if by_time else 1
    length = max(1, round(settings.length * scale))
    # A point that can still be in the window is not late by default.
    late = length if settings.lateness is None else round(settings.lateness * scale)
    return WindowSpec(settings.kind, length, settings.tumbling, late if by_time else 0)


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Facts about a batch that windows use; without points, ``time_max`` is ``TIME_MIN``."""

    batch_id: int
    points: int
    nbytes: int
    time_max: int


@dataclass(frozen=True, slots=True)
class Past:
    """Totals of the expired batches; tumbling windows count from the start of the stream."""

    points: int = 0
    nbytes: int = 0

    def with_batches(self, batches: Iterable[BatchFacts]) -> Past:
        """Return the totals including further batches."""
        full = [batch for batch in batches if batch.points]
        return Past(
            self.points + sum(batch.points for batch in full),
            self.nbytes + sum(batch.nbytes for batch in full),
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch of which only the newest ``keep`` points are live, by event time, then identifier."""

    batch_id: int
    keep: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Live part of a window at a batch: batches ``first_batch`` to ``last_batch``, if not empty.

    Only points with an event time greater than ``time_after`` are live. ``cut`` is the oldest live
    batch, if only some of its points are live.
    """

    first_batch: int
    last_batch: int
    time_after: int | None = None
    cut: Cut | None = None

    def holds(self, batch_id: int) -> bool:
        """Return whether a batch may have live points."""
        return self.first_batch <= batch_id <= self.last_batch


def extent(spec: WindowSpec, batches: Sequence[BatchFacts], past: Past) -> Extent:
    """Return the live part of a window at the last of some batches, given in order.

    Batches that :func:`expired` has returned may be omitted if ``past`` includes them.

    Examples
    --------
    >>> batches = [BatchFacts(0, 4, 100, 9), BatchFacts(1, 4, 100, 19)]
    >>> extent(WindowSpec(WindowKind.COUNT, 5), batches, Past()).cut
    Cut(batch_id=0, keep=1)
    """
    last = batches[-1].batch_id if batches else -1
    live, time_after, cut = _live(spec, [b for b in batches if b.points], past)
    if not live:
        return Extent(last + 1, last)
    return Extent(live[0].batch_id, last, time_after, cut)


def expired(spec: WindowSpec, batches: Sequence[BatchFacts], past: Past) -> list[int]:
    """Return the batches whose points are not live at this or any later batch.

    The newest batch is never expired, because its times mark the progress of the stream.
    """
    live, _, _ = _live(spec, [b for b in batches if b.points], past)
    kept = {b.batch_id for b in live}
    return [b.batch_id for b in batches[:-1] if b.batch_id not in kept]


_Live = tuple[list[BatchFacts], int | None, Cut | None]


def _live(spec: WindowSpec, full: list[BatchFacts], past: Past) -> _Live:
    """Return the live batches among those with points, and the limits inside them."""
    if not full:
        return [], None, None
    if spec.kind is WindowKind.TIME:
        return _live_by_time(spec, full)
    if spec.kind is WindowKind.COUNT:
        return _live_by_count(spec, full, past)
    return _live_by_bytes(spec, full, past), None, None


def _live_by_time(spec: WindowSpec, full: list[BatchFacts]) -> _Live:
    now = max(batch.time_max for batch in full)
    after = now // spec.length * spec.length - 1 if spec.tumbling else now - spec.length
    live = [batch for batch in full if batch.time_max > after]
    return live, after if after >= TIME_MIN else None, None


def _live_by_count(spec: WindowSpec, full: list[BatchFacts], past: Past) -> _Live:
    remaining = spec.length
    if spec.tumbling:
        total = past.points + sum(batch.points for batch in full)
        remaining = (total - 1) % spec.length + 1
    for place in range(len(full) - 1, -1, -1):
        batch = full[place]
        if batch.points >= remaining:
            whole = batch.points == remaining
            return full[place:], None, None if whole else Cut(batch.batch_id, remaining)
        remaining -= batch.points
    return full, None, None


def _live_by_bytes(spec: WindowSpec, full: list[BatchFacts], past: Past) -> list[BatchFacts]:
    first = len(full) - 1
    room = spec.length - full[first].nbytes  # for batches before the newest
    if spec.tumbling:
        # A batch belongs to the window in which its first byte falls.
        room = (past.nbytes + sum(batch.nbytes for batch in full[:-1])) % spec.length
    while first and full[first - 1].nbytes <= room:
        first -= 1
        room -= full[first].nbytes
    return full[first:]
