"""Compile the loops of the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import shapely

from roost.kernel import Index, build_segment, preload, query_schema
from roost.kernel.cells import all_within, locate_cells
from roost.kernel.ids import hash_ids
from roost.model.arrays import frozen
from roost.model.records import BOX, CIRCLE, POLYGON
from roost.model.schemas import PointBlock
from roost.model.space import Rect, Space


def compile_loops() -> None:
    """Call every loop with a few queries and points."""
    space = Space(Rect(0.0, 0.0, 10.0, 10.0), 10, 10)
    triangle = shapely.to_wkb(shapely.Polygon([(0.0, 0.0), (9.0, 0.0), (0.0, 9.0)]))
    rows: list[dict[str, Any]] = [
        {"kind": BOX, "x0": 1.0, "y0": 1.0, "x1": 5.0, "y1": 5.0},
        {"kind": CIRCLE, "x0": 2.0, "y0": 2.0, "radius": 3.0},
        {"kind": POLYGON, "x0": 0.0, "y0": 0.0, "x1": 9.0, "y1": 9.0, "wkb": triangle},
    ]
    common = {"user_id": "u", "live_from": 0, "live_until": 9}
    rows = [{"query_id": number, **common, **row} for number, row in enumerate(rows)]
    segment = build_segment(pa.Table.from_pylist(rows, query_schema(pa.int64())), space)
    x, y = np.array([2.0, 4.5, 8.0, 4.5]), np.array([2.0, 4.5, 8.0, 0.0])
    for points in ((x, y), (frozen(x), frozen(y))):
        # Coordinates are read-only in Arrow columns, which numba compiles separately.
        locate_cells(*points, space.grid.edges_x, space.grid.edges_y)
        all_within(*points, 0.0, 0.0, 9.0, 9.0)
    index = Index(space, [(segment, {})])
    block = PointBlock(x, y, np.arange(4), pa.array([0, 1, 2, 3]), {})
    found = sum(pairs.slots.size for pairs in index.match(block))
    preload(index, np.array([[1.0, 1.0, 2.0, 2.0]]))
    hash_ids(pa.array(["a", "b"]))
    assert found > 0, "the sample queries match no point"
