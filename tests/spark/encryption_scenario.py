"""A run whose text identifiers are searched for on disk, and an unauthenticated client of Spark."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cases import read_folder
from pyspark.sql import SparkSession

from roost import Box, Pipeline, Query, RunConfig
from roost.engine.encryption import SECRET
from roost.engine.executor import SparkExecutor
from roost.engine.session import make_session
from roost.errors import ConfigError
from roost.model.choices import Strategy, WindowKind
from roost.model.settings import with_settings
from roost.model.space import Rect

POINTS = 4_000
MARK = "conspicuous"
MASTER = "local-cluster[2,1,1024]"
"""Two executor processes of one core and 1,024 MB each."""


def make_points(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(71)
    x, y = rng.uniform(0, 64, POINTS), rng.uniform(0, 32, POINTS)
    ids = [f"{MARK}-{number}" for number in range(POINTS)]
    times = np.arange(POINTS)
    pq.write_table(pa.table({"id": ids, "x": x, "y": y, "event_time": times}), path)
    return x, y


def expected(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> list[str]:
    """Return the identifiers of the points in the box, by brute force."""
    inside = np.flatnonzero((x >= 10) & (x <= 40) & (y >= 5) & (y <= 25))
    return sorted(f"{MARK}-{number}" for number in inside)


def config_of(folder: Path, **settings: Any) -> RunConfig:
    own: dict[str, Any] = {
        "points.path": str(folder / "points.parquet"),
        "space.bounds": Rect(0.0, 0.0, 64.0, 32.0),
        "space.grid": (20, 10),
        "engine.strategy": Strategy.SWARM,
        "engine.machines": 2,
        "engine.batch_rows": POINTS // 2,
        "engine.available_now": True,
        "balance.round": 500.0,
        "balance.exchange": "always",
        "window.kind": WindowKind.COUNT,
        "window.length": POINTS,
        "out.dir": folder / "out",
    }
    return with_settings(RunConfig(), {**own, **settings})


def run(config: RunConfig, local: Path, spark: SparkSession | None) -> dict[str, Any]:
    """Run, and search the shuffle files of each batch, which are not deleted."""
    shuffled: list[bool] = []

    def search(step: str, batch_id: int) -> None:
        if step == "after":
            files = [path.read_bytes() for path in local.rglob("shuffle_*.data")]
            assert files, "nothing was shuffled"
            shuffled.append(any(MARK.encode() in data for data in files))

    retained = mock.patch.object(SparkExecutor, "_delete_blocks")
    with retained, Pipeline(config, spark=spark, on_step=search) as pipeline:
        pipeline.request(Query("q", Box(10.0, 5.0, 40.0, 25.0)))
        report = pipeline.run()
        counted = pipeline.snapshot(aggregate="count").collect()[0]["count"]
        # With this limit every result is large, and stays in files until the pipeline is closed.
        pipeline.snapshots._points_here = 0
        with mock.patch("roost.engine.snapshot.RESULT_BYTES_MAX", 0):
            rows = pipeline.snapshot(Box(10.0, 5.0, 40.0, 25.0)).count()
        results = config.out.state_dir / "answers"
        left = (results, *results.rglob("*"))
        summary = {
            "matches": report["matches"],
            "window": counted,
            "found": rows,
            "results": sorted({oct(stat.S_IMODE(path.stat().st_mode)) for path in left}),
            "mark_in_shuffle": all(shuffled),
            "mark_anywhere": any(shuffled),
            "responds": responds_without_secret(pipeline.spark),
        }
    return summary


def responds_without_secret(spark: SparkSession) -> bool:
    """Return whether Spark responds to a client without the secret that requests no blocks.

    The client speaks Spark's protocol: a frame is its length, a kind (3 request, 4 response) and,
    here, a number, the length of the body and the body: kind 0 (open blocks), application,
    executor, and names of blocks.
    """

    def text(value: str) -> bytes:
        return struct.pack(">i", len(value)) + value.encode()

    none = struct.pack(">i", 0)
    body = b"\0" + text(spark.sparkContext.applicationId) + text("9") + none
    request = struct.pack(">bqi", 3, 1, len(body)) + body
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(False)
    host, _, port = executors.head().hostPort().rpartition(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.settimeout(10)
        client.sendall(struct.pack(">q", len(request) + 8) + request)
        try:
            response = client.recv(9)
        except ConnectionError:
            return False
    return len(response) == 9 and response[8] == 4


def check_files(folder: Path, expected: list[str], umask: int) -> None:
    """Check the matches, their modes (as the umask sets them) and the private state directory."""
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


def executor_facts(_: object) -> tuple[bool, str]:
    """Return, from a worker, the environment and the visible command line of its executor."""
    secret = os.environ.get("_SPARK_AUTH_SECRET", "")
    shown = ""
    pid = os.getppid()
    while pid > 1 and "CoarseGrainedExecutorBackend" not in shown:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return bool(secret), shown


def command_lines() -> str:
    """Return the command lines of all processes, which any user of the host can read."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue  # it has ended
    return b"\n".join(lines).decode(errors="replace")


def main(folder: Path, umask: int) -> None:
    os.umask(umask)
    local = folder / "local"
    settings = {"spark.local.dir": str(local), "spark.sql.warehouse.dir": str(folder / "house")}
    config = config_of(
        folder, **{"engine.master": MASTER, "engine.encrypt": True, "engine.spark": settings}
    )
    with Pipeline(config) as pipeline:
        spark = pipeline.spark
    summary = run(config, local, spark)
    context = spark.sparkContext
    secret = context.getConf().get(SECRET)
    assert secret
    summary["settings"] = {k: v for k, v in context.getConf().getAll() if k != SECRET}
    summary["executors"] = context.parallelize(range(2), 2).map(executor_facts).collect()
    summary["secret_shown"] = secret in command_lines()
    summary["secret_files"] = [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    spark.stop()
    try:
        make_session("spark://127.0.0.1:1", encrypt=True)
    except ConfigError as error:
        summary["standalone"] = str(error)
    print(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2], 8))
