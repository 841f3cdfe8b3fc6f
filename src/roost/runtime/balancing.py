"""The balancing policies of a run: what the strategies ``swarm`` and ``global`` see of a round.

``swarm`` sees two numbers of each machine, and searches the statistics of one of them. ``global``
sees the points of every cell, learns from measured times what a point and a pair cost, and plans
for all machines at once. :mod:`roost.balance` makes the decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition, Plan, initial_plan
from roost.balance.changes import Change, Decision, NoChange, Rebalance
from roost.balance.planner import CostRates, GlobalPlanner
from roost.balance.replication import replan
from roost.balance.resizing import replicated, resize_by_statistics
from roost.balance.swarm import (
    LoadReport,
    Send,
    ShedRequest,
    Swarm,
    machine_cost,
    scale_of,
    shed,
)
from roost.model.choices import Strategy
from roost.runtime.rounds import BALANCE, BatchNotes, HiddenQueries, Policy, Proposal, RoundSnapshot
from roost.stages.statistics import CellStage, TrioStage, TrioValue
from roost.workload import CellCounts, CostModel, EulerHistogram, MachineStats

ROUNDS_SEEN = 3
# Seconds of the cost model before any measurement: per machine, per point, per pair to check.
PRIOR = (1e-3, 1e-7, 2e-9)
# A machine matches all its points in one pass, so a partition itself costs hardly anything. But of
# two equally good plans, the one with fewer partitions is easier to route, to record and to change.
PER_PARTITION_S = 1e-5
PER_QUERY_MOVED_S = 1e-7
LOADING_MEMORY = 0.5


class BalancePolicy(Policy, Protocol):
    """A policy that changes the spatial plan."""

    def hottest(self, plan: Plan, machine: int) -> Partition | None:
        """Return the most expensive partition of a machine in the round that ended."""


class ReplicatedPolicy:
    """Gives every machine all queries; changes nothing but the number of machines."""

    name = BALANCE

    def propose(self, snapshot: RoundSnapshot) -> Proposal:
        """Follow the number of machines."""
        if snapshot.is_resized:
            return Proposal(replicated(snapshot.routing.plan, snapshot.wanted))
        return Proposal(NoChange("every machine has all queries"))


BuildPolicy = Callable[[Mapping[str, Any]], BalancePolicy]
"""Builds a policy that continues from the record of a round."""


class FittingPolicy:
    """Replicates the plan while the queries fit into the memory of every host.

    Else another policy decides, which ``build`` makes anew whenever ``first_plan``, of so many
    machines, divides space again: what the policy saw of loads before is old then.
    """

    name = BALANCE

    def __init__(
        self,
        build: BuildPolicy,
        first_plan: Callable[[int], Plan],
        saved: Mapping[str, Any],
    ) -> None:
        self._build = build
        self._first_plan = first_plan
        self._policy = build(saved)
        self._learnt = _learnt(saved)

    def propose(self, snapshot: RoundSnapshot) -> Proposal:
        """Replicate the plan, divide space, or leave the decision to the other policy."""
        plan, machines, memory = snapshot.routing.plan, snapshot.wanted, snapshot.memory
        fits = memory is not None and memory.fits(replicated=plan.undivided)
        if plan.undivided and fits:
            if snapshot.is_resized:
                return Proposal(replicated(plan, machines), self._learnt)
            return Proposal(NoChange(f"every machine has all queries: {memory}"), self._learnt)
        if plan.undivided:
            self._policy = self._build(self._learnt)
            change = replan(plan, self._first_plan(machines))
            reason = f"space is divided: {memory or 'memory of the hosts is unknown'}"
            return Proposal(Rebalance((change,), reason, machines), self._learnt)
        proposal = self._policy.propose(snapshot)
        if not fits:
            return proposal
        self._learnt = _learnt(proposal.memory)
        everything = initial_plan(Strategy.REPLICATED, snapshot.routing.space.grid, machines)
        reason = f"every machine has all queries from now on: {memory}"
        return Proposal(Rebalance((replan(plan, everything),), reason, machines), self._learnt)

    def hottest(self, plan: Plan, machine: int) -> Partition | None:
        """Return the most expensive partition of a machine in the round that ended."""
        return self._policy.hottest(plan, machine)


def _learnt(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is still true of a round's record when the plan is another one."""
    return {name: saved[name] for name in ("model", "per_query_s") if name in saved}


class SwarmPolicy:
    """The protocol of the paper: statistics stay with the machines.

    ``saved`` is the record of the last round before a restart, or empty.
    """

    name = BALANCE

    def __init__(self, stage: TrioStage, saved: Mapping[str, Any]) -> None:
        self._stage = stage
        self._rules = stage.rules
        self._swarm = Swarm(rules=self._rules)
        if "swarm" in saved:
            self._swarm = Swarm.from_json(saved["swarm"], self._rules)

    def propose(self, snapshot: RoundSnapshot) -> Proposal:
        """Decide on the last report of each machine."""
        values: Mapping[int, TrioValue] = snapshot.batches[-1].observed
        scales = {
            m: scale_of(value.cost, value.received, float(snapshot.checks[m]), self._rules)
            for m, value in sorted(values.items())
        }
        reports = [
            LoadReport(m, scale * values[m].cost, values[m].received) for m, scale in scales.items()
        ]
        mean = sum(report.cost for report in reports) / len(reports)
        # Machines below the mean are hardly ever requested to shed load.
        away = {report.machine for report in reports if report.cost > mean}
        send: Send = partial(self._shed, away, scales)
        if len(snapshot.hidden) or snapshot.is_resized:
            self._stage.fetch(values)
        if len(snapshot.hidden):
            # Neither the reports nor the machine that sheds load may know of the hidden queries.
            send = partial(self._shed, away, scales, hidden=snapshot.hidden)
            reports = [self._report(m, scale, snapshot.hidden) for m, scale in scales.items()]
        received = sum(report.received for report in reports)
        slowest = float(snapshot.busy_s.max())
        rate = received / slowest if slowest > 0 else 0.0
        plan = snapshot.routing.plan
        decision = self._swarm.decide(plan, reports, rate, send)
        if snapshot.is_resized:
            decision = resize_by_statistics(
                plan,
                snapshot.wanted,
                lambda machine: self._statistics(machine, snapshot.hidden),
                self._rules,
            )
        sent, memory = self._swarm.bytes_sent, self._swarm.to_json()
        return Proposal(decision, {"rate": rate, "bytes_sent": sent, "swarm": memory})

    def hottest(self, plan: Plan, machine: int) -> Partition | None:
        """Return the most expensive partition of a machine, by its statistics."""
        if machine not in self._stage.saved.names:
            return None
        stats = self._statistics(machine)
        costs = {n: self._rules.cost.of(s) for n, s in stats.partitions.items()}
        mine = [p for p in plan.of_machine(machine) if p.partition_id in costs]
        return max(mine, key=lambda p: costs[p.partition_id], default=None)

    def _report(self, machine: int, scale: float, hidden: HiddenQueries) -> LoadReport:
        stats = self._statistics(machine, hidden)
        return LoadReport(machine, scale * machine_cost(stats, self._rules), stats.received())

    def _shed(
        self,
        away: set[int],
        scales: Mapping[int, float],
        machine: int,
        request: ShedRequest,
        hidden: HiddenQueries | None = None,
    ) -> tuple[Change, ...]:
        """Return the load that a machine can give away, from its own statistics.

        At the first request of a round, all that are likely to follow are fetched, in one job.
        """
        if away:
            self._stage.fetch(away)
            away.clear()
        stats = self._statistics(machine, hidden)
        return shed(stats, machine, request, self._rules, scales[machine])

    def _statistics(self, machine: int, hidden: HiddenQueries | None = None) -> MachineStats:
        """Read a machine's statistics as of the end of the round, without some queries.

        A copy stays in the state directory until the next batch, so a partition that moves takes
        its statistics along.
        """
        stats = self._stage.statistics(machine)
        stats.close_round(self._stage.fade)
        if hidden is not None:
            received = np.zeros(len(hidden), np.bool_)
            if self._stage.saved.began is not None:
                received = hidden.positions >= self._stage.saved.began
            stats.hide_queries(hidden.cells, received)
        return stats


class GlobalPolicy:
    """A plan for all machines at once, from counted cells and measured times.

    ``saved`` is the record of the last round before a restart, or empty.
    """

    name = BALANCE

    def __init__(self, stage: CellStage, planner: GlobalPlanner, saved: Mapping[str, Any]) -> None:
        self._stage = stage
        self._planner = planner
        self._rounds: deque[NDArray[np.float64]] = deque(maxlen=ROUNDS_SEEN)
        self._costs: NDArray[np.float64] = np.zeros(0)
        self._per_query_s = float(saved.get("per_query_s", PER_QUERY_MOVED_S))
        self._model = CostModel(len(PRIOR), prior=PRIOR)
        if "model" in saved:
            self._model = CostModel.from_json(saved["model"])

    def propose(self, snapshot: RoundSnapshot) -> Proposal:
        """Update the cost model from the round, and plan."""
        plan = snapshot.routing.plan
        cells: dict[int, list[CellCounts]] = {}
        sent = 0
        for notes in snapshot.batches:
            for machine, found in notes.observed.items():
                cells.setdefault(machine, []).append(found)
                sent += found.cells.nbytes + found.counts.nbytes
            self._learn_loading(notes)
        counts = {machine: CellCounts.joined(parts) for machine, parts in cells.items()}
        histogram = self._stage.histogram(snapshot.now)
        queries = histogram.per_cell().reshape(-1)
        error = self._learn(snapshot.busy_s, counts, queries)
        points = CellCounts.joined(counts.values()).dense(plan.columns * plan.rows)
        self._costs = points * queries
        self._rounds.append(points)
        _, per_point, per_check = self._model.coefficients.tolist()
        if per_point <= 0.0 and per_check <= 0.0:
            # Workers load code in their first tasks, which may hide what points cost.
            _, per_point, per_check = PRIOR
        rates = CostRates(per_point, per_check, PER_PARTITION_S, self._per_query_s)
        return Proposal(
            self._planned(snapshot, histogram, rates),
            {
                "bytes_sent": sent,
                "model": self._model.to_json(),
                "model_error": error,
                "per_query_s": self._per_query_s,
            },
        )

    def hottest(self, plan: Plan, machine: int) -> Partition | None:
        """Return the most expensive partition of a machine, by pairs of points and queries."""
        costs = self._costs.reshape(plan.rows, plan.columns)
        return max(
            plan.of_machine(machine),
            key=lambda p: float(costs[p.row0 : p.row1, p.column0 : p.column1].sum()),
            default=None,
        )

    def _planned(
        self, snapshot: RoundSnapshot, histogram: EulerHistogram, rates: CostRates
    ) -> Decision:
        """Plan for all queries, if those that are not hidden justify a change."""
        plan, hidden, rounds = snapshot.routing.plan, snapshot.hidden.cells, list(self._rounds)
        if snapshot.is_resized:
            return self._planner.resize(plan, snapshot.wanted, rounds, histogram, rates)
        if len(hidden):
            histogram.add(hidden, -1)
            decision = self._planner.decide(plan, rounds, histogram, rates)
            histogram.add(hidden, 1)
            if not isinstance(decision, Rebalance):
                return decision
        return self._planner.decide(plan, rounds, histogram, rates)

    def _learn_loading(self, notes: BatchNotes) -> None:
        """Update the cost of loading a query after a move."""
        if notes.loaded_queries:
            seconds = notes.load_s / notes.loaded_queries
            old = self._per_query_s
            self._per_query_s = LOADING_MEMORY * old + (1 - LOADING_MEMORY) * seconds

    def _learn(
        self,
        busy_s: NDArray[np.float64],
        counts: Mapping[int, CellCounts],
        queries: NDArray[np.float64],
    ) -> float | None:
        """Fit the model to the work of the machines and its times; returns its error before."""
        rows, times = [], []
        for machine, own in counts.items():
            if own.cells.size and busy_s[machine] > 0:
                pairs = float((own.counts * queries[own.cells]).sum())
                rows.append([1.0, own.points, pairs])
                times.append(busy_s[machine])
        return self._model.observe(rows, times) if rows else None
