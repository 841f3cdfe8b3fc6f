"""Tasks behind an exchange run at their homes on a cluster, and survive the loss of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crash_driver import Spec
from homes_driver import EXECUTORS, JOINED, KILLED, ROTATED
from test_cluster import (
    FLOW,
    POINTS,
    Numbers,
    brute,
    check_windows,
    make_boxes,
    make_points,
    matches_in,
    request,
)
from test_crash import DEADLINE_S

from balance_checks import check_history, check_rounds
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
    rows, last = driven(spec, tmp_path)

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


@dataclass
class Churn:
    """Queries that are registered and terminated after each batch."""

    boxes: Numbers
    first: int = 240
    come: int = 10
    go: int = 5

    def requests(self) -> dict[str, list[dict[str, Any]]]:
        made = {"start": [request(n, self.boxes[n].tolist()) for n in range(self.first)]}
        for number in range(BATCHES - 1):
            come = self.first + self.come * number
            found = [request(n, self.boxes[n].tolist()) for n in range(come, come + self.come)]
            for n in range(self.go * number, self.go * (number + 1)):
                found.append({"op": "terminate", "query_id": f"q{n}", "user_id": "ann"})
            made[f"after-{number}"] = found
        return made

    def live(self, batch: int) -> range:
        return range(self.go * batch, self.first + self.come * batch)

    def matches(self, x: Numbers, y: Numbers) -> Numbers:
        rows = ROWS // BATCHES
        found = [np.empty(0, np.int64)]
        for batch in range(BATCHES):
            mine = slice(batch * rows, (batch + 1) * rows)
            for n in self.live(batch):
                x0, y0, x1, y1 = self.boxes[n]
                inside = (x[mine] >= x0) & (x[mine] <= x1) & (y[mine] >= y0) & (y[mine] <= y1)
                found.append(n * POINTS + batch * rows + np.flatnonzero(inside))
        return np.sort(np.concatenate(found))

    def overlapping(self, batch: int, cells: list[int]) -> int:
        """Count the live queries over a rectangle of cells, of which there are 20 by 10."""
        c0, r0, c1, r1 = 3.2 * np.array(cells)
        x0, y0, x1, y1 = self.boxes[self.live(batch)].T
        return int(np.count_nonzero((x0 < c1) & (x1 >= c0) & (y0 < r1) & (y1 >= r0)))


# Under SWARM either one round, so that points and queries add up, or one for each batch.
PLACED = ("swarm", "swarm in rounds", "global", "history")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full if c != "swarm" else ()) for c in PLACED]
)
def test_queries_come_and_go_while_homes_move_and_an_executor_is_killed(
    tmp_path: Path, child_environment: None, case: str
) -> None:
    points, churn = tmp_path / "points.parquet", Churn(make_boxes())
    strategy, lasting = case.split()[0], case == "swarm"
    rng = np.random.default_rng(63)
    x, y = rng.uniform(0, 64, ROWS), rng.uniform(0, 32, ROWS)
    hot = (rng.random(ROWS) < 0.7) & (np.arange(ROWS) >= ROWS // BATCHES)
    x[hot], y[hot] = x[hot] / 8, y[hot] / 8  # from the second batch on
    columns = {"id": np.arange(ROWS), "x": x, "y": y, "event_time": np.arange(ROWS)}
    pq.write_table(pa.table(columns), points)
    spec = Spec(
        points=str(points),
        out=str(tmp_path / "out"),
        strategy=strategy,
        machines=MACHINES,
        batch_rows=ROWS // BATCHES,
        bounds=[0.0, 0.0, 64.0, 32.0],
        requests=churn.requests(),
        master=f"local-cluster[{EXECUTORS},1,1024]",
        round=1e9 if lasting else 15.0,
        cache=str(tmp_path / "cache"),
    )
    rows, last = driven(spec, tmp_path)
    assert len(rows) == BATCHES and len(last["killed"]) == 1
    found = matches_in(Path(spec.out) / "matches", ROWS // BATCHES)
    assert np.array_equal(found, churn.matches(x, y))
    assert list((tmp_path / "cache").glob("roost-*/*"))
    state = Path(spec.out) / "state"
    plans = check_history(state, MACHINES, grid=(20, 10))
    assert (len(plans) > 1) == (case in ("swarm in rounds", "global"))
    assert len(check_rounds(state)) == len(plans) - 1
    if strategy == "swarm":
        check_queries(rows, churn)
    if lasting:
        check_points(rows)


def check_queries(rows: list[dict[str, Any]], churn: Churn) -> None:
    """Check that every partition counts the queries over it, also on restarted machines."""
    for row in rows:
        for mine in filter(None, row["statistics"].values()):
            for *cells, queries in mine["q"]:
                assert queries == churn.overlapping(row["batch"], cells)


def check_points(rows: list[dict[str, Any]]) -> None:
    """Check that points are counted once, after a loss from the checkpoint on."""
    known: dict[str, float | None] = {}
    checkpoints: dict[str, float] = {}
    for row in rows:
        for machine, mine in row["statistics"].items():
            if mine is None:  # the executor was killed after the task
                known[machine] = None
                continue
            before = checkpoints[machine] if mine["restarted"] else known.get(machine, 0.0)
            assert before is not None, "statistics that were lost are there"
            assert mine["n"] == before + mine["points"]
            known[machine] = mine["n"]
            if mine["checkpoint"]:
                checkpoints[machine] = mine["n"]
    restarted = [row["statistics_restarted"] for row in rows]
    # The first batch leaves checkpoints, and so do tasks that do not find their statistics. The
    # second batch leaves its statistics at homes that all change before the third.
    assert restarted[:4] == [0, 0, MACHINES, 0] and sum(restarted[4:]) >= 1
