"""SWARM: in each round one machine sheds load to another, decided from two numbers per machine.

Every machine reports the numerator of its cost and R(m). The coordinator keeps the five stages
(``decision.py``), ranks the machines, and requests the costliest to shed load to the cheapest; only
that machine reads its statistics, in :func:`shed`. If it cannot shed load, the next costliest is
requested.

Three rules, which the papers do not have, avoid changes without a gain:

* *quiet*: a spread, ``(highest - lowest) / mean``, within a tolerance is ignored. The tolerance is
  ``quiet``, or the expected random spread of balanced machines if that is more (:func:`tolerance`).
* *persistence*: the pair must have been that far apart, in the same direction, in the previous
  round, too. An oscillating load reverses the pair each round and so moves nothing, while the
  stages alone would rebalance for ``beta`` rounds. A step in the load is met at most one round
  later, and the stages need two rounds to flip anyway.
* *gain*: a move must lower the higher cost of the pair by ``GAIN_MIN`` of it.

A known flaw of the cost: ``N * Q * R`` falls to a quarter when a partition is split into halves of
the same machine, although the work stays the same. So a machine with many partitions looks idle and
receives more, and a plan made by splits never settles. With ``power`` at ``STEADY_POWER``, costs
are square roots of the products: most of the fall disappears, and the plan settles after a few
rounds of steady load. Machines must then report with the same power (:meth:`LoadReport.of`).

A response is only a proposal. The coordinator checks it against the plan, so a response that is
lost, repeated, or made for an older plan does no harm.

Limits: SWARM cannot relieve a single hot cell, nor more than one pair of machines per round. A load
that alternates after several rounds is followed each time. Shared partitions are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.balance.changes import (
    Change,
    Decision,
    Merge,
    Move,
    NoChange,
    Rebalance,
    Replan,
    Split,
    apply_changes,
)
from roost.balance.decision import BETA, Stages
from roost.balance.merge import adjacent_merges
from roost.balance.plan import Plan
from roost.balance.reduction import PAPER_POWER, SplitChoice, best_split, best_subset, cost_of
from roost.workload.trio import MachineStats

QUIET = 0.2
GAIN_MIN = 0.02
STEADY_POWER = 0.5
MERGE_EVERY = 20
NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The two numbers that a machine reports: the numerator of its cost, and R(m)."""

    machine: int
    numerator: float
    received: float

    @classmethod
    def of(cls, machine: int, stats: MachineStats, power: float = PAPER_POWER) -> LoadReport:
        """Summarise a machine's statistics; ``power`` must be the coordinator's."""
        numerator = sum(cost_of(p.total(), 1.0, power) for p in stats.partitions.values())
        return cls(machine, numerator, stats.received())


@dataclass(frozen=True, slots=True)
class ShedRequest:
    """Request of the coordinator to shed load.

    ``low_cost`` is a cost, divided by ``received_total``, R(S). ``next_id`` and the id after it
    are unused. ``keep`` are the machine's shared partitions, which it must keep. ``power`` is the
    coordinator's, so that both sides use the same costs.
    """

    low_machine: int
    low_cost: float
    received_total: float
    next_id: int
    keep: tuple[int, ...] = ()
    power: float = PAPER_POWER


Send = Callable[[int, ShedRequest], tuple[Change, ...]]


def shed(
    stats: MachineStats, machine: int, request: ShedRequest, quiet: float = QUIET
) -> tuple[Change, ...]:
    """Choose the load that a machine sheds; runs where its statistics are.

    Whole partitions are preferred if they close at least half of the gap that can be closed.
    Otherwise the costliest partition that can be split is split, unless whole partitions are still
    better. The papers accept *any* subset, even a partition of negligible cost.

    Returns
    -------
    tuple of Change
        Moves, or one split; empty if nothing lowers the higher cost of the pair by ``GAIN_MIN`` of
        it, or the loads differ by at most ``quiet``.
    """
    total = request.received_total
    if total <= 0.0 or machine == request.low_machine:
        return ()
    costs = {n: cost_of(p.total(), total, request.power) for n, p in stats.partitions.items()}
    low, high = request.low_cost, sum(costs.values())
    if high - low <= _in_costs(quiet, request.power) * (high + low) / 2.0:
        return ()
    for number in request.keep:
        costs.pop(number, None)
    limit = (high - low) / 2.0
    subset = best_subset(costs, limit)
    moved = sum(costs[number] for number in subset)
    found = _first_split(stats, costs, high, request) if moved < limit / 2.0 else None
    if found is not None and found[1].higher < high - moved:
        number, choice = found
        changes: tuple[Change, ...] = (_as_split(number, choice, machine, request),)
        higher = choice.higher
    else:
        changes = tuple(Move(number, (request.low_machine,)) for number in subset)
        higher = high - moved
    return changes if high - higher >= GAIN_MIN * high else ()


def _first_split(
    stats: MachineStats, costs: Mapping[int, float], high: float, request: ShedRequest
) -> tuple[int, SplitChoice] | None:
    """Return the best split of the costliest partition that a split relieves."""
    for number in sorted(costs, key=lambda number: (-costs[number], number)):
        sums = (high, request.low_cost, request.received_total)
        choice = best_split(stats.partitions[number], *sums, request.power)
        if choice is not None:
            return number, choice
    return None


def _as_split(number: int, choice: SplitChoice, machine: int, request: ShedRequest) -> Split:
    ids = (request.next_id, request.next_id + 1)
    owners = ((machine,), (request.low_machine,))
    first, second = owners[::-1] if choice.move_first else owners
    return Split(number, choice.vertical, choice.at, *ids, first, second)


def tolerance(
    reports: Sequence[LoadReport], quiet: float = QUIET, power: float = PAPER_POWER
) -> float:
    """Return the spread of costs, relative to their mean, that counts as balanced.

    The relative standard deviation of what a machine receives is about ``1 / sqrt(r)``, and the
    extremes of ``m`` machines are about ``2 * sqrt(2 * ln m)`` standard deviations apart.

    Examples
    --------
    >>> busy = [LoadReport(machine, 1.0, 10_000.0) for machine in range(4)]
    >>> idle = [LoadReport(machine, 1.0, 10.0) for machine in range(4)]
    >>> round(tolerance(busy, 0.2), 2), round(tolerance(idle, 0.2), 2)
    (0.44, 3.22)
    """
    received = sum(report.received for report in reports)
    extremes = 2.0 * math.sqrt(2.0 * math.log(len(reports)))
    chance = math.sqrt(len(reports) / received)
    return _in_costs(max(quiet, extremes * chance), power)


def _in_costs(spread: float, power: float) -> float:
    """Convert a spread of loads to a spread of costs: N and R are both proportional to input."""
    wider: float = (1.0 + spread) ** (2.0 * power) - 1.0
    return wider


class Swarm:
    """The coordinator.

    Parameters
    ----------
    stages
        Initial state of the decision mechanism.
    beta
        Rounds after which a decision is flipped in any case.
    merge_every
        Rounds between merges of adjacent partitions of one machine.
    quiet
        Spread of loads that counts as balanced, relative to the mean.
    power
        Exponent of the product in a cost: 1 in the papers, or ``STEADY_POWER``.

    Attributes
    ----------
    bytes_sent
        By all machines in the last round: two numbers per machine, shed requests and responses,
        and the plan change to every machine, because every machine routes.
    """

    def __init__(
        self,
        stages: Stages = Stages(),  # noqa: B008 - immutable
        beta: int = BETA,
        merge_every: int = MERGE_EVERY,
        quiet: float = QUIET,
        power: float = PAPER_POWER,
    ) -> None:
        self._stages = stages
        self._beta = beta
        self._merge_every = merge_every
        self._quiet = quiet
        self._power = power
        self._rounds = 0
        self._before: dict[int, float] = {}
        self.bytes_sent = 0

    @property
    def stages(self) -> Stages:
        """State of the decision mechanism."""
        return self._stages

    def decide(
        self, plan: Plan, reports: Sequence[LoadReport], rate: float, send: Send
    ) -> Decision:
        """Decide at the end of a round.

        Parameters
        ----------
        plan
            The plan of the round.
        reports
            One from each machine, also from those without partitions; a machine whose report is
            lost is ignored.
        rate
            Objects per busy second of the slowest machine.
        send
            Sends a request to a machine and returns its response, ``()`` if that is lost.
        """
        known = {r.machine: r for r in reports if 0 <= r.machine < plan.machines}
        self.bytes_sent = 2 * NUMBER_BYTES * len(known)
        self._rounds += 1
        self._stages = self._stages.after(rate, self._beta)
        before, self._before = self._before, {m: r.numerator for m, r in known.items()}
        decision: Decision | None = self._merges(plan)
        if decision is None and self._stages.rebalance:
            decision = self._relieve(plan, list(known.values()), before, send)
        if decision is None:
            return NoChange("the stages say to do nothing")
        if isinstance(decision, Rebalance):
            self.bytes_sent += plan.machines * change_bytes(decision.changes)
        return decision

    def _merges(self, plan: Plan) -> Rebalance | None:
        if self._rounds % self._merge_every:
            return None
        merges = adjacent_merges(plan)
        return Rebalance(merges, "neighbours of one machine") if merges else None

    def _relieve(
        self, plan: Plan, reports: list[LoadReport], before: Mapping[int, float], send: Send
    ) -> Decision:
        """Request machines to shed load, from the costliest down, until one can."""
        if len(reports) < 2:
            return NoChange("fewer than two machines reported")
        received = sum(report.received for report in reports)
        if received <= 0.0:
            return NoChange("nothing was received")
        costs = self._before
        low = min(costs, key=lambda m: (costs[m], m))
        least = tolerance(reports, self._quiet, self._power)
        mean = sum(costs.values()) / len(costs)
        shared = _shared(plan)
        refused = passing = 0
        for high in sorted(costs, key=lambda m: (-costs[m], m)):
            if costs[high] - costs[low] <= least * mean:
                break
            if not _persistent(high, low, before, least):
                passing += 1
                continue
            keep = shared.get(high, ())
            request = ShedRequest(
                low, costs[low] / received, received, plan.next_id, keep, self._power
            )
            changes = send(high, request)
            self.bytes_sent += (5 + len(keep)) * NUMBER_BYTES + change_bytes(changes)
            if changes and _fits(plan, changes, high, low):
                return Rebalance(changes, f"machine {high} sheds load to machine {low}")
            refused += 1
        if refused:
            return NoChange(f"no machine can shed load to machine {low}")
        return NoChange("no difference has lasted two rounds" if passing else "balanced")

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory: the state that decisions depend on."""
        return {
            "stages": self._stages.to_json(),
            "rounds": self._rounds,
            "before": [[machine, cost] for machine, cost in self._before.items()],
        }

    @classmethod
    def from_json(
        cls,
        data: dict[str, Any],
        beta: int = BETA,
        merge_every: int = MERGE_EVERY,
        quiet: float = QUIET,
        power: float = PAPER_POWER,
    ) -> Swarm:
        """Invert :meth:`to_json`; settings may have changed since."""
        swarm = cls(Stages.from_json(data["stages"]), beta, merge_every, quiet, power)
        swarm._rounds = data["rounds"]
        swarm._before = {machine: cost for machine, cost in data["before"]}
        return swarm


def _persistent(high: int, low: int, before: Mapping[int, float], least: float) -> bool:
    if high not in before or low not in before:
        return False
    return before[high] - before[low] > least * sum(before.values()) / len(before)


def _shared(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the partitions that each machine shares with others."""
    found: dict[int, tuple[int, ...]] = {}
    for p in plan.partitions:
        for machine in p.machines if len(p.machines) > 1 else ():
            found[machine] = (*found.get(machine, ()), p.partition_id)
    return found


def _fits(plan: Plan, changes: Sequence[Change], high: int, low: int) -> bool:
    """Return whether a response fits this plan and changes only the two machines."""
    owners = {p.partition_id: p.machines for p in plan.partitions}
    for change in changes:
        if isinstance(change, Move):
            fits = change.machines == (low,)
        elif isinstance(change, Split):
            fits = {change.first_machines, change.second_machines} == {(high,), (low,)}
        else:
            return False
        if not fits or owners.get(change.partition_id) != (high,):
            return False
    try:
        apply_changes(plan, changes)
    except ValueError:
        return False
    return True


def change_bytes(changes: Sequence[Change]) -> int:
    """Return the size of a message with changes: a count, then eight bytes per number.

    Examples
    --------
    >>> change_bytes(()), change_bytes([Move(3, (1,))])
    (8, 24)
    """
    numbers = 1
    for change in changes:
        if isinstance(change, Move):
            numbers += 1 + len(change.machines)
        elif isinstance(change, Split):
            numbers += 5 + len(change.first_machines) + len(change.second_machines)
        elif isinstance(change, Merge):
            numbers += 1 + len(change.partition_ids) + len(change.machines)
        elif isinstance(change, Replan):
            sizes = (5 + len(p.machines) + len(p.parents) for p in change.partitions)
            numbers += sum(sizes)
    return numbers * NUMBER_BYTES
