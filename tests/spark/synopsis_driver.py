"""A driver process that builds a synopsis, and kills itself.

``python synopsis_driver.py POINTS OUT SCALING [WHEN STEP]`` continues the run in OUT. WHEN is a
batch; ``moved``, the first batch with another prefix tree; or ``fold``, a background job. Steps of
a job are ``started`` and ``written`` in its task, ``finished`` and ``recorded`` in the driver.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost import Pipeline, RunConfig
from roost.runtime.jobs import Jobs
from roost.stages.contract import Job
from roost.stages.synopsis import TREES, SynopsisStage
from roost.synopsis.tree import PrefixTree

FEATURES = ("temp", "rain", "kind")
BATCH_ROWS = 300
SCALING = {"scaling": True, "scaling_observations": 2, "scaling_stabilisation": 1,
           "prefix_bits": 8, "memory": 1 << 17}  # fmt: skip


def config_of(points: str, out: str, *, exchange: bool = True, scaling: bool = False) -> RunConfig:
    """Return the settings; batches are folded two by two, so that a job follows most of them."""
    return RunConfig(
        points={"path": points},
        space={"bounds": (-180, -90, 180, 90)},
        engine={"master": "local[2]", "machines": 3 if scaling else 2,
                "batch_rows": BATCH_ROWS // 3 if scaling else BATCH_ROWS, "available_now": True},
        synopsis={"features": FEATURES, "bins": 16, "learn_rows": 500, "fold_files": 2,
                  "exchange": exchange, "queries": [{"name": "all", "query": "count"}],
                  "sets": [{"columns": "kind, level", "members": 500, "counters": 100}],
                  **(SCALING if scaling else {})},
        out={"dir": Path(out), "sink": "count"},
    )  # fmt: skip


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class KillingTask:
    """The task of a job; kills the driver from the process of the task, before or after it."""

    call: Any
    driver: int
    after: bool

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self.after:
            os.kill(self.driver, signal.SIGKILL)
        result = self.call(*arguments, **named)
        os.kill(self.driver, signal.SIGKILL)
        return result


def kill_in_fold(step: str) -> None:
    """Replace what folds, so that the driver does not survive a step of it."""
    job, finish = SynopsisStage.job, Jobs._finish

    def killing(stage: SynopsisStage) -> Job | None:
        found = job(stage)
        if found is None or step == "recorded":
            return found
        if step == "finished":
            return replace(found, after=lambda results: kill())
        return replace(found, call=KillingTask(found.call, os.getpid(), step == "written"))

    def finishing(jobs: Jobs) -> None:
        finish(jobs)
        if step == "recorded":
            kill()

    SynopsisStage.job, Jobs._finish = killing, finishing  # type: ignore[method-assign]


def main(points: str, out: str, scaling: str, when: str = "-1", step: str = "") -> None:
    if scaling == "True":  # one machine has all in the beginning
        PrefixTree.even = lambda machines, *_: PrefixTree(machines, {"": 0})  # type: ignore[assignment,method-assign]
    if when == "fold":
        kill_in_fold(step)

    def on_step(at: str, number: int) -> None:
        if at == step:
            moved = when == "moved" and (pipeline.store.last(TREES) or (0,))[0] > 0
            if moved or when == str(number):
                kill()

    with Pipeline(config_of(points, out, scaling=scaling == "True"), on_step=on_step) as pipeline:
        pipeline.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
