"""A cluster of many machines, measured on one core.

The engine's own task code runs each machine's part of a batch, one machine after the other, and
its processor time is measured. The machines of a real cluster run at the same time, so a batch
takes as long as the slowest reader and router, then the slowest matcher, which includes loading
moved queries. Network and Spark's own time are not included, for any strategy. Plans, rounds,
statistics, intents and commits are the engine's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from roost.balance.planner import imbalance
from roost.balance.rules import SwarmRules
from roost.bench.common import Row
from roost.bench.moving import MovingLoad, Step, TimedLoad
from roost.bench.streams import LOG, BatchTimes, admit
from roost.model.choices import Strategy
from roost.model.schemas import TIMESTAMP
from roost.model.settings import RunConfig, with_settings
from roost.queries.log import SqliteQueryLog
from roost.runtime.assembly import Hooks, StreamShape, assemble
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import Executor, InProcessExecutor
from roost.runtime.records import last_round, plan_of
from roost.stages.contract import Report, Task
from roost.stages.decode import PointSchema
from roost.stages.flow import RECEIVING
from roost.stages.matching import MatchingStage
from roost.stages.reading import ReadingStage
from roost.storage.store import Store

COMMITTED = ("points", "matches", "epoch", "loaded_queries", "load_s")
# A shared host slows down for some tenths of a second at times. Each time is the minimum over
# passes over all machines; two passes of one machine are further apart than that.
PASSES = 3
READERS_COUNTED = 2
SECONDS_PER_BATCH, SECONDS_PER_POINT = 1e-3, 1e-7
SECONDS_PER_CHECK, SECONDS_PER_BYTE_LOADED = 2e-9, 1e-9
POINTS = PointSchema("lon", "lat", "event_time", "id", pa.int64(), TIMESTAMP, pa.schema([]))


def counted_work(report: Report) -> Report:
    """Replace a machine's times by those of its counted work, which do not depend on the host."""
    if report.stage != MatchingStage.name:
        return replace(report, seconds=0.0)
    counts = report.counts
    load_s = SECONDS_PER_BYTE_LOADED * counts["loaded_bytes"]
    match_s = SECONDS_PER_POINT * counts["points"] + SECONDS_PER_CHECK * counts["checks"]
    seconds = SECONDS_PER_BATCH + match_s + load_s
    return replace(report, counts={**counts, "load_s": load_s}, seconds=seconds)


class Variant(NamedTuple):
    """A strategy, and the rules of ``swarm``."""

    strategy: Strategy
    rules: SwarmRules = SwarmRules()


@dataclass(frozen=True)
class TableInputs:
    """Points in memory, in one part per machine."""

    table: pa.Table
    groups: Mapping[tuple[str, int], pa.Table] = field(default_factory=dict)  # by part

    def dealt(
        self, machines: int | None, number: int, executor: Executor
    ) -> tuple[TableInputs, Mapping[str, Sequence[int]]]:
        """Divide the rows evenly among all machines."""
        readers = executor.readers if isinstance(executor, EmulatedExecutor) else executor.slots
        count = machines or readers
        borders = [self.table.num_rows * k // count for k in range(count + 1)]
        stage = ReadingStage.name
        parts = {
            (stage, k): self.table.slice(a, b - a) for k, (a, b) in enumerate(pairwise(borders))
        }
        return TableInputs(self.table, parts), {stage: range(count)}


class EmulatedExecutor(InProcessExecutor):
    """Runs each machine's part several times and reports its minimum time.

    ``work`` replaces the times of reports, as :func:`counted_work`; None measures them.
    ``seconds`` is the time of the last batch if all parts of a level run at the same time;
    ``parts`` has the times of its parts.
    """

    def __init__(self, machines: int, work: Callable[[Report], Report] | None = None) -> None:
        super().__init__(machines, work or (lambda report: report))
        self._passes = PASSES if work is None else 1
        # Counted times do not depend on how many tasks read.
        self.readers = machines if work is None else min(machines, READERS_COUNTED)
        self.seconds = 0.0
        self.parts: dict[tuple[str, int], PartTime] = {}

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run the batch; returns the reports of the first pass with the minimum times."""
        passes, pickled = [], []
        for _ in range(self._passes):
            passes.append(super().run(inputs, chain, tasks, placement))
            pickled.append(dict(self.pickling))
        first, *others = passes
        found = {
            name: [_least(mine) for mine in zip(reports, *(o[name] for o in others), strict=True)]
            for name, reports in first.items()
        }
        parts: dict[tuple[int, str, int], float] = defaultdict(float)
        for name, reports in found.items():
            level = chain.by_name[name].level
            for report in reports:
                parts[level, report.root, report.machine] += report.seconds
        slowest = [
            max(s for (number, _, _), s in parts.items() if number == level)
            for level in range(chain.levels)
        ]
        self.seconds = sum(slowest)
        self.parts = {
            (root, machine): PartTime(
                seconds,
                sum(
                    _exchange(report)
                    for reports in found.values()
                    for report in reports
                    if (report.root, report.machine) == (root, machine)
                ),
                min(one.get((root, machine), 0.0) for one in pickled),
            )
            for (_, root, machine), seconds in parts.items()
        }
        return found


class PartTime(NamedTuple):
    """Processor time of one machine's part of a batch."""

    seconds: float  # of the task code
    exchange: float  # of this, dividing, packing and unpacking blocks
    pickling: float  # beside it


def _exchange(report: Report) -> float:
    return report.sending + report.counts.get(RECEIVING, 0.0)


def _least(reports: tuple[Report, ...]) -> Report:
    """Return the first report with the minimum time; only the first pass loads queries."""
    first = reports[0]
    busy, least = min(
        (report.seconds - report.counts.get("load_s", 0.0), number)
        for number, report in enumerate(reports)
    )
    counts = dict(first.counts)
    if RECEIVING in counts:
        counts[RECEIVING] = reports[least].counts[RECEIVING]
    seconds = busy + first.counts.get("load_s", 0.0)
    return replace(first, seconds=seconds, sending=reports[least].sending, counts=counts)


@dataclass(frozen=True, kw_only=True)
class RoundMetrics:
    """Metrics of one round, which is one batch."""

    round: int
    points: int
    queries: int
    batch_s: float
    imbalance: float
    epoch: int
    partitions: int
    loaded_queries: int
    load_s: float
    decision_s: float
    bytes_sent: int

    @property
    def units_per_s(self) -> float:
        """Units of work (queries times points) per second."""
        return self.points * self.queries / self.batch_s


@dataclass(frozen=True, kw_only=True)
class BatchMetrics(RoundMetrics):
    """Metrics of one batch on the emulated cluster."""

    matches: int
    apply_s: float


def _link_segments(source: str, target: str) -> None:
    """Copy a file; link a segment, which never changes."""
    if source.endswith(".seg"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


class EmulatedCluster:
    """One strategy on a number of machines.

    Its state and output are in ``folder``, which must not exist. The state directory ``base`` has
    the standing queries, from :func:`roost.bench.streams.admit`. ``work`` is as for
    :class:`EmulatedExecutor`.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        strategy: Strategy,
        machines: int,
        load: TimedLoad,
        settings: Mapping[str, Any] | None = None,
        work: Callable[[Report], Report] | None = None,
        rules: SwarmRules = SwarmRules(),  # noqa: B008 - immutable
    ) -> None:
        shutil.copytree(base, folder / "state", copy_function=_link_segments)
        self.store = Store(folder / "state")
        self._log = SqliteQueryLog(folder / "state" / LOG)
        self._executor = EmulatedExecutor(machines, work)
        common = {
            "engine.strategy": strategy,
            "engine.machines": machines,
            "balance.round": load.round_s / 2,  # every batch ends a round
            "queries.id_type": "int",
            "out.sink": "count",
            "out.dir": folder / "out",
            "out.state": folder / "state",
        }
        self._times = BatchTimes(time.process_time)
        self._loop = assemble(
            with_settings(RunConfig(), {**common, **(settings or {})}),
            self.store,
            self._log,
            self._executor,
            StreamShape(POINTS, load.space, load),
            hooks=Hooks(on_step=self._times.on_step, seed=0, swarm=rules),
        )
        self._round = 0

    def close(self) -> None:
        """Close the state."""
        self.store.close()
        self._log.close()

    def run(self, step: Step) -> BatchMetrics:
        """Run one batch."""
        if step.requests is not None:
            self._log.append(step.requests)
        metrics = self._loop.run(self._round, {}, TableInputs(step.points)).figures
        assert metrics["points"] == step.points.num_rows
        last = last_round(self.store)
        ended = last is not None and last["batch_id"] == self._round
        decided: Row = last if last and ended else {"seconds": 0.0, "bytes_sent": 0}
        self._round += 1
        return BatchMetrics(
            round=self._round - 1,
            queries=step.queries,
            batch_s=self._executor.seconds,
            imbalance=imbalance(np.array([row["busy_s"] for row in metrics["machines"]])),
            partitions=len(plan_of(self.store, metrics["epoch"])["partitions"]),
            decision_s=decided["seconds"],
            bytes_sent=decided["bytes_sent"],
            apply_s=self._times.between("apply", "run")[-1],
            **{key: metrics[key] for key in COMMITTED},
        )


STRATEGIES = {strategy.value: Variant(strategy) for strategy in Strategy}
Metrics = TypeVar("Metrics", bound=RoundMetrics)


def run_strategies(
    load: MovingLoad,
    machines: int,
    variants: Mapping[str, Variant] = STRATEGIES,
    work: Callable[[Report], Report] | None = None,
) -> dict[str, list[BatchMetrics]]:
    """Run a load with every variant, by name; all must find the same matches."""
    found: dict[str, list[BatchMetrics]] = {}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        admit(base, load.space, load.standing())
        for label, (strategy, rules) in variants.items():
            folder = Path(name) / label
            with closing(
                EmulatedCluster(folder, base, strategy, machines, load, work=work, rules=rules)
            ) as cluster:
                found[label] = [cluster.run(load.step(k)) for k in range(load.rounds)]
            shutil.rmtree(folder)
            first = next(iter(found.values()))
            same = [m.matches for m in found[label]] == [m.matches for m in first]
            assert same, f"{label} finds other matches than {next(iter(found))}"
    return found


def lines(
    found: Mapping[str, Sequence[Metrics]], metric: Callable[[Metrics], float]
) -> dict[str, list[tuple[float, float]]]:
    """Return a metric by round, for each strategy."""
    return {name: [(m.round, metric(m)) for m in batches] for name, batches in found.items()}


def summed(batches: Sequence[RoundMetrics]) -> dict[str, float]:
    """Return throughput, latency and cost of balancing over some batches."""
    count, seconds = len(batches), sum(m.batch_s for m in batches)
    times = sorted(m.batch_s for m in batches)
    return {
        "units_per_s": sum(m.points * m.queries for m in batches) / seconds,
        "points_per_s": sum(m.points for m in batches) / seconds,
        "latency_ms": 1e3 * seconds / count,
        "latency_p95_ms": 1e3 * times[min(count - 1, int(0.95 * count))],
        "imbalance": sum(m.imbalance for m in batches) / count,
        "plan_changes": batches[-1].epoch - batches[0].epoch,
        "partitions": batches[-1].partitions,
        "moved_queries": sum(m.loaded_queries for m in batches),
        "move_s": sum(m.load_s for m in batches),
        "decision_ms": 1e3 * sum(m.decision_s for m in batches) / count,
        "bytes_per_round": sum(m.bytes_sent for m in batches) / count,
    }
