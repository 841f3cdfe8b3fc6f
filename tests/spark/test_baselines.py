"""The cell join in Spark SQL, a baseline of the benchmarks, returns exact matches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shapely

from roost.bench.cases import box_requests, polygon_requests
from roost.testing.oracle import brute_force

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def save_points(lon: np.ndarray, lat: np.ndarray, path: Path) -> str:
    times = pa.array(np.arange(len(lon)), pa.timestamp("us", tz="UTC"))
    pq.write_table(
        pa.table({"id": np.arange(len(lon)), "event_time": times, "lon": lon, "lat": lat}), path
    )
    return str(path)


def brute(points_path: str, queries_path: str) -> list[tuple[int, int]]:
    points = [
        {"id": row["id"], "x": row["lon"], "y": row["lat"], "time": 0}
        for row in pq.read_table(points_path).to_pylist()
    ]
    return brute_force(points, pq.read_table(queries_path).to_pylist(), lonlat=True)


def check(spark: SparkSession, folder: Path, points: str, kind: str, side: float) -> int:
    from roost.engine.baselines.spark_sql import CellJoin

    queries = str(folder / "queries.parquet")
    expected = brute(points, queries)
    join = CellJoin(spark, queries, kind, side, side, folder)
    assert join.matches(points).count() == len(expected)
    join.matches(points).write.parquet(str(folder / "out"))
    table = pq.read_table(folder / "out")
    pairs = zip(table["query_id"].to_pylist(), table["point_id"].to_pylist(), strict=True)
    assert sorted(pairs) == expected
    assert set(table.column_names) == {"query_id", "point_id", "event_time"}
    return len(expected)


def test_boxes_equal_brute_force_on_and_off_the_borders(
    spark: SparkSession, tmp_path: Path
) -> None:
    rng = np.random.default_rng(11)
    low = rng.normal(0, 1, (60, 2))
    boxes = np.hstack([low, low + rng.uniform(0, 0.4, (60, 2))])
    boxes[0, 2:] = boxes[0, :2]
    pq.write_table(box_requests(boxes), tmp_path / "queries.parquet")
    corners = np.vstack([boxes[:, :2], boxes[:, 2:], boxes[:, [0, 3]]])
    places = np.vstack([corners, rng.normal(0, 1, (300, 2))])
    points = save_points(places[:, 0], places[:, 1], tmp_path / "points.parquet")
    assert check(spark, tmp_path, points, "boxes", 0.3) > 180


def test_polygons_with_holes_and_parts_equal_geos(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    ring = shapely.Point(0, 0).buffer(2.0, quad_segs=5)
    holed = ring.difference(shapely.box(-0.5, -0.5, 0.75, 0.5))
    parts = shapely.MultiPolygon(
        [shapely.box(3, 0, 4, 1), shapely.Polygon([(4, 2), (6, 2), (5, 4)])]
    )
    comb = shapely.Polygon([(-3, -3), (3, -3), (3, -1), (2, -2.5), (1, -1), (0, -2.5), (-3, -1)])
    shapes = np.array([holed, parts, comb], dtype=object)
    pq.write_table(polygon_requests(shapes), tmp_path / "queries.parquet")
    vertices = shapely.get_coordinates(shapes)
    on_edges = np.array([(-0.5, 0.0), (0.75, 0.25), (3.5, 0.0), (4.5, 2.0), (5.5, 3.0), (0, -3)])
    anywhere = rng.uniform(-4, 7, (400, 2))
    # Crossing-number tests fail most easily at the heights of vertices.
    level = np.column_stack([rng.uniform(-4, 7, len(vertices)), vertices[:, 1]])
    places = np.vstack([vertices, on_edges, anywhere, level])
    points = save_points(places[:, 0], places[:, 1], tmp_path / "points.parquet")
    assert check(spark, tmp_path, points, "polygons", 3.0) > len(vertices)
