"""Background jobs of stages: run beside the batches, recorded between two of them.

A job reads immutable files and writes new ones, so it can be abandoned at any time: after a restart
its files are deleted and the stage may start it again under another number.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from roost.runtime.executor import Executor
from roost.stages.contract import Job, Stage
from roost.storage.store import Fact, Store
from roost.storage.totals import TOTALS

JOBS = "jobs"


class Jobs:
    """Runs one job at a time; a new instance abandons the job of the previous driver."""

    def __init__(self, store: Store, executor: Executor, stages: Sequence[Stage]) -> None:
        self._store = store
        self._executor = executor
        self._stages = {stage.name: stage for stage in stages}
        self._running: tuple[int, Stage, Job, Future[list[Any]]] | None = None
        for number, row in store.items(JOBS):
            self._abandon(number, self._stages.get(row["stage"]))

    def step(self) -> None:
        """Record a job that has finished, and start another if a stage has one."""
        if self._running is not None and self._running[3].done():
            self._finish()
        if self._running is None:
            self._start()

    def _start(self) -> None:
        for stage in self._stages.values():
            job = stage.job()
            if job is not None:
                number = int(self._store.get(TOTALS, JOBS) or 0) + 1
                self._store.record(
                    Fact(TOTALS, JOBS, number), Fact(JOBS, number, {"stage": stage.name})
                )
                future = self._executor.submit(
                    partial(job.call, prefix=job_prefix(number)), job.items
                )
                self._running = number, stage, job, future
                return

    def _finish(self) -> None:
        assert self._running is not None
        (number, stage, job, future), self._running = self._running, None
        error = future.exception()
        if error is not None:
            warnings.warn(f"background job {number} of {stage.name} failed: {error}", stacklevel=2)
            self._abandon(number, stage)
            return
        outcome = job.after(future.result())
        self._store.record(*outcome.facts, Fact(JOBS, number, None))
        with self._store.view() as view:
            stage.open(view)

    def _abandon(self, number: int, stage: Stage | None) -> None:
        if stage is not None:
            stage.discard(job_prefix(number))
        self._store.record(Fact(JOBS, number, None))


def job_prefix(number: int) -> str:
    """Return how the names of a job's files begin."""
    return f"job-{number:010d}-"
