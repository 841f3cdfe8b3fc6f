"""Without ``engine.encrypt``, unauthenticated clients get responses and files are plain text.

``test_cluster.py`` makes the same checks with ``engine.encrypt``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import encryption_scenario as scenario
import pytest
from pyspark.sql import SparkSession

from roost import Pipeline
from roost.engine.session import make_session
from roost.errors import ConfigError

pytestmark = pytest.mark.spark


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_without_encryption_traffic_and_files_are_readable(
    spark: SparkSession, tmp_path: Path, umask: None
) -> None:
    expected = scenario.expected(*scenario.make_points(tmp_path / "points.parquet"))
    local = Path(spark.sparkContext.getConf().get("spark.local.dir") or "")
    summary = scenario.run(scenario.config_of(tmp_path), local, spark)
    assert summary["matches"] == summary["found"] == len(expected) > 1_000
    assert summary["window"] == scenario.POINTS
    assert summary["results"] == ["0o600", "0o700"]
    assert summary["mark_in_shuffle"]
    assert summary["responds"]
    scenario.check_files(tmp_path, expected, 0o022)


def test_a_session_that_does_not_encrypt_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    config = scenario.config_of(tmp_path, **{"engine.encrypt": True})
    with pytest.raises(ConfigError, match=r"engine.encrypt: got True, .*spark.authenticate=true"):
        Pipeline(config, spark=spark)
    assert not config.out.dir.exists()
    with pytest.raises(ConfigError, match=r"spark.io.encryption.enabled=true"):
        make_session("local[2]", encrypt=True)  # returns the active session


def test_spark_checkpoints_are_in_a_private_folder(
    spark: SparkSession, tmp_path: Path, umask: None
) -> None:
    scenario.make_points(tmp_path / "points.parquet")
    (tmp_path / "in").mkdir()
    (tmp_path / "points.parquet").rename(tmp_path / "in" / "points.parquet")
    schema = spark.read.parquet(str(tmp_path / "in")).schema
    frame = spark.readStream.schema(schema).parquet(str(tmp_path / "in"))
    config = scenario.config_of(tmp_path)
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.start(frame).awaitTermination()
    checkpoint = config.out.state_dir / "checkpoint"
    assert any(checkpoint.rglob("0"))
    assert stat.S_IMODE(checkpoint.stat().st_mode) == 0o700
