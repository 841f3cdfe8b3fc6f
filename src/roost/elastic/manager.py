"""The elastic manager: how many executors a group needs, decided from its offered load.

Problem: common autoscalers add a machine when one machine is hot, one at a time, and remove it when
it is idle. They add machines where balancing would help, and chase a load that grows.

Idea (StreamCloud, section V-B): the offered load, in executors, determines the size. If the mean
utilisation leaves its limits, one decision leads to the target. The size depends on the load alone,
so a steady load cannot make it oscillate. Inside the limits, the load is balanced instead.

It decides from two rounds that were measured since the last change was in force. It does not choose
which executor leaves, and does not carry out anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from roost.balance.changes import NoChange
from roost.dataflow.balancing import BucketPlanner, MapPolicy, SubqueryLoad, hot_keys
from roost.dataflow.balancing.loads import deviation, machine_loads
from roost.dataflow.moves import MapChange
from roost.elastic.decisions import Balance, Cannot, ElasticDecision, Provision, Release
from roost.elastic.forecast import Forecast
from roost.elastic.group import GroupSnapshot
from roost.model.arrays import Floats, Ints
from roost.model.choices import ElasticPolicyName
from roost.model.elastic import ElasticRules

ROUNDS = 2  # that a condition must hold for
# A backlog grows if it is more than the next batch reads, and gains this share of the round's rows.
BACKLOG_GROWTH = 0.05
PATIENCE = 3.0  # times the measured provisioning time, to wait for an executor at least
FAILURES_MAX = 6  # after which the time between attempts stays the same
_ROUNDING = 1e-9


class MeasuredLoad(NamedTuple):
    """A round: the load to size for, in executors, and whether the backlog grew."""

    load: float
    grew: bool
    foreseen: bool  # whether the load is a forecast


@dataclass(frozen=True, slots=True)
class Memory:
    """What a policy remembers from round to round; it survives a restart as JSON.

    ``failures`` counts requests in a row that were not fulfilled; ``failed_at`` executors were
    present at the last one. The layout does not grow before ``retry``. ``plan_round`` is the round
    of the spatial plan that was balanced last, and ``plan_deviation`` its deviation then.
    """

    measured: tuple[MeasuredLoad, ...] = ()  # since the last change was in force
    costs: Mapping[str, float] = field(default_factory=dict)  # seconds for a row, by stage
    backlog: float = 0.0
    reported: str = ""  # what cannot be done, so that it is reported once
    failures: int = 0
    failed_at: int = 0
    retry: float = 0.0
    forecast: Forecast = field(default_factory=Forecast)
    plan_round: int = -1
    plan_deviation: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the memory as JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        measured = [list(one) for one in self.measured]
        return {**values, "measured": measured, "forecast": self.forecast.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Memory:
        """Invert :meth:`to_json`."""
        measured = tuple(MeasuredLoad(*one) for one in data["measured"])
        forecast = Forecast.from_json(data["forecast"])
        return cls(**{**data, "measured": measured, "forecast": forecast})


class SizePolicy(Protocol):
    """Sizes an executor group."""

    def decide(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Return the decision of a round, and what to remember."""


@dataclass(frozen=True)
class Manager:
    """The policies ``load_aware`` and ``individual``."""

    rules: ElasticRules
    balancer: MapPolicy = field(default_factory=BucketPlanner)

    def decide(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Decide from the rounds since the last change was in force."""
        costs = {**memory.costs, **{s.name: s.busy_s / s.rows for s in group.stages if s.rows > 0}}
        grew = group.backlog - memory.backlog > BACKLOG_GROWTH * group.arrived
        grew = grew and group.backlog * group.seconds > group.arrived * group.interval_s
        memory = replace(memory, costs=costs, backlog=group.backlog)
        load = group.offered(costs, self.rules.batch_seconds)
        if load is None:
            reason = "the source has no pace, so it offers no load; set elastic.batch_seconds"
            return self._once(group, memory, "pace", reason)
        memory, foreseen = self._foreseen(group, memory, load)
        have = group.executors
        # Below the minimum the same executors are requested again, so each attempt lasts longer.
        attempts = 2.0**memory.failures if have.planned <= self.rules.min else 1.0
        patience_s = max(self.rules.arrival_s, PATIENCE * group.provision_s) * attempts
        if have.observed < have.planned and have.waiting_s >= patience_s:
            return self._gave_up(group, memory)
        if not group.settled:
            text = f"{have.observed} of {have.planned} executors are present"
            if have.observed >= have.planned:
                text = "the last change was not in force for the whole round"
            return NoChange(text), replace(memory, measured=())
        if memory.failures and have.planned > memory.failed_at:
            memory = replace(memory, failures=0)
        newest = MeasuredLoad(max(load, foreseen), grew, foreseen > load)
        measured = (*memory.measured, newest)[-ROUNDS:]
        memory = replace(memory, measured=measured)
        if len(measured) < ROUNDS:
            return NoChange(f"{len(measured)} of {ROUNDS} rounds are measured"), memory
        decision, memory = self._decided(group, memory)
        if isinstance(decision, Provision | Release | Balance):
            memory = replace(memory, measured=())
        return decision, memory

    def _foreseen(self, group: GroupSnapshot, memory: Memory, load: float) -> tuple[Memory, float]:
        """Return the load after the horizon; zero without a forecast that should be used."""
        if not self.rules.forecast:
            return memory, 0.0
        horizon_s = group.provision_s + group.seconds
        forecast = memory.forecast.observed(group.clock, load, horizon_s)
        return replace(memory, forecast=forecast), forecast.newest or 0.0

    # ------------------------------------------------------------------ sizes

    def _decided(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Size the group, or balance it if it has the right size."""
        n, load = group.executors.planned, memory.measured[-1].load
        size, reason = self._wanted(group, memory)
        if size > self.rules.max:
            reason += f"; {size} executors, of at most {self.rules.max}"
            if n >= self.rules.max and memory.reported != "max":
                return self._once(group, memory, "max", reason)
        elif math.ceil(load / self.rules.target) <= self.rules.max:
            memory = replace(memory, reported="")
        size = self._within(size)
        if size > n and group.clock < memory.retry:
            reason += f"; next request in {memory.retry - group.clock:.0f} s"
        elif size != n:
            kind = Provision if size > n else Release
            return kind(size, load, reason), memory
        growing = all(one.grew for one in memory.measured)
        changes, notes = self._balance(group, growing)
        balanced, note, memory = self._balance_plan(group, memory, growing)
        notes += [note] if note else []
        reason = "; ".join([reason, *notes])
        if changes or balanced:
            return Balance(changes, reason), memory
        size = self._within(self._next(load, n))
        if size > n and growing and not notes and group.clock >= memory.retry:
            return Provision(size, load, f"{reason}, evenly divided; the backlog grows"), memory
        return NoChange(reason), memory

    def _wanted(self, group: GroupSnapshot, memory: Memory) -> tuple[int, str]:
        """Return the size for the load and for other policies, which may exceed the maximum."""
        rules, n, measured = self.rules, group.executors.planned, memory.measured
        load = measured[-1].load
        # A load that changed within a round is seen whole in the next one, which counts.
        sizes = [self._size(one.load, n) for one in measured]
        over, under = all(size > n for size in sizes), all(size < n for size in sizes)
        kind = "forecast" if measured[-1].foreseen else "load"
        wanted, reason = sizes[-1], f"{kind} of {load:.2f} executors, utilisation {load / n:.2f}"
        if over or under:
            limit = f"above {rules.upper:g}" if over else f"below {rules.lower:g}"
            reason += f", {limit} for {ROUNDS} rounds"
        else:
            wanted = n
        if under and (any(one.grew for one in measured) or group.backlog > group.rows):
            wanted, reason = n, f"{reason}, but a backlog of {group.backlog:.0f} rows waits"
        for policy, required in group.required.items():
            if required > wanted:
                wanted, reason = required, f"{reason}; {policy} needs {required} executors"
        return max(wanted, sizes[-1]) if wanted > n else wanted, reason

    def _within(self, size: int) -> int:
        return min(max(size, self.rules.min), self.rules.max)

    def _size(self, load: float, n: int) -> int:
        """Return the size for a load: the present one, if utilisation is inside the limits."""
        if self.rules.lower * n <= load <= self.rules.upper * n:
            return n
        return self._next(load, n)

    def _next(self, load: float, n: int) -> int:
        if self.rules.policy is ElasticPolicyName.INDIVIDUAL:
            return n + 1 if load > self.rules.target * n else n - 1
        return math.ceil(load / self.rules.target - _ROUNDING)

    def _gave_up(self, group: GroupSnapshot, memory: Memory) -> tuple[ElasticDecision, Memory]:
        """Continue with the executors that are present, and wait longer before the next request."""
        have, failures = group.executors, min(memory.failures + 1, FAILURES_MAX)
        wait_s = self.rules.arrival_s * 2.0**failures
        text = f"{have.planned - have.observed} of {have.planned} executors did not arrive"
        reason = f"{text} in {have.waiting_s:.0f} s; next request in {wait_s:g} s"
        retry = group.clock + wait_s
        memory = replace(
            memory, measured=(), failures=failures, failed_at=have.observed, retry=retry
        )
        return Cannot(self._within(have.observed), reason), memory

    def _once(
        self, group: GroupSnapshot, memory: Memory, what: str, reason: str
    ) -> tuple[ElasticDecision, Memory]:
        """Report what cannot be done, unless it was reported already."""
        if memory.reported == what:
            return NoChange(reason), memory
        return Cannot(group.executors.planned, reason), replace(memory, reported=what)

    # ------------------------------------------------------------------ balance

    def _balance(
        self, group: GroupSnapshot, growing: bool
    ) -> tuple[tuple[MapChange, ...], list[str]]:
        """Return changes that are worth it, and what they achieve or why there are none.

        A growing backlog is a reason to balance any deviation. Without notes, the load is even.
        """
        changes, notes = [], []
        for routing in group.routings:
            load = _offered(routing, group.pressure(routing.subquery))
            before = deviation(_utilisation(load, load.owners))
            if before <= self.rules.imbalance and not growing:
                continue
            decision, after = self.balancer.decide(load), before
            if isinstance(decision, MapChange):
                owners = load.owners
                owners[list(decision.owners)] = list(decision.owners.values())
                after = deviation(_utilisation(load, owners))
            if isinstance(decision, MapChange) and after <= before * (1 - self.rules.improvement):
                changes.append(decision)
                found = f"from {before:.3f} to {after:.3f}"
            elif before > self.rules.imbalance or _unspreadable(load):
                found = f"{before:.3f}, {_unspreadable(load) or decision.reason}"
            else:
                continue
            notes.append(f"deviation of {load.subquery!r} {found}")
        return tuple(changes), notes

    def _balance_plan(
        self, group: GroupSnapshot, memory: Memory, growing: bool
    ) -> tuple[bool, str, Memory]:
        """Return whether the spatial plan is balanced, a note, and what to remember.

        The plan's own policy has decided how. Whether that helps is measured: the deviation must
        have improved since the plan was balanced last.
        """
        plan, best = group.plan, memory.plan_deviation
        if plan is None:
            return False, "", memory
        if plan.number == memory.plan_round:
            return False, "the plan was changed and is not measured yet", memory
        now = deviation(plan.utilisation * group.pressure(plan.stage))
        high = now > self.rules.imbalance
        note = f"deviation of the plan {now:.3f}, {plan.reason}"
        if plan.changed and (growing or high):
            helps = best is None or now <= best * (1 - self.rules.improvement)
            memory = replace(memory, plan_round=plan.number, plan_deviation=now if helps else None)
            if not helps:
                note += "; the last change did not reduce it"
            return helps, note if helps or high else "", memory
        if plan.cell is not None:
            note += f"; {plan.cell}"
        return False, note if high else "", replace(memory, plan_deviation=None)


def _offered(routing: SubqueryLoad, pressure: float) -> SubqueryLoad:
    """Return a routing as if it had processed what was offered."""
    rounds = tuple(replace(one, busy_s=one.busy_s * pressure) for one in routing.rounds)
    return replace(routing, rounds=rounds)


def _utilisation(load: SubqueryLoad, owners: Ints) -> Floats:
    return machine_loads(owners, load.newest.busy_s, load.machines) / load.newest.seconds


def _unspreadable(load: SubqueryLoad) -> str | None:
    """Name a bucket that is heavier than a machine's fair share, with its key if it is known."""
    busy = load.newest.busy_s
    bucket = int(busy.argmax())
    share = float(busy[bucket] / max(busy.sum(), 1e-300))
    if share * load.machines <= 1.0:
        return None
    keys = [key.key for key in load.newest.keys if key.bucket == bucket]
    key = f" (key {keys[0]})" if keys and hot_keys(load) else ""
    return f"bucket {bucket}{key} of {load.subquery!r} has {share:.0%} of the load, on one machine"
