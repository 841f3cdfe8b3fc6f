"""Queries on call records for ``roost bench operators``, and the files that they read.

Calls come from the seeded generator. They are written once, one file per batch, so that all systems
read the same files in the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roost.dataflow.flow import Dataflow, Stream
from roost.model.space import EARTH_RADIUS_M
from roost.stages.sources import parse_generator
from roost.storage.cache import WorkerCache

TIME = pa.timestamp("us", "UTC")
TYPES: Mapping[str, pa.DataType] = {
    "src": pa.string(),
    "dst": pa.string(),
    "start": TIME,
    "end": TIME,
    "district": pa.int64(),
    "lat": pa.float64(),
    "lon": pa.float64(),
}
HEAVY_S = 300
WITHIN_S = 60
GROUPS_PER_FILE = 4  # so that every core reads a part of a file
OUT = "results"
PAIR = pa.schema(
    [("src", pa.string()), ("first", TIME), ("second", TIME), ("metres", pa.float64())]
)


@dataclass(frozen=True)
class CallCase:
    """A query on some calls.

    ``key`` is the metric that the case counts for. An aggregate groups by ``by``; without it, the
    query is the join of two calls of one caller.
    """

    name: str
    key: str
    calls: str  # settings of the generator
    rows: int
    batch_rows: int
    by: str | None = None
    size_s: int = WITHIN_S
    advance_s: int = 0
    lateness_s: int = 0
    least_mean_s: int | None = None  # smaller averages are left out

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the query reads."""
        if self.by is None:
            return ("src", "dst", "start", "end", "lat", "lon")
        return (self.by, "start", "end")

    @property
    def results(self) -> list[str]:
        """The columns of the results, without those that Roost adds."""
        return PAIR.names if self.by is None else ["start", self.by, "calls", "mean"]


def write_calls(case: CallCase, folder: Path, groups: int = GROUPS_PER_FILE) -> Path:
    """Write the calls of a case, each file in some row groups; returns their folder."""
    to = folder / "calls"
    to.mkdir(parents=True)
    text = f"generate:calls,rows={case.rows},seed=7,{case.calls}"
    source = parse_generator(text, time.time)
    for number, start in enumerate(range(0, case.rows, case.batch_rows)):
        slices = source.take(start, case.batch_rows)
        table = pa.concat_tables([one.read(list(TYPES), WorkerCache()) for one in slices])
        path = to / f"{number:05d}.parquet"
        # Spark reads instants from microseconds with a time zone.
        pq.write_table(table, path, row_group_size=-(-table.num_rows // groups))
    return to


def calls_flow(case: CallCase, calls: Path) -> Dataflow:
    """Return the query as a dataflow."""
    flow = Dataflow(case.name)
    schema = {name: TYPES[name] for name in case.columns}
    stream = flow.source("calls", schema, time="start", path=str(calls))
    _query(case, stream).sink(OUT)
    return flow


def _query(case: CallCase, calls: Stream) -> Stream:
    if case.by is None:
        pairs = calls.join(
            calls,
            f"left.src = right.src and abs(left.start - right.start) <= {WITHIN_S}"
            " and (left.start < right.start or left.start = right.start"
            " and (left.dst < right.dst or left.dst = right.dst and left.end < right.end))",
            size=WITHIN_S + 1e-6,
            name="pairs",
        )
        return pairs.map(distances, schema=PAIR, name="distances")
    duration_s = (pc.field("end") - pc.field("start")).cast("int64").cast("double") / 1e6
    durations = calls.map({case.by: pc.field(case.by), "duration": duration_s}, name="durations")
    means = durations.aggregate(
        {"calls": "count", "mean": "avg(duration)"},
        by=case.by,
        size=case.size_s,
        advance=case.advance_s,
        name="means",
    )
    least = case.least_mean_s
    return means if least is None else means.filter(f"mean > {least}", name="heavy")


def distances(pairs: pa.RecordBatch) -> pa.RecordBatch:
    """Compute the distance of each pair on the globe."""
    names = ("left_lat", "left_lon", "right_lat", "right_lon")
    lat0, lon0, lat1, lon1 = (np.radians(pairs[name].to_numpy()) for name in names)
    a = np.sin((lat1 - lat0) / 2) ** 2
    a += np.cos(lat0) * np.cos(lat1) * np.sin((lon1 - lon0) / 2) ** 2
    metres = 2 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.minimum(a, 1.0)))
    columns = [pairs["left_src"], pairs["left_start"], pairs["right_start"], pa.array(metres)]
    return pa.RecordBatch.from_arrays(columns, schema=PAIR)
