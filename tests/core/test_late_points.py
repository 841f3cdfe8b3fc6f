"""Points older than the watermark are rejected, whichever batch or driver process reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from balance_checks import InProcessCounted
from roost import Box, Query, RunConfig
from roost.model.settings import with_settings
from roost.runtime.records import Commit
from roost.testing import InProcessPipeline

ROWS, BATCHES, LATENESS = 40, 6, 5.0
SCHEMA = pa.schema(
    [("id", pa.int64()), ("x", pa.float64()), ("y", pa.float64()), ("event_time", pa.int64())]
)


def drawn_batches() -> list[list[dict]]:
    """Batches whose event times reach back behind the newest time of the batch before."""
    rng = random.Random(3)
    return [
        [
            {
                "id": ROWS * batch + row,
                "x": rng.uniform(0.0, 100.0),
                "y": rng.uniform(0.0, 100.0),
                "event_time": 10 * batch + rng.randrange(-25, 12),
            }
            for row in range(ROWS)
        ]
        for batch in range(BATCHES)
    ]


def late_ids(batches: list[list[dict]]) -> list[int]:
    """Points that come more than the lateness behind the newest point of the batches before."""
    late: list[int] = []
    newest = float("-inf")
    for batch in batches:
        in_time = [point for point in batch if point["event_time"] >= newest - LATENESS]
        late += [point["id"] for point in batch if point not in in_time]
        newest = max(newest, *(point["event_time"] for point in in_time))
    return late


def rows_of(folder: Path) -> list[dict]:
    return [row for path in folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("strategy", ["uniform", "replicated"])
@pytest.mark.parametrize("restarted", [False, True], ids=["one driver", "a driver per batch"])
def test_late_points_are_rejected_and_match_nothing(
    tmp_path: Path, strategy: str, restarted: bool
) -> None:
    batches = drawn_batches()
    points = tmp_path / "points"
    points.mkdir()

    def feed(number: int) -> None:
        """Add the file of a batch; files that are there together are read by event time."""
        if number < BATCHES:
            table = pa.Table.from_pylist(batches[number], SCHEMA)
            pq.write_table(table, points / f"{number}.parquet")

    def on_batch(commit: Commit) -> None:
        if restarted:
            pipeline.stop()
        feed(commit.batch_id + 1)

    settings = {
        "points.path": str(points),
        "space.bounds": [0, 0, 100, 100],
        "space.grid": [10, 10],
        "engine.strategy": strategy,
        "engine.machines": 2,
        "engine.batch_rows": ROWS,
        "engine.available_now": True,
        "window.kind": "time",
        "window.length": 20.0,
        "window.lateness": LATENESS,
        "out.dir": str(tmp_path / "out"),
    }
    feed(0)
    for number in range(BATCHES if restarted else 1):
        config = with_settings(RunConfig(), settings)
        with InProcessPipeline(config, executor=InProcessCounted(), on_batch=on_batch) as pipeline:
            if number == 0:
                pipeline.request(Query("everywhere", Box(0, 0, 100, 100)))
            pipeline.run()
    expected = late_ids(batches)
    assert len(expected) > ROWS, "some batches have late points"
    dead = rows_of(tmp_path / "out" / "dead")
    assert {row["reason"] for row in dead} == {"late"}
    assert sorted(json.loads(row["record"])["id"] for row in dead) == expected
    matched = sorted(row["point_id"] for row in rows_of(tmp_path / "out" / "matches"))
    assert matched == sorted(set(range(ROWS * BATCHES)) - set(expected))
