"""A driver with an adaptive strategy that kills itself around its first plan change.

``python balance_driver.py SPEC.json`` continues from the state directory. Busy times are
computed from the work, not measured, so that decisions are reproducible.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from counted import CountedExecutor
from crash_driver import POLL_S, kill_myself
from pyspark.sql import SparkSession

from balance_checks import CELLS, SCHEMA, SIDE
from roost import Pipeline, RunConfig
from roost.engine import pipeline as engine
from roost.engine.session import make_session
from roost.model.choices import Strategy
from roost.model.settings import with_settings
from roost.model.space import Coordinates, Rect
from roost.runtime import records
from roost.runtime.records import Commit


@dataclass(frozen=True)
class Spec:
    """What to run and when to kill the process.

    ``requests`` has the block of requests before each batch. ``kill`` is a step of a batch, or
    ``run+staged``: the first of them after this process has changed the plan.
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
        "points.path": spec.points,
        "space.bounds": Rect(0.0, 0.0, SIDE, SIDE),
        "space.grid": (CELLS, CELLS),
        "space.coordinates": Coordinates.PLANE,
        "engine.strategy": Strategy(spec.strategy),
        "engine.machines": spec.machines,
        "engine.batch_rows": spec.batch_rows,
        "engine.available_now": True,
        "queries.id_type": "int",
        "balance.round": float(spec.batch_rows),
        "balance.tolerance": 1.05,
        "out.dir": Path(spec.out),
    }
    return with_settings(RunConfig(), {**settings, **more})


class Run:
    """One process of the driver."""

    def __init__(self, spec: Spec, kill: Callable[[], None], upto: int | None = None) -> None:
        self.spec = spec
        self._kill = kill
        self._upto = upto
        self._epoch: int | None = None
        self.pipeline: Pipeline | None = None

    def on_batch(self, commit: Commit) -> None:
        """Log the requests of the next batch, unless an earlier process did."""
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
        epoch = records.last_epoch(self.pipeline.store) or 0
        if self._epoch is None:
            self._epoch = epoch
        chosen, _, staged = (self.spec.kill or "").partition("+")
        if epoch > self._epoch and step == chosen:
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
            for commit in records.commits(pipeline.store):
                self.on_batch(commit)
            return pipeline.run()


def main() -> None:
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(spec.out).parent / "spark"
    settings = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = make_session("local[2]", settings)
    engine.SparkExecutor = CountedExecutor  # type: ignore[misc]
    print(json.dumps(Run(spec, kill_myself).go(spark)))
    spark.stop()


if __name__ == "__main__":
    main()
