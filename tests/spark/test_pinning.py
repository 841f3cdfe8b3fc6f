"""Tasks behind an exchange run at their homes on a cluster, and survive the loss of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crash_driver import Spec
from homes_driver import EXECUTORS, JOINED, KILLED, ROTATED
from test_cluster import FLOW, brute, check_windows, make_boxes, make_points, matches_in, request
from test_crash import DEADLINE_S

from roost.engine.local_cluster import spark_home

pytestmark = pytest.mark.spark

DRIVER = Path(__file__).with_name("homes_driver.py")
MACHINES = 5
ROWS, BATCHES = 60_000, 6


def driven(spec: Spec, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the driver; returns what it says of each batch, and at the end."""
    home = str(spark_home(folder.with_name(f"{folder.name}-home")))
    with (folder / "said.txt").open("w") as said, (folder / "error.txt").open("w") as error:
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(spec.to_file(folder / "spec.json"))],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=error,
            env={**os.environ, "SPARK_HOME": home},
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, (folder / "error.txt").read_text()[-3_000:]
    *rows, last = [json.loads(line) for line in (folder / "said.txt").read_text().splitlines()]
    return rows, last


def misplaced(row: dict[str, Any]) -> int:
    return sum(row["ran"][task] != home for task, home in row["asked"].items())


def test_tasks_run_at_their_homes_and_a_killed_executor_loses_them(
    tmp_path: Path, child_environment: None
) -> None:
    points = tmp_path / "points.parquet"
    boxes = make_boxes()
    expected = brute(*make_points(points), boxes)
    (tmp_path / "boxes.py").write_text(FLOW)
    spec = Spec(
        points=str(points),
        out=str(tmp_path / "out"),
        strategy="uniform",
        machines=MACHINES,
        batch_rows=50_000,
        bounds=[0.0, 0.0, 64.0, 32.0],
        requests={"start": [request(n, box) for n, box in enumerate(boxes.tolist())]},
        master=f"local-cluster[{EXECUTORS},1,1024]",
        flow=f"{tmp_path / 'boxes.py'}:flow",
    )
    rows, last = driven(spec, tmp_path)

    assert np.array_equal(matches_in(Path(spec.out) / "matches", 50_000), expected)
    check_windows(Path(spec.out), expected)

    assert [row["batch"] for row in rows] == list(range(8))
    assert len(last["killed"]) == 1
    killed = last["killed"][0]
    for row in rows:
        # The dataflow's bucket maps have three machines each.
        assert len(row["asked"]) == MACHINES + 2 * 3
        assert set(row["ran"].values()) <= {*last["pids"], str(EXECUTORS)}
        assert row["homes"]["misplaced"] == misplaced(row)
        assert row["homes"]["tasks"] == len(row["asked"])
        if row["batch"] != KILLED:
            # A home is a preference, but nothing was in its way.
            assert misplaced(row) == 0, row
        loads = Counter(row["asked"][f"matching {m}"] for m in range(MACHINES))
        assert sorted(loads.values()) in ([1, 2, 2], [2, 3])

    for number in ROTATED:
        asked, before = rows[number]["asked"], rows[number - 1]["asked"]
        assert all(asked[task] != before[task] for task in asked)
    assert killed in rows[KILLED]["asked"].values() and misplaced(rows[KILLED]) > 0
    lost = {task for task, home in rows[KILLED]["asked"].items() if home == killed}
    after = rows[KILLED + 1]["asked"]
    assert killed not in after.values()
    assert all(after[task] != killed for task in lost)
    assert set(rows[JOINED]["asked"].values()) == {*last["pids"], str(EXECUTORS)} - {killed}
    assert rows[JOINED + 1]["asked"] == rows[JOINED]["asked"]
    totals = {key: sum(row["homes"][key] for row in rows) for key in ("tasks", "misplaced")}
    assert last["homes"].items() >= totals.items()


def test_statistics_of_a_killed_executor_start_from_the_checkpoint(
    tmp_path: Path, child_environment: None
) -> None:
    """Queries are right in every batch, points from the checkpoint on; none is counted twice."""
    points, boxes = tmp_path / "points.parquet", make_boxes()
    rng = np.random.default_rng(63)
    x, y = rng.uniform(0, 64, ROWS), rng.uniform(0, 32, ROWS)
    columns = {"id": np.arange(ROWS), "x": x, "y": y, "event_time": np.arange(ROWS)}
    pq.write_table(pa.table(columns), points)
    spec = Spec(
        points=str(points),
        out=str(tmp_path / "out"),
        strategy="swarm",
        machines=MACHINES,
        batch_rows=ROWS // BATCHES,
        bounds=[0.0, 0.0, 64.0, 32.0],
        requests={"start": [request(n, box) for n, box in enumerate(boxes.tolist())]},
        master=f"local-cluster[{EXECUTORS},1,1024]",
        round=1e9,
    )
    rows, last = driven(spec, tmp_path)
    assert len(rows) == BATCHES and len(last["killed"]) == 1
    sides = np.array([3.2, 3.2, 3.2, 3.2])  # 20 by 10 cells
    known: dict[str, float | None] = {}
    checkpoints: dict[str, float] = {}
    for row in rows:
        for machine, mine in row["statistics"].items():
            if mine is None:
                known[machine] = None
                continue
            for *cells, found in mine["q"]:
                c0, r0, c1, r1 = np.array(cells) * sides
                over = (boxes[:, 0] < c1) & (boxes[:, 2] >= c0) & (boxes[:, 1] < r1)
                assert found == np.count_nonzero(over & (boxes[:, 3] >= r0))
            before = known.get(machine, 0.0)
            if mine["restarted"]:
                before = checkpoints[machine]
            assert before is not None, "statistics were found that were lost"
            assert mine["n"] == before + mine["points"]
            known[machine] = mine["n"]
            if mine["checkpoint"]:
                checkpoints[machine] = mine["n"]
    restarted = [row["statistics_restarted"] for row in rows]
    # The first batch leaves checkpoints, and so do tasks that do not find their statistics. The
    # second batch leaves its statistics at homes that all change before the third.
    assert restarted[:4] == [0, 0, MACHINES, 0] and sum(restarted[4:]) >= 1
