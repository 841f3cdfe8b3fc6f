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
import pytest
from crash_driver import Spec
from homes_driver import EXECUTORS, JOINED, KILLED, ROTATED
from test_cluster import FLOW, brute, check_windows, make_boxes, make_points, matches_in, request
from test_crash import DEADLINE_S

from roost.engine.local_cluster import spark_home

pytestmark = pytest.mark.spark

DRIVER = Path(__file__).with_name("homes_driver.py")
MACHINES = 5


def misplaced(row: dict[str, Any]) -> int:
    return sum(row["ran"][task] != home for task, home in row["requested"].items())


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
    home = str(spark_home(tmp_path.with_name(f"{tmp_path.name}-home")))
    with (tmp_path / "said.txt").open("w") as said, (tmp_path / "error.txt").open("w") as error:
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(spec.to_file(tmp_path / "spec.json"))],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=error,
            env={**os.environ, "SPARK_HOME": home},
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, (tmp_path / "error.txt").read_text()[-3_000:]
    *rows, last = [json.loads(line) for line in (tmp_path / "said.txt").read_text().splitlines()]

    assert np.array_equal(matches_in(Path(spec.out) / "matches", 50_000), expected)
    check_windows(Path(spec.out), expected)

    assert [row["batch"] for row in rows] == list(range(8))
    assert len(last["killed"]) == 1
    killed = last["killed"][0]
    for row in rows:
        # The dataflow's bucket maps have three machines each.
        assert len(row["requested"]) == MACHINES + 2 * 3
        assert set(row["ran"].values()) <= {*last["pids"], str(EXECUTORS)}
        assert row["homes"]["misplaced"] == misplaced(row)
        assert row["homes"]["tasks"] == len(row["requested"])
        if row["batch"] != KILLED:
            # A home is a preference, but nothing was in its way.
            assert misplaced(row) == 0, row
        loads = Counter(row["requested"][f"matching {m}"] for m in range(MACHINES))
        assert sorted(loads.values()) in ([1, 2, 2], [2, 3])

    for number in ROTATED:
        requested, before = rows[number]["requested"], rows[number - 1]["requested"]
        assert all(requested[task] != before[task] for task in requested)
    assert killed in rows[KILLED]["requested"].values() and misplaced(rows[KILLED]) > 0
    lost = {task for task, home in rows[KILLED]["requested"].items() if home == killed}
    after = rows[KILLED + 1]["requested"]
    assert killed not in after.values()
    assert all(after[task] != killed for task in lost)
    assert set(rows[JOINED]["requested"].values()) == {*last["pids"], str(EXECUTORS)} - {killed}
    assert rows[JOINED + 1]["requested"] == rows[JOINED]["requested"]
    totals = {key: sum(row["homes"][key] for row in rows) for key in ("tasks", "misplaced")}
    assert last["homes"].items() >= totals.items()
