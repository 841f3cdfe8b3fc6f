"""Find calls that overlap in time and have a number in common, as caller or callee.

No single equality holds for all of these pairs, so they need a Product. Of the two cases of an
overlap, ``left.start < right.start < left.end`` and the same with the sides exchanged, the
condition has the first only: it finds each pair once, and no call with itself. No call is longer
than ``LONGEST_S``, so the starts of two overlapping calls differ by less than the window's size.

Run it with ``python examples/overlapping_calls.py [FOLDER]``, or with
``roost run --flow examples/overlapping_calls.py:flow``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from roost import Dataflow, Pipeline, RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONGEST_S = 600
CALLS = f"generate:calls,rows=5000,rate=5,seed=7,callers=5000,longest={LONGEST_S}"
TIME = "timestamp[us, tz=UTC]"

flow = Dataflow("overlapping calls")
calls = flow.source(
    "calls",
    {"src": "string", "dst": "string", "start": TIME, "end": TIME},
    time="start",
    path=CALLS,
)
calls.product(
    calls,
    "left.start < right.start and right.start < left.end"
    " and (left.src = right.src or left.src = right.dst"
    " or left.dst = right.src or left.dst = right.dst)",
    size=LONGEST_S,
    name="overlaps",
).sink("overlapping_calls")


def main(out: Path, spark: SparkSession | None = None) -> int:
    """Return the number of pairs."""
    config = RunConfig(out={"dir": out}, engine={"batch_rows": 1_000})
    with Pipeline(config, spark=spark, flow=flow) as pipeline:
        pipeline.run()
    found = pq.read_table(out / "overlapping_calls").sort_by([("start", "ascending")])
    print(f"{found.num_rows:,} pairs")
    for row in found.slice(0, 5).to_pylist():
        left, right = (f"{row[f'{side}_src']}-{row[f'{side}_dst']}" for side in ("left", "right"))
        print(f"{row['start']:%H:%M:%S}  {right} begins during {left}")
    return found.num_rows


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/overlapping_calls"))
