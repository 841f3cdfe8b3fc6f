"""A driver process whose executors follow its load, on a standalone cluster on the loopback.

``python elastic_driver.py FOLDER MASTER CHANGES [FAULT...]`` runs a paced stream through matching
and a dataflow until so many changes of size were decided and carried out, since how long that takes
depends on the host. It prints how many executors are left then, which were killed, and how many
points were read. Faults:

- ``arriving``, ``leaving``: kill an executor while another arrives or leaves
- ``recorded-KIND``: the driver kills itself when it has recorded a decision of a kind
- ``done-KIND``: it kills itself when it has carried out the decision, and not recorded that
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from time import process_time
from typing import Any

import psutil
import pyarrow as pa

from roost import Dataflow, Pipeline, RunConfig
from roost.dataflow.flow import Stream
from roost.engine.executors import SparkAllocator
from roost.runtime.group_rounds import GROUP_ROUNDS, GroupRounds
from roost.runtime.group_size import GroupSize
from roost.storage.store import Store

SIDE = 8.0
WORK_S = 0.002  # of processor time for a point
QUERIES = [
    {"query_id": k, "x0": k % 6, "y0": k // 6, "x1": k % 6 + 2.5, "y1": k // 6 + 1.5}
    for k in range(24)
]


def work(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Use as much processor time for each row as a costly function would."""
    until = process_time() + WORK_S * rows.num_rows
    while process_time() < until:
        pass
    return pa.record_batch(
        {"id": rows["id"], "k": pa.array([v % 20 for v in rows["id"].to_pylist()])}
    )


def totals(rows: Stream) -> None:
    schema = pa.schema({"id": pa.int64(), "k": pa.int64()})
    keyed = rows.map(work, schema=schema, name="work")
    keyed.aggregate({"n": "count", "s": "sum(id)"}, by="k", size=5, name="totals").sink("sums")


def flow() -> Dataflow:
    made = Dataflow("work")
    totals(made.points())
    return made


def config(folder: Path, master: str) -> RunConfig:
    return RunConfig(
        points={"path": str(folder / "points.parquet"), "speed": 1.0},
        space={"bounds": (0, 0, SIDE, SIDE), "grid": (8, 8), "coordinates": "plane"},
        engine={
            "master": master,
            "spark": {
                "spark.executor.memory": "480m",
                "spark.executor.cores": "1",
                "spark.cores.max": "4",
            },
        },
        queries={"id_type": "int"},
        balance={"round": 2.0},
        dataflow={"round": 2.0},
        # Little load is enough, so that the host is not the limit.
        elastic={"max": 3, "round": 2.5, "lower": 0.2, "target": 0.3, "upper": 0.5},
        out={"dir": folder / "out"},
    )


class Faults:
    """Kills executors, or this process, around a decision."""

    def __init__(self, changes: int, names: list[str]) -> None:
        self.changes, self.names = changes, names
        self.killed: list[str] = []
        self.pipeline: Pipeline | None = None
        self._released = False
        self._size: GroupSize | None = None
        end_round, follow = GroupRounds._end_round, GroupSize.follow
        decommission = SparkAllocator.decommission

        def ended(group: GroupRounds, *arguments: Any) -> None:
            before = group._own.planned
            end_round(group, *arguments)
            self._die("recorded", group._own.planned - before)

        def followed(group: GroupSize, now: float, *, moved: bool) -> None:
            before, self._released = group.layout, False
            follow(group, now, moved=moved)
            self._size = group
            if group.layout > before:
                self._die("done", 1)
            if self._released:
                self._die("done", -1)

        def released(allocator: SparkAllocator, names: Any) -> None:
            decommission(allocator, names)
            allocator._calls.submit(lambda: None).result()  # Spark has the request
            self._released = True

        GroupRounds._end_round, GroupSize.follow = ended, followed  # type: ignore[method-assign]
        SparkAllocator.decommission = released  # type: ignore[method-assign]

    def _die(self, moment: str, more: int) -> None:
        kind = "Provision" if more > 0 else "Release"
        if more and f"{moment}-{kind}" in self.names:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(self, step: str, number: int) -> None:
        """Kill an executor that stays while others arrive or leave; end the run."""
        if step != "end" or self.pipeline is None or self._size is None:
            return
        executor = self.pipeline.executor
        stay, size = list(executor.executors()), self._size
        settled = size.layout == size.planned == len(executor.registered())
        if settled and len(size_changes(self.pipeline.store)) >= self.changes:
            self.pipeline.stop()
        if not stay:
            return
        if "arriving" in self.names and len(stay) < size.planned:
            self._kill("arriving", stay[0])
        elif "leaving" in self.names and executor.leaving & {*executor.registered()}:
            self._kill("leaving", stay[0])

    def _kill(self, fault: str, executor: str) -> None:
        assert self.pipeline is not None
        app = self.pipeline.spark.sparkContext.applicationId
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if app in words and words[words.index("--executor-id") + 1 :][:1] == [executor]:
                process.kill()
                self.names.remove(fault)
                self.killed.append(fault)
                return


def size_changes(store: Store) -> list[str]:
    """Return the kinds of decisions about the size, without repetitions."""
    kinds = [row["decision"] for _, row in store.items(GROUP_ROUNDS)]
    sizes = [kind for kind in kinds if kind in ("Provision", "Release")]
    return [kind for k, kind in enumerate(sizes) if k == 0 or kind != sizes[k - 1]]


def main() -> None:
    folder, master, changes, *names = sys.argv[1:]
    faults = Faults(int(changes), names)
    requests = [{"op": "register", "user_id": "ann", **query} for query in QUERIES]
    settings = config(Path(folder), master)
    with Pipeline(settings, flow=flow(), on_step=faults.on_step) as pipeline:
        faults.pipeline = pipeline
        pipeline.log.append(pa.Table.from_pylist(requests), tag="before")
        points = pipeline.run()["points"]
        left = len(pipeline.executor.executors())
    print(json.dumps({"left": left, "killed": faults.killed, "points": points}))


if __name__ == "__main__":
    main()
