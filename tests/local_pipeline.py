"""The pipeline in this process, with counted instead of measured times, and watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from balance_checks import Busy, Seen, observe, simulated_seconds
from roost import RunConfig
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import InProcessExecutor
from roost.stages.contract import Report, Task
from roost.testing import InProcessPipeline
from roost.testing.pipeline import check_states


class WatchedExecutor(InProcessExecutor):
    """Counts the time of a machine by what it did, and notes what tasks and reports say."""

    def __init__(self, busy: Busy) -> None:
        super().__init__(measure=self._counted)
        self._busy_of = busy
        self._number = 0
        self.seen: list[Seen] = []
        self.watched = True
        self.in_job: Callable[[int], None] = lambda number: None

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        self._number = tasks["matching"].number  # type: ignore[attr-defined]
        reports = super().run(inputs, chain, tasks, placement)
        if self.watched:
            self.seen.append(observe(tasks, reports))
        self.in_job(self._number)
        return reports

    def _counted(self, report: Report) -> Report:
        if report.stage != "matching":
            return replace(report, seconds=0.0)
        load_s = 1e-9 * report.counts["loaded_bytes"]
        busy = self._busy_of(self._number, report)
        return replace(report, counts={**report.counts, "load_s": load_s}, seconds=busy + load_s)


class Local(InProcessPipeline):
    """The pipeline without Spark; checks the stages' states after every batch."""

    def __init__(self, config: RunConfig, busy: Busy = simulated_seconds, **hooks: Any) -> None:
        self.watch = WatchedExecutor(busy)
        on_step = hooks.pop("on_step", lambda step, number: None)

        def step(name: str, number: int) -> None:
            if name == "round":
                check_states(self)
            on_step(name, number)

        super().__init__(config, executor=self.watch, on_step=step, **hooks)

    @property
    def seen(self) -> list[Seen]:
        return self.watch.seen
