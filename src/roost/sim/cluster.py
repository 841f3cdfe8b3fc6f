"""Simulated cluster: runs a strategy under a load, with given machines and faults.

Problem: balancing needs many machines and many rounds, which a test host does not have. Policies
are pure functions, so they run here unchanged against machines that are a few numbers each.

Model of a machine: the work of a round is the cost of its points, ``per_point + per_check * queries
over the cell`` each, plus ``per_partition`` for each partition, times noise, over its capacity.
Work that exceeds a round waits in the machine's queue. A full queue stops the source, so the
slowest machine limits the input; points that wait at the source are the backlog. A machine that
receives a partition first loads its queries, which is work, too.

Policies observe measured busy seconds and statistics, not these costs. The simulation reads no
clock: a scenario determines its trace. It does not simulate single points, matches, or network
bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from roost.balance.changes import Change, Rebalance, apply_changes, arrivals
from roost.balance.plan import Partition, Plan
from roost.balance.strategies import History, initial_plan
from roost.model.choices import Strategy
from roost.model.space import Grid, Rect
from roost.sim.checks import Checker
from roost.sim.faults import Moment, Network
from roost.sim.policies import Driver, GlobalDriver, RoundView, StaticDriver, SwarmDriver
from roost.sim.scenario import STATIC, STRATEGIES, Row, Scenario, Trace, TrueCosts
from roost.sim.slots import PlanSlots
from roost.sim.workloads import Floats, LoadSource, QueryTable

__all__ = ["STRATEGIES", "Row", "Scenario", "Trace", "TrueCosts", "simulate"]

_NOISE, _NETWORK = 11, 12
# Capacity of a machine's queue, in rounds, before the source must stop.
_QUEUE_ROUNDS = 0.2
# Minimum share of the points that is admitted, so that every round has observations.
_TRICKLE = 0.002


def simulate(
    scenario: Scenario,
    *,
    driver: Callable[[Plan, QueryTable, Network], Driver] | None = None,
    clock: Callable[[], float] | None = None,
) -> Trace:
    """Run a scenario.

    Parameters
    ----------
    scenario
        Scenario to run.
    driver
        Creates a driver in place of that of ``scenario.strategy``.
    clock
        Clock that measures decisions, in seconds.

    Raises
    ------
    InvariantError
        If ``scenario.check`` is set and an invariant is violated; has seed and round.

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
        self,
        scenario: Scenario,
        driver: Callable[[Plan, QueryTable, Network], Driver] | None,
        clock: Callable[[], float] | None,
    ) -> None:
        s = self._scenario = scenario
        assert s.strategy in STRATEGIES, f"strategy {s.strategy} is none of {STRATEGIES}"
        self._clock = clock
        self._source = LoadSource(s.load, s.columns, s.rows, s.seed)
        self._query_table = QueryTable(s.columns, s.rows)
        self._source.requests(0, self._query_table)
        self.plan = self._first_plan()
        self._slots = PlanSlots(self.plan)
        self._capacity = self._capacities()
        network = Network(s.faults, np.random.default_rng([s.seed, _NETWORK]))
        make = driver or self._make_driver
        self._driver = make(self.plan, self._query_table, network)
        self._queue_s = np.zeros(s.machines)
        self._backlog = 0
        self._moved = 0
        self._checker = Checker(s.seed, self.plan, self._query_table, s.fade) if s.check else None

    def _make_driver(self, plan: Plan, query_table: QueryTable, network: Network) -> Driver:
        if self._scenario.strategy == "swarm":
            return SwarmDriver(plan, query_table, network, self._scenario.fade)
        if self._scenario.strategy == "global":
            return GlobalDriver(plan, query_table, network)
        return StaticDriver()

    def _first_plan(self) -> Plan:
        s = self._scenario
        grid = Grid(Rect(0.0, 0.0, 1.0, 1.0), s.columns, s.rows)
        name = s.strategy if s.strategy in STATIC else s.initial
        return initial_plan(Strategy(name), grid, s.machines, History(self._usual_cost_s()))

    def _usual_cost_s(self) -> Floats:
        """Return the true cost of each cell in a round without hotspots, ``(rows, columns)``."""
        s = self._scenario
        points = self._source.usual_weights() * s.load.points_per_round
        return points * (s.costs.per_point + s.costs.per_check * self._query_table.over)

    def _capacities(self) -> Floats:
        s = self._scenario
        if s.capacity is not None:
            return np.broadcast_to(np.asarray(s.capacity, np.float64), (s.machines,)).copy()
        work_s = float(self._usual_cost_s().sum()) + s.costs.per_partition * s.machines
        return np.full(s.machines, work_s / (s.machines * s.round_s * s.utilisation))

    def round(self, number: int) -> Row:
        """Simulate one round: requests, points, decision, plan."""
        s, driver = self._scenario, self._driver
        for machine in s.faults.machines_lost(number):
            self._lose_machine(machine)
        self._apply_requests(number)
        offered = s.load.points_per_round
        admitted = self._admit(number, offered)
        seen, true_s = self._work(number, admitted)
        if self._checker:
            self._checker.before_close(number, seen, driver)
        driver.collect(seen)
        if self._checker:
            self._checker.after_close(number, seen, driver)
        self._moved = 0
        decision_s, changes, reason = self._decide(number, seen)
        mean_s = float(true_s.mean())
        return Row(
            round=number,
            offered=offered,
            admitted=admitted,
            backlog=self._backlog,
            units_per_s=admitted * len(self._query_table.live_ids()) / s.round_s,
            busiest_s=float(true_s.max()),
            mean_s=mean_s,
            imbalance=float(true_s.max()) / mean_s if mean_s else 1.0,
            moved_queries=self._moved,
            moved_bytes=self._moved * s.costs.bytes_per_query,
            message_bytes=driver.bytes_sent,
            epoch=self.plan.epoch,
            partitions=len(self.plan.partitions),
            changes=changes,
            reason=reason,
            model_error=driver.error,
            decision_s=decision_s,
        )

    def _apply_requests(self, number: int) -> None:
        if number == 0:
            return
        new, gone = self._source.requests(number, self._query_table)
        self._driver.requests(self.plan, new, gone)
        if self._checker:
            self._checker.requests(number, new, gone)

    def _lose_machine(self, machine: int) -> None:
        """Restart a machine: it drops its queue and loads its queries again."""
        self._driver.lose_machine(machine)
        held = [p for p in self.plan.partitions if machine in p.machines]
        self._queue_s[machine] = 0.0
        self._load([machine] * len(held), held)

    def _load(self, machines: Sequence[int], partitions: Sequence[Partition]) -> int:
        """Load the queries of partitions on machines, pair by pair; return their number."""
        rects = [(p.column0, p.row0, p.column1, p.row1) for p in partitions]
        counts = self._query_table.counts(np.array(rects, np.int64).reshape(-1, 4))
        owners = np.array(machines, np.int64)
        seconds = counts * self._scenario.costs.per_query_moved / self._capacity[owners]
        np.add.at(self._queue_s, owners, seconds)
        return int(counts.sum())

    def _admit(self, number: int, offered: int) -> int:
        """Admit as many points as the fullest queue allows: it stops the source."""
        s = self._scenario
        unit_s = s.costs.per_point + s.costs.per_check * self._query_table.over
        weighed_s = (self._source.weights(number) * unit_s).reshape(-1)
        slowness = s.faults.slowness(number, s.machines) / self._capacity
        per_point_s = self._slots.shares(weighed_s, s.machines) * slowness
        fixed_s = s.costs.per_partition * self._slots.partitions_held(s.machines) * slowness
        free_s = s.round_s * (1.0 + _QUEUE_ROUNDS) - self._queue_s - fixed_s
        wanted = offered + self._backlog
        loaded = per_point_s > 0
        allowed = (free_s[loaded] / per_point_s[loaded]).min(initial=float(wanted))
        admitted = min(wanted, max(int(allowed), int(_TRICKLE * offered), 1))
        self._backlog = wanted - admitted
        return admitted

    def _work(self, number: int, admitted: int) -> tuple[RoundView, Floats]:
        """Distribute the points and do the work; return observations and true seconds."""
        s = self._scenario
        dealt = self._slots.distribute(self._source.points(number, admitted), number)
        held = self._slots.partitions_held(s.machines)
        over = self._query_table.over.reshape(-1)[dealt.cells]
        cost = dealt.counts * (s.costs.per_point + s.costs.per_check * over)
        work = dealt.by_machine(cost, s.machines) + s.costs.per_partition * held
        true_s = work * s.faults.slowness(number, s.machines) / self._capacity
        random = np.random.default_rng([s.seed, number, _NOISE])
        busy_s = true_s * np.exp(s.noise * random.standard_normal(s.machines))
        self._queue_s = np.maximum(self._queue_s + busy_s - s.round_s, 0.0)
        slowest_s = float(busy_s.max())
        rate = admitted / slowest_s if slowest_s else 0.0
        return RoundView(number, self.plan, dealt, held, busy_s, rate), true_s

    def _decide(self, number: int, seen: RoundView) -> tuple[float, int, str]:
        """Decide and change the plan, with a crash of the coordinator if the scenario has one."""
        lost = self._scenario.faults.coordinator_lost(number)
        if lost is Moment.BEFORE_DECISION:
            self._lose_coordinator()
            return 0.0, 0, "coordinator lost"
        start_s = self._clock() if self._clock else 0.0
        decision = self._driver.decide(seen)
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
        self._driver.lose_coordinator(self.plan)

    def _change(self, number: int, changes: tuple[Change, ...]) -> None:
        before, self.plan = self.plan, apply_changes(self.plan, changes)
        self._slots = PlanSlots(self.plan)
        by_id = {p.partition_id: p for p in self.plan.partitions}
        loads = [(m, by_id[k]) for m, ids in arrivals(before, self.plan).items() for k in ids]
        self._moved = self._load([m for m, _ in loads], [p for _, p in loads])
        per_query_s = self._scenario.costs.per_query_moved / float(self._capacity.mean())
        self._driver.changed(self.plan, changes, per_query_s if self._moved else 0.0)
        if self._checker:
            self._checker.changed(number, before, self.plan, changes, self._moved)
