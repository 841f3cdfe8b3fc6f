"""Windows on Spark: snapshots, aggregates, nearest points and joins against brute force."""

from __future__ import annotations

import datetime as dt
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from layouts import random_change
from roost import Box, Circle, Pipeline, Query, RunConfig
from roost.balance import Plan
from roost.balance.changes import Change, Rebalance, apply_changes
from roost.cli import main
from roost.engine import snapshot
from roost.engine.snapshot import Snapshots
from roost.errors import RequestError, StateError
from roost.model.settings import with_settings
from roost.runtime import assembly
from roost.runtime.balancing import GlobalPolicy
from roost.runtime.records import Commit
from roost.runtime.rounds import Proposal, RoundSnapshot
from roost.window import parse_aggregates
from roost.window.snapshot import SnapshotQuery
from roost.window.view import read_view
from window_scenario import (
    BATCHES,
    Record,
    Standing,
    WindowScenario,
    check_outputs,
    rows_of,
)

pytestmark = pytest.mark.spark

SCENARIOS = [
    WindowScenario(1, "time", 35.0),
    WindowScenario(2, "time", 40.0, tumbling=True, lateness=15.0),
    WindowScenario(3, "count", 170),
    WindowScenario(4, "time", 25.0, lateness=5.0),
    WindowScenario(5, "count", 100, tumbling=True),
]


class Shuffling(GlobalPolicy):
    """Proposes a random plan change after every round."""

    def hottest(self, plan: Plan, machine: int) -> None:
        return None

    def propose(self, round_: RoundSnapshot) -> Proposal:
        after = round_.routing.plan
        rng = random.Random(after.epoch)
        changes: list[Change] = []
        for _ in range(6):
            change = random_change(rng, after)
            if change is not None:
                changes.append(change)
                after = apply_changes(after, [change])
        return Proposal(Rebalance(tuple(changes), "shuffled"), {"bytes_sent": 0})


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "GlobalPolicy", Shuffling)


def check_snapshots(pipeline: Pipeline, scenario: WindowScenario, number: int) -> None:
    """Compare snapshot queries on the window with brute force."""
    window = [p for _, p in scenario.window(number)]
    found = pipeline.snapshot(Box(20, 10, 70, 80)).toArrow()
    inside = [p["id"] for p in window if 20 <= p["x"] <= 70 and 10 <= p["y"] <= 80]
    assert sorted(found["id"].to_pylist()) == sorted(inside)
    assert set(found["at_batch"].to_pylist()) <= {number}
    # Queries this small run in this process, unless ``points_here`` is 0.
    with closing(Snapshots(pipeline.store.folder, pipeline.spark, points_here=0)) as jobs:
        by_tasks = jobs.run(SnapshotQuery(Box(20, 10, 70, 80)))
        assert sorted(by_tasks.table["id"].to_pylist()) == sorted(inside)
        assert by_tasks.batch_id == number
        count = jobs.run(SnapshotQuery(aggregate=parse_aggregates("count"))).table
        assert count["count"].to_pylist() == [len(window)]
        nearby = jobs.run(SnapshotQuery(Circle(50, 50, math.inf), nearest=3)).table
    (row,) = pipeline.snapshot(aggregate="count, sum(fare)", where="kind = 'taxi'").collect()
    fares = [p["fare"] for p in window if p["kind"] == "taxi"]
    assert (row["at_batch"], row["count"]) == (number, len(fares))
    assert row["sum(fare)"] == pytest.approx(math.fsum(f for f in fares if f is not None))
    near = pipeline.snapshot(Circle(50, 50, math.inf), nearest=3).toArrow()
    ranked = sorted((math.dist((50, 50), (p["x"], p["y"])), p["id"]) for p in window)[:3]
    assert near["id"].to_pylist() == [name for _, name in ranked]
    assert nearby["id"].to_pylist() == [name for _, name in ranked]


def run_scenario(
    spark: SparkSession,
    scenario: WindowScenario,
    folder: Path,
    on_step: Callable[[str, int], None] = lambda step, batch_id: None,
    **settings: Any,
) -> Record:
    """Run or continue a scenario, and check the window after every batch."""

    def after(commit: Commit) -> None:
        scenario.prepare(folder, pipeline)
        check_snapshots(pipeline, scenario, commit.batch_id)

    config = scenario.config(folder, **settings)
    with Pipeline(config, spark=spark, on_batch=after, on_step=on_step) as pipeline:
        scenario.prepare(folder, pipeline)
        return pipeline.run()


def feeder(scenario: WindowScenario, folder: Path) -> Callable[[Commit], None]:
    return lambda commit: scenario.feed(folder, commit.batch_id + 1)


@pytest.mark.parametrize(
    ("scenario", "strategy"),
    [
        (SCENARIOS[0], "swarm"),
        pytest.param(SCENARIOS[1], "global", marks=pytest.mark.full),
        pytest.param(SCENARIOS[3], "replicated", marks=pytest.mark.full),
        pytest.param(SCENARIOS[4], "uniform", marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.kind}-{value.seed}",
)
def test_a_run_with_a_window_equals_brute_force(
    spark: SparkSession, tmp_path: Path, scenario: WindowScenario, strategy: str
) -> None:
    report = run_scenario(spark, scenario, tmp_path, **{"engine.strategy": strategy})
    assert report["batches"] == BATCHES
    check_outputs(scenario, tmp_path / "out")


class Crash(BaseException):
    """Simulates a crash of the driver: the files stay as they are."""


STEPS = ("intent", "apply", "run", "after", "commit", "publish", "cleanup", "round", "end")


@pytest.mark.usefixtures("shuffled")
@pytest.mark.parametrize(
    "scenario",
    [SCENARIOS[2], *(pytest.param(s, marks=pytest.mark.full) for s in SCENARIOS if s.seed != 3)],
    ids=lambda scenario: f"{scenario.kind}-{scenario.seed}",
)
def test_no_point_is_lost_or_duplicated_by_moves_and_crashes(
    spark: SparkSession, tmp_path: Path, scenario: WindowScenario
) -> None:
    """The plan changes after every batch, and the driver crashes in all but the last few."""
    settings = {"engine.strategy": "global", "balance.round": 1.0}
    for number, step in enumerate(STEPS):

        def crash(now: str, batch_id: int, at: tuple[str, int] = (step, number)) -> None:
            if (now, batch_id) == at:
                raise Crash

        with pytest.raises(Crash):
            run_scenario(spark, scenario, tmp_path, crash, **settings)
    report = run_scenario(spark, scenario, tmp_path, **settings)
    assert report["batches"] == BATCHES
    assert report["balance"]["plan_changes"] >= BATCHES // 2
    check_outputs(scenario, tmp_path / "out")


def test_a_standing_query_without_a_window_is_rejected(spark: SparkSession, tmp_path: Path) -> None:
    scenario = SCENARIOS[0]
    config = scenario.config(tmp_path)
    config = replace(config, window={}, join={})
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.request(Query("a", Box(0, 0, 1, 1), aggregate="count"))
        pipeline.run()
        with pytest.raises(StateError, match="no window"):
            pipeline.snapshot(Box(0, 0, 1, 1))
    (dead,) = rows_of(tmp_path / "out", "dead").values()
    assert [row["reason"] for row in dead] == ["no_window"]


def test_large_results_stay_in_files_until_the_pipeline_is_closed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "RESULT_BYTES_MAX", 100)
    scenario = SCENARIOS[2]
    config = scenario.config(tmp_path, **{"engine.strategy": "uniform"})
    last = 3

    def feed(commit: Commit) -> None:
        if commit.batch_id < last:
            scenario.feed(tmp_path, commit.batch_id + 1)

    with Pipeline(config, spark=spark, on_batch=feed) as pipeline:
        pipeline.run()
        frame = pipeline.snapshot()
        left = list((tmp_path / "out" / "state" / "answers").glob("*/*.parquet"))
        assert left
        expected = sorted(p["id"] for _, p in scenario.window(last))
        with closing(Snapshots(pipeline.store.folder, spark, points_here=0)) as jobs:
            by_tasks = jobs.run(SnapshotQuery())
            assert sorted(by_tasks.table["id"].to_pylist()) == expected
            assert not list(jobs._results.iterdir())  # mapped and deleted
        assert sorted(row["id"] for row in frame.collect()) == expected
        assert frame.select("at_batch").distinct().collect() == [(last,)]
    assert not any(path.exists() for path in left)


def test_only_the_newest_large_results_are_retained(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "RESULT_BYTES_MAX", 100)
    monkeypatch.setattr(snapshot, "LARGE_KEPT", 2)
    config = SCENARIOS[2].config(tmp_path, **{"engine.strategy": "uniform"})
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.run()
        frames = [pipeline.snapshot() for _ in range(5)]
        left = list((tmp_path / "out" / "state" / "answers").glob("*/*.parquet"))
        assert len(left) == 2
        assert [frame.count() for frame in frames[-2:]] == [60, 60]


def test_threads_may_query_while_batches_are_committed(spark: SparkSession, tmp_path: Path) -> None:
    scenario = SCENARIOS[2]
    config = scenario.config(tmp_path, **{"engine.strategy": "uniform"})
    seen: list[tuple[int, int]] = []
    over = threading.Event()

    def query() -> None:
        while not over.is_set():
            try:
                result = pipeline.snapshots.run(SnapshotQuery(aggregate=parse_aggregates("count")))
            except StateError:  # before the first batch
                continue
            seen.append((result.batch_id, result.table["count"][0].as_py()))

    with (
        Pipeline(config, spark=spark, on_batch=feeder(scenario, tmp_path)) as pipeline,
        ThreadPoolExecutor(2) as threads,
    ):
        running = [threads.submit(query) for _ in range(2)]
        try:
            pipeline.run()
        finally:
            over.set()
        for thread in running:
            thread.result()
    assert len({batch_id for batch_id, _ in seen}) > BATCHES // 2
    assert {count == len(scenario.window(batch)) for batch, count in seen} == {True}


def test_columns_of_every_type_are_returned(spark: SparkSession, tmp_path: Path) -> None:
    """Dictionaries, unsigned numbers, distant times, lists, and names that Roost itself uses."""
    never = dt.datetime(9999, 12, 31, 23, 59, 59)  # noqa: DTZ001
    columns = {
        "id": pa.array(["a", "b", "c", "d"]),
        "x": pa.array([1.0, 2.0, 3.0, 4.0], pa.float32()),
        "y": pa.array([1.0, 2.0, 3.0, 4.0], pa.float32()),
        "event_time": pa.array([f"2024-01-01T00:00:0{k}" for k in range(4)]),
        "kind": pa.array(["u", "v", "u", None]).dictionary_encode(),
        "small": pa.array([1, 2, 255, None], pa.uint8()),
        "large": pa.array([2**64 - 1, 1, 2, 3], pa.uint64()),
        "until": pa.array([never, None, never, None], pa.timestamp("us")),
        "distance": pa.array([5.0, 6.0, 7.0, 8.0]),
        "at_batch": pa.array([9, 9, 9, 9]),
        "tags": pa.array([["p"], [], None, ["q", "r"]]),
    }
    path = tmp_path / "points.parquet"
    pq.write_table(pa.table(columns), path)
    settings: Record = {
        "points.path": str(path),
        "space.bounds": [0, 0, 10, 10],
        "engine.available_now": True,
        "engine.strategy": "uniform",
        "engine.machines": 2,
        "window.kind": "time",
        "window.length": 60,
        "out.dir": str(tmp_path / "out"),
    }
    config = with_settings(RunConfig(), settings)
    with Pipeline(config, spark=spark) as pipeline:
        box = Box(0, 0, 10, 10)
        pipeline.request(Query("q", box, aggregate="count, max(until), max(kind), max(large)"))
        pipeline.run()
        rows = {row["id"]: row for row in pipeline.snapshot(box, where="kind = 'u'").collect()}
        assert set(rows) == {"a", "c"}
        assert (rows["a"]["kind"], rows["a"]["large"], rows["c"]["small"]) == ("u", 2**64 - 1, 255)
        assert (rows["a"]["at_batch"], rows["a"]["at_batch_"], rows["c"]["tags"]) == (9, 0, None)
        near = pipeline.snapshot(Circle(0, 0, math.inf), nearest=1).collect()
        assert (near[0]["distance"], near[0]["distance_"]) == (5.0, pytest.approx(math.sqrt(2)))
        (row,) = pipeline.snapshot(aggregate="max(large), max(until), distinct(kind)").collect()
        assert (row["max(large)"], row["distinct(kind)"]) == (2**64 - 1, 2)
    results = rows_of(tmp_path / "out", "aggregates")[0]
    values = {row["name"]: row["text"] or row["number"] for row in results}
    assert (values["count"], values["max(kind)"]) == (4.0, "v")
    assert values["max(until)"].startswith("9999-12-")


def test_an_empty_result_has_its_batch(spark: SparkSession, tmp_path: Path) -> None:
    config = SCENARIOS[2].config(tmp_path, **{"engine.strategy": "uniform"})
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.run()
        frame = pipeline.snapshot(Box(-9, -9, -8, -8))
        assert frame.count() == 0
        assert frame.schema["at_batch"].metadata == {"batch_id": 0}
        with pytest.raises(RequestError, match="x0 is greater"):
            pipeline.snapshot(Box(3, 0, 1, 1))


def test_a_killed_run_continues_and_other_processes_may_query(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = WindowScenario(6, "count", 150)

    def drive(step: str, batch_id: int) -> int:
        words = [tmp_path, scenario.seed, scenario.kind, scenario.length, step, batch_id]
        driver = Path(__file__).with_name("window_driver.py")
        command = [sys.executable, str(driver), *map(str, words)]
        return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode

    state = tmp_path / "out" / "state"
    assert drive("commit", 3) == -signal.SIGKILL
    assert main(["snapshot", str(state), "--aggregate", "count"]) == 0
    assert "as of batch 2" in capsys.readouterr().out
    # The last run is in this process, which has a session already.
    run_scenario(spark, scenario, tmp_path, **{"engine.strategy": "swarm"})
    check_outputs(scenario, tmp_path / "out")

    output = tmp_path / "result.parquet"
    words = ["--box", "20,10,70,80", "--where", "fare > 20", "--out", str(output)]
    assert main(["snapshot", str(state), *words]) == 0
    assert f"as of batch {BATCHES - 1}" in capsys.readouterr().err
    window = [p for _, p in scenario.window(BATCHES - 1)]
    inside = [p for p in window if 20 <= p["x"] <= 70 and 10 <= p["y"] <= 80]
    expected = sorted(p["id"] for p in inside if p["fare"] is not None and p["fare"] > 20)
    assert sorted(pq.read_table(output)["id"].to_pylist()) == expected
    assert main(["snapshot", str(state), "--at", "50,50", "--nearest", "2"]) == 0
    near = sorted(window, key=lambda p: (math.dist((50, 50), (p["x"], p["y"])), p["id"]))[:2]
    printed = capsys.readouterr().out
    assert all(f" {p['id']} " in printed for p in near)
    assert main(["snapshot", str(state), "--box", "1,0,0,1"]) == 3
    assert main(["snapshot", str(state), "--at", "1,1"]) == 2
    assert main(["snapshot", str(tmp_path)]) == 2
    assert main(["inspect", str(state)]) == 0
    assert "sliding by count, 150" in capsys.readouterr().out


def test_disk_use_is_bounded_by_the_window(spark: SparkSession, tmp_path: Path, full: bool) -> None:
    """Any number of windows of points use at most three windows of disk."""
    rows, windows = 400, 200 if full else 40
    config = with_settings(
        RunConfig(),
        {
            "points.path": f"generate:rows={rows * windows},rate=100,seed=3",
            "space.bounds": [0, 0, 100, 100],
            "engine.batch_rows": rows,
            "engine.available_now": True,
            "engine.machines": 1,
            "engine.strategy": "replicated",
            "window.kind": "count",
            "window.length": rows,
            "out.dir": str(tmp_path / "out"),
            "out.sink": "count",
        },
    )
    folder = tmp_path / "out" / "state" / "window"
    sizes: list[int] = []

    def measure(commit: Commit) -> None:
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))

    with Pipeline(config, spark=spark, on_batch=measure) as pipeline:
        pipeline.run()
        one = [file.nbytes for batch in read_view(pipeline.store).batches for file in batch.files]
        assert pipeline.snapshot(aggregate="count").collect()[0]["count"] == rows
    assert len(sizes) == windows
    assert max(sizes[4:]) <= 3 * sum(one)


def test_a_streaming_dataframe_fills_the_window(spark: SparkSession, tmp_path: Path) -> None:
    """One file per batch, with a crash between Roost's commit and Spark's."""
    scenario = WindowScenario(7, "time", 35.0)
    first = {s.query.query_id: s.query for s in reversed(scenario.standing)}
    scenario.standing = [Standing(query, 0) for query in first.values()]
    scenario.requests = {0: list(first.values())}
    for number in range(BATCHES):
        scenario.feed(tmp_path, number)
        # Spark reads older files first.
        os.utime(tmp_path / "points" / f"{number:03d}.parquet", (10**9 + number,) * 2)
    config = scenario.config(tmp_path, **{"engine.strategy": "uniform"})
    types = "id long, x double, y double, event_time long, fare double, kind string"
    frame = (
        spark.readStream.schema(types)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(tmp_path / "points"))
    )

    def crash(step: str, batch_id: int) -> None:
        if (step, batch_id) == ("publish", 4):
            raise RuntimeError("crashed")

    with Pipeline(config, spark=spark, on_step=crash) as pipeline:
        pipeline.request(*scenario.requests[0])
        with pytest.raises(StreamingQueryException):
            pipeline.start(frame).awaitTermination(200)
    with Pipeline(config, spark=spark) as pipeline:
        assert pipeline.start(frame).awaitTermination(200)
        check_snapshots(pipeline, scenario, BATCHES - 1)
    check_outputs(scenario, tmp_path / "out")
