"""A cluster of many machines, measured on one core.

Every machine's part of a batch is run by the engine's own task code, one machine after the other,
and its processor time is measured. The machines of a real cluster would do this at the same time,
so a batch takes as long as the slowest of them: the slowest reader and router, then the slowest
matcher, reading ahead of moved queries included. Network and Spark's own time are left out, for
every strategy alike. Plans, rounds, statistics, intents and commits are the engine's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Strategy, initial_plan
from roost.balance.planner import GlobalPlanner, imbalance
from roost.balance.strategies import History
from roost.bench.cases import Pickups
from roost.bench.moving import Hotspot, MovingLoad, Step
from roost.engine.balancer import Balancer, GlobalBalancer, RoundSetup, SwarmBalancer
from roost.engine.batch import BatchRunner
from roost.engine.decode import PointSchema
from roost.engine.guarding import GuardRounds
from roost.engine.machine import match_blocks
from roost.engine.messages import BatchTask, MachineResult
from roost.engine.tasks import BlockReader, match_routed, route_blocks
from roost.model import TIMESTAMP
from roost.space import Space
from roost.state.admission import Rules
from roost.state.guard_keeper import GuardKeeper
from roost.state.queries import QuerySet
from roost.state.querylog import SqliteQueryLog
from roost.state.store import Store

LOG = "queries.db"
# A shared host is slower by half for some tenths of a second now and then. Times are the least of
# so many passes over all machines, which lie further apart than that.
PASSES = 3
POINTS = PointSchema("lon", "lat", "event_time", "id", pa.int64(), TIMESTAMP, pa.schema([]))


class TimedLoad(Protocol):
    """A load in rounds."""

    space: Space
    rounds: int

    @property
    def batch_us(self) -> int:
        """Event time of a round."""

    def standing(self) -> pa.Table:
        """Return requests for the standing queries."""

    def history(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Sample that a plan may learn from: points, and boxes of queries."""

    def step(self, number: int) -> Step:
        """Make one round."""


@dataclass(frozen=True)
class GuardOptions:
    """What is done against attacks."""

    seed: int = 0
    round_batches: int = 4
    evict: bool = False
    quarantine: bool = False


@dataclass(frozen=True)
class WorkRates:
    """Seconds that work takes, for when the clock of a shared host is too coarse a measure."""

    per_batch: float = 1e-3
    per_point: float = 1e-7
    per_check: float = 2e-9
    per_query_loaded: float = 1e-7

    def count(self, result: MachineResult) -> None:
        """Set a machine's times by what it did."""
        result.load_s = self.per_query_loaded * result.loaded_queries
        done = self.per_point * result.points + self.per_check * result.checks
        result.busy_s = self.per_batch + done + result.load_s


@dataclass(frozen=True)
class BatchFigures:
    """What one batch came to on the emulated cluster."""

    round: int
    points: int
    queries: int
    matches: int
    batch_s: float
    busy_s: float
    imbalance: float
    hot_share: float
    epoch: int
    partitions: int
    loaded_queries: int
    load_s: float
    decision_s: float
    bytes_sent: int
    fold_s: float

    @property
    def units(self) -> float:
        """Units of work: queries times points."""
        return float(self.points) * self.queries


def register(folder: Path, load: TimedLoad) -> None:
    """Make a state directory that has a load's standing queries, for clusters to begin with."""
    with closing(Store(folder)) as store, closing(SqliteQueryLog(folder / LOG)) as log:
        log.append(load.standing())
        QuerySet(store, log, Rules(load.space, pa.int64(), TIMESTAMP)).advance(log.end())


def _link_segments(source: str, target: str) -> None:
    """Copy small files, link segments: they never change."""
    if source.endswith(".seg"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


class EmulatedCluster:
    """One strategy on a number of machines.

    Parameters
    ----------
    folder
        Where its state goes; not there yet.
    base
        State directory that :func:`register` made.
    strategy, machines
        Who is to do what.
    load
        The load.
    guard
        What is done against attacks; None does nothing.
    work
        What work costs, where it is to be counted; None measures it.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        strategy: Strategy,
        machines: int,
        load: TimedLoad,
        guard: GuardOptions | None = None,
        work: WorkRates | None = None,
    ) -> None:
        self.strategy = strategy
        shutil.copytree(base, folder / "state", copy_function=_link_segments)
        self._store = Store(folder / "state")
        self._log = SqliteQueryLog(folder / "state" / LOG)
        rules = Rules(load.space, pa.int64(), TIMESTAMP, keep_born=guard is not None)
        self.keeper = None if guard is None else GuardKeeper.begin(self._store, guard.seed, 1 << 18)
        queries = QuerySet(self._store, self._log, rules, keeper=self.keeper)
        rounds = None
        if guard is not None and self.keeper is not None:
            rounds = GuardRounds(
                self.keeper,
                queries,
                load.space,
                guard.round_batches * load.batch_us,
                evict=guard.evict,
                quarantine=guard.quarantine,
            )
        history = None
        if strategy in (Strategy.HISTORY, Strategy.GLOBAL):  # the engine gives both a sample
            x, y, boxes = load.history()
            history = History.of(load.space.grid, x, y, boxes)
        plan = initial_plan(strategy, load.space.grid, machines, history)
        self._store.put_plan(0, {**plan.to_json(), "strategy": strategy.value})
        self._runner = BatchRunner(
            store=self._store,
            log=self._log,
            queries=queries,
            space=load.space,
            points=POINTS,
            query_id_type=pa.int64(),
            out=folder / "out",
            epoch=0,
            balancer=self._balancer(queries, load, rounds),
            keeper=self.keeper,
            keep_matches=False,
            on_step=self._on_step,
        )
        self._fold_s = 0.0
        self._work = work
        self._machines = machines
        self._points: pa.Table | None = None
        self._route_s = 0.0
        self._round = 0

    def _balancer(
        self, queries: QuerySet, load: TimedLoad, guard: GuardRounds | None
    ) -> Balancer | None:
        # Half of it: every batch ends a round.
        setup = RoundSetup(self._store, queries, load.batch_us // 2, guard=guard)
        if self.strategy is Strategy.SWARM:
            return SwarmBalancer(setup)
        if self.strategy is Strategy.GLOBAL:
            return GlobalBalancer(setup, load.space, GlobalPlanner())
        return None

    def decisions(self) -> list[dict[str, Any]]:
        """Return what the guard decided, in order."""
        return self._store.guard.log()

    def _on_step(self, step: str, batch_id: int) -> None:
        """Time the fold, which the driver does before a batch."""
        if step == "fold":
            self._fold_s = -time.process_time()
        elif step == "match":
            self._fold_s += time.process_time()

    def close(self) -> None:
        """Release the files."""
        self._store.close()
        self._log.close()

    def run(self, step: Step) -> BatchFigures:
        """Run one batch."""
        if step.requests is not None:
            self._log.append(step.requests)
        self._points = step.points
        commit = self._runner.run(self._round, {}, self._job)
        figures = commit.figures
        assert figures["points"] == step.points.num_rows
        busy = [row["busy_s"] for row in figures["machines"]]
        last = self._store.last_round()
        decided = last is not None and last["batch_id"] == self._round
        plan = self._store.plan(figures["epoch"])
        self._round += 1
        return BatchFigures(
            round=commit.batch_id,
            points=figures["points"],
            queries=step.queries,
            matches=figures["matches"],
            batch_s=self._route_s + max(busy),
            busy_s=sum(busy),
            imbalance=imbalance(np.asarray(busy)),
            hot_share=step.hot_share,
            epoch=figures["epoch"],
            partitions=len(plan["partitions"]),
            loaded_queries=figures["loaded_queries"],
            load_s=figures["load_s"],
            decision_s=last["seconds"] if last and decided else 0.0,
            bytes_sent=last["bytes_sent"] if last and decided else 0,
            fold_s=self._fold_s,
        )

    def _job(self, task: BatchTask) -> list[MachineResult]:
        """Run every machine's part, several times over; the least time of each counts."""
        if self._work is not None:
            self._route_s = 0.0
            _, results = self._pass(task)
            for result in results:
                self._work.count(result)
            return results
        passes = [self._pass(task) for _ in range(PASSES)]
        self._route_s = max(
            min(times) for times in zip(*(routed for routed, _ in passes), strict=True)
        )
        results = passes[0][1]
        for result, *others in zip(*(found for _, found in passes), strict=True):
            busy = min(other.busy_s - other.load_s for other in (result, *others))
            result.busy_s = busy + result.load_s  # what is loaded stays loaded: only once
        return results

    def _pass(self, task: BatchTask) -> tuple[list[float], list[MachineResult]]:
        """Run every machine's part once: time of each that reads and routes, and the results."""
        assert self._points is not None
        rows, machines = self._points.num_rows, self._machines
        borders = [rows * k // machines for k in range(machines + 1)]
        parts = [self._points.slice(a, b - a) for a, b in pairwise(borders)]
        if task.plan.fully_replicated:
            return [0.0], [_read_and_match(task, m, part) for m, part in enumerate(parts)]
        packed: list[list[bytes]] = [[] for _ in range(machines)]
        routed = []
        for part in parts:
            started = time.process_time()
            for machine, block in route_blocks(task, BlockReader(task).blocks([part])):
                packed[machine].append(block)
            routed.append(time.process_time() - started)
        results: list[MachineResult] = []
        for machine in range(machines):
            items: Iterator[Any] = ((machine, block) for block in packed[machine])
            results += match_routed(task, machine, items)
        return routed, results


def _read_and_match(task: BatchTask, machine: int, part: pa.Table) -> MachineResult:
    started = time.process_time()
    result = MachineResult(machine)
    match_blocks(task, BlockReader(task).blocks([part]), result)
    result.busy_s = time.process_time() - started
    return result


def run_timeline(
    folder: Path, base: Path, strategy: Strategy, machines: int, load: TimedLoad
) -> list[BatchFigures]:
    """Run a load from its first round to its last."""
    with closing(EmulatedCluster(folder, base, strategy, machines, load)) as cluster:
        return [cluster.run(load.step(number)) for number in range(load.rounds)]


def run_strategies(
    load: MovingLoad,
    machines: int,
    on_strategy: Callable[[Strategy], None] = lambda strategy: None,
) -> dict[Strategy, list[BatchFigures]]:
    """Run a load with every strategy; what they match must be the same."""
    found: dict[Strategy, list[BatchFigures]] = {}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        register(base, load)
        for strategy in Strategy:
            on_strategy(strategy)
            folder = Path(name) / strategy.value
            found[strategy] = run_timeline(folder, base, strategy, machines, load)
            shutil.rmtree(folder)
            first = found[Strategy.REPLICATED]
            same = [f.matches for f in found[strategy]] == [f.matches for f in first]
            assert same, f"{strategy.value} does not match what replicated does"
    return found


def warm_up(pickups: Pickups, machines: int) -> None:
    """Have everything compiled before anything is measured."""
    hot = (Hotspot(0.3, 0.6, 0.4, (0.1, 0.1), step=True),)
    run_strategies(MovingLoad(pickups, 2_000, 12, 4_000, hot), machines)


def summed(figures: Sequence[BatchFigures]) -> dict[str, float]:
    """Units of work and latency over some batches."""
    seconds = sum(f.batch_s for f in figures)
    times = sorted(f.batch_s for f in figures)
    return {
        "units_per_s": sum(f.units for f in figures) / seconds,
        "points_per_s": sum(f.points for f in figures) / seconds,
        "latency_ms": 1e3 * seconds / len(figures),
        "latency_p95_ms": 1e3 * times[min(len(times) - 1, int(0.95 * len(times)))],
        "imbalance": sum(f.imbalance for f in figures) / len(figures),
        "plan_changes": figures[-1].epoch - figures[0].epoch,
        "partitions": figures[-1].partitions,
        "moved_queries": sum(f.loaded_queries for f in figures),
        "move_s": sum(f.load_s for f in figures),
        "decision_ms": 1e3 * sum(f.decision_s for f in figures) / len(figures),
        "bytes_per_round": sum(f.bytes_sent for f in figures) / len(figures),
    }
