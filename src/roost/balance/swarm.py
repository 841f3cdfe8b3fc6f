"""SWARM: costly machines shed load to cheap ones, decided from two numbers per machine.

Every machine reports its cost (``costs.py``) and R(m). The coordinator updates the five stages
(``decision.py``), ranks the machines, and requests the costliest to shed load to the cheapest; only
that machine reads its statistics, in :func:`shed`. If it cannot shed load, the next costliest
receives the request. As published that relieves one machine in a round; here further pairs follow,
the next costliest and the next cheapest.

The papers' protocol is :meth:`Swarm.paper`. Changes to it are switches
(:mod:`roost.balance.rules`), most of which avoid changes of the plan without a gain.

A response is only a proposal. The coordinator checks it against the plan, so a response that is
lost, repeated, or made for an older plan does no harm.

Limits: SWARM cannot relieve a single hot cell, and a machine sheds load to one other per round. A
load that alternates after several rounds is followed each time. Shared partitions are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from roost.balance.changes import (
    Change,
    Decision,
    Move,
    NoChange,
    Rebalance,
    Split,
    apply_changes,
)
from roost.balance.costs import PER_OBJECT
from roost.balance.decision import Stages
from roost.balance.merge import adjacent_merges
from roost.balance.plan import Partition, Plan
from roost.balance.reduction import SplitChoice, best_split, best_subset
from roost.balance.rules import PAPER, SwarmRules
from roost.workload.trio import MachineStats

NUMBER_BYTES = 8
DEFAULT = SwarmRules()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The two numbers that a machine reports: its cost before the division by R(S), and R(m)."""

    machine: int
    cost: float
    received: float


@dataclass(frozen=True, slots=True)
class ShedRequest:
    """Request of the coordinator to shed load.

    ``low_cost`` is a cost, divided by ``received_total``, R(S). ``next_id`` and the id after it
    are unused. ``keep`` are the machine's shared partitions, which it must keep.
    """

    low_machine: int
    low_cost: float
    received_total: float
    next_id: int
    keep: tuple[int, ...] = ()


Send = Callable[[int, ShedRequest], tuple[Change, ...]]


def machine_cost(stats: MachineStats, rules: SwarmRules = DEFAULT) -> float:
    """Return the cost of a machine before the division by R(S): the first number it reports."""
    return sum(map(rules.cost.of, stats.partitions.values()))


def scale_of(estimate: float, received: float, checks: float, rules: SwarmRules) -> float:
    """Return by how much a machine's estimated cost is scaled to the work that it counted.

    Estimates assume that rows and columns of a partition are independent, which is wrong by up to
    a third for a single machine. The work of each partition is unknown, so all have one factor.

    Examples
    --------
    >>> scale_of(1_000.0, 10.0, 700.0, SwarmRules())
    1.2
    """
    if not rules.measured or estimate <= 0.0:
        return 1.0
    return (PER_OBJECT * received + checks) / estimate


def shed(
    stats: MachineStats,
    machine: int,
    request: ShedRequest,
    rules: SwarmRules = DEFAULT,
    scale: float = 1.0,
) -> tuple[Change, ...]:
    """Choose the load that a machine sheds; runs where its statistics are.

    ``scale`` is that of the costs that the machine reported.

    Whole partitions are preferred, under the rule of the half gap only if they close at least half
    of the gap that can be closed. Otherwise the costliest partition that can be split is split,
    unless whole partitions are still better.

    Returns moves, or one split; nothing if the loads differ by at most ``rules.quiet``, or no
    change lowers the higher cost of the pair by ``rules.gain`` of it.
    """
    if request.received_total <= 0.0 or machine == request.low_machine:
        return ()
    total = request.received_total / scale
    costs = {number: rules.cost.of(p) / total for number, p in stats.partitions.items()}
    low, high = request.low_cost, sum(costs.values())
    if high - low <= _in_costs(rules.quiet, rules) * (high + low) / 2.0:
        return ()
    for number in request.keep:
        costs.pop(number, None)
    limit = (high - low) / 2.0
    subset = best_subset(costs, limit)
    moved = sum(costs[number] for number in subset)
    enough = moved >= limit / 2.0 if rules.half_gap else moved > 0.0
    found = None if enough else _first_split(stats, costs, high, request.low_cost, total, rules)
    if found is not None and found[1].higher < high - moved:
        number, choice = found
        owners = ((machine,), (request.low_machine,))
        owners = owners[::-1] if choice.move_first else owners
        ids = (request.next_id, request.next_id + 1)
        changes: tuple[Change, ...] = (Split(number, choice.vertical, choice.at, ids, owners),)
        higher = choice.higher
    else:
        changes = tuple(Move(number, (request.low_machine,)) for number in subset)
        higher = high - moved
    return changes if high - higher >= rules.gain * high else ()


def _first_split(
    stats: MachineStats,
    costs: Mapping[int, float],
    high: float,
    low: float,
    total: float,
    rules: SwarmRules,
) -> tuple[int, SplitChoice] | None:
    """Return the best split of the costliest partition that a split relieves."""
    for number in sorted(costs, key=lambda number: (-costs[number], number)):
        choice = best_split(
            stats.partitions[number],
            high,
            low,
            total,
            rules.cost,
            least_higher=rules.least_higher,
        )
        if choice is not None:
            return number, choice
    return None


def tolerance(reports: Sequence[LoadReport], rules: SwarmRules = DEFAULT) -> float:
    """Return the spread of costs, relative to their mean, that counts as balanced.

    The relative standard deviation of what a machine receives is about ``1 / sqrt(r)``, and the
    extremes of ``m`` machines are about ``2 * sqrt(2 * ln m)`` standard deviations apart.

    Examples
    --------
    >>> busy = [LoadReport(machine, 1.0, 10_000.0) for machine in range(4)]
    >>> idle = [LoadReport(machine, 1.0, 10.0) for machine in range(4)]
    >>> round(tolerance(busy), 2), round(tolerance(idle), 2)
    (0.2, 1.05)
    """
    if not rules.quiet:
        return 0.0
    received = sum(report.received for report in reports)
    extremes = 2.0 * math.sqrt(2.0 * math.log(len(reports)))
    chance = math.sqrt(len(reports) / received)
    return _in_costs(max(rules.quiet, extremes * chance), rules)


def _in_costs(spread: float, rules: SwarmRules) -> float:
    """Convert a spread of loads to a spread of costs."""
    wider: float = (1.0 + spread) ** rules.cost.power - 1.0
    return wider


@dataclass
class Swarm:
    """The coordinator."""

    stages: Stages = Stages()  # noqa: RUF009 - immutable
    rounds: int = 0
    costs: dict[int, float] = field(default_factory=dict)  # of the last round, as reported
    rules: SwarmRules = DEFAULT
    # By all machines in the last round: two numbers per machine, shed requests and responses, and
    # the plan change to every machine, because every machine routes.
    bytes_sent: int = 0

    @classmethod
    def paper(cls) -> Swarm:
        """Return the protocol as published, without any change but that R(S) is a rate."""
        return cls(rules=PAPER)

    def decide(
        self, plan: Plan, reports: Sequence[LoadReport], rate: float, send: Send
    ) -> Decision:
        """Decide at the end of a round.

        Every machine reports, also without partitions; a machine whose report is lost is ignored.
        ``rate`` is in objects per busy second of the slowest machine. ``send`` sends a request to
        a machine and returns its response, ``()`` if that is lost.
        """
        known = {r.machine: r for r in reports if 0 <= r.machine < plan.machines}
        self.bytes_sent = 2 * NUMBER_BYTES * len(known)
        self.rounds += 1
        self.stages = self.stages.after(rate, rise=self.rules.rise)
        before, self.costs = self.costs, {m: r.cost for m, r in known.items()}
        decision: Decision = NoChange("the stages say to do nothing")
        if self.stages.rebalance:
            decision = self._relieve(plan, list(known.values()), before, send)
        if self.rounds % self.rules.merge_every == 0:
            decision = _with_merges(plan, decision)
        if isinstance(decision, Rebalance):
            self.bytes_sent += plan.machines * change_bytes(decision.changes)
        return decision

    def _relieve(
        self, plan: Plan, reports: list[LoadReport], before: Mapping[int, float], send: Send
    ) -> Decision:
        """Request machines to shed load, from the costliest down, until one can."""
        if len(reports) < 2:
            return NoChange("fewer than two machines reported")
        received = sum(report.received for report in reports)
        if received <= 0.0:
            return NoChange("nothing was received")
        costs = self.costs
        least = tolerance(reports, self.rules)
        mean = sum(costs.values()) / len(costs)
        lows = iter(sorted(costs, key=lambda m: (costs[m], m)))
        low, next_id = next(lows), plan.next_id
        held = _by_machine(plan)
        changes: list[Change] = []
        pairs: list[tuple[int, int]] = []
        refused = passing = 0
        for high in sorted(costs, key=lambda m: (-costs[m], m)):
            # Every machine is in one pair: those that received load are cheaper than this one.
            if len(pairs) == self.rules.pairs or costs[high] - costs[low] <= least * mean:
                break
            if self.rules.persistence and not _persistent(high, low, before, least):
                passing += 1
                continue
            own = replace(plan, partitions=tuple(held.get(high, ())), next_id=next_id)
            keep = tuple(p.partition_id for p in own.partitions if len(p.machines) > 1)
            request = ShedRequest(low, costs[low] / received, received, next_id, keep)
            response = send(high, request)
            self.bytes_sent += (5 + len(keep)) * NUMBER_BYTES + change_bytes(response)
            if response and _fits(own, response, high, low):
                changes += response
                next_id = apply_changes(own, response).next_id
                pairs.append((high, low))
                low = next(lows)
            else:
                refused += 1
        if pairs:
            shown = [f"machine {high} sheds load to machine {low}" for high, low in pairs]
            return Rebalance(tuple(changes), ", ".join(shown))
        if refused:
            return NoChange(f"no machine can shed load to machine {low}")
        return NoChange("no difference has lasted two rounds" if passing else "balanced")

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the state directory: the state that decisions depend on."""
        costs = [[machine, cost] for machine, cost in self.costs.items()]
        return {"stages": asdict(self.stages), "rounds": self.rounds, "before": costs}

    @classmethod
    def from_json(cls, data: dict[str, Any], rules: SwarmRules = DEFAULT) -> Swarm:
        """Invert :meth:`to_json`; the rules are not part of the state."""
        return cls(Stages(**data["stages"]), data["rounds"], dict(data["before"]), rules)


def _with_merges(plan: Plan, decision: Decision) -> Decision:
    """Add merges to a decision, of partitions that it does not name."""
    changes = decision.changes if isinstance(decision, Rebalance) else ()
    after = apply_changes(plan, changes) if changes else plan
    same = set(plan.partitions)
    merges = adjacent_merges(
        replace(after, partitions=tuple(p for p in after.partitions if p in same))
    )
    if not merges:
        return decision
    text = "neighbours of one machine"
    reason = f"{decision.reason}; {text}" if changes else text
    return Rebalance((*changes, *merges), reason)


def _by_machine(plan: Plan) -> dict[int, list[Partition]]:
    held: dict[int, list[Partition]] = {}
    for p in plan.partitions:
        for machine in p.machines:
            held.setdefault(machine, []).append(p)
    return held


def _persistent(high: int, low: int, before: Mapping[int, float], least: float) -> bool:
    if high not in before or low not in before:
        return False
    return before[high] - before[low] > least * sum(before.values()) / len(before)


def _fits(plan: Plan, changes: Sequence[Change], high: int, low: int) -> bool:
    """Return whether a response fits the plan and changes only the two machines.

    The plan may have the partitions of machine ``high`` alone.
    """
    owners = {p.partition_id: p.machines for p in plan.partitions}
    for change in changes:
        if isinstance(change, Move):
            fits = change.machines == (low,)
        elif isinstance(change, Split):
            fits = set(change.machines) == {(high,), (low,)}
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
    return NUMBER_BYTES * (1 + sum(map(_count_numbers, changes)))


def _count_numbers(value: Any) -> int:
    if isinstance(value, Partition):  # a new plan has tens of thousands
        return 5 + len(value.machines) + len(value.parents)
    if isinstance(value, tuple):
        return sum(map(_count_numbers, value))
    if is_dataclass(value):
        return sum(_count_numbers(getattr(value, part.name)) for part in fields(value))
    return 1
