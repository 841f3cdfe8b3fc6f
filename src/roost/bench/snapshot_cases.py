"""The window, the queries and the Parquet files of ``roost bench snapshot``.

All contenders have the same points. Roost reads them as a stream, the others as Parquet, one file
per batch, in two layouts: ``plain``, in order of arrival, and ``sorted``, by longitude and latitude
within a file, in small row groups, so that statistics of row groups and pages exclude most of a
file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import Bounds, Floats, Pickups, point_table
from roost.model.records import Box, Circle
from roost.model.space import EARTH_RADIUS_M
from roost.window.snapshot import SnapshotQuery

SHARES: Mapping[str, float] = {"range 0.01 %": 0.0001, "range 1 %": 0.01, "range 25 %": 0.25}
SMALL = ("range 0.01 %", "range 1 %")
NEAREST = "nearest 10"
K = 10
SORTED_GROUP_ROWS = 4_096  # a dozen row groups per file; a small box reads one or two of them
PASS_GAP_US = 60_000_000


def windowed_points(pickups: Pickups, count: int) -> pa.Table:
    """Return the points of the window in event order, with row numbers as identifiers.

    More pickups than ``count`` are thinned out evenly; fewer are repeated in several passes, each
    with later event times.
    """
    available = len(pickups.lon)
    if count <= available:
        at = np.linspace(0, available - 1, count).astype(np.int64)
        passes = np.zeros(count, np.int64)
    else:
        passes, at = np.divmod(np.arange(count), available)
    times = pickups.event_time.cast(pa.int64()).to_numpy()
    length = int(times[-1] - times[0]) + PASS_GAP_US
    event_time = pa.array(times[at] + passes * length).cast(pa.timestamp("us", tz="UTC"))
    return point_table(np.arange(count), event_time, pickups.lon[at], pickups.lat[at])


def write_layouts(points: pa.Table, batch_rows: int, folder: Path) -> dict[str, Path]:
    """Write the points as Parquet, one file per batch, in every layout; returns the folders."""
    folders = {name: folder / name for name in ("plain", "sorted")}
    for where in folders.values():
        where.mkdir(parents=True)
    for number, start in enumerate(range(0, points.num_rows, batch_rows)):
        batch, name = points.slice(start, batch_rows), f"batch-{number:05d}.parquet"
        pq.write_table(batch, folders["plain"] / name)
        pq.write_table(
            batch.sort_by([("lon", "ascending"), ("lat", "ascending")]),
            folders["sorted"] / name,
            row_group_size=SORTED_GROUP_ROWS,
            write_page_index=True,
        )
    return folders


def draw_queries(
    points: pa.Table, bounds: Bounds, count: int, rng: np.random.Generator
) -> dict[str, list[SnapshotQuery]]:
    """Draw the queries of each case around points of the window; boxes cover a share of bounds."""
    lon, lat = points["lon"].to_numpy(), points["lat"].to_numpy()
    sides = np.array([bounds[2] - bounds[0], bounds[3] - bounds[1]])

    def centres() -> Floats:
        at = rng.integers(0, len(lon), count)
        return np.column_stack([lon[at], lat[at]])

    cases: dict[str, list[SnapshotQuery]] = {}
    for name, share in SHARES.items():
        middle, half = centres(), sides * math.sqrt(share) / 2
        corners = np.hstack([middle - half, middle + half]).tolist()
        cases[name] = [SnapshotQuery(Box(*corner)) for corner in corners]
    places = centres().tolist()
    cases[NEAREST] = [SnapshotQuery(Circle(x, y, math.inf), nearest=K) for x, y in places]
    return cases


def sql_of(query: SnapshotQuery, table: str) -> str:
    """Return a query as SQL for Spark and DuckDB."""
    columns, shape = "id, event_time, lon, lat", query.shape
    if query.nearest is not None:
        assert isinstance(shape, Circle)
        distance = _haversine(_number(shape.cx), _number(shape.cy))
        return (
            f"SELECT {columns}, {distance} AS distance FROM {table} "
            f"ORDER BY distance, id LIMIT {query.nearest}"
        )
    assert isinstance(shape, Box)
    x0, y0, x1, y1 = map(_number, (shape.x0, shape.y0, shape.x1, shape.y1))
    where = f"lon BETWEEN {x0} AND {x1} AND lat BETWEEN {y0} AND {y1}"
    return f"SELECT {columns} FROM {table} WHERE {where}"


def _number(value: float) -> str:
    # Both engines parse a number with an exponent as a double, one without as a decimal.
    return f"{value:.17e}"


def _haversine(lon: str, lat: str) -> str:
    half_lat = f"sin((radians(lat) - radians({lat})) / 2)"
    half_lon = f"sin((radians(lon) - radians({lon})) / 2)"
    along = f"cos(radians({lat})) * cos(radians(lat)) * {half_lon} * {half_lon}"
    arc = f"least({half_lat} * {half_lat} + {along}, {_number(1.0)})"
    return f"2 * {_number(EARTH_RADIUS_M)} * asin(sqrt({arc}))"
