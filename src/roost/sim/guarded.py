"""Simulated cluster whose queries come from users, some of them malicious, with or without guard.

A driver wraps that of the strategy and simulates the users: before each round of the balancer it
generates requests of a world of parties (``attack.py``), applies those that the guard admits, and
passes them on. When the strategy changes the plan, it reports the hot partition to the guard: the
costliest one of the relieved machine, by points times queries over their cells, which a real driver
knows as well. After every four rounds it closes a round of detection.

Under quarantine the strategy decides as if the queries that suspicious users registered since they
were found did not exist. Machines still match and report them, so that costs are calibrated with
the complete load. If the rest of the load is a reason to rebalance, the plan is made for all of it.
A machine that is far busier than the others indicates a hotspot that causes no rebalancing; it is
reported to the guard, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance.changes import Change, Decision, Rebalance
from roost.balance.plan import Partition, Plan
from roost.guard import Block, DetectorSettings, Guard, GuardDecision, LiveQueries, Suspect
from roost.guard.sensor import relieved_machines
from roost.model.arrays import Floats, Ints
from roost.sim.attack import Party, Requests, World
from roost.sim.cluster import simulate
from roost.sim.policies import Driver, Network, SimulatedRound, SwarmDriver, strategy_driver
from roost.sim.scenario import Scenario, Trace
from roost.sim.workloads import LoadSource, QueryTable

# Balancer's rounds in a round of detection.
DETECTION_ROUNDS = 4
# Rounds of detection after its second hotspot within which an attack must be blocked.
BLOCK_WITHIN = 2
_SAMPLE = 21
_SAMPLE_SIZE = 20_000
# Malicious users cause a hotspot if they have this share of the round's new queries.
_MALICIOUS_SHARE_MIN = 0.2
# Queries surround a target, which may be in the adjacent partition.
_TARGET_DISTANCE_MAX = 0.02


@dataclass(frozen=True)
class Defence:
    """Defence against attacks.

    With ``quarantine``, new queries of suspicious users are no reason to rebalance; with ``evict``,
    queries of blocked users are terminated.
    """

    guard: bool = True
    quarantine: bool = False
    evict: bool = True
    settings: DetectorSettings = field(default_factory=DetectorSettings)


@dataclass(frozen=True)
class GuardedResult:
    """Result of a guarded simulation.

    ``hotspots`` has the balancer's round of each hotspot, and the target of the attack; None if
    malicious users did not cause it. ``detection_s`` is empty without a clock.
    """

    trace: Trace
    decisions: tuple[GuardDecision, ...]
    hotspots: tuple[tuple[int, int | None], ...]
    malicious: frozenset[str]
    blocked: frozenset[str]
    detection_s: tuple[float, ...]

    @property
    def false_positives(self) -> int:
        """Number of blocked normal users."""
        return len(self.blocked - self.malicious)

    @property
    def missed(self) -> int:
        """Number of malicious users that are not blocked, harmful or not."""
        return len(self.malicious - self.blocked)

    @property
    def false_negatives(self) -> int:
        """Number of malicious users that are not blocked although they caused two hotspots.

        A weaker attack cannot be distinguished from normal users, and causes no rebalancing.
        """
        last = len(self.trace.rows) // DETECTION_ROUNDS - 1
        made = self.hotspot_rounds()
        return self.missed if len(made) > 1 and made[1] + BLOCK_WITHIN <= last else 0

    @property
    def blocked_in(self) -> int | None:
        """Round of detection in which the last malicious user was blocked, None if one is not."""
        left = set(self.malicious)
        for decision in self.decisions:
            if isinstance(decision, Block):
                left -= set(decision.users)
                if not left:
                    return decision.round
        return None

    @property
    def suspected_in(self) -> int | None:
        """Round of detection in which a malicious user was first suspected."""
        found = (d for d in self.decisions if isinstance(d, Suspect | Block))
        return next((d.round for d in found if self.malicious & set(d.users)), None)

    @property
    def attacked_in(self) -> int | None:
        """Balancer's round of the first hotspot that malicious users caused."""
        return next((tick for tick, target in self.hotspots if target is not None), None)

    def hotspot_rounds(self) -> list[int]:
        """Return the round of detection of the first hotspot at each target of the attack."""
        first: dict[int, int] = {}
        for tick, target in self.hotspots:
            if target is not None:
                first.setdefault(target, tick // DETECTION_ROUNDS)
        return list(first.values())

    @property
    def rounds_to_block(self) -> int | None:
        """Rounds of detection from the second hotspot to the last block, None without one.

        Zero is the round of the second hotspot.
        """
        made = self.hotspot_rounds()
        if self.blocked_in is None:
            return None
        return max(self.blocked_in - made[1], 0) if len(made) > 1 else 0


def shares(trace: Trace) -> Floats:
    """Return admitted over offered points by round; above 1 while the backlog shrinks."""
    return trace.column("admitted") / trace.column("offered")


def availability(trace: Trace) -> Floats:
    """Return the share of the offered points of each round that was admitted without delay."""
    return np.minimum(shares(trace), 1.0)


def simulate_guarded(
    scenario: Scenario,
    parties: Sequence[Party],
    defence: Defence = Defence(),  # noqa: B008 - immutable
    *,
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
    restart_at
        Balancer's round before which the guard is serialised and restored.
    users_seed
        Seed of the users and the guard, if not the scenario's: other users on the same cluster.
    """
    assert scenario.load.churn == 0, "requests come from parties"
    assert scenario.strategy in ("swarm", "global"), "an attack needs a strategy that rebalances"
    source = LoadSource(scenario.load, scenario.columns, scenario.rows, scenario.seed)
    data = _sample(source.usual_weights, scenario.seed)
    seed = scenario.seed if users_seed is None else users_seed
    # A party has state, so a run uses copies.
    copies = [party.scaled(1.0) for party in parties]
    world = World(copies, data, seed, scenario.round_s, scenario.load.query_side)
    drivers: list[_GuardedDriver] = []

    def make(plan: Plan, query_table: QueryTable, network: Network) -> Driver:
        users = _Users(world, query_table, scenario.load.queries)
        inner = strategy_driver(plan, query_table, network, scenario)
        guard = Guard(seed, defence.settings)
        drivers.append(_GuardedDriver(guard, users, inner, defence, clock, restart_at))
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
    )


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
        right = len(begun) >= scattered == len(query_table.live)
        assert right, "the load's queries are not the first parties'"
        self._id_of = np.append(np.arange(scattered), query_table.register(self._cells(placed)))
        self.codes = begun.codes.copy()
        # Initial queries count as much older than the first round.
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

    def apply(
        self, requests: Requests, admitted: NDArray[np.bool_], number: int
    ) -> tuple[Ints, Ints]:
        """Apply the admitted requests of a block; return the ids registered and terminated."""
        new = requests.registers & admitted
        ids = self.query_table.register(self._cells(requests.boxes[new]))
        missing = int(requests.queries.max(initial=-1)) + 1 - len(self._id_of)
        self._id_of = np.append(self._id_of, np.full(max(missing, 0), -1))
        self._id_of[requests.queries[new]] = ids
        self.codes = np.append(self.codes, requests.codes[new])
        self.rounds = np.append(self.rounds, np.full(len(ids), number))
        # Refused queries do not exist, and evicted ones are terminated.
        terminated = self._id_of[requests.queries[~requests.registers & admitted]]
        terminated = terminated[terminated >= 0]
        terminated = terminated[self.query_table.live[terminated]]
        self.query_table.end(terminated)
        return ids, terminated

    def since(self, rounds: Mapping[str, float]) -> Ints:
        """Return the ids of live queries that users registered after a round, given by name."""
        if not rounds:
            return np.empty(0, np.int64)
        after = np.array([rounds.get(name, np.inf) for name in self.world.names])
        return np.flatnonzero(self.query_table.live & (self.rounds > after[self.codes]))

    def live(self) -> LiveQueries:
        """Return all live queries, for the sensor."""
        ids = self.query_table.live_ids()
        return LiveQueries(
            self.names, self.codes[ids], self.rounds[ids], self.query_table.ranges[ids]
        )


@dataclass(eq=False)
class _GuardedDriver(Driver):
    """Wraps a strategy's driver with users and a guard."""

    guard: Guard
    users: _Users
    inner: Driver
    defence: Defence
    clock: Callable[[], float] | None
    restart_at: int | None
    position: int = 0
    decisions: list[GuardDecision] = field(default_factory=list)
    hotspots: list[tuple[int, int | None]] = field(default_factory=list)
    detection_s: list[float] = field(default_factory=list)
    registered: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # in the open round

    def lose_machine(self, machine: int) -> None:
        """Delegate to the strategy."""
        self.inner.lose_machine(machine)

    def lose_coordinator(self) -> None:
        """Delegate to the strategy; the guard's state is durable."""
        self.inner.lose_coordinator()

    def changed(self, changes: Sequence[Change], per_query_s: float) -> None:
        """Delegate to the strategy."""
        self.inner.changed(changes, per_query_s)

    def requests(self, registered: Ints, terminated: Ints) -> None:
        """Generate the users' requests, and pass the admitted ones to the strategy."""
        assert len(registered) == len(terminated) == 0, "requests come from parties"
        if self.users.world.tick + 1 == self.restart_at:
            self.guard = Guard.from_bytes(self.guard.to_bytes(), self.defence.settings)
        requests = self.users.world.next()
        admitted = np.ones(len(requests), np.bool_)
        if self.defence.guard:
            names = self.users.names.take(pa.array(requests.codes))
            admitted = self.guard.on_requests(names, requests.registers, self.position)
        self.position += len(requests)
        registered, terminated = self.users.apply(requests, admitted, self.guard.round)
        blocked = self.guard.blocked if self.defence.evict else ()
        evicted = self.users.since(dict.fromkeys(blocked, -np.inf))
        self.users.query_table.end(evicted)
        self.registered = registered
        self.inner.requests(registered, np.concatenate([terminated, evicted]))

    def collect(self, view: SimulatedRound) -> None:
        """Delegate to the strategy."""
        self.inner.collect(view)

    def decide(self, view: SimulatedRound) -> Decision:
        """Delegate; report hotspots to the guard, and close its round when due."""
        hidden = self.users.since(self.guard.quarantine if self.defence.quarantine else {})
        decision = self._decide_without(hidden, view)
        self.bytes_sent, self.error = self.inner.bytes_sent, self.inner.error
        if self.defence.guard:
            hiding = len(hidden) > 0
            for machine in relieved_machines(view.plan, decision, view.busy_s, hiding=hiding):
                self._report_hotspot(view, machine)
            if (self.users.world.tick + 1) % DETECTION_ROUNDS == 0:
                self._detect()
        return decision

    def _decide_without(self, hidden: Ints, view: SimulatedRound) -> Decision:
        """Decide whether to rebalance without hidden queries, but plan for all queries."""
        if not len(hidden):
            return self.inner.decide(view)
        if isinstance(self.inner, SwarmDriver):
            return self.inner.decide(view, hidden, np.isin(hidden, self.registered))
        none = np.empty(0, np.int64)
        self.inner.requests(none, hidden)
        decision = self.inner.decide(view)
        self.inner.requests(hidden, none)
        return self.inner.decide(view) if isinstance(decision, Rebalance) else decision

    def _report_hotspot(self, view: SimulatedRound, machine: int) -> None:
        """Report the costliest partition of a machine to the guard."""
        points, query_table = view.points, self.users.query_table
        costs = points.by_slot(points.counts * query_table.over.reshape(-1)[points.cells])
        slot = int(np.where(points.machine == machine, costs, -1.0).argmax())
        p = view.plan.partitions[points.partition[slot]]
        self.guard.on_rebalance(np.array([p.bounds]), self.users.live())
        self.hotspots.append((self.users.world.tick, self._target(p)))

    def _target(self, p: Partition) -> int | None:
        """Return the target of the attack in a partition, if malicious users made it hot."""
        query_table, world = self.users.query_table, self.users.world
        within = query_table.within(*p.bounds)
        recent = within[self.users.rounds[within] == self.guard.round]
        malicious = world.malicious[self.users.codes[recent]]
        if not len(recent) or float(malicious.mean()) < _MALICIOUS_SHARE_MIN:
            return None
        sides = np.array([query_table.columns, query_table.rows])
        margin = _TARGET_DISTANCE_MAX * sides
        low, high = np.array([p.column0, p.row0]) - margin, np.array([p.column1, p.row1]) + margin
        near = [np.all((low <= sides * at) & (sides * at <= high)) for at in world.targets]
        return max(np.flatnonzero(near).tolist(), default=None)

    def _detect(self) -> None:
        start_s = self.clock() if self.clock else 0.0
        self.decisions += self.guard.close_round(self.guard.round, self.position)
        if self.clock:
            self.detection_s.append(self.clock() - start_s)
