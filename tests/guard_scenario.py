"""Scenarios of a pipeline with normal and malicious users: points, and requests by batch.

A batch is a round of the balancer, two of them a round of detection. Busy seconds are computed from
the work, not measured, so that the guard finds the same users on every host and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roost import RunConfig
from roost.model.choices import Strategy
from roost.model.settings import with_settings
from roost.model.space import Coordinates, Rect
from roost.sim.attack import Attack, Crowd, Mover, Newcomer, Normal, Party, World
from roost.stages.contract import Report

TICK_S = 15
DETECTION_BATCHES = 2
NORMAL = Normal(users=30, rate=20.0, queries=3_000)
START = 4

PARTIES: dict[str, Party] = {
    "attack": Attack(users=4, rate=30.0, queries=900, start=START, side=0.05),
    "one attacker": Attack(users=1, rate=30.0, queries=900, start=START, side=0.05),
    "crowd": Crowd(users=60, queries_each=20, start=START, stop=30, rise=3, side=0.05),
    "newcomer": Newcomer(rate=30.0, queries=900, start=START, town=0.05),
    "mover": Mover(rate=30.0, queries=900, start=START, side=0.05),
}


def worked_by_pairs(number: int, report: Report) -> float:
    """Return a machine's busy seconds: pairs dominate, as on a machine with many queries."""
    return 1e-4 + 1e-7 * report.counts["points"] + 1e-6 * report.counts["checks"]


@dataclass(frozen=True)
class GuardScenario:
    """A party among normal users."""

    party: str
    seed: int = 0
    batches: int = 40
    rows: int = 1_500

    @property
    def data(self) -> np.ndarray:
        """Places in towns, in the unit square."""
        random = np.random.default_rng([self.seed, 5])
        towns = 0.1 + 0.8 * random.random((12, 2))
        near = towns[random.integers(0, 12, 4_000)] + 0.03 * random.normal(size=(4_000, 2))
        return np.clip(near, 0.0, 1.0)

    def world(self) -> World:
        parties = [NORMAL.scaled(1.0), PARTIES[self.party].scaled(1.0)]
        return World(parties, self.data, self.seed, TICK_S, query_side=0.01)

    @cached_property
    def blocks(self) -> list[pa.Table]:
        """Requests before each batch."""
        world = self.world()
        bounds = Rect(0.0, 0.0, 1.0, 1.0)
        return [
            (world.begin() if number == 0 else world.next()).table(world.names, bounds)
            for number in range(self.batches)
        ]

    @property
    def malicious(self) -> frozenset[str]:
        world = self.world()
        return frozenset(np.array(world.names)[world.malicious].tolist())

    def write(self, folder: Path) -> Path:
        """Write the points in the order of the batches."""
        random = np.random.default_rng([self.seed, 6])
        count = self.batches * self.rows
        xy = self.data[random.integers(0, 4_000, count)] + 0.01 * random.normal(size=(count, 2))
        times = 1_000_000 + np.arange(count) * TICK_S // self.rows
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": np.arange(count), "x": xy[:, 0], "y": xy[:, 1], "time": times})
        path = folder / "points.parquet"
        pq.write_table(table, path, row_group_size=self.rows)
        return path

    def config(self, folder: Path, strategy: Strategy, **more: Any) -> RunConfig:
        settings: dict[str, Any] = {
            "points.path": str(folder / "points.parquet"),
            "points.time": "time",
            "space.bounds": Rect(0.0, 0.0, 1.0, 1.0),
            "space.grid": (32, 32),
            "space.coordinates": Coordinates.PLANE,
            "engine.strategy": strategy,
            "engine.machines": 16,
            "engine.batch_rows": self.rows,
            "engine.available_now": True,
            "queries.id_type": "text",
            "balance.round": float(TICK_S - 1),
            "balance.tolerance": 1.1,
            "out.sink": "count",
            "out.dir": folder / "out",
            "guard.enabled": True,
            "guard.round": float(DETECTION_BATCHES * TICK_S),
        }
        return with_settings(RunConfig(), {**settings, **more})


def blocked_users(log: Sequence[dict[str, Any]]) -> list[str]:
    """Return the users that the detector has blocked, in order."""
    return [user for row in log if row["decision"] == "block" for user in row["users"]]
