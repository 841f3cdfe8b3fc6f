"""A guarded run that kills itself at the first intent after the detector has blocked somebody.

``python guard_driver.py FOLDER BATCHES [die]`` runs on from where the folder's state is. What a
machine was busy for is counted, not measured, so that the same users are found each time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crash_driver import kill_myself
from pyspark import SparkContext
from pyspark.sql import SparkSession

from guard_story import GuardStory, blocked_users, worked_by_pairs
from roost import Pipeline
from roost.balance import Strategy
from roost.engine import pipeline as engine
from roost.engine.jobs import run_slices
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.session import make_session
from roost.state.store import Commit

SEED = 4


def counted(context: SparkContext, slices: Sequence[Any], task: BatchTask) -> list[MachineResult]:
    """Run a batch on Spark, and count what the machines were busy for."""
    results = run_slices(context, slices, task)
    for result in results:
        result.load_s = 1e-9 * result.loaded_bytes
        result.busy_s = worked_by_pairs(task, result) + result.load_s
    return results


def play(spark: SparkSession, story: GuardStory, folder: Path, *, die: bool = False) -> None:
    """Run a story to its end, or to its death."""

    def log(number: int) -> None:
        if number < len(story.blocks):
            pipeline.log.append(story.blocks[number], tag=f"before-{number}")

    def on_batch(commit: Commit) -> None:
        log(commit.batch_id + 1)

    def on_step(step: str, batch_id: int) -> None:
        if die and step == "intent" and blocked_users(pipeline.store.guard.log()):
            kill_myself()

    config = story.config(folder, Strategy.GLOBAL, machines=8)
    hooks: dict[str, Any] = {"on_batch": on_batch, "on_step": on_step, "seed": 1}
    with Pipeline(config, spark=spark, **hooks) as pipeline:
        for number in range(len(pipeline.store.commits()) + 1):
            log(number)
        pipeline.run()


def main() -> None:
    folder = Path(sys.argv[1])
    local = {"spark.local.dir": str(folder / "spark")}
    spark = make_session("local[2]", local)
    engine.run_slices = counted
    play(spark, GuardStory("attack", SEED, batches=int(sys.argv[2])), folder, die="die" in sys.argv)
    spark.stop()


if __name__ == "__main__":
    main()
