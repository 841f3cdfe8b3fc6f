"""Rounds: how the driver adapts between two batches.

A round is an interval of stream time, and at least one batch. Stream time is the median event time
of a batch: a point far in the future does not stop rounds. When it ends, the policies propose
changes in a fixed order, and the arbiter accepts or refuses. Decisions, verdicts, the policies'
memories and the next routing are recorded in one transaction before any batch uses them, so a
crash leaves a change complete or absent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from roost.balance.changes import (
    Change,
    Decision,
    Merge,
    NoChange,
    Rebalance,
    Resize,
    change_to_json,
)
from roost.balance.plan import MACHINES_MAX, Partition, Plan
from roost.balance.planner import imbalance
from roost.balance.replication import IndexMemory
from roost.dataflow.balancing import EarlyKeys
from roost.dataflow.moves import MapChange
from roost.elastic.decisions import ElasticDecision
from roost.elastic.group import PlanLoad
from roost.elastic.placement import PlacementDecision
from roost.runtime.records import Intent
from roost.stages.contract import Batch, Outcome, Reports, RoutingTable, task_seconds
from roost.stages.matching import ROOM, MatchingStage
from roost.stages.reading import ReadingStage, ReadTimes
from roost.stages.routing import PLANS, SPACE, SpatialRouting, SpatialTable, spatial
from roost.stages.statistics import STATISTICS
from roost.storage.store import Fact, Store
from roost.storage.totals import ROUNDS, TOTALS, add_round
from roost.synopsis.scaling import ScalingDecision

BALANCE, GUARD, RESIZE = "balance", "guard", "resize"
ACCEPTED, REFUSED = "accepted", "refused"
AnyDecision = (
    Decision
    | Resize
    | MapChange
    | EarlyKeys
    | ElasticDecision
    | PlacementDecision
    | ScalingDecision
)


@dataclass(frozen=True, eq=False)
class HiddenQueries:
    """Cells of queries that are no reason to rebalance, ends included, and their log positions."""

    cells: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 4), np.int32))
    positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        """Return the number of hidden queries."""
        return len(self.cells)


@dataclass(frozen=True)
class BatchNotes:
    """What policies see of a batch: what the statistics stage observed, and the cost of moves."""

    observed: Any
    loaded_queries: int
    load_s: float


@dataclass(frozen=True)
class RoundSnapshot:
    """What policies see at the end of a round; only batches of the current epochs count."""

    routing: SpatialRouting
    busy_s: NDArray[np.float64]  # processor time of each machine, without loading queries
    checks: NDArray[np.float64]  # of each machine: queries that its points were compared with
    now: int  # event time that most points have reached
    batches: Sequence[BatchNotes]
    hidden: HiddenQueries
    wanted: int  # machines of the next plan
    memory: IndexMemory | None = None  # None if it was not measured
    accepted: Mapping[str, Decision] = field(default_factory=dict)  # so far, by policy
    after: SpatialRouting | None = None  # routing of the next round, if a decision changes it

    def has_size(self, machines: int) -> bool:
        """Return whether the plan is one of so many machines."""
        return self.routing.machines == machines

    @property
    def is_resized(self) -> bool:
        """Return whether the next plan should have another number of machines."""
        return not self.has_size(self.wanted)

    def accepting(self, policy: str, decision: AnyDecision) -> RoundSnapshot:
        """Return the snapshot with the decision of a policy; raises ValueError to refuse it."""
        if isinstance(decision, Resize):
            if not 1 <= decision.machines <= MACHINES_MAX:
                raise ValueError(f"a plan has 1 to {MACHINES_MAX} machines")
            return replace(self, wanted=decision.machines)
        if not isinstance(decision, Decision):
            raise ValueError("a policy of the spatial plan changes no bucket map and no executors")
        after = self.after
        if isinstance(decision, Rebalance):
            after = (after or self.routing).apply(decision.changes, decision.machines)
        return replace(self, accepted={**self.accepted, policy: decision}, after=after)


@dataclass(frozen=True)
class Proposal:
    """What a policy proposes, and what to record whether it is accepted or not.

    The memory is part of the record of the round: what the policy needs after a restart, and
    metrics.
    """

    decision: AnyDecision
    memory: Mapping[str, Any] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()


class Snapshot(Protocol):
    """What policies see at the end of a round, with the decisions accepted so far."""

    def accepting(self, policy: str, decision: AnyDecision) -> Self:
        """Return the snapshot with the decision of a policy; raises ValueError to refuse it."""


Seen = TypeVar("Seen", bound=Snapshot)
Shown = TypeVar("Shown", contravariant=True)


class Proposer(Protocol[Shown]):
    """Proposes at the end of a round."""

    @property
    def name(self) -> str:
        """Name in the record of the round."""

    def propose(self, snapshot: Shown, /) -> Proposal:
        """Propose what to change."""


Policy = Proposer[RoundSnapshot]


class Resizable(Snapshot, Protocol):
    """A snapshot of a layout whose number of machines may change."""

    def has_size(self, machines: int) -> bool:
        """Return whether the layout is one of so many machines."""


class Resizing:
    """Proposes the number of machines that a layout should have, until it has it.

    It is the first policy of a round, so that planners see its decision.
    """

    name = RESIZE

    def __init__(self, wanted: Callable[[], int]) -> None:
        self._wanted = wanted

    def propose(self, snapshot: Resizable) -> Proposal:
        """Propose the number of machines that are wanted now."""
        machines = self._wanted()
        if snapshot.has_size(machines):
            return Proposal(NoChange(f"the layout has {machines} machines"))
        return Proposal(Resize(machines, f"the executors have room for {machines} machines"))


class Verdict(NamedTuple):
    """Whether a proposal was accepted, and why."""

    policy: str
    verdict: str
    reason: str
    proposal: Proposal

    def to_json(self) -> Any:
        """Return the verdict as JSON."""
        return {"policy": self.policy, "verdict": self.verdict, "reason": self.reason}


def memories(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Return what policies remember of a round, which is part of its record."""
    return {key: value for v in verdicts for key, value in v.proposal.memory.items()}


def arbitrate(snapshot: Seen, policies: Sequence[Proposer[Seen]]) -> tuple[list[Verdict], Seen]:
    """Accept or refuse what policies propose, in their order; the only place that does.

    A later policy sees the decisions accepted before it. Returns the verdicts, and the snapshot
    with the decisions that were accepted.
    """
    verdicts: list[Verdict] = []
    for policy in policies:
        proposal = policy.propose(snapshot)
        verdict, reason = ACCEPTED, proposal.decision.reason
        try:
            snapshot = snapshot.accepting(policy.name, proposal.decision)
        except ValueError as error:
            verdict, reason = REFUSED, f"{reason}; refused: {error}"
            snapshot = snapshot.accepting(policy.name, NoChange(reason))
        verdicts.append(Verdict(policy.name, verdict, reason, proposal))
    return verdicts, snapshot


@dataclass(frozen=True)
class CommittedBatch:
    """A committed batch as rounds see it."""

    intent: Intent
    batch: Batch
    reports: Reports
    tables: Mapping[str, RoutingTable]  # by name

    def has_size(self, machines: int) -> bool:
        """Return whether the next batches' layouts have so many machines."""
        sizes = ((table, table.size_of(machines)) for table in self.tables.values())
        return all(size in (None, table.at(table.epoch).machines) for table, size in sizes)


class Rounds(Protocol):
    """Collects what batches report, and ends rounds of its own."""

    @property
    def records(self) -> str:
        """Table of the store that has a row for each round."""

    @property
    def number(self) -> int:
        """Number of the next round."""

    def after_batch(self, done: CommittedBatch) -> None:
        """Note a batch; end the round if it is long enough."""


@dataclass
class PlanRounds:
    """Rounds of the spatial plan."""

    store: Store
    table: SpatialTable
    strategy: str
    policies: Sequence[Policy]  # in the order in which they propose
    round_length: int  # in event time
    now: int  # event time that most points have reached
    number: int  # of the next round
    hidden: Callable[[int], HiddenQueries]  # at an event time
    clock: Callable[[], float]  # seconds, to time decisions
    # Machines that the plan should have from the next batch on, without waiting for a round's end.
    wanted: Callable[[], int] | None = None
    # The most expensive partition of a machine; None if the plan divides no queries.
    hottest: Callable[[Plan, int], Partition | None] | None = None
    index_bytes: Callable[[], int] = lambda: 0  # of the live queries' files
    records: str = ROUNDS

    def __post_init__(self) -> None:
        self.load: PlanLoad | None = None  # of the last round, unless that was the first one
        self._began: float | None = None
        self._start_round(None)

    def _start_round(self, opened: int | None) -> None:
        self._opened = opened
        self._busy: dict[int, float] = defaultdict(float)
        self._checks: dict[int, float] = defaultdict(float)
        self._notes: list[BatchNotes] = []
        self._rooms: dict[str, int] = {}  # least of each executor

    def after_batch(self, done: CommittedBatch) -> None:
        """Note a batch of the current plan; end the round if it is long enough."""
        batch, reports = done.batch, done.reports
        if done.intent.epochs[SPACE] != self.table.epoch:
            return
        load_s = float(batch.outcomes[MatchingStage.name].metrics["load_s"])
        statistics = batch.outcomes.get(STATISTICS, Outcome())  # a static plan has none
        loaded = int(statistics.metrics.get("loaded_queries", 0))
        self._notes.append(BatchNotes(statistics.observed, loaded, load_s))
        busy = task_seconds(reports, MatchingStage.name)
        for report in reports[MatchingStage.name]:
            spent = busy[report.machine] - report.counts["load_s"]
            self._busy[report.machine] += spent
            self._checks[report.machine] += report.counts["checks"]
            if ROOM in report.counts:
                room = int(report.counts[ROOM])
                self._rooms[report.executor] = min(room, self._rooms.get(report.executor, room))
        times: ReadTimes = batch.outcomes[ReadingStage.name].result
        if times.oldest is None or times.median is None or times.newest is None:
            return
        self.now = max(self.now, times.median)
        if self._opened is None:
            # A first batch that is as long as a round ends it: twice the time to its median.
            length = min(times.newest, 2 * times.median - times.oldest + 1) - times.oldest
            self._opened = times.median - length
        machines = spatial(batch.routings).machines
        resized = self.wanted is not None and self.wanted() != machines
        if self.now - self._opened >= self.round_length or resized:
            self._end_round(batch)

    def _end_round(self, batch: Batch) -> None:
        started = self.clock()
        routing = spatial(batch.routings)
        busy_s, checks = (
            np.array([counted[m] for m in range(routing.machines)])
            for counted in (self._busy, self._checks)
        )
        hidden = self.hidden(self.now)
        notes, machines = tuple(self._notes), routing.machines
        given = (routing, busy_s, checks, self.now, notes, hidden, machines)
        snapshot = RoundSnapshot(*given, self._memory())
        verdicts, decided = arbitrate(snapshot, self.policies)
        after = decided.after
        balance = next(verdict for verdict in verdicts if verdict.policy == BALANCE)
        decision = balance.proposal.decision
        changes: tuple[Change, ...] = ()
        if isinstance(decision, Rebalance) and balance.verdict == ACCEPTED:
            changes = decision.changes
        moved = any(not isinstance(change, Merge) for change in changes)
        self._note_load(snapshot, started, balance.reason, changed=moved)
        row = {
            "round": self.number,
            "batch_id": batch.number,
            "strategy": self.strategy,
            "epoch": routing.epoch,
            "next_epoch": None if after is None else after.epoch,
            "machines": (after or routing).machines,
            "changes": [change_to_json(change) for change in changes],
            "reason": balance.reason,
            "quarantined": len(hidden),
            "imbalance": imbalance(busy_s),
            "seconds": self.clock() - started,
            "verdicts": [verdict.to_json() for verdict in verdicts],
            **memories(verdicts),
        }
        totals = add_round(self.store.get(TOTALS, ROUNDS) or {}, row)
        facts = [Fact(ROUNDS, self.number, row), Fact(TOTALS, ROUNDS, totals)]
        if after is not None:
            body = {**after.plan.to_json(), "strategy": self.strategy}
            facts.append(Fact(PLANS, after.epoch, body))
        self.store.record(*facts, *(fact for v in verdicts for fact in v.proposal.facts))
        if after is not None:
            self.table.epoch = after.epoch
            if after.machines != routing.machines:
                self.load = None  # of another number of machines
        self.number += 1
        self._start_round(self.now)

    def _memory(self) -> IndexMemory | None:
        if not self._rooms:
            return None
        return IndexMemory(self.index_bytes(), min(self._rooms.values()), len(self._rooms))

    def _note_load(self, seen: RoundSnapshot, now: float, reason: str, *, changed: bool) -> None:
        """Note the utilisation of the machines, and what the balancing policy did about it."""
        began, self._began, self.load = self._began, now, None
        if self.hottest is None or began is None:
            return
        # Tasks that wait for a core take longer than the round, but none is busy for longer.
        busy_s = seen.busy_s
        seconds = max(now - began, float(busy_s.max()), 1e-9)
        plan, busiest, cell = seen.routing.plan, int(busy_s.argmax()), None
        if not changed and any(part.cells == 1 for part in plan.of_machine(busiest)):
            hot = self.hottest(plan, busiest)
            if hot is not None and hot.cells == 1:
                share = float(busy_s[busiest] / max(busy_s.sum(), 1e-300))
                place = f"cell (column {hot.column0}, row {hot.row0})"
                cell = f"{place} cannot be divided; its machine has {share:.0%} of the load"
        self.load = PlanLoad(
            MatchingStage.name, self.number, busy_s / seconds, changed, reason, cell
        )
