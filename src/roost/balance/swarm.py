"""SWARM: costly machines shed load to cheap ones, decided from two numbers per machine.

Every machine reports its cost (``costs.py``) and R(m). The coordinator updates the five stages
(``decision.py``), ranks the machines, and requests the costliest to shed load to the cheapest; only
that machine reads its statistics, in :func:`shed`. If it cannot shed load, the next costliest
receives the request. As published that relieves one machine in a round, and both cost the same
afterwards. Here the costliest fills several cheap machines up to the mean, and further machines
follow with those that are left.

The papers' protocol is :meth:`Swarm.paper`. Changes to it are switches
(:mod:`roost.balance.rules`), most of which avoid changes of the plan without a gain.

A response is only a proposal. The coordinator checks it against the plan, so a response that is
lost, repeated, or made for an older plan does no harm.

Limits: SWARM cannot relieve a single hot cell. A load that alternates after several rounds is
followed each time. Shared partitions are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

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
from roost.workload.trio import MachineStats, PartitionStats

NUMBER_BYTES = 8
# A machine with more than so many times the mean number of partitions receives none: what is left
# of hotspots costs nothing any more, and would gather on a machine.
CROWDED = 2.0
DEFAULT = SwarmRules()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The two numbers that a machine reports: its cost before the division by R(S), and R(m)."""

    machine: int
    cost: float
    received: float


class ShedTarget(NamedTuple):
    """A machine that can receive load, and its cost, divided by R(S)."""

    machine: int
    cost: float


@dataclass(frozen=True, slots=True)
class ShedRequest:
    """Request of the coordinator to shed load to some machines, the cheapest first.

    ``received_total`` is R(S). Ids from ``next_id`` on are unused. ``keep`` are the machine's
    shared partitions, which it must keep. ``full`` is the cost, divided by R(S), up to which a
    target is filled, or a multiple if nothing small enough can be split off; infinite, until both
    cost the same.
    """

    targets: tuple[ShedTarget, ...]
    received_total: float
    next_id: int
    keep: tuple[int, ...] = ()
    full: float = math.inf


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
) -> tuple[Move | Split, ...]:
    """Choose the load that a machine sheds; runs where its statistics are.

    ``scale`` is that of the costs that the machine reported.

    Of what a target shall receive, whole partitions are preferred, under the rule of the half gap
    only if they are at least half of it. Otherwise the costliest partition that can be split is
    split, unless whole partitions are still better.

    Returns moves and splits, in order. They end at the first target to which the machine cannot
    shed load: their loads differ by at most ``rules.quiet``, or no change lowers the higher cost
    of the pair by ``rules.gain`` of it. What the machine keeps for other targets does not count.
    """
    held, found = dict(stats.partitions), list[Move | Split]()
    for target in request.targets if request.received_total > 0.0 else ():
        changes = _shed_to(target, held, machine, request, rules, scale)
        if not changes:
            break
        for change in changes:
            give(held, {}, machine, change)
            if isinstance(change, Split):
                request = replace(request, next_id=max(change.ids) + 1)
        found += changes
    return tuple(found)


def give(
    held: dict[int, PartitionStats],
    given: dict[int, PartitionStats],
    machine: int,
    change: Move | Split,
) -> None:
    """Take statistics out of those that a machine held, as a change takes the partition."""
    part = held.pop(change.partition_id)
    if isinstance(change, Move):
        given[change.partition_id] = part
        return
    sides = part.cut(change.vertical, change.at, *change.ids)
    for side, owners in zip(sides, change.machines, strict=True):
        (held if owners == (machine,) else given)[side.partition_id] = side


def _shed_to(
    target: ShedTarget,
    held: Mapping[int, PartitionStats],
    machine: int,
    request: ShedRequest,
    rules: SwarmRules,
    scale: float,
) -> tuple[Move | Split, ...]:
    """Choose moves, or one split, to one machine."""
    total = request.received_total / scale
    costs = {number: rules.cost.of(p) / total for number, p in held.items()}
    low, own = target.cost, sum(costs.values())
    if machine == target.machine or own - low <= _in_costs(rules.quiet, rules) * (own + low) / 2.0:
        return ()
    for number in request.keep:
        costs.pop(number, None)
    full, high = request.full, 0.0
    while high < own:
        # A machine that costs ``high`` and the target would cost the same afterwards. If a row and
        # a column are too much for that, the target is filled up to a multiple.
        high = min(own, 2.0 * full - low)
        changes, moved = _exchange(held, costs, high, target, machine, request, total, rules)
        if changes and moved >= rules.gain * high:
            return changes
        full *= 2.0
    return ()


def _exchange(
    held: Mapping[int, PartitionStats],
    costs: Mapping[int, float],
    high: float,
    target: ShedTarget,
    machine: int,
    request: ShedRequest,
    total: float,
    rules: SwarmRules,
) -> tuple[tuple[Move | Split, ...], float]:
    """Return moves, or one split, and by how much they lower the higher cost of a pair."""
    limit = (high - target.cost) / 2.0
    subset = best_subset(costs, limit)
    moved = sum(costs[number] for number in subset)
    enough = moved >= limit / 2.0 if rules.half_gap else moved > 0.0
    found = None if enough else _first_split(held, costs, high, target.cost, total, rules)
    if found is None or found[1].higher >= high - moved:
        return tuple(Move(number, (target.machine,)) for number in subset), moved
    number, choice = found
    owners = ((machine,), (target.machine,))
    owners = owners[::-1] if choice.move_first else owners
    ids = (request.next_id, request.next_id + 1)
    return (Split(number, choice.vertical, choice.at, ids, owners),), high - choice.higher


def _first_split(
    held: Mapping[int, PartitionStats],
    costs: Mapping[int, float],
    high: float,
    low: float,
    total: float,
    rules: SwarmRules,
) -> tuple[int, SplitChoice] | None:
    """Return the best split of the costliest partition that a split relieves."""
    for number in sorted(costs, key=lambda number: (-costs[number], number)):
        choice = best_split(
            held[number],
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
    (0.07, 1.05)
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
        decision = self._relieve(plan, list(known.values()), before, send)
        if self.rounds % self.rules.merge_every == 0:
            decision = _with_merges(plan, decision)
        if isinstance(decision, Rebalance):
            self.bytes_sent += plan.machines * change_bytes(decision.changes)
        return decision

    def _relieve(
        self, plan: Plan, reports: list[LoadReport], before: Mapping[int, float], send: Send
    ) -> Decision:
        """Request machines to shed load, from the costliest down, as far as the rules permit."""
        if len(reports) < 2:
            return NoChange("fewer than two machines reported")
        received = sum(report.received for report in reports)
        if received <= 0.0:
            return NoChange("nothing was received")
        costs = self.costs
        least = tolerance(reports, self.rules)
        if not self.stages.rebalance:
            least = max(least, _in_costs(self.rules.urgent, self.rules))
        mean = sum(costs.values()) / len(costs)
        next_id = plan.next_id
        held = _by_machine(plan)
        lows = sorted(costs, key=lambda m: (costs[m], m))
        if self.rules.pairs > 1:
            room = 1.0 + CROWDED * len(plan.partitions) / plan.machines
            lows = [m for m in lows if len(held.get(m, ())) < room]
        changes: list[Change] = []
        filled: dict[int, int] = {}  # machines that received load, and from which
        refused = passing = 0
        for high in sorted(costs, key=lambda m: (-costs[m], m)):
            below = min(costs[high] - least * mean, mean)
            far = [low for low in lows[: self.rules.pairs - len(filled)] if costs[low] < below]
            if not far:
                break
            targets = self._targets(high, far, mean, before, least)
            if not targets or high in filled:
                passing += 1
                continue
            own = replace(plan, partitions=tuple(held.get(high, ())), next_id=next_id)
            keep = tuple(p.partition_id for p in own.partitions if len(p.machines) > 1)
            request = ShedRequest(
                tuple(ShedTarget(low, costs[low] / received) for low in targets),
                received,
                next_id,
                keep,
                mean / received if self.rules.pairs > 1 else math.inf,
            )
            response = send(high, request)
            self.bytes_sent += NUMBER_BYTES * _count_numbers(request) + change_bytes(response)
            if response and _fits(own, response, high, targets):
                changes += response
                after = apply_changes(own, response)
                next_id = after.next_id
                owners = {p.machines for p in after.partitions}
                filled |= {low: high for low in targets if (low,) in owners}
                lows = [low for low in lows if low not in filled]
            else:
                refused += 1
        if filled:
            shown = [f"machine {high} sheds load to machine {low}" for low, high in filled.items()]
            return Rebalance(tuple(changes), ", ".join(shown))
        if refused:
            return NoChange(f"no machine can shed load to machine {lows[0]}")
        if passing:
            return NoChange("no difference has lasted two rounds")
        return NoChange("balanced" if self.stages.rebalance else "the stages say to do nothing")

    def _targets(
        self, high: int, lows: Iterable[int], mean: float, before: Mapping[int, float], least: float
    ) -> list[int]:
        """Return the machines that what a machine has above the mean can fill up to it."""
        found, above = list[int](), self.costs[high] - mean
        for low in lows:
            if found and above <= 0.0:
                break
            if not self.rules.persistence or _persistent(high, low, before, least):
                found.append(low)
                above -= mean - self.costs[low]
        return found

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


def _fits(plan: Plan, changes: Sequence[Change], high: int, targets: Collection[int]) -> bool:
    """Return whether a response fits the plan and takes load only from one machine to targets.

    The plan may have the partitions of machine ``high`` alone.
    """
    held = {p.partition_id for p in plan.partitions if p.machines == (high,)}
    for change in changes:
        if not isinstance(change, Move | Split) or change.partition_id not in held:
            return False
        owners = [(high,), change.machines] if isinstance(change, Move) else change.machines
        if not any(set(owners) == {(high,), (low,)} for low in targets):
            return False
        held.discard(change.partition_id)
        if isinstance(change, Split):
            held.add(change.ids[change.machines.index((high,))])
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
