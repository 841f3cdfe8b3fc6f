"""Scenarios and traces of simulated executors: input and output, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from roost.dataflow.buckets import BUCKETS
from roost.dataflow.loads import HeavyKey
from roost.elastic import ElasticDecision, ElasticRules, GroupSnapshot
from roost.model.arrays import Floats
from roost.sim.load_curves import Curve


@dataclass(frozen=True, slots=True)
class ExecutorFaults:
    """What can go wrong with executors; probabilities are of one request.

    ``available`` limits how many the cluster has. ``driver_lost`` are rounds after which the driver
    restarts with what was recorded.
    """

    failing: float = 0.0
    late: float = 0.0
    late_factor: float = 10.0
    deaths: tuple[float, ...] = ()  # clock times
    available: int | None = None
    driver_lost: tuple[int, ...] = ()


EVEN = ((0.0, np.full(BUCKETS, 1.0 / BUCKETS)),)


@dataclass(frozen=True)
class ExecutorScenario:
    """Complete input of a simulation.

    Parameters
    ----------
    load
        In executors, by clock.
    weights
        Share of each bucket in the load, from a clock time on.
    keys
        Heavy keys that the engine would report.
    required
        Executors that other policies need, by policy, at a clock time, with a layout of so many.
    tasks
        Tasks of a batch if their number is fixed, as Spark's; otherwise one for each slot.
    paced
        Whether policies may count arrivals.
    noise
        Standard deviation of the logarithm of the load of an interval.
    """

    load: Curve
    rules: ElasticRules
    seconds: float
    executors: int = 1
    weights: tuple[tuple[float, Floats], ...] = field(default=EVEN, repr=False)
    keys: tuple[HeavyKey, ...] = ()
    required: Callable[[float, int], Mapping[str, int]] = lambda clock, executors: {}
    batch_s: float = 2.0
    round_s: float = 10.0
    provision_s: float = 3.0
    overhead_s: float = 0.1
    slots: int = 1
    tasks: int | None = None
    paced: bool = True
    noise: float = 0.0
    faults: ExecutorFaults = field(default_factory=ExecutorFaults)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """One round: what was measured, the decision, and the executors after it."""

    clock: float
    load: float
    group: GroupSnapshot
    planned: int
    present: int
    requested: int
    decision: ElasticDecision
    verdict: str  # of the arbiter


@dataclass(frozen=True)
class ExecutorTrace:
    """Result of a simulation; ``delays`` are seconds from the end of an interval to its results."""

    scenario: ExecutorScenario
    rows: tuple[ExecutorRow, ...]
    delays: Floats
    executor_s: float
    unplanned: int  # executors that arrived when they were not needed any more, and were released
    started_hours: int  # of all executors, each from its registration on

    def decisions(self, *kinds: type) -> list[ElasticDecision]:
        """Return the decisions of some kinds, in order."""
        return [row.decision for row in self.rows if isinstance(row.decision, kinds)]

    @property
    def sizes(self) -> list[int]:
        """The planned sizes, without repetitions."""
        found = [self.scenario.executors]
        found += [row.planned for row in self.rows]
        return [size for k, size in enumerate(found) if k == 0 or size != found[k - 1]]

    @property
    def executor_hours(self) -> float:
        """Hours of all executors, from registration until they are gone."""
        return self.executor_s / 3_600.0

    @property
    def late_batches(self) -> int:
        """Intervals whose results came more than an interval later than they should have."""
        return int((self.delays > 2.0 * self.scenario.batch_s).sum())
