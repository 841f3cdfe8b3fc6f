"""Moves of buckets to a machine that joins: both protocols, as in figure 19 of StreamCloud.

The same Aggregate runs on one machine more from some batch on, and the new machine gets its share
of the buckets: by state recreation, by window recreation, and by what Roost chooses. Stages, rounds
and moves are the engine's, and the times are those of each machine's task code. A batch is a second
of the stream. The cost of a move is the seconds until it is complete, plus its bytes at the speed
at which state is read from the disk. A second machine also joins on Spark, on the real cores, with
the tuples of all emulated ones and times by the clock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from roost.balance.changes import NoChange
from roost.bench.common import CORES, Line, Row
from roost.bench.flow_balance import KEYS, NODE, SOURCE, CallerFlow
from roost.dataflow.buckets import BUCKETS, BucketMap, bucket_of
from roost.dataflow.moves import BucketMove, MapChange, Recreation
from roost.model.arrays import Ints, as_arrow
from roost.runtime.chain import Chain, Placement
from roost.runtime.executor import Executor, InProcessExecutor
from roost.runtime.flow_rounds import FlowSnapshot
from roost.runtime.rounds import Proposal
from roost.stages.contract import Report, Task
from roost.stages.flow_routing import maps_of, stage_of

WINDOWS_S = (1, 5, 10)
MACHINES = (1, 15, 30)  # before another one joins
CHOSEN = "chosen"
REAL = "real cores"
PROTOCOLS: dict[str, Recreation | None] = {
    **{protocol.value: protocol for protocol in Recreation},
    CHOSEN: None,
}
FULL, QUICK = 20_000, 2_000  # tuples of a machine in a batch
BATCH_S = 1.0
SLOW = 2.0  # batches that take so many times the median are a pause
AFTER = 3  # batches after a move is complete


@dataclass
class Growth:
    """Policy that lets one machine join at the end of a batch."""

    protocol: Recreation | None
    batch: int
    read_speed: float = 0.0
    name: str = "growth"

    def propose(self, snapshot: FlowSnapshot) -> Proposal:
        """Give the new machine its share of the buckets."""
        status = snapshot.subqueries[NODE]
        if snapshot.clock != self.batch:
            return Proposal(NoChange("no machine joins"))
        self.read_speed = status.read_speed
        new = status.map.machines
        owners = dict.fromkeys(range(0, status.map.buckets, new + 1), new)
        return Proposal(MapChange(NODE, owners, "a machine joins", new + 1, self.protocol))


class TimedExecutor:
    """Notes the seconds of each batch, and the bytes of moves.

    Emulated machines work at the same time; on ``real`` cores, seconds are those of the clock.
    """

    def __init__(self, executor: Executor, *, real: bool = False) -> None:
        self._executor, self._real = executor, real
        self.seconds: list[float] = []
        self.moved: list[int] = []

    def __getattr__(self, name: str) -> Any:
        """Return what the executor has."""
        return getattr(self._executor, name)

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        """Run a batch."""
        started = time.perf_counter()
        found = self._executor.run(inputs, chain, tasks, placement)
        seconds = time.perf_counter() - started
        if not self._real:
            levels = (found[stage_of(name)] for name in (SOURCE, NODE))
            seconds = sum(max(one.seconds for one in reports) for reports in levels)
        self.seconds.append(seconds)
        counts = [one.counts for one in found[stage_of(NODE)]]
        self.moved.append(round(sum(one["read_bytes"] + one["sent_twice"] for one in counts)))
        return found


@dataclass(frozen=True)
class MoveRun:
    """One change of the map."""

    row: Row
    cost: float
    pauses: int
    lost: int
    doubled: int


def run_move(
    machines: int, size: int, name: str, tuples: int, real: Executor | None = None
) -> MoveRun:
    """Run the query until a move is complete, and some batches more; emulated, or on an executor.

    Machines have ``tuples`` each in a batch.
    """
    first = size + AFTER  # batch with the new map
    growth = Growth(PROTOCOLS[name], first - 1)
    executor = TimedExecutor(real or InProcessExecutor(), real=real is not None)
    random = np.random.default_rng(19)
    batches: list[Ints] = []
    moves: Sequence[BucketMove] = ()
    complete: int | None = None  # batch in which the move is complete
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(
            CallerFlow(
                Path(folder), executor, (size, 1), [growth], balance="off", machines=machines
            )
        ) as flow,
    ):
        while complete is None or flow.number <= complete + AFTER:
            batches.append(random.integers(0, KEYS, tuples * machines))
            flow.batch(batches[-1], complete is not None and flow.number == complete + AFTER)
            last = flow.store.last(maps_of(NODE))
            assert last is not None
            if flow.number == first:
                moves = BucketMap.from_json(*last).moves
            elif flow.number > first and complete is None:
                complete = None if BucketMap.from_json(*last).under_way else flow.number - 1
        lost, doubled = _differences(flow, batches, size)
    used = {move.protocol.value for move in moves}
    waited = (complete - first + 1) * BATCH_S
    moved = sum(executor.moved[first : complete + 1])
    median = statistics.median(executor.seconds[1:first])
    pauses = sum(s > SLOW * median for s in executor.seconds[first : complete + 1])
    buckets = bucket_of([as_arrow(np.arange(KEYS))], KEYS, BUCKETS)
    row: Row = {
        "machines": REAL if real else machines,
        "window_s": size,
        "protocol": name,
        "used": " and ".join(sorted(used)),
        "windows_moved": int(np.isin(buckets, [move.bucket for move in moves]).sum()) * size,
        "seconds": waited,
        "bytes": moved,
        "cost": waited + moved / growth.read_speed,
        "pauses": pauses,
        "batch_median_s": median,
    }
    return MoveRun(row, row["cost"], pauses, lost, doubled)


def _differences(flow: CallerFlow, batches: Sequence[Ints], size: int) -> tuple[int, int]:
    """Return how many results are missing, and how many are wrong or repeated."""
    counts = np.array([np.bincount(keys, minlength=KEYS) for keys in batches])
    expected = {
        start * KEYS + int(key): int(window[key])
        for start in range(1 - size, len(batches))
        for window in [counts[max(start, 0) : start + size].sum(axis=0)]
        for key in np.flatnonzero(window)
    }
    found, calls = flow.results()
    results = zip(found.tolist(), calls.tolist(), strict=True)
    right = {key for key, count in results if expected.get(key) == count}
    return len(expected) - len(right), found.size - len(right)


class Moves(NamedTuple):
    """Rows and summary of the part, and lines for plots."""

    rows: list[Row]
    summary: Row
    lines: Mapping[str, Mapping[str, Line]]


def on_real_cores(tuples: int) -> list[MoveRun]:
    """Let a second machine join on Spark, with a core for each."""
    from roost.engine.executor import SparkExecutor
    from roost.engine.session import make_session

    spark = make_session(f"local[{CORES}]")
    executor = SparkExecutor(spark.sparkContext)
    try:
        run_move(1, 1, CHOSEN, tuples, executor)  # starts workers, and loads code
        return [
            run_move(1, size, name, tuples, executor) for size in WINDOWS_S for name in PROTOCOLS
        ]
    finally:
        executor.close()
        spark.stop()


def measure(quick: bool) -> Moves:
    """Compare the protocols, and what is chosen with the better one."""
    tuples = QUICK if quick else FULL
    real = on_real_cores(MACHINES[-1] * tuples)
    runs = {
        (machines, size, name): run_move(machines, size, name, tuples)
        for machines in MACHINES
        for size in WINDOWS_S
        for name in PROTOCOLS
    }
    chosen = sum(run.cost for (_, _, name), run in runs.items() if name == CHOSEN)
    better = sum(
        min(runs[machines, size, protocol.value].cost for protocol in Recreation)
        for machines in MACHINES
        for size in WINDOWS_S
    )
    summary: Row = {
        "pause_batches": max(run.pauses for run in runs.values()),
        "pause_batches_real": max(run.pauses for run in real),
        "choice_regret": chosen / better - 1.0,
        "lost": sum(run.lost for run in (*runs.values(), *real)),
        "doubled": sum(run.doubled for run in (*runs.values(), *real)),
    }
    lines = {
        f"{machines} to {machines + 1} machines: {key}": {
            protocol.value: [
                (float(run.row["windows_moved"]), float(run.row[key]))
                for run in (runs[machines, size, protocol.value] for size in WINDOWS_S)
            ]
            for protocol in Recreation
        }
        for key in ("seconds", "bytes")
        for machines in MACHINES
    }
    return Moves([run.row for run in (*runs.values(), *real)], summary, lines)
