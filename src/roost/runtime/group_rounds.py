"""Rounds of the executors of a run: policies decide sizes and placement.

At the end of a round, the load of all stages is measured and recorded with the decisions: how many
executors each group should have (:mod:`roost.runtime.group_size` carries that out), and which group
runs which operator (:mod:`roost.runtime.operator_placement`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roost.dataflow.balancing import SubqueryLoad
from roost.elastic.group import GroupSnapshot, PlanLoad, StageLoad
from roost.elastic.placement import Algorithm2, ExecutorGroup
from roost.errors import ConfigError
from roost.model.choices import ElasticPolicyName
from roost.model.elastic import DEFAULT_GROUP
from roost.model.settings import ElasticSettings
from roost.runtime.executor import Allocator
from roost.runtime.group_size import GroupSize
from roost.runtime.operator_placement import PLACEMENT, OperatorPlacement
from roost.runtime.records import Intent, last_round
from roost.runtime.rounds import CommittedBatch, arbitrate
from roost.runtime.scaling import ELASTIC, ElasticPolicy, GroupRound, SharedSizes, size_policy
from roost.stages.flow_routing import node_of
from roost.stages.sources import RowSource
from roost.storage.store import Fact, Store
from roost.storage.totals import TOTALS

GROUP_ROUNDS = "executor rounds"  # table of the rounds
EXECUTORS = "executors"  # key of the totals
GROUPS = "groups"  # in a round: what was decided for the groups beside the default one
SYNOPSIS = "synopsis"  # policy that needs executors


@dataclass
class _Round:
    """What was measured since a round began."""

    clock: float
    backlog: int  # rows that had arrived and were not read
    batches: int = 0
    rows: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    tasks: int = 0
    settled: bool = True


class GroupRounds:
    """Measures the offered load, ends the rounds of the executors, and follows the decisions.

    ``sources`` are those that the run reads itself, by stage, and ``streams`` are stages whose rows
    Spark reads. ``loads`` returns those of subqueries, ``plan`` that of the spatial plan, and
    ``needed`` the machines of the synopsis; ``waiting`` the rows that streams had left when the
    last batch began. ``clock`` returns seconds since 1970.
    """

    records = GROUP_ROUNDS

    def __init__(
        self,
        store: Store,
        allocator: Allocator,
        settings: ElasticSettings,
        clock: Callable[[], float],
    ) -> None:
        rules = settings.rules
        self._store, self._allocator = store, allocator
        self._length_s, self._clock = settings.round, clock
        self.sources: Mapping[str, RowSource] = {}
        self.streams: Sequence[str] = ()
        self.loads: Callable[[], Sequence[SubqueryLoad]] = lambda: ()
        self.plan: Callable[[], PlanLoad | None] = lambda: None
        self.needed: Callable[[], int] = lambda: 0
        self.waiting: Callable[[], int] = lambda: 0
        self._streamed = 0  # rows that Spark read in the last batch
        last = last_round(store, GROUP_ROUNDS) or {}
        self.number = int(last.get("round", -1)) + 1
        saved = {DEFAULT_GROUP: last, **last.get(GROUPS, {})}
        self._own = GroupSize(allocator, rules, last, clock())
        self._groups = {DEFAULT_GROUP: self._own}
        for one in settings.other_groups:
            limits = replace(rules, min=one.min, max=one.max, spares=0)
            mine = saved.get(one.name, {})
            self._groups[one.name] = GroupSize(allocator.of(one.name), limits, mine, clock())
        self._policies = {
            name: ElasticPolicy(size_policy(group.rules), saved.get(name, {}))
            for name, group in self._groups.items()
        }
        self.placement = OperatorPlacement(
            settings.placement, list(self._groups), settings.operators, last.get(PLACEMENT, {})
        )
        most = sum(group.rules.max for group in self._groups.values())
        self._shared = Algorithm2(settings.total or most)
        self._counted: float | None = None  # clock until which executor seconds are counted
        self._used_s = 0.0
        self._round: _Round | None = None
        slots = {group.allocator.slots for group in self._groups.values()}
        if len(slots) > 1 and rules.policy is ElasticPolicyName.ALGORITHM_2:
            expected = "load_aware where executors of the groups differ in cores"
            raise ConfigError("elastic.policy", rules.policy, expected)

    @property
    def machines_max(self) -> int:
        """Machines of the largest layout; while executors do not arrive, of the present one."""
        now = self._clock()
        return max(
            group.machines if self._policies[name].waits(now) else group.machines_max
            for name, group in self._groups.items()
        )

    @property
    def machines(self) -> int:
        """Machines that layouts are sized for: as many as the slots of the largest group.

        So a layout need not change with the mapping.
        """
        return max(group.machines for group in self._groups.values())

    def after_batch(self, done: CommittedBatch) -> None:
        """Note a batch; end the round if it is long enough, and follow the decisions."""
        now = self._clock()
        self._note(now, done)
        one = self._round
        if one is not None and one.batches and now - one.clock >= self._length_s:
            self._end_round(one, now, done.intent)
        moved = done.has_size(self.machines)
        for group in self._groups.values():
            group.follow(now, moved=moved)

    # ------------------------------------------------------------------ measured

    def _note(self, now: float, done: CommittedBatch) -> None:
        intent, reports = done.intent, done.reports
        self._streamed = sum(r.rows_in for name in self.streams for r in reports.get(name, ()))
        present = sum(len(group.allocator.executors()) for group in self._groups.values())
        if self._counted is not None:
            self._used_s += present * (now - self._counted)
        self._counted = now
        if self._round is None:  # the rows of the first batch arrived before
            self._round = _Round(now, self._backlog(intent) or 0)
            return
        one = self._round
        one.batches += 1
        one.rows += sum(stop - start for start, stop in map(intent.rows_of, self.sources))
        one.rows += self._streamed
        for name, mine in reports.items():
            seconds = sum(report.seconds for report in mine)
            one.busy_s[node_of(name)] = one.busy_s.get(node_of(name), 0.0) + seconds
        one.tasks = max([one.tasks, *(len(mine) for mine in reports.values())])
        one.settled &= all(group.settled for group in self._groups.values())
        one.settled &= done.has_size(self.machines)

    def _backlog(self, intent: Intent) -> int | None:
        """Return the rows that have arrived and were not read; None without any pace."""
        stops = {name: intent.rows_of(name)[1] for name in self.sources}
        found = [(stop, self.sources[name].due(stop)) for name, stop in stops.items()]
        waiting = [max(due - stop, 0) for stop, due in found if due is not None]
        if self.streams:
            waiting.append(max(self.waiting() - self._streamed, 0))
        return sum(waiting) if waiting else None

    def _snapshot(self, one: _Round, now: float, intent: Intent) -> GroupSnapshot:
        """Return the measured round, as if all stages were in the default group."""
        backlog = self._backlog(intent)
        needed = -(-self.needed() // self._allocator.slots)
        arrived = max(one.rows + (backlog or 0) - one.backlog, 0)
        return GroupSnapshot(
            now,
            now - one.clock,
            one.batches,
            self._allocator.slots,
            self._own.executors(now),
            one.settled,
            tuple(StageLoad(name, arrived, one.rows, s) for name, s in sorted(one.busy_s.items())),
            backlog or 0,
            interval_s=(now - one.clock) / max(one.batches, 1),
            paced=backlog is not None,
            routings=tuple(self.loads()),
            required={SYNOPSIS: needed} if needed else {},
            provision_s=self._own.provision_s,
            tasks=one.tasks,
            plan=self.plan(),
        )

    def _part(self, seen: GroupSnapshot, name: str) -> GroupSnapshot:
        """Return what concerns one group."""
        group_of, group = self.placement.group_of, self._groups[name]
        return replace(
            seen,
            slots=group.allocator.slots,
            executors=group.executors(seen.clock),
            stages=tuple(one for one in seen.stages if group_of(one.name) == name),
            routings=tuple(one for one in seen.routings if group_of(one.subquery) == name),
            required=seen.required if name == DEFAULT_GROUP else {},
            plan=seen.plan if name == DEFAULT_GROUP else None,
            provision_s=group.provision_s,
        )

    # ------------------------------------------------------------------ decided

    def _end_round(self, one: _Round, now: float, intent: Intent) -> None:
        seen = self._snapshot(one, now, intent)
        self._share(seen)
        sizes = {name: self._sized(self._part(seen, name), name) for name in self._groups}
        row = {
            "round": self.number,
            "batch_id": intent.batch_id,
            "clock": now,
            "seconds": seen.seconds,
            "arrived": seen.arrived,
            "rows": one.rows,
            "backlog": seen.backlog,
            "required": dict(seen.required),
            **sizes.pop(DEFAULT_GROUP),
        }
        if sizes:
            row[GROUPS] = sizes
            # A change of the mapping is measured by the next rounds, with the same executors.
            placed = self.placement.snapshot(self._executor_groups(slots=True), seen.routings)
            row[PLACEMENT] = self.placement.end_round(placed, settled=one.settled)
        totals = self._store.get(TOTALS, EXECUTORS) or {"hours": 0.0, "decisions": {}}
        counts = Counter(totals["decisions"])
        counts.update([row["decision"], *(size["decision"] for size in sizes.values())])
        totals = {"hours": totals["hours"] + self._used_s / 3600.0, "decisions": dict(counts)}
        self._store.record(Fact(GROUP_ROUNDS, self.number, row), Fact(TOTALS, EXECUTORS, totals))
        for name, group in self._groups.items():
            group.planned = int((row if name == DEFAULT_GROUP else sizes[name])["planned"])
        self._used_s = 0.0
        self.number += 1
        self._round = _Round(now, int(seen.backlog))

    def _sized(self, seen: GroupSnapshot, name: str) -> dict[str, Any]:
        """Decide the size of a group; returns the record of that."""
        group = self._groups[name]
        (verdict,), decided = arbitrate(GroupRound(seen, group.rules), [self._policies[name]])
        memory = verdict.proposal.memory
        costs = memory.get(ELASTIC, {}).get("costs", {})
        return {
            "decision": type(verdict.proposal.decision).__name__,
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "load": seen.offered(costs, group.rules.batch_seconds),
            "planned": decided.planned,
            "requested": seen.executors.requested,
            "observed": seen.executors.observed,
            "layout": group.layout,
            "provision_s": group.provision_s,
            **memory,
        }

    def _share(self, seen: GroupSnapshot) -> None:
        """Note the loads of the round, and let ``algorithm_2`` decide for all groups."""
        self.placement.observe(seen.stages, seen.seconds)
        shared = {
            name: policy.policy
            for name, policy in self._policies.items()
            if isinstance(policy.policy, SharedSizes)
        }
        if shared:
            groups = self._executor_groups(slots=False)
            decided = self._shared.decide(self.placement.loads(groups, self._allocator.slots))
            for name, policy in shared.items():
                policy.decided = decided[name]

    def _executor_groups(self, *, slots: bool) -> list[ExecutorGroup]:
        """Return the groups as a placement policy sees them, in slots or in executors."""
        found = []
        for name, group in self._groups.items():
            count = group.allocator.slots if slots else 1
            observed = min(sum(group.allocator.executors().values()), group.planned)
            missing = max(group.planned - observed, 0)
            found.append(
                ExecutorGroup(name, observed * count, missing * count, group.rules.min * count)
            )
        return found
