"""``roost bench latency``: time from a point's arrival until its matches can be read.

Points arrive at a steady rate by the clock, whether or not Roost keeps up; a batch reads all points
that have arrived since the previous one. A point's latency ends when the file with its matches has
its final name. Intents, commits and fsync are as in production.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roost.bench.cases import CaseSpec, data_dir, make_cases
from roost.bench.common import Measured, Plot
from roost.bench.rivals.protocol import written_rows
from roost.bench.streams import BatchTimes, Repeated, pipeline_config
from roost.engine.pipeline import Pipeline
from roost.model.choices import Strategy
from roost.stages.slices import ParquetSlice

RATE_PER_S = 10_000
QUERIES = 100_000
MACHINES = 4
WARM_S = 8.0


class Steady(Repeated):
    """Streams a file repeatedly at a steady rate, for a number of seconds."""

    def __init__(self, path: str, rate_per_s: int, seconds: float) -> None:
        super().__init__(path, 1 << 20)
        self._rate = rate_per_s
        self._all = int(rate_per_s * seconds)
        self.started: float | None = None

    def total(self) -> int:
        """Return the number of rows that arrive in all."""
        return self._all

    def take(self, offset: int, limit: int) -> list[ParquetSlice]:
        """Return the rows after an offset that have arrived by now."""
        if self.started is None:
            self.started = time.perf_counter()
        arrived = int((time.perf_counter() - self.started) * self._rate)
        return super().take(offset, min(limit, arrived - offset)) if arrived > offset else []

    def arrivals(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the clock times at which rows arrived."""
        assert self.started is not None
        return self.started + (np.arange(start, stop) + 1) / self._rate


def latencies(source: Steady, times: BatchTimes) -> list[NDArray[np.float64]]:
    """Return the seconds of each point, by batch."""
    readable = [steps["cleanup"] for steps in times.steps]  # the step after publishing
    borders = np.cumsum([0, *(commit.figures["rows"] for commit in times.commits)]).tolist()
    return [
        at - source.arrivals(*rows) for at, rows in zip(readable, pairwise(borders), strict=True)
    ]


def run(quick: bool) -> Measured:
    """Measure the latency of points at a steady rate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = CaseSpec("latency", "boxes", QUERIES, points=200_000, write_points=1_000)
        (case,) = make_cases([spec], folder, data_dir())
        source = Steady(case.points_path, RATE_PER_S, WARM_S + (12.0 if quick else 40.0))
        settings = {
            "queries.path": case.queries_path,
            "engine.strategy": Strategy.REPLICATED,
            "engine.machines": MACHINES,
        }
        config = pipeline_config(case.points_path, case.bounds, folder / "out", settings)
        times = BatchTimes()
        with Pipeline(
            config, source=source, on_step=times.on_step, on_batch=times.on_batch
        ) as pipeline:
            pipeline.spark  # noqa: B018  (the session starts before the clock does)
            report = pipeline.run()
        assert report["matches"] == written_rows(config.out.dir / "matches")
        assert report["points"] == source.total()
    by_batch = [seconds * 1e3 for seconds in latencies(source, times)]
    assert source.started is not None
    at_s = np.array([steps["cleanup"] for steps in times.steps]) - source.started
    steady = np.flatnonzero(at_s > WARM_S).tolist()
    points_ms = np.concatenate([by_batch[k] for k in steady])
    percentiles = {f"p{q}_ms": float(np.percentile(points_ms, q)) for q in (50, 95, 99)}
    batch_s = [times.commits[k].figures["seconds"] for k in steady]
    row = {
        "case": "steady",
        "system": f"roost-{Strategy.REPLICATED.value}",
        "rate_per_s": RATE_PER_S,
        "queries": QUERIES,
        "machines": MACHINES,
        "points": int(points_ms.size),
        "batches": len(steady),
        "batch_ms_p50": float(np.median(batch_s)) * 1e3,
        "matches": report["matches"],
        **percentiles,
    }
    lines = {
        "median": [(at, float(np.median(ms))) for at, ms in zip(at_s, by_batch, strict=True)],
        "worst": [(at, float(np.max(ms))) for at, ms in zip(at_s, by_batch, strict=True)],
    }
    return Measured(
        [row],
        {key: percentiles[key] for key in ("p50_ms", "p95_ms")},
        {"": Plot("", {"latency of a batch's points (ms) over the run (s)": lines})},
    )
