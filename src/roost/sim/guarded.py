"""Simulated cluster whose queries come from users, some of them malicious, with or without guard.

The cluster and the policies are those of ``cluster.py`` and ``policies.py``. A driver wraps the
strategy's own and simulates the users: before each round of the balancer it generates requests of a
world of parties (``attack.py``), applies those that the guard admits, and passes them on. When the
strategy changes the plan, it reports the hot partition to the guard; every ``detection_rounds``
rounds it closes a round of detection.

Under quarantine the strategy decides as if the queries that suspicious users registered since they
were found did not exist. Machines still match and report them, so that costs are calibrated with
the complete load. If the rest of the load is a reason to rebalance, the plan is made for all of it.
A machine that is far busier than the others indicates a hotspot that causes no rebalancing; it is
reported to the guard, too.

The hot partition is the costliest one of the relieved machine, by points times queries over their
cells, which a real driver knows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance.changes import Change, Decision, Rebalance
from roost.balance.plan import Partition, Plan
from roost.guard import DetectorSettings, Guard, GuardDecision, LiveQueries
from roost.guard.sensor import relieved_machine
from roost.sim.attack import Requests, World
from roost.sim.cluster import simulate
from roost.sim.faults import Network
from roost.sim.guarded_result import GuardedResult
from roost.sim.parties import Party
from roost.sim.policies import Driver, GlobalDriver, RoundView, SwarmDriver
from roost.sim.scenario import Scenario
from roost.sim.workloads import Floats, Ids, LoadSource, QueryTable

_SAMPLE = 21
_SAMPLE_SIZE = 20_000
_NEVER = 1 << 30
# A hotspot is said to be made by malicious users if they have this part of the round's new queries.
MADE_BY = 0.2
NEAR = 0.02


@dataclass(frozen=True)
class Defence:
    """Defence against attacks.

    Parameters
    ----------
    guard
        Whether the guard is active.
    quarantine
        Whether new queries of suspicious users are no reason to rebalance.
    evict
        Whether queries of blocked users are terminated.
    settings
        Settings of the detector.
    """

    guard: bool = True
    quarantine: bool = False
    evict: bool = True
    settings: DetectorSettings = field(default_factory=DetectorSettings)


def simulate_guarded(
    scenario: Scenario,
    parties: Sequence[Party],
    defence: Defence = Defence(),  # noqa: B008 - immutable
    *,
    detection_rounds: int = 4,
    clock: Callable[[], float] | None = None,
    restart_at: int | None = None,
    users_seed: int | None = None,
) -> GuardedResult:
    """Run a scenario whose queries come from users.

    Parameters
    ----------
    scenario
        The cluster and its points. The queries of its load are the parties' initial ones; it must
        have no churn and no hotspots with queries.
    parties
        Groups of users that send requests.
    defence
        Defence against attacks.
    detection_rounds
        Balancer's rounds in a round of detection.
    clock
        Clock that measures detections, in seconds.
    restart_at
        Balancer's round before which the guard is serialised and restored.
    users_seed
        Seed of the users and the guard, if not the scenario's: other users on the same cluster.
    """
    assert scenario.load.churn == 0, "requests come from parties"
    source = LoadSource(scenario.load, scenario.columns, scenario.rows, scenario.seed)
    data = _sample(source.usual_weights(), scenario.seed)
    fresh = [party.scaled(1.0) for party in parties]
    seed = scenario.seed if users_seed is None else users_seed
    world = World(fresh, data, seed, scenario.round_s, scenario.load.query_side)
    drivers: list[_GuardedDriver] = []

    def make(plan: Plan, query_table: QueryTable, network: Network) -> Driver:
        users = _Users(world, query_table, scenario.load.queries)
        inner = _strategy(scenario, plan, query_table, network)
        drivers.append(
            _GuardedDriver(seed, users, inner, defence, detection_rounds, clock, restart_at)
        )
        return drivers[-1]

    trace = simulate(scenario, driver=make)
    (driver,) = drivers
    names = np.array(world.names)
    return GuardedResult(
        trace,
        tuple(driver.decisions),
        tuple(driver.hotspots),
        frozenset(names[world.malicious].tolist()),
        driver.guard.blocked,
        tuple(driver.detection_s),
        detection_rounds,
    )


def _strategy(scenario: Scenario, plan: Plan, query_table: QueryTable, network: Network) -> Driver:
    if scenario.strategy == "swarm":
        return SwarmDriver(plan, query_table, network, scenario.fade)
    assert scenario.strategy == "global", "an attack needs a strategy that rebalances"
    return GlobalDriver(plan, query_table, network)


def _sample(weights: Floats, seed: int) -> Floats:
    """Draw points in the unit square by the weights of cells."""
    random = np.random.default_rng([seed, _SAMPLE])
    rows, columns = weights.shape
    flat = weights.reshape(-1)
    cells = random.choice(flat.size, _SAMPLE_SIZE, p=flat / flat.sum())
    row, column = np.divmod(cells, columns)
    within = random.random((2, _SAMPLE_SIZE))
    return np.column_stack([(column + within[0]) / columns, (row + within[1]) / rows])


class _Users:
    """User and round of each query; applies requests to the query table."""

    def __init__(self, world: World, query_table: QueryTable, scattered: int) -> None:
        self.world = world
        self.query_table = query_table
        self.names = pa.array(world.names)
        begun = world.begin()
        # The initial plan of the cluster was made for the first parties' queries.
        placed = begun.boxes[scattered:]
        assert len(begun) >= scattered == query_table.size, (
            "the load's queries are the first parties'"
        )
        self._id_of = np.concatenate(
            [np.arange(scattered), query_table.register(self._cells(placed))]
        )
        self.codes = begun.codes.copy()
        # Before the first round, and long ago.
        self.rounds = np.full(len(begun), -100, np.int64)

    def _cells(self, boxes: Floats) -> NDArray[np.int32]:
        """Return the cells of boxes: on average as many as their sides have, and at least one.

        The initial load has the same sizes. If later queries covered more cells, the cluster would
        become overloaded without any attack.
        """
        sides = np.array([self.query_table.columns, self.query_table.rows])
        low, high = boxes[:, :2] * sides, boxes[:, 2:] * sides
        middle, reach = (low + high) / 2, np.maximum(high - low - 1.0, 0.0) / 2
        corners = np.hstack([middle - reach, middle + reach])
        cells: NDArray[np.int32] = np.clip(corners, 0, np.tile(sides - 1, 2)).astype(np.int32)
        return cells

    def take(self, requests: Requests, admitted: NDArray[np.bool_], number: int) -> tuple[Ids, Ids]:
        """Apply the admitted requests of a block; return the ids registered and terminated."""
        new = requests.registers & admitted
        ids = self.query_table.register(self._cells(requests.boxes[new]))
        known = np.full(int(requests.queries.max(initial=-1)) + 1, -1)
        known[: len(self._id_of)] = self._id_of[: len(known)]
        self._id_of = known if len(known) > len(self._id_of) else self._id_of
        self._id_of[requests.queries[new]] = ids
        self.codes = np.append(self.codes, requests.codes[new])
        self.rounds = np.append(self.rounds, np.full(len(ids), number))
        # Refused queries do not exist, and evicted ones are terminated.
        gone = self._id_of[requests.queries[~requests.registers & admitted]]
        gone = gone[gone >= 0]
        gone = gone[self.query_table.live[gone]]
        self.query_table.end(gone)
        return ids, gone

    def of(self, names: frozenset[str]) -> NDArray[np.bool_]:
        """Return whether each query belongs to one of these users."""
        return np.isin(self.world.names, list(names))[self.codes]

    def since(self, rounds: Mapping[str, int]) -> Ids:
        """Return the ids of live queries that users registered after a round, given by name."""
        after = np.array([rounds.get(name, _NEVER) for name in self.world.names])
        return np.flatnonzero(self.query_table.live & (self.rounds > after[self.codes]))

    def live(self) -> LiveQueries:
        """Return all live queries, for the sensor."""
        ids = self.query_table.live_ids()
        return LiveQueries(
            self.names, self.codes[ids], self.rounds[ids], self.query_table.ranges[ids]
        )


class _GuardedDriver:
    """Wraps a strategy's driver with users and a guard."""

    def __init__(
        self,
        seed: int,
        users: _Users,
        inner: Driver,
        defence: Defence,
        detection_rounds: int,
        clock: Callable[[], float] | None,
        restart_at: int | None,
    ) -> None:
        self._users = users
        self._inner = inner
        self._defence = defence
        self._detection_rounds = detection_rounds
        self._clock = clock
        self._restart_at = restart_at
        self._position = 0
        self._tick = 0
        self.bytes_sent = 0
        self.guard = Guard(seed, defence.settings)
        self.decisions: list[GuardDecision] = []
        self.hotspots: list[tuple[int, int | None]] = []
        self.detection_s: list[float] = []

    @property
    def error(self) -> float:
        """Relative error of the strategy's model."""
        return self._inner.error

    def lose_machine(self, machine: int) -> None:
        """Delegate to the strategy."""
        self._inner.lose_machine(machine)

    def lose_coordinator(self, plan: Plan) -> None:
        """Delegate to the strategy; the guard's state is durable."""
        self._inner.lose_coordinator(plan)

    def changed(self, after: Plan, changes: Sequence[Change], per_query_s: float) -> None:
        """Delegate to the strategy."""
        self._inner.changed(after, changes, per_query_s)

    def requests(self, plan: Plan, new: Ids, gone: Ids) -> None:
        """Generate the users' requests, and pass the admitted ones to the strategy."""
        assert len(new) == len(gone) == 0, "requests come from parties"
        self._tick += 1
        if self._tick == self._restart_at:
            self.guard = Guard.from_bytes(self.guard.to_bytes(), self._defence.settings)
        requests = self._users.world.next()
        admitted = np.ones(len(requests), np.bool_)
        if self._defence.guard:
            names = self._users.names.take(pa.array(requests.codes))
            admitted = self.guard.on_requests(names, requests.registers, self._position)
        self._position += len(requests)
        begun, ended = self._users.take(requests, admitted, self.guard.round)
        self._inner.requests(plan, begun, np.concatenate([ended, self._evicted()]))

    def _evicted(self) -> Ids:
        """Terminate the queries of blocked users."""
        if not (self._defence.evict and self.guard.blocked):
            return np.empty(0, np.int64)
        ids = np.flatnonzero(self._users.of(self.guard.blocked) & self._users.query_table.live)
        self._users.query_table.end(ids)
        return ids

    def _hidden(self) -> Ids:
        """Return the ids of queries that are no reason to rebalance."""
        if not (self._defence.quarantine and self.guard.quarantine):
            return np.empty(0, np.int64)
        return self._users.since(self.guard.quarantine)

    def collect(self, seen: RoundView) -> None:
        """Delegate to the strategy."""
        self._inner.collect(seen)

    def decide(self, seen: RoundView) -> Decision:
        """Delegate; report hotspots to the guard, and close its round when due."""
        hidden = self._hidden()
        decision = self._decided(seen, hidden)
        self.bytes_sent = self._inner.bytes_sent
        if self._defence.guard:
            machine = relieved_machine(seen.plan, decision, seen.busy_s, hiding=len(hidden) > 0)
            if machine is not None:
                self._show(seen, machine)
            if (self._tick + 1) % self._detection_rounds == 0:
                self._detect()
        return decision

    def _decided(self, seen: RoundView, hidden: Ids) -> Decision:
        """Decide whether to rebalance without hidden queries, but plan for all queries."""
        if not len(hidden):
            return self._inner.decide(seen)
        none = np.empty(0, np.int64)
        self._inner.requests(seen.plan, none, hidden)
        decision = self._inner.decide(seen)
        self._inner.requests(seen.plan, hidden, none)
        # Only a strategy without state between rounds can decide twice.
        again = isinstance(decision, Rebalance) and isinstance(self._inner, GlobalDriver)
        return self._inner.decide(seen) if again else decision

    def _show(self, seen: RoundView, machine: int) -> None:
        """Report the costliest partition of a machine to the guard."""
        dealt, query_table = seen.dealt, self._users.query_table
        checks = dealt.counts * query_table.over.reshape(-1)[dealt.cells]
        slots = np.repeat(np.arange(len(dealt.machine)), np.diff(dealt.starts))
        costs = np.bincount(slots, weights=checks, minlength=len(dealt.machine))
        slot = int(np.where(dealt.machine == machine, costs, -1.0).argmax())
        p = seen.plan.partitions[dealt.partition[slot]]
        rect = np.array([[p.column0, p.row0, p.column1, p.row1]])
        self.guard.on_rebalance(rect, self._users.live())
        self.hotspots.append((self._tick, self._maker(p)))

    def _maker(self, p: Partition) -> int | None:
        """Return the target of the attack in a partition, if malicious users made it hot."""
        query_table, world = self._users.query_table, self._users.world
        within = query_table.within(p.column0, p.row0, p.column1, p.row1)
        recent = within[self._users.rounds[within] == self.guard.round]
        theirs = world.malicious[self._users.codes[recent]]
        if not len(recent) or float(theirs.mean()) < MADE_BY:
            return None
        # Queries surround a target, which may be in the adjacent partition.
        sides = np.array([query_table.columns, query_table.rows])
        low, high = np.array([p.column0, p.row0]), np.array([p.column1, p.row1])
        near = NEAR * sides
        for number, place in reversed(list(enumerate(world.targets))):
            if ((place * sides >= low - near) & (place * sides <= high + near)).all():
                return number
        return None

    def _detect(self) -> None:
        start_s = self._clock() if self._clock else 0.0
        self.decisions += self.guard.close_round(self.guard.round, self._position)
        if self._clock:
            self.detection_s.append(self._clock() - start_s)
