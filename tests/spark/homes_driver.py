"""A driver process on a local cluster whose homes change, and which kills one executor.

``python homes_driver.py SPEC.json`` runs the pipeline of a :class:`crash_driver.Spec`, and prints a
line of JSON for each batch: the homes that the tasks prefer, where they ran, what TrioStat's
statistics count, and the metrics of the commit. The last line has the killed executors and their
processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crash_driver import Run, executor_pids, executors, kill_myself, read_spec

from roost.engine.executor import SparkExecutor
from roost.engine.local_cluster import resize
from roost.engine.session import make_session
from roost.runtime.chain import Chain, Placement
from roost.runtime.records import Commit
from roost.stages.contract import Report, Task
from roost.stages.statistics import STATISTICS, TrioTask, copy_resident, load_statistics

EXECUTORS = 3
ROTATED = (1, 2, 3)  # batches before which all homes change
KILLED = 4
JOINED = 6  # batch before which the replacement of the killed executor has registered
DEADLINE_S = 60.0


class HomesRun(Run):
    """A run that changes homes, and notes where tasks ran."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, kill_myself)
        self.ran: dict[str, Any] = {}

    def on_step(self, step: str, batch_id: int) -> None:
        assert self.pipeline is not None and self.pipeline._loop is not None
        loop = self.pipeline._loop
        if step == "intent" and batch_id in ROTATED:
            homes = {
                routing: {m: str((int(home) + 1) % EXECUTORS) for m, home in mine.items()}
                for routing, mine in loop.placement.homes.items()
            }
            loop.placement = replace(loop.placement, homes=homes)
        if step == "intent" and batch_id == JOINED:
            deadline = time.monotonic() + DEADLINE_S
            while len(self.pipeline.executor.executors()) < EXECUTORS:
                assert time.monotonic() < deadline, "the killed executor was not replaced"
                time.sleep(0.1)
        if step == "run":
            # The first task of an executor takes seconds; others shall not run its tasks meanwhile.
            # Spark would wait as long for one that is lost.
            conf = self.pipeline.spark.sparkContext._jsc.sc().conf()
            conf.set("spark.locality.wait", "3s" if batch_id == KILLED else "60s")
        if step == "run" and batch_id == KILLED:
            threading.Thread(target=self._kill_at_home, daemon=True).start()
        super().on_step(step, batch_id)

    def _kill_at_home(self) -> None:
        """Kill an executor at work that is the home of machines."""
        assert self.pipeline is not None and self.pipeline._loop is not None
        pids, placement = executor_pids(), self.pipeline._loop.placement
        homes = {home for mine in placement.homes.values() for home in mine.values()}
        while True:
            for executor in executors(self.pipeline.spark):
                if executor.activeTasks() > 0 and executor.id() in homes:
                    os.kill(pids[executor.id()], signal.SIGKILL)
                    self.killed_executors.append(executor.id())
                    return

    def on_batch(self, commit: Commit) -> None:
        names = ("homes", "statistics_restarted")
        figures = {name: commit.figures.get(name) for name in names}
        figures["batch"] = commit.batch_id
        print(json.dumps({**self.ran, **figures}))
        super().on_batch(commit)


def counted(
    executor: SparkExecutor, task: TrioTask, report: Report, matched: Report
) -> dict[str, Any] | None:
    """Return what the statistics of a machine count; None if its executor has been killed since."""
    assert report.machine == matched.machine
    name, path = report.value.file, task.files.path(report.value.file)
    if not report.value.checkpoint:
        call = partial(copy_resident, task.files)
        if not executor.map(call, [name], [report.executor])[0]:
            return None
    stats = load_statistics(task.files, name)
    if not report.value.checkpoint:
        path.unlink()  # the next task shall find its own
    stats.close_round(1.0)
    return {
        "points": matched.counts["points"],
        "restarted": report.counts["restarted"],
        "checkpoint": report.value.checkpoint,
        "n": sum(found.total().n for found in stats.partitions.values()),
        "q": [[*found.bounds, found.total().q] for found in stats.partitions.values()],
    }


def main() -> None:
    spec = read_spec(sys.argv[1])
    run, original = HomesRun(spec), SparkExecutor.run

    def noted(
        self: SparkExecutor,
        inputs: Any,
        chain: Chain,
        tasks: Mapping[str, Task],
        placement: Placement,
    ) -> dict[str, list[Report]]:
        found = original(self, inputs, chain, tasks, placement)
        task, statistics = tasks.get(STATISTICS), {}
        if isinstance(task, TrioTask):
            statistics = {
                str(report.machine): counted(self, task, report, points)
                for report, points in zip(found[STATISTICS], found["matching"], strict=True)
            }
        run.ran = {
            "requested": {
                f"{node.name} {machine}": placement.home(node, machine)
                for node in chain.nodes
                if node.routing is not None
                for machine in node.machines
            },
            "ran": {f"{r.stage} {r.machine}": r.executor for mine in found.values() for r in mine},
            "statistics": statistics,
        }
        return found

    SparkExecutor.run = noted  # type: ignore[method-assign]
    local = str(Path(spec.out).parent / "local")
    settings = {
        "spark.local.dir": local,
        # Report the active executor without delay.
        "spark.ui.liveUpdate.period": "0",
    }
    spark = make_session(spec.master, settings)
    resize(spark, EXECUTORS)  # waits until all have registered
    pids = executor_pids()
    report = run.go(spark)
    spark.stop()
    print(json.dumps({"killed": run.killed_executors, "pids": pids, "homes": report["homes"]}))


if __name__ == "__main__":
    main()
