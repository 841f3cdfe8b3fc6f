"""A driver process that kills an executor of the group which has received an operator.

``python placement_driver.py FOLDER MASTER CORES`` runs top-N topics on two executor groups, and
prints the change of the mapping, and where the operator ran, as JSON. Executors of the other group
have so many cores; the error of a group that the cluster cannot provide is printed instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from roost.bench.dodo_cluster import OTHER, PlacementRun, change_of
from roost.engine import executors
from roost.errors import ConfigError

BATCHES = 200  # that the run never needs


def process_of(application: str, executor: str) -> int:
    """Return the process of an executor."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if application in words and words[words.index("--executor-id") + 1] == executor:
            return int(process.pid)
    raise LookupError(executor)


def main() -> None:
    folder, master, cores = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    killed: list[str] = []

    def after(run: PlacementRun, batch: Mapping[str, Any]) -> bool:
        """Kill the executor after its first batch; end three batches after another one has run."""
        moved = [name for name, group in batch["groups"].items() if group == OTHER]
        if moved and not killed:
            killed.extend(batch["ran"][moved[0]])
            application = run.pipeline.spark.sparkContext.applicationId
            os.kill(process_of(application, killed[0]), signal.SIGKILL)
        ran = [one["ran"][moved[0]] for one in run.batches] if moved else []
        since = [names for names in ran if killed and names not in ([killed[0]], ran[0])]
        return len(since) < 3 and len(run.batches) < BATCHES

    run = PlacementRun(folder, after, cores)
    if cores > 1:
        executors.FIRST_S = 5.0
        try:
            run.drive(master)
        except ConfigError as error:
            print(error)
        return
    rounds = run.drive(master)
    change = change_of(run, rounds)
    ran = [one["ran"][change["operator"]] for one in run.batches]
    print(json.dumps({**change, "killed": killed, "ran": ran, "rows": run.rows}))


if __name__ == "__main__":
    main()
