"""Single operators on emulated machines and on real cores, against the offered load.

The engine's own task code runs each machine's part of a batch, one after the other
(:mod:`roost.bench.cluster`). Machines work at the same time: a batch takes as long as the slowest
reader, then the slowest machine of the operator. Every part begins with an empty cache, so reading
files and state is included; network and Spark's own time are not.

A batch of the offered load arrives in the time that one machine takes for its share. Throughput is
what the machines process in the longer of this time and their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from roost.bench.calls import TYPES, CallCase, write_calls
from roost.bench.cluster import EmulatedExecutor
from roost.bench.common import Row
from roost.bench.streams import BatchTimes
from roost.dataflow.flow import Dataflow
from roost.engine.pipeline import Pipeline
from roost.model.settings import RunConfig
from roost.runtime.executor import Executor
from roost.runtime.pipeline import BasePipeline
from roost.storage.cache import WorkerCache

BUCKETS = 4096  # 256 equal buckets would limit 40 over 20 machines to 13/7
BATCHES = 2  # the first fills the window and is not counted
COVERED_S = 60  # event time of a batch
OVERLAPPING = (
    "left.start < right.start and right.start < left.end"
    " and (left.src = right.src or left.src = right.dst"
    " or left.dst = right.src or left.dst = right.dst)"
)


class ColdExecutor(EmulatedExecutor):
    """Emulates machines whose caches are empty."""

    def cache(self, name: str) -> WorkerCache:
        """Return a new cache for each part."""
        return WorkerCache()


class EmulatedPipeline(BasePipeline):
    """Runs batches on emulated machines."""

    def __init__(self, config: RunConfig, executor: Executor, **hooks: Any) -> None:
        super().__init__(config, **hooks)
        self._executor = executor

    @property
    def executor(self) -> Executor:
        """What runs the tasks."""
        return self._executor


@dataclass(frozen=True)
class ScaledOperator:
    """One operator of figure 16."""

    name: str
    columns: tuple[str, ...]
    build: Callable[[Dataflow, Any], None]
    product: bool = False  # its work is comparisons, the square of its tuples

    def rows(self, share: int, machines: int, load: float) -> int:
        """Return the tuples of a batch, given those that one machine has under full load."""
        many = load * machines
        return max(1, round(share * (many**0.5 if self.product else many)))

    def work(self, rows: int) -> int:
        """Return the tuples of a batch, or the comparisons that it needs."""
        if not self.product:
            return rows
        # Calls arrive evenly; a call meets those that start less than the window's size away, and
        # at least one of both is new.
        starts = np.arange(2 * rows) * (COVERED_S / rows)
        low = np.searchsorted(starts, starts - COVERED_S, side="right")
        high = np.searchsorted(starts, starts + COVERED_S, side="left")
        return int((high - low)[rows:].sum() + (high - np.maximum(low, rows))[:rows].sum())

    def flow(self, calls: Path) -> Dataflow:
        """Return the dataflow."""
        flow = Dataflow(self.name)
        schema = {name: TYPES[name] for name in self.columns}
        self.build(flow, flow.source("calls", schema, time="start", path=str(calls)))
        return flow


def _map(flow: Dataflow, calls: Any) -> None:
    microseconds = (pc.field("end") - pc.field("start")).cast("int64")
    calls.map({"src": pc.field("src"), "duration": microseconds}, name="map").sink("out")


def _aggregate(flow: Dataflow, calls: Any) -> None:
    microseconds = (pc.field("end") - pc.field("start")).cast("int64")
    seconds = microseconds.cast("double") / 1e6
    durations = calls.map({"district": pc.field("district"), "duration": seconds}, name="map")
    functions = {"calls": "count", "mean": "avg(duration)"}
    durations.aggregate(functions, by="district", size=60, advance=10, name="aggregate").sink("out")


def _join(flow: Dataflow, calls: Any) -> None:
    condition = "left.src = right.src and left.start < right.start"
    calls.join(calls, condition, size=COVERED_S, name="join").sink("out")


def _product(flow: Dataflow, calls: Any) -> None:
    calls.product(calls, OVERLAPPING, size=COVERED_S, name="product").sink("out")


NUMBERS = ("src", "dst", "start", "end")
OPERATORS = (
    ScaledOperator("map", ("src", "start", "end"), _map),
    ScaledOperator("aggregate", ("district", "start", "end"), _aggregate),
    ScaledOperator("join", ("src", "start", "lat", "lon"), _join),
    ScaledOperator("product", NUMBERS, _product, product=True),
)


def files_of(
    operator: ScaledOperator, rows: int, parts: int, folder: Path
) -> tuple[CallCase, Path]:
    """Write the batches of an operator, with a row group for each reader."""
    calls = f"rate={rows / COVERED_S},callers={max(rows, 2)},districts=100,skew=uniform"
    case = CallCase(operator.name, operator.name, calls, BATCHES * rows, rows)
    return case, write_calls(case, folder, groups=parts)


def emulated(operator: ScaledOperator, machines: int, rows: int) -> float:
    """Return the seconds of a batch on emulated machines."""
    with tempfile.TemporaryDirectory(prefix="roost-operators-") as name:
        case, calls = files_of(operator, rows, machines, Path(name))
        executor = ColdExecutor(machines)
        times: list[float] = []
        config = RunConfig(
            out={"dir": Path(name) / "out"},
            engine={"batch_rows": case.batch_rows, "available_now": True},
            dataflow={"machines": machines, "buckets": BUCKETS},
        )
        pipeline = EmulatedPipeline(
            config,
            executor,
            flow=operator.flow(calls),
            on_batch=lambda commit: times.append(executor.seconds),
        )
        with pipeline:
            pipeline.run()
        assert len(times) == BATCHES
        return times[-1]


def scale(
    operator: ScaledOperator, share: int, counts: Sequence[int], loads: Sequence[float]
) -> list[Row]:
    """Measure an operator on emulated machines; ``share`` is the tuples of one machine."""
    emulated(operator, 1, min(share, 2_000))  # compiles
    alone = emulated(operator, 1, share)
    rows: list[Row] = []
    for machines in counts:
        for load in loads:
            count = operator.rows(share, machines, load)
            seconds = emulated(operator, machines, count)
            work = operator.work(count)
            rows.append(
                {
                    "part": "emulated", "operator": operator.name, "machines": machines,
                    "load": load, "rows": count, "seconds": seconds,
                    "offered_per_s": work / alone, "per_s": work / max(alone, seconds),
                    "unit": "comparisons" if operator.product else "tuples",
                }
            )  # fmt: skip
    return rows


def best(rows: Sequence[Row], operator: str, machines: int) -> float | None:
    """Return the greatest throughput of an operator on some machines."""
    mine = [row for row in rows if row["part"] == "emulated" and row["operator"] == operator]
    found = [row["per_s"] for row in mine if row["machines"] == machines]
    return max(found, default=None)


def on_cores(operator: ScaledOperator, cores: int, spark: Any, share: int) -> Row:
    """Measure an operator on Spark, on real cores."""
    rows = operator.rows(share, cores, 1.0)
    with tempfile.TemporaryDirectory(prefix="roost-operators-") as name:
        case, calls = files_of(operator, rows, cores, Path(name))
        seconds = []
        for number in range(3):
            times = BatchTimes()
            config = RunConfig(
                out={"dir": Path(name) / f"out-{number}"},
                engine={"batch_rows": case.batch_rows, "available_now": True, "machines": cores},
            )
            flow = operator.flow(calls)
            hooks = {"on_step": times.on_step, "on_batch": times.on_batch}
            with Pipeline(config, spark=spark, flow=flow, **hooks) as pipeline:
                pipeline.run()
            seconds.append(times.between("intent", "end")[-1])
    work = operator.work(rows)
    return {
        "part": "cores", "operator": operator.name, "cores": cores, "rows": rows,
        "seconds": min(seconds), "per_s": work / min(seconds),
        "unit": "comparisons" if operator.product else "tuples",
    }  # fmt: skip
