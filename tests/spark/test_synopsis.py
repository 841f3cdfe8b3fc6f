"""The synopsis on Spark equals the one of the rows, also if the driver is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from synopsis_driver import BATCH_ROWS, config_of

from roost import Box, Pipeline, Query
from roost.runtime.prefix_rounds import PREFIX_ROUNDS
from roost.storage.store import Store
from roost.synopsis import Scope, build, cardinality, correlation, count, mean
from roost.synopsis.catalogue import FileKind, read_catalogue
from roost.synopsis.reader import SynopsisReader
from synopsis_tables import make_table

pytestmark = pytest.mark.spark

TABLE = make_table(8, 2_000)
STEPS = ("intent", "apply", "run", "after", "deliver", "commit", "publish", "cleanup", "round")
SCOPES = [Scope(), Scope(Box(9.0, 48.0, 10.5, 51.0), predicate="temp > 12 and kind != 'fog'")]


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.parquet"
    pq.write_table(TABLE.append_column("id", pa.array(np.arange(TABLE.num_rows))), path)
    return path


def check_state(state: Path) -> None:
    """Compare the state with the synopsis of all rows, and the results of the standing query."""
    results = pa.concat_tables(map(pq.read_table, sorted((state.parent / "synopsis").glob("*.p*"))))
    counted = results.select(["batch_id", "value"]).to_pylist()
    assert [row["batch_id"] for row in counted] == list(range(len(counted)))
    assert [row["value"] for row in counted][-1] == TABLE.num_rows
    sizes = np.diff([row["value"] for row in counted])
    assert set(sizes[:-1]) <= {BATCH_ROWS, BATCH_ROWS // 3, 500}, "each batch once"
    reader = SynopsisReader(state)
    found = reader.synopsis()
    reader.close()
    expected = build(TABLE, reader.spec, found.bins)
    assert found.count == TABLE.num_rows
    ours, theirs = (cardinality(sketch, ["kind", "level"]) for sketch in (found, expected))
    assert ours.value == pytest.approx(theirs.value, rel=1e-9)
    for scope in SCOPES:
        assert count(found, scope).value == pytest.approx(count(expected, scope).value, rel=1e-9)
        pairs = [
            (mean(found, "temp", scope), mean(expected, "temp", scope)),
            (
                correlation(found, "temp", "rain", scope),
                correlation(expected, "temp", "rain", scope),
            ),
        ]
        for a, b in pairs:
            assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), rel=1e-9)


@pytest.mark.parametrize("exchange", [False, True])
def test_a_run_on_spark_builds_the_synopsis_of_its_rows(
    exchange: bool, tmp_path: Path, points: Path, spark: SparkSession
) -> None:
    """Files are folded on the executors meanwhile; matches are not affected."""
    config = config_of(str(points), str(tmp_path / "out"), exchange=exchange)
    box = Box(9.0, 48.0, 10.5, 51.0)
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.request(Query("corner", box))
        report = pipeline.run()
        answer = pipeline.synopsis.query("count", scope=Scope(box))
    assert answer.batch_id == 6
    assert answer.result.low <= report["matches"] <= answer.result.high
    check_state(config.out.state_dir)
    store = Store(config.out.state_dir)
    assert read_catalogue(store).of_kind(FileKind.BASE)
    store.close()


def test_a_streaming_dataframe_builds_the_same_synopsis(
    tmp_path: Path, spark: SparkSession
) -> None:
    folder = tmp_path / "points"
    folder.mkdir()
    numbered = TABLE.append_column("id", pa.array(np.arange(TABLE.num_rows)))
    for number in range(4):
        path = folder / f"{number}.parquet"
        pq.write_table(numbered.slice(number * 500, 500), path)
        os.utime(path, (1_000_000_000 + number,) * 2)  # Spark reads older files first
    config = config_of("unused", str(tmp_path / "out"))
    schema = spark.read.parquet(str(folder)).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.start(frame).awaitTermination()
    check_state(config.out.state_dir)


def kill_drivers(
    points: Path, out: Path, kills: list[tuple[object, str]], *, scaling: bool = False
) -> None:
    """Run one driver for each kill, then one that completes."""
    driver = Path(__file__).with_name("synopsis_driver.py")
    for kill in [*kills, None]:
        words = [] if kill is None else map(str, kill)
        with (out.parent / "driver.txt").open("w") as said:
            done = subprocess.run(
                [sys.executable, str(driver), str(points), str(out), str(scaling), *words],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=300,
                check=False,
            )
        expected = 0 if kill is None else -signal.SIGKILL
        assert done.returncode == expected, (out.parent / "driver.txt").read_text()[-3_000:]
    check_state(out / "state")


@pytest.mark.full
def test_drivers_killed_at_every_step_count_each_point_once(
    tmp_path: Path, points: Path, child_environment: None
) -> None:
    kills: list[tuple[object, str]] = [(2 + k % 4, step) for k, step in enumerate(STEPS)]
    kills = sorted(kills, key=lambda kill: str(kill[0]))
    kill_drivers(points, tmp_path / "out", kills)


@pytest.mark.full
def test_drivers_killed_at_every_step_of_a_fold_count_each_point_once(
    tmp_path: Path, points: Path, child_environment: None
) -> None:
    """Its task has begun or written its file; the driver has the results, or recorded them."""
    steps = ("started", "written", "finished", "recorded")
    kill_drivers(points, tmp_path / "out", [("fold", step) for step in steps], scaling=True)


def test_drivers_killed_while_prefixes_move_count_each_point_once(
    tmp_path: Path, points: Path, child_environment: None
) -> None:
    """One machine has all until its memory is full; a move and a fold are under way at kills."""
    kills: list[tuple[object, str]] = [("moved", "run"), ("fold", "written")]
    kill_drivers(points, tmp_path / "out", kills, scaling=True)
    store = Store(tmp_path / "out" / "state")
    rounds = [row for _, row in store.items(PREFIX_ROUNDS) if row["next_epoch"] is not None]
    owners = {part.owner for file in read_catalogue(store).files for part in file.parts}
    store.close()
    assert any(v["reason"].startswith("memory") for row in rounds for v in row["verdicts"])
    assert len(owners) > 1, "what moved has another owner"
