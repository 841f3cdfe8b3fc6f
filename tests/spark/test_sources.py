"""Roost's own sources: every format, order and speed gives the matches of brute force."""

from __future__ import annotations

import csv
import datetime as dt
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import (
    START_US,
    Case,
    Outcome,
    check_figures,
    config_for,
    expected,
    outcome,
    point_table,
    random_case,
    run_case,
)
from pyspark.sql import SparkSession

from roost import Box, Pipeline, Query, RunConfig
from roost.errors import ConfigError, SourceError
from roost.model.choices import Strategy
from roost.model.space import Rect
from roost.stages.generators import PointGenerator, load_places

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def case() -> Case:
    made = random_case(21, 240, 40)
    times = [point["time"] for point in made.points]
    assert len(set(times)) > 200
    return made


def iso(time_us: int) -> str:
    moment = dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(microseconds=time_us)
    return moment.isoformat()


def plain(point: dict[str, Any]) -> dict[str, Any]:
    """Return a point as a user would write it."""
    fields = {key: point[key] for key in ("id", "x", "y", "fare", "base", "note")}
    return {"event_time": iso(point["time"]), **fields}


def shuffled(case: Case, seed: int) -> list[dict[str, Any]]:
    points = list(case.points)
    random.Random(seed).shuffle(points)
    return points


def check(case: Case, result: Outcome, rows: int | None = None) -> None:
    assert result.matches == expected(case)
    check_figures(result, len(case.points) if rows is None else rows)


def replayed_in_order(case: Case, result: Outcome) -> None:
    """Check that batches follow event time."""
    spans: dict[int, list[int]] = {}
    times = {point["id"]: point["time"] for point in case.points}
    for (_, point), [batch] in result.batches.items():
        spans.setdefault(batch, []).append(times[point])
    assert len(spans) > 2
    ordered = [spans[batch] for batch in sorted(spans)]
    for before, after in itertools.pairwise(ordered):
        assert max(before) <= min(after)


# --------------------------------------------------------------------------- formats


def test_csv(spark: SparkSession, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "points.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(plain(case.points[0])))
        writer.writeheader()
        for number, point in enumerate(shuffled(case, 1)):
            writer.writerow(plain(point))
            if number in (7, 100):
                file.write("only,three,fields\n")
    # An empty field of a CSV is null, even if it was an empty text.
    result = run_case(spark, case, tmp_path, **{"points.path": str(path), "engine.batch_rows": 50})
    check(case, result, len(case.points) + 2)
    replayed_in_order(case, result)
    assert [d["reason"] for d in result.dead if d["origin"] == "point"] == ["malformed"] * 2
    assert {d["record"] for d in result.dead if d["origin"] == "point"} == {"only,three,fields"}


BAD_LINES = ['{"id": 1, "x": ', "[1, 2]", "oops", '"text"', "17"]


@pytest.mark.parametrize("strategy", [Strategy.UNIFORM, Strategy.HISTORY])
def test_json_lines_with_malformed_ones(
    spark: SparkSession, tmp_path: Path, case: Case, strategy: Strategy
) -> None:
    lines = [json.dumps(plain(point)) for point in shuffled(case, 2)]
    wrong = {**plain(case.points[0]), "x": "far", "id": -1}
    lacking = {key: value for key, value in wrong.items() if key not in ("y", "x")}
    for place, line in enumerate([*BAD_LINES, json.dumps(wrong), json.dumps(lacking), "", "  "]):
        lines.insert(place * 11, line)
    path = tmp_path / "points.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = run_case(
        spark,
        case,
        tmp_path,
        **{"points.path": str(path), "engine.batch_rows": 60, "engine.strategy": strategy},
    )
    check(case, result, len(case.points) + len(BAD_LINES) + 2)
    dead = [d for d in result.dead if d["origin"] == "point"]
    malformed = sorted(d["record"] for d in dead if d["reason"] == "malformed")
    assert malformed == sorted(BAD_LINES)
    others = sorted(d["reason"] for d in dead if d["reason"] != "malformed")
    assert others == ["not_finite", "wrong_type"]


def test_parquet_out_of_order(spark: SparkSession, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "points.parquet"
    pq.write_table(point_table(case, shuffled(case, 3)), path, row_group_size=50)
    result = run_case(spark, case, tmp_path, **{"points.path": str(path), "engine.batch_rows": 64})
    check(case, result)
    replayed_in_order(case, result)


def test_row_numbers_are_positions_in_the_file(
    spark: SparkSession, tmp_path: Path, case: Case
) -> None:
    """The row identifies a point without an identifier, in any order of replay."""
    mixed = shuffled(case, 4)
    named = [{**point, "id": row} for row, point in enumerate(mixed)]
    rows = replace(case, points=named, row_ids=True)
    path = tmp_path / "points.parquet"
    pq.write_table(point_table(rows), path)
    result = run_case(spark, rows, tmp_path, **{"points.path": str(path), "engine.batch_rows": 64})
    check(rows, result)


@pytest.mark.parametrize("form", ["parquet", "mixed"])
def test_a_folder_of_files_that_overlap(
    spark: SparkSession, tmp_path: Path, case: Case, form: str
) -> None:
    folder = tmp_path / "points"
    folder.mkdir()
    for number in range(3):
        mine = case.points[number::3]
        if form == "mixed" and number == 1:
            lines = "".join(json.dumps(plain(point)) + "\n" for point in mine)
            (folder / f"{number}.jsonl").write_text(lines, encoding="utf-8")
        else:
            pq.write_table(point_table(case, mine), folder / f"{number}.parquet")
    (folder / "_SUCCESS").write_text("not points")
    (folder / "notes.txt").write_text("neither")
    result = run_case(
        spark, case, tmp_path, **{"points.path": str(folder), "engine.batch_rows": 64}
    )
    check(case, result)
    replayed_in_order(case, result)


def test_a_folder_of_files_that_follow_each_other(
    spark: SparkSession, tmp_path: Path, case: Case
) -> None:
    """Files are read by time, not by name; rows are numbered by name."""
    folder = tmp_path / "points"
    folder.mkdir()
    parts = [case.points[160:], case.points[:80], case.points[80:160]]
    rows = [{**point, "id": row} for row, point in enumerate(p for part in parts for p in part)]
    numbered = replace(case, points=rows, row_ids=True)
    at = 0
    for name, part in zip("abc", parts, strict=True):
        pq.write_table(point_table(numbered, rows[at : at + len(part)]), folder / f"{name}.parquet")
        at += len(part)
    result = run_case(
        spark, numbered, tmp_path, **{"points.path": str(folder), "engine.batch_rows": 70}
    )
    check(numbered, result)
    replayed_in_order(numbered, result)
    assert not (tmp_path / "out" / "state" / "staged").exists()


def test_a_folder_that_grows_while_it_is_read(
    spark: SparkSession, tmp_path: Path, case: Case
) -> None:
    folder = tmp_path / "points"
    folder.mkdir()
    parts = [case.points[k : k + 60] for k in range(0, 240, 60)]

    def add(number: int) -> None:
        if number >= len(parts):
            pipeline.stop()
        elif number % 2:
            hidden = folder / f".{number}.jsonl"
            lines = "".join(json.dumps(plain(point)) + "\n" for point in parts[number])
            hidden.write_text(lines, encoding="utf-8")
            hidden.rename(folder / f"{number}.jsonl")
        else:
            hidden = folder / f"_{number}"
            pq.write_table(point_table(case, parts[number]), hidden)
            hidden.rename(folder / f"{number}.parquet")

    pq.write_table(point_table(case, parts[0]), folder / "0.parquet")
    config = config_for(
        case,
        tmp_path,
        **{"points.path": str(folder), "engine.batch_rows": 60, "engine.available_now": False},
    )
    with Pipeline(
        config, spark=spark, on_batch=lambda commit: add(commit.batch_id + 1)
    ) as pipeline:
        result = outcome(config.out.dir, pipeline.run())
    check(case, result)
    assert result.report["batches"] == 4


def test_growth_between_runs_preserves_row_numbers(
    spark: SparkSession, tmp_path: Path, case: Case
) -> None:
    folder = tmp_path / "points"
    folder.mkdir()
    rows = [{**point, "id": row} for row, point in enumerate(case.points[120:] + case.points[:120])]
    numbered = replace(case, points=rows, row_ids=True)
    pq.write_table(point_table(numbered, rows[:120]), folder / "b.parquet")
    config = config_for(numbered, tmp_path, **{"points.path": str(folder), "engine.batch_rows": 50})
    with Pipeline(config, spark=spark) as pipeline:
        assert pipeline.run()["points"] == 120
    # Earlier in time and in name, but read later, without renumbering.
    pq.write_table(point_table(numbered, rows[120:]), folder / "a.parquet")
    with Pipeline(config, spark=spark) as pipeline:
        result = outcome(config.out.dir, pipeline.run())
    check(numbered, result)


def test_unreadable_sources_are_errors(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not it")
    pq.write_table(pa.table({"x": [1.0], "y": [1.0]}), tmp_path / "timeless.parquet")
    wrong: list[tuple[str, type[Exception], str]] = [
        ("nowhere", SourceError, "no such file"),
        ("empty", SourceError, "no points at"),
        ("broken.parquet", SourceError, "cannot be read as Parquet"),
        ("timeless.parquet", ConfigError, r"points\.time"),
    ]
    for number, (name, kind, words) in enumerate(wrong):
        config = RunConfig(
            points={"path": str(tmp_path / name)},
            engine={"available_now": True},
            out={"dir": tmp_path / str(number)},
        )
        with Pipeline(config, spark=spark) as pipeline, pytest.raises(kind, match=words):
            pipeline.run()


# --------------------------------------------------------------------------- speed


class Clock:
    """A clock that advances by one step per call."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 100.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


@pytest.mark.parametrize("timestamps", [True, False], ids=["timestamp", "integer"])
def test_speed_delays_points(spark: SparkSession, tmp_path: Path, timestamps: bool) -> None:
    """No point is matched before its time, and each is matched in the end."""
    second = 1_000_000 if timestamps else 1
    first = START_US if timestamps else 1_000
    points = [{"id": n, "time": first + n * second, "x": 1.0, "y": 1.0} for n in range(30)]
    box = {"op": "register", "query_id": 1, "user_id": "ann", "x0": 0.0, "y0": 0.0, "x1": 2.0,
           "y1": 2.0}  # fmt: skip
    case = Case(points, [box], timestamps=timestamps)
    config = config_for(case, tmp_path, **{"engine.machines": 2, "points.speed": 10.0})
    clock = Clock(0.1)
    started = clock.now_s
    ends: list[float] = []
    with Pipeline(
        config, spark=spark, clock=clock, on_batch=lambda commit: ends.append(clock.now_s)
    ) as pipeline:
        result = outcome(config.out.dir, pipeline.run())
    check(case, result)
    assert len(ends) > 3
    for _, point, _ in result.matches:
        [batch] = result.batches[(1, point)]
        assert point <= (ends[batch] - started) * 10.0
    assert max(result.batches[(1, 29)]) == len(ends) - 1
    assert ends[-1] - started >= 2.9


def test_speed_with_times_missing_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    points = [
        {"id": n, "time": None if n < 3 else START_US + n, "x": 1.0, "y": 1.0,
         "expect": "null_time" if n < 3 else None}
        for n in range(9)
    ]  # fmt: skip
    case = Case(points, [])
    config = config_for(case, tmp_path, **{"engine.machines": 2, "points.speed": 1.0})

    def bounded() -> Iterator[float]:
        for reading in range(2_000):
            yield reading * 1e-3
        raise AssertionError("the replay stands still")

    looks = bounded()
    with Pipeline(config, spark=spark, clock=lambda: next(looks)) as pipeline:
        result = outcome(config.out.dir, pipeline.run())
    check_figures(result, 9)
    assert result.report["points"] == 6


# --------------------------------------------------------------------------- generator


def generator(rate: float, seed: int) -> PointGenerator:
    return PointGenerator(
        load_places(), rate, int(dt.datetime(2024, 1, 1, tzinfo=dt.UTC).timestamp() * 1e6), seed
    )


def test_the_generator_gives_the_same_rows_for_any_batch_size(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = generator(50_000.0, 7).block(0, 20_000)
    lon, lat = (table[name].to_numpy() for name in ("lon", "lat"))
    europe = Box(-10.0, 35.0, 30.0, 60.0)
    inside = (lon >= europe.x0) & (lon <= europe.x1) & (lat >= europe.y0) & (lat <= europe.y1)
    inside_ids = set(np.flatnonzero(inside).tolist())
    assert 100 < len(inside_ids) < 10_000
    for number, (strategy, machines, batch_rows) in enumerate(
        [(Strategy.REPLICATED, 2, 20_000), (Strategy.HISTORY, 5, 7_000)]
    ):
        config = RunConfig(
            points={"path": "generate:rows=20000,rate=50000,seed=7"},
            space={"bounds": Rect(-180.0, -90.0, 180.0, 90.0)},
            engine={"strategy": strategy, "machines": machines, "batch_rows": batch_rows},
            out={"dir": tmp_path / str(number)},
        )
        with Pipeline(config, spark=spark) as pipeline:
            pipeline.request(Query("europe", europe))
            result = outcome(config.out.dir, pipeline.run())
        assert {point for _, point, _ in result.matches} == inside_ids
        check_figures(result, 20_000)
        times = table["event_time"].cast(pa.int64()).to_pylist()
        assert all(times[point] == time for _, point, time in result.matches)


def test_a_live_generator_maintains_its_rate(spark: SparkSession, tmp_path: Path) -> None:
    clock = Clock(0.05)
    config = RunConfig(
        points={"path": "generate:rows=1000,rate=1000,seed=3,pace=live"},
        out={"dir": tmp_path},
        engine={"machines": 2},
    )
    sizes: list[int] = []
    with Pipeline(
        config,
        spark=spark,
        clock=clock,
        on_batch=lambda commit: sizes.append(commit.figures["points"]),
    ) as pipeline:
        report = pipeline.run()
    assert report["points"] == 1_000 == sum(sizes)
    assert len(sizes) > 2
    assert clock.now_s >= 101.0


def test_other_seeds_give_other_points() -> None:
    one, same, other = (generator(1_000.0, seed).block(0, 500) for seed in (1, 1, 2))
    assert one.equals(same)
    assert not one["lon"].equals(other["lon"])


def test_a_session_without_the_connector_is_an_error(spark: Any, tmp_path: Path) -> None:
    config = RunConfig(points={"path": "kafka://127.0.0.1:1/points"}, out={"dir": tmp_path})
    wrong = pytest.raises(SourceError, match="this Spark session has no Kafka connector")
    with Pipeline(config, spark=spark) as pipeline, wrong:
        pipeline.run()
