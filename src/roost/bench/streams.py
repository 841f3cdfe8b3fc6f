"""Settings, state, source and hooks with which benchmarks run the pipeline or parts of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roost.bench.cases import Bounds
from roost.bench.common import CORES
from roost.kernel import Segment
from roost.model.schemas import TIMESTAMP
from roost.model.settings import RunConfig, with_settings
from roost.model.space import Rect, Space
from roost.queries.admission import Rules
from roost.queries.live import QuerySet
from roost.queries.log import SqliteQueryLog
from roost.runtime.records import Commit
from roost.stages.slices import ParquetSlice
from roost.stages.sources import RowSource
from roost.storage.store import Store

LOG = "queries.db"


def pipeline_config(
    points_path: str, bounds: Bounds, out: Path, settings: Mapping[str, Any]
) -> RunConfig:
    """Return the settings of a run on the measured cores that ends with its points."""
    common = {
        "points.path": points_path,
        "space.bounds": Rect(*bounds),
        "engine.master": f"local[{CORES}]",
        "engine.available_now": True,
        "out.dir": out,
    }
    return with_settings(RunConfig(), {**common, **settings})


def admit(folder: Path, space: Space, requests: pa.Table) -> list[tuple[Segment, dict[int, int]]]:
    """Admit requests into a new state directory; returns what an index is made of."""
    with closing(Store(folder)) as store, closing(SqliteQueryLog(folder / LOG)) as log:
        log.append(requests)
        queries = QuerySet(store, log, Rules(space, pa.int64(), TIMESTAMP))
        queries.advance(log.end())
        return [(segment, ended) for _, segment, ended in queries.segments]


class Repeated(RowSource):
    """A source of points that streams one file several times."""

    def __init__(self, path: str, passes: int) -> None:
        self._path = path
        self._rows: int = pq.read_metadata(path).num_rows
        self._passes = passes
        self.schema = pq.read_schema(path)

    def total(self) -> int:
        """Return the rows of all passes."""
        return self._rows * self._passes

    def take(self, offset: int, limit: int) -> list[ParquetSlice]:
        """Return the rows after an offset, across the borders of passes."""
        slices: list[ParquetSlice] = []
        stop = min(offset + limit, self.total())
        while offset < stop:
            start = offset % self._rows
            end = min(self._rows, start + stop - offset)
            slices.append(ParquetSlice(start, end, self._path, 0))
            offset += end - start
        return slices

    def again(self, start: int, stop: int) -> list[ParquetSlice]:
        """Return rows that were read before."""
        return self.take(start, stop - start)

    def sample(self, columns: list[str]) -> pa.Table:
        """Return all rows of the file."""
        return pq.read_table(self._path, columns=columns)


class BatchTimes:
    """Records when each step of each batch begins; the hooks of a pipeline."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Of each batch, clock times by the names of steps in :mod:`roost.runtime.loop`.
        self.steps: list[dict[str, float]] = []
        self.commits: list[Commit] = []

    def on_step(self, step: str, batch_id: int) -> None:
        """Record the beginning of a step."""
        if step == "intent":
            self.steps.append({})
        self.steps[-1][step] = self._clock()

    def on_batch(self, commit: Commit) -> None:
        """Record a finished batch."""
        self.commits.append(commit)

    def seconds(self) -> float:
        """Return the time from the first batch's beginning to the last one's end."""
        return self.steps[-1]["end"] - self.steps[0]["intent"]

    def between(self, first: str, second: str) -> list[float]:
        """Return the seconds between the beginnings of two steps, by batch."""
        return [steps[second] - steps[first] for steps in self.steps]
