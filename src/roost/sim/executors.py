"""Simulated executors: an elastic policy sizes a cluster whose batches queue.

A batch begins at the end of its interval, or when the one before ends if that is later, and reads
all intervals that are complete, up to what the largest cluster processes in one. It takes a fixed
time, its rows divided among all slots to read them, and the busiest slot's share of the buckets to
process them. So a queue is never given: it results from the load, the bucket map and the executors
that are there.

Requested executors arrive after a while, late, or never, and all but the last can die. A layout
counts them when all that were requested are present, or when the policy gives up waiting. Data,
network and memory are not simulated. A seed determines every result.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from roost.dataflow.balancing import BucketPlanner, SubqueryLoad
from roost.dataflow.buckets import BucketMap
from roost.dataflow.loads import BucketLoads
from roost.dataflow.moves import MapChange
from roost.elastic import Cannot, Executors, GroupSnapshot, SizePolicy, StageLoad, resized
from roost.elastic.group import RELEASE_S, paid_s, started_hours
from roost.elastic.ring import ring_owners
from roost.runtime.rounds import arbitrate
from roost.runtime.scaling import ELASTIC, ElasticPolicy, GroupRound, size_policy
from roost.sim.executor_scenario import ExecutorFaults, ExecutorRow, ExecutorScenario, ExecutorTrace

READ, KEYED = "read", "aggregate"
# Seconds of a slot for a row: Aggregate by itself (emulated), and on Spark with reading and the
# exchange, as measured by `roost bench operators`.
KEYED_S = 1.0 / 6.0e6
READ_S = 1.0 / 1.3e6 - KEYED_S
KEYED_SHARE = KEYED_S / (READ_S + KEYED_S)
RECOVERY_S = 3.5  # of a batch whose executor dies
MOVE_S = 2e-3  # to read the state of a bucket
ROUNDS_SEEN = 3


def simulate_executors(
    scenario: ExecutorScenario, policy: SizePolicy | None = None
) -> ExecutorTrace:
    """Run a scenario, by the policy that its rules name or by another one.

    Examples
    --------
    >>> from roost.elastic import ElasticRules
    >>> from roost.sim.load_curves import step
    >>> rules = ElasticRules(max=20)
    >>> trace = simulate_executors(ExecutorScenario(step(0.6, 7.2, 60.0), rules, 300.0))
    >>> trace.sizes
    [1, 12]
    """
    return _Cluster(scenario, policy or size_policy(scenario.rules)).run()


def arrival_s(faults: ExecutorFaults, provision_s: float, random: np.random.Generator) -> float:
    """Draw the seconds until a requested executor arrives, which may be infinite."""
    failing, late = random.random(2).tolist()
    if failing < faults.failing:
        return math.inf
    return provision_s * (faults.late_factor if late < faults.late else 1.0)


@dataclass(slots=True)
class _Request:
    """An executor that was requested, and when it arrives."""

    requested: float
    arrives: float


class _Cluster:
    """State of a running simulation."""

    def __init__(self, scenario: ExecutorScenario, policy: SizePolicy) -> None:
        s = self._s = scenario
        self._policy, self._size_policy = ElasticPolicy(policy, {}), policy
        self._random = np.random.default_rng(s.seed)
        self._ticks = round(s.seconds / s.batch_s)
        load = s.load(np.asarray((np.arange(self._ticks) + 0.5) * s.batch_s))
        if s.noise:
            load = load * np.exp(s.noise * self._random.standard_normal(self._ticks))
        # Work that has arrived by the end of each interval, in seconds of a slot.
        work = np.cumsum(load) * (s.batch_s * s.slots)
        self._arrived: list[float] = [0.0, *work.tolist()]
        self._done = 0  # intervals
        self._delays = [0.0] * self._ticks
        self._free_at = 0.0
        self._planned = s.executors
        self._registered = [0.0] * s.executors  # when each present executor was
        self._started_hours = 0
        self._requests: list[_Request] = []
        self._given_up: list[_Request] = []
        self._deaths = sorted(s.faults.deaths)
        self._executor_s = self._counted_to = 0.0
        self._unplanned = 0
        machines, buckets = s.executors * s.slots, s.weights[0][1].size
        owners = ring_owners(machines, buckets)
        self._map = BucketMap(0, machines, tuple(owners.tolist()))
        self._skew = 0
        self._loading_s = 0.0  # of the next batch
        self._loads: tuple[BucketLoads, ...] = ()
        self._rows: list[ExecutorRow] = []
        self._waited_s = 0.0
        self._relayout()
        self._reconcile(0.0)
        self._start_round(0.0)

    # ------------------------------------------------------------------ batches

    def run(self) -> ExecutorTrace:
        """Run batches until all intervals are processed."""
        s = self._s
        while self._done < self._ticks:
            start = max((self._done + 1) * s.batch_s, self._free_at)
            self._arrivals(start)
            if self._skew + 1 < len(s.weights) and s.weights[self._skew + 1][0] <= start:
                self._skew += 1
                self._relayout()
            self._free_at = self._batch(start)
            # After the end of the stream, what waits is processed and nothing is decided.
            if self._opened + s.round_s - 1e-6 <= self._free_at <= s.seconds:
                self._arrivals(self._free_at)
                self._end_round(self._free_at)
        self._count(self._free_at)
        for registered in self._registered:
            self._bill(registered, self._free_at)
        rows, delays = tuple(self._rows), np.array(self._delays)
        hours = self._started_hours
        return ExecutorTrace(s, rows, delays, self._executor_s, self._unplanned, hours)

    def _batch(self, start: float) -> float:
        """Process complete intervals; returns the end."""
        s, first = self._s, self._done
        last = min(int(start / s.batch_s + 1e-9), self._ticks)
        if last > first + 1:
            limit = self._arrived[first] + s.rules.max * s.batch_s * s.slots
            last = max(min(last, bisect_right(self._arrived, limit) - 1), first + 1)
        work_s = (self._arrived[last] - self._arrived[first]) * self._unit
        end = start + s.overhead_s + self._loading_s + work_s
        self._loading_s = 0.0
        while self._deaths and self._deaths[0] < end:
            self._deaths.pop(0)
            if self._present > 1:
                self._count(end)
                self._bill(self._registered.pop(), end)
                self._changed = True
                self._relayout()
                end += RECOVERY_S
        for tick in range(first, last):
            self._delays[tick] = end - (tick + 1) * s.batch_s
        self._done = last
        self._batches += 1
        self._waited_s = max(self._waited_s, work_s * (1.0 - 1.0 / self._waves))
        return end

    def _relayout(self) -> None:
        """Compute how long a second of work takes: tasks run in waves if slots are missing."""
        s, slots = self._s, self._present * self._s.slots
        if s.tasks is not None:
            self._waves = math.ceil(s.tasks / slots)
            self._unit = self._waves / s.tasks
            return
        machines = self._map.machines
        self._waves = math.ceil(machines / slots)
        shares = np.bincount(self._map.owner_array, s.weights[self._skew][1], machines)
        busiest = (1.0 - KEYED_SHARE) / machines + KEYED_SHARE * float(shares.max())
        self._unit = self._waves * busiest

    # ------------------------------------------------------------------ executors

    @property
    def _present(self) -> int:
        return len(self._registered)

    def _bill(self, registered: float, gone: float) -> None:
        self._started_hours += started_hours(registered, gone)

    def _release(self, count: int, clock: float) -> None:
        """Let executors leave: the newest, or those near the end of an hour that is paid."""
        if self._s.rules.by_started_hour:
            self._registered.sort(key=lambda at: -paid_s(at, clock))
        for _ in range(count):
            self._bill(self._registered.pop(), clock + RELEASE_S)
        self._registered.sort()

    def _count(self, clock: float) -> None:
        self._executor_s += self._present * (clock - self._counted_to)
        self._counted_to = clock

    def _arrivals(self, clock: float) -> None:
        """Add the executors that have arrived; change the layout if none is missing."""
        if not self._requests and not self._given_up:
            return
        late = [one for one in self._given_up if one.arrives <= clock]
        for one in late:
            self._given_up.remove(one)
            if self._requests:
                self._requests.pop()
                self._join(one)
            else:
                self._unplanned += 1
        for one in [one for one in self._requests if one.arrives <= clock]:
            self._requests.remove(one)
            self._join(one)
        self._resize()

    def _join(self, request: _Request) -> None:
        self._count(max(request.arrives, self._counted_to))
        self._registered.append(self._counted_to)
        self._changed = True
        self._relayout()

    def _reconcile(self, clock: float) -> None:
        """Request executors that are missing; release those that are not needed."""
        s = self._s
        wanted = self._planned + s.rules.spares_beside(self._planned)
        while self._present + len(self._requests) > wanted and self._requests:
            self._give_up([self._requests.pop()])
        if self._present > wanted:
            self._count(clock)
            self._executor_s += (self._present - wanted) * RELEASE_S
            self._release(self._present - wanted, clock)
            self._relayout()
        while self._present + len(self._requests) < wanted:
            self._requests.append(_Request(clock, clock + self._delay()))

    def _give_up(self, requests: list[_Request]) -> None:
        self._given_up += [one for one in requests if math.isfinite(one.arrives)]

    def _delay(self) -> float:
        """Return the seconds until a requested executor arrives, which may be infinite."""
        s, faults = self._s, self._s.faults
        coming = sum(math.isfinite(one.arrives) for one in self._requests)
        full = faults.available is not None and self._present + coming >= faults.available
        delay_s = arrival_s(faults, s.provision_s, self._random)
        return math.inf if full else delay_s

    def _resize(self) -> None:
        """Give the layout the planned size, if all these executors are present."""
        s, machines = self._s, self._planned * self._s.slots
        if s.tasks is not None or machines == self._map.machines or self._present < self._planned:
            return
        change = resized(replace(self._routing(), machines=machines), BucketPlanner())
        assert isinstance(change, MapChange), change
        self._move(change)
        self._changed = True

    def _move(self, change: MapChange) -> None:
        """Change the bucket map; the next batch reads the state of the buckets that move."""
        owners = list(self._map.owners)
        for bucket, machine in change.owners.items():
            owners[bucket] = machine
        machines = change.machines or self._map.machines
        self._map = replace(
            self._map, epoch=self._map.epoch + 1, machines=machines, owners=tuple(owners)
        )
        arriving = np.bincount(list(change.owners.values()), minlength=1)
        self._loading_s += float(arriving.max()) * MOVE_S
        self._relayout()

    # ------------------------------------------------------------------ rounds

    def _start_round(self, clock: float) -> None:
        self._opened, self._first = clock, self._done
        self._before = self._arrived_at(clock)
        self._batches, self._waited_s, self._changed = 0, 0.0, False

    def _arrived_at(self, clock: float) -> float:
        place = min(clock / self._s.batch_s, float(self._ticks))
        tick = min(int(place), self._ticks - 1)
        first, second = self._arrived[tick : tick + 2]
        return first + (place - tick) * (second - first)

    def _routing(self) -> SubqueryLoad:
        """Return the load of the buckets in the last rounds; at first, of equal buckets."""
        buckets = self._map.buckets
        loads = self._loads or (
            BucketLoads(0, 1.0, np.ones(buckets), np.ones(buckets), np.ones(buckets)),
        )
        return SubqueryLoad(
            KEYED, self._map, self._map.machines, loads, np.full(buckets, MOVE_S), operator=KEYED
        )

    def _measured(self, clock: float) -> GroupSnapshot:
        """Return what an engine would measure of the round."""
        s, seconds = self._s, clock - self._opened
        arrived = self._arrived_at(clock) - self._before
        work = self._arrived[self._done] - self._arrived[self._first]
        rate = 1.0 / (READ_S + KEYED_S)  # rows of a second of work
        stages = tuple(
            StageLoad(name, arrived * rate, work * rate, work * share)
            for name, share in ((READ, 1.0 - KEYED_SHARE), (KEYED, KEYED_SHARE))
        )
        part = work * s.weights[self._skew][1]
        loads = BucketLoads(
            self._batches,
            seconds,
            part * rate,
            part * KEYED_SHARE,
            np.ones(self._map.buckets),
            keys=s.keys,
        )
        self._loads = (*self._loads, loads)[-ROUNDS_SEEN:]
        oldest = min((one.requested for one in self._requests), default=clock)
        have = Executors(self._planned, len(self._requests), self._present, clock - oldest)
        return GroupSnapshot(
            clock,
            seconds,
            self._batches,
            s.slots,
            have,
            not self._changed and self._present >= self._planned,
            stages,
            (self._arrived_at(clock) - self._arrived[self._done]) * rate,
            s.batch_s,
            s.paced,
            (self._routing(),) if s.tasks is None else (),
            s.required(clock, self._map.machines // s.slots),
            s.provision_s,
            s.tasks or self._map.machines,
            self._waited_s,
        )

    def _end_round(self, clock: float) -> None:
        s, group = self._s, self._measured(clock)
        (verdict,), decided = arbitrate(GroupRound(group, s.rules), [self._policy])
        if len(self._rows) in s.faults.driver_lost:
            saved = json.loads(json.dumps(verdict.proposal.memory))
            self._policy = ElasticPolicy(self._size_policy, saved)
        self._carry_out(clock, decided)
        self._start_round(clock)
        load = sum(stage.arrived for stage in group.stages[:1]) * (READ_S + KEYED_S)
        load /= group.seconds * s.slots
        self._rows.append(
            ExecutorRow(
                clock,
                load,
                replace(group, routings=()),  # large, and not needed any more
                self._planned,
                self._present,
                len(self._requests),
                decided.accepted[ELASTIC],
                verdict.verdict,
            )
        )

    def _carry_out(self, clock: float, decided: GroupRound) -> None:
        """Carry out a decision before the next batch."""
        for change in decided.changes:
            self._move(change)
        if isinstance(decided.accepted[ELASTIC], Cannot) and self._present < self._planned:
            self._give_up(self._requests)
            self._requests = []
        self._planned = decided.planned
        self._resize()
        self._reconcile(clock)
        self._resize()
