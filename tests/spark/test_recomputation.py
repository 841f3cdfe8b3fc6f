"""A Spark stage that runs again with its rows in another order neither doubles nor loses points.

Spark runs a stage again when the blocks that it wrote are gone. Tasks that already have theirs
retain what they read in the old order; the others read in the new one. So the machine of a point
must not depend on the place of the point in its block. If Spark takes the rows of a stage for
indeterminate, it fails the job, which then has to run again as a whole.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cases import check_figures, expected, outcome, random_case
from pyspark.sql import SparkSession
from test_streaming import settings, stream, write_files

from roost import Pipeline
from roost.balance import Partition, Plan
from roost.engine import pipeline as engine
from roost.engine.executor import SparkExecutor
from roost.model.choices import Strategy
from roost.runtime.chain import Chain, Placement
from roost.runtime.records import PLANS
from roost.stages.contract import Output, Report, Task, Work
from roost.storage.cache import WorkerCache
from roost.storage.store import Fact

pytestmark = pytest.mark.spark

MACHINES = 6
POLL_S = 0.005
SORTED = "spark.sql.execution.sortBeforeRepartition"
"""Setting without which the output of ``repartition`` depends on the order of its input."""


def shared_plan(columns: int, rows: int) -> Plan:
    """Return a plan with partitions that three, two and one of the machines share."""
    middle, low = columns // 2, rows // 2
    partitions = (
        Partition(0, 0, 0, middle, rows, (0, 2, 4)),
        Partition(1, middle, 0, columns, low, (5, 1)),
        Partition(2, middle, low, columns, rows, (3,)),
    )
    plan = Plan(0, columns, rows, MACHINES, partitions, len(partitions))
    plan.check_invariants()
    return plan


@dataclass(frozen=True)
class Losing:
    """A matching task that deletes the blocks of the exchange once the first machine has read its.

    No machine is done before that, and there are more machines than cores: those that start later
    find their blocks gone.
    """

    task: Task
    shuffled: str
    notes: str

    def build(self, machine: int, cache: WorkerCache) -> Work:
        notes = Path(self.notes)
        notes.mkdir(parents=True, exist_ok=True)
        (notes / f"built-{machine}-{uuid.uuid4().hex}").touch()
        return LosingWork(self, machine, self.task.build(machine, cache))

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> Any:
        return self.task.merge(marks)

    def lose(self, machine: int) -> None:
        """Delete the blocks, or wait until another machine has."""
        notes = Path(self.notes)
        try:
            (notes / "claimed").touch(exist_ok=False)
        except FileExistsError:
            while not (notes / "lost").exists():
                time.sleep(POLL_S)
        else:
            for path in Path(self.shuffled).rglob("shuffle_*"):
                path.unlink(missing_ok=True)
            (notes / "losing").write_text(str(machine))
            (notes / "losing").rename(notes / "lost")


@dataclass(frozen=True)
class LosingWork:
    """The share of one machine of a :class:`Losing` task."""

    task: Losing
    machine: int
    work: Work

    def process(self, port: str, block: Any) -> Iterable[Output]:
        return self.work.process(port, block)

    def finish(self, marks: Any) -> Iterable[Output]:
        self.task.lose(self.machine)
        return self.work.finish(marks)

    def report(self) -> Report:
        return self.work.report()


class LosingExecutor(SparkExecutor):
    """Runs each batch with a :class:`Losing` task in place of the matching task."""

    def __init__(self, *args: Any, notes: Path) -> None:
        super().__init__(*args)
        self._notes = notes
        self._shuffled = str(self.context.getConf().get("spark.local.dir"))
        self._batch = 0

    def run(
        self, inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
    ) -> dict[str, list[Report]]:
        losing = Losing(tasks["matching"], self._shuffled, str(self._notes / str(self._batch)))
        self._batch += 1
        return super().run(inputs, chain, {**tasks, "matching": losing}, placement)


def in_any_order(notes: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Emit the rows of a partition in an order that no other attempt repeats, and note it."""
    table = pa.Table.from_batches(list(batches))
    order = np.random.default_rng(int.from_bytes(os.urandom(8), "big")).permutation(table.num_rows)
    table = table.take(pa.array(order))
    keys = " ".join(map(str, table["key"].to_pylist()))
    (Path(notes) / uuid.uuid4().hex).write_text(keys)
    yield from table.to_batches()


@pytest.fixture(params=[False, True], ids=["determinate", "indeterminate"])
def indeterminate(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Return whether Spark takes the rows of the stream for indeterminate."""
    assert spark.conf.get(SORTED) == "true"
    spark.conf.set(SORTED, str(not request.param).lower())
    yield request.param
    spark.conf.set(SORTED, "true")


def test_rows_in_another_order(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indeterminate: bool
) -> None:
    case = random_case(91, 600, 60, text_ids=True)
    write_files(case, tmp_path / "points", files=2)
    notes, orders = tmp_path / "notes", tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setattr(engine, "SparkExecutor", partial(LosingExecutor, notes=notes))
    config = settings(
        case,
        tmp_path,
        **{
            "engine.strategy": Strategy.UNIFORM,
            "engine.machines": MACHINES,
            "window.kind": "count",
            "window.length": 10_000,
        },
    )
    plan = shared_plan(*config.space.grid)
    partitions = 2 if indeterminate else 1  # of each batch
    frame = stream(spark, tmp_path / "points")
    if indeterminate:
        frame = frame.repartition(partitions)
    mixed = frame.mapInArrow(partial(in_any_order, str(orders)), frame.schema)
    if indeterminate:
        mixed = mixed.repartition(partitions)
    with Pipeline(config, spark=spark) as pipeline:
        pipeline.store.record(Fact(PLANS, 0, {**plan.to_json(), "strategy": "uniform"}))
        pipeline.start(mixed).awaitTermination()
        result = outcome(config.out.dir, pipeline.report())
        windowed = [row["key"] for row in pipeline.snapshot().collect()]
    assert result.report["batches"] == 2
    for number in range(2):
        built = Counter(path.name.split("-")[1] for path in (notes / str(number)).glob("built-*"))
        assert set(built) == {str(machine) for machine in range(MACHINES)}
        # The machine that was done runs again if the job does, and only then.
        assert (built[(notes / str(number) / "lost").read_text()] > 1) == indeterminate
    read = [path.read_text() for path in orders.iterdir()]
    # Each partition was read again, in another order.
    assert len(set(read)) == len(read) >= 4 * partitions
    assert len({frozenset(keys.split()) for keys in read}) == 2 * partitions
    assert result.matches == expected(case)
    check_figures(result, len(case.points))
    assert sorted(windowed) == sorted(point["id"] for point in case.points)
    assert sum(machine["points"] > 0 for machine in result.report["machines"]) == MACHINES
