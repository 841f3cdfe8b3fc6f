"""Compile the loops over windows once and keep the result: ``python -m roost.window``."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from roost.model import Box, Circle, PointBlock, Query
from roost.space import Coordinates, Rect, Space
from roost.window import (
    AggregateSpec,
    JoinSpec,
    Live,
    Pane,
    WindowSegment,
    answers,
    build,
    build_pane,
    join_segment,
    nearest,
    partial,
    select,
)

STANDING = (
    "aggregate count, sum(v), min(v), stddev(v), count(v), sum(time), min(seen)",
    "nearest 2",
)


def warm() -> int:
    """Run every compiled function on a few points; returns the rows found."""
    found = 0
    for coordinates in Coordinates:
        space = Space(Rect(0.0, 0.0, 10.0, 10.0), 10, 10, coordinates)
        x, y = np.arange(10.0), np.arange(10.0)
        attributes = {"v": pa.array(x), "seen": pa.array(range(10), pa.timestamp("us"))}
        block = PointBlock(x, y, np.arange(10), pa.array(range(10)), attributes)
        places = np.zeros(10, np.int32)
        arrays = build(block, space.grid.locate(x, y), places, np.zeros(1, np.int64), space)
        for array in arrays.values():
            # Mapped arrays are read-only, which is another type to the compiler.
            array.flags.writeable = False
        segment = WindowSegment.open(arrays)
        rows = select(segment, Query(0, Box(1.0, 1.0, 5.0, 5.0)))
        found += rows.size + select(segment, Query(0, Circle(5.0, 5.0, 300_000.0))).size
        found += nearest(segment, 3.0, 3.0, 3, partition_ids=[0])[1].size
        partial(segment, rows, AggregateSpec((("sum", "x", None),)))
        found += _warm_standing(segment)
    return found


def _warm_standing(segment: WindowSegment) -> int:
    """Answer standing queries from a pane that is whole and from one that is not, and join."""
    queries = dict(enumerate(STANDING))
    born, rows = np.repeat(np.arange(2), 10), np.tile(np.arange(10), 2)
    wants = {number: (text, 3.0, 3.0) for number, text in queries.items()}
    pane = Pane.open(build_pane(segment, born, rows, wants))
    assert pane is not None
    found = 0
    for live in (Live(), Live(5)):
        found += sum(int(table.num_rows) for table in answers([(segment, pane, live)], queries))
    spec = JoinSpec(None, None, 300_000.0, 5)
    joined = join_segment(segment, Live(), segment, Live(), spec, same_batch=True)
    return found + sum(int(batch.num_rows) for batch in joined)


if __name__ == "__main__":
    started = time.perf_counter()
    assert warm() > 0
    print(f"window loops compiled in {time.perf_counter() - started:.1f} s")
