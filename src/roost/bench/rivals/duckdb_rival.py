"""DuckDB, the fastest general query engine in one process, as a system to compare with.

Boxes: the queries are exploded to grid cells and stored sorted by cell; points join them by cell in
a hash join, filtered by the range predicate. A cell is half a box wide. On a million boxes that was
faster than cells of one box or a third of one, and than the boxes of a cell in a list; on 100
thousand, faster than DuckDB's inequality join and the spatial extension's R-tree join.
Polygons: the spatial extension's join, exact through GEOS, with closed borders.

DuckDB builds the hash table over the queries again in each timed pass, of which that is a small
part. The extension is published for earlier versions of DuckDB than the newest, so polygons run in
an environment of their own (see ``environment``), with the folder of ``roost`` on the path.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import duckdb

from roost.bench.cases import Case
from roost.bench.common import CORES
from roost.bench.rivals.protocol import RivalJob, job_of, measure, parser

CELLS_PER_SIDE = 2
# More than the columns of a city's cells, so that the key of a cell is unique.
ROW_STRIDE = 1 << 22

MATCH = "lon >= x0 AND lon <= x1 AND lat >= y0 AND lat <= y1"


def connect(needs_spatial: bool) -> duckdb.DuckDBPyConnection:
    """Open an in-memory database on two threads."""
    connection = duckdb.connect(config={"allow_unsigned_extensions": "true"})
    connection.execute(f"SET threads = {CORES}")
    connection.execute("SET preserve_insertion_order = false")
    if needs_spatial:
        connection.execute(f"LOAD '{spatial_extension()}'")
    return connection


def spatial_extension() -> Path:
    """Return the spatial extension that was installed from PyPI."""
    spec = importlib.util.find_spec("duckdb_extension_spatial")
    if spec is None or spec.origin is None:
        raise SystemExit("duckdb-extension-spatial is not installed")
    return next(Path(spec.origin).parent.rglob("spatial.duckdb_extension"))


def _cell(case: Case, x: str, y: str) -> str:
    width, height = case.side_x / CELLS_PER_SIDE, case.side_y / CELLS_PER_SIDE
    column, row = f"floor({x} / {width!r})::BIGINT", f"floor({y} / {height!r})::BIGINT"
    return f"{row} * {ROW_STRIDE} + {column}"


def load_boxes(connection: duckdb.DuckDBPyConnection, case: Case) -> None:
    """Store the boxes exploded to cells, in the order of the cells."""
    width, height = case.side_x / CELLS_PER_SIDE, case.side_y / CELLS_PER_SIDE
    connection.execute(f"""
        CREATE TABLE queries AS
        WITH columns AS (
            SELECT query_id, x0, y0, x1, y1, unnest(range(
                floor(x0 / {width!r})::BIGINT, floor(x1 / {width!r})::BIGINT + 1)) AS ix
            FROM '{case.queries_path}'),
        cells AS (
            SELECT *, unnest(range(
                floor(y0 / {height!r})::BIGINT, floor(y1 / {height!r})::BIGINT + 1)) AS iy
            FROM columns)
        SELECT iy * {ROW_STRIDE} + ix AS cell, query_id, x0, y0, x1, y1 FROM cells ORDER BY cell
    """)


def load_polygons(connection: duckdb.DuckDBPyConnection, case: Case) -> None:
    """Store the polygons as geometries."""
    connection.execute(f"""
        CREATE TABLE queries AS
        SELECT query_id, ST_GeomFromText(wkt) AS shape FROM '{case.queries_path}'
    """)


def matches_sql(case: Case, points_path: str, columns: str) -> str:
    """Return the join of a point file with the loaded queries."""
    if case.kind == "polygons":
        points = f"SELECT *, ST_Point(lon, lat) AS place FROM '{points_path}'"
        return f"SELECT {columns} FROM ({points}) JOIN queries ON ST_Intersects(shape, place)"
    points = f"SELECT *, {_cell(case, 'lon', 'lat')} AS cell FROM '{points_path}'"
    return f"SELECT {columns} FROM ({points}) AS p JOIN queries AS q ON p.cell = q.cell AND {MATCH}"


def one_pass(
    connection: duckdb.DuckDBPyConnection, job: RivalJob, points_path: str, out: Path | None
) -> int:
    """Count the matches of a file, or write them."""
    if out is None:
        row = connection.execute(matches_sql(job.case, points_path, "count(*)")).fetchone()
        assert row is not None
        return int(row[0])
    rows = matches_sql(job.case, points_path, "query_id, id AS point_id, event_time")
    connection.execute(f"COPY ({rows}) TO '{out}' (FORMAT parquet, PER_THREAD_OUTPUT true)")
    return 0


def main() -> None:
    """Run one job from the command line."""
    job = job_of(parser("Match with DuckDB.").parse_args())
    polygons = job.case.kind == "polygons"
    connection = connect(needs_spatial=polygons)
    load = load_polygons if polygons else load_boxes
    load(connection, job.case)
    notes = "spatial join" if polygons else f"hash join on cells, {CELLS_PER_SIDE} per side"
    run = partial(one_pass, connection, job)
    measure(job, "duckdb", f"duckdb {duckdb.__version__}", notes, run)


if __name__ == "__main__":
    main()
