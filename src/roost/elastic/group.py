"""What a policy sees of an executor group at the end of a round.

Everything here can be measured by an engine: rows that arrived and rows that were processed, the
processor seconds of stages and buckets, and executors by *planned*, *requested* and *observed*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from roost.dataflow.balancing import SubqueryLoad
from roost.model.arrays import Floats

HOUR_S = 3_600.0
RELEASE_S = 2.0  # until an executor that leaves is gone


def started_hours(started: float, gone: float) -> int:
    """Return the hours that an executor has begun."""
    return max(math.ceil((gone - started) / HOUR_S), 1)


def paid_s(started: float, clock: float) -> float:
    """Return the seconds between the end of an executor that leaves now and its next hour.

    Examples
    --------
    >>> paid_s(started=0.0, clock=3_500.0)
    98.0
    """
    gone = clock + RELEASE_S
    return HOUR_S * started_hours(started, gone) - (gone - started)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage in a round: rows that arrived for it, rows processed, and seconds spent on these.

    ``arrived`` follows from the source's newest offset, so it counts rows that still wait.
    """

    name: str
    arrived: float
    rows: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Executors:
    """The executors of a group.

    ``planned`` are those of the layout by the last decision, ``requested`` those asked for and not
    present, ``observed`` those present, with spares; ``waiting_s`` is the age of the oldest
    request.
    """

    planned: int
    requested: int
    observed: int
    waiting_s: float = 0.0


@dataclass(frozen=True)
class PlanLoad:
    """The spatial plan in its last round, which its own policy has ended.

    Parameters
    ----------
    stage
        That the plan divides.
    number
        Of the round.
    utilisation
        Of each machine.
    changed, reason
        Whether the policy then changed the plan, and why or why not.
    cell
        Names the hottest partition of the busiest machine if it is one cell, which cannot be split.
    """

    stage: str
    number: int
    utilisation: Floats
    changed: bool
    reason: str
    cell: str | None = None


@dataclass(frozen=True)
class GroupSnapshot:
    """An executor group at the end of a round.

    Parameters
    ----------
    clock, seconds, batches
        End of the round, its length, and its batches.
    slots
        Of each executor. A slot runs one task at a time, so it is one machine of a routing.
    settled
        Whether all that was decided before has been in force for the whole round.
    backlog
        Rows of the source that have arrived and are not processed.
    interval_s
        From the beginning of a batch to that of the next, if both are on time: rows of so many
        seconds always wait.
    paced
        Whether the source determines when rows arrive; a replay at full speed does not.
    routings, plan
        Bucket maps that can be balanced, each named as its stage, and the spatial plan.
    required
        Executors that other policies need, by policy, for other reasons than load.
    provision_s
        Measured seconds from a request until the executor is in the layout.
    tasks, waiting_s
        Tasks of the largest stage of a batch, and for how long some of them waited for a slot.
    """

    clock: float
    seconds: float
    batches: int
    slots: int
    executors: Executors
    settled: bool
    stages: tuple[StageLoad, ...]
    backlog: float
    interval_s: float = 0.0
    paced: bool = True
    routings: tuple[SubqueryLoad, ...] = ()
    required: Mapping[str, int] = field(default_factory=dict)
    provision_s: float = 0.0
    tasks: int = 0
    waiting_s: float = 0.0
    plan: PlanLoad | None = None

    @property
    def arrived(self) -> float:
        """Rows of the source that arrived in the round."""
        return max((stage.arrived for stage in self.stages), default=0.0)

    @property
    def rows(self) -> float:
        """Rows of the source that were processed in the round."""
        return max((stage.rows for stage in self.stages), default=0.0)

    def offered(self, costs: Mapping[str, float], batch_seconds: float | None) -> float | None:
        """Return the load in executors: what they would need to be busy all the time.

        ``costs`` are seconds for a row, by stage, for stages that processed nothing. The result is
        not capped. It is None for a source without a pace, unless batches should take
        ``batch_seconds``: then the rows that were read should have taken so long.
        """
        if self.paced:
            seconds = self.seconds
            work_s = sum(s.arrived * costs.get(s.name, 0.0) for s in self.stages)
        elif batch_seconds is None:
            return None
        else:
            seconds, work_s = self.batches * batch_seconds, sum(s.busy_s for s in self.stages)
        return work_s / (seconds * self.slots) if seconds > 0.0 else 0.0

    def pressure(self, stage: str) -> float:
        """Return the offered load of a stage over what it processed."""
        if not self.paced:
            return 1.0
        found = (s.arrived / s.rows for s in self.stages if s.name == stage and s.rows > 0.0)
        return next(found, 1.0)
