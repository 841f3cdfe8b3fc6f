"""The workloads on which Roost and its rivals are measured.

A comparison is worth something only when every system reads the same bytes. A case is therefore a
folder of files: points, fewer points for the runs that write their matches, a handful of points
to warm up on, and the queries; plus a ``case.json`` that names them. Any process in any
environment can run a case from that one file.

The points are pickups in New York, skewed as cities are. Boxes have a side of 0.16 % of the space
(the box between the 0.1 % and 99.9 % quantiles of the points), and their centres are drawn from
the points themselves, then shifted by up to one and a half sides: questions gather where events
do, without sitting exactly on them. On the full data that gives about 24 matches per point
with 100 thousand boxes and ten times that with a million. Polygons are the city's taxi zones.

The large data lie in the folder that ``ROOST_DATA`` names. Without it the bundled sample of the
same points is used, and star-shaped polygons of the zones' number and size stand in for the zones.

Files are uncompressed and without dictionaries, because the decoder is not what is compared.
Nothing here runs a query.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import shapely

from roost.errors import SourceError

Kind = Literal["boxes", "polygons"]
Floats = npt.NDArray[np.float64]
Bounds = tuple[float, float, float, float]

SEED = 20140401
SIDE_SHARE = 0.0016
JITTER_SIDES = 1.5
SPACE_QUANTILE = 0.001
ROW_GROUP_ROWS = 131_072
# Readers hand out whole row groups: a file needs several of them for two cores to end together.
ROW_GROUPS_MIN = 8
STAND_IN_POLYGONS = 263
STAND_IN_VERTICES = 355
POINTS_FILE = "nyc_uber_pickups_2014q2.parquet"
ZONES_FILE = "geofences/nyc_taxi_zones.geojson"


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """How large a case is to be.

    Parameters
    ----------
    name
        Its name in reports.
    kind
        Boxes or polygons.
    queries
        How many boxes; the number of polygons is what the data give.
    points, write_points, warm_points
        Rows of the three point files; with no points to write, the case is only counted.
    timed_s, warm_s
        How long a rival's timed passes last at least, and its warm-up.
    """

    name: str
    kind: Kind
    queries: int
    points: int
    write_points: int
    warm_points: int = 32_768
    timed_s: float = 4.0
    warm_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on disk.

    Parameters
    ----------
    name
        Its name in reports.
    kind
        Boxes (``x0, y0, x1, y1``) or polygons (``wkt``).
    points_path, write_points_path, warm_points_path
        Parquet with ``id, event_time, lon, lat``, in event order: for counting, for writing,
        for warming up.
    queries_path
        Parquet of register requests.
    bounds
        The space, ``x0, y0, x1, y1``.
    points, write_points, queries
        Rows of those files.
    side_x, side_y
        Sides of a box, or the mean sides of the polygons' bounding boxes.
    data
        Where the points come from, in words.
    timed_s, warm_s
        How long a rival's timed passes last at least, and its warm-up.
    """

    name: str
    kind: Kind
    points_path: str
    write_points_path: str
    warm_points_path: str
    queries_path: str
    bounds: Bounds
    points: int
    write_points: int
    queries: int
    side_x: float
    side_y: float
    data: str
    timed_s: float
    warm_s: float

    def save(self, path: Path) -> None:
        """Write the case as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Case:
        """Read a case that :meth:`save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text())
        x0, y0, x1, y1 = fields.pop("bounds")
        return cls(bounds=(x0, y0, x1, y1), **fields)


FULL = (
    CaseSpec("boxes_100k", "boxes", 100_000, points=1_048_576, write_points=262_144),
    CaseSpec("boxes_1m", "boxes", 1_000_000, points=524_288, write_points=65_536),
    CaseSpec("polygons", "polygons", 0, points=1_048_576, write_points=524_288),
)
# Starting the systems is most of a quick run, so it starts each of them only three times.
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


def data_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of large data, or None where ``ROOST_DATA`` is not set."""
    value = environ.get("ROOST_DATA")
    return Path(value) if value else None


def load_pickups(folder: Path | None) -> Pickups:
    """Read the points of the cases.

    Parameters
    ----------
    folder
        Folder of the large data; None for the bundled sample.
    """
    if folder is None:
        sample = resources.files("roost") / "data" / "sample_points.parquet"
        with resources.as_file(sample) as path:
            return _read_pickups(path, "bundled sample")
    return _read_pickups(folder / POINTS_FILE, POINTS_FILE)


def _read_pickups(path: Path, source: str) -> Pickups:
    if not path.is_file():
        raise SourceError(f"the benchmark's points are missing: {path.name}")
    table = pq.read_table(path, columns=["event_time", "lon", "lat"]).sort_by("event_time")
    return Pickups(
        table["event_time"].cast(pa.timestamp("us", tz="UTC")),
        table["lon"].to_numpy(),
        table["lat"].to_numpy(),
        source,
    )


def make_case(spec: CaseSpec, pickups: Pickups, folder: Path, data: Path | None) -> Case:
    """Write one case and return it.

    Parameters
    ----------
    spec
        How large.
    pickups
        The points to draw from.
    folder
        Where the files go; the case itself is saved there as ``case.json``.
    data
        Folder with the taxi zones; None for the stand-in polygons.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bounds = pickups.bounds
    if spec.kind == "boxes":
        queries = box_requests(boxes_of(pickups, spec.queries, np.random.default_rng(SEED)))
        side_x, side_y = _sides(bounds)
    else:
        polygons = zones(data) if data else stand_in_zones(pickups, np.random.default_rng(SEED))
        queries = polygon_requests(polygons)
        corners = shapely.bounds(polygons)
        side_x = float(np.mean(corners[:, 2] - corners[:, 0]))
        side_y = float(np.mean(corners[:, 3] - corners[:, 1]))
    pq.write_table(queries, folder / "queries.parquet", compression="none", use_dictionary=False)
    sizes = {"points": spec.points, "write": spec.write_points, "warm": spec.warm_points}
    rows = {
        name: _write_points(pickups, n, folder / f"{name}.parquet") for name, n in sizes.items()
    }
    case = Case(
        name=spec.name,
        kind=spec.kind,
        points_path=str(folder / "points.parquet"),
        write_points_path=str(folder / "write.parquet"),
        warm_points_path=str(folder / "warm.parquet"),
        queries_path=str(folder / "queries.parquet"),
        bounds=bounds,
        points=rows["points"],
        write_points=rows["write"],
        queries=queries.num_rows,
        side_x=side_x,
        side_y=side_y,
        data=pickups.source,
        timed_s=spec.timed_s,
        warm_s=spec.warm_s,
    )
    case.save(folder / "case.json")
    return case


def make_cases(
    specs: tuple[CaseSpec, ...],
    folder: Path,
    data: Path | None,
    on_case: Callable[[str], None] = lambda name: None,
) -> list[Case]:
    """Write several cases below a folder.

    Parameters
    ----------
    specs
        The cases.
    folder
        Each case gets a folder of its name in it.
    data
        Folder of the large data; None for the bundled sample.
    on_case
        Called with a case's name before it is made.
    """
    pickups = load_pickups(data)
    made = []
    for spec in specs:
        on_case(spec.name)
        made.append(make_case(spec, pickups, folder / spec.name, data))
    return made


def _sides(bounds: Bounds) -> tuple[float, float]:
    x0, y0, x1, y1 = bounds
    return (x1 - x0) * SIDE_SHARE, (y1 - y0) * SIDE_SHARE


def boxes_of(pickups: Pickups, count: int, rng: np.random.Generator) -> Floats:
    """Draw boxes from the skew of the points: ``count`` rows of ``x0, y0, x1, y1``."""
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
    """Make star-shaped polygons around points, as many and as long as the taxi zones."""
    x0, y0, x1, y1 = pickups.bounds
    at = rng.integers(0, len(pickups.lon), STAND_IN_POLYGONS)
    angle = np.linspace(0, 2 * np.pi, STAND_IN_VERTICES, endpoint=False)
    ring = np.column_stack([np.cos(angle) * (x1 - x0), np.sin(angle) * (y1 - y0)])
    radius = rng.uniform(0.01, 0.03, (STAND_IN_POLYGONS, 1, 1))
    rough = rng.uniform(0.7, 1.0, (STAND_IN_POLYGONS, STAND_IN_VERTICES, 1))
    centre = np.column_stack([pickups.lon[at], pickups.lat[at]])[:, None, :]
    return np.asarray(shapely.polygons(centre + radius * rough * ring), dtype=object)


def _requests(count: int, shape: dict[str, pa.Array]) -> pa.Table:
    ids = np.arange(count, dtype=np.int64)
    return pa.table(
        {
            "seq": ids,
            "op": pa.array(["register"] * count),
            "query_id": ids,
            "user_id": pa.array([f"u{i % 1000}" for i in range(count)]),
            **shape,
        }
    )


def box_requests(boxes: Floats) -> pa.Table:
    """Turn boxes into register requests."""
    columns = dict(zip(("x0", "y0", "x1", "y1"), boxes.T.copy(), strict=True))
    return _requests(len(boxes), {name: pa.array(values) for name, values in columns.items()})


def polygon_requests(polygons: npt.NDArray[np.object_]) -> pa.Table:
    """Turn polygons into register requests, losing no digit of their coordinates."""
    wkt = shapely.to_wkt(polygons, rounding_precision=-1)
    return _requests(len(polygons), {"wkt": pa.array(list(wkt), pa.string())})


def _write_points(pickups: Pickups, wanted: int, path: Path) -> int:
    # Every n-th point, not the first n: the whole quarter's hours and places, still in order.
    available = len(pickups.lon)
    at = np.unique(np.linspace(0, available - 1, min(wanted, available)).astype(np.int64))
    table = pa.table(
        {
            "id": at,
            "event_time": pickups.event_time.take(pa.array(at)),
            "lon": pickups.lon[at],
            "lat": pickups.lat[at],
        }
    )
    rows = min(ROW_GROUP_ROWS, max(1, -(-len(at) // ROW_GROUPS_MIN)))
    pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    return len(at)
