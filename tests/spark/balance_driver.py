"""A run under an adaptive strategy that kills itself around the first change of plan it makes.

``python balance_driver.py SPEC.json`` runs on from where the state directory is. What a machine
was busy for is counted, not measured, so that decisions repeat themselves.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from crash_driver import POLL_S, kill_myself
from pyspark import SparkContext
from pyspark.sql import SparkSession

from balance_checks import CELLS, SCHEMA, SIDE, worked
from roost import Pipeline, RunConfig
from roost.balance import Strategy
from roost.engine import pipeline as engine
from roost.engine.jobs import run_slices
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.session import make_session
from roost.space import Coordinates, Rect
from roost.state.store import Commit


@dataclass(frozen=True)
class Spec:
    """What to run and when to die.

    ``requests`` has the block of requests before each batch. ``kill`` is a step of a batch, or
    ``match+staged``: the first of them after this life has changed the plan.
    """

    points: str
    out: str
    strategy: str
    machines: int
    batch_rows: int
    requests: list[list[dict[str, Any]]]
    kill: str | None = None

    def to_file(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


def config_of(spec: Spec, **more: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "points": spec.points,
        "bounds": Rect(0.0, 0.0, SIDE, SIDE),
        "grid": (CELLS, CELLS),
        "coordinates": Coordinates.PLANE,
        "strategy": Strategy(spec.strategy),
        "machines": spec.machines,
        "batch_rows": spec.batch_rows,
        "available_now": True,
        "query_id_type": "int",
        "round_length": float(spec.batch_rows),
        "tolerance": 1.05,
        "out": Path(spec.out),
    }
    return RunConfig(**{**settings, **more})


class Run:
    """One life of the driver."""

    def __init__(self, spec: Spec, kill: Callable[[], None], upto: int | None = None) -> None:
        self.spec = spec
        self._kill = kill
        self._upto = upto
        self._epoch: int | None = None
        self.pipeline: Pipeline | None = None

    def on_batch(self, commit: Commit) -> None:
        """Log what comes before the next batch, unless an earlier life did."""
        assert self.pipeline is not None
        following = commit.batch_id + 1
        if following < len(self.spec.requests):
            self._log(following)
        if self._upto is not None and following >= self._upto:
            self.pipeline.stop()

    def _log(self, number: int) -> None:
        assert self.pipeline is not None
        requests = self.spec.requests[number]
        if requests:
            block = pa.Table.from_pylist(requests, SCHEMA)
            self.pipeline.log.append(block, tag=f"before-{number}")

    def on_step(self, step: str, batch_id: int) -> None:
        assert self.pipeline is not None
        epoch = self.pipeline.store.last_epoch() or 0
        if self._epoch is None:
            self._epoch = epoch
        wanted, _, staged = (self.spec.kill or "").partition("+")
        if epoch > self._epoch and step == wanted:
            if staged:
                threading.Thread(target=self._kill_when_staged, daemon=True).start()
            else:
                self._kill()

    def _kill_when_staged(self) -> None:
        staging = Path(self.spec.out) / "matches" / "_staging"
        while not any(staging.iterdir()):
            time.sleep(POLL_S)
        self._kill()

    def go(self, spark: SparkSession, **settings: Any) -> dict[str, Any]:
        config = config_of(self.spec, **settings)
        hooks = {"on_batch": self.on_batch, "on_step": self.on_step}
        with Pipeline(config, spark=spark, **hooks) as pipeline:
            self.pipeline = pipeline
            self._log(0)
            for commit in pipeline.store.commits():
                self.on_batch(commit)
            return pipeline.run()


def counted(context: SparkContext, slices: Sequence[Any], task: BatchTask) -> list[MachineResult]:
    """Run a batch on Spark, and count what the machines were busy for."""
    results = run_slices(context, slices, task)
    for result in results:
        result.load_s = 1e-9 * result.loaded_bytes
        result.busy_s = worked(task, result) + result.load_s
    return results


def main() -> None:
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(spec.out).parent / "spark"
    settings = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = make_session("local[2]", settings)
    engine.run_slices = counted
    print(json.dumps(Run(spec, kill_myself).go(spark)))
    spark.stop()


if __name__ == "__main__":
    main()
