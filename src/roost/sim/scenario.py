"""Scenarios and traces: input and output of a simulation, as values.

A lost plan is not among the faults: a plan is recorded in one transaction, which the tests of the
engine check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from roost.balance.plan import Plan
from roost.balance.rules import SwarmRules
from roost.model.arrays import Floats
from roost.sim.workloads import LoadSpec

STATIC = ("replicated", "uniform", "history")
STRATEGIES = (*STATIC, "swarm", "global")


class Moment(StrEnum):
    """When in a round the coordinator is lost."""

    BEFORE_DECISION = "before the decision"
    BEFORE_WRITE = "after the decision, before its plan is written"
    AFTER_WRITE = "after the new plan is written"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A machine that takes ``factor`` times as long, in rounds ``start`` to ``stop - 1``."""

    machine: int
    start: int
    stop: int
    factor: float


@dataclass(frozen=True, slots=True)
class MachineCrash:
    """A machine crashes in a round and restarts empty: it loads its queries again."""

    machine: int
    round: int


@dataclass(frozen=True, slots=True)
class CoordinatorCrash:
    """The coordinator crashes in a round; its successor has only the last plan."""

    round: int
    moment: Moment = Moment.BEFORE_DECISION


@dataclass(frozen=True, slots=True)
class Faults:
    """All faults of a scenario.

    ``loss`` and ``repeat`` are the probabilities that a message (report, request, response) is
    lost, or arrives twice.
    """

    stragglers: tuple[Straggler, ...] = ()
    machine_crashes: tuple[MachineCrash, ...] = ()
    coordinator_crashes: tuple[CoordinatorCrash, ...] = ()
    loss: float = 0.0
    repeat: float = 0.0

    def slowness(self, number: int, machines: int) -> Floats:
        """Return the slowdown factor of each machine in a round."""
        factors = np.ones(machines)
        for straggler in self.stragglers:
            if straggler.start <= number < straggler.stop:
                factors[straggler.machine] *= straggler.factor
        return factors

    def machines_lost(self, number: int) -> list[int]:
        """Return the machines that crash in a round."""
        return sorted({crash.machine for crash in self.machine_crashes if crash.round == number})

    def coordinator_lost(self, number: int) -> Moment | None:
        """Return when the coordinator crashes in a round, or None."""
        moments = (crash.moment for crash in self.coordinator_crashes if crash.round == number)
        return next(moments, None)


@dataclass(frozen=True, slots=True)
class TrueCosts:
    """True costs of work, in seconds on a machine of capacity 1; hidden from policies."""

    per_point: float = 2e-7
    per_check: float = 1e-8
    per_partition: float = 1e-4
    per_query_moved: float = 2e-6


@dataclass(frozen=True)
class Scenario:
    """Complete input of a simulation of one of the :data:`STRATEGIES`.

    Parameters
    ----------
    initial
        Initial plan of an adaptive strategy; ``history`` uses the load without hotspots. Rules of
        ``swarm`` without a sampled plan start with ``uniform``.
    capacity
        Work seconds per second of a machine. None: such that a perfectly balanced first round
        takes ``utilisation`` of a round.
    noise
        Standard deviation of the logarithm of measured times.
    fade
        Weight of N after a round.
    check
        Whether invariants 1, 2, 5 and 6 are checked after every step by brute force, feasible for
        grids of up to some hundred cells.
    swarm
        Rules of the strategy ``swarm``.
    """

    strategy: str = "global"
    machines: int = 22
    columns: int = 100
    rows: int = 100
    rounds: int = 80
    seed: int = 0
    load: LoadSpec = field(default_factory=LoadSpec)
    faults: Faults = field(default_factory=Faults)
    costs: TrueCosts = field(default_factory=TrueCosts)
    initial: str = "history"
    capacity: float | None = None
    utilisation: float = 0.7
    noise: float = 0.02
    round_s: float = 15.0
    fade: float = 0.5
    check: bool = False
    swarm: SwarmRules = SwarmRules()  # noqa: RUF009 - immutable


@dataclass(frozen=True, slots=True)
class Row:
    """One round.

    Attributes
    ----------
    backlog
        Points that wait at the source.
    units_per_s
        Units of work per second: admitted points times live queries.
    busiest_s, mean_s
        True busy seconds of the busiest machine and on average, without noise.
    moved_queries
        Moved by the plan change at the end of this round, a query once per partition.
    epoch, partitions
        Of the plan after this round.
    decision_s
        Duration by the injected clock, zero without one.
    """

    round: int
    offered: int
    admitted: int
    backlog: int
    units_per_s: float
    busiest_s: float
    mean_s: float
    moved_queries: int
    message_bytes: int
    epoch: int
    partitions: int
    changes: int
    reason: str
    model_error: float
    decision_s: float

    @property
    def imbalance(self) -> float:
        """Busy seconds of the busiest machine over their mean."""
        return self.busiest_s / self.mean_s if self.mean_s else 1.0


@dataclass(frozen=True)
class Trace:
    """Result of a simulation: one row per round, and the final plan."""

    scenario: Scenario
    rows: tuple[Row, ...]
    plan: Plan

    def column(self, name: str) -> Floats:
        """Return one number of every round."""
        return np.array([getattr(row, name) for row in self.rows], np.float64)

    @property
    def plan_changes(self) -> int:
        """Number of rounds that ended with a new plan."""
        return self.plan.epoch

    def rounds_to_recover(self, start: int, limit: float = 1.2) -> int | None:
        """Return the rounds from ``start`` until the busiest machine is within ``limit``.

        Zero if the imbalance never exceeds it; None if it stays above.
        """
        good = np.flatnonzero(self.column("imbalance")[start:] <= limit)
        return int(good[0]) if good.size else None
