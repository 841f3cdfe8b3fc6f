"""A story with a window in a process of its own, which kills itself at a chosen moment.

``python window_driver.py FOLDER SEED KIND LENGTH STEP BATCH``
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from window_story import WindowStory

from roost import Pipeline
from roost.engine.session import make_session


def main(folder: Path, story: WindowStory, step: str, batch_id: int) -> None:
    def die(now: str, number: int) -> None:
        if (now, number) == (step, batch_id):
            os.kill(os.getpid(), signal.SIGKILL)

    config = story.config(folder, **{"engine.strategy": "swarm"})
    with Pipeline(
        config,
        spark=make_session("local[2]", {}),
        on_batch=lambda commit: story.prepare(folder, pipeline),
        on_step=die,
    ) as pipeline:
        story.prepare(folder, pipeline)
        pipeline.run()


if __name__ == "__main__":
    where, seed, kind, length, when, number = sys.argv[1:]
    main(Path(where), WindowStory(int(seed), kind, float(length)), when, int(number))
