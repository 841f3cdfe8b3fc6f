"""Executors of a standalone cluster follow the measured load; no test calls the allocation API."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import read_folder
from elastic_driver import QUERIES, SIDE

from roost.engine.standalone import Host, StandaloneCluster
from roost.runtime.group_rounds import GROUP_ROUNDS
from roost.storage.store import Store
from roost.testing import brute_force

pytestmark = [pytest.mark.spark, pytest.mark.full]

RATES = ((100, 10), (650, 26), (60, 40))  # points per second, seconds
HOSTS = 4
DEADLINE_S = 300


def write_points(folder: Path) -> pa.Table:
    times = np.concatenate(
        [
            np.repeat(np.arange(seconds) + sum(s for _, s in RATES[:k]), rate)
            for k, (rate, seconds) in enumerate(RATES)
        ]
    )
    xy = np.random.default_rng(4).uniform(0, SIDE, (times.size, 2))
    table = pa.table(
        {"id": np.arange(times.size), "x": xy[:, 0], "y": xy[:, 1], "event_time": times}
    )
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "points.parquet")
    return table


def drive(folder: Path, master: str) -> subprocess.CompletedProcess[str]:
    driver = Path(__file__).with_name("elastic_driver.py")
    command = [sys.executable, str(driver), str(folder), master]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)


def check(folder: Path, table: pa.Table) -> None:
    """Compare matches and sums with brute force, each once."""
    rows = [{**row, "time": row["event_time"]} for row in table.to_pylist()]
    found = [(row["query_id"], row["point_id"]) for row in read_folder(folder / "out" / "matches")]
    assert sorted(found) == brute_force(rows, QUERIES, lonlat=False)
    expected: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        one = expected.setdefault((row["event_time"] // 5 * 5, row["id"] % 20), [0, 0])
        one[0] += 1
        one[1] += row["id"]
    sums = read_folder(folder / "out" / "sums")
    assert {(row["event_time"], row["k"]): [row["n"], row["s"]] for row in sums} == expected
    assert len(sums) == len(expected)


def rounds(folder: Path) -> list[dict[str, Any]]:
    with closing(Store(folder / "out" / "state")) as store:
        return [row for _, row in store.items(GROUP_ROUNDS)]


def test_executors_follow_the_load(tmp_path: Path) -> None:
    """Load rises and executors arrive; load falls and they leave; no result changes."""
    table, folder = write_points(tmp_path / "run"), tmp_path / "run"
    with StandaloneCluster([Host(1, 600)] * HOSTS, tmp_path / "cluster") as cluster:
        done = drive(folder, cluster.url)
    assert done.returncode == 0, done.stderr[-3000:]
    check(folder, table)
    found = rounds(folder)
    decisions = [row["decision"] for row in found if row["decision"] != "NoChange"]
    assert "Provision" in decisions and decisions[-1] == "Release", decisions
    assert max(row["observed"] for row in found) >= 2
    assert max(row["layout"] for row in found) >= 2, "the layout counted no executor"
    assert found[-1]["planned"] == found[-1]["layout"] == 1
    assert done.stdout.strip() == "executors 1"
