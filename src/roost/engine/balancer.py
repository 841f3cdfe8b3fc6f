"""Rounds: what the driver does between two batches to keep machines evenly busy.

A round is a stretch of stream time, and at least one batch. When it ends, the strategy's policy is
shown what it may see and decides; what it decides becomes the plan of the next epoch, recorded in
one transaction with the reason, before any batch uses it. So after a crash a change is wholly
there or not at all.

``swarm`` sees two numbers of each machine, and has one of them look at its own statistics.
``global`` sees the points of every cell, learns from measured times what a point and a pair cost,
and plans for all machines at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.balance import Partition, Plan, Strategy
from roost.balance.changes import (
    Change,
    Decision,
    Rebalance,
    apply_changes,
    arrivals,
    change_to_json,
)
from roost.balance.planner import CellLoad, CostRates, GlobalPlanner, imbalance
from roost.balance.swarm import Report, ShedRequest, Swarm, shed
from roost.engine.guarding import GuardRounds
from roost.engine.machine_stats import load_statistics
from roost.engine.messages import BatchTask, MachineResult, TrioTask
from roost.model import TIME_MIN
from roost.space import Space
from roost.state.private import private_folder
from roost.state.queries import QuerySet
from roost.state.query_counts import QueryCounts
from roost.state.store import Store
from roost.state.windows import WindowKeeper, batch_of
from roost.workload import CellCounts, CostModel, EulerHistogram, MachineStats

ROUNDS_SEEN = 3
# Seconds of the calibrated model before it has seen any: a machine, a point, a pair to look at.
PRIOR = (1e-3, 1e-7, 2e-9)
# A machine matches all its points in one pass, so a partition costs hardly anything of itself; but
# of two plans that are as good, the one with fewer is easier to route, to record and to change.
PER_PARTITION_S = 1e-5
PER_QUERY_MOVED_S = 1e-7
LOADING_MEMORY = 0.5
FADE = 0.5


@dataclass(frozen=True)
class RoundSetup:
    """What every balancer needs.

    Parameters
    ----------
    store
        Where decisions are recorded.
    queries
        The live queries.
    round_length
        Length of a round in event time, in the unit of the stream's times.
    saved
        What the last round before a restart left, if any: its number, and what its strategy knew.
    now
        Event time that the stream has reached.
    windows
        The window, where one is kept: its points are then what statistics count.
    guard
        What is shown hotspots and judges users; None where there is no guard.
    clock
        Seconds, to time decisions.
    """

    store: Store
    queries: QuerySet
    round_length: int
    saved: Mapping[str, Any] | None = None
    now: int = TIME_MIN
    windows: WindowKeeper | None = None
    guard: GuardRounds | None = None
    clock: Callable[[], float] = time.perf_counter


class Balancer(ABC):
    """Collects what the machines of a batch report, and decides at the end of a round."""

    strategy: Strategy

    def __init__(self, setup: RoundSetup) -> None:
        self._setup = setup
        self._round = 0 if setup.saved is None else int(setup.saved["round"]) + 1
        self._opened: int | None = None
        self._now = setup.now
        self._busy: dict[int, float] = {}
        self._previous: Plan | None = None
        self._first_batch: int | None = None

    def prepared(self, task: BatchTask) -> BatchTask:
        """Add to a task what its machines are to load and to note."""
        before = self._previous or task.plan
        changed = before.epoch != task.plan.epoch
        return replace(task, arrivals=arrivals(before, task.plan) if changed else {})

    def after_batch(
        self, batch_id: int, plan: Plan, results: Sequence[MachineResult]
    ) -> Plan | None:
        """Note what a batch reported; returns the next plan where there is to be another."""
        self._previous = plan
        if self._first_batch is None:
            self._first_batch = batch_id
        self._note(results)
        for result in results:
            machine = result.machine
            busy = result.busy_s - result.load_s
            self._busy[machine] = self._busy.get(machine, 0.0) + busy
        oldest = [result.time_min for result in results if result.time_min is not None]
        newest = [result.time_max for result in results if result.time_max is not None]
        if not newest:
            return None
        self._now = max(self._now, *newest)
        if self._opened is None:
            self._opened = min(oldest)
        if self._now - self._opened < self._setup.round_length:
            return None
        return self._end_round(batch_id, plan)

    def _end_round(self, batch_id: int, plan: Plan) -> Plan | None:
        clock = self._setup.clock
        started = clock()
        busy_s = np.array([self._busy.get(m, 0.0) for m in range(plan.machines)])
        guard = self._setup.guard
        hidden = np.empty((0, 4), np.int32) if guard is None else guard.hidden(self._now)
        decision, facts = self._decide(plan, busy_s, hidden)
        after: Plan | None = None
        changes: tuple[Change, ...] = ()
        if isinstance(decision, Rebalance):
            changes = decision.changes
            after = apply_changes(plan, changes)
            after.check_invariants()
        row = {
            "round": self._round,
            "batch_id": batch_id,
            "strategy": self.strategy.value,
            "epoch": plan.epoch,
            "next_epoch": None if after is None else after.epoch,
            "changes": [change_to_json(change) for change in changes],
            "reason": decision.reason,
            "quarantined": len(hidden),
            "imbalance": imbalance(busy_s),
            "seconds": clock() - started,
            **facts,
        }
        body = None if after is None else {**after.to_json(), "strategy": self.strategy.value}
        change = None
        if guard is not None:
            change = guard.after_round(
                plan, decision, busy_s, self._now, self._hottest, hiding=len(hidden) > 0
            )
        self._setup.store.put_round(row, body, change)
        self._round += 1
        self._opened = self._now
        self._busy = {}
        return after

    @abstractmethod
    def _note(self, results: Sequence[MachineResult]) -> None:
        """Take what the machines reported."""

    @abstractmethod
    def _hottest(self, plan: Plan, machine: int) -> Partition | None:
        """Find the costliest partition of a machine in the round that ended."""

    @abstractmethod
    def _decide(
        self, plan: Plan, busy_s: NDArray[np.float64], hidden: NDArray[np.int32]
    ) -> tuple[Decision, dict[str, Any]]:
        """Decide at the end of a round; returns facts for the record as well.

        ``hidden`` are the cells of queries that are no reason to rebalance.
        """


class SwarmBalancer(Balancer):
    """The protocol of the paper: statistics stay with the machines."""

    strategy = Strategy.SWARM

    def __init__(self, setup: RoundSetup) -> None:
        super().__init__(setup)
        saved = setup.saved
        self._swarm = Swarm.from_json(saved["swarm"]) if saved and "swarm" in saved else Swarm()
        self._folder = private_folder(setup.store.folder / "trio")
        self._files: dict[int, str] = {}
        self._reports: dict[int, Report] = {}
        self._close = False
        # Points fade, unless a window decides when they go.
        self._fade = FADE if setup.windows is None else 1.0
        self._forget_files()

    def prepared(self, task: BatchTask) -> BatchTask:
        """Tell the machines where their statistics are."""
        before = self._previous or task.plan
        files = dict(self._files)
        gone = self._gone(task.batch_id)
        trio = TrioTask(str(self._folder), files, before, self._close, self._now, self._fade, gone)
        return replace(super().prepared(task), trio=trio)

    def _gone(self, batch_id: int) -> tuple[str, ...]:
        """Files that have left the window, of batches that were counted since the restart."""
        windows = self._setup.windows
        if windows is None:
            return ()
        first = batch_id if self._first_batch is None else self._first_batch
        names = (file.file for file in windows.gone)
        return tuple(str(windows.folder / name) for name in names if batch_of(name) >= first)

    def _note(self, results: Sequence[MachineResult]) -> None:
        self._close = False
        for result in results:
            report = Report(result.machine, result.numerator, result.received)
            self._reports[result.machine] = report
            self._files.update((result.machine, name) for name in result.trio_files)
        self._forget_files()

    def _forget_files(self) -> None:
        kept = set(self._files.values())
        for path in self._folder.iterdir():
            if str(path) not in kept:
                path.unlink(missing_ok=True)

    def _decide(
        self, plan: Plan, busy_s: NDArray[np.float64], hidden: NDArray[np.int32]
    ) -> tuple[Decision, dict[str, Any]]:
        self._close = True
        reports = [self._reports[m] for m in range(plan.machines) if m in self._reports]
        if len(hidden):
            costs = {r.machine: self._statistics(r.machine, hidden).numerator() for r in reports}
            reports = [replace(r, numerator=costs[r.machine]) for r in reports]
        received = sum(report.received for report in reports)
        slowest = float(busy_s.max())
        rate = received / slowest if slowest > 0 else 0.0
        decision = self._swarm.decide(plan, reports, rate, partial(self._ask, hidden))
        return decision, {
            "rate": rate,
            "bytes_sent": self._swarm.bytes_sent,
            "swarm": self._swarm.to_json(),
        }

    def _hottest(self, plan: Plan, machine: int) -> Partition | None:
        if machine not in self._files:
            return None
        stats = self._statistics(machine, np.empty((0, 4), np.int32))
        costs = {n: s.total().numerator for n, s in stats.partitions.items()}
        mine = [p for p in plan.of_machine(machine) if p.partition_id in costs]
        return max(mine, key=lambda p: costs[p.partition_id], default=None)

    def _ask(
        self, hidden: NDArray[np.int32], machine: int, request: ShedRequest
    ) -> tuple[Change, ...]:
        """Have a machine look for what it can give away, in its own statistics."""
        return shed(self._statistics(machine, hidden), machine, request)

    def _statistics(self, machine: int, hidden: NDArray[np.int32]) -> MachineStats:
        """Read what a machine knows at the end of the round, without some queries."""
        stats = load_statistics(Path(self._files[machine]))
        stats.add_queries(hidden, -1)
        stats.close_round(self._fade)
        return stats


class GlobalBalancer(Balancer):
    """A plan for all machines at once, from counted cells and measured times."""

    strategy = Strategy.GLOBAL

    def __init__(self, setup: RoundSetup, space: Space, planner: GlobalPlanner) -> None:
        super().__init__(setup)
        saved = setup.saved
        self._planner = planner
        self._counts = QueryCounts(space)
        self._cells: dict[int, list[CellCounts]] = {}
        self._rounds: deque[CellLoad] = deque(maxlen=ROUNDS_SEEN)
        self._costs: NDArray[np.float64] = np.zeros(0)
        self._per_query_s = PER_QUERY_MOVED_S
        self._model = CostModel(len(PRIOR), prior=PRIOR)
        if saved and "model" in saved:
            self._model = CostModel.from_json(saved["model"])
            self._per_query_s = float(saved["per_query_s"])

    def prepared(self, task: BatchTask) -> BatchTask:
        """Have the machines count the cells of their points."""
        task = replace(super().prepared(task), count_cells=True)
        if not task.arrivals:
            return task
        # Requests may have come since the round ended.
        histogram = self._counts.update(self._setup.queries.segments(), self._now)
        parts = task.plan.partitions
        rects = np.array([(p.column0, p.row0, p.column1, p.row1) for p in parts])
        counts = histogram.count_many(rects).tolist()
        queries = {p.partition_id: count for p, count in zip(parts, counts, strict=True)}
        arriving = {
            machine: sum(queries[number] for number in numbers)
            for machine, numbers in task.arrivals.items()
        }
        return replace(task, arriving=arriving)

    def _note(self, results: Sequence[MachineResult]) -> None:
        for result in results:
            if result.cells is not None:
                self._cells.setdefault(result.machine, []).append(result.cells)
        loaded = sum(result.loaded_queries for result in results)
        if loaded:
            seconds = sum(result.load_s for result in results) / loaded
            old = self._per_query_s
            self._per_query_s = LOADING_MEMORY * old + (1 - LOADING_MEMORY) * seconds

    def _decide(
        self, plan: Plan, busy_s: NDArray[np.float64], hidden: NDArray[np.int32]
    ) -> tuple[Decision, dict[str, Any]]:
        reported = [part for parts in self._cells.values() for part in parts]
        sent = sum(part.cells.nbytes + part.counts.nbytes for part in reported)
        counts = {m: CellCounts.joined(parts) for m, parts in self._cells.items()}
        self._cells = {}
        histogram = self._counts.update(self._setup.queries.segments(), self._now)
        queries = histogram.per_cell().reshape(-1)
        error = self._learn(busy_s, counts, queries)
        everything = CellCounts.joined(counts.values())
        points = everything.dense(plan.columns * plan.rows)
        self._costs = points * queries
        self._rounds.append(CellLoad(points))
        _, per_point, per_check = self._model.coefficients.tolist()
        rates = CostRates(per_point, per_check, PER_PARTITION_S, self._per_query_s)
        decision = self._planned(plan, histogram, rates, hidden)
        return decision, {
            "bytes_sent": sent,
            "model": self._model.to_json(),
            "model_error": error,
            "per_query_s": self._per_query_s,
        }

    def _planned(
        self, plan: Plan, histogram: EulerHistogram, rates: CostRates, hidden: NDArray[np.int32]
    ) -> Decision:
        """Plan for all queries, if those that are not hidden are reason enough."""
        rounds = list(self._rounds)
        if len(hidden):
            histogram.add(hidden, -1)
            decision = self._planner.decide(plan, rounds, histogram, rates)
            histogram.add(hidden, 1)
            if not isinstance(decision, Rebalance):
                return decision
        return self._planner.decide(plan, rounds, histogram, rates)

    def _hottest(self, plan: Plan, machine: int) -> Partition | None:
        costs = self._costs.reshape(plan.rows, plan.columns)
        return max(
            plan.of_machine(machine),
            key=lambda p: float(costs[p.row0 : p.row1, p.column0 : p.column1].sum()),
            default=None,
        )

    def _learn(
        self,
        busy_s: NDArray[np.float64],
        counts: Mapping[int, CellCounts],
        queries: NDArray[np.float64],
    ) -> float | None:
        """Show the model what the machines had to do and how long they took."""
        rows, times = [], []
        for machine, own in counts.items():
            if own.cells.size and busy_s[machine] > 0:
                pairs = float((own.counts * queries[own.cells]).sum())
                rows.append([1.0, own.points, pairs])
                times.append(busy_s[machine])
        return self._model.observe(rows, times) if rows else None
