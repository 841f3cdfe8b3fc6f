"""Matching: the points of a machine with the live queries of the batch.

Points come as packed blocks and are gathered until there are enough of them to be worth a pass
over the index; where matching runs inside the reading task, they come as they were decoded. The
gathered points and the pairs are passed on to the stages that request them, one call per block or
chunk of pairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan
from roost.kernel import Index, Pairs, preload
from roost.model.schemas import PointBlock, match_schema
from roost.model.space import Space
from roost.predicate import parse
from roost.queries.live import QuerySet, open_index
from roost.queries.partitions import bounds_of
from roost.queries.versions import IndexVersion, SegmentRef
from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Output,
    Report,
    Reports,
    Stage,
    Staged,
    task_seconds,
)
from roost.stages.decode import PointSchema, block_schema, unpack_blocks
from roost.stages.reading import POINTS
from roost.stages.routing import SPACE, Packed, SpatialTable, spatial
from roost.stages.writers import MatchWriter
from roost.storage.cache import WorkerCache
from roost.storage.files import Files

GATHERED, PAIRS = "gathered", "pairs"
ROWS_PER_MATCH = 1 << 18
MACHINE_METRICS = ("points", "checks", "matches", "load_s")


class Gathered(NamedTuple):
    """Points as they are matched and, where they were routed, their cells."""

    block: PointBlock
    cells: NDArray[np.int32] | None

    @property
    def num_rows(self) -> int:
        """Number of points."""
        return self.block.size


class PairChunk(NamedTuple):
    """Pairs of queries and points; ``pairs.rows`` are rows of the points gathered last."""

    pairs: Pairs
    block: PointBlock

    @property
    def num_rows(self) -> int:
        """Number of pairs."""
        return int(self.pairs.slots.size)


@dataclass(frozen=True)
class MatchingTask:
    """What the machines of a batch match.

    Parameters
    ----------
    prefix, number
        Of the batch.
    plan, space
        Who owns which cells, and where they are.
    segments, folder
        The live queries: names of their files, and where these are.
    schema
        Columns of a packed block.
    output
        Columns of matches.
    matches
        Where matches are staged; None only counts them.
    arrivals
        Partitions that each machine has just been given.
    """

    prefix: str
    number: int
    plan: Plan
    space: Space
    segments: tuple[SegmentRef, ...]
    folder: Files
    schema: pa.Schema
    output: pa.Schema
    matches: Files | None
    arrivals: Mapping[int, tuple[int, ...]]

    def build(self, machine: int, cache: WorkerCache) -> MatchingWork:
        """Build one machine's work."""
        return MatchingWork(self, machine, cache)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> None:
        """Ignore marks."""

    def index(self, cache: WorkerCache) -> Index:
        """Open the queries of the batch; a worker retains them from task to task."""
        key = (self.folder, self.segments, self.space)
        return cache.get("index", key, lambda: open_index(self.folder, self.segments, self.space))


class MatchingWork:
    """Matches one machine's points."""

    def __init__(self, task: MatchingTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._index = task.index(cache).for_task()
        self._waiting: list[bytes] = []
        self._rows = 0
        self._writer: MatchWriter | None = None
        self._file: str | None = None
        self._counts = dict.fromkeys((*MACHINE_METRICS, "loaded_bytes"), 0.0)
        if task.matches is not None:
            name = task.matches.name(task.prefix, f"{machine:05d}", ".parquet")
            self._writer = MatchWriter(task.matches, name, task.number, task.output)
        self._preload(task.arrivals.get(machine, ()))

    def _preload(self, partitions: Sequence[int]) -> None:
        """Read the queries of partitions that the machine was given, and measure it."""
        if not partitions:
            return
        task, started = self._task, time.process_time()
        bounds = [
            bounds_of(p, task.space) for p in task.plan.partitions if p.partition_id in partitions
        ]
        self._counts["loaded_bytes"] = preload(self._index, np.asarray(bounds))
        self._counts["load_s"] = time.process_time() - started

    def process(self, port: str, block: PointBlock | Packed) -> Iterator[Output]:
        """Match a block, or gather it: many points at once share the lists of their cells."""
        if isinstance(block, PointBlock):
            yield from self._match(block, None)
            return
        self._waiting.append(block.data)
        self._rows += block.num_rows
        if self._rows >= ROWS_PER_MATCH:
            yield from self._match_gathered()

    def _match_gathered(self) -> Iterator[Output]:
        waiting, self._waiting, self._rows = self._waiting, [], 0
        yield from self._match(*unpack_blocks(waiting, self._task.schema))

    def _match(self, block: PointBlock, cells: NDArray[np.int32] | None) -> Iterator[Output]:
        self._counts["points"] += block.size
        yield GATHERED, Gathered(block, cells)
        for pairs in self._index.match(block):
            yield PAIRS, PairChunk(pairs, block)
            if pairs.segment.outputs is not None:
                # Queries that request a window result have no single matches.
                single = pairs.segment.outputs[pairs.slots] < 0
                pairs = replace(pairs, slots=pairs.slots[single], rows=pairs.rows[single])
            self._counts["matches"] += pairs.slots.size
            if self._writer is not None and pairs.slots.size:
                self._writer.add(pairs, block)

    def finish(self, marks: None) -> Iterator[Output]:
        """Match what is left, and close the file."""
        if self._waiting:
            yield from self._match_gathered()
        self._counts["checks"] = self._index.checks
        if self._writer is not None:
            self._file = self._writer.close()

    def report(self) -> Report:
        """Report the file of matches."""
        return Report(self._file, self._counts)


@dataclass
class MatchingStage(Stage):
    """Matches points with the live queries.

    Parameters
    ----------
    queries
        The live queries.
    points, space
        Which columns points have, and where they are.
    query_id_type
        Type of query identifiers.
    segments
        Where the files of the queries are.
    matches
        Where matches are staged; None only counts them.
    table
        The plans.
    """

    name = "matching"
    inputs = (POINTS,)
    outputs = (GATHERED, PAIRS)
    routing = SPACE
    kinds = ("matches",)

    queries: QuerySet
    points: PointSchema
    space: Space
    query_id_type: pa.DataType
    segments: Files
    matches: Files | None
    table: SpatialTable
    _read: dict[str, frozenset[str]] = field(default_factory=dict)

    def routing_table(self) -> SpatialTable:
        """Return the plans."""
        return self.table

    def attributes(self, queries: IndexVersion) -> Iterable[str]:
        """Return the attributes that some predicate reads."""
        for ref in queries.segments:
            if ref.file not in self._read:
                texts = self.queries.predicates(ref.file)
                names = (name for text in texts for name in parse(text).attributes())
                self._read[ref.file] = frozenset(names)
        live = {ref.file for ref in queries.segments}
        self._read = {file: names for file, names in self._read.items() if file in live}
        return frozenset[str]().union(*self._read.values())

    def prepare(self, batch: Batch) -> MatchingTask:
        """Return the task of a batch."""
        routing = spatial(batch.routings)
        return MatchingTask(
            batch.prefix,
            batch.number,
            routing.plan,
            self.space,
            batch.queries.segments,
            self.segments,
            block_schema(self.points, batch.attributes),
            match_schema(self.query_id_type, self.points.id_type, self.points.time_type),
            self.matches,
            routing.arrivals(spatial(batch.before)),
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Add up matches; machines of a replicated plan without work count as idle."""
        mine = {report.machine: report for report in reports[self.name]}
        busy = task_seconds(reports, self.name)
        machines = [
            _machine(number, mine.get(number), busy.get(number, 0.0))
            for number in range(batch.routings[SPACE].machines)
        ]
        metrics: dict[str, Any] = {
            name: sum(row[name] for row in machines) for name in MACHINE_METRICS
        }
        metrics["loaded_bytes"] = sum(int(r.counts["loaded_bytes"]) for r in mine.values())
        metrics["machines"] = machines
        files = [Staged(r.value, r.machine) for r in mine.values() if r.value is not None]
        return Outcome({"matches": files}, metrics=metrics)


def _machine(number: int, report: Report | None, busy_s: float) -> dict[str, Any]:
    """Return one machine's metrics; busy time is that of all stages in its task."""
    counts = {} if report is None else report.counts
    numbers = {name: int(counts.get(name, 0)) for name in ("points", "checks", "matches")}
    return {"machine": number, **numbers, "busy_s": busy_s, "load_s": counts.get("load_s", 0.0)}
