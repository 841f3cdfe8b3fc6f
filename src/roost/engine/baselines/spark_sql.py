"""Spark SQL alone: the equi-join on grid cells that a Spark user writes by hand, written well.

Spark has no spatial join, so space becomes an equality: a query is exploded to the grid cells it
touches, a point has one cell, and the range predicate decides. What made it fast, each measured
on a million boxes:

- The boxes of a cell lie in one row as an array. A point then meets one row of the query side, and
  ``inline`` walks the array in generated code; a row per box and cell took half as long again.
- The query side is partitioned and sorted by cell and cached so, once. A sort-merge join uses it as
  it lies, and only the points are shuffled and sorted. Broadcasting the arrays meant to build and
  ship the hash table in each job, seconds for a million boxes; a shuffled hash join likewise.
- Three cells to a box side: a tenth less work than with two. Four saved another fifth, for
  25 entries a box instead of 16 and twice the time to load.
- Adaptive execution off: it had nothing to decide here and put a barrier in the way.

Polygons are cut the same way. A cell inside a polygon needs no test. A cell on its border carries
the edges that a ray from the cell to the right can meet, and a crossing-number expression over them
decides; a point on an edge is inside. All of it is SQL expressions, no Python in the path.

The rate includes reading the points; loading the queries comes before. What this cannot do is
change its queries without loading them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import shapely
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

BOX_CELLS_PER_SIDE = 3
POLYGON_CELLS_PER_SIDE = 32
PARTITIONS_PER_CORE = 4
ROW_STRIDE = 1 << 22

BOX_MATCH = "lon >= x0 AND lon <= x1 AND lat >= y0 AND lat <= y1"
# Sign of the turn from edge a-b to the point, kept as one expression to be shared by both uses.
TURN = "((e.bx - e.ax) * (lat - e.ay) - (e.by - e.ay) * (lon - e.ax))"
ON_EDGE = (
    f"({TURN} = 0 AND lon BETWEEN least(e.ax, e.bx) AND greatest(e.ax, e.bx)"
    " AND lat BETWEEN least(e.ay, e.by) AND greatest(e.ay, e.by))"
)
# An edge is crossed by the ray to the right when it spans the point's height, its lower end
# counted in, and the point lies to its left.
CROSSED = f"((e.ay > lat) <> (e.by > lat) AND ({TURN} > 0) = (e.by > e.ay))"
# A border hit is made to outweigh and to survive all crossings: negative stays negative.
POLYGON_MATCH = (
    "edges IS NULL OR abs(aggregate(edges, 0, (n, e) -> "
    f"CASE WHEN n < 0 OR {ON_EDGE} THEN -1 WHEN {CROSSED} THEN n + 1 ELSE n END)) % 2 = 1"
)


@dataclass(frozen=True, slots=True)
class CellGrid:
    """Cells of a fixed size over the whole plane."""

    width: float
    height: float

    def cell_sql(self, x: str, y: str) -> str:
        """Return the SQL of the cell number of a place."""
        return f"({self.row_sql(y)} * {ROW_STRIDE} + {self.column_sql(x)})"

    def column_sql(self, x: str) -> str:
        """Return the SQL of the column of an x."""
        return f"CAST(floor({x} / {self.width!r}D) AS BIGINT)"

    def row_sql(self, y: str) -> str:
        """Return the SQL of the row of a y."""
        return f"CAST(floor({y} / {self.height!r}D) AS BIGINT)"


def session(cores: int, memory: str = "10g") -> SparkSession:
    """Start Spark as this join likes it."""
    settings = {
        "spark.driver.memory": memory,
        "spark.driver.maxResultSize": "0",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.autoBroadcastJoinThreshold": "-1",
        "spark.sql.shuffle.partitions": str(PARTITIONS_PER_CORE * cores),
        "spark.sql.files.maxPartitionBytes": "4m",
        "spark.sql.files.openCostInBytes": "0",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("spark-sql-cells")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


class CellJoin:
    """Queries in cells, ready to be joined with files of points.

    Parameters
    ----------
    spark
        The session.
    queries_path
        Parquet with ``query_id`` and ``x0, y0, x1, y1`` or ``wkt``.
    kind
        Which of the two.
    side_x, side_y
        Sides of a typical query; the cells are a part of them.
    scratch
        Folder for what the polygons are cut into.
    """

    def __init__(
        self,
        spark: SparkSession,
        queries_path: str,
        kind: Literal["boxes", "polygons"],
        side_x: float,
        side_y: float,
        scratch: Path,
    ) -> None:
        per_side = BOX_CELLS_PER_SIDE if kind == "boxes" else POLYGON_CELLS_PER_SIDE
        self._spark = spark
        self._kind = kind
        self._grid = CellGrid(side_x / per_side, side_y / per_side)
        if kind == "boxes":
            cells = self._box_cells(queries_path)
        else:
            pieces = scratch / "pieces.parquet"
            pq.write_table(polygon_pieces(queries_path, self._grid), pieces)
            cells = spark.read.parquet(str(pieces))
        self._queries = self._packed(cells)

    def _box_cells(self, path: str) -> DataFrame:
        grid = self._grid
        columns = f"explode(sequence({grid.column_sql('x0')}, {grid.column_sql('x1')}))"
        rows = f"explode(sequence({grid.row_sql('y0')}, {grid.row_sql('y1')}))"
        boxes = self._spark.read.parquet(path).select("query_id", "x0", "y0", "x1", "y1")
        wide = boxes.withColumn("ix", F.expr(columns)).withColumn("iy", F.expr(rows))
        return wide.selectExpr(
            f"iy * {ROW_STRIDE} + ix AS cell", "query_id", "x0", "y0", "x1", "y1"
        )

    def _packed(self, cells: DataFrame) -> DataFrame:
        members = [name for name in cells.columns if name != "cell"]
        packed = (
            cells.repartition("cell")
            .groupBy("cell")
            .agg(F.collect_list(F.struct(*members)).alias("queries"))
            .sortWithinPartitions("cell")
            .cache()
        )
        packed.count()
        return packed

    def matches(self, points_path: str) -> DataFrame:
        """Return the matches of a file of points: ``query_id, point_id, event_time``."""
        points = self._spark.read.parquet(points_path).selectExpr(
            "id AS point_id",
            "event_time",
            "lon",
            "lat",
            f"{self._grid.cell_sql('lon', 'lat')} AS cell",
        )
        met = points.join(self._queries.hint("merge"), "cell")
        candidates = met.selectExpr("point_id", "event_time", "lon", "lat", "inline(queries)")
        test = BOX_MATCH if self._kind == "boxes" else POLYGON_MATCH
        return candidates.where(test).select("query_id", "point_id", "event_time")

    def count(self, points_path: str) -> int:
        """Count the matches of a file of points."""
        return self.matches(points_path).count()

    def write(self, points_path: str, out: Path) -> None:
        """Write the matches of a file of points as Parquet."""
        self.matches(points_path).write.parquet(str(out))


def polygon_pieces(queries_path: str, grid: CellGrid) -> pa.Table:
    """Cut polygons into the cells they touch.

    Returns
    -------
    A row per polygon and touched cell: ``cell, query_id`` and ``edges``, which is null where the
    cell lies inside the polygon.
    """
    table = pq.read_table(queries_path, columns=["query_id", "wkt"])
    shapes = shapely.from_wkt(table["wkt"].to_numpy(zero_copy_only=False))
    rows: list[dict[str, Any]] = []
    for query_id, shape in zip(table["query_id"].to_pylist(), shapes, strict=True):
        rows.extend(_pieces_of(query_id, shape, grid))
    edge = pa.struct([(name, pa.float64()) for name in ("ax", "ay", "bx", "by")])
    schema = pa.schema([("cell", pa.int64()), ("query_id", pa.int64()), ("edges", pa.list_(edge))])
    return pa.Table.from_pylist(rows, schema=schema)


def _edges(shape: shapely.Geometry) -> np.ndarray[Any, np.dtype[np.float64]]:
    rings = shapely.get_rings(shapely.get_parts(shape))
    parts = [shapely.get_coordinates(ring) for ring in rings]
    return np.vstack([np.hstack([part[:-1], part[1:]]) for part in parts])


def _pieces_of(query_id: int, shape: shapely.Geometry, grid: CellGrid) -> list[dict[str, Any]]:
    edges = _edges(shape)
    low, high = np.minimum(edges[:, 1], edges[:, 3]), np.maximum(edges[:, 1], edges[:, 3])
    right = np.maximum(edges[:, 0], edges[:, 2])
    x0, y0, x1, y1 = shapely.bounds(shape)
    columns = np.arange(np.floor(x0 / grid.width), np.floor(x1 / grid.width) + 1)
    shapely.prepare(shape)
    rows: list[dict[str, Any]] = []
    # Half a cell of margin: rounding may put a point a hair outside of the cell it is given.
    margin_x, margin_y = grid.width / 2, grid.height / 2
    for row in np.arange(np.floor(y0 / grid.height), np.floor(y1 / grid.height) + 1):
        bottom, top = row * grid.height - margin_y, (row + 1) * grid.height + margin_y
        left = columns * grid.width - margin_x
        cells = shapely.box(left, bottom, left + 2 * grid.width, top)
        inside = shapely.contains_properly(shape, cells)
        touched = shapely.intersects(shape, cells)
        near = (low <= top) & (high >= bottom)
        for at in np.flatnonzero(touched):
            kept = None if inside[at] else _as_rows(edges[near & (right >= left[at])])
            cell = int(row) * ROW_STRIDE + int(columns[at])
            rows.append({"cell": cell, "query_id": query_id, "edges": kept})
    return rows


def _as_rows(edges: np.ndarray[Any, np.dtype[np.float64]]) -> Sequence[dict[str, float]]:
    return [{"ax": ax, "ay": ay, "bx": bx, "by": by} for ax, ay, bx, by in edges.tolist()]
