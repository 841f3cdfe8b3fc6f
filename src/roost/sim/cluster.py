"""Simulated cluster: runs a strategy under a load, with given machines and faults.

Policies are pure functions, so they run here unchanged against machines that are a few numbers.

Model of a machine: the work of a round is the cost of its points, ``per_point + per_check * queries
over the cell`` each, plus ``per_partition`` for each partition, times noise, over its capacity.
Work that exceeds a round waits in the machine's queue. A full queue stops the source, so the
slowest machine limits the input; points that wait at the source are the backlog. A machine that
receives a partition first loads its queries, which is work, too.

Policies observe measured busy seconds and statistics, not these costs. Single points, matches and
network bandwidth are not simulated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from roost.balance.changes import Change, Rebalance, apply_changes, arrivals
from roost.balance.plan import Partition, Plan
from roost.balance.strategies import initial_plan
from roost.model.arrays import Floats
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect
from roost.sim.checks import Checker
from roost.sim.policies import Driver, Network, SimulatedRound, strategy_driver
from roost.sim.scenario import STATIC, STRATEGIES, Moment, Row, Scenario, Trace
from roost.sim.slots import PlanSlots
from roost.sim.workloads import LoadSource, QueryTable
from roost.workload.cells import CellCounts

_NOISE, _NETWORK = 11, 12
# Capacity of a machine's queue, in rounds, before the source must stop.
_QUEUE_ROUNDS = 0.2
# Minimum share of the points that is admitted, so that every round has observations.
_ADMITTED_SHARE_MIN = 0.002


DriverFactory = Callable[[Plan, QueryTable, Network], Driver]
Clock = Callable[[], float]


def simulate(
    scenario: Scenario, *, driver: DriverFactory | None = None, clock: Clock | None = None
) -> Trace:
    """Run a scenario.

    ``driver`` creates a driver in place of that of ``scenario.strategy``; ``clock`` measures
    decisions, in seconds. Raises :class:`InvariantError`, which has seed and round, if
    ``scenario.check`` is set and an invariant is violated.

    Examples
    --------
    >>> trace = simulate(Scenario(strategy="uniform", machines=4, columns=8, rows=8, rounds=3))
    >>> len(trace.rows), trace.plan_changes, trace.rows[-1].reason
    (3, 0, 'static')
    """
    cluster = _Cluster(scenario, driver, clock)
    rows = tuple(cluster.round(number) for number in range(scenario.rounds))
    return Trace(scenario, rows, cluster.plan)


class _Cluster:
    """State of a running simulation."""

    def __init__(
        self, scenario: Scenario, driver: DriverFactory | None, clock: Clock | None
    ) -> None:
        s = self._scenario = scenario
        assert s.strategy in STRATEGIES, f"strategy {s.strategy} is none of {STRATEGIES}"
        self._clock = clock
        self._source = LoadSource(s.load, s.columns, s.rows, s.seed)
        self._query_table = QueryTable(s.columns, s.rows)
        self._source.requests(0, self._query_table)
        self.plan = self._first_plan()
        self._slots = PlanSlots(self.plan)
        self._capacity = self._machine_capacity()
        network = Network(s.faults, np.random.default_rng([s.seed, _NETWORK]))
        given = (self.plan, self._query_table, network)
        own = driver or partial(strategy_driver, scenario=s)
        self._driver = own(*given)
        self._queue_s = np.zeros(s.machines)
        self._backlog = 0
        self._moved = 0
        self._checker = Checker(s.seed, self.plan, self._query_table, s.fade) if s.check else None

    def _first_plan(self) -> Plan:
        s = self._scenario
        grid = Grid(Rect(0.0, 0.0, 1.0, 1.0), s.columns, s.rows)
        name = s.strategy if s.strategy in STATIC else s.initial
        if s.strategy == "swarm" and not s.swarm.sampled_plan:
            name = "uniform"
        return initial_plan(Strategy(name), grid, s.machines, self._usual_cost_s())

    def _usual_cost_s(self) -> Floats:
        """Return the true cost of each cell in a round without hotspots, ``(rows, columns)``."""
        s = self._scenario
        points = self._source.usual_weights * s.load.points_per_round
        return points * (s.costs.per_point + s.costs.per_check * self._query_table.over)

    def _machine_capacity(self) -> float:
        s = self._scenario
        work_s = float(self._usual_cost_s().sum()) + s.costs.per_partition * s.machines
        return s.capacity or work_s / (s.machines * s.round_s * s.utilisation)

    def round(self, number: int) -> Row:
        """Simulate one round: requests, points, decision, plan."""
        s, driver = self._scenario, self._driver
        for machine in s.faults.machines_lost(number):
            self._lose_machine(machine)
        if number:
            changed = self._source.requests(number, self._query_table)
            driver.requests(*changed)
            if self._checker:
                self._checker.requests(number, *changed)
        offered = s.load.points_per_round
        admitted = self._admit(number, offered)
        view, true_s = self._work(number, admitted)
        if self._checker:
            self._checker.before_close(number, view, driver)
        driver.collect(view)
        if self._checker:
            self._checker.after_close(number, view, driver)
        self._moved = 0
        decision_s, changes, reason = self._decide(number, view)
        return Row(
            round=number,
            offered=offered,
            admitted=admitted,
            backlog=self._backlog,
            units_per_s=admitted * len(self._query_table.live_ids()) / s.round_s,
            busiest_s=float(true_s.max()),
            mean_s=float(true_s.mean()),
            moved_queries=self._moved,
            message_bytes=driver.bytes_sent,
            epoch=self.plan.epoch,
            partitions=len(self.plan.partitions),
            changes=changes,
            reason=reason,
            model_error=driver.error,
            decision_s=decision_s,
        )

    def _lose_machine(self, machine: int) -> None:
        """Restart a machine: it drops its queue and loads its queries again."""
        self._driver.lose_machine(machine)
        held = self.plan.of_machine(machine)
        self._queue_s[machine] = 0.0
        self._load([machine] * len(held), held)

    def _load(self, machines: Sequence[int], partitions: Sequence[Partition]) -> int:
        """Load the queries of partitions on machines, pair by pair; return their number."""
        rects = np.array([p.bounds for p in partitions], np.int64).reshape(-1, 4)
        counts = self._query_table.counts(rects)
        seconds = counts * self._scenario.costs.per_query_moved / self._capacity
        np.add.at(self._queue_s, np.array(machines, np.int64), seconds)
        return int(counts.sum())

    def _admit(self, number: int, offered: int) -> int:
        """Admit as many points as the fullest queue allows: it stops the source."""
        s = self._scenario
        unit_s = s.costs.per_point + s.costs.per_check * self._query_table.over
        weighted_s = (self._source.weights(number) * unit_s).reshape(-1)
        slowness = s.faults.slowness(number, s.machines) / self._capacity
        per_point_s = self._slots.shares(weighted_s) * slowness
        fixed_s = s.costs.per_partition * self._slots.held * slowness
        free_s = s.round_s * (1.0 + _QUEUE_ROUNDS) - self._queue_s - fixed_s
        waiting = offered + self._backlog
        loaded = per_point_s > 0
        allowed = (free_s[loaded] / per_point_s[loaded]).min(initial=float(waiting))
        admitted = min(waiting, max(int(allowed), int(_ADMITTED_SHARE_MIN * offered), 1))
        self._backlog = waiting - admitted
        return admitted

    def _work(self, number: int, admitted: int) -> tuple[SimulatedRound, Floats]:
        """Distribute the points and do the work; return observations and true seconds."""
        s = self._scenario
        points = self._slots.distribute(
            CellCounts.of(self._source.points(number, admitted)), number
        )
        over = self._query_table.over.reshape(-1)[points.cells]
        cost = points.counts * (s.costs.per_point + s.costs.per_check * over)
        work = points.by_machine(cost, s.machines) + s.costs.per_partition * self._slots.held
        true_s = work * s.faults.slowness(number, s.machines) / self._capacity
        random = np.random.default_rng([s.seed, number, _NOISE])
        busy_s = true_s * np.exp(s.noise * random.standard_normal(s.machines))
        self._queue_s = np.maximum(self._queue_s + busy_s - s.round_s, 0.0)
        slowest_s = float(busy_s.max())
        rate = admitted / slowest_s if slowest_s else 0.0
        return SimulatedRound(self.plan, points, self._slots.held, busy_s, rate), true_s

    def _decide(self, number: int, view: SimulatedRound) -> tuple[float, int, str]:
        """Decide and change the plan, with a crash of the coordinator if the scenario has one."""
        lost = self._scenario.faults.coordinator_lost(number)
        if lost is Moment.BEFORE_DECISION:
            self._lose_coordinator()
            return 0.0, 0, "coordinator lost"
        start_s = self._clock() if self._clock else 0.0
        decision = self._driver.decide(view)
        decision_s = self._clock() - start_s if self._clock else 0.0
        if lost is Moment.BEFORE_WRITE:
            self._lose_coordinator()
            return decision_s, 0, "coordinator lost with its decision"
        changes = decision.changes if isinstance(decision, Rebalance) else ()
        if changes:
            self._change(number, changes)
        if lost is Moment.AFTER_WRITE:
            self._lose_coordinator()
        return decision_s, len(changes), decision.reason

    def _lose_coordinator(self) -> None:
        """Restore the plan from its JSON data."""
        self.plan = Plan.from_json(json.loads(json.dumps(self.plan.to_json())))
        self._driver.lose_coordinator()

    def _change(self, number: int, changes: tuple[Change, ...]) -> None:
        before, self.plan = self.plan, apply_changes(self.plan, changes)
        self._slots = PlanSlots(self.plan)
        by_id = {p.partition_id: p for p in self.plan.partitions}
        loads = [(m, by_id[k]) for m, ids in arrivals(before, self.plan).items() for k in ids]
        self._moved = self._load([m for m, _ in loads], [p for _, p in loads])
        per_query_s = self._scenario.costs.per_query_moved / self._capacity
        self._driver.changed(changes, per_query_s if self._moved else 0.0)
        if self._checker:
            self._checker.changed(number, before, self.plan, changes, self._moved)
