"""Rounds of the executors of a run: the elastic policy decides, and this module carries it out.

*Planned* executors are those of the last decision, recorded with its round; *observed* ones are
present and warm; *requested* ones have not arrived yet. All three are compared after every
batch, so a driver that dies neither loses nor retains an executor.

New executors count in the layout when all that were planned are warm. Executors that leave are
decommissioned when every layout has moved off their machines. Nothing here waits for the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.dataflow.balancing import SubqueryLoad
from roost.elastic.group import Executors, GroupSnapshot, StageLoad
from roost.model.elastic import ElasticRules
from roost.runtime.executor import Allocator
from roost.runtime.records import Intent
from roost.runtime.rounds import CommittedBatch, arbitrate
from roost.runtime.scaling import ELASTIC, ElasticPolicy, GroupRound, size_policy
from roost.stages.flow_routing import node_of
from roost.stages.sources import Source
from roost.storage.store import Fact, Store, View
from roost.storage.totals import TOTALS

GROUP_ROUNDS = "executor rounds"  # table of the rounds
EXECUTORS = "executors"  # key of the totals
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
    Spark reads. ``loads`` returns those of subqueries, and ``needed`` the
    machines of the synopsis. ``clock`` returns seconds since 1970.
    """

    records = GROUP_ROUNDS

    def __init__(
        self,
        store: Store,
        allocator: Allocator,
        rules: ElasticRules,
        length_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._allocator, self._rules = store, allocator, rules
        self._length_s, self._clock = length_s, clock
        self.sources: Mapping[str, Source] = {}
        self.streams: Sequence[str] = ()
        self.loads: Callable[[], Sequence[SubqueryLoad]] = lambda: ()
        self.needed: Callable[[], int] = lambda: 0
        last = last_group_round(store) or {}
        self.number = int(last.get("round", -1)) + 1
        self._policy = ElasticPolicy(size_policy(rules), last)
        self.planned = min(max(int(last.get("planned", rules.min)), rules.min), rules.max)
        self.layout = int(last.get("layout", self.planned))
        self._provision_s = float(last.get("provision_s", 0.0))
        self._waiting_since: float | None = None
        self._counted: float | None = None  # clock until which executor seconds are counted
        self._used_s = 0.0
        self._round: _Round | None = None
        self._follow(clock(), moved=False)

    @property
    def machines_max(self) -> int:
        """Machines of the largest layout."""
        return self._rules.max * self._allocator.slots

    @property
    def machines(self) -> int:
        """Machines that layouts should have: one for each slot of their executors."""
        return self.layout * self._allocator.slots

    def after_batch(self, done: CommittedBatch) -> None:
        """Note a batch; end the round if it is long enough, and follow the decisions."""
        now = self._clock()
        self._note(now, done)
        one = self._round
        if one is not None and one.batches and now - one.clock >= self._length_s:
            self._end_round(one, now, done.intent)
        self._follow(now, moved=done.has_size(self.machines))

    # ------------------------------------------------------------------ measured

    def _note(self, now: float, done: CommittedBatch) -> None:
        intent, reports = done.intent, done.reports
        present = self._allocator.executors()
        if self._counted is not None:
            self._used_s += len(present) * (now - self._counted)
        self._counted = now
        if self._round is None:  # the rows of the first batch arrived before
            self._round = _Round(now, self._backlog(intent) or 0)
            return
        one = self._round
        one.batches += 1
        one.rows += sum(stop - start for start, stop in map(intent.rows_of, self.sources))
        one.rows += sum(r.rows_in for name in self.streams for r in reports.get(name, ()))
        for name, mine in reports.items():
            seconds = sum(report.seconds for report in mine)
            one.busy_s[node_of(name)] = one.busy_s.get(node_of(name), 0.0) + seconds
        one.tasks = max([one.tasks, *(len(mine) for mine in reports.values())])
        enough = sum(present.values()) >= self.planned
        one.settled &= enough and self.layout == self.planned and done.has_size(self.machines)

    def _backlog(self, intent: Intent) -> int | None:
        """Return the rows that have arrived and were not read; None without any pace."""
        stops = {name: intent.rows_of(name)[1] for name in self.sources}
        found = [(stop, self.sources[name].due(stop)) for name, stop in stops.items()]
        waiting = [max(due - stop, 0) for stop, due in found if due is not None]
        return sum(waiting) if waiting or self.streams else None

    def _snapshot(self, one: _Round, now: float, intent: Intent) -> GroupSnapshot:
        present, backlog = self._allocator.executors(), self._backlog(intent)
        needed = -(-self.needed() // self._allocator.slots)
        arrived = max(one.rows + (backlog or 0) - one.backlog, 0)
        waited = 0.0 if self._waiting_since is None else now - self._waiting_since
        missing = max(self._target - len(present), 0)
        return GroupSnapshot(
            now,
            now - one.clock,
            one.batches,
            self._allocator.slots,
            Executors(self.planned, missing, sum(present.values()), waited),
            one.settled,
            tuple(StageLoad(name, arrived, one.rows, s) for name, s in sorted(one.busy_s.items())),
            backlog or 0,
            interval_s=(now - one.clock) / max(one.batches, 1),
            paced=backlog is not None,
            routings=tuple(self.loads()),
            required={SYNOPSIS: needed} if needed else {},
            provision_s=self._provision_s,
            tasks=one.tasks,
        )

    # ------------------------------------------------------------------ decided

    def _end_round(self, one: _Round, now: float, intent: Intent) -> None:
        seen = self._snapshot(one, now, intent)
        verdicts, decided = arbitrate(GroupRound(seen, self._rules), [self._policy])
        (verdict,) = verdicts
        memory = verdict.proposal.memory
        costs = memory.get(ELASTIC, {}).get("costs", {})
        row = {
            "round": self.number,
            "batch_id": intent.batch_id,
            "clock": now,
            "seconds": seen.seconds,
            "decision": type(verdict.proposal.decision).__name__,
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "load": seen.offered(costs, self._rules.batch_seconds),
            "arrived": seen.arrived,
            "rows": one.rows,
            "backlog": seen.backlog,
            "planned": decided.planned,
            "required": dict(seen.required),
            "requested": seen.executors.requested,
            "observed": seen.executors.observed,
            "layout": self.layout,
            "provision_s": self._provision_s,
            **memory,
        }
        totals = self._store.get(TOTALS, EXECUTORS) or {"hours": 0.0, "decisions": {}}
        counts = Counter(totals["decisions"])
        counts[row["decision"]] += 1
        totals = {"hours": totals["hours"] + self._used_s / 3600.0, "decisions": dict(counts)}
        self._store.record(Fact(GROUP_ROUNDS, self.number, row), Fact(TOTALS, EXECUTORS, totals))
        self.planned, self._used_s = decided.planned, 0.0
        self.number += 1
        self._round = _Round(now, int(seen.backlog))

    @property
    def _target(self) -> int:
        """Executors to have in all, with spares."""
        return self.planned + self._rules.spares_beside(self.planned)

    def _follow(self, now: float, *, moved: bool) -> None:
        """Compare what is planned, requested and observed, and request or release executors.

        ``moved`` states that no layout uses machines beyond its size any more.
        """
        present, target = self._allocator.executors(), self._target
        warm = sum(present.values())
        if warm >= self.planned:
            if self.layout < self.planned and self._waiting_since is not None:
                self._provision_s = now - self._waiting_since
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self.layout > self.planned or warm >= self.planned:
            moved &= self.layout <= self.planned
            self.layout = self.planned
        # Executors that leave stay until no batch to come counts on them.
        kept = max(target, 0 if moved else min(len(present), self._rules.max))
        self._allocator.request(kept)
        if len(present) > kept:
            # The newest ones leave; names are numbers, or end with one.
            ranked = sorted(present, key=lambda name: (len(name), name))
            self._allocator.decommission(ranked[kept:])


def last_group_round(view: View) -> dict[str, Any] | None:
    """Return the newest round."""
    found = view.last(GROUP_ROUNDS)
    return None if found is None else found[1]
