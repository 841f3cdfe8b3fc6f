"""A driver process that kills an executor of the group which has received an operator, twice.

``python placement_driver.py FOLDER MASTER CORES`` runs top-N topics on two executor groups, and
prints the change of the mapping, and where the operator ran, as JSON. Executors of the other group
have so many cores; the error of a group that the cluster cannot provide is printed instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from roost.bench.dodo_cluster import OTHER, PlacementRun, change_of
from roost.engine import executor, executors
from roost.errors import ConfigError

BATCHES = 200  # that the run never needs


def process_of(application: str, name: str) -> psutil.Process:
    """Return the process of an executor."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if application in words and words[words.index("--executor-id") + 1] == name:
            return process
    raise LookupError(name)


class Faults:
    """Kills the executor of the operator that moved, and later its worker, too."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.ran: list[list[str]] = []  # executors of the operator by batch, since it moved
        self.since = 0  # batches before the last kill

    def after(self, run: PlacementRun, batch: Mapping[str, Any]) -> bool:
        """Note where the operator ran; returns whether to go on."""
        moved = next((b for b in run.batches if OTHER in b["groups"].values()), None)
        if moved is None:
            return len(run.batches) < BATCHES
        (operator,) = (name for name, group in moved["groups"].items() if group == OTHER)
        self.ran.append(batch["ran"][operator])
        names = [name for (name,) in self.ran]
        local = str(run.batches[0]["ran"]["count"][0])
        # A group whose executor has just died is not used until there is another one.
        other = [name for name in names if name not in (local, *self.killed)]
        if len(other) == (3 if self.killed else 1) and len(self.killed) < 2:
            process = process_of(run.pipeline.spark.sparkContext.applicationId, other[-1])
            if self.killed:
                process.parent().kill()  # so that nothing starts another executor of the group
            process.kill()
            self.killed.append(other[-1])
            self.since = len(names)
        done = len(self.killed) == 2 and names[self.since :].count(local) == 3
        return not done and len(run.batches) < BATCHES


def main() -> None:
    folder, master, cores = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    faults = Faults()
    run = PlacementRun(folder, faults.after, cores)
    if cores > 1:
        executors.FIRST_S = 30.0
        try:
            run.drive(master)
        except ConfigError as error:
            print(error)
        return
    executor.ABSENT_S = 5.0
    rounds = run.drive(master)
    local = run.batches[0]["ran"]["count"][0]
    found = {"killed": faults.killed, "ran": faults.ran, "local": local}
    print(json.dumps({**change_of(run, rounds), **found, "rows": run.rows}))


if __name__ == "__main__":
    main()
