"""Compile the loops of the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from roost.kernel import Index, build_segment, pack, preload, query_schema, unpack
from roost.kernel.cells import all_within, locate_cells
from roost.kernel.ids import hash_ids
from roost.model.records import BOX, CIRCLE, POLYGON
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Rect, Space

TRIANGLE = (
    "01030000000100000004000000"
    + "00" * 16
    + ("0000000000002240" + "00" * 8 + "00" * 8 + "0000000000002240" + "00" * 16)
)


def compile_loops() -> None:
    """Call every loop with a few queries and points."""
    found = 0
    for coordinates in Coordinates:
        space = Space(Rect(0.0, 0.0, 10.0, 10.0), 10, 10, coordinates)
        rows: list[dict[str, Any]] = [
            {"kind": BOX, "x0": 1.0, "y0": 1.0, "x1": 5.0, "y1": 5.0},
            {"kind": CIRCLE, "x0": 2.0, "y0": 2.0, "radius": 300_000.0},
            {"kind": POLYGON, "x0": 0.0, "y0": 0.0, "x1": 9.0, "y1": 9.0},
        ]
        for number, row in enumerate(rows):
            row |= {"query_id": number, "live_from": 0, "live_until": 9}
        rows[2]["wkb"] = bytes.fromhex(TRIANGLE)
        queries = pa.Table.from_pylist(rows, query_schema(pa.int64()))
        queries = queries.set_column(1, "user_id", pa.array(["u"] * 3))
        built = build_segment(queries, space)
        # Mapped arrays are read-only, which numba compiles separately.
        frozen = {name: array.copy() for name, array in pack(built).items()}
        for array in frozen.values():
            array.flags.writeable = False
        x = np.array([2.0, 4.5, 8.0, 4.5])
        y = np.array([2.0, 4.5, 8.0, 0.0])
        block = PointBlock(x, y, np.arange(4), pa.array([0, 1, 2, 3]), {})
        locate_cells(x, y, space.grid.edges_x, space.grid.edges_y)
        all_within(x, y, 0.0, 0.0, 9.0, 9.0)
        x.flags.writeable = y.flags.writeable = block.time.flags.writeable = False
        locate_cells(x, y, space.grid.edges_x, space.grid.edges_y)
        all_within(x, y, 0.0, 0.0, 9.0, 9.0)
        for segment in (built, unpack(frozen)):
            index = Index(space, [(segment, {})])
            found += sum(pairs.slots.size for pairs in index.match(block))
            preload(index, np.array([[1.0, 1.0, 2.0, 2.0]]))
    hash_ids(pa.array(["a", "b"]))
    assert found > 0, "the sample queries match no point"
