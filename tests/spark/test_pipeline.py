"""The pipeline's matches equal brute force, and no input is lost."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import (
    START_US,
    Case,
    Outcome,
    as_time,
    check_figures,
    config_for,
    expected,
    outcome,
    pairs,
    point_table,
    random_case,
    run_case,
    settle,
)
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from properties import examples
from roost import Box, Circle, Pipeline, Polygon, Query, RunConfig, Terminate
from roost.engine.executor import SparkExecutor
from roost.errors import ConfigError
from roost.model.choices import Strategy
from roost.model.records import Reason
from roost.model.settings import with_settings
from roost.model.space import Coordinates, Outside, Rect
from roost.runtime.records import Commit

pytestmark = pytest.mark.spark

PART = ((Strategy.UNIFORM, 1), (Strategy.GLOBAL, 7))
PLACEMENTS = [
    pytest.param(
        *placement,
        id="{}-{}".format(*placement),
        marks=() if placement in PART or placement[1] == 3 else pytest.mark.full,
    )
    for placement in itertools.product(Strategy, (1, 3, 7))
]


def check_case(case: Case, result: Outcome) -> None:
    assert result.matches == expected(case)
    assert result.refused("request") == settle(case.requests)[1]
    check_figures(result, len(case.points))


@pytest.fixture(scope="module")
def plane() -> Case:
    return random_case(1, 700, 60)


@pytest.fixture(scope="module")
def city() -> Case:
    return random_case(2, 500, 60, lonlat=True, text_ids=True)


def test_the_cases_cover_matches_and_rejections(plane: Case, city: Case) -> None:
    for case in (plane, city):
        queries, refused = settle(case.requests)
        assert {reason for _, reason in refused} >= {"duplicate_query", "not_owner"}
        found = expected(case)
        matched = {query for query, _, _ in found}
        assert len(found) > 500
        for key in ("wkt", "radius", "x0", "predicate", "expires_at"):
            named = {q["query_id"] for q in queries if q.get(key) is not None}
            assert named & matched, f"no match of a query with {key}"


@pytest.mark.parametrize(("strategy", "machines"), PLACEMENTS)
def test_every_strategy_returns_the_same_matches(
    spark: SparkSession,
    tmp_path: Path,
    plane: Case,
    city: Case,
    strategy: Strategy,
    machines: int,
) -> None:
    sizes = {1: (193, 1_000), 3: (350, 250), 7: (1_000, 333)}[machines]
    for name, case, batch_rows in zip(("plane", "city"), (plane, city), sizes, strict=True):
        placed = {
            "engine.strategy": strategy,
            "engine.machines": machines,
            "engine.batch_rows": batch_rows,
        }
        result = run_case(spark, case, tmp_path / name, **placed)
        check_case(case, result)
        assert len(result.report["machines"]) == machines
        assert result.report["batches"] == math.ceil(len(case.points) / batch_rows)


@examples(10)
@given(data=st.data())
def test_random_cases_equal_brute_force(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = st.booleans()
    case = random_case(
        data.draw(st.integers(0, 10**6), "seed"),
        data.draw(st.integers(1, 80), "points"),
        data.draw(st.integers(1, 25), "queries"),
        lonlat=data.draw(whole, "lonlat"),
        timestamps=data.draw(whole, "timestamps"),
        text_ids=data.draw(whole, "text ids"),
        row_ids=data.draw(whole, "row ids"),
    )
    result = run_case(
        spark,
        case,
        tmp_path_factory.mktemp("case"),
        **{
            "engine.strategy": data.draw(st.sampled_from(Strategy), "strategy"),
            "engine.machines": data.draw(st.sampled_from([1, 2, 3, 7]), "machines"),
            "engine.batch_rows": data.draw(st.sampled_from([17, 40, 1_000]), "batch rows"),
        },
    )
    check_case(case, result)


BEYOND = [(-5.0, 3.0), (70.0, 40.0), (1e12, -1e12), (64.0, 32.0), (-0.0, 0.0), (64.5, 31.0)]
OUTER = [
    {"x0": -10.0, "y0": 0.0, "x1": 0.0, "y1": 5.0},
    {"x0": 64.0, "y0": 32.0, "x1": 80.0, "y1": 50.0},
    {"x0": -1e13, "y0": -1e13, "x1": 1e13, "y1": 1e13},
    {"cx": 66.0, "cy": 32.0, "radius": 2.0},
    {"wkt": "POLYGON ((60 28, 90 28, 90 60, 60 28))"},
]


def beyond_case() -> Case:
    points = [
        {"id": n, "time": START_US + n, "x": x, "y": y, "fare": 1.0, "base": "B1", "note": "-"}
        for n, (x, y) in enumerate(BEYOND)
    ]
    requests = [
        {"op": "register", "query_id": n, "user_id": "ann", **shape}
        for n, shape in enumerate(OUTER)
    ]
    return Case(points, requests)


@pytest.mark.parametrize("strategy", Strategy)
def test_matches_beyond_the_bounds_are_exact(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    case = beyond_case()
    result = run_case(spark, case, tmp_path, **{"engine.strategy": strategy, "engine.machines": 7})
    check_case(case, result)
    matched = [(query, point) for query, point, _ in result.matches]
    assert matched == [
        *((0, p) for p in (0, 4)),
        *((1, p) for p in (1, 3)),
        *((2, p) for p in range(6)),
        *((3, p) for p in (3, 5)),
        *((4, p) for p in (3, 5)),
    ]


def test_points_beyond_the_bounds_are_rejected_if_configured(
    spark: SparkSession, tmp_path: Path
) -> None:
    case = beyond_case()
    for row in (0, 1, 2, 5):
        case.points[row]["expect"] = Reason.OUT_OF_BOUNDS
    case.requests.append(
        {
            "op": "register",
            "query_id": 9,
            "user_id": "ann",
            "x0": 65.0,
            "y0": 0.0,
            "x1": 66.0,
            "y1": 9.0,
            "expect": Reason.OUT_OF_BOUNDS,
        }
    )
    result = run_case(spark, case, tmp_path, **{"space.outside": Outside.DEAD})
    check_case(case, result)
    assert result.refused("point") == [(row, "out_of_bounds") for row in (0, 1, 2, 5)]


def test_a_point_on_a_border_matches_both_neighbours(spark: SparkSession, tmp_path: Path) -> None:
    """Borders of queries on and off the borders of cells and machines."""
    requests = []
    for axis, cuts in (("x", [0.0, 16.0, 32.0, 32.1, 64.0]), ("y", [0.0, 8.0, 16.0, 16.3, 32.0])):
        for low, high in itertools.pairwise(cuts):
            span = {"x0": 0.0, "y0": 0.0, "x1": 64.0, "y1": 32.0, f"{axis}0": low, f"{axis}1": high}
            requests.append(
                {"op": "register", "query_id": f"{axis}{low}", "user_id": "ann", **span}
            )
    xy = itertools.product([0.0, 16.0, 32.0, 32.1, 64.0], [0.0, 8.0, 16.0, 16.3, 32.0])
    points = [
        {"id": f"{x},{y}", "time": START_US + n, "x": x, "y": y} for n, (x, y) in enumerate(xy)
    ]
    case = Case(points, requests, text_ids=True)
    for strategy, machines in ((Strategy.UNIFORM, 7), (Strategy.HISTORY, 4)):
        folder = tmp_path / strategy
        result = run_case(
            spark, case, folder, **{"engine.strategy": strategy, "engine.machines": machines}
        )
        check_case(case, result)
        inner = [query for query, point, _ in result.matches if point == "32.0,16.0"]
        assert inner == ["x16.0", "x32.0", "y16.0", "y8.0"]


@pytest.mark.parametrize("timestamps", [True, False], ids=["timestamp", "integer"])
def test_lifetimes_are_half_open_and_independent_of_batches(
    spark: SparkSession, tmp_path: Path, timestamps: bool
) -> None:
    first = START_US if timestamps else -5
    points = [{"id": n, "time": first + n, "x": 1.0, "y": 1.0} for n in range(10)]
    everywhere = {"op": "register", "user_id": "ann", "x0": 0.0, "y0": 0.0, "x1": 2.0, "y1": 2.0}
    requests = [
        {**everywhere, "query_id": 1},
        {**everywhere, "query_id": 2, "at": first + 3, "expires_at": first + 7},
        {**everywhere, "query_id": 3, "at": first + 2},
        {"op": "terminate", "query_id": 3, "user_id": "ann", "at": first + 4},
        {**everywhere, "query_id": 3, "at": first + 6},
        {**everywhere, "query_id": 4},
        {"op": "terminate", "query_id": 4, "user_id": "ann"},
        {**everywhere, "query_id": 5, "at": first + 4, "expires_at": first + 4},
    ]
    case = Case(points, requests, timestamps=timestamps)
    for batch_rows in (3, 10):
        result = run_case(
            spark, case, tmp_path / str(batch_rows), **{"engine.batch_rows": batch_rows}
        )
        check_case(case, result)
        lives: dict[Any, list[int]] = {}
        for query, point, _ in result.matches:
            lives.setdefault(query, []).append(point)
        assert lives == {1: [*range(10)], 2: [3, 4, 5, 6], 3: [2, 3, 6, 7, 8, 9]}


def test_matches_have_the_types_of_the_input(spark: SparkSession, tmp_path: Path) -> None:
    made = {
        "ints": (random_case(5, 60, 20), "int64", "timestamp[us, tz=UTC]"),
        "texts": (random_case(5, 60, 20, text_ids=True), "string", "timestamp[us, tz=UTC]"),
        "plain": (random_case(5, 60, 20, timestamps=False), "int64", "int64"),
    }
    for name, (case, id_type, time_type) in made.items():
        run_case(spark, case, tmp_path / name)
        [*files] = (tmp_path / name / "out" / "matches").glob("*.parquet")
        assert files
        for path in files:
            schema = pq.read_schema(path)
            assert [(f.name, str(f.type)) for f in schema] == [
                ("batch_id", "int64"),
                ("query_id", id_type),
                ("point_id", id_type),
                ("event_time", time_type),
            ]


# --------------------------------------------------------------------------- invalid input


def bad_points() -> Case:
    """Return valid points with one of every fault among them, on lon/lat."""
    good = {"x": -74.0, "y": 40.7, "fare": 60.0, "base": "B1", "note": "-"}
    faults: list[tuple[dict[str, Any], Reason | None]] = [
        ({}, None),
        ({"x": math.nan}, Reason.NOT_FINITE),
        ({"y": math.inf}, Reason.NOT_FINITE),
        ({"x": -math.inf}, Reason.NOT_FINITE),
        ({"x": None}, Reason.NOT_FINITE),
        ({"y": 90.5}, Reason.LATITUDE),
        ({"x": 181.0}, Reason.LONGITUDE),
        ({"time": None}, Reason.NULL_TIME),
        ({}, Reason.NULL_ID),
        ({"x": math.nan, "time": None}, Reason.NOT_FINITE),
        ({}, None),
    ]
    points = []
    for row, (fault, reason) in enumerate(faults * 3):
        point = {"id": row, "time": START_US + row, **good, **fault, "expect": reason}
        points.append(point)
    box = {"x0": -75.0, "y0": 40.0, "x1": -73.0, "y1": 41.0}
    return Case(points, [register(1, **box, predicate="fare > 50")], lonlat=True)


@pytest.mark.parametrize("strategy", Strategy)
def test_invalid_points_are_dead_letters_once(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    case = bad_points()
    result = run_case(
        spark, case, tmp_path, **{"engine.strategy": strategy, "engine.batch_rows": 7}
    )
    check_case(case, result)
    rejected = [(p["id"], str(p["expect"])) for p in case.points if p["expect"]]
    assert result.refused("point") == rejected
    by_row = {d["position"]: json.loads(d["record"]) for d in result.dead}
    assert by_row[5]["lat"] == 90.5 and by_row[5]["id"] == 5
    assert by_row[1]["lon"] == "nan"


def test_points_of_wrong_types_are_dead_letters(spark: SparkSession, tmp_path: Path) -> None:
    """Text columns are parsed value by value: one invalid value rejects one row."""
    times = [
        "2014-04-01T00:00:00Z", "yesterday", "2014-04-01 00:00:02", "2014-04-01T02:00:03+02:00",
        "2014-04-01", None,
    ]  # fmt: skip
    table = pa.table(
        {
            "x": ["1.5", "1", "east", "3", "4e0", "5"],
            "y": pa.array([1, 2, 3, 4, 5, 6], pa.int32()),
            "event_time": times,
            "id": ["a", "b", "c", "d", "e", "f"],
        }
    )
    path = tmp_path / "points.parquet"
    pq.write_table(table, path)
    config = RunConfig(
        points={"path": str(path)},
        space={"bounds": Rect(0, 0, 10, 10)},
        engine={"available_now": True, "machines": 2},
        out={"dir": tmp_path / "out"},
    )
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.request(Query("q", Box(0, 0, 10, 10)))
        result = outcome(config.out.dir, pipeline.run())
    us = 1_000_000
    assert result.matches == [("q", "a", START_US), ("q", "d", START_US + 3 * us),
                              ("q", "e", START_US)]  # fmt: skip
    assert result.refused("point") == [(1, "wrong_type"), (2, "wrong_type"), (5, "null_time")]
    check_figures(result, 6)


def register(query_id: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "register", "query_id": query_id, "user_id": "ann", **fields}


def bad_requests() -> list[dict[str, Any]]:
    """Return a request for every rejection reason, each beside a valid request."""
    box = {"x0": 0.0, "y0": 0.0, "x1": 9.0, "y1": 9.0}
    many = ", ".join(f"{math.cos(k / 10)!r} {math.sin(k / 10)!r}" for k in range(60))
    cases: list[tuple[dict[str, Any], Reason]] = [
        (register(2, **{**box, "x0": 10.0}), Reason.INVERTED_BOX),
        (register(3, **{**box, "y1": -1.0}), Reason.INVERTED_BOX),
        (register(4, **{**box, "x1": math.inf}), Reason.NOT_FINITE),
        (register(5, cx=1.0, cy=1.0, radius=-1.0), Reason.BAD_RADIUS),
        (register(6, cx=1.0, cy=math.nan, radius=1.0), Reason.NOT_FINITE),
        (register(7, cx=1.0, cy=1.0), Reason.MISSING_FIELD),
        (register(8), Reason.MISSING_FIELD),
        (register(9, **box, cx=1.0, cy=1.0, radius=1.0), Reason.MALFORMED),
        (register(10, wkt="POLYGON ((0 0, 2 2, 2 0, 0 2, 0 0))"), Reason.INVALID_POLYGON),
        (register(11, wkt="POINT (1 1)"), Reason.INVALID_POLYGON),
        (register(12, wkt="POLYGON oops"), Reason.MALFORMED),
        (register(13, wkt=f"POLYGON (({many}, 1.0 0.0))"), Reason.OVERSIZED_POLYGON),
        (register(14, **box, predicate="tip > 3"), Reason.BAD_PREDICATE),
        (register(15, **box, predicate="fare >"), Reason.BAD_PREDICATE),
        (register(16, **box, predicate="fare > 'much'"), Reason.BAD_PREDICATE),
        (register(None, **box), Reason.MISSING_FIELD),
        ({**register(17, **box), "user_id": None}, Reason.MISSING_FIELD),
        ({**register(18, **box), "op": None}, Reason.MISSING_FIELD),
        ({**register(19, **box), "op": "update"}, Reason.UNKNOWN_OP),
        (register(1, **box), Reason.DUPLICATE_QUERY),
        ({"op": "terminate", "query_id": 404, "user_id": "ann"}, Reason.UNKNOWN_QUERY),
        ({"op": "terminate", "query_id": 1, "user_id": "bob"}, Reason.NOT_OWNER),
    ]
    made = [register(1, **box)]
    for number, (request, reason) in enumerate(cases):
        made.append({**request, "expect": reason})
        made.append(register(100 + number, cx=1.0, cy=1.0, radius=5.0))
    return made


def test_invalid_requests_are_dead_letters_once(spark: SparkSession, tmp_path: Path) -> None:
    points = random_case(7, 50, 1).points
    case = Case(points, bad_requests())
    result = run_case(
        spark, case, tmp_path, **{"engine.batch_rows": 20, "queries.polygon_vertices_max": 50}
    )
    check_case(case, result)
    assert len(result.refused("request")) == 22
    assert {d["batch_id"] for d in result.dead} == {0}
    records = {d["position"]: json.loads(d["record"]) for d in result.dead}
    assert records[1]["query_id"] == 2 and records[1]["x0"] == 10.0


# --------------------------------------------------------------------------- requests while it runs


class Requester:
    """Sends requests after given batches."""

    def __init__(self) -> None:
        self.requests: dict[int, list[Query | Terminate]] = {}
        self.pipeline: Pipeline | None = None
        self.seen: list[int] = []

    def __call__(self, commit: Commit) -> None:
        assert self.pipeline is not None
        self.seen.append(commit.batch_id)
        self.pipeline.request(*self.requests.get(commit.batch_id, []))


@pytest.mark.parametrize("strategy", [Strategy.REPLICATED, Strategy.UNIFORM])
def test_requests_while_running_take_effect_with_the_next_batch(
    spark: SparkSession, tmp_path: Path, strategy: Strategy
) -> None:
    points = [{"id": n, "time": START_US + n, "x": n % 60 + 0.5, "y": 1.0} for n in range(100)]
    pq.write_table(point_table(Case(points, [])), tmp_path / "points.parquet")
    config = config_for(
        Case(points, []),
        tmp_path,
        **{
            "queries.path": None,
            "engine.batch_rows": 10,
            "engine.strategy": strategy,
            "points.path": str(tmp_path / "points.parquet"),
        },
    )
    everywhere = Box(-1, -1, 99, 99)
    instant = dt.datetime.fromtimestamp(START_US / 1e6, dt.UTC)
    later = instant + dt.timedelta(microseconds=75)
    after = Requester()
    with Pipeline(config, spark=spark, on_batch=after) as pipeline:
        after.pipeline = pipeline
        pipeline.request(Query("start", everywhere))
        area = Polygon("POLYGON ((0 0, 60 0, 60 2, 0 2, 0 0))")
        requests: dict[int, list[Query | Terminate]] = {
            1: [Query("two", everywhere), Query("disc", Circle(0.5, 1.0, 10.0))],
            3: [
                Terminate("start"),
                Query("two", everywhere),
                Query("exact", everywhere, at=later),
            ],
            4: [Terminate("two", user_id="eve"), Query("area", area, predicate="fare is null")],
            5: [Query("start", everywhere)],
            6: [Terminate("two")],
        }
        after.requests = requests
        result = outcome(config.out.dir, pipeline.run())
    found: dict[str, list[int]] = {}
    for query, point, _ in result.matches:
        found.setdefault(query, []).append(point)
    assert found == {
        "start": [*range(40), *range(60, 100)],
        "two": [*range(20, 70)],
        "disc": [n for n in range(20, 100) if abs(n % 60) <= 10],
        "exact": [*range(75, 100)],
        "area": [*range(50, 100)],
    }
    check_figures(result, 100)
    refused = [(d["batch_id"], d["position"], d["reason"]) for d in result.dead]
    assert sorted(refused) == [(4, 4, "duplicate_query"), (5, 6, "not_owner")]
    assert after.seen == list(range(10))


def test_a_stopped_run_continues(spark: SparkSession, tmp_path: Path) -> None:
    case = random_case(11, 200, 30)
    config = config_for(case, tmp_path, **{"engine.batch_rows": 30})
    with Pipeline(config, spark=spark, on_batch=lambda commit: pipeline.stop()) as pipeline:
        assert pipeline.run()["points"] == 30
    # Another strategy: a new plan, and the same matches.
    placed = {"engine.batch_rows": 50, "engine.strategy": "history", "engine.machines": 7}
    config = with_settings(config, placed)
    with Pipeline(config, spark=spark) as pipeline:
        report = pipeline.run()
        again = pipeline.run()
    assert report["batches"] == again["batches"] == 5
    assert {batch["epoch"] for batch in report["per_batch"]} == {0, 1}
    check_case(case, outcome(config.out.dir, again))


def test_no_queries_and_no_points(spark: SparkSession, tmp_path: Path) -> None:
    case = random_case(12, 40, 5)
    nothing = Case(case.points, [])
    result = run_case(spark, nothing, tmp_path / "no-queries")
    assert result.matches == []
    check_figures(result, 40)
    empty = Case([], case.requests)
    result = run_case(spark, empty, tmp_path / "no-points")
    assert result.report["batches"] == 0 and result.matches == []


def test_bounds_and_machines_have_defaults(spark: SparkSession, tmp_path: Path) -> None:
    case = random_case(13, 120, 25, lonlat=True)
    result = run_case(
        spark,
        case,
        tmp_path,
        **{
            "space.bounds": None,
            "engine.machines": None,
            "space.coordinates": None,
            "space.grid": (1000, 1000),
        },
    )
    check_case(case, result)
    assert len(result.report["machines"]) == 2


def test_many_small_batches_and_many_requests(
    spark: SparkSession, tmp_path: Path, full: bool
) -> None:
    """Segments merge and end while batches run; each batch matches exactly its live queries."""
    rounds = 60 if full else 15
    case = random_case(14, 8 * rounds, 3 * rounds, timestamps=False)
    untimed = [{**r, "at": None, "expires_at": None} for r in case.requests]
    empty = Case(case.points, [], timestamps=False)
    config = config_for(
        empty, tmp_path, **{"engine.batch_rows": 8, "engine.machines": 2, "queries.id_type": "int"}
    )
    blocks = [untimed[k::rounds] for k in range(rounds)]
    with Pipeline(config, spark=spark, on_batch=lambda c: log(c.batch_id + 1)) as pipeline:

        def log(batch: int) -> None:
            if batch < rounds:
                pipeline.log.append(request_block(blocks[batch]))

        log(0)
        result = outcome(config.out.dir, pipeline.run())
    live_pairs, so_far = [], []
    for batch in range(rounds):
        so_far += blocks[batch]
        points = case.points[8 * batch : 8 * batch + 8]
        live_pairs += pairs(points, settle(so_far)[0], False)
    assert sorted((q, p) for q, p, _ in result.matches) == sorted(live_pairs)
    assert result.refused("request") == settle(so_far)[1]
    check_figures(result, len(case.points))


def request_block(requests: list[dict[str, Any]]) -> pa.Table:
    names = ("op", "query_id", "user_id", "x0", "y0", "x1", "y1", "cx", "cy", "radius", "wkt",
             "predicate")  # fmt: skip
    return pa.table({name: pa.array([r.get(name) for r in requests]) for name in names})


def test_history_needs_a_sample(spark: SparkSession, tmp_path: Path) -> None:
    stream = spark.readStream.format("rate").load()
    frame = stream.selectExpr("value as id", "timestamp as event_time", "1D as x", "1D as y")
    config = RunConfig(
        engine={"strategy": Strategy.HISTORY},
        space={"bounds": Rect(0, 0, 1, 1), "coordinates": Coordinates.PLANE},
        out={"dir": tmp_path},
    )
    with Pipeline(config, spark=spark) as pipeline, pytest.raises(ConfigError, match="history"):
        pipeline.start(frame)


def test_event_times_are_preserved(spark: SparkSession, tmp_path: Path) -> None:
    early = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    points = [{"id": 1, "time": as_time(early), "x": 1.0, "y": 1.0}]
    case = Case(points, [register(1, x0=0.0, y0=0.0, x1=2.0, y1=2.0)])
    run_case(spark, case, tmp_path)
    [path] = (tmp_path / "out" / "matches").glob("*.parquet")
    assert pq.ParquetFile(path).read()["event_time"].to_pylist() == [early]


def test_small_replicated_batches_use_machines_in_turn(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle machines stay in the report, and no point is lost or duplicated."""
    monkeypatch.setattr(SparkExecutor, "rows_per_task", 4096)
    table = pa.table({"x": [5.0] * 90, "y": [5.0] * 90, "event_time": list(range(90))})
    pq.write_table(table, tmp_path / "points.parquet")
    config = RunConfig(
        points={"path": str(tmp_path / "points.parquet")},
        out={"dir": tmp_path / "out"},
        space={"bounds": Rect(0.0, 0.0, 10.0, 10.0)},
        engine={"machines": 3, "batch_rows": 30, "available_now": True},
    )
    commits: list[Commit] = []
    with Pipeline(config, spark=spark, on_batch=commits.append) as pipeline:
        pipeline.request(Query("q", Box(0.0, 0.0, 9.0, 9.0)))
        report = pipeline.run()
    assert report["matches"] == 90
    by_batch = [[m["points"] for m in commit.figures["machines"]] for commit in commits]
    assert by_batch == [[30, 0, 0], [0, 30, 0], [0, 0, 30]]
