"""What a simulated run depends on, and what it leaves: scenarios and traces, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from roost.balance.plan import Plan
from roost.sim.faults import Faults
from roost.sim.workloads import Floats, Load

STATIC = ("replicated", "uniform", "history")
STRATEGIES = (*STATIC, "swarm", "global")


@dataclass(frozen=True, slots=True)
class TrueCosts:
    """What work really costs, in seconds on a machine of capacity 1; no policy sees this."""

    per_point: float = 2e-7
    per_check: float = 1e-8
    per_partition: float = 1e-4
    per_query_moved: float = 2e-6
    bytes_per_query: int = 64


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on.

    Parameters
    ----------
    strategy
        ``replicated``, ``uniform``, ``history``, ``swarm`` or ``global``.
    machines, columns, rows, rounds, seed
        Sizes, and where all chance comes from.
    load, faults, costs
        What comes in, what goes wrong, what work costs.
    initial
        Placement that an adaptive strategy begins with; ``history`` knows the load without its
        hotspots.
    capacity
        Work seconds per second, of all machines or of each. None: such that a perfect balance of
        the first round takes ``utilisation`` of a round.
    utilisation
        See ``capacity``.
    noise
        Standard deviation of a measured time's logarithm.
    round_s
        Length of a round in stream time.
    fade
        What is left of N after a round.
    check
        Whether invariants 1, 2, 5 and 6 are checked after every step, by brute force: for grids
        of up to some hundred cells.
    """

    strategy: str = "global"
    machines: int = 22
    columns: int = 100
    rows: int = 100
    rounds: int = 80
    seed: int = 0
    load: Load = field(default_factory=Load)
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
        Its number.
    offered, admitted, backlog
        Points that came, that were let in, and that wait at the source.
    units_per_s
        Units of work: points let in times live queries, per second.
    busiest_s, mean_s, imbalance
        True busy seconds of the busiest machine, of the mean, and their ratio, without noise.
    moved_queries, moved_bytes
        What the plan made at the end of this round moved, a query once for each partition.
    message_bytes
        Reports, requests, answers and changes.
    epoch, partitions
        Of the plan after this round.
    changes
        In the decision.
    reason
        Of the decision.
    model_error
        Relative error of the calibrated model.
    decision_s
        By the injected clock, zero without one.
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
    """What happened, one row a round, and the plan that was left."""

    scenario: Scenario
    rows: tuple[Row, ...]
    plan: Plan

    def column(self, name: str) -> Floats:
        """One number of every round."""
        return np.array([getattr(row, name) for row in self.rows], np.float64)

    @property
    def plan_changes(self) -> int:
        """Rounds that ended with a new plan."""
        return self.plan.epoch

    def rounds_to_recover(self, start: int, limit: float = 1.2) -> int | None:
        """Count rounds from ``start`` until the busiest machine is within ``limit`` of the mean.

        Zero if it never left; None if it never came back.
        """
        good = np.flatnonzero(self.column("imbalance")[start:] <= limit)
        return int(good[0]) if good.size else None

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data, a row a round."""
        return [asdict(row) for row in self.rows]
