"""A second run on a state directory is rejected before it changes anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import Case, config_for, expected, outcome, random_case
from pyspark.sql import SparkSession

from roost import Pipeline
from roost.cli import FAILED
from roost.errors import StateError
from roost.model.choices import Strategy

pytestmark = pytest.mark.spark

POINTS = 300
BATCH_ROWS = 100


def contents(folder: Path) -> tuple[dict[str, tuple[int, int]], str]:
    """Return modes and times of everything below a folder, and the hashes of its files."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        stat = path.stat()
        found[str(path)] = (stat.st_mode, stat.st_mtime_ns)
    # In another process: a process that closes an SQLite file loses its locks on it.
    command = ["find", str(folder), "-type", "f", "-exec", "sha256sum", "{}", "+"]
    hashes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "state.db" in hashes
    return found, "\n".join(sorted(hashes.splitlines()))


def test_a_second_run_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Without the lock, both runs would read all points, and match some twice and others never."""
    case = random_case(81, POINTS, 40)
    config = config_for(case, tmp_path, **{"engine.batch_rows": BATCH_ROWS})
    # The second run has more requests, other batches and another plan.
    more = Case(case.points, random_case(82, 1, 30).requests)
    settings = {
        "points.path": config.points.path,
        "engine.batch_rows": 2 * BATCH_ROWS,
        "engine.strategy": Strategy.GLOBAL,
        "engine.machines": 2,
        "out.dir": config.out.dir,
    }
    other = config_for(more, tmp_path / "other", **settings)
    words = [sys.executable, "-m", "roost", "run", "--points", str(config.points.path)]
    words += ["--queries", str(other.queries.path), "--out", str(config.out.dir)]
    words += ["--batch-rows", str(2 * BATCH_ROWS), "--available-now"]
    rate = spark.readStream.format("rate").load()
    stream = rate.selectExpr("value AS id", "timestamp AS event_time", "1D AS x", "2D AS y")
    tried: list[str] = []

    def refused(step: str, number: int) -> None:
        if number != 1:
            return
        before = contents(config.out.dir)
        with (
            Pipeline(other, spark=spark) as second,
            pytest.raises(StateError, match="another run is using the state"),
        ):
            second.run()
        with (
            Pipeline(other, spark=spark) as second,
            pytest.raises(StateError, match="another run is using the state"),
        ):
            second.start(stream)
        if step == "run":
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == FAILED, done.stderr
            assert "another run is using the state" in done.stderr
        assert contents(config.out.dir) == before, step
        tried.append(step)

    with Pipeline(config, spark=spark, on_step=refused) as pipeline:
        report = pipeline.run()
    assert tried == [
        *("intent", "apply", "run", "after", "deliver"),
        *("commit", "publish", "cleanup", "round", "end"),
    ]
    assert report["points"] == POINTS and report["batches"] == POINTS // BATCH_ROWS
    assert outcome(config.out.dir, report).matches == expected(case)
    # The lock is released: the next run has no points left to match.
    with Pipeline(config, spark=spark) as pipeline:
        again = pipeline.run()
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(report))
    assert outcome(config.out.dir, again).matches == expected(case)
