"""``roost bench snapshot``: snapshot queries on a window of a million points.

A stream has filled a window by count. All contenders run the same range and nearest-point queries,
one at a time, until the client has the complete result as Arrow. ``roost`` requests Arrow;
``roost_job`` does, too, but runs a Spark job even for the smallest query; ``roost_frame`` requests
a DataFrame and collects it. Spark SQL runs in the same session, and DuckDB in this process with as
many threads, both on Parquet, one file per batch, in two layouts: ``plain``, in order of arrival,
and ``sorted``, by longitude and latitude within a file, in small row groups, so that statistics of
row groups and pages exclude most of a file. Large results of Roost are memory-mapped files, which
count as complete: reading them copies nothing.

Each query runs on all contenders, in random order, before the next one, so that other work on the
machine affects all alike. Each result is compared with the others', and a difference ends the
benchmark. Writing the window and the Parquet files is not timed. Queries that run concurrently
with batches are not measured.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import Bounds, Pickups, data_dir, load_pickups, point_table
from roost.bench.common import CORES, Measured, Plot, Row, UnequalResults
from roost.bench.streams import pipeline_config
from roost.engine.pipeline import Pipeline
from roost.engine.snapshot import Snapshots
from roost.model.arrays import Floats
from roost.model.choices import WindowKind
from roost.model.records import Box, Circle
from roost.model.space import EARTH_RADIUS_M
from roost.window.snapshot import SnapshotQuery

SHARES: Mapping[str, float] = {"range 0.01 %": 0.0001, "range 1 %": 0.01, "range 25 %": 0.25}
SMALL = ("range 0.01 %", "range 1 %")
NEAREST = "nearest 10"
K = 10
SORTED_GROUP_ROWS = 4_096  # a dozen row groups per file; a small box reads one or two of them
PASS_GAP_US = 60_000_000
POINTS = 1_000_000
BATCH_ROWS = 50_000
QUERIES, QUERIES_QUICK = 40, 8
WARM, WARM_QUICK = 10, 2
SEED = 20140401
# Engines compute sines differently: a distance may differ in its last digits.
DISTANCE_TOLERANCE_M = 1e-6


@dataclass(frozen=True, slots=True)
class Contender:
    """A measured system: ``query`` is timed; ``tidy`` is called after each query, not timed."""

    name: str
    query: Callable[[SnapshotQuery], pa.Table]
    tidy: Callable[[], None] = lambda: None


def run(quick: bool) -> Measured:
    """Measure all contenders on all cases."""
    pickups = load_pickups(data_dir())
    points, bounds = windowed_points(pickups, POINTS), pickups.bounds
    rng = np.random.default_rng(SEED)
    warm = draw_queries(points, bounds, WARM_QUICK if quick else WARM, rng)
    timed = draw_queries(points, bounds, QUERIES_QUICK if quick else QUERIES, rng)
    with tempfile.TemporaryDirectory(prefix="roost-snapshot-") as name, ExitStack() as stack:
        contenders, fill_s = _contenders(points, bounds, Path(name), stack)
        measure(contenders, warm, rng)
        rows = measure(contenders, timed, rng)
    window = {"points": POINTS, "batch_rows": BATCH_ROWS, "data": pickups.source, "fill_s": fill_s}
    panels: dict[str, dict[str, dict[str, float]]] = {"p50": {}, "p95": {}}
    for row in rows:
        for panel, bars in panels.items():
            bars.setdefault(row["contender"], {})[row["case"]] = row[f"{panel}_ms"]
    title = "time of a query until its result is complete (ms)"
    return Measured(
        rows,
        summarise(rows),
        {"": Plot(title, panels, columns=2, log=True)},
        table={
            "case": ("case", ""),
            "contender": ("contender", ""),
            "p50 ms": ("p50_ms", ",.1f"),
            "p95 ms": ("p95_ms", ",.1f"),
            "rows": ("rows", ",.0f"),
        },
        more={"window": window},
    )


def _contenders(
    points: pa.Table, bounds: Bounds, folder: Path, stack: ExitStack
) -> tuple[list[Contender], float]:
    """Fill the window and open the files; also returns the seconds of filling."""
    path = folder / "points.parquet"
    pq.write_table(points, path, row_group_size=BATCH_ROWS, compression="none")
    settings = {
        "window.kind": WindowKind.COUNT,
        "window.length": points.num_rows,
        "engine.batch_rows": BATCH_ROWS,
        "out.sink": "count",
    }
    own = stack.enter_context(
        Pipeline(pipeline_config(str(path), bounds, folder / "roost", settings))
    )
    spark = own.spark  # the session starts before the clock does
    started = time.perf_counter()
    own.run()
    fill_s = time.perf_counter() - started
    jobs = stack.enter_context(closing(Snapshots(own.store.folder, spark, points_here=0)))

    def tidy() -> None:
        # Large results stay on disk until the pipeline is closed: hundreds of them are gigabytes.
        shutil.rmtree(own.store.folder / "answers", ignore_errors=True)

    contenders = [
        Contender("roost", lambda query: own.snapshots.run(query).table, tidy),
        Contender("roost_job", lambda query: jobs.run(query).table, tidy),
        Contender("roost_frame", lambda query: own.snapshots.frame(query).toArrow(), tidy),
    ]
    connection = stack.enter_context(open_duckdb())
    layouts = write_layouts(points, BATCH_ROWS, folder / "parquet")
    for layout, files in layouts.items():
        view = f"points_{layout}"
        spark.read.parquet(str(files)).createOrReplaceTempView(view)
        contenders += [
            Contender(f"spark_sql_{layout}", _spark_sql(own, view)),
            duckdb_contender(connection, layout, files),
        ]
    return contenders, fill_s


def _spark_sql(pipeline: Pipeline, view: str) -> Callable[[SnapshotQuery], pa.Table]:
    return lambda query: pipeline.spark.sql(sql_of(query, view)).toArrow()


@contextmanager
def open_duckdb() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database with as many threads as Spark has."""
    with duckdb.connect() as connection:
        connection.execute(f"SET threads = {CORES}")
        connection.execute("SET parquet_metadata_cache = true")
        yield connection


def duckdb_contender(connection: duckdb.DuckDBPyConnection, layout: str, folder: Path) -> Contender:
    """Return DuckDB on a layout of Parquet files."""
    view = f"points_{layout}"
    connection.execute(f"CREATE VIEW {view} AS SELECT * FROM read_parquet('{folder}/*.parquet')")
    return Contender(
        f"duckdb_{layout}", lambda query: connection.sql(sql_of(query, view)).to_arrow_table()
    )


def measure(
    contenders: Sequence[Contender],
    cases: Mapping[str, Sequence[SnapshotQuery]],
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Send all queries to all contenders, in a random order of contenders for each query.

    Returns a row for each case and contender; ``rows`` is the mean size of a result. Raises
    :class:`UnequalResults` if two results of a query differ.
    """
    found = []
    for case, queries in cases.items():
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        sizes = []
        for number, query in enumerate(queries):
            results = {}
            for at in rng.permutation(len(contenders)):
                contender = contenders[at]
                started = clock()
                results[contender.name] = contender.query(query)
                seconds[contender.name].append(clock() - started)
                contender.tidy()
            sizes.append(check_same(f"{case}, query {number}", results))
        found += [row_of(case, name, taken, sizes) for name, taken in seconds.items()]
    return found


def row_of(case: str, contender: str, seconds: Sequence[float], sizes: Sequence[int]) -> Row:
    """Return the row of one contender on one case."""
    p50, p95 = np.percentile(np.array(seconds) * 1e3, [50, 95])
    return {
        "case": case,
        "contender": contender,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "rows": float(np.mean(sizes)),
        "questions": len(seconds),
    }


def check_same(query: str, results: Mapping[str, pa.Table]) -> int:
    """Return the number of rows of the results; raise if two of them differ.

    Results of ranges must have the same identifiers, those of nearest points the same distances:
    the last of several points at one distance may be any of them.
    """
    (first, expected), *others = results.items()
    column = "distance" if "distance" in expected.column_names else "id"
    tolerance = DISTANCE_TOLERANCE_M if column == "distance" else 0.0
    values = np.sort(expected[column].to_numpy())
    for name, result in others:
        found = np.sort(result[column].to_numpy())
        if found.size != values.size or not np.allclose(found, values, rtol=0.0, atol=tolerance):
            raise UnequalResults(
                f"{query}: {first} has {values.size} rows, {name} has {found.size}, "
                f"with different values of {column}"
            )
    return int(values.size)


def summarise(rows: Iterable[Row]) -> dict[str, float]:
    """Return the ratios of other systems' p50 to Roost's, as geometric means over small ranges.

    For each range, the faster of a system's two layouts counts.
    """
    p50 = {(row["case"], row["contender"]): row["p50_ms"] for row in rows}

    def ratio(rival: str, own: str) -> float:
        over = [
            min(p50[case, f"{rival}_{layout}"] for layout in ("plain", "sorted")) / p50[case, own]
            for case in SMALL
        ]
        return geometric_mean(over)

    return {
        "ratio_vs_spark_sql": ratio("spark_sql", "roost"),
        "ratio_vs_duckdb": ratio("duckdb", "roost"),
        "job_ratio_vs_spark_sql": ratio("spark_sql", "roost_job"),
        "frame_ratio_vs_spark_sql": ratio("spark_sql", "roost_frame"),
    }


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
