"""With ``engine.encrypt`` strangers get no answer and find no plain text; the matches are the same.

The same looks at a session without it find both, so they do look where something is to be found.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import encryption_story as story
import pytest
from cases import read_folder
from pyspark.sql import SparkSession
from test_cluster import spark_home

from roost import Pipeline
from roost.engine.encryption import REQUIRED
from roost.engine.session import make_session
from roost.errors import ConfigError

pytestmark = pytest.mark.spark

DEADLINE_S = 300


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def check_files(folder: Path, expected: list[str], umask: int) -> None:
    """The right matches, as open as the umask says, and a state that is not."""
    assert sorted(row["point_id"] for row in read_folder(folder / "out" / "matches")) == expected
    state = folder / "out" / "state"
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.rglob("*"))}
    kinds = {path.suffix for path in made if path.is_file()}
    assert kinds >= {".db", ".lock", ".seg", ".win", ".trio"}
    wrong = {
        str(path): oct(mode)
        for path, mode in made.items()
        if mode != (0o700 if path.is_dir() else 0o600)
    }
    assert not wrong
    matches = folder / "out" / "matches"
    assert stat.S_IMODE(matches.stat().st_mode) == 0o777 & ~umask


def test_without_encryption_strangers_see_everything(
    spark: SparkSession, tmp_path: Path, umask: None
) -> None:
    expected = story.expected(*story.make_points(tmp_path / "points.parquet"))
    local = Path(spark.sparkContext.getConf().get("spark.local.dir") or "")
    told = story.run(story.config_of(tmp_path), local, spark)
    assert told["matches"] == told["found"] == len(expected) > 1_000
    assert told["window"] == story.POINTS
    assert told["answers"] == ["0o600", "0o700"]
    assert told["mark_in_shuffle"]
    assert told["stranger"]
    check_files(tmp_path, expected, 0o022)


def test_a_session_that_does_not_encrypt_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    config = story.config_of(tmp_path, encrypt=True)
    with pytest.raises(ConfigError, match=r"engine.encrypt: got True, .*spark.authenticate=true"):
        Pipeline(config, spark=spark)
    assert not config.out.exists()
    with pytest.raises(ConfigError, match=r"spark.io.encryption.enabled=true"):
        make_session("local[2]", encrypt=True)  # finds the one that is there


def test_spark_checkpoints_are_in_a_private_folder(
    spark: SparkSession, tmp_path: Path, umask: None
) -> None:
    story.make_points(tmp_path / "points.parquet")
    (tmp_path / "in").mkdir()
    (tmp_path / "points.parquet").rename(tmp_path / "in" / "points.parquet")
    schema = spark.read.parquet(str(tmp_path / "in")).schema
    frame = spark.readStream.schema(schema).parquet(str(tmp_path / "in"))
    config = story.config_of(tmp_path)
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.start(frame).awaitTermination()
    checkpoint = config.state_folder / "checkpoint"
    assert any(checkpoint.rglob("0"))
    assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o700


def test_an_encrypted_cluster_matches_the_same_and_shows_nothing(tmp_path: Path) -> None:
    expected = story.expected(*story.make_points(tmp_path / "points.parquet"))
    home = spark_home(tmp_path.with_name(f"{tmp_path.name}-home"))
    done = subprocess.run(
        [sys.executable, story.__file__, str(tmp_path), "000"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "SPARK_HOME": str(home)},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["matches"] == told["found"] == len(expected)
    assert told["window"] == story.POINTS
    check_files(tmp_path, expected, 0o000)

    assert told["answers"] == ["0o600", "0o700"]
    assert told["settings"].items() >= REQUIRED.items()
    assert not told["mark_anywhere"]
    assert not told["stranger"]

    assert len(told["executors"]) == 2
    on_the_line = {key: value for key, value in REQUIRED.items() if "io.encryption" not in key}
    for knows_secret, command in told["executors"]:
        assert knows_secret
        assert all(f"-D{key}={value}" in command for key, value in on_the_line.items())
    assert not told["secret_shown"]
    assert told["secret_kept"] == []
    assert "the cluster's own spark.authenticate.secret" in told["standalone"]
