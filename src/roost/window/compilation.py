"""Compile the loops of the window."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from roost.model.records import Box, Circle, Query
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Rect, Space
from roost.window.aggregate import AggregateSpec, partial
from roost.window.evaluate import Live, select
from roost.window.grouped import Groups, Totals
from roost.window.join import JoinSpec, join_segment
from roost.window.nearest import nearest
from roost.window.panes import Pane, build_pane
from roost.window.results import standing_results
from roost.window.segment import WindowSegment, build

STANDING = (
    "aggregate count, sum(v), min(v), stddev(v), count(v), sum(time), min(seen)",
    "nearest 2",
)


def compile_loops() -> None:
    """Call every loop with a few points."""
    found = 0
    for coordinates in Coordinates:
        space = Space(Rect(0.0, 0.0, 10.0, 10.0), 10, 10, coordinates)
        x, y = np.arange(10.0), np.arange(10.0)
        attributes = {
            "v": pa.array([*x[1:], np.inf]),
            "seen": pa.array(range(10), pa.timestamp("us")),
        }
        block = PointBlock(x, y, np.arange(10), pa.array(range(10)), attributes)
        places = np.zeros(10, np.int32)
        arrays = build(block, space.grid.locate(x, y), places, np.zeros(1, np.int64), space)
        for array in arrays.values():
            # Mapped arrays are read-only, which numba compiles separately.
            array.flags.writeable = False
        segment = WindowSegment.open(arrays)
        rows = select(segment, Query(0, Box(1.0, 1.0, 5.0, 5.0)))
        found += rows.size + select(segment, Query(0, Circle(5.0, 5.0, 300_000.0))).size
        found += nearest(segment, 3.0, 3.0, 3, partition_ids=[0])[1].size
        partial(segment, rows, AggregateSpec((("sum", "x", None),)))
        found += _evaluate_standing(segment)
    sums = Totals.of(pa.array([1.0, 2.0]), Groups(np.arange(3), np.arange(2, dtype=np.int32)))
    slid = Totals.slid([sums], np.arange(2), np.array([0]), np.array([2]))
    assert found > 0, "the sample queries find no point"
    assert slid is not None and slid.results("avg", None).numbers is not None


def _evaluate_standing(segment: WindowSegment) -> int:
    """Evaluate standing queries on a whole and on a partial pane, and join."""
    queries = dict(enumerate(STANDING))
    created, rows = np.repeat(np.arange(2), 10), np.tile(np.arange(10), 2)
    outputs = {number: (text, 3.0, 3.0) for number, text in queries.items()}
    pane = Pane.open(build_pane(segment, created, rows, outputs))
    assert pane is not None
    found = 0
    for live in (Live(), Live(5)):
        tables = standing_results([(segment, pane, live)], queries)
        found += sum(int(table.num_rows) for table in tables)
    spec = JoinSpec(None, None, 300_000.0, 5)
    joined = join_segment(segment, Live(), segment, Live(), spec, same_batch=True)
    return found + sum(int(batch.num_rows) for batch in joined)
