"""Compile the loops over windows once and keep the result: ``python -m roost.window``."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from roost.model import Box, Circle, PointBlock, Query
from roost.space import Coordinates, Rect, Space
from roost.window import AggregateSpec, WindowSegment, build, nearest, partial, select


def warm() -> int:
    """Run every compiled function on a few points; returns the rows found."""
    found = 0
    for coordinates in Coordinates:
        space = Space(Rect(0.0, 0.0, 10.0, 10.0), 10, 10, coordinates)
        x, y = np.arange(10.0), np.arange(10.0)
        block = PointBlock(x, y, np.arange(10), pa.array(range(10)), {})
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
    return found


if __name__ == "__main__":
    started = time.perf_counter()
    assert warm() > 0
    print(f"window loops compiled in {time.perf_counter() - started:.1f} s")
