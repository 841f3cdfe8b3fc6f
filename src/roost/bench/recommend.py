"""``roost bench recommend``: recommendations kept up to date against a batch job (chapter 5).

Ratings come in equal increments. The batch job, Spark SQL without Python, starts when the last
rating of an increment is there and computes the lists from all ratings so far. The dataflow of
``examples/recommendations.py`` reads ratings in micro-batches while they come; what remains to be
done after the last rating is one micro-batch, in which also all open minutes close. Both run in
one Spark session on the same cores and read the same file, and their lists must be equal.

A stream that is faster than the dataflow would wait longer. So the benchmark reports how many
ratings it processes in a second, in the last increment, and the fewest emulated machines for a
rate, found by bisection as in the thesis.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.applications import application
from roost.bench.call_contest import start_session
from roost.bench.common import CORES, Measured, Plot, Row, UnequalResults
from roost.bench.flow_cluster import EmulatedFlow, Sampler
from roost.bench.streams import BatchTimes
from roost.engine.baselines.recommendations import recommend
from roost.engine.pipeline import Pipeline
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.stages.sources import parse_generator
from roost.storage.cache import WorkerCache

TARGETS = {"ratio_vs_batch": 5.0}
INCREMENTS = (1, 3, 6)  # days in the thesis
NAME, SINK = "recommendations", "recommendations"
COLUMNS = ["user", "item", "rating", "at"]
FAN_ABOVE, TOP = 3, 10  # as in the example
MACHINES_MAX = 64


@dataclass(frozen=True)
class RatingsSize:
    """How many ratings are measured, and of whom."""

    increment: int = 200_000
    batch: int = 20_000
    users: int = 20_000
    items: int = 2_000
    rate: int = 1_000  # ratings in a second of event time; three micro-batches are a minute
    repeats: int = 2
    rates: tuple[int, ...] = (50_000, 100_000, 200_000, 400_000)  # that machines are found for

    def ratings(self, count: int) -> pa.Table:
        """Generate the first ratings."""
        text = (
            f"generate:ratings,rows={count},rate={self.rate},seed=7,"
            f"users={self.users},items={self.items}"
        )
        return parse_generator(text, lambda: 0.0).again(0, count)[0].read(COLUMNS, WorkerCache())


QUICK = RatingsSize(20_000, 5_000, 2_000, 400, 250, 1, (20_000, 100_000))


def run(quick: bool) -> Measured:
    """Compare with the batch job after each number of increments, then find machines."""
    size = QUICK if quick else RatingsSize()
    spark = start_session()
    try:
        with tempfile.TemporaryDirectory(prefix="roost-recommend-") as name:
            rows = [compare(spark, size, count, Path(name)) for count in INCREMENTS]
    finally:
        spark.stop()
    rates = machines_for_rates(size)
    last = rows[-1]
    summary: Row = {
        "ratio_vs_batch": last["ratio"],
        "ratings_per_s": last["ratings_per_s"],
        "machines_for_rate": {str(row["rate"]): row["machines"] for row in rates},
    }
    summary["missed"] = [key for key, target in TARGETS.items() if summary[key] < target]
    table = {
        "part": ("part", ""),
        "increments": ("increments", ""),
        "batch job, s": ("batch_s", ".2f"),
        "last micro-batch, s": ("incremental_s", ".2f"),
        "ratio": ("ratio", ".1f"),
        "ratings/s": ("ratings_per_s", ",.0f"),
        "rate": ("rate", ",.0f"),
        "machines": ("machines", ""),
    }
    return Measured([*rows, *rates], summary, plots(rows, rates), table, more={"targets": TARGETS})


# --------------------------------------------------------------------------- against a batch job


def compare(spark: Any, size: RatingsSize, increments: int, folder: Path) -> Row:
    """Run both systems in turn over some increments; the first run of each is not counted."""
    count = increments * size.increment
    path = folder / f"{increments}.parquet"
    pq.write_table(size.ratings(count), path, row_group_size=size.batch)
    batch_s, waits, rates = [], [], []
    for number in range(size.repeats + 1):
        out = folder / str(number)
        seconds = recommend(spark, str(path), out / "batch", above=FAN_ABOVE, top=TOP, cores=CORES)
        times = incremental(spark, size, path, out / "incremental")
        if number == 0:
            expected, found = newest(out / "batch"), newest(out / "incremental" / SINK)
            if expected != found:
                raise UnequalResults(f"{increments} increments: the lists of the systems differ")
        else:
            batch_s.append(seconds)
            waits.append(seconds_of_last(times, count, 1, size.batch))
            last_s = seconds_of_last(times, count, size.increment, size.batch)
            rates.append(size.increment / last_s)
        shutil.rmtree(out)
    row: Row = {
        "part": "batch job",
        "increments": increments,
        "ratings": count,
        "micro_batch": size.batch,
        "lists": len(expected),
        "batch_s": median(batch_s),
        "incremental_s": median(waits),
        "all_batch_s": batch_s,
        "all_incremental_s": waits,
        "ratings_per_s": median(rates),
    }
    row["ratio"] = row["batch_s"] / row["incremental_s"]
    return row


def incremental(spark: Any, size: RatingsSize, path: Path, out: Path) -> BatchTimes:
    """Run the dataflow over a file that ends."""
    config = RunConfig(out={"dir": out}, engine={"batch_rows": size.batch, "machines": CORES})
    times = BatchTimes()
    with Pipeline(
        config,
        spark=spark,
        flow=application(NAME, str(path)),
        on_step=times.on_step,
        on_batch=times.on_batch,
    ) as pipeline:
        pipeline.run()
    return times


def seconds_of_last(times: BatchTimes, ratings: int, count: int, batch: int) -> float:
    """Return the seconds from the micro-batch with the first of the last ratings until the end."""
    first = (ratings - count) // batch
    return times.steps[-1]["end"] - times.steps[first]["intent"]


def newest(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """Return the newest list of each item: rank by rank, other items and mutual fans."""
    table = pq.read_table(folder)
    times = table["at"].to_pylist() if "at" in table.column_names else [0] * table.num_rows
    columns = [table[name].to_pylist() for name in ("item", "rank", "other", "fans")]
    latest: dict[int, Any] = {}
    for item, at in zip(columns[0], times, strict=True):
        latest[item] = max(latest.get(item, at), at)
    lists: dict[int, list[tuple[int, int, int]]] = {}
    for at, item, rank, other, fans in zip(times, *columns, strict=True):
        if at == latest[item]:
            lists.setdefault(item, []).append((rank, other, fans))
    return {item: [one[1:] for one in sorted(rows)] for item, rows in lists.items()}


# --------------------------------------------------------------------------- machines for a rate


def machines_for_rates(size: RatingsSize) -> list[Row]:
    """Find the fewest emulated machines that process each rate."""
    warm, measured = size.ratings(2 * size.increment), 3  # a minute: lists change in one of three
    known: dict[int, float] = {}

    def rate_of(machines: int) -> float:
        if machines not in known:
            known[machines] = emulated_rate(size, warm, machines, measured)
        return known[machines]

    found = [(rate, fewest(rate_of, rate)) for rate in size.rates]
    tried = {str(machines): rate for machines, rate in sorted(known.items())}
    return [
        {"part": "machines", "rate": rate, "machines": machines, "ratings_per_s_by_machines": tried}
        for rate, machines in found
    ]


def fewest(rate_of: Callable[[int], float], rate: float, most: int = MACHINES_MAX) -> int | None:
    """Return the fewest machines that process a rate by bisection; None if ``most`` do not.

    Examples
    --------
    >>> fewest(lambda machines: 276.0 / 10 * machines, 850.0)
    31
    >>> fewest(lambda machines: 1.0, 2.0) is None
    True
    """
    low, high = 0, 1  # low: too few machines; high: possibly enough
    while rate_of(high) < rate:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rate_of(middle) >= rate else (middle, high)
    return high


def emulated_rate(size: RatingsSize, ratings: pa.Table, machines: int, measured: int) -> float:
    """Return the ratings that machines process in a second, after most of the given ones.

    Machines work at the same time, so a batch takes as long as its busiest machine.
    """
    flow = application(NAME, f"generate:ratings,rate={size.rate}")
    first = ratings.num_rows - measured * size.batch
    sample = Sampler(flow, ratings.slice(0, size.batch))
    emulated = EmulatedFlow(sample, LayoutName.QUERY_CLOUD, machines, float(size.batch))
    try:
        emulated.run(ratings.slice(0, first))
        seconds = [
            max(one.busy for one in emulated.run(ratings.slice(start, size.batch)))
            for start in range(first, ratings.num_rows, size.batch)
        ]
    finally:
        emulated.close()
    return size.batch * measured / sum(seconds)


def plots(rows: Sequence[Row], rates: Sequence[Row]) -> dict[str, Plot]:
    """Return seconds by increments, and ratings by machines."""
    seconds = {
        name: [(row["increments"], row[key]) for row in rows]
        for name, key in (("batch job", "batch_s"), ("incremental", "incremental_s"))
    }
    known = rates[0]["ratings_per_s_by_machines"]
    lines = {"emulated": [(int(machines), rate) for machines, rate in known.items()]}
    return {
        "": Plot("Seconds from the last rating to the lists, by increments", {"": seconds}),
        "-machines": Plot("Ratings/s, by machines", {"": lines}),
    }
