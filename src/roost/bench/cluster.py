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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance.planner import imbalance
from roost.bench.cases import Pickups
from roost.bench.moving import Hotspot, MovingLoad, Step
from roost.model.choices import Strategy
from roost.model.schemas import TIMESTAMP
from roost.model.settings import RunConfig, with_settings
from roost.model.space import Space
from roost.queries.admission import Rules
from roost.queries.guard_state import decisions
from roost.queries.live import QuerySet
from roost.queries.log import SqliteQueryLog
from roost.runtime.assembly import Hooks, StreamShape, assemble
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import Executor, InProcessExecutor
from roost.runtime.records import last_round, plan_of
from roost.stages.contract import Report, Task
from roost.stages.decode import PointSchema
from roost.stages.matching import MatchingStage
from roost.storage.store import Store

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
    per_byte_loaded: float = 1e-9

    def __call__(self, report: Report) -> Report:
        """Replace a machine's times by what it did."""
        if report.stage != MatchingStage.name:
            return replace(report, seconds=0.0)
        counts = report.counts
        load_s = self.per_byte_loaded * counts["loaded_bytes"]
        done = self.per_point * counts["points"] + self.per_check * counts["checks"]
        return replace(
            report, counts={**counts, "load_s": load_s}, seconds=self.per_batch + done + load_s
        )


@dataclass(frozen=True)
class TableInputs:
    """Points in memory, in as many parts as there are machines."""

    table: pa.Table
    groups: tuple[pa.Table, ...] = ()

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[TableInputs, tuple[int, ...]]:
        """Divide the rows evenly among all machines."""
        count = executor.slots
        borders = [self.table.num_rows * k // count for k in range(count + 1)]
        parts = tuple(self.table.slice(a, b - a) for a, b in pairwise(borders))
        return TableInputs(self.table, parts), tuple(range(count))


class EmulatedExecutor(InProcessExecutor):
    """Runs every machine's part several times over; the least time of each counts.

    Parameters
    ----------
    machines
        How many machines there are.
    work
        What work costs, if it is to be counted; None measures it.

    Attributes
    ----------
    seconds
        Time that the last batch takes if all parts of a level run at the same time.
    """

    def __init__(self, machines: int, work: WorkRates | None = None) -> None:
        super().__init__(machines, (lambda report: report) if work is None else work)
        self._passes = PASSES if work is None else 1
        self.seconds = 0.0

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run the batch; returns the reports of the first pass with the least times."""
        run = super().run
        first, *others = [run(inputs, chain, tasks, placement) for _ in range(self._passes)]
        found = {
            name: [_least(mine) for mine in zip(reports, *(o[name] for o in others), strict=True)]
            for name, reports in first.items()
        }
        parts: dict[tuple[int, str, int], float] = defaultdict(float)
        for name, reports in found.items():
            level = chain.node(name).level
            for report in reports:
                parts[level, report.root, report.machine] += report.seconds
        slowest = [
            max(s for (number, _, _), s in parts.items() if number == level)
            for level in range(chain.levels)
        ]
        self.seconds = sum(slowest)
        return found


def _least(reports: tuple[Report, ...]) -> Report:
    """Return the first report with the least time; what is loaded stays loaded, so only once."""
    first = reports[0]
    busy = min(report.seconds - report.counts.get("load_s", 0.0) for report in reports)
    return replace(first, seconds=busy + first.counts.get("load_s", 0.0))


@dataclass(frozen=True)
class BatchFigures:
    """Metrics of one batch on the emulated cluster."""

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


@dataclass(frozen=True)
class _History:
    """The sample that a plan may learn from."""

    load: TimedLoad

    def sample(self, columns: list[str]) -> pa.Table:
        """Return the points of the sample."""
        x, y, _ = self.load.history()
        return pa.table(dict(zip(columns, (x, y), strict=True)))


class EmulatedCluster:
    """One strategy on a number of machines.

    Parameters
    ----------
    folder
        Where its state goes; must not exist.
    base
        State directory that :func:`register` made.
    strategy, machines
        How work is assigned, and to how many.
    load
        The load.
    guard
        What is done against attacks; None does nothing.
    work
        What work costs, if it is to be counted; None measures it.
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
        shutil.copytree(base, folder / "state", copy_function=_link_segments)
        self._store = Store(folder / "state")
        self._log = SqliteQueryLog(folder / "state" / LOG)
        self._executor = EmulatedExecutor(machines, work)
        self._loop = assemble(
            _config(folder, strategy, machines, load, guard),
            self._store,
            self._log,
            self._executor,
            StreamShape(POINTS, load.space, _History(load)),
            hooks=Hooks(on_step=self._on_step, seed=0 if guard is None else guard.seed),
        )
        self.guard = self._loop.guard
        self._fold_s = 0.0
        self._round = 0

    def decisions(self) -> list[dict[str, Any]]:
        """Return the guard's decisions, in order."""
        return decisions(self._store)

    def _on_step(self, step: str, batch_id: int) -> None:
        """Time the replay of the log, which the driver does before a batch."""
        if step == "apply":
            self._fold_s = -time.process_time()
        elif step == "run":
            self._fold_s += time.process_time()

    def close(self) -> None:
        """Close the state."""
        self._store.close()
        self._log.close()

    def run(self, step: Step) -> BatchFigures:
        """Run one batch."""
        if step.requests is not None:
            self._log.append(step.requests)
        commit = self._loop.run(self._round, {}, TableInputs(step.points))
        figures = commit.figures
        assert figures["points"] == step.points.num_rows
        busy = [row["busy_s"] for row in figures["machines"]]
        last = last_round(self._store)
        decided = last is not None and last["batch_id"] == self._round
        plan = plan_of(self._store, figures["epoch"])
        self._round += 1
        return BatchFigures(
            round=commit.batch_id,
            points=figures["points"],
            queries=step.queries,
            matches=figures["matches"],
            batch_s=self._executor.seconds,
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


def _config(
    folder: Path,
    strategy: Strategy,
    machines: int,
    load: TimedLoad,
    guard: GuardOptions | None,
) -> RunConfig:
    """Return the settings of a cluster; every batch ends a round, which is half as long."""
    settings: dict[str, Any] = {
        "engine.strategy": strategy,
        "engine.machines": machines,
        "balance.round": load.batch_us / 2e6,
        "queries.id_type": "int",
        "out.sink": "count",
        "out.dir": folder / "out",
        "out.state": folder / "state",
    }
    if guard is not None:
        settings |= {
            "guard.enabled": True,
            "guard.round": guard.round_batches * load.batch_us / 1e6,
            "guard.evict": guard.evict,
            "guard.quarantine": guard.quarantine,
        }
    return with_settings(RunConfig(), settings)


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
