"""Drivers of the strategies: the real policy objects, with simulated messages.

A driver is the part of a strategy that is not simulated: what machines count and send, and what the
coordinator decides. It observes what a real one would (counts by cell, measured busy seconds,
requests), not the true costs. A lost coordinator loses everything that only it knew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Change, Decision, NoChange, Rebalance, Replan
from roost.balance.plan import Plan
from roost.balance.planner import CostRates, GlobalPlanner
from roost.balance.swarm import (
    LoadReport,
    ShedRequest,
    Swarm,
    change_bytes,
    machine_cost,
    scale_of,
    shed,
)
from roost.model.arrays import Floats, Ints
from roost.sim.scenario import Faults, Scenario
from roost.sim.slots import SlotPoints
from roost.sim.statistics import ClusterStatistics
from roost.sim.workloads import QueryTable
from roost.workload.histogram import EulerHistogram
from roost.workload.model import CostModel
from roost.workload.trio import MachineStats

T = TypeVar("T")

# Size of a cell number with its count, and of the rest of a machine's report.
BYTES_PER_CELL = 12
BYTES_PER_REPORT = 16
ROUNDS_RETAINED = 3
# Assumed cost of loading a query, in points, until a move was measured.
POINTS_PER_QUERY_MOVED = 10.0


class Network:
    """Delivers messages: usually once, at random never or twice."""

    def __init__(self, faults: Faults, random: np.random.Generator) -> None:
        self._loss, self._repeat = faults.loss, faults.repeat
        self._random = random

    def copies(self) -> int:
        """Return how often a message arrives: 0, 1 or 2 times."""
        if not self._loss and not self._repeat:
            return 1
        if self._random.random() < self._loss:
            return 0
        return 2 if self._random.random() < self._repeat else 1

    def carry(self, messages: Iterable[T]) -> list[T]:
        """Return the messages that arrive, in order of arrival."""
        arrived = [message for message in messages for _ in range(self.copies())]
        if not self._loss and not self._repeat:
            return arrived
        return [arrived[k] for k in self._random.permutation(len(arrived))]


@dataclass(frozen=True, eq=False)
class SimulatedRound:
    """Observations of a round.

    ``partitions`` and ``busy_s`` are the number of partitions and the measured busy seconds of each
    machine, ``rate`` the objects per busy second of the slowest machine.
    """

    plan: Plan
    points: SlotPoints
    partitions: Floats
    busy_s: Floats
    rate: float


class Driver:
    """A running strategy; this one never changes the plan.

    The methods are called in this order, at most once per round. ``bytes_sent`` is the size of the
    messages of the last round, ``error`` the relative error of the calibrated model.
    """

    bytes_sent = 0
    error = 0.0

    def lose_machine(self, machine: int) -> None:
        """Drop the state of a machine that restarts empty, before the round."""

    def requests(self, registered: Ints, terminated: Ints) -> None:
        """Add registered and terminated queries, before the points of the round."""

    def collect(self, view: SimulatedRound) -> None:
        """Count the points of the round on their machines."""

    def decide(self, view: SimulatedRound) -> Decision:
        """Decide about the next plan."""
        return NoChange("static")

    def changed(self, changes: Sequence[Change], per_query_s: float) -> None:
        """Apply a plan change that took ``per_query_s`` for each moved query."""

    def lose_coordinator(self) -> None:
        """Continue from the plan and the state of the machines and the query log."""


class StatisticsDriver(Driver):
    """Maintains the statistics of the machines."""

    def __init__(self, plan: Plan, query_table: QueryTable, network: Network, fade: float) -> None:
        self.statistics = ClusterStatistics(plan, query_table, fade)
        self._network = network

    def requests(self, registered: Ints, terminated: Ints) -> None:
        """Send the requests to the machines."""
        self.statistics.requests(registered, terminated)

    def lose_machine(self, machine: int) -> None:
        """Restart its statistics."""
        self.statistics.lose(machine)

    def collect(self, view: SimulatedRound) -> None:
        """Count points on each machine and close the round."""
        self.statistics.collect(view.plan, view.points)

    def changed(self, changes: Sequence[Change], per_query_s: float) -> None:
        """Move, split and merge the statistics like the partitions."""
        self.statistics.changed(changes)


class SwarmDriver(StatisticsDriver):
    """The papers' protocol: two numbers from each machine, one request to shed load."""

    def __init__(
        self, plan: Plan, query_table: QueryTable, network: Network, scenario: Scenario
    ) -> None:
        super().__init__(plan, query_table, network, scenario.fade)
        self._rules = scenario.swarm
        self._query_table = query_table
        self._checks: Floats = np.zeros(plan.machines)
        self.swarm = Swarm(rules=self._rules)

    def decide(
        self,
        view: SimulatedRound,
        hidden: Ints | None = None,
        received: NDArray[np.bool_] | None = None,
    ) -> Decision:
        """Send the reports and let the coordinator decide over the simulated network.

        The machines decide as if ``hidden`` queries did not exist; ``received`` says which of them
        arrived in this round.
        """
        machines = self.statistics.machines
        scales = [self._scale(view, number) for number in range(view.plan.machines)]
        if hidden is not None and received is not None:
            machines = self.statistics.without(hidden, received)
        reports = [
            LoadReport(machine, scale * machine_cost(stats, self._rules), stats.received())
            for machine, (stats, scale) in enumerate(zip(machines, scales, strict=True))
        ]
        send = partial(self._send, machines, scales)
        decision = self.swarm.decide(view.plan, self._network.carry(reports), view.rate, send)
        self.bytes_sent = self.swarm.bytes_sent
        return decision

    def collect(self, view: SimulatedRound) -> None:
        """Count points, and the queries that each machine checked."""
        super().collect(view)
        over = self._query_table.over.reshape(-1)[view.points.cells]
        self._checks = view.points.by_machine(view.points.counts * over, view.plan.machines)

    def _scale(self, view: SimulatedRound, machine: int) -> float:
        stats = self.statistics.machines[machine]
        estimate = machine_cost(stats, self._rules)
        return scale_of(estimate, stats.received(), float(self._checks[machine]), self._rules)

    def _send(
        self,
        machines: Sequence[MachineStats],
        scales: Sequence[float],
        machine: int,
        request: ShedRequest,
    ) -> tuple[Change, ...]:
        """Send a request and return the response, ``()`` if either is lost."""
        responses = [
            shed(machines[machine], machine, request, self._rules, scales[machine])
            for _ in range(self._network.copies())
        ]
        assert all(r == responses[0] for r in responses), "responses to a repeated request differ"
        # The coordinator ignores second copies: their request is complete.
        arrived = [response for response in responses for _ in range(self._network.copies())]
        return arrived[0] if arrived else ()

    def lose_coordinator(self) -> None:
        """Restart at the first stage; the statistics are on the machines."""
        self.swarm = Swarm(rules=self._rules)


class GlobalDriver(Driver):
    """The global planner, with counts by cell and a calibrated cost model."""

    def __init__(self, query_table: QueryTable, network: Network) -> None:
        self._query_table = query_table
        self._network = network
        self._planner = GlobalPlanner()
        self._per_query_s: float | None = None
        self.lose_coordinator()

    def lose_coordinator(self) -> None:
        """Restart from the query log; points and times are observed again."""
        columns, rows = self._query_table.columns, self._query_table.rows
        self.model = CostModel(3)
        self.error = self.model.error
        self._histogram = EulerHistogram(columns, rows)
        self._histogram.add(self._query_table.live_ranges())
        self._latest: Floats = np.zeros(columns * rows)
        self._reported = np.zeros(columns * rows, np.bool_)
        self._rounds: list[Floats] = []

    def requests(self, registered: Ints, terminated: Ints) -> None:
        """Count queries by cell."""
        self._histogram.add(self._query_table.ranges[registered])
        self._histogram.add(self._query_table.ranges[terminated], -1)

    def collect(self, view: SimulatedRound) -> None:
        """Send the counts; calibrate the model with those that arrive."""
        machines, entries = view.plan.machines, view.points
        arrived = np.zeros(machines, np.bool_)
        # A duplicate report has no effect.
        arrived[self._network.carry(range(machines))] = True
        self.bytes_sent = BYTES_PER_REPORT * machines + BYTES_PER_CELL * len(entries.cells)
        counts = entries.counts.astype(np.float64)
        over = self._histogram.per_cell().reshape(-1)
        checks = entries.by_machine(counts * over[entries.cells], machines)
        points = entries.by_machine(counts, machines)
        features = np.column_stack([view.partitions, points, checks])
        if arrived.any():
            self.model.observe(features[arrived], view.busy_s[arrived])
            self.error = self.model.error
        missing = np.zeros((view.plan.rows, view.plan.columns), np.bool_)
        for number in np.unique(entries.partition[~arrived[entries.machine]]):
            p = view.plan.partitions[number]
            missing[p.row0 : p.row1, p.column0 : p.column1] = True
        by_cell = np.bincount(entries.cells, weights=counts, minlength=len(self._latest))
        # Cells without a report retain their last points.
        self._latest = np.where(missing.reshape(-1), self._latest, by_cell)
        self._reported |= ~missing.reshape(-1)
        if self._reported.all():
            self._rounds = [*self._rounds, self._latest][-ROUNDS_RETAINED:]

    def decide(self, view: SimulatedRound) -> Decision:
        """Run the planner."""
        if not self._rounds:
            return NoChange("too few reports")
        partition, point, check = self.model.coefficients.tolist()
        moved = self._per_query_s or POINTS_PER_QUERY_MOVED * point
        rates = CostRates(
            per_point=point, per_check=check, per_partition=partition, per_query_moved=moved
        )
        decision = self._planner.decide(view.plan, self._rounds, self._histogram, rates)
        if isinstance(decision, Rebalance):
            # As in SWARM: every machine routes, so every machine receives the change.
            self.bytes_sent += view.plan.machines * _update_bytes(view.plan, decision.changes)
        return decision

    def changed(self, changes: Sequence[Change], per_query_s: float) -> None:
        """Store the measured cost of moving a query."""
        self._per_query_s = per_query_s or self._per_query_s


def strategy_driver(
    plan: Plan, query_table: QueryTable, network: Network, scenario: Scenario
) -> Driver:
    """Return the driver of the strategy of a scenario."""
    if scenario.strategy == "swarm":
        return SwarmDriver(plan, query_table, network, scenario)
    return GlobalDriver(query_table, network) if scenario.strategy == "global" else Driver()


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
