"""A scenario with a window, in a process that kills itself at a chosen moment.

``python window_driver.py FOLDER SEED KIND LENGTH STEP BATCH``
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from roost import Pipeline
from roost.engine.session import make_session
from window_scenario import WindowScenario


def main(folder: Path, scenario: WindowScenario, step: str, batch_id: int) -> None:
    def crash(now: str, number: int) -> None:
        if (now, number) == (step, batch_id):
            os.kill(os.getpid(), signal.SIGKILL)

    config = scenario.config(folder, **{"engine.strategy": "swarm"})
    with Pipeline(
        config,
        spark=make_session("local[2]", {}),
        on_batch=lambda commit: scenario.prepare(folder, pipeline),
        on_step=crash,
    ) as pipeline:
        scenario.prepare(folder, pipeline)
        pipeline.run()


if __name__ == "__main__":
    where, seed, kind, length, when, number = sys.argv[1:]
    main(Path(where), WindowScenario(int(seed), kind, float(length)), when, int(number))
