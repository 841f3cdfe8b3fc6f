"""``roost bench latency``: from a point's arrival to its match being readable in the sink.

Points arrive at a steady rate by the clock, whether or not Roost keeps up; a batch takes whatever
has arrived since the one before. A point's latency ends when the file with its matches has its
final name. Everything else is as in production: intents, commits, fsync, exactly once.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.bench.cases import CaseSpec, data_dir, load_pickups, make_case
from roost.bench.common import environment, save_lines_plot, write_json
from roost.bench.rivals.protocol import CORES, written_rows
from roost.bench.streams import BatchTimes, Repeated
from roost.engine.pipeline import Pipeline
from roost.model.choices import Strategy
from roost.model.settings import RunConfig
from roost.model.space import Rect
from roost.runtime.records import Commit
from roost.stages.sources import AnySlice

RATE_PER_S = 10_000
MACHINES = 4
WARM_S = 8.0


class Steady(Repeated):
    """A file whose rows arrive at a steady rate, again and again, until a number of seconds."""

    def __init__(self, path: str, rate_per_s: int, seconds: float) -> None:
        super().__init__(path, 1 << 20)
        self._rate = rate_per_s
        self._all = int(rate_per_s * seconds)
        self.started: float | None = None

    def total(self) -> int:
        """Rows known to come."""
        return self._all

    def take(self, offset: int, limit: int) -> list[AnySlice]:
        """Rows after an offset that have arrived by now."""
        if self.started is None:
            self.started = time.perf_counter()
        arrived = int((time.perf_counter() - self.started) * self._rate)
        return super().take(offset, min(limit, arrived - offset)) if arrived > offset else []

    def arrivals(self, start: int, stop: int) -> NDArray[np.float64]:
        """Clock times at which rows arrived."""
        assert self.started is not None
        return self.started + (np.arange(start, stop) + 1) / self._rate


class ArrivalTimes(BatchTimes):
    """Records the latency of every point, by batch."""

    def __init__(self, source: Steady) -> None:
        super().__init__()
        self._source = source
        self._row = 0
        self.latencies: list[NDArray[np.float64]] = []
        self.batches: list[dict[str, float]] = []

    def on_batch(self, commit: Commit) -> None:
        """Record the latency of a batch's points."""
        super().on_batch(commit)
        assert self._source.started is not None
        readable = self.steps[-1]["cleanup"]  # the step after publishing
        rows = commit.figures["rows"]
        self.latencies.append(readable - self._source.arrivals(self._row, self._row + rows))
        self._row += rows
        self.batches.append(
            {
                "at_s": readable - self._source.started,
                "rows": rows,
                "seconds": commit.figures["seconds"],
                "busy_s": sum(m["busy_s"] for m in commit.figures["machines"]),
            }
        )


def run(quick: bool, json_path: Path) -> dict[str, Any]:
    """Measure, and write the result with its plot."""
    seconds = 12.0 if quick else 40.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pickups = load_pickups(data_dir())
        spec = CaseSpec("latency", "boxes", 100_000, points=200_000, write_points=1_000)
        case = make_case(spec, pickups, folder / "case", None)
        source = Steady(case.points_path, RATE_PER_S, WARM_S + seconds)
        watch = ArrivalTimes(source)
        config = RunConfig(
            points={"path": case.points_path},
            queries={"path": case.queries_path},
            space={"bounds": Rect(*case.bounds)},
            engine={
                "strategy": Strategy.REPLICATED,
                "machines": MACHINES,
                "master": f"local[{CORES}]",
                "available_now": True,
            },
            out={"dir": folder / "out"},
        )
        with Pipeline(
            config, source=source, on_step=watch.on_step, on_batch=watch.on_batch
        ) as pipeline:
            pipeline.spark  # noqa: B018  (the session starts before the clock does)
            report = pipeline.run()
        assert report["matches"] == written_rows(config.out.dir / "matches")
        assert report["points"] == source.total()
    result = _result(watch, report)
    write_json(json_path, result)
    save_lines_plot(
        json_path.with_suffix(".png"),
        "latency of a batch's points (ms) over the run (s)",
        {
            "median": [
                (batch["at_s"], float(np.median(part)) * 1e3)
                for batch, part in zip(watch.batches, watch.latencies, strict=True)
            ],
            "worst": [
                (batch["at_s"], float(np.max(part)) * 1e3)
                for batch, part in zip(watch.batches, watch.latencies, strict=True)
            ],
        },
    )
    return result


def _result(watch: ArrivalTimes, report: dict[str, Any]) -> dict[str, Any]:
    steady = [k for k, batch in enumerate(watch.batches) if batch["at_s"] > WARM_S]
    values = np.concatenate([watch.latencies[k] for k in steady]) * 1e3
    batch_ms = np.array([watch.batches[k]["seconds"] for k in steady]) * 1e3
    figures = {f"p{q}_ms": float(np.percentile(values, q)) for q in (50, 95, 99)}
    row = {
        "case": "steady",
        "system": f"roost-{Strategy.REPLICATED.value}",
        "rate_per_s": RATE_PER_S,
        "queries": 100_000,
        "machines": MACHINES,
        "points": int(values.size),
        "batches": len(steady),
        "batch_ms_p50": float(np.median(batch_ms)),
        "matches": report["matches"],
        **figures,
    }
    summary = {"p50_ms": figures["p50_ms"], "p95_ms": figures["p95_ms"]}
    return {"bench": "latency", "rows": [row], "environment": environment(), "summary": summary}
