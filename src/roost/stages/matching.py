"""Matching: the points of a machine with the live queries of the batch.

Points arrive as packed blocks, which are gathered until a pass over the index is worth its cost;
if matching runs inside the reading task, they arrive as decoded blocks. The gathered points and the
pairs are passed on to the stages that read them, one call per block or chunk of pairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Partition, Plan
from roost.kernel import Index, Pairs, Segment, prefetch, preload, release
from roost.kernel.cells import locate_cells
from roost.model.schemas import PointBlock, match_schema
from roost.model.space import Grid, Space
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
    Task,
    Work,
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
ROOM = "room_bytes"  # bytes of files that fit into the memory of a machine's host
MACHINE_METRICS = ("points", "checks", "matches", "load_s")


class Gathered(NamedTuple):
    """Points as they are matched and, where they were routed, their cells."""

    block: PointBlock
    cells: NDArray[np.int32] | None

    @property
    def num_rows(self) -> int:
        """Number of points."""
        return self.block.size

    def cells_in(self, grid: Grid) -> NDArray[np.int32]:
        """Return the cell of each point."""
        if self.cells is not None:
            return self.cells
        return locate_cells(self.block.x, self.block.y, grid.edges_x, grid.edges_y)


class PairChunk(NamedTuple):
    """Pairs of queries and points; ``pairs.rows`` are rows of the points gathered last."""

    pairs: Pairs
    block: PointBlock

    @property
    def num_rows(self) -> int:
        """Number of pairs."""
        return int(self.pairs.slots.size)


@dataclass(frozen=True)
class MatchingTask(Task):
    """What the machines of a batch match."""

    prefix: str
    number: int
    plan: Plan
    space: Space
    segments: tuple[SegmentRef, ...]  # files of the live queries
    folder: Files  # of these
    schema: pa.Schema  # of a packed block
    output: pa.Schema  # of matches
    matches: Files | None  # where matches are staged; None only counts them
    arrivals: Mapping[int, tuple[int, ...]]  # partitions that are new to each machine
    departures: frozenset[int]  # machines that own less of space than before
    measures_room: bool  # whether machines report what memory their hosts have for files

    def build(self, machine: int, cache: WorkerCache) -> MatchingWork:
        """Build one machine's work."""
        return MatchingWork(self, machine, cache)

    def index(self, cache: WorkerCache) -> Index:
        """Open the queries of the batch; a worker retains them from task to task."""
        parts = (self.folder, self.segments, self.space)
        return cached_index(*parts, not self.plan.fully_replicated, cache)


def cached_index(
    folder: Files, segments: tuple[SegmentRef, ...], space: Space, sparse: bool, cache: WorkerCache
) -> Index:
    """Map the segments of a version, unless the worker has done it before."""
    parts = (folder, segments, space)

    def build() -> Index:
        # Under another kind of plan, pages that no machine here needs would stay mapped.
        cache.drop("index", lambda known: known[1] != sparse)
        return open_index(*parts, cache, sparse=sparse)

    return cache.get("index", (parts, sparse), build)


@dataclass(frozen=True)
class MapSegments:
    """Maps the live queries in a worker of a new executor."""

    folder: Files
    segments: tuple[SegmentRef, ...]
    space: Space
    sparse: bool

    def __call__(self, cache: WorkerCache) -> None:
        """Open the index as the first batch does."""
        cached_index(self.folder, self.segments, self.space, self.sparse, cache)


class MatchingWork(Work):
    """Matches one machine's points."""

    def __init__(self, task: MatchingTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._index = task.index(cache).for_task()
        self._waiting: list[pa.Buffer] = []
        self._rows = 0
        self._writer: MatchWriter | None = None
        self._counts = dict.fromkeys((*MACHINE_METRICS, "loaded_bytes"), 0.0)
        self._room = cache.room if task.measures_room else lambda: None
        if task.matches is not None:
            self._writer = MatchWriter(task.matches, task.prefix, machine, task.number, task.output)
        if machine in task.departures:
            release(self._index)
        if not task.plan.fully_replicated:
            self._prefetch(machine, cache)
        arrived = task.arrivals.get(machine, ())
        if arrived:
            self._preload([p for p in task.plan.partitions if p.partition_id in arrived])

    def _prefetch(self, machine: int, cache: WorkerCache) -> None:
        """Request the queries of the machine in segments that are new to this worker."""
        for ref, segment in zip(self._task.segments, self._index.segments, strict=True):
            key = self._task.folder, ref.file, machine
            cache.get("prefetched", key, partial(self._request, machine, segment))

    def _request(self, machine: int, segment: Segment) -> None:
        plan, space = self._task.plan, self._task.space
        bounds = [bounds_of(partition, space) for partition in plan.of_machine(machine)]
        prefetch(self._index, segment, np.asarray(bounds).reshape(-1, 4))

    def _preload(self, partitions: Iterable[Partition]) -> None:
        """Read the queries of partitions that are new to the machine, and measure it."""
        started = time.process_time()
        bounds = [bounds_of(partition, self._task.space) for partition in partitions]
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
                # Standing queries have window results instead of matches.
                single = pairs.segment.outputs[pairs.slots] < 0
                pairs = replace(pairs, slots=pairs.slots[single], rows=pairs.rows[single])
            self._counts["matches"] += pairs.slots.size
            if self._writer is not None and pairs.slots.size:
                self._writer.add(pairs, block)

    def finish(self, marks: None) -> Iterator[Output]:
        """Match the points that are left."""
        if self._waiting:
            yield from self._match_gathered()

    def report(self) -> Report:
        """Report the file of matches."""
        self._counts["checks"] = self._index.checks
        room = self._room()
        if room is not None:
            self._counts[ROOM] = room
        return Report(None if self._writer is None else self._writer.close(), self._counts)


@dataclass
class MatchingStage(Stage):
    """Matches points with the live queries."""

    name = "matching"
    inputs = (POINTS,)
    outputs = (GATHERED, PAIRS)
    routing = SPACE
    kinds = ("matches",)

    queries: QuerySet
    points: PointSchema
    space: Space
    query_id_type: pa.DataType
    segments: Files  # of the queries
    matches: Files | None  # where matches are staged; None only counts them
    table: SpatialTable
    measures_room: bool = False
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

    def preparation(self) -> MapSegments:
        """Map the segments of the newest batch."""
        plan, segments = self.table.at(self.table.epoch).plan, self.queries.version.segments
        return MapSegments(self.segments, segments, self.space, not plan.fully_replicated)

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
            routing.departures(spatial(batch.before)),
            self.measures_room,
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Add up matches; machines of a replicated plan without work count as idle.

        A machine's busy time is that of all stages in its task.
        """
        mine = {report.machine: report for report in reports[self.name]}
        busy = task_seconds(reports, self.name)
        machines = []
        for number in range(batch.routings[SPACE].machines):
            counts = mine[number].counts if number in mine else {}
            row = {name: int(counts.get(name, 0)) for name in ("points", "checks", "matches")}
            times = {"busy_s": busy.get(number, 0.0), "load_s": counts.get("load_s", 0.0)}
            machines.append({"machine": number, **row, **times})
        metrics: dict[str, Any] = {
            name: sum(row[name] for row in machines) for name in MACHINE_METRICS
        }
        metrics["loaded_bytes"] = sum(int(r.counts["loaded_bytes"]) for r in mine.values())
        metrics["machines"] = machines
        files = [Staged(r.value, r.machine) for r in mine.values() if r.value is not None]
        return Outcome({"matches": files}, metrics=metrics)
