"""The ``global`` strategy: one plan for all machines at once.

The problem: a round-by-round exchange between the highest and the lowest machine needs as many
rounds as there are machines that have to take something, and a plan made afresh for each round
moves all queries for nothing when the load only shivers or swings.

The idea: know the points of every cell, so that a whole plan can be tried on paper. The present
plan is repaired (only the excess moves), by the newest round and then by those before it as well;
where that does not do, the space is divided anew. Each try is judged by what the busiest machine
would have had to do in the rounds seen, and by what has to be loaded; it must beat the present
plan clearly. So a load that swings is met with one plan that is good for both its states.

It does not look ahead: a load that grows or drifts is followed, not foreseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import Decision, NoChange, Rebalance
from roost.balance.plan import Plan
from roost.balance.planner_draft import Draft
from roost.balance.planner_layout import Ground, rects_of
from roost.balance.planner_loops import sum_costs, sum_rects
from roost.workload.aqwa import EulerHistogram

# Repair brings machines to within this of the mean, a step below the tolerance that calls for it.
SLACK = 0.03
# Chance alone lifts the highest of many machines. It comes in twice, with the round and with the
# round that the plan was made by, so that about the root of two lifts are no reason to act.
NOISE_ALLOWED = 1.5
NOISE_LEFT = 0.5
# What is left when nothing more can be moved is shared; that makes room for moving again.
SHARE_TURNS = 2
# Tidying begins at this part of the partitions allowed, with pieces that have less than a trifle
# of a machine's queries; above what is allowed, tidying up more is another try. Only where that
# leaves clutter are machines lifted so far that they have to be repaired again.
TIDY_FROM = 0.5
TRIFLE = 0.05
CLUTTER = 1.25
TIDY_SLACK = 1.25


# What the newest round weighs when a plan is judged, and those before it.
ROUND_WEIGHTS = (0.5, 0.3, 0.2)
# A single round is enough where chance is out of the question: so far above the mean, and so many
# times its lift. Below that, the round before must have been out of balance too.
AT_ONCE = 1.2
NOISE_AT_ONCE = 3.0


@dataclass(frozen=True, eq=False)
class CellLoad:
    """Points of each cell in one round, cells in row-major order."""

    points: NDArray[np.float64]


@dataclass(frozen=True)
class CostRates:
    """What things cost, in seconds.

    Parameters
    ----------
    per_point
        A point, whatever it meets.
    per_check
        A point for each query over its cell.
    per_partition
        A partition in a round.
    per_query_moved
        A query that a machine has to load.
    """

    per_point: float
    per_check: float
    per_partition: float
    per_query_moved: float


def _unit_costs(queries: EulerHistogram, rates: CostRates) -> NDArray[np.float64]:
    """Cost of a point in each cell."""
    unit = queries.per_cell().reshape(-1)
    unit *= rates.per_check
    unit += rates.per_point
    return unit


def machine_loads(
    plan: Plan, load: CellLoad, queries: EulerHistogram, rates: CostRates
) -> NDArray[np.float64]:
    """Seconds of work that a round gives to each machine.

    The owners of a shared partition have equal parts of its points.

    Examples
    --------
    >>> from roost.balance.plan import Partition
    >>> halves = (Partition(0, 0, 0, 1, 1, (0,)), Partition(1, 1, 0, 3, 1, (0, 1)))
    >>> plan = Plan(0, 3, 1, 2, halves, 2)
    >>> rates = CostRates(1.0, 0.0, 0.0, 0.0)
    >>> machine_loads(plan, CellLoad(np.array([5.0, 2.0, 4.0])), EulerHistogram(3, 1), rates)
    array([8., 3.])
    """
    points = np.ascontiguousarray(load.points, np.float64)
    return _loads(plan, points, _unit_costs(queries, rates), rates.per_partition)


def _loads(
    plan: Plan, points: NDArray[np.float64], unit: NDArray[np.float64], overhead: float
) -> NDArray[np.float64]:
    costs = np.empty(len(plan.partitions))
    sum_rects(rects_of(plan), points, unit, plan.columns, costs)
    owners = [p.machines for p in plan.partitions]
    counts = np.fromiter(map(len, owners), np.int64)
    machines = np.fromiter(chain.from_iterable(owners), np.int64)
    loads = np.zeros(plan.machines)
    np.add.at(loads, machines, np.repeat(costs / counts + overhead, counts))
    return loads


def imbalance(loads: NDArray[np.float64]) -> float:
    """Busiest machine's load over the mean; 1 when there is no load at all.

    Examples
    --------
    >>> imbalance(np.array([1.0, 2.0, 3.0]))
    1.5
    """
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0.0 else 1.0


class GlobalPlanner:
    """Decides from the points of every cell; keeps nothing between rounds.

    Parameters
    ----------
    tolerance
        Nothing is done while the busiest machine is within this of the mean, or within what
        chance explains, if that is more.
    gain_min
        A plan must promise to be better by this part.
    horizon_rounds
        Rounds over which the loading of queries is spread when a plan is judged.
    partitions_max
        Partitions a machine, on average, above which a change also tidies up.
    """

    def __init__(
        self,
        *,
        tolerance: float = 1.1,
        gain_min: float = 0.08,
        horizon_rounds: int = 30,
        partitions_max: float = 6.0,
    ) -> None:
        self._tolerance = tolerance
        self._gain_min = gain_min
        self._horizon_rounds = horizon_rounds
        self._partitions_max = partitions_max

    def decide(
        self, plan: Plan, rounds: Sequence[CellLoad], queries: EulerHistogram, rates: CostRates
    ) -> Decision:
        """Look at one to three rounds, the newest last, and change the plan or leave it."""
        if plan.machines == 1:
            return NoChange("one machine")
        unit = _unit_costs(queries, rates)
        points = [np.ascontiguousarray(load.points, np.float64) for load in reversed(rounds)]
        totals = [float(p @ unit) for p in points]
        if not totals or totals[0] <= 0.0:
            return NoChange("no load")
        noise = _noise(points[0], unit, plan.machines)
        # A plan within the tolerance must not be thrown over by one unlucky round.
        most = max(self._tolerance + NOISE_LEFT * noise, 1.0 + SLACK + NOISE_ALLOWED * noise)
        before = imbalance(_loads(plan, points[0], unit, rates.per_partition))
        if before <= most:
            return NoChange("balanced")
        at_once = max(AT_ONCE, 1.0 + NOISE_AT_ONCE * noise)
        if before < at_once and len(points) > 1 and totals[1] > 0.0:
            # The plan may have been another then; what counts is whether this one would have done.
            earlier = imbalance(_loads(plan, points[1], unit, rates.per_partition))
            if earlier <= most:
                return NoChange("out of balance for one round only")
        seen = [(p, totals[0] / total) for p, total in zip(points, totals, strict=True) if total]
        cost = np.zeros((len(seen), plan.rows + 1, plan.columns + 1))
        for sums, (cells, scale) in zip(cost, seen, strict=True):
            sum_costs(cells, unit, scale, sums)
        # Compiled loops count queries for themselves; the sums were settled for the unit costs.
        ground = Ground.of(plan, cost, queries.settle(), rates.per_partition)
        return self._choose(ground, rates, most, 1.0 + SLACK + NOISE_LEFT * noise)

    def _choose(self, ground: Ground, rates: CostRates, most: float, slack: float) -> Decision:
        """Try repairs, and more if they do not do; the best must beat the present plan."""
        present = Draft.of_plan(ground)
        allowed = int(self._partitions_max * ground.plan.machines)
        room = int(CLUTTER * allowed)
        tries = self._repairs(present.copy(), slack)
        if min(draft.count for draft in tries) > allowed:
            tidied = tries[-1].copy()
            tidied.tidy(allowed, slack, math.inf)
            tries.append(tidied)
        if min(draft.count for draft in tries) > room:
            tidied = tries[-1].copy()
            tidied.tidy(allowed, TIDY_SLACK, math.inf)
            tries += self._repairs(tidied, slack)
        reached = min(imbalance(draft.heights[:, 0]) for draft in tries)
        if reached > most or min(draft.count for draft in tries) > room:
            tries += self._repairs(Draft.fresh(ground), slack)
        layouts = [draft.layout() for draft in tries]

        def price(number: int) -> float:
            # Machines load their queries side by side: the one with most to load decides.
            loading_s = float(layouts[number].arrivals.max()) * rates.per_query_moved
            busiest_s = _busiest(tries[number])
            return busiest_s + loading_s / self._horizon_rounds

        bar = _busiest(present) * (1.0 - self._gain_min)
        prices = [price(number) for number in range(len(tries))]
        good = [number for number, paid in enumerate(prices) if paid <= bar]
        if not good:
            return NoChange("no plan is worth its move")
        after = [imbalance(draft.heights[:, 0]) for draft in tries]
        # Few partitions go before the last bit of balance, or they would never become fewer.
        few = [n for n in good if tries[n].count <= room and after[n] <= most]
        best = min(few or good, key=lambda number: prices[number])
        before = imbalance(present.heights[:, 0])
        moved = int(layouts[best].arrivals.sum())
        reason = f"busiest machine from {before:.2f} to {after[best]:.2f} of the mean"
        changes = layouts[best].changes()
        return Rebalance(changes, f"{reason}, {moved} queries to load")

    def _repairs(self, draft: Draft, slack: float) -> list[Draft]:
        """Repair by the newest round, and then also by those before it."""
        draft.merge()
        draft.settle_shares(self._tolerance)
        draft.relieve(0, slack)
        for _ in range(SHARE_TURNS):
            if imbalance(draft.heights[:, 0]) > slack:
                draft.relieve(0, slack, regardless=True)
                draft.share_excess(0, slack)
        self._tidy(draft, slack)
        views = draft.heights.shape[1]
        if all(imbalance(draft.heights[:, view]) <= slack for view in range(1, views)):
            return [draft]
        wider = draft.copy()
        for view in [*range(1, views), 0]:
            wider.relieve(view, slack)
        self._tidy(wider, slack)
        return [draft, wider]

    def _tidy(self, draft: Draft, slack: float) -> None:
        """Glue what was cut; where there are many pieces, move trifles so that more can be."""
        draft.merge()
        allowed = self._partitions_max * len(draft.heights)
        draft.tidy(int(TIDY_FROM * allowed), slack, TRIFLE)


def _noise(points: NDArray[np.float64], unit: NDArray[np.float64], machines: int) -> float:
    """By how much, in means, chance alone lifts the highest of so many machines.

    Points come independently of each other, so a machine's load varies as the root of its points;
    the highest of ``n`` normal numbers is about ``sqrt(2 ln n)`` deviations up.
    """
    total = float(points @ unit)
    spread = math.sqrt(float(points @ (unit * unit)) * machines) / total
    return spread * math.sqrt(2.0 * math.log(machines))


def _busiest(draft: Draft) -> float:
    """Work of the busiest machine, over the rounds seen."""
    highest = draft.heights.max(axis=0)
    weights = np.asarray(ROUND_WEIGHTS[: highest.size])
    return float(highest @ weights / weights.sum())
