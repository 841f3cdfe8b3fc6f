"""Strategies as they run in a cluster: the same policy objects, with somebody to carry messages.

A driver is everything of a strategy that is not simulated: what machines count, what they send,
what the coordinator decides from it. It sees what a real one would see (counts by cell, measured
busy seconds, requests) and nothing of the true costs. Losing the coordinator loses all that only
the coordinator knew.
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
from roost.balance.swarm import Report, ShedRequest, Swarm, change_bytes, shed
from roost.sim.faults import Network
from roost.sim.layout import Dealt
from roost.sim.statistics import ClusterStatistics
from roost.sim.workloads import Floats, Ids, QueryBook
from roost.workload.aqwa import EulerHistogram
from roost.workload.model import CostModel

# A cell number and its count; and what comes with them from each machine.
BYTES_PER_CELL = 12
BYTES_PER_REPORT = 16
ROUNDS_KEPT = 3
# Until a move was measured, loading a query is taken to cost as much as so many points.
POINTS_PER_QUERY_MOVED = 10.0


@dataclass(frozen=True, eq=False)
class Seen:
    """What a round shows.

    Parameters
    ----------
    number
        Of the round.
    plan
        In force during the round.
    dealt
        Points by slot and cell.
    partitions
        How many partitions each machine has a part in.
    busy_s
        Measured busy seconds of each machine.
    rate
        Objects per busy second of the slowest machine.
    """

    number: int
    plan: Plan
    dealt: Dealt
    partitions: Floats
    busy_s: Floats
    rate: float


class Driver(Protocol):
    """A strategy at work. The methods are called in this order, once a round."""

    bytes_sent: int
    """Messages of the last round."""

    @property
    def error(self) -> float:
        """Relative error of the calibrated model, zero where there is none."""

    def lose_machine(self, machine: int) -> None:
        """Forget what a machine knew that came back empty, before the round."""

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Take note of queries that began and ended, before the points of the round."""

    def collect(self, seen: Seen) -> None:
        """Count the round where its points are."""

    def decide(self, seen: Seen) -> Decision:
        """Decide what the next plan is."""

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Follow a plan change that took so long for each moved query."""

    def lose_coordinator(self, plan: Plan) -> None:
        """Go on from a plan and whatever the machines and the query log still know."""


class StaticDriver:
    """Never changes the plan: ``replicated``, ``uniform`` and ``history``."""

    bytes_sent = 0
    error = 0.0

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Count nothing."""

    def lose_machine(self, machine: int) -> None:
        """Know nothing that could be lost."""

    def collect(self, seen: Seen) -> None:
        """Count nothing."""

    def decide(self, seen: Seen) -> Decision:
        """Leave the plan alone."""
        return NoChange("static")

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Never happens."""

    def lose_coordinator(self, plan: Plan) -> None:
        """Know nothing that could be lost."""


class SwarmDriver:
    """The papers' protocol: two numbers from each machine, one machine asked to shed load."""

    error = 0.0

    def __init__(self, plan: Plan, book: QueryBook, network: Network, fade: float) -> None:
        self.statistics = ClusterStatistics(plan, book, fade)
        self.swarm = Swarm()
        self.bytes_sent = 0
        self.answers_ignored = 0
        self._network = network
        self._request = 0
        self._late: list[int] = []

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Tell the machines."""
        self.statistics.requests(plan, new, gone)

    def lose_machine(self, machine: int) -> None:
        """Start its statistics again."""
        self.statistics.lose(machine)

    def collect(self, seen: Seen) -> None:
        """Count on each machine and close the round there."""
        self.statistics.collect(seen.plan, seen.dealt)

    def decide(self, seen: Seen) -> Decision:
        """Send the reports and let the coordinator decide; it asks machines over the network."""
        # Second copies of answers come when their request is long done with.
        self.answers_ignored += sum(number != self._request for number in self._late)
        self._late.clear()
        reports = [
            Report(machine, stats.numerator(), stats.received())
            for machine, stats in enumerate(self.statistics.machines)
        ]
        decision = self.swarm.decide(seen.plan, self._network.carry(reports), seen.rate, self._ask)
        self.bytes_sent = self.swarm.bytes_sent
        self._request += 1
        return decision

    def _ask(self, machine: int, request: ShedRequest) -> tuple[Change, ...]:
        """Carry a request there and its answer back; lost on either way, it is no answer."""
        self._request += 1
        answers = [
            shed(self.statistics.machines[machine], machine, request)
            for _ in range(self._network.copies())
        ]
        assert all(answer == answers[0] for answer in answers), "a repeated request, another answer"
        arrived = [answer for answer in answers for _ in range(self._network.copies())]
        self._late.extend(self._request for _ in arrived[1:])
        return arrived[0] if arrived else ()

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Move, cut and merge the statistics too."""
        self.statistics.changed(after, changes)

    def lose_coordinator(self, plan: Plan) -> None:
        """Begin again at the first stage; the statistics are on the machines."""
        self.swarm = Swarm()
        self._late.clear()


class GlobalDriver:
    """A plan for all machines at once, from counts by cell and a model of what they cost."""

    def __init__(self, plan: Plan, book: QueryBook, network: Network) -> None:
        self._book = book
        self._network = network
        self._planner = GlobalPlanner()
        self._per_query_s: float | None = None
        self.bytes_sent = 0
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        self.model = CostModel(3)
        self._histogram = EulerHistogram(plan.columns, plan.rows)
        self._histogram.add(self._book.live_ranges())
        self._latest: Floats = np.zeros(plan.columns * plan.rows)
        self._heard = np.zeros(plan.columns * plan.rows, np.bool_)
        self._rounds: list[CellLoad] = []

    @property
    def error(self) -> float:
        """Relative error of the calibrated model."""
        return float(self.model.error)

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Count queries by cell."""
        self._histogram.add(self._book.ranges[new])
        self._histogram.add(self._book.ranges[gone], -1)

    def lose_machine(self, machine: int) -> None:
        """Know nothing that only a machine knew."""

    def collect(self, seen: Seen) -> None:
        """Send the counts; learn from those that arrive and from their busy times."""
        machines = seen.plan.machines
        arrived = np.zeros(machines, np.bool_)
        # A report that comes twice is the same report.
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

    def _update(self, seen: Seen, counts: Floats, arrived: NDArray[np.bool_]) -> None:
        """Renew the points of each cell; of a machine that was not heard, the last are kept."""
        dealt, plan = seen.dealt, seen.plan
        points = np.bincount(dealt.cells, weights=counts, minlength=len(self._latest))
        silent = np.zeros((plan.rows, plan.columns), np.bool_)
        for number in np.unique(dealt.partition[~arrived[dealt.machine]]):
            p = plan.partitions[number]
            silent[p.row0 : p.row1, p.column0 : p.column1] = True
        self._latest = np.where(silent.reshape(-1), self._latest, points)
        self._heard |= ~silent.reshape(-1)

    def decide(self, seen: Seen) -> Decision:
        """Ask the planner."""
        if not self._rounds:
            return NoChange("too few reports")
        partition, point, check = self.model.coefficients.tolist()
        moved = self._per_query_s or POINTS_PER_QUERY_MOVED * point
        rates = CostRates(
            per_point=point, per_check=check, per_partition=partition, per_query_moved=moved
        )
        decision = self._planner.decide(seen.plan, self._rounds, self._histogram, rates)
        if isinstance(decision, Rebalance):
            # As SWARM counts it: every machine routes, so every machine is told.
            self.bytes_sent += seen.plan.machines * _update_bytes(seen.plan, decision.changes)
        return decision

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Remember what moving costs."""
        if per_query_s:
            self._per_query_s = per_query_s

    def lose_coordinator(self, plan: Plan) -> None:
        """Begin with the plan and the query log; points and times are learnt again."""
        self._start(plan)


def _update_bytes(plan: Plan, changes: Sequence[Change]) -> int:
    """Size of a plan change as it would be sent: of a new layout, only what is new."""
    known = set(plan.partitions)
    return change_bytes(
        [
            Replan(tuple(p for p in change.partitions if p not in known))
            if isinstance(change, Replan)
            else change
            for change in changes
        ]
    )
