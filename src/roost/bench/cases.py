"""The workloads on which Roost and other systems are measured.

All systems read the same files. A case is a folder with three files of points (to count matches,
to write them, to warm up), the queries, and a ``case.json`` that names them, so that a process in
any environment can run it.

The points are pickups in New York. Boxes have a side of 0.16 % of the space, which is the box
between the 0.1 % and 99.9 % quantiles of the points. Their centres are points, shifted by up to
one and a half sides: queries concentrate where points do, without being centred on them. On the
full data that gives about 24 matches per point with 100 thousand boxes and ten times that with a
million. Polygons are the city's taxi zones.

``ROOST_DATA`` names the folder of the full data. Without it, cases use the bundled sample of the
same points, and star-shaped polygons of the zones' number and size.

Files are uncompressed and without dictionaries, because decoders are not compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import shapely

import roost
from roost.errors import SourceError
from roost.model.arrays import Floats

Kind = Literal["boxes", "polygons"]
Bounds = tuple[float, float, float, float]

SEED = 20140401
SIDE_SHARE = 0.0016
JITTER_SIDES = 1.5
SPACE_QUANTILE = 0.001
ROW_GROUP_ROWS = 131_072
# Systems read whole row groups; several per core keep all cores busy until the end.
ROW_GROUPS_MIN = 8
USERS = 1000
STAND_IN_POLYGONS = 263
STAND_IN_VERTICES = 355
SAMPLE = Path(roost.__file__).parent / "data" / "sample_points.parquet"
POINTS_FILE = "nyc_uber_pickups_2014q2.parquet"
ZONES_FILE = "geofences/nyc_taxi_zones.geojson"


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """The size of a case: numbers of queries and points, and minimum durations."""

    name: str
    kind: Kind
    queries: int  # boxes; the data determine the number of polygons
    points: int
    write_points: int  # 0: matches are only counted
    warm_points: int = 32_768
    timed_s: float = 4.0
    warm_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(CaseSpec):
    """A workload on disk, with its actual numbers of points and queries."""

    points_path: str  # Parquet with id, event_time, lon and lat, in event order
    write_points_path: str
    warm_points_path: str
    queries_path: str  # Parquet of register requests with x0, y0, x1, y1 or wkt
    bounds: Bounds
    side_x: float  # of a box, or the mean of the polygons' bounding boxes
    side_y: float
    data: str  # from which the points come

    @classmethod
    def load(cls, path: Path) -> Case:
        """Read the ``case.json`` that :func:`make_case` wrote."""
        data = json.loads(path.read_text())
        return cls(**{**data, "bounds": tuple(data["bounds"])})


FULL = (
    CaseSpec("boxes_100k", "boxes", 100_000, points=1_048_576, write_points=262_144),
    CaseSpec("boxes_1m", "boxes", 1_000_000, points=524_288, write_points=65_536),
    CaseSpec("polygons", "polygons", 0, points=1_048_576, write_points=524_288),
)
# Starting the systems takes most of a quick run, so it starts each only three times.
QUICK = (
    CaseSpec(
        "boxes_20k", "boxes", 20_000, points=131_072, write_points=32_768, timed_s=1.0, warm_s=1.0
    ),
    CaseSpec("polygons", "polygons", 0, points=131_072, write_points=0, timed_s=1.0, warm_s=1.0),
)


@dataclass(frozen=True, slots=True)
class Pickups:
    """All points that cases are drawn from, in event order."""

    event_time: pa.ChunkedArray
    lon: Floats
    lat: Floats
    source: str

    @property
    def bounds(self) -> Bounds:
        """The space: the quantile box of the points."""
        q = [SPACE_QUANTILE, 1 - SPACE_QUANTILE]
        (x0, x1), (y0, y1) = np.quantile(self.lon, q), np.quantile(self.lat, q)
        return float(x0), float(y0), float(x1), float(y1)


def data_dir() -> Path | None:
    """Return the folder of the full data; None if ``ROOST_DATA`` is not set."""
    value = os.environ.get("ROOST_DATA")
    return Path(value) if value else None


def load_pickups(folder: Path | None) -> Pickups:
    """Read the points from the folder of the full data; None reads the bundled sample."""
    source = "bundled sample" if folder is None else POINTS_FILE
    path = SAMPLE if folder is None else folder / POINTS_FILE
    if not path.is_file():
        raise SourceError(f"the points of the benchmarks are missing: {path.name} in ROOST_DATA")
    table = pq.read_table(path, columns=["event_time", "lon", "lat"]).sort_by("event_time")
    times = table["event_time"].cast(pa.timestamp("us", tz="UTC"))
    return Pickups(times, table["lon"].to_numpy(), table["lat"].to_numpy(), source)


def point_table(ids: npt.NDArray[np.int64], event_time: Any, lon: Floats, lat: Floats) -> pa.Table:
    """Return points with the columns that all benchmarks use."""
    return pa.table({"id": ids, "event_time": event_time, "lon": lon, "lat": lat})


def make_case(spec: CaseSpec, pickups: Pickups, folder: Path, data: Path | None) -> Case:
    """Write a case into a folder and return it; without data, polygons are stand-ins."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = pickups.bounds
    if spec.kind == "boxes":
        queries = box_requests(boxes_of(pickups, spec.queries, np.random.default_rng(SEED)))
        side_x, side_y = _sides(bounds)
    else:
        polygons = zones(data) if data else stand_in_zones(pickups, np.random.default_rng(SEED))
        queries = polygon_requests(polygons)
        corners = shapely.bounds(polygons)
        side_x, side_y = (corners[:, 2:] - corners[:, :2]).mean(axis=0).tolist()
    files = ("points", "write_points", "warm_points", "queries")
    paths = {name: folder / f"{name}.parquet" for name in files}
    pq.write_table(queries, paths["queries"], compression="none", use_dictionary=False)
    given = dataclasses.asdict(spec)
    rows = {name: _write_points(pickups, given[name], paths[name]) for name in files[:3]}
    case = Case(
        **{**given, **rows, "queries": queries.num_rows},
        points_path=str(paths["points"]),
        write_points_path=str(paths["write_points"]),
        warm_points_path=str(paths["warm_points"]),
        queries_path=str(paths["queries"]),
        bounds=bounds,
        side_x=side_x,
        side_y=side_y,
        data=pickups.source,
    )
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case), indent=2) + "\n")
    return case


def make_cases(specs: Iterable[CaseSpec], folder: Path, data: Path | None) -> list[Case]:
    """Write cases into subfolders of their names; without data, from the bundled sample."""
    pickups = load_pickups(data)
    return [make_case(spec, pickups, folder / spec.name, data) for spec in specs]


def _sides(bounds: Bounds) -> tuple[float, float]:
    x0, y0, x1, y1 = bounds
    return (x1 - x0) * SIDE_SHARE, (y1 - y0) * SIDE_SHARE


def boxes_of(pickups: Pickups, count: int, rng: np.random.Generator) -> Floats:
    """Draw boxes near points: ``count`` rows of ``x0, y0, x1, y1``."""
    side = np.array(_sides(pickups.bounds))
    at = rng.integers(0, len(pickups.lon), count)
    shift = rng.uniform(-JITTER_SIDES, JITTER_SIDES, (count, 2)) * side
    centre = np.column_stack([pickups.lon[at], pickups.lat[at]]) + shift
    return np.hstack([centre - side / 2, centre + side / 2])


def zones(folder: Path) -> npt.NDArray[np.object_]:
    """Read the taxi zones."""
    features = json.loads((folder / ZONES_FILE).read_text())["features"]
    return np.array([shapely.geometry.shape(f["geometry"]) for f in features], dtype=object)


def stand_in_zones(pickups: Pickups, rng: np.random.Generator) -> npt.NDArray[np.object_]:
    """Make star-shaped polygons around points, as many and with as many vertices as the zones."""
    x0, y0, x1, y1 = pickups.bounds
    at = rng.integers(0, len(pickups.lon), STAND_IN_POLYGONS)
    angle = np.linspace(0, 2 * np.pi, STAND_IN_VERTICES, endpoint=False)
    ring = np.column_stack([np.cos(angle) * (x1 - x0), np.sin(angle) * (y1 - y0)])
    radius = rng.uniform(0.01, 0.03, (STAND_IN_POLYGONS, 1, 1))
    rough = rng.uniform(0.7, 1.0, (STAND_IN_POLYGONS, STAND_IN_VERTICES, 1))
    centre = np.column_stack([pickups.lon[at], pickups.lat[at]])[:, None, :]
    return np.asarray(shapely.polygons(centre + radius * rough * ring), dtype=object)


def user_of(query_id: int) -> str:
    """Return the user of a query; only they may terminate it."""
    return f"u{query_id % USERS}"


def _requests(count: int, shape: dict[str, pa.Array]) -> pa.Table:
    ids = np.arange(count, dtype=np.int64)
    users = pa.array([user_of(i) for i in range(count)])
    ops = pa.array(["register"] * count)
    return pa.table({"seq": ids, "op": ops, "query_id": ids, "user_id": users, **shape})


def box_requests(boxes: Floats) -> pa.Table:
    """Turn boxes into register requests."""
    columns = zip(("x0", "y0", "x1", "y1"), boxes.T.copy(), strict=True)
    return _requests(len(boxes), {name: pa.array(values) for name, values in columns})


def polygon_requests(polygons: npt.NDArray[np.object_]) -> pa.Table:
    """Turn polygons into register requests, with all digits of their coordinates."""
    wkt = shapely.to_wkt(polygons, rounding_precision=-1)
    return _requests(len(polygons), {"wkt": pa.array(list(wkt), pa.string())})


def _write_points(pickups: Pickups, count: int, path: Path) -> int:
    # Every n-th point, not the first n: all hours and places of the data, still in order.
    available = len(pickups.lon)
    at = np.unique(np.linspace(0, available - 1, min(count, available)).astype(np.int64))
    times = pickups.event_time.take(pa.array(at))
    table = point_table(at, times, pickups.lon[at], pickups.lat[at])
    rows = min(ROW_GROUP_ROWS, max(1, -(-len(at) // ROW_GROUPS_MIN)))
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    return len(at)
