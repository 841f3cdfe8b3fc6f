"""Requests that log replay refused, as dead-letter records of the next batch."""

from __future__ import annotations

from dataclasses import dataclass

from roost.stages.contract import Batch, MapExecutor, Outcome, Reports, Stage, Staged
from roost.stages.decode import DeadRow
from roost.stages.writers import write_dead
from roost.storage.files import Files


@dataclass
class RequestStage(Stage):
    """Writes refused requests on the driver.

    Parameters
    ----------
    dead
        Where dead-letter records are staged.
    """

    name = "requests"

    dead: Files

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Write the requests that were refused since the batch before."""
        rows = [DeadRow(r.position, r.reason, r.detail, r.record) for r in batch.refused]
        names = write_dead(self.dead, batch.prefix, batch.number, "request", rows, "requests")
        files = {"dead": [Staged(name) for name in names]}
        return Outcome(files, metrics={"dead_requests": len(rows)})
