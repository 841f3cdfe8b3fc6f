"""Scenarios and traces: input and output of a simulation, as values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from roost.balance.plan import Plan
from roost.sim.faults import Faults
from roost.sim.workloads import Floats, LoadSpec

STATIC = ("replicated", "uniform", "history")
STRATEGIES = (*STATIC, "swarm", "global")


@dataclass(frozen=True, slots=True)
class TrueCosts:
    """True costs of work, in seconds on a machine of capacity 1; hidden from policies."""

    per_point: float = 2e-7
    per_check: float = 1e-8
    per_partition: float = 1e-4
    per_query_moved: float = 2e-6
    bytes_per_query: int = 64


@dataclass(frozen=True)
class Scenario:
    """Complete input of a simulation.

    Parameters
    ----------
    strategy
        ``replicated``, ``uniform``, ``history``, ``swarm`` or ``global``.
    machines, columns, rows, rounds, seed
        Sizes, and the seed of all random numbers.
    load, faults, costs
        Offered load, faults, and costs of work.
    initial
        Initial plan of an adaptive strategy; ``history`` uses the load without hotspots.
    capacity
        Work seconds per second, of all machines or of each. None: such that a perfectly balanced
        first round takes ``utilisation`` of a round.
    utilisation
        See ``capacity``.
    noise
        Standard deviation of the logarithm of measured times.
    round_s
        Length of a round in stream time.
    fade
        Weight of N after a round.
    check
        Whether invariants 1, 2, 5 and 6 are checked after every step by brute force, feasible for
        grids of up to some hundred cells.
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
    capacity: float | tuple[float, ...] | None = None
    utilisation: float = 0.7
    noise: float = 0.02
    round_s: float = 15.0
    fade: float = 0.5
    check: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One round.

    Attributes
    ----------
    round
        Number of the round.
    offered, admitted, backlog
        Points offered, admitted, and waiting at the source.
    units_per_s
        Units of work per second: admitted points times live queries.
    busiest_s, mean_s, imbalance
        True busy seconds of the busiest machine and on average, and their ratio, without noise.
    moved_queries, moved_bytes
        Moved by the plan change at the end of this round, a query once per partition.
    message_bytes
        Size of reports, requests, responses and changes.
    epoch, partitions
        Of the plan after this round.
    changes
        Number of changes in the decision.
    reason
        Reason of the decision.
    model_error
        Relative error of the calibrated model.
    decision_s
        Measured by the injected clock, zero without one.
    """

    round: int
    offered: int
    admitted: int
    backlog: int
    units_per_s: float
    busiest_s: float
    mean_s: float
    imbalance: float
    moved_queries: int
    moved_bytes: int
    message_bytes: int
    epoch: int
    partitions: int
    changes: int
    reason: str
    model_error: float
    decision_s: float


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

    def to_json(self) -> list[dict[str, Any]]:
        """Return JSON data, one row per round."""
        return [asdict(row) for row in self.rows]
