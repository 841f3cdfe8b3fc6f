"""Points and requests for the pipeline tests, with expected and actual results.

A case has points and requests as dictionaries, each with its expected rejection reason, if any.
The expected matches come from the brute force of ``oracle.py``; requests are applied one at a time.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from roost import Pipeline, RunConfig
from roost.model.choices import Strategy
from roost.model.records import Reason
from roost.model.schemas import TIMESTAMP
from roost.model.settings import with_settings
from roost.model.space import Coordinates, Rect
from roost.testing.oracle import brute_force

PLANE = Rect(0.0, 0.0, 64.0, 32.0)
CITY = Rect(-74.25, 40.5, -73.75, 41.0)
START_US = 1_396_310_400_000_000

Record = dict[str, Any]


def _known(value: Any, test: Callable[[Any], bool]) -> bool:
    return value is not None and test(value)


# Each predicate with its meaning in Python; a comparison with null is never true.
PREDICATES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "fare > 50": lambda p: _known(p["fare"], lambda v: v > 50),
    "fare >= 50 and base = 'B1'": lambda p: (
        _known(p["fare"], lambda v: v >= 50) and p["base"] == "B1"
    ),
    "base in ('B1', 'B3') or fare < 10": lambda p: (
        p["base"] in ("B1", "B3") or _known(p["fare"], lambda v: v < 10)
    ),
    "not (base = 'B2')": lambda p: _known(p["base"], lambda v: v != "B2"),
    "note has any ('late', 'rain')": lambda p: _known(
        p["note"], lambda v: bool({"late", "rain"} & set(v.split()))
    ),
    "fare is null": lambda p: p["fare"] is None,
}


@dataclass(frozen=True)
class Case:
    """Points and requests; ``expect`` in a record is its expected rejection reason."""

    points: list[Record]
    requests: list[Record]
    lonlat: bool = False
    timestamps: bool = True
    text_ids: bool = False
    row_ids: bool = False

    @property
    def bounds(self) -> Rect:
        return CITY if self.lonlat else PLANE

    @property
    def names(self) -> tuple[str, str]:
        return ("lon", "lat") if self.lonlat else ("x", "y")

    @property
    def time_type(self) -> pa.DataType:
        return TIMESTAMP if self.timestamps else pa.int64()


def settle(requests: Sequence[Record]) -> tuple[list[Record], list[tuple[int, str]]]:
    """Apply requests in order; returns queries with lifetimes, and rejected (position, reason).

    A name may have several lifetimes, which do not overlap; one that ends before it begins is
    empty.
    """
    queries: list[Record] = []
    lives: dict[Any, list[Record]] = {}
    refused: list[tuple[int, str]] = []
    for place, request in enumerate(requests):
        mine = lives.setdefault(request.get("query_id"), [])
        at = -math.inf if request.get("at") is None else request["at"]
        if request.get("expect"):
            refused.append((place, str(request["expect"])))
        elif request["op"] == "register":
            if mine and mine[-1]["live_until"] > at:
                refused.append((place, Reason.DUPLICATE_QUERY.value))
                continue
            until = math.inf if request.get("expires_at") is None else request["expires_at"]
            if at < until:
                mine.append({**request, "live_from": at, "live_until": until})
                queries.append(mine[-1])
        elif not mine:
            refused.append((place, Reason.UNKNOWN_QUERY.value))
        elif mine[-1]["user_id"] != request["user_id"]:
            refused.append((place, Reason.NOT_OWNER.value))
        else:
            mine[-1]["live_until"] = min(mine[-1]["live_until"], at)
            if mine[-1]["live_until"] <= mine[-1]["live_from"]:
                mine.pop()
    return queries, refused


def pairs(points: Iterable[Record], queries: Iterable[Record], lonlat: bool) -> list[Any]:
    """Match the accepted points by brute force."""
    good = [point for point in points if not point.get("expect")]
    return brute_force(
        good, queries, lonlat=lonlat, predicate=lambda text, point: PREDICATES[text](point)
    )


def expected(case: Case) -> list[tuple[Any, Any, int]]:
    """Return the matches as (query, point, time), if all requests precede the points."""
    queries, _ = settle(case.requests)
    times = {point["id"]: point["time"] for point in case.points}
    return sorted((q, p, times[p]) for q, p in pairs(case.points, queries, case.lonlat))


# --------------------------------------------------------------------------- files


def point_table(case: Case, points: Sequence[Record] | None = None) -> pa.Table:
    """Return points as a table; the values determine the column types."""
    points = case.points if points is None else points
    x, y = case.names
    columns: dict[str, pa.Array] = {
        "event_time": pa.array([point["time"] for point in points], pa.int64()).cast(
            case.time_type
        ),
        x: pa.array([point["x"] for point in points], pa.float64()),
        y: pa.array([point["y"] for point in points], pa.float64()),
        "fare": pa.array([point.get("fare") for point in points], pa.float64()),
        "base": pa.array([point.get("base") for point in points], pa.string()),
        "note": pa.array([point.get("note") for point in points], pa.string()),
    }
    if not case.row_ids:
        kind = pa.string() if case.text_ids else pa.int64()
        columns["id"] = pa.array([_point_id(point) for point in points], kind)
    return pa.table(columns)


def _point_id(point: Record) -> Any:
    return None if point.get("expect") == Reason.NULL_ID else point["id"]


REQUEST_FIELDS = ("x0", "y0", "x1", "y1", "cx", "cy", "radius")


def request_table(case: Case, requests: Sequence[Record] | None = None) -> pa.Table:
    requests = case.requests if requests is None else requests
    numbers = {
        name: pa.array([request.get(name) for request in requests], pa.float64())
        for name in REQUEST_FIELDS
    }
    texts = {
        name: pa.array([request.get(name) for request in requests], pa.string())
        for name in ("op", "user_id", "wkt", "predicate")
    }
    times = {
        name: pa.array([request.get(name) for request in requests], pa.int64()).cast(case.time_type)
        for name in ("at", "expires_at")
    }
    kind = pa.string() if case.text_ids else pa.int64()
    ids = pa.array([request.get("query_id") for request in requests], kind)
    seq = pa.array(range(len(requests)), pa.int64())
    return pa.table({"seq": seq, "query_id": ids, **numbers, **texts, **times})


@dataclass(frozen=True)
class Outcome:
    """The output of a run."""

    matches: list[tuple[Any, Any, int]]
    dead: list[Record]
    report: Record
    batches: dict[tuple[Any, Any], list[int]] = field(default_factory=dict)

    def refused(self, origin: str) -> list[tuple[int, str]]:
        """Return (position, reason) of the dead letters of points or requests."""
        return sorted((d["position"], d["reason"]) for d in self.dead if d["origin"] == origin)


def read_folder(folder: Path) -> list[Record]:
    """Return all rows of the published Parquet files, in any order."""
    rows: list[Record] = []
    for path in sorted(folder.glob("*.parquet")):
        rows += pq.ParquetFile(path).read().to_pylist()
    return rows


def as_time(value: dt.datetime | int) -> int:
    """Return the event time of a match as it was written: a number."""
    if isinstance(value, int):
        return value
    return (value - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def outcome(out: Path, report: Record) -> Outcome:
    rows = read_folder(out / "matches")
    batches: dict[tuple[Any, Any], list[int]] = {}
    for row in rows:
        batches.setdefault((row["query_id"], row["point_id"]), []).append(row["batch_id"])
    matches = sorted((r["query_id"], r["point_id"], as_time(r["event_time"])) for r in rows)
    return Outcome(matches, read_folder(out / "dead"), report, batches)


def config_for(case: Case, folder: Path, **settings: Any) -> RunConfig:
    """Return the settings of a run over a case; writes the files that are not given."""
    folder.mkdir(parents=True, exist_ok=True)
    if "points.path" not in settings:
        settings["points.path"] = str(folder / "points.parquet")
        # Name order is also event order, unless the case differs.
        pq.write_table(point_table(case), settings["points.path"], row_group_size=64)
    if "queries.path" not in settings:
        settings["queries.path"] = str(folder / "requests.parquet")
        pq.write_table(request_table(case), settings["queries.path"])
    defaults: Record = {
        "space.bounds": case.bounds,
        "space.grid": (20, 10),
        "space.coordinates": Coordinates.LONLAT if case.lonlat else Coordinates.PLANE,
        "engine.available_now": True,
        "engine.machines": 3,
        "engine.strategy": Strategy.UNIFORM,
        "out.dir": folder / "out",
    }
    return with_settings(RunConfig(), {**defaults, **settings})


def run_case(spark: SparkSession, case: Case, folder: Path, **settings: Any) -> Outcome:
    config = config_for(case, folder, **settings)
    with Pipeline(config, spark=spark) as pipeline:
        report = pipeline.run()
    return outcome(config.out.dir, report)


def check_figures(result: Outcome, rows: int) -> None:
    """Check that input rows equal points plus dead letters, and that the report is consistent."""
    report = result.report
    dead_points = [d for d in result.dead if d["origin"] == "point"]
    assert report["points"] + len(dead_points) == rows
    assert report["dead_points"] == len(dead_points)
    assert report["dead_requests"] == len(result.dead) - len(dead_points)
    assert report["matches"] == len(result.matches)
    for key in ("points", "matches", "checks"):
        assert report[key] == sum(machine[key] for machine in report["machines"])
        assert report[key] == sum(batch[key] for batch in report["per_batch"])
    assert report["batches"] == len(report["per_batch"]) == len(report["batch_seconds"])
    assert [batch["batch_id"] for batch in report["per_batch"]] == list(range(report["batches"]))
    assert all(len(found) == 1 for found in result.batches.values()), "a match twice"


# --------------------------------------------------------------------------- random cases


class Maker:
    """Draws points and requests from a seed: shapes of every kind, on and off the borders."""

    def __init__(self, seed: int, *, lonlat: bool = False) -> None:
        self._chance = random.Random(seed)
        self._lonlat = lonlat
        self._bounds = CITY if lonlat else PLANE
        self._corners: list[tuple[float, float]] = []

    def coordinate(self) -> tuple[float, float]:
        """Draw a coordinate: on a border of a cell or a query, inside, outside, or far outside."""
        chance, b = self._chance, self._bounds
        kind = chance.random()
        if kind < 0.25 and self._corners:
            one, other = chance.choice(self._corners), chance.choice(self._corners)
            return one[0], other[1]
        if kind < 0.45:
            column, row = chance.randrange(21), chance.randrange(11)
            return b.x0 + b.width * column / 20, b.y0 + b.height * row / 10
        if kind < 0.55:
            return (
                b.x0 + b.width * chance.uniform(-0.4, 1.4),
                b.y0 + b.height * chance.uniform(-0.4, 1.4),
            )
        if kind < 0.58 and not self._lonlat:
            return chance.choice([-1e9, 1e9, 40.0]), chance.choice([-1e9, 1e9, 20.0])
        return chance.uniform(b.x0, b.x1), chance.uniform(b.y0, b.y1)

    def point(self, name: Any, time: int) -> Record:
        chance = self._chance
        x, y = self.coordinate()
        return {
            "id": name,
            "time": time,
            "x": x,
            "y": y,
            "fare": chance.choice([None, 0.0, 9.5, 50.0, 51.0, 99.0]),
            "base": chance.choice([None, "B1", "B2", "B3"]),
            "note": chance.choice([None, "", "late", "rain and late", "on time"]),
        }

    def shape(self) -> Record:
        kind = self._chance.choice(["box", "box", "circle", "polygon"])
        if kind == "box":
            return self._box()
        return self._circle() if kind == "circle" else self._polygon()

    def _box(self) -> Record:
        (ax, ay), (bx, by) = self.coordinate(), self.coordinate()
        self._corners += [(ax, ay), (bx, by)]
        return {"x0": min(ax, bx), "y0": min(ay, by), "x1": max(ax, bx), "y1": max(ay, by)}

    def _circle(self) -> Record:
        cx, cy = self.coordinate()
        self._corners.append((cx, cy))
        reach = 30_000.0 if self._lonlat else 20.0
        radius = self._chance.choice([0.0, reach / 50, reach * self._chance.random(), 5.0])
        return {"cx": cx, "cy": cy, "radius": radius}

    def _polygon(self) -> Record:
        """Draw a frame or triangle with corners on eighths of the bounds, sometimes beyond them."""
        chance, b = self._chance, self._bounds
        i, j = chance.randrange(-1, 7), chance.randrange(-1, 7)
        wide, high = chance.randrange(2, 5), chance.randrange(2, 5)

        def place(column: float, row: float) -> tuple[float, float]:
            return b.x0 + b.width * column / 8, b.y0 + b.height * row / 8

        if chance.random() < 0.5:
            ring = [place(i, j), place(i + wide, j), place(i, j + high)]
            holes: list[list[tuple[float, float]]] = []
        else:
            ring = [place(i, j), place(i + wide, j), place(i + wide, j + high), place(i, j + high)]
            low, up = 0.5, 1.0
            holes = [[place(i + low, j + low), place(i + up, j + low), place(i + low, j + up)]]
        self._corners += ring
        return {"wkt": wkt(ring, *holes)}

    def requests(
        self, count: int, ids: Callable[[int], Any], span: tuple[int, int]
    ) -> list[Record]:
        """Draw registrations mixed with terminations, duplicates and requests of other users."""
        chance = self._chance
        made: list[Record] = []
        for number in range(count):
            made.append(
                {
                    "op": "register",
                    "query_id": ids(number if chance.random() < 0.85 else chance.randrange(count)),
                    "user_id": chance.choice(["ann", "bob"]),
                    **self.shape(),
                    "predicate": chance.choice([None, None, *PREDICATES]),
                    "at": chance.choice([None, None, chance.randrange(*span)]),
                    "expires_at": chance.choice([None, None, chance.randrange(*span)]),
                }
            )
            if chance.random() < 0.25:
                # Rare: without a time, the termination precedes the first point.
                at = None if chance.random() < 0.1 else chance.randrange(*span)
                made.append(
                    {
                        "op": "terminate",
                        "query_id": ids(chance.randrange(number + 2)),
                        "user_id": chance.choice(["ann", "bob"]),
                        "at": at,
                    }
                )
        return made


def wkt(*rings: Sequence[tuple[float, float]]) -> str:
    texts = []
    for ring in rings:
        closed = [*ring, ring[0]]
        texts.append("(" + ", ".join(f"{x!r} {y!r}" for x, y in closed) + ")")
    return f"POLYGON ({', '.join(texts)})"


def random_case(
    seed: int, points: int, queries: int, *, lonlat: bool = False, **kinds: bool
) -> Case:
    """Return the case of a seed; event times increase with the row."""
    chance = random.Random(seed)
    maker = Maker(seed + 1, lonlat=lonlat)
    first = START_US if kinds.get("timestamps", True) else 0
    span = (first, first + 10 * points + 1)
    text = kinds.get("text_ids", False)
    requests = maker.requests(queries, (lambda n: f"q{n}") if text else (lambda n: n), span)
    times = sorted(chance.randrange(*span) for _ in range(points))
    made = []
    for row, time in enumerate(times):
        name: Any = row if kinds.get("row_ids") or not text else f"p{row}"
        made.append(maker.point(name, time))
    return Case(made, requests, lonlat, **kinds)
