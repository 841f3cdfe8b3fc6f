"""A small stream in batches on several machines, and its live points by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from window_points import Point, random_places, random_points, segment_of

from roost.model.choices import WindowKind
from roost.model.records import TIME_MIN
from roost.model.space import Space
from roost.window import Live, WindowSegment, WindowSpec
from roost.window.evaluate import live_parts
from roost.window.spec import BatchFacts, Extent, Past, extent

WINDOWS = [
    WindowSpec(WindowKind.TIME, 25, lateness=8),
    WindowSpec(WindowKind.TIME, 30, tumbling=True, lateness=8),
    WindowSpec(WindowKind.COUNT, 70),
    WindowSpec(WindowKind.COUNT, 90, tumbling=True),
    WindowSpec(WindowKind.BYTES, 4_000),
    WindowSpec(WindowKind.BYTES, 4_000, tumbling=True),
]
BYTES_A_POINT = 40


@dataclass
class Batch:
    """Points of one batch with the segments of its machines."""

    facts: BatchFacts
    points: list[Point]
    segments: list[WindowSegment] = field(default_factory=list)
    panes: list[Any] = field(default_factory=list)


def random_batches(
    rng: random.Random, space: Space, batches: int, *, text_ids: bool = False
) -> list[Batch]:
    """Batches of few points, some late, some batches empty, on up to four machines."""
    found = []
    first = 0
    for batch_id in range(batches):
        size = rng.choice([0, 1, 10, 30, 45])
        points = random_points(rng, size, space, text_ids=text_ids, first=first)
        first += size
        for point in points:
            point["time"] = batch_id * 10 + rng.randrange(-8, 10)
            if rng.random() < 0.4:  # several in the same place
                point |= {"x": float(round(point["x"])), "y": float(round(point["y"]))}
        newest = max((point["time"] for point in points), default=TIME_MIN)
        facts = BatchFacts(batch_id, size, size * BYTES_A_POINT, newest)
        dealt: list[list[Point]] = [[] for _ in range(rng.randint(1, 4))]
        for point in points:
            rng.choice(dealt).append(point)
        batch = Batch(facts, points)
        # Each batch has a plan of its own, so partitions and machines change all the time.
        places = random_places(rng, space)
        batch.segments = [segment_of(part, space, places) for part in dealt if part]
        found.append(batch)
    return found


def live_points(batches: list[Batch], now: Extent) -> Iterator[tuple[int, Point]]:
    """Batch and point of all live points, by an extent."""
    for batch in batches:
        points = batch.points
        if not now.holds(batch.facts.batch_id):
            continue
        if now.cut is not None and now.cut.batch_id == batch.facts.batch_id:
            points = sorted(points, key=lambda p: (p["time"], p["id"]))[-now.cut.keep :]
        for point in points:
            if now.time_after is None or point["time"] > now.time_after:
                yield batch.facts.batch_id, point


def live_segments(batches: list[Batch], now: Extent) -> Iterator[tuple[Batch, int, Live]]:
    """Batch, machine and live rows of every segment in the window."""
    for batch in batches:
        if now.holds(batch.facts.batch_id) and batch.segments:
            parts = live_parts(now, batch.facts.batch_id, batch.segments)
            for machine, live in enumerate(parts):
                yield batch, machine, live


def extent_at(spec: WindowSpec, batches: list[Batch]) -> Extent:
    return extent(spec, [batch.facts for batch in batches], Past())
