"""Data, random queries and the oracle of ``roost bench synopsis``.

Places of the weather data are fixed, so the oracle decides with numpy and shapely which of them a
shape contains; DuckDB evaluates times, hours and predicates over the rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import shapely

from roost.bench.cases import data_dir
from roost.errors import SourceError
from roost.model.arrays import Floats
from roost.model.records import Box, Circle, Polygon
from roost.model.space import haversine_m
from roost.storage.agreement import agree
from roost.storage.store import Store
from roost.synopsis import Scope, Sketch, Synopsis, SynopsisResult
from roost.synopsis.ageing import Band, gather_sets
from roost.synopsis.budget import Budget
from roost.synopsis.catalogue import SPEC, Catalogue, FileKind, sketch_files, write_parts
from roost.synopsis.queries import run_query
from roost.synopsis.reader import SynopsisReader

WEATHER = "br_weather_hourly_2024h1.parquet"
STATES = "geofences/br_states.geojson"
FEATURES = (
    *("temp_c", "dewpoint_c", "humidity_pct", "pressure_hpa", "precip_mm"),
    *("wind_speed_ms", "wind_gust_ms", "wind_dir_deg", "radiation_kj_m2"),
)
HOUR_US = 3_600_000_000
SLOT_HOURS = 3


@dataclass(frozen=True)
class Weather:
    """The table, its places, and the borders of the states."""

    table: pa.Table  # event_time, lon, lat, the features
    sites: Floats  # distinct positions
    states: tuple[str, ...]  # as WKT


def load_weather(rows: int | None) -> Weather:
    """Read the data set, or its first rows."""
    folder = data_dir()
    if folder is None or not (folder / WEATHER).is_file():
        raise SourceError(f"roost bench synopsis reads {WEATHER}: set ROOST_DATA to its folder")
    columns = ["event_time", "lon", "lat", *FEATURES]
    table = pq.read_table(folder / WEATHER, columns=columns).slice(0, rows).combine_chunks()
    positions = np.stack([np.asarray(table["lon"]), np.asarray(table["lat"])], axis=1)
    return Weather(table, np.unique(positions, axis=0), _states(folder / STATES))


def _states(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    features = json.loads(path.read_text())["features"]
    shapes = (shapely.from_geojson(json.dumps(feature["geometry"])) for feature in features)
    return tuple(shapely.to_wkt(shape) for shape in shapes)


class Oracle:
    """DuckDB over the rows."""

    def __init__(self, weather: Weather, connection: duckdb.DuckDBPyConnection) -> None:
        self.sites = weather.sites
        self.connection = connection
        positions = np.stack([np.asarray(weather.table[name]) for name in ("lon", "lat")], axis=1)
        site = np.unique(positions, axis=0, return_inverse=True)[1].astype(np.int32)
        times = weather.table["event_time"].cast(pa.int64())
        table = weather.table.append_column("site", pa.array(site)).append_column("us", times)
        connection.register("arrow_rows", table)
        connection.execute("create table weather as select * from arrow_rows")
        connection.unregister("arrow_rows")

    def condition(self, scope: Scope) -> str:
        """Return the SQL condition of a scope."""
        parts = ["true"]
        if scope.shape is not None:
            inside = np.flatnonzero(contains(scope.shape, self.sites))
            parts.append(f"site in ({', '.join(map(str, inside)) or '-1'})")
        if scope.since is not None:
            parts.append(f"us >= {scope.since}")
        if scope.until is not None:
            parts.append(f"us < {scope.until}")
        if scope.hours is not None:
            start, stop = scope.hours
            word = "and" if start < stop else "or"
            hour = f"us // {HOUR_US} % 24"
            parts.append(f"({hour} >= {start} {word} {hour} < {stop})")
        if scope.predicate is not None:
            parts.append(f"({scope.predicate})")
        return " and ".join(parts)

    def value(self, expression: str, scope: Scope) -> float | None:
        """Return an aggregate over the rows of a scope."""
        sql = f"select {expression} from weather where {self.condition(scope)}"
        # All rows: an unfinished result would block the connection.
        ((value,),) = self.connection.execute(sql).fetchall()
        return None if value is None else float(value)


def contains(shape: Box | Circle | Polygon, sites: Floats) -> Any:
    """Return which sites a shape contains."""
    x, y = sites.T
    if isinstance(shape, Box):
        return (shape.x0 <= x) & (x <= shape.x1) & (shape.y0 <= y) & (y <= shape.y1)
    if isinstance(shape, Circle):
        return haversine_m(shape.cx, shape.cy, x, y) <= shape.radius
    return shapely.intersects_xy(shapely.from_wkt(shape.text), x, y)


@dataclass(frozen=True)
class RandomQuery:
    """A random query: what to compute, of which features, in which scope."""

    kind: str
    features: tuple[str, ...]
    scope: Scope
    rank: float = 0.5
    recorded: bool = True  # the constants of the predicate are values of the rows

    def run(self, synopsis: Sketch) -> SynopsisResult:
        """Return the result of the synopsis."""
        name, arguments = self.query
        return self._first(run_query(synopsis, name, arguments))

    def run_on(self, reader: SynopsisReader) -> SynopsisResult:
        """Return the result of the synopsis of a state directory."""
        name, arguments = self.query
        return self._first(reader.query(name, **arguments).result)

    def _first(self, result: Any) -> SynopsisResult:
        found: SynopsisResult = result[0] if self.kind == "quantile" else result
        return found

    @property
    def query(self) -> tuple[str, dict[str, Any]]:
        """The name of the query, and its arguments."""
        scope = {"scope": self.scope}
        if self.kind == "count":
            return "count", scope
        if self.kind == "quantile":
            return "quantiles", {"feature": self.features[0], "ranks": [self.rank], **scope}
        if self.kind == "correlation":
            return "correlation", dict(zip(("first", "second"), self.features, strict=True)) | scope
        return self.kind, {"feature": self.features[0], **scope}

    @property
    def sql(self) -> str:
        """The same as an aggregate of DuckDB, in double precision."""
        wide = [f"{name}::double" for name in self.features]
        return {
            "count": "count(*)",
            "mean": f"favg({wide[0]})" if wide else "",
            "stddev": f"stddev_samp({wide[0]})" if wide else "",
            "correlation": f"corr({', '.join(wide)})",
            "quantile": f"quantile_cont({wide[0]}, {self.rank})" if wide else "",
        }[self.kind]


class Draw:
    """Random queries over the weather data."""

    def __init__(self, weather: Weather, seed: int) -> None:
        self.weather = weather
        self.rng = np.random.default_rng(seed)
        times = weather.table["event_time"].cast(pa.int64())
        self.first, self.last = times[0].as_py(), times[-1].as_py()
        values = {name: weather.table[name].drop_null() for name in FEATURES}
        self.values = {name: np.asarray(column) for name, column in values.items()}

    def times(self) -> tuple[int, int]:
        """Draw a range of hours."""
        hours = (self.last - self.first) // HOUR_US + 1
        a, b = sorted(self.rng.choice(hours + 1, 2, replace=False))
        return self.first + int(a) * HOUR_US, self.first + int(b) * HOUR_US

    def slot(self) -> tuple[int, int]:
        """Draw a run of hour-of-day slots."""
        slots = 24 // SLOT_HOURS
        start = int(self.rng.integers(slots))
        length = int(self.rng.integers(1, slots))
        stop = (start + length) % slots or slots
        return start * SLOT_HOURS, stop * SLOT_HOURS

    def circle(self, low_km: float, high_km: float) -> Circle:
        """Draw a circle around a place."""
        x, y = self.weather.sites[self.rng.integers(len(self.weather.sites))]
        radius = 1000.0 * np.exp(self.rng.uniform(np.log(low_km), np.log(high_km)))
        return Circle(float(x), float(y), float(radius))

    def place(self) -> Box | Circle | Polygon | None:
        """Draw a circle, a box, a state, or everything."""
        kind = self.rng.integers(4)
        if kind == 0:
            return self.circle(20.0, 800.0)
        if kind == 1 and self.weather.states:
            return Polygon(self.weather.states[self.rng.integers(len(self.weather.states))])
        if kind == 2:
            x, y = self.weather.sites[self.rng.integers(len(self.weather.sites))]
            width, height = self.rng.uniform(0.5, 10.0, 2)
            return Box(float(x - width), float(y - height), float(x + width), float(y + height))
        return None

    def predicate(self, recorded: bool) -> str:
        """Draw one or two conditions, with recorded values or any between the extremes."""
        conditions = []
        for name in self.features(int(self.rng.integers(1, 3))):
            values = self.values[name]
            drawn = self.rng.choice(values, 2)
            if not recorded:
                drawn = self.rng.uniform(values.min(), values.max(), 2).astype(np.float32)
            low, high = sorted(float(v) for v in drawn)
            kind = self.rng.integers(3)
            if kind == 0:
                conditions.append(f"{name} > {low!r}")
            elif kind == 1:
                conditions.append(f"{name} <= {high!r}")
            else:
                conditions.append(f"{name} between {low!r} and {high!r}")
        return " and ".join(conditions)

    def features(self, number: int) -> tuple[str, ...]:
        """Draw distinct features."""
        return tuple(str(name) for name in self.rng.choice(FEATURES, number, replace=False))

    def country(self) -> RandomQuery:
        """Draw a country-wide correlation in a range of time and slots."""
        since, until = self.times()
        scope = Scope(since=since, until=until, hours=self.slot())
        return RandomQuery("correlation", self.features(2), scope)

    def local(self, low_km: float = 5.0, high_km: float = 100.0) -> Scope:
        """Draw a region, small by default, and a range of time."""
        since, until = self.times()
        return Scope(self.circle(low_km, high_km), since, until, self.slot())

    def any(self) -> RandomQuery:
        """Draw a query of any kind with any scope; half of them are counts."""
        kinds = ("count", "count", "count", "count", "mean", "stddev", "correlation", "quantile")
        kind = str(self.rng.choice(kinds))
        since, until = self.times()
        hours = self.slot() if self.rng.random() < 0.5 else None
        scope = Scope(self.place(), since, until, hours)
        recorded = bool(self.rng.random() < 0.5)
        if kind == "count" or self.rng.random() < 0.5:
            scope = replace(scope, predicate=self.predicate(recorded))
        number = {"count": 0, "correlation": 2}.get(kind, 1)
        return RandomQuery(kind, self.features(number), scope, float(self.rng.random()), recorded)


@contextmanager
def served(synopsis: Synopsis) -> Iterator[SynopsisReader]:
    """Write a synopsis as the base of a state directory, and open it as a run's is opened."""
    with tempfile.TemporaryDirectory() as name:
        with closing(Store(Path(name), durable=False)) as store:
            agree(store, {SPEC: synopsis.spec.to_json()})
            sets = gather_sets([synopsis], Budget(1 << 40), 0)
            bands = (Band(0, part) for part in (synopsis.without_sets(), *sets))
            parts = [(0, band) for band in bands]
            base = write_parts(sketch_files(store), "job-0.base", FileKind.BASE, parts)
            known = Catalogue(batch_id=0)
            store.record(*replace(known, bins=synopsis.bins).changed([base], []).facts(known))
        with closing(SynopsisReader(Path(name))) as reader:
            yield reader


def batches(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    """Yield a table in slices."""
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def widths_of(pairs: Sequence[tuple[RandomQuery, SynopsisResult, float | None]]) -> list[float]:
    """Return the relative widths of the count queries that select rows."""
    return [
        (result.high - result.low) / truth
        for query, result, truth in pairs
        if query.kind == "count" and truth and result.low is not None and result.high is not None
    ]
