"""Batches on Spark with busy times computed from the work, so that decisions are reproducible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from balance_checks import Busy, Seen, counted, observe, simulated_seconds
from roost.engine.executor import SparkExecutor
from roost.runtime.chain import Chain, Placement
from roost.stages.contract import Report, Task


class CountedExecutor(SparkExecutor):
    """Runs batches on Spark and replaces the measured times.

    ``busy`` returns the seconds of a machine; None retains the measured times. Each batch is
    appended to ``seen``, if given.
    """

    def __init__(
        self,
        *args: Any,
        busy: Busy | None = simulated_seconds,
        seen: list[Seen] | None = None,
    ) -> None:
        super().__init__(*args)
        self._busy_of = busy
        self._seen = seen

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        reports = super().run(inputs, chain, tasks, placement)
        if self._busy_of is not None:
            number = tasks["matching"].number  # type: ignore[attr-defined]
            reports = {
                stage: [counted(self._busy_of, number, report) for report in found]
                for stage, found in reports.items()
            }
        if self._seen is not None:
            self._seen.append(observe(tasks, reports, self))
        return reports
