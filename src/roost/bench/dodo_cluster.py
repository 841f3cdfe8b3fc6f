"""The row *real* of ``roost bench dodo``: top-N topics on two resource profiles of a local cluster.

Counting and ranking begin on the same executor. ``algorithm_1`` measures their load, and moves one
of them to the other group while the stream runs. Their costs of an event are those of the thesis,
as busy loops: Roost's own operators would need a million tweets per second for the same load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from roost.bench.applications import application
from roost.dataflow.flow import Dataflow
from roost.dataflow.operators import Aggregate
from roost.engine.pipeline import Pipeline
from roost.engine.standalone import Host, StandaloneCluster
from roost.model.elastic import DEFAULT_GROUP
from roost.model.settings import RunConfig
from roost.runtime.chain import Chain, Placement
from roost.runtime.group_rounds import GROUP_ROUNDS
from roost.runtime.operator_placement import PLACEMENT
from roost.runtime.records import Commit, last_intent
from roost.stages.contract import Report, Task
from roost.stages.flow_routing import stage_of
from roost.stages.flow_subquery import SubqueryTask

RATE = 500  # tweets per second, with three topics each on average
COUNT_S, RANK_S = 208e-6, 35e-6  # of an event
EVERY_S = 1.0
OTHER = "other"
MEMORY = {DEFAULT_GROUP: "480m", OTHER: "470m"}
OPERATORS = ("count", "rank")


def tweets(rows: int | None = None) -> str:
    """Return the stream of tweets, or so many of them."""
    end = "" if rows is None else f",rows={rows}"
    return f"generate:tweets,rate={RATE},seed=7,topics=2000,most=5,pace=live{end}"


def busy(seconds: float) -> None:
    """Use so much processor time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


class CostlyCount:
    """Counts topics, at the cost of an event in the thesis."""

    columns = ("topic",)
    type = pa.int64()

    def partial(self, topic: pa.Array) -> int:
        """Count rows."""
        busy(COUNT_S * len(topic))
        return len(topic)

    def merge(self, states: list[int]) -> int:
        """Add counts."""
        return sum(states)

    def finish(self, state: int) -> int:
        """Return the count."""
        return state


class Costly:
    """A function of the user, at the cost of an event in the thesis."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.columns, self.type = function.columns, function.type
        self.merge, self.finish = function.merge, function.finish

    def partial(self, *columns: pa.Array) -> Any:
        """Aggregate rows."""
        busy(RANK_S * len(columns[0]))
        return self._function.partial(*columns)


def top_topics(path: str, *, costly: bool) -> Dataflow:
    """Return the example, with results every second."""
    plain = application("top_topics", path)
    operators = []
    for operator in plain.operators:
        changed = operator
        if isinstance(operator, Aggregate) and operator.name == "count":
            window = replace(operator.window, advance=EVERY_S)
            changed = replace(operator, window=window)
            if costly:
                changed = replace(changed, functions={"mentions": CostlyCount()})
        elif isinstance(operator, Aggregate) and costly:
            functions = {name: Costly(given) for name, given in operator.functions.items()}
            changed = replace(operator, functions=functions)
        operators.append(changed)
    return Dataflow(plain.name, operators)


@dataclass
class PlacementRun:
    """Top-N topics on two groups of one executor; notes where tasks ran.

    After each batch, ``after`` is called with its notes, and returns whether to go on. ``before``
    is called when the executor group of each operator in a batch has been chosen.
    """

    folder: Path
    after: Callable[[PlacementRun, Mapping[str, Any]], bool]
    cores: int = 1  # of an executor of the other group
    before: Callable[[PlacementRun], None] = lambda run: None
    batches: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0  # that were read
    pipeline: Pipeline = field(init=False)

    def config(self, master: str) -> RunConfig:
        """Return the settings of the run."""
        spark = {
            "spark.executor.memory": MEMORY[DEFAULT_GROUP],
            "spark.executor.cores": "1",
            "spark.cores.max": "4",
        }
        elastic = {
            "max": 1,
            "round": 2.0,
            "placement": "algorithm_1",
            "groups": [
                {"name": DEFAULT_GROUP, "operators": OPERATORS},
                {"name": OTHER, "memory": MEMORY[OTHER], "cores": self.cores},
            ],
        }
        return RunConfig(
            engine={"master": master, "spark": spark, "batch_rows": 2 * RATE},
            # Nothing is aggregated before an exchange, so each operator does its own work.
            dataflow={"balance": "off", "layout": "operator_set"},
            elastic=elastic,
            out={"dir": self.folder / "out"},
        )

    def drive(self, master: str) -> list[dict[str, Any]]:
        """Run until ``after`` ends it; returns the rounds of the executors."""

        def on_batch(commit: Commit) -> None:
            self.batches[-1] |= {"batch": commit.batch_id, "done": time.time()}
            if not self.after(self, self.batches[-1]):
                pipeline.stop()

        flow = top_topics(tweets(), costly=True)
        with Pipeline(self.config(master), flow=flow, on_batch=on_batch) as pipeline:
            self.pipeline = pipeline
            run = pipeline.executor.run

            def noted(
                inputs: Any, chain: Chain, tasks: Mapping[str, Task], placement: Placement
            ) -> dict[str, list[Report]]:
                self.before(self)
                started = time.time()
                found = run(inputs, chain, tasks, placement)
                self.batches.append({"started": started, **_notes(chain, tasks, found)})
                return found

            pipeline.executor.run = noted  # type: ignore[method-assign]
            pipeline.run()
            last = last_intent(pipeline.store)
            assert last is not None
            self.rows = last.rows_of(stage_of("tweets"))[1]
            return [row for _, row in pipeline.store.items(GROUP_ROUNDS)]


def _notes(
    chain: Chain, tasks: Mapping[str, Task], reports: Mapping[str, list[Report]]
) -> dict[str, Any]:
    """Return groups, executors and bytes of the state files of each operator in a batch."""
    state = {}
    for name in OPERATORS:
        task = tasks[stage_of(name)]
        assert isinstance(task, SubqueryTask)
        state[name] = sum(file.nbytes for file, _ in task.state)
    stages = {name: stage_of(name) for name in OPERATORS}
    return {
        "groups": {name: chain.by_name[stage].group for name, stage in stages.items()},
        "ran": {n: sorted({r.executor for r in reports[s]}) for n, s in stages.items()},
        "state_bytes": state,
    }


def change_of(run: PlacementRun, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first change of the mapping: seconds and bytes until its first batch is done."""
    decided = next(row for row in rounds if row[PLACEMENT]["moves"])
    (move,) = decided[PLACEMENT]["moves"]
    name = move["operator"]
    number = next(k for k, b in enumerate(run.batches) if b["groups"][name] == move["after"])
    first, before, later = run.batches[number], run.batches[:number], run.batches[number + 1 :]
    return {
        **move,
        "reason": decided[PLACEMENT]["reason"],
        "loads": decided[PLACEMENT]["loads"],
        "seconds_to_first_batch": first["done"] - decided["clock"],
        "first_batch_s": first["done"] - first["started"],
        "batch_s_before": _median(before),
        "batch_s_after": _median(later),
        "state_bytes": first["state_bytes"][name],
    }


def _median(batches: list[dict[str, Any]]) -> float:
    return float(np.median([batch["done"] - batch["started"] for batch in batches]))


def real_row(batches: int) -> dict[str, Any]:
    """Measure a change of the mapping on a cluster of two workers; then run some more batches."""

    def after(run: PlacementRun, batch: Mapping[str, Any]) -> bool:
        moved = [one for one in run.batches if OTHER in one["groups"].values()]
        return len(moved) <= batches

    with TemporaryDirectory() as name:
        folder = Path(name)
        with StandaloneCluster([Host(1, 600)] * 2, folder / "cluster") as cluster:
            run = PlacementRun(folder / "run", after)
            rounds = run.drive(cluster.url)
            run.pipeline.spark.stop()
    return {"case": "real", "policy": "algorithm_1", **change_of(run, rounds)}
