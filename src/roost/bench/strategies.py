"""``roost bench strategies``: the layouts of a dataflow, on the real cores and on many machines.

The query has nine operators, three of them stateful: map, filter, aggregate, map, self-join,
filter, map, aggregate, filter. Its filters are selective, so an exchange before a filter sends much
that the filter drops. For comparison, ``even`` is the same query with filters that pass all tuples.

Emulated machines run the engine's task code one after the other. They would work concurrently, so
throughput is the input tuples of a batch over the time of the busiest machine. On the real cores
Spark runs one level of stages after the other, and throughput is by the clock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roost.bench.common import CORES, Measured, Plot, Row
from roost.bench.flow_cluster import EmulatedFlow, MachineTime, Sampler
from roost.bench.streams import BatchTimes
from roost.dataflow.flow import Dataflow
from roost.model.choices import LayoutName
from roost.model.settings import RunConfig
from roost.stages.contract import Batch, MapExecutor, Outcome, Reports, Stage
from roost.stages.flow import RECEIVING

MACHINES = (30, 60)
ROWS = 5_000_000  # of a batch: beside it, what a task costs without tuples is small
QUICK_ROWS = 500_000
BATCHES = 5  # of which the first is not measured
REPEATS = 3
SAMPLES = 3  # batches of a sample run
TIME_PER_BATCH = 100
KEYS, GROUPS, KEPT = 20_000, 1_000, 100
COLUMNS = ("k", "g", "v", *(f"p{n}" for n in range(16)))  # 16 that only the first map passes on
SCHEMA = {**dict.fromkeys(COLUMNS, "int64"), "t": "int64"}
REAL = "real cores"
DRIVER_MEMORY = "2g"  # also limits what threads keep of the blocks that they pass on, 44 MB each


def query(*, even: bool = False) -> Dataflow:
    """Return the query of nine operators; ``even`` filters pass every tuple."""
    kept = GROUPS if even else KEPT
    pairs = "left_v > 0" if even else f"left_v - right_v > {ROWS // 3} and left_g < {KEPT // 2}"
    same = {name: pc.field(name) for name in COLUMNS}
    flow = Dataflow("strategies")
    calls = flow.source("calls", SCHEMA, time="t")
    mapped = calls.map({**same, "v": pc.field("v") + 1}, name="map")
    chosen = mapped.filter(f"g < {kept}", name="filter")
    newest = chosen.aggregate({"v": "max(v)", "g": "max(g)"}, by="k", size=10, name="aggregate")
    narrow = newest.map({name: pc.field(name) for name in ("k", "g", "v")}, name="map 2")
    size = 1 if even else TIME_PER_BATCH
    joined = narrow.join(narrow, "left.k = right.k", size=size, name="join")
    distant = joined.filter(pairs, name="filter 2")
    grouped = distant.map({"g": pc.field("left_g"), "v": pc.field("right_v")}, name="map 3")
    counts = grouped.aggregate({"n": "count"}, by="g", size=TIME_PER_BATCH, name="aggregate 2")
    counts.filter("n > 0", name="filter 3").sink("out")
    return flow


def tuples(number: int, rows: int) -> pa.Table:
    """Return the tuples of a batch."""
    random = np.random.default_rng(number)
    at = np.arange(rows)
    columns = {name: at for name in COLUMNS}
    columns |= {"k": random.integers(0, KEYS, rows), "g": random.integers(0, GROUPS, rows)}
    # ``v`` has the same spread, whatever the number of rows.
    columns["v"] = at * ROWS // rows
    return pa.table({**columns, "t": number * TIME_PER_BATCH + at * TIME_PER_BATCH // rows})


def sampler(rows: int, *, even: bool = False) -> Sampler:
    """Return the sample run of a query, as a run with batches of so many rows makes it."""
    sample = pa.concat_tables([tuples(number, rows) for number in range(SAMPLES)])
    return Sampler(query(even=even), sample)


def emulated(
    layout: LayoutName, machines: int, rows: int, sample: Sampler, *, even: bool = False
) -> Row:
    """Measure a layout on emulated machines."""
    with closing(EmulatedFlow(sample, layout, machines, rows)) as cluster:
        batches = [cluster.run(tuples(number, rows)) for number in range(BATCHES)][1:]
        # A machine that the host delays in one batch must not count as the busiest.
        times = [
            sorted(mine, key=lambda time: time.busy)[len(mine) // 2]
            for mine in zip(*batches, strict=True)
        ]
        placed = {"reading": cluster.readers, **cluster.placed}
        results = cluster.results("out")
    assert layout is LayoutName.QUERY_CLOUD or sum(placed.values()) == machines
    busiest = max(machine.busy for machine in times)
    return {
        "layout": layout.value,
        "machines": machines,
        "even": even,
        "tuples_per_s": rows / busiest,
        "placed": placed,
        "results": results,
        **_split(times, machines * busiest),
    }


def _split(times: Iterable[MachineTime], seconds: float) -> Row:
    """Return the shares of the processor time of all machines."""
    times = list(times)
    work, exchange = sum(t.work for t in times), sum(t.exchange for t in times)
    return {
        "work": work / seconds,
        "exchange": exchange / seconds,
        "idle": 1 - (work + exchange) / seconds,
        "work_s": work,
        "exchange_s": exchange,
    }


class _Times(Stage):
    """Collects the processor times of all stages; runs on the driver only."""

    name = "times"

    def __init__(self) -> None:
        self.batches: list[MachineTime] = []

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Add up work and exchange of a batch."""
        found = [report for mine in reports.values() for report in mine]
        exchange = sum(r.sending + r.counts.get(RECEIVING, 0.0) for r in found)
        self.batches.append(MachineTime(sum(r.seconds for r in found) - exchange, exchange))
        return Outcome()


def real(layout: LayoutName, path: Path, rows: int, spark: Any) -> Row:
    """Measure a layout on Spark, on the real cores; the first batch is not counted."""
    from roost import Pipeline

    times, steps = _Times(), BatchTimes()
    with tempfile.TemporaryDirectory() as out:
        config = RunConfig(
            out={"dir": out},
            engine={"batch_rows": rows, "available_now": True},
            dataflow={"layout": layout, "sources": {"calls": str(path)}},
        )
        pipeline = Pipeline(
            config, flow=query(), spark=spark, on_step=steps.on_step, more_stages=[times]
        )
        with pipeline:
            pipeline.run()
        files = (Path(out) / "out").glob("*.parquet")
        results = sum(pq.read_metadata(file).num_rows for file in files)
    seconds = [batch["end"] - batch["intent"] for batch in steps.steps][1:]
    measured = times.batches[1:]
    return {
        "layout": layout.value,
        "machines": REAL,
        "even": False,
        "tuples_per_s": rows / median(seconds),
        "results": results,
        **_split(measured, CORES * sum(seconds)),
    }


def run(quick: bool) -> Measured:
    """Measure all layouts."""
    from roost.engine.session import make_session

    rows, repeats = (QUICK_ROWS, 1) if quick else (ROWS, REPEATS)
    small = sampler(20_000)
    for layout in LayoutName:  # load and compile all code
        emulated(layout, 12, 20_000, small)
    turns = []
    for _ in range(repeats):
        sample = sampler(rows)  # each turn has sample runs of its own
        turns.append(
            [emulated(layout, count, rows, sample) for count in MACHINES for layout in LayoutName]
        )
    found = _medians(turns)
    sample = sampler(rows // 5, even=True)
    even = [emulated(one, MACHINES[-1], rows // 5, sample, even=True) for one in LayoutName]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "calls.parquet"
        pq.write_table(pa.concat_tables([tuples(k, rows) for k in range(BATCHES)]), path)
        spark = make_session(f"local[{CORES}]", {"spark.driver.memory": DRIVER_MEMORY})
        real(LayoutName.AUTO, path, rows, spark)  # start workers, and load code
        turns = [[real(one, path, rows, spark) for one in LayoutName] for _ in range(repeats)]
    found += _medians(turns)
    failed = [
        f"{row['layout']} on {row['machines']} has {row['results']} results instead of {expected}"
        for row in found
        for expected in [next(o["results"] for o in found if o["machines"] == row["machines"])]
        if row["results"] != expected
    ]
    summary = {**_summary(found), "failed": failed}
    ratio = _speed(even, MACHINES[-1], LayoutName.OPERATOR_SET)
    summary["ratio_os_vs_oc_even"] = ratio / _speed(even, MACHINES[-1], LayoutName.OPERATOR_CLOUD)
    panels = {
        f"{count} machines" if count != REAL else REAL: {
            part: {row["layout"]: row[part] for row in found if row["machines"] == count}
            for part in ("work", "exchange", "idle")
        }
        for count in (*MACHINES, REAL)
    }
    plots = {
        "": Plot("shares of processor time", panels, columns=3),
        "-throughput": Plot(
            "million tuples per second",
            {
                title: {
                    row["layout"]: {row["layout"]: row["tuples_per_s"] / 1e6}
                    for row in found
                    if row["machines"] in (title, int(title.split()[0]) if title != REAL else REAL)
                }
                for title in panels
            },
            columns=3,
        ),
    }
    table = {
        "layout": ("layout", ""),
        "machines": ("machines", ""),
        "tuples/s": ("tuples_per_s", ",.0f"),
        "work": ("work", ".0%"),
        "exchange": ("exchange", ".0%"),
        "idle": ("idle", ".0%"),
    }
    return Measured([*found, *even], summary, plots, table)


def _medians(turns: Iterable[list[Row]]) -> list[Row]:
    """Return the row with the median throughput of each place in all turns."""
    return [
        sorted(same, key=lambda row: row["tuples_per_s"])[len(same) // 2]
        for same in zip(*turns, strict=True)
    ]


def _speed(rows: Iterable[Row], machines: int | str, layout: LayoutName) -> float:
    (row,) = (r for r in rows if r["machines"] == machines and r["layout"] == layout.value)
    return float(row["tuples_per_s"])


def _summary(rows: list[Row]) -> Row:
    most = MACHINES[-1]
    own = _speed(rows, most, LayoutName.OPERATOR_SET)
    others = [layout for layout in LayoutName if layout is not LayoutName.AUTO]
    auto = {
        machines: _speed(rows, machines, LayoutName.AUTO)
        / max(_speed(rows, machines, layout) for layout in others)
        for machines in (*MACHINES, REAL)
    }
    return {
        "ratio_os_vs_oc": own / _speed(rows, most, LayoutName.OPERATOR_CLOUD),
        "ratio_os_vs_qc": own / _speed(rows, most, LayoutName.QUERY_CLOUD),
        "auto_vs_best": min(auto.values()),
        **{f"auto_vs_best_{str(k).replace(' ', '_')}": value for k, value in auto.items()},
    }
