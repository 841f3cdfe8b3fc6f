"""A guarded run that kills itself at the first intent after the detector has blocked a user.

``python guard_driver.py FOLDER BATCHES`` continues from the folder's state. Busy times are
computed from the work, not measured, so that every run detects the same users.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from counted import CountedExecutor
from crash_driver import kill_myself
from pyspark.sql import SparkSession

from guard_scenario import GuardScenario, blocked_users, worked_by_pairs
from roost import Pipeline
from roost.engine import pipeline as engine
from roost.engine.session import make_session
from roost.model.choices import Strategy
from roost.queries.guard_state import decisions
from roost.runtime import records
from roost.runtime.records import Commit

SEED = 4
counted = partial(CountedExecutor, busy=worked_by_pairs)


def play(
    spark: SparkSession,
    scenario: GuardScenario,
    folder: Path,
    crash: Callable[[], None] | None = None,
) -> None:
    """Run a scenario to its end, or until it crashes."""

    def log(number: int) -> None:
        if number < len(scenario.blocks):
            pipeline.log.append(scenario.blocks[number], tag=f"before-{number}")

    def on_batch(commit: Commit) -> None:
        log(commit.batch_id + 1)

    def on_step(step: str, batch_id: int) -> None:
        if crash and step == "intent" and blocked_users(decisions(pipeline.store)):
            crash()

    config = scenario.config(folder, Strategy.GLOBAL, **{"engine.machines": 8})
    hooks: dict[str, Any] = {"on_batch": on_batch, "on_step": on_step, "seed": 1}
    with Pipeline(config, spark=spark, **hooks) as pipeline:
        for number in range(len(records.commits(pipeline.store)) + 1):
            log(number)
        pipeline.run()


def main() -> None:
    folder = Path(sys.argv[1])
    local = {"spark.local.dir": str(folder / "spark")}
    spark = make_session("local[2]", local)
    engine.SparkExecutor = counted  # type: ignore[misc, assignment]
    play(spark, GuardScenario("attack", SEED, batches=int(sys.argv[2])), folder, kill_myself)


if __name__ == "__main__":
    main()
