"""Policy of memory and age: which calendar buckets go to a coarser level, and when.

Nothing is coarsened while everything fits. Then the oldest buckets of the level that takes the most
bytes for its weight go to the next level, one after the other, until the predicted size fits. So
each level has about the same bytes, and since a coarser level takes less for a row, resolution
falls off with age: the paper's bands. Buckets younger than the length of study only move if that is
allowed and no older one is left. The step to the last level, which merges the hours of the day, is
taken when no other is left. Sizes are predicted; the caller measures what a plan achieved and plans
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from roost.errors import ConfigError

STUDY_S = 30 * 86_400
SECOND_US = 1_000_000
RECENT_WEIGHT = 2.0  # of the finest level; all others have 1
SHRINKAGE = 0.6  # expected size after a move to a level without rows


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one machine: bytes, the age at which coarsening begins, and when rows expire."""

    memory: int
    study_s: float = STUDY_S
    retention_s: float | None = None

    def __post_init__(self) -> None:
        if self.memory <= 0:
            raise ConfigError("synopsis.memory", self.memory, "a number of bytes above 0")
        if self.study_s < 0:
            raise ConfigError("synopsis.study", self.study_s, "a duration from 0 up")
        if self.retention_s is not None and self.retention_s <= self.study_s:
            expected = f"more than the study of {self.study_s} s"
            raise ConfigError("synopsis.retention", self.retention_s, expected)


@dataclass(frozen=True, slots=True)
class BucketSize:
    """A calendar bucket of one level: its time, its newest row, its bytes and rows."""

    level: int
    start_us: int
    end_us: int
    last_us: int
    nbytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class BandMove:
    """Buckets of a level that end by a time go to the next level."""

    level: int
    until_us: int


@dataclass(frozen=True, slots=True)
class BandPlan:
    """Moves in the order in which they are applied, and the bytes that would still be too many."""

    moves: tuple[BandMove, ...] = ()
    expire_us: int | None = None  # buckets that end by this time are deleted
    excess: int = 0


def plan(
    buckets: Sequence[BucketSize],
    other: int,
    budget: Budget,
    now_us: int,
    last_level: int,
    *,
    young: bool = True,
) -> BandPlan:
    """Decide which buckets become coarser.

    ``other`` counts further bytes towards the budget: bins, sketches, deltas that are not folded.
    Without ``young``, buckets younger than the length of study stay as they are.
    """
    aged_us = now_us - round(budget.study_s * SECOND_US)
    expire_us = None
    if budget.retention_s is not None:
        limit = now_us - round(budget.retention_s * SECOND_US)
        expire_us = limit if any(bucket.end_us <= limit for bucket in buckets) else None
        buckets = [bucket for bucket in buckets if bucket.end_us > limit]
    levels: list[list[BucketSize]] = [[] for _ in range(last_level + 1)]
    for bucket in sorted(buckets, key=lambda bucket: (bucket.end_us, bucket.last_us)):
        levels[bucket.level].append(bucket)
    until = _late(levels, aged_us)
    sizes = [sum(bucket.nbytes for bucket in level) for level in levels]
    shrinkage = [_shrinkage(fine, coarse) for fine, coarse in pairwise(levels)]
    excess = other + sum(sizes) - budget.memory
    while excess > 0:
        candidates = _candidates(levels, aged_us, young=young)
        if not candidates:
            break
        level = max(candidates, key=lambda k: (sizes[k] / (1.0 if k else RECENT_WEIGHT), -k))
        bucket = levels[level].pop(0)
        until[level] = max(until.get(level, bucket.end_us), bucket.end_us)
        smaller = round(bucket.nbytes * shrinkage[level])
        sizes[level] -= bucket.nbytes
        sizes[level + 1] += smaller
        excess -= bucket.nbytes - smaller
    moves = tuple(BandMove(level, until[level]) for level in sorted(until, reverse=True))
    return BandPlan(moves, expire_us, max(excess, 0))


def _candidates(levels: Sequence[Sequence[BucketSize]], aged_us: int, *, young: bool) -> list[int]:
    """Return the levels whose oldest bucket may move: hours of the day are merged last of all."""
    filled = [level for level in range(len(levels) - 1) if levels[level]]
    aged = [level for level in filled if levels[level][0].last_us < aged_us]
    last = len(levels) - 2
    choices = [aged, filled] if young else [aged]
    keeping_hours = [[level for level in own if level < last] for own in choices]
    return next((own for own in (*keeping_hours, *choices) if own), [])


def _late(levels: Sequence[Sequence[BucketSize]], aged_us: int) -> dict[int, int]:
    """Return up to which time buckets of each level go where older rows of their time are."""
    until: dict[int, int] = {}
    coarser: list[int] = []
    for level in range(len(levels) - 1, -1, -1):
        late = [
            bucket.end_us for bucket in levels[level] if coarser and bucket.start_us <= max(coarser)
        ]
        if late:
            until[level] = max(late)
        # A row of the future must not make all rows before it late.
        coarser += [bucket.last_us for bucket in levels[level] if bucket.last_us < aged_us]
    return until


def _shrinkage(fine: Sequence[BucketSize], coarse: Sequence[BucketSize]) -> float:
    """Return the expected size of a bucket at the next level over its size now."""
    a, b = (
        sum(bucket.nbytes for bucket in own) / max(sum(bucket.rows for bucket in own), 1)
        for own in (fine, coarse)
    )
    return min(b / a, 1.0) if a and b else SHRINKAGE
