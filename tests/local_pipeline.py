"""The pipeline with its tasks run in this process: everything of the engine but Spark."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from balance_checks import Busy, Seen, look, worked
from roost import Pipeline, RunConfig
from roost.engine.batch import BatchRunner
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.slices import cut
from roost.engine.tasks import match_routed, read_and_match, read_and_route


class Local(Pipeline):
    """The pipeline without Spark."""

    def __init__(self, config: RunConfig, busy: Busy = worked, **hooks: Any) -> None:
        super().__init__(config, **hooks)
        self._busy_of = busy
        self.seen: list[Seen] = []
        self.watched = True
        self.in_job: Callable[[int], None] = lambda batch_id: None
        for file in (self.store, self.log):
            file._db.execute("pragma synchronous = off")  # type: ignore[attr-defined]

    def _batch(
        self, runner: BatchRunner, batch_id: int, slices: Sequence[Any], offsets: dict[str, Any]
    ) -> None:
        self.runner = runner
        self._on_batch(runner.run(batch_id, offsets, partial(self._job, slices)))

    def _job(self, slices: Sequence[Any], task: BatchTask) -> list[MachineResult]:
        task = pickle.loads(pickle.dumps(task))
        results = pickle.loads(pickle.dumps(list(run_here(slices, task))))
        for result in results:
            result.load_s = 1e-9 * result.loaded_bytes
            result.busy_s = self._busy_of(task, result) + result.load_s
        if self.watched:
            self.seen.append(look(task, results))
        self.in_job(task.batch_id)
        return results


def run_here(slices: Sequence[Any], task: BatchTask) -> Iterator[MachineResult]:
    machines = range(task.plan.machines)
    if task.plan.fully_replicated:
        for machine, group in zip(machines, cut(slices, len(machines)), strict=True):
            yield from read_and_match(task, machine, [group])
        return
    routed: list[list[Any]] = [[] for _ in machines]
    for part, group in enumerate(cut(slices, 2)):
        for machine, item in read_and_route(task, part, [group]):
            routed[machine].append((machine, item))
    for machine in machines:
        yield from match_routed(task, machine, routed[machine])
