"""Drivers of the strategies: the real policy objects, with simulated messages.

A driver is the part of a strategy that is not simulated: what machines count and send, and what the
coordinator decides. It observes what a real one would (counts by cell, measured busy seconds,
requests), not the true costs. A lost coordinator loses everything that only it knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Decision, NoChange, Rebalance, Replan
from roost.balance.plan import Plan
from roost.balance.planner import CellLoad, CostRates, GlobalPlanner
from roost.balance.swarm import LoadReport, ShedRequest, Swarm, change_bytes, shed
from roost.sim.faults import Network
from roost.sim.slots import SlotPoints
from roost.sim.statistics import ClusterStatistics
from roost.sim.workloads import Floats, Ids, QueryTable
from roost.workload.histogram import EulerHistogram
from roost.workload.model import CostModel

# Size of a cell number with its count, and of the rest of a machine's report.
BYTES_PER_CELL = 12
BYTES_PER_REPORT = 16
ROUNDS_KEPT = 3
# Assumed cost of loading a query, in points, until a move was measured.
POINTS_PER_QUERY_MOVED = 10.0


@dataclass(frozen=True, eq=False)
class RoundView:
    """Observations of a round.

    Parameters
    ----------
    number
        Number of the round.
    plan
        Plan of the round.
    dealt
        Points by slot and cell.
    partitions
        Number of partitions of each machine.
    busy_s
        Measured busy seconds of each machine.
    rate
        Objects per busy second of the slowest machine.
    """

    number: int
    plan: Plan
    dealt: SlotPoints
    partitions: Floats
    busy_s: Floats
    rate: float


class Driver(Protocol):
    """A running strategy. The methods are called in this order, once per round."""

    bytes_sent: int
    """Size of the messages of the last round."""

    @property
    def error(self) -> float:
        """Relative error of the calibrated model, zero without a model."""

    def lose_machine(self, machine: int) -> None:
        """Drop the state of a machine that restarts empty, before the round."""

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Add registered and terminated queries, before the points of the round."""

    def collect(self, seen: RoundView) -> None:
        """Count the points of the round on their machines."""

    def decide(self, seen: RoundView) -> Decision:
        """Decide about the next plan."""

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Apply a plan change that took ``per_query_s`` for each moved query."""

    def lose_coordinator(self, plan: Plan) -> None:
        """Continue from a plan and the state of the machines and the query log."""


class StaticDriver:
    """Never changes the plan: ``replicated``, ``uniform`` and ``history``."""

    bytes_sent = 0
    error = 0.0

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Do nothing."""

    def lose_machine(self, machine: int) -> None:
        """Do nothing."""

    def collect(self, seen: RoundView) -> None:
        """Do nothing."""

    def decide(self, seen: RoundView) -> Decision:
        """Keep the plan."""
        return NoChange("static")

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Do nothing."""

    def lose_coordinator(self, plan: Plan) -> None:
        """Do nothing."""


class SwarmDriver:
    """The papers' protocol: two numbers from each machine, one request to shed load."""

    error = 0.0

    def __init__(self, plan: Plan, query_table: QueryTable, network: Network, fade: float) -> None:
        self.statistics = ClusterStatistics(plan, query_table, fade)
        self.swarm = Swarm()
        self.bytes_sent = 0
        self.responses_ignored = 0
        self._network = network
        self._request = 0
        self._late: list[int] = []

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Send the requests to the machines."""
        self.statistics.requests(plan, new, gone)

    def lose_machine(self, machine: int) -> None:
        """Reset its statistics."""
        self.statistics.lose(machine)

    def collect(self, seen: RoundView) -> None:
        """Count points on each machine and close the round."""
        self.statistics.collect(seen.plan, seen.dealt)

    def decide(self, seen: RoundView) -> Decision:
        """Send the reports and let the coordinator decide over the simulated network."""
        # Second copies of responses arrive after their request is complete.
        self.responses_ignored += sum(number != self._request for number in self._late)
        self._late.clear()
        reports = [
            LoadReport(machine, stats.numerator(), stats.received())
            for machine, stats in enumerate(self.statistics.machines)
        ]
        decision = self.swarm.decide(seen.plan, self._network.carry(reports), seen.rate, self._send)
        self.bytes_sent = self.swarm.bytes_sent
        self._request += 1
        return decision

    def _send(self, machine: int, request: ShedRequest) -> tuple[Change, ...]:
        """Send a request and return the response, ``()`` if either is lost."""
        self._request += 1
        responses = [
            shed(self.statistics.machines[machine], machine, request)
            for _ in range(self._network.copies())
        ]
        assert all(r == responses[0] for r in responses), "responses to a repeated request differ"
        arrived = [response for response in responses for _ in range(self._network.copies())]
        self._late.extend(self._request for _ in arrived[1:])
        return arrived[0] if arrived else ()

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Move, split and merge the statistics like the partitions."""
        self.statistics.changed(after, changes)

    def lose_coordinator(self, plan: Plan) -> None:
        """Restart at the first stage; the statistics are on the machines."""
        self.swarm = Swarm()
        self._late.clear()


class GlobalDriver:
    """The global planner, with counts by cell and a calibrated cost model."""

    def __init__(self, plan: Plan, query_table: QueryTable, network: Network) -> None:
        self._query_table = query_table
        self._network = network
        self._planner = GlobalPlanner()
        self._per_query_s: float | None = None
        self.bytes_sent = 0
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        self.model = CostModel(3)
        self._histogram = EulerHistogram(plan.columns, plan.rows)
        self._histogram.add(self._query_table.live_ranges())
        self._latest: Floats = np.zeros(plan.columns * plan.rows)
        self._heard = np.zeros(plan.columns * plan.rows, np.bool_)
        self._rounds: list[CellLoad] = []

    @property
    def error(self) -> float:
        """Relative error of the calibrated model."""
        return float(self.model.error)

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Count queries by cell."""
        self._histogram.add(self._query_table.ranges[new])
        self._histogram.add(self._query_table.ranges[gone], -1)

    def lose_machine(self, machine: int) -> None:
        """Do nothing: the driver has all state."""

    def collect(self, seen: RoundView) -> None:
        """Send the counts; calibrate the model with those that arrive."""
        machines = seen.plan.machines
        arrived = np.zeros(machines, np.bool_)
        # A duplicate report has no effect.
        arrived[self._network.carry(range(machines))] = True
        dealt = seen.dealt
        self.bytes_sent = BYTES_PER_REPORT * machines + BYTES_PER_CELL * len(dealt.cells)
        counts = dealt.counts.astype(np.float64)
        over = self._histogram.per_cell().reshape(-1)
        checks = dealt.by_machine(counts * over[dealt.cells], machines)
        points = dealt.by_machine(counts, machines)
        features = np.column_stack([seen.partitions, points, checks])
        if arrived.any():
            self.model.observe(features[arrived], seen.busy_s[arrived])
        self._update(seen, counts, arrived)
        if self._heard.all():
            self._rounds = [*self._rounds, CellLoad(self._latest)][-ROUNDS_KEPT:]

    def _update(self, seen: RoundView, counts: Floats, arrived: NDArray[np.bool_]) -> None:
        """Update the points of each cell; cells without a report keep the last ones."""
        dealt, plan = seen.dealt, seen.plan
        points = np.bincount(dealt.cells, weights=counts, minlength=len(self._latest))
        silent = np.zeros((plan.rows, plan.columns), np.bool_)
        for number in np.unique(dealt.partition[~arrived[dealt.machine]]):
            p = plan.partitions[number]
            silent[p.row0 : p.row1, p.column0 : p.column1] = True
        self._latest = np.where(silent.reshape(-1), self._latest, points)
        self._heard |= ~silent.reshape(-1)

    def decide(self, seen: RoundView) -> Decision:
        """Run the planner."""
        if not self._rounds:
            return NoChange("too few reports")
        partition, point, check = self.model.coefficients.tolist()
        moved = self._per_query_s or POINTS_PER_QUERY_MOVED * point
        rates = CostRates(
            per_point=point, per_check=check, per_partition=partition, per_query_moved=moved
        )
        decision = self._planner.decide(seen.plan, self._rounds, self._histogram, rates)
        if isinstance(decision, Rebalance):
            # As in SWARM: every machine routes, so every machine receives the change.
            self.bytes_sent += seen.plan.machines * _update_bytes(seen.plan, decision.changes)
        return decision

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Store the measured cost of moving a query."""
        if per_query_s:
            self._per_query_s = per_query_s

    def lose_coordinator(self, plan: Plan) -> None:
        """Restart from the plan and the query log; points and times are observed again."""
        self._start(plan)


def _update_bytes(plan: Plan, changes: Sequence[Change]) -> int:
    """Return the message size of a plan change; of a replan, only new partitions are sent."""
    known = set(plan.partitions)
    return change_bytes(
        [
            Replan(tuple(p for p in change.partitions if p not in known))
            if isinstance(change, Replan)
            else change
            for change in changes
        ]
    )
