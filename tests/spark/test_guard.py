"""The guard on Spark: an attack, a crash after the block, a crowd, and streamed requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from guard_driver import SEED, counted, play
from pyspark.sql import DataFrame, SparkSession

from guard_scenario import GuardScenario, blocked_users
from roost import Box, Pipeline, RunConfig
from roost.cli import main
from roost.commands.queries import QueryService
from roost.engine import pipeline as engine
from roost.engine.snapshot import Snapshots
from roost.errors import RequestError, SourceError
from roost.guard.tally import Tally
from roost.model.choices import Strategy
from roost.model.records import TIME_MIN
from roost.model.space import Coordinates, Rect
from roost.queries.guard_state import BLOCK, GuardCommand, GuardState, decisions, load_guard, send
from roost.runtime import records
from roost.storage.store import Store
from roost.window.snapshot import SnapshotQuery

pytestmark = pytest.mark.spark

DRIVER = Path(__file__).with_name("guard_driver.py")
DEADLINE_S = 240


@pytest.mark.full  # the guard runs in the driver: tests without Spark check the same
@pytest.mark.parametrize("party", ["attack", "crowd"])
def test_an_attack_is_blocked_and_a_crowd_is_not(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, party: str
) -> None:
    monkeypatch.setattr(engine, "SparkExecutor", counted)
    scenario = GuardScenario(party, SEED, batches=14)
    scenario.write(tmp_path)
    play(spark, scenario, tmp_path)
    with closing(Store(tmp_path / "out" / "state")) as store:
        assert set(blocked_users(decisions(store))) == scenario.malicious


def drive(folder: Path, batches: int) -> int:
    with (folder / "err.txt").open("w") as err:
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(folder), str(batches)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
            timeout=DEADLINE_S,
            check=False,
        )
    return done.returncode


class Crash(BaseException):
    """Simulates a crash of the driver: the files stay as they are."""


def crash() -> None:
    raise Crash


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_blocked_users_stay_blocked_after_a_crash(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setattr(engine, "SparkExecutor", counted)
    scenario = GuardScenario("attack", SEED, batches=14)
    scenario.write(tmp_path)
    if killed:
        assert drive(tmp_path, 14) == -signal.SIGKILL, (tmp_path / "err.txt").read_text()[-2000:]
    else:
        with pytest.raises(Crash):
            play(spark, scenario, tmp_path, crash)
    with closing(Store(tmp_path / "out" / "state")) as store:
        before = decisions(store)
        done = len(records.commits(store))
    assert set(blocked_users(before)) == scenario.malicious and done < 14
    # The last run is in this process, which has a session already.
    play(spark, scenario, tmp_path)
    with closing(QueryService(tmp_path / "out" / "state")) as service:
        log = decisions(service.store)
        assert log[: len(before)] == before
        assert sorted(blocked_users(log)) == sorted(scenario.malicious)
        kept = load_guard(service.store)
        assert kept is not None
        rows = sum(block.num_rows for block in scenario.blocks)
        assert kept[0].gate.counted == rows
        (block,) = [row for row in log if row["decision"] == "block"]
        sent = 0
        for number, requests in enumerate(scenario.blocks):
            first = sum(earlier.num_rows for earlier in scenario.blocks[:number])
            for row, user in enumerate(requests["user_id"].to_pylist()):
                sent += user in scenario.malicious and first + row > block["position"]
        listing = kept[0].listing()["blocked"]
        assert sum(item["refused"] for item in listing) == sent > 1_000
        for _, segment, ended in service.queries().segments:
            for slot in range(segment.size):
                if segment.users[slot].as_py() in scenario.malicious and slot not in ended:
                    assert int(segment.created_position[slot]) <= block["position"]


def test_snapshot_queries_pass_the_guard(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = GuardScenario("crowd", SEED, batches=4)
    scenario.write(tmp_path)
    more = {"window.kind": "count", "window.length": 2_000, "guard.round": 1e6}
    config = scenario.config(tmp_path, Strategy.GLOBAL, **more)
    state = config.out.state_dir
    counted: list[dict[str, tuple[int, int]]] = []

    def on_batch(commit: records.Commit) -> None:
        assert pipeline._loop is not None and pipeline._loop.guard is not None
        counted.append(users_of(pipeline._loop.guard))
        if commit.batch_id == 0:
            pipeline.snapshot(Box(0.0, 0.0, 0.5, 0.5), user_id="eve")
            pipeline.snapshot()
            with closing(Snapshots(state, spark, points_here=0)) as other:
                other.run(SnapshotQuery(user_id="eve"))
                with pytest.raises(RequestError, match="x0 is greater"):
                    other.run(SnapshotQuery(Box(1.0, 0.0, 0.0, 1.0), user_id="eve"))
        if commit.batch_id == 1:
            assert main(["snapshot", str(state), "--user", "eve", "--aggregate", "count"]) == 0
            assert main(["guard", "block", "eve", "--state", str(state)]) == 0
        if commit.batch_id in (1, 2):  # the run has applied the command for batch 2
            with pytest.raises(RequestError, match="'eve' is blocked"):
                pipeline.snapshot(user_id="eve")
            assert main(["snapshot", str(state), "--user", "eve"]) == 3
            assert "user 'eve' is blocked" in capsys.readouterr().err

    with Pipeline(config, spark=spark, on_batch=on_batch, seed=1) as pipeline:
        pipeline.run()
    assert [found.get("eve") for found in counted] == [None, (2, 0), (3, 0), (3, 0)]
    assert [found.get("local") for found in counted] == [None, (1, 0), (1, 0), (1, 0)]


# -- requests as a stream


def request(name: str, user: str | None, op: str = "register", x1: float = 2.0) -> dict[str, Any]:
    corners = {"x0": 1.0, "y0": 1.0, "x1": x1, "y1": 2.0} if op == "register" else {}
    return {"op": op, "query_id": name, "user_id": user, **corners}


COLUMNS = pa.schema(
    [(name, pa.string()) for name in ("op", "query_id", "user_id")]
    + [(name, pa.float64()) for name in ("x0", "y0", "x1", "y1")]
)
BATCHES = [
    [
        *(request(f"a{k}", "ann") for k in range(50)),
        *(request(f"b{k}", "bob") for k in range(20)),
        *(request(f"e{k}", "eve") for k in range(400)),
        request("wrong", "bob", x1=0.0),
        request("nobody", None),
        request("odd", "bob", op="dance"),
    ],
    [
        *(request(f"a{k}", "ann", op="terminate") for k in range(30)),
        *(request(f"b{k}", "ann", op="terminate") for k in range(5)),
        request("a1", "bob"),
    ],
]


def write_batch(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"{number}.parquet"
    pq.write_table(pa.Table.from_pylist(BATCHES[number], COLUMNS), path)
    os.utime(path, (1_000_000_000 + number,) * 2)


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    schema = spark.read.parquet(str(folder)).schema
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def config_of(folder: Path) -> RunConfig:
    points = {"id": [0, 1], "x": [1.5, 9.0], "y": [1.5, 9.0], "time": [10, 11]}
    pq.write_table(pa.table(points), folder / "points.parquet")
    return RunConfig(
        points={"path": str(folder / "points.parquet"), "time": "time"},
        space={"bounds": Rect(0.0, 0.0, 10.0, 10.0), "coordinates": Coordinates.PLANE},
        engine={"strategy": Strategy.GLOBAL, "machines": 2, "available_now": True},
        queries={"id_type": "text"},
        out={"dir": folder / "out"},
        guard={"enabled": True},
    )


def users_of(guard_state: GuardState) -> dict[str, tuple[float, float]]:
    """Return x1 and x2 of the open round."""
    users = guard_state.guard.users
    pairs = users.numbers[: users.used, :2].tolist()
    return {n: (a, b) for n, (a, b) in zip(users.names, pairs, strict=True) if a or b}


def test_spark_checks_and_counts_streamed_requests(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = config_of(tmp_path), tmp_path / "requests"
    write_batch(folder, 0)
    by_driver: list[int] = []
    counting = Tally.of.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Tally], names: Any, keys: Any, kinds: Any) -> Any:
        made = counting(cls, names, keys, kinds)
        by_driver.append(int(made[0].counts[:, :2].sum()))
        return made

    monkeypatch.setattr(Tally, "of", classmethod(noted))
    with Pipeline(config, spark=spark, seed=1) as pipeline:
        pipeline.run()  # makes the guard
        send(pipeline.store, GuardCommand(BLOCK, "eve", "by hand"))
        assert pipeline._loop is not None and pipeline._loop.guard is not None
        pipeline._loop.guard.apply_commands(pipeline.log)
        pipeline.take_requests(stream(spark, folder)).awaitTermination()
        end = pipeline.log.end()
        blocks = list(pipeline.log.read(0, end))
        assert "eve" not in {
            row["user_id"]
            for block in blocks
            for row in block.to_pylist()
            if row.get("op") == "register"
        }
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.run()
    for number in range(2):  # the second time, Spark has no new requests
        with Pipeline(config, spark=spark) as pipeline:
            write_batch(folder, 1)
            frame = stream(spark, folder)
            pipeline.run()  # loads the guard
            pipeline.take_requests(frame).awaitTermination()
            pipeline.run()
            assert pipeline._loop is not None
            guard_state = pipeline._loop.guard
            assert guard_state is not None
            assert users_of(guard_state) == {"ann": (50, 30), "bob": (21, 0)}
            (eve,) = guard_state.guard.listing()["blocked"]
            assert (eve["user"], eve["refused"]) == ("eve", 400)
            if number:
                assert pipeline.log.end() == end
            end = pipeline.log.end()
    # Requests that admission rejected were subtracted; none was counted twice.
    assert sum(by_driver) == 1 + 5
    with closing(QueryService(config.out.state_dir)) as service:
        live = Counter(
            segment.users[slot].as_py()
            for _, segment, ended in service.queries().segments
            for slot in range(segment.size)
            if ended.get(slot, 1) != TIME_MIN
        )
        assert live == {"ann": 20, "bob": 21}


def test_a_stream_without_the_columns_of_requests_is_rejected(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.readStream.format("rate").load()
    with (
        Pipeline(config_of(tmp_path), spark=spark) as pipeline,
        pytest.raises(SourceError, match="op, query_id, user_id"),
    ):
        pipeline.take_requests(frame)
