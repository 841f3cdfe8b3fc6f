"""Points as Python records, and segments built from them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa

from layouts import random_layout
from roost.model.schemas import PointBlock
from roost.model.space import Coordinates, Rect, Space
from roost.window import WindowSegment, build

Point = dict[str, Any]

PLANE = Space(Rect(0.0, 0.0, 16.0, 16.0), 16, 16, Coordinates.PLANE)
EARTH = Space(Rect(-180.0, -90.0, 180.0, 90.0), 36, 18)
TYPES = {
    "fare": pa.float64(),
    "seats": pa.int32(),
    "base": pa.string(),
    "ok": pa.bool_(),
    "seen": pa.timestamp("us", "UTC"),
}


def random_points(
    rng: random.Random, count: int, space: Space, *, text_ids: bool = False, first: int = 0
) -> list[Point]:
    """Points with ties in everything, some beyond the bounds, and nulls."""
    bounds = space.bounds
    points = []
    for number in range(first, first + count):
        x, y = (round(rng.uniform(*side), 1) for side in _sides(bounds))
        if space is PLANE and rng.random() < 0.05:
            x += rng.choice([-100.0, 100.0])
        points.append(
            {
                "id": f"p{number}é" if text_ids else number,
                "x": x,
                "y": y,
                "time": rng.randrange(-50, 50),
                "fare": rng.choice([None, 0.0, -0.0, rng.uniform(-1e3, 1e3), 1e17, -1e17]),
                "seats": rng.choice([None, rng.randrange(-5, 5), 2**31 - 1]),
                "base": rng.choice([None, "", "B1", "B2", "Ω"]),
                "ok": rng.choice([None, True, False]),
                "seen": rng.choice([None, rng.randrange(10**15)]),
            }
        )
    return points


def _sides(bounds: Rect) -> tuple[tuple[float, float], tuple[float, float]]:
    return (bounds.x0, bounds.x1), (bounds.y0, bounds.y1)


def block_of(points: list[Point]) -> PointBlock:
    columns = {name: [point[name] for point in points] for name in ("x", "y", "time")}
    texts = bool(points) and isinstance(points[0]["id"], str)
    ids = pa.array([point["id"] for point in points], pa.string() if texts else pa.int64())
    attributes = {
        name: pa.array([point[name] for point in points], kind) for name, kind in TYPES.items()
    }
    x, y = (np.array(columns[name], np.float64) for name in ("x", "y"))
    return PointBlock(x, y, np.array(columns["time"], np.int64), ids, attributes)


def cell_of(point: Point, space: Space) -> int:
    x, y = np.array([point["x"]]), np.array([point["y"]])
    return int(space.grid.locate(x, y)[0])


def random_places(
    rng: random.Random, space: Space
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Place of the partition of each cell, and the partitions' identifiers."""
    layout = random_layout(rng, space.columns, space.rows, 12)
    table = np.zeros((space.rows, space.columns), np.int32)
    for place, (column0, row0, column1, row1) in enumerate(layout):
        table[row0:row1, column0:column1] = place
    ids = rng.sample(range(1000), len(layout))
    return table.reshape(-1), np.array(ids, np.int64)


def segment_of(
    points: list[Point], space: Space, places: tuple[Any, Any] | None = None
) -> WindowSegment:
    table, ids = places or (np.zeros(space.grid.cells, np.int32), np.array([7]))
    cells = np.array([cell_of(point, space) for point in points], np.int32)
    return WindowSegment.open(build(block_of(points), cells, table[cells], ids, space))


def records(segment: WindowSegment, rows: Any) -> list[Any]:
    """Sorted identifiers of some rows."""
    return sorted(segment.take(np.asarray(rows, np.int64)).ids.to_pylist())
