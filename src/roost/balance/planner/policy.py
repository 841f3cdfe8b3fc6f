"""The ``global`` strategy: one plan for all machines at once.

Problem: a pairwise exchange between the highest and the lowest machine needs one round per
receiving machine, and a fresh plan in each round moves all queries even if the load only fluctuates
or oscillates.

Idea: with the points of every cell, the driver can evaluate whole plans before it adopts one. It
repairs the present plan (only the excess load moves), by the newest round and then also by earlier
ones; if that does not suffice, it divides the space again. Each candidate is judged by the cost of
the busiest machine in the rounds seen, and by the queries to load; it must be clearly better than
the present plan. So an oscillating load leads to one plan that suits both its states.

The planner does not predict: it follows a load that grows or drifts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from roost.balance.changes import (
    Change,
    Decision,
    NoChange,
    Rebalance,
    Replan,
    apply_changes,
)
from roost.balance.plan import Plan
from roost.balance.planner.board import sum_costs, sum_moments, sum_rects
from roost.balance.planner.draft import Draft, PlanningInput
from roost.balance.resizing import emptied
from roost.model.arrays import Floats
from roost.workload.histogram import EulerHistogram

# Repair brings machines to within this of the mean, below the tolerance that triggers it.
SLACK = 0.03
# Noise raises the highest of many machines. It enters twice, with this round and with the round
# that the plan was made for, so about the square root of two times the noise is tolerated.
NOISE_ALLOWED = 1.5
NOISE_LEFT = 0.5
# Excess that cannot be moved is shared, which makes capacity for moving again.
SHARE_TURNS = 2
# Tidying starts at this share of the allowed partitions, with pieces that have less than TRIFLE of
# a machine's queries; above the allowed number, more tidying is another candidate. Only if more
# than CLUTTER times the allowed number remain may tidying overload machines up to TIDY_SLACK,
# which are then repaired again.
TIDY_FROM = 0.5
TRIFLE = 0.05
CLUTTER = 1.25
TIDY_SLACK = 1.25
# Weights of the newest round and of the rounds before it when a plan is judged.
ROUND_WEIGHTS = (0.5, 0.3, 0.2)
# Rounds over which the cost of loading queries is amortised.
HORIZON_ROUNDS = 30
# Mean number of partitions per machine above which a change also merges partitions.
PARTITIONS_MAX = 6.0
# A single round suffices if noise cannot explain it: this far above the mean, and this many times
# the noise. Below that, the previous round must have been out of balance, too.
AT_ONCE = 1.2
NOISE_AT_ONCE = 3.0


@dataclass(frozen=True)
class CostRates:
    """Costs in seconds.

    They are the fixed cost of a point, the cost of a point for each query over its cell, the cost
    of a partition in a round, and the cost of a query that a machine has to load.
    """

    per_point: float
    per_check: float
    per_partition: float
    per_query_moved: float


def _loads(plan: Plan, points: Floats, unit: Floats, overhead: float) -> Floats:
    costs = np.empty(len(plan.partitions))
    sum_rects(plan.rects(), points, unit, plan.columns, costs)
    owners = [p.machines for p in plan.partitions]
    counts = np.fromiter(map(len, owners), np.int64)
    machines = np.fromiter(chain.from_iterable(owners), np.int64)
    loads = np.zeros(plan.machines)
    np.add.at(loads, machines, np.repeat(costs / counts + overhead, counts))
    return loads


def imbalance(loads: Floats) -> float:
    """Return the load of the busiest machine over the mean; 1 without load.

    Examples
    --------
    >>> imbalance(np.array([1.0, 2.0, 3.0]))
    1.5
    """
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0.0 else 1.0


@dataclass(frozen=True)
class GlobalPlanner:
    """Decides from the points of every cell; stateless between rounds.

    The plan is kept while the busiest machine is within ``tolerance`` of the mean, or within noise
    if that is more. A new plan must be better by ``gain_min``, relative to the present one, or by
    ``gain_hot`` while the busiest machine is above ``AT_ONCE``: earlier rounds, for which the plan
    was good, would otherwise delay the relief of a machine whose load has drifted.
    """

    tolerance: float = 1.1
    gain_min: float = 0.08
    gain_hot: float = 0.04

    def resize(
        self,
        plan: Plan,
        machines: int,
        rounds: Sequence[Floats],
        queries: EulerHistogram,
        rates: CostRates,
    ) -> Rebalance:
        """Return the change to another number of machines; rounds as in :meth:`decide`.

        Machines that leave are emptied, and new ones are filled as far as that is worth its cost.
        """
        unit = queries.per_cell().reshape(-1) * rates.per_check + rates.per_point
        costs = np.empty(len(plan.partitions))
        points = np.ascontiguousarray(rounds[-1], np.float64)
        sum_rects(plan.rects(), points, unit, plan.columns, costs)
        by_id = {p.partition_id: cost for p, cost in zip(plan.partitions, costs, strict=True)}
        moves = emptied(plan, machines, by_id)
        start = replace(apply_changes(plan, moves, machines), epoch=plan.epoch)
        found = self.decide(start, rounds, queries, rates, resized=True)
        changes: tuple[Change, ...] = moves
        if isinstance(found, Rebalance):
            # A replan names all partitions, and so replaces the moves before it.
            replans = isinstance(found.changes[0], Replan)
            changes = found.changes if replans else (*moves, *found.changes)
        return Rebalance(changes, f"{machines} machines: {found.reason}", machines)

    def decide(
        self,
        plan: Plan,
        rounds: Sequence[Floats],
        queries: EulerHistogram,
        rates: CostRates,
        *,
        resized: bool = False,
    ) -> Decision:
        """Decide from one to three rounds, the newest last.

        A round is the points of each cell, in row-major order. A plan that is ``resized`` is also
        changed if it is balanced so far, or was in the round before.
        """
        if plan.machines == 1:
            return NoChange("one machine")
        # Cost of a point in each cell.
        unit = queries.per_cell().reshape(-1) * rates.per_check
        unit += rates.per_point
        points = [np.ascontiguousarray(cells, np.float64) for cells in reversed(rounds)]
        total = float(points[0] @ unit) if points else 0.0
        if total <= 0.0:
            return NoChange("no load")
        noise = noise_of(points[0], unit, plan.machines)
        # One noisy round must not replace a plan that is within the tolerance.
        most = max(self.tolerance + NOISE_LEFT * noise, 1.0 + SLACK + NOISE_ALLOWED * noise)
        before = imbalance(_loads(plan, points[0], unit, rates.per_partition))
        if before <= most and not resized:
            return NoChange("balanced")
        at_once = max(AT_ONCE, 1.0 + NOISE_AT_ONCE * noise)
        totals = [total, *(float(p @ unit) for p in points[1:])]
        if before < at_once and not resized and len(points) > 1 and totals[1] > 0.0:
            # The present plan is judged by the earlier load, whichever plan was in use then.
            earlier = imbalance(_loads(plan, points[1], unit, rates.per_partition))
            if earlier <= most:
                return NoChange("out of balance for one round only")
        seen = [(p, total / own) for p, own in zip(points, totals, strict=True) if own]
        cost = np.zeros((len(seen), plan.rows + 1, plan.columns + 1))
        for sums, (cells, scale) in zip(cost, seen, strict=True):
            sum_costs(cells, unit, scale, sums)
        given = PlanningInput.of(plan, cost, queries.sums(), rates.per_partition)
        gain = self.gain_hot if before > AT_ONCE else self.gain_min
        return self._choose(given, rates, most, 1.0 + SLACK + NOISE_LEFT * noise, gain)

    def _choose(
        self, given: PlanningInput, rates: CostRates, most: float, slack: float, gain: float
    ) -> Decision:
        """Compare repairs, and fresh plans if these do not suffice, with the present plan."""
        present = Draft.of_plan(given)
        allowed = int(PARTITIONS_MAX * given.plan.machines)
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
        reached = min(imbalance(draft.loads[:, 0]) for draft in tries)
        if reached > most or min(draft.count for draft in tries) > room:
            tries += self._repairs(Draft.fresh(given), slack)
        results = [draft.result() for draft in tries]

        def price(number: int) -> float:
            # Machines load queries in parallel, so the one with most to load decides.
            loading_s = float(results[number].arrivals.max()) * rates.per_query_moved
            busiest_s = _busiest(tries[number])
            return busiest_s + loading_s / HORIZON_ROUNDS

        bar = _busiest(present) * (1.0 - gain)
        prices = [price(number) for number in range(len(tries))]
        good = [number for number, paid in enumerate(prices) if paid <= bar]
        if not good:
            return NoChange("no plan is worth its move")
        after = [imbalance(draft.loads[:, 0]) for draft in tries]
        # Fewer partitions are preferred to the last bit of balance; else they only accumulate.
        few = [n for n in good if tries[n].count <= room and after[n] <= most]
        best = min(few or good, key=lambda number: prices[number])
        before = imbalance(present.loads[:, 0])
        moved = int(results[best].arrivals.sum())
        reason = f"busiest machine from {before:.2f} to {after[best]:.2f} of the mean"
        changes = results[best].changes()
        return Rebalance(changes, f"{reason}, {moved} queries to load")

    def _repairs(self, draft: Draft, slack: float) -> list[Draft]:
        """Repair by the newest round, and then also by earlier rounds."""
        draft.merge()
        draft.settle_shares(self.tolerance)
        draft.relieve(0, slack)
        for _ in range(SHARE_TURNS):
            if imbalance(draft.loads[:, 0]) > slack:
                draft.relieve(0, slack, regardless=True)
                draft.share_excess(0, slack)
        _tidy(draft, slack)
        views = draft.loads.shape[1]
        if all(imbalance(draft.loads[:, view]) <= slack for view in range(1, views)):
            return [draft]
        wider = draft.copy()
        for view in [*range(1, views), 0]:
            wider.relieve(view, slack)
        _tidy(wider, slack)
        return [draft, wider]


def _tidy(draft: Draft, slack: float) -> None:
    """Merge pieces; if there are many, move small ones so that more can be merged."""
    draft.merge()
    allowed = PARTITIONS_MAX * len(draft.loads)
    draft.tidy(int(TIDY_FROM * allowed), slack, TRIFLE)


def noise_of(points: Floats, unit: Floats, machines: int) -> float:
    """Return by how much, in means, noise raises the highest of some machines.

    Points arrive independently, so the standard deviation of a machine's load is the square root
    of its points; the highest of ``n`` normal variables is about ``sqrt(2 ln n)`` deviations up.
    """
    total, squares = sum_moments(points, unit)
    spread = math.sqrt(squares * machines) / total
    return spread * math.sqrt(2.0 * math.log(machines))


def _busiest(draft: Draft) -> float:
    """Return the weighted cost of the busiest machine over the rounds."""
    highest = draft.loads.max(axis=0)
    weights = np.asarray(ROUND_WEIGHTS[: highest.size])
    return float(highest @ weights / weights.sum())
