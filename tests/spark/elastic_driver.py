"""A driver process whose executors follow its load, on a standalone cluster on the loopback.

``python elastic_driver.py FOLDER MASTER`` runs a paced stream through matching and a dataflow, and
prints how many executors are left when it has ended.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pyarrow as pa

from roost import Dataflow, Pipeline, RunConfig

SIDE = 8.0
WORK_S = 0.002  # of processor time for a point
QUERIES = [
    {"query_id": k, "x0": k % 6, "y0": k // 6, "x1": k % 6 + 2.5, "y1": k // 6 + 1.5}
    for k in range(24)
]


def work(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Use as much processor time for each row as a costly function would."""
    until = time.process_time() + WORK_S * rows.num_rows
    while time.process_time() < until:
        pass
    return pa.record_batch(
        {"id": rows["id"], "k": pa.array([v % 20 for v in rows["id"].to_pylist()])}
    )


def flow() -> Dataflow:
    made = Dataflow("work")
    schema = pa.schema({"id": pa.int64(), "k": pa.int64()})
    rows = made.points().map(work, schema=schema, name="work")
    rows.aggregate({"n": "count", "s": "sum(id)"}, by="k", size=5, name="totals").sink("sums")
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
        elastic={"max": 3, "round": 4.0},
        out={"dir": folder / "out"},
    )


def main() -> None:
    folder, master = Path(sys.argv[1]), sys.argv[2]
    requests = [{"op": "register", "user_id": "ann", **query} for query in QUERIES]
    with Pipeline(config(folder, master), flow=flow()) as pipeline:
        pipeline.log.append(pa.Table.from_pylist(requests), tag="before")
        pipeline.run()
        left = len(pipeline.executor.executors())
    print(f"executors {left}")


if __name__ == "__main__":
    main()
