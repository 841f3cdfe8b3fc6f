"""Local clusters: one loses an executor during a batch, one encrypts all traffic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import encryption_scenario as scenario
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cases import read_folder
from crash_driver import Spec
from test_crash import DEADLINE_S, Chain

from roost.engine.encryption import REQUIRED
from roost.engine.local_cluster import spark_home

pytestmark = pytest.mark.spark

POINTS = 400_000
BATCH_ROWS = 200_000
BOXES = 300
MASTER = "local-cluster[2,1,1024]"
"""Two executor processes of one core and 1,024 MB each."""

Numbers = np.ndarray[Any, Any]


def make_points(path: Path) -> tuple[Numbers, Numbers]:
    rng = np.random.default_rng(61)
    x, y = rng.uniform(0, 64, POINTS), rng.uniform(0, 32, POINTS)
    x[::5_000] = np.nan
    table = pa.table({"id": np.arange(POINTS), "x": x, "y": y, "event_time": np.arange(POINTS)})
    pq.write_table(table, path, row_group_size=50_000)
    return x, y


def make_boxes() -> Numbers:
    rng = np.random.default_rng(62)
    corner = rng.uniform([0, 0], [60, 30], (BOXES, 2))
    return np.hstack([corner, corner + rng.uniform(0, [4, 2], (BOXES, 2))])


def request(number: int, box: list[float]) -> dict[str, Any]:
    shape = dict(zip(("x0", "y0", "x1", "y1"), box, strict=True))
    return {"op": "register", "query_id": f"q{number}", "user_id": "ann", **shape}


def brute(x: Numbers, y: Numbers, boxes: Numbers) -> Numbers:
    """Return every match, as one number of its query and its point."""
    found = []
    for number, (x0, y0, x1, y1) in enumerate(boxes):
        inside = np.flatnonzero((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1))
        found.append(number * POINTS + inside)
    return np.sort(np.concatenate(found))


def matches_in(folder: Path, batch_rows: int = BATCH_ROWS) -> Numbers:
    tables = [pq.ParquetFile(path).read() for path in sorted(folder.glob("*.parquet"))]
    table = pa.concat_tables(tables)
    rows = table["point_id"].to_numpy()
    assert (table["batch_id"].to_numpy() == rows // batch_rows).all()
    queries = pc.utf8_slice_codeunits(table["query_id"], 1).cast(pa.int64()).to_numpy()
    return np.sort(queries * POINTS + rows)


WINDOW = 50_000
FLOW = f"""
from roost import Dataflow

flow = Dataflow("busy boxes")
found = flow.matches()
found.aggregate({{"n": "count"}}, by="query_id", size={WINDOW}).sink("counts")
found.aggregate({{"d": "distinct(id)"}}, by="query_id", size={WINDOW}).sink("points")
"""


def check_windows(out: Path, expected: Numbers) -> None:
    """Compare the dataflow's windows with brute force; the last one is still open."""
    queries, points = np.divmod(expected, POINTS)
    closed = points < POINTS - WINDOW
    counts = Counter(
        zip(queries[closed].tolist(), (points[closed] // WINDOW).tolist(), strict=True)
    )
    for sink in ("counts", "points"):
        rows = read_folder(out / sink)
        starts = Counter((int(row["query_id"][1:]), row["event_time"] // WINDOW) for row in rows)
        assert starts == Counter(counts.keys()), sink
    rows = read_folder(out / "counts")
    assert {(int(r["query_id"][1:]), r["event_time"] // WINDOW): r["n"] for r in rows} == counts


def test_an_executor_is_killed_during_a_batch(tmp_path: Path, full: bool) -> None:
    points = tmp_path / "points.parquet"
    x, y = make_points(points)
    boxes = make_boxes()
    expected = brute(x, y, boxes)
    assert expected.size > 100_000
    kills: dict[str, tuple[int, ...]] = {"uniform": (0,)}
    if full:
        kills["replicated"] = (0, 1)
    (tmp_path / "boxes.py").write_text(FLOW)
    specs = [
        Spec(
            points=str(points),
            out=str(tmp_path / strategy),
            strategy=strategy,
            machines=6,
            batch_rows=BATCH_ROWS,
            bounds=[0.0, 0.0, 64.0, 32.0],
            requests={"start": [request(n, box) for n, box in enumerate(boxes.tolist())]},
            master=MASTER,
            kill_executors=batches,
            flow=f"{tmp_path / 'boxes.py'}:flow",
        )
        # The first task of an executor takes seconds, later ones milliseconds.
        for strategy, batches in kills.items()
    ]
    chain = Chain(tmp_path, SPARK_HOME=str(spark_home(tmp_path / "home")))
    done = chain.run(*specs)
    assert done.returncode == 0, done.stderr[-3000:]
    lost_before = 0
    for spec, line in zip(specs, done.stdout.splitlines(), strict=True):
        summary = json.loads(line)
        assert len(summary["killed"]) == len(spec.kill_executors)
        assert summary["lost_tasks"] > lost_before, "no executor was killed at work"
        lost_before = summary["lost_tasks"]
        out = Path(spec.out)
        assert np.array_equal(matches_in(out / "matches"), expected)
        assert summary["report"]["matches"] == expected.size
        dead = read_folder(out / "dead")
        assert sorted(row["position"] for row in dead) == list(range(0, POINTS, 5_000))
        check_windows(out, expected)
    assert chain.orphans() == []


def test_an_encrypted_cluster_returns_the_same_matches_and_leaks_nothing(tmp_path: Path) -> None:
    expected = scenario.expected(*scenario.make_points(tmp_path / "points.parquet"))
    home = spark_home(tmp_path.with_name(f"{tmp_path.name}-home"))
    done = subprocess.run(
        [sys.executable, scenario.__file__, str(tmp_path), "000"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "SPARK_HOME": str(home)},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["matches"] == summary["found"] == len(expected)
    assert summary["window"] == scenario.POINTS
    scenario.check_files(tmp_path, expected, 0o000)

    assert summary["results"] == ["0o600", "0o700"]
    assert summary["settings"].items() >= REQUIRED.items()
    assert not summary["mark_anywhere"]
    assert not summary["responds"]

    assert len(summary["executors"]) == 2
    on_the_line = {key: value for key, value in REQUIRED.items() if "io.encryption" not in key}
    for knows_secret, command in summary["executors"]:
        assert knows_secret
        assert all(f"-D{key}={value}" in command for key, value in on_the_line.items())
    assert not summary["secret_shown"]
    assert summary["secret_files"] == []
    assert "the cluster's own spark.authenticate.secret" in summary["standalone"]
