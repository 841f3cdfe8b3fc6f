"""A driver process that builds a synopsis, and kills itself before a step of a batch.

``python synopsis_driver.py POINTS OUT [BATCH STEP]`` continues the run in OUT.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from roost import Pipeline, RunConfig

FEATURES = ("temp", "rain", "kind")
BATCH_ROWS = 300


def config_of(points: str, out: str, *, exchange: bool = True) -> RunConfig:
    """Return the settings; batches are folded two by two, so that a job follows most of them."""
    return RunConfig(
        points={"path": points},
        space={"bounds": (-180, -90, 180, 90)},
        engine={"master": "local[2]", "machines": 2, "batch_rows": BATCH_ROWS,
                "available_now": True},
        synopsis={"features": FEATURES, "bins": 16, "learn_rows": 500, "fold_files": 2,
                  "exchange": exchange, "queries": [{"name": "all", "query": "count"}],
                  "sets": [{"columns": "kind, level", "members": 500, "counters": 100}]},
        out={"dir": Path(out), "sink": "count"},
    )  # fmt: skip


def main(points: str, out: str, batch: str = "-1", step: str = "") -> None:
    def kill(at: str, number: int) -> None:
        if (at, number) == (step, int(batch)):
            os.kill(os.getpid(), signal.SIGKILL)

    with Pipeline(config_of(points, out), on_step=kill) as pipeline:
        pipeline.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
