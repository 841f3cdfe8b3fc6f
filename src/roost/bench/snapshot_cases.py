"""The window, the questions and the Parquet files that ``roost bench snapshot`` measures on.

All contenders get the same points. Roost reads them as a stream; the others find them as Parquet,
one file a batch, in two layouts that a careful user may choose: ``plain``, in the order of arrival,
and ``sorted``, by longitude and latitude within a file, in small row groups, so that the statistics
of row groups and pages rule most of a file out. Nothing here asks a question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import Bounds, Floats, Pickups
from roost.model.records import Box, Circle
from roost.model.space import EARTH_RADIUS_M
from roost.window.snapshot import Question

SHARES: Mapping[str, float] = {"range 0.01 %": 0.0001, "range 1 %": 0.01, "range 25 %": 0.25}
SMALL = ("range 0.01 %", "range 1 %")
NEAREST = "nearest 10"
K = 10
SORTED_GROUP_ROWS = 4_096  # a dozen row groups a file: a small box needs one or two of them
PASS_GAP_US = 60_000_000


def windowed_points(pickups: Pickups, count: int) -> pa.Table:
    """Make the points of the window, in event order.

    Parameters
    ----------
    pickups
        Where they come from. More than are wanted are thinned out evenly; fewer are repeated,
        each pass after the one before.
    count
        How many.

    Returns
    -------
    pyarrow.Table
        ``id, event_time, lon, lat``; identifiers are row numbers.
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
    columns = {"id": np.arange(count), "event_time": event_time}
    return pa.table({**columns, "lon": pickups.lon[at], "lat": pickups.lat[at]})


def write_layouts(points: pa.Table, batch_rows: int, folder: Path) -> dict[str, Path]:
    """Write the points as Parquet, one file a batch, in every layout; returns their folders."""
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


def draw_questions(
    points: pa.Table, bounds: Bounds, count: int, rng: np.random.Generator
) -> dict[str, list[Question]]:
    """Draw questions around points of the window.

    Parameters
    ----------
    points
        The window.
    bounds
        The space; a box of a share of it has sides of the share's square root.
    count
        How many questions a case has.
    rng
        Draws the centres.

    Returns
    -------
    dict
        Case, then its questions.
    """
    lon, lat = points["lon"].to_numpy(), points["lat"].to_numpy()
    sides = np.array([bounds[2] - bounds[0], bounds[3] - bounds[1]])

    def centres() -> Floats:
        at = rng.integers(0, len(lon), count)
        return np.column_stack([lon[at], lat[at]])

    cases: dict[str, list[Question]] = {}
    for name, share in SHARES.items():
        middle, half = centres(), sides * math.sqrt(share) / 2
        corners = np.hstack([middle - half, middle + half]).tolist()
        cases[name] = [Question(Box(*corner)) for corner in corners]
    places = centres().tolist()
    cases[NEAREST] = [Question(Circle(x, y, math.inf), nearest=K) for x, y in places]
    return cases


def sql_of(question: Question, table: str) -> str:
    """Write a question in SQL that Spark and DuckDB read alike, over a table or view."""
    columns, shape = "id, event_time, lon, lat", question.shape
    if question.nearest is not None:
        assert isinstance(shape, Circle)
        distance = _haversine(_number(shape.cx), _number(shape.cy))
        return (
            f"SELECT {columns}, {distance} AS distance FROM {table} "
            f"ORDER BY distance, id LIMIT {question.nearest}"
        )
    assert isinstance(shape, Box)
    x0, y0, x1, y1 = map(_number, (shape.x0, shape.y0, shape.x1, shape.y1))
    where = f"lon BETWEEN {x0} AND {x1} AND lat BETWEEN {y0} AND {y1}"
    return f"SELECT {columns} FROM {table} WHERE {where}"


def _number(value: float) -> str:
    # With an exponent both engines read a double; without one, a decimal that they round.
    return f"{value:.17e}"


def _haversine(lon: str, lat: str) -> str:
    half_lat = f"sin((radians(lat) - radians({lat})) / 2)"
    half_lon = f"sin((radians(lon) - radians({lon})) / 2)"
    along = f"cos(radians({lat})) * cos(radians(lat)) * {half_lon} * {half_lon}"
    arc = f"least({half_lat} * {half_lat} + {along}, {_number(1.0)})"
    return f"2 * {_number(EARTH_RADIUS_M)} * asin(sqrt({arc}))"
