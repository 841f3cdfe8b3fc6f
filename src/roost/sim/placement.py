"""Simulated operators on executor groups: placement policies against queues.

Rows arrive at the first operators and wait in the queue of each operator that they pass. In a tick,
a group has as many seconds of work as executors, and divides them evenly among the operators that
have rows waiting; what one does not need is for the others. So throughput is never given: it
results from costs, mapping and executors. A row passes one operator in a tick.

At the end of a round, loads are computed from what an engine measures: rows that arrived, rows in
and out of each operator, and its busy seconds. A new mapping holds from the next tick on. Rows that
wait move with their operator, and state is not moved, because any executor reads it.

Executors that are requested arrive as those of :mod:`roost.sim.executors`. Network and memory are
not simulated. A seed determines every result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roost.elastic import Provision, Release, StageLoad
from roost.elastic.placement import (
    Algorithm2,
    ExecutorGroup,
    LoadSeries,
    Place,
    PlacementDecision,
    PlacementPolicy,
    PlacementSnapshot,
    SizeDecision,
)
from roost.model.arrays import Floats
from roost.sim.executor_scenario import ExecutorFaults
from roost.sim.executors import arrival_s
from roost.sim.load_curves import Curve


@dataclass(frozen=True, slots=True)
class SimulatedOperator:
    """An operator: seconds of a row, the operators before it, and rows out for each row in.

    Without ``inputs`` it reads the source. ``part`` is the share of its inputs' rows that it
    receives, over time, for operators whose loads do not rise and fall together.
    """

    name: str
    cost_s: float
    inputs: tuple[str, ...] = ()
    selectivity: float = 1.0
    part: Curve | None = field(default=None, repr=False)
    state_bytes: float = 0.0


@dataclass(frozen=True)
class PlacementScenario:
    """Complete input of a simulation.

    Parameters
    ----------
    operators
        In an order in which inputs come before the operators that read them. The last one's input
        is the throughput, divided by the selectivities before it.
    groups, mapping
        At the beginning; without a mapping, the policy makes the first one.
    rate
        Rows of the source in a second.
    policy, sizes
        Without them, operators remain in their groups, and groups have their size.
    queue_s
        Length of a queue, in seconds that its group would need for it. An operator stops while a
        queue after it is full, so rows that cannot be processed wait at the source.
    noise
        Standard deviation of the logarithm of the rows that arrive in a tick.
    """

    operators: tuple[SimulatedOperator, ...]
    groups: tuple[ExecutorGroup, ...]
    mapping: Mapping[str, str]
    rate: Curve = field(repr=False)
    seconds: float
    policy: PlacementPolicy | None = None
    sizes: Algorithm2 | None = None
    round_s: float = 30.0
    tick_s: float = 1.0
    provision_s: float = 60.0
    queue_s: float = 5.0
    noise: float = 0.0
    faults: ExecutorFaults = field(default_factory=ExecutorFaults)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """One round: what was measured, the decisions, and the mapping after them."""

    clock: float
    snapshot: PlacementSnapshot
    decision: PlacementDecision | None
    sizes: Mapping[str, SizeDecision]
    mapping: Mapping[str, str]


@dataclass(frozen=True)
class PlacementTrace:
    """Result of a simulation, by tick.

    Rows of the source that arrived and that were completed, in a second; and by group its executors
    and their utilisation.
    """

    scenario: PlacementScenario
    rows: tuple[PlacementRow, ...]
    arrived: Floats
    completed: Floats
    executors: Mapping[str, Floats]
    utilisation: Mapping[str, Floats]

    @property
    def mappings(self) -> list[Mapping[str, str]]:
        """Return the mappings in order, without repetitions."""
        found: list[Mapping[str, str]] = [dict(self.scenario.mapping)]
        for row in self.rows:
            if dict(row.mapping) != found[-1]:
                found.append(dict(row.mapping))
        return found

    def throughput(self, seconds: float) -> float:
        """Return the mean throughput at the end, for so many seconds."""
        ticks = max(round(seconds / self.scenario.tick_s), 1)
        return float(self.completed[-ticks:].mean())


def simulate_placement(scenario: PlacementScenario) -> PlacementTrace:
    """Run a scenario.

    Examples
    --------
    >>> from roost.sim.load_curves import step
    >>> operators = (SimulatedOperator("a", 0.01), SimulatedOperator("b", 0.02, ("a",)))
    >>> group = (ExecutorGroup("all", 3),)
    >>> everywhere = {"a": "all", "b": "all"}
    >>> trace = simulate_placement(
    ...     PlacementScenario(operators, group, everywhere, step(90.0, 900.0, 300.0), 600.0)
    ... )
    >>> round(float(trace.completed[200])), round(trace.throughput(60.0))
    (90, 100)
    """
    return _World(scenario).run()


class _World:
    """State of a running simulation."""

    def __init__(self, scenario: PlacementScenario) -> None:
        s = self._s = scenario
        self._random = np.random.default_rng(s.seed)
        self._ticks = round(s.seconds / s.tick_s)
        clocks: Floats = np.asarray((np.arange(self._ticks) + 0.5) * s.tick_s)
        rate = np.asarray(s.rate(clocks), np.float64)
        if s.noise:
            rate = rate * np.exp(s.noise * self._random.standard_normal(self._ticks))
        self._rate = rate
        self._number = {one.name: k for k, one in enumerate(s.operators)}
        self._inputs = [[self._number[name] for name in one.inputs] for one in s.operators]
        self._readers = [
            [j for j, inputs in enumerate(self._inputs) if k in inputs]
            for k in range(len(s.operators))
        ]
        self._parts = [
            np.ones(self._ticks) if one.part is None else np.asarray(one.part(clocks), np.float64)
            for one in s.operators
        ]
        self._costs = [one.cost_s for one in s.operators]
        self._queues = [0.0] * len(s.operators)
        self._coming = [0.0] * len(s.operators)  # rows that inputs emitted in the tick before
        self._mapping = dict(s.mapping)
        self._present = {group.name: group.executors for group in s.groups}
        self._requests: dict[str, list[float]] = {group.name: [] for group in s.groups}
        self._deaths = deque(sorted(s.faults.deaths))
        self._ratios = [1.0] * len(s.operators)  # measured rows out for a row in
        self._series = LoadSeries()
        self._rows: list[PlacementRow] = []
        self._start_round()

    def run(self) -> PlacementTrace:
        """Run all ticks."""
        s = self._s
        completed = np.zeros(self._ticks)
        names = [group.name for group in s.groups]
        executors, busy = ({name: np.zeros(self._ticks) for name in names} for _ in range(2))
        every = max(round(s.round_s / s.tick_s), 1)
        # Rows of the last operator for a row of the source, apart from parts that vary.
        before_last = self._throughput_scale()
        if not self._mapping and s.policy is not None:
            self._first_mapping()
        for tick in range(self._ticks):
            self._arrivals(tick * s.tick_s)
            done = self._tick(tick, busy)
            completed[tick] = done[-1] / before_last / s.tick_s
            for name in names:
                executors[name][tick] = self._present[name]
            if (tick + 1) % every == 0:
                self._end_round((tick + 1) * s.tick_s)
        return PlacementTrace(s, tuple(self._rows), self._rate, completed, executors, busy)

    def _throughput_scale(self) -> float:
        scales: list[float] = []
        for operator, inputs in zip(self._s.operators, self._inputs, strict=True):
            into = sum(scales[k] * self._s.operators[k].selectivity for k in inputs)
            scales.append(into if inputs else 1.0)
            assert all(k < len(scales) for k in inputs), operator.name
        return scales[-1]

    # ------------------------------------------------------------------ work

    def _tick(self, tick: int, busy: dict[str, Floats]) -> list[float]:
        """Process one tick; returns the rows that each operator processed."""
        s = self._s
        rows = self._rate[tick] * s.tick_s
        for k, inputs in enumerate(self._inputs):
            into = (self._coming[k] if inputs else rows) * self._parts[k][tick]
            self._queues[k] += into
            self._parts_in[k] += self._coming[k] if inputs else rows
            self._rows_in[k] += into
        self._arrived += rows
        done = [0.0] * len(s.operators)
        for name, executors in self._present.items():
            members = [self._number[o] for o, group in self._mapping.items() if group == name]
            used = self._divide(members, executors * s.tick_s, done)
            busy[name][tick] = used / (executors * s.tick_s) if executors else 0.0
        self._coming = [0.0] * len(s.operators)
        for k, inputs in enumerate(self._inputs):
            for before in inputs:
                self._coming[k] += done[before] * s.operators[before].selectivity
        for k, rows_done in enumerate(done):
            self._rows_done[k] += rows_done
            self._busy_s[k] += rows_done * self._costs[k]
            self._rows_out[k] += rows_done * s.operators[k].selectivity
        return done

    def _divide(self, members: Sequence[int], work_s: float, done: list[float]) -> float:
        """Divide the seconds of a group evenly among its operators; returns the seconds used."""
        ready = {k: min(self._queues[k], self._room(k)) for k in members}
        needs = sorted((rows * self._costs[k], k) for k, rows in ready.items())
        left_s = work_s
        for place, (need_s, k) in enumerate(needs):
            used_s = min(need_s, left_s / (len(needs) - place))
            done[k] = used_s / self._costs[k] if used_s < need_s else ready[k]
            self._queues[k] -= done[k]
            left_s -= used_s
        return work_s - left_s

    def _room(self, k: int) -> float:
        """Return the rows that an operator may process before the queues after it are full."""
        room = math.inf
        for j in self._readers[k]:
            executors = self._present[self._mapping[self._s.operators[j].name]]
            limit = self._s.queue_s * executors / self._costs[j]
            room = min(room, max(limit - self._queues[j], 0.0))
        return room / self._s.operators[k].selectivity

    # ------------------------------------------------------------------ executors

    def _arrivals(self, clock: float) -> None:
        """Add the executors that have arrived, and lose those that die now."""
        for name, requests in self._requests.items():
            here = [one for one in requests if one <= clock]
            self._requests[name] = [one for one in requests if one > clock]
            self._present[name] += len(here)
        while self._deaths and self._deaths[0] <= clock:
            self._deaths.popleft()
            name = max(self._present, key=lambda one: self._present[one])
            if self._present[name] > 1:
                self._present[name] -= 1
                self._request(name, 1, clock)

    def _request(self, name: str, count: int, clock: float) -> None:
        for _ in range(count):
            delay_s = arrival_s(self._s.faults, self._s.provision_s, self._random)
            self._requests[name].append(clock + delay_s)

    def _resize(self, name: str, executors: int, clock: float) -> None:
        """Request executors, or release those that were requested last, then present ones."""
        requests = self._requests[name]
        more = executors - self._present[name] - len(requests)
        self._request(name, max(more, 0), clock)
        while more < 0 and requests:
            requests.remove(max(requests))
            more += 1
        self._present[name] += min(more, 0)

    # ------------------------------------------------------------------ rounds

    def _start_round(self) -> None:
        count = len(self._s.operators)
        self._arrived = 0.0
        self._rows_in, self._rows_out, self._rows_done, self._busy_s, self._parts_in = (
            [0.0] * count for _ in range(5)
        )

    def _measured(self) -> list[StageLoad]:
        """Return what an engine measures of each operator.

        Rows that arrived for it follow from those of the source, and from measured rows out for a
        row in of the operators before it.
        """
        found, rows = [], list[float]()
        for k, inputs in enumerate(self._inputs):
            if self._rows_done[k] > 0.0:
                self._ratios[k] = self._rows_out[k] / self._rows_done[k]
            into = sum(rows[j] * self._ratios[j] for j in inputs) if inputs else self._arrived
            if self._parts_in[k] > 0.0:
                into *= self._rows_in[k] / self._parts_in[k]
            rows.append(into)
            name = self._s.operators[k].name
            found.append(StageLoad(name, into, self._rows_done[k], self._busy_s[k]))
        return found

    def _snapshot(self) -> PlacementSnapshot:
        s = self._s
        operators = self._series.operators({one.name: one.state_bytes for one in s.operators})
        groups = tuple(
            replace(
                group,
                executors=self._present[group.name],
                requested=len(self._requests[group.name]),
            )
            for group in s.groups
        )
        return PlacementSnapshot(operators, groups, dict(self._mapping))

    def _first_mapping(self) -> None:
        """Map operators by their work for a row of the source in a second."""
        rows: list[float] = []
        for inputs in self._inputs:
            into = sum(rows[j] * self._s.operators[j].selectivity for j in inputs)
            rows.append(into if inputs else 1.0)
        stages = [
            StageLoad(one.name, count, 1.0, one.cost_s)
            for one, count in zip(self._s.operators, rows, strict=True)
        ]
        assert self._s.policy is not None
        self._series = LoadSeries().observed(stages, 1.0, 1)
        self._change(self._s.policy.decide(self._snapshot()))
        self._series = LoadSeries()

    def _change(self, decision: PlacementDecision) -> None:
        if isinstance(decision, Place):
            self._mapping |= {move.operator: move.after for move in decision.moves}

    def _end_round(self, clock: float) -> None:
        s = self._s
        self._series = self._series.observed(self._measured(), s.round_s, 1)
        snapshot = self._snapshot()
        decision = None if s.policy is None else s.policy.decide(snapshot)
        sizes = {} if s.sizes is None else dict(s.sizes.decide(snapshot))
        for name, size in sizes.items():
            if isinstance(size, Provision | Release):
                self._resize(name, size.executors, clock)
        if decision is not None:
            self._change(decision)
        self._rows.append(PlacementRow(clock, snapshot, decision, sizes, dict(self._mapping)))
        self._start_round()
