"""The synopsis: what each machine received in a batch as a delta, folded in background jobs.

Without an exchange, deltas are built in the matching tasks, where the points already are; with one,
each point goes to the machine that owns its prefix. Either way a delta has one part for each owner.
The transaction that commits a batch lists its deltas, so a batch that runs twice counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from roost.errors import StateError
from roost.model.arrays import as_arrow
from roost.model.schemas import TIMESTAMP, PointBlock
from roost.stages.contract import (
    Batch,
    Job,
    MapExecutor,
    Outcome,
    Report,
    Reports,
    Stage,
    Task,
    Work,
)
from roost.stages.decode import (
    PointSchema,
    block_schema,
    pack_columns,
    pack_rows,
    take_rows,
    unpack_blocks,
)
from roost.stages.matching import GATHERED, Gathered
from roost.stages.reading import POINTS
from roost.stages.routing import Packed
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, Leases, View
from roost.synopsis.bins import Bins, learn_bins
from roost.synopsis.catalogue import (
    BINS,
    TABLE,
    FileKind,
    PartName,
    Sketch,
    SketchFile,
    build_parts,
    changes,
    open_part,
    read_rows,
    read_sketch,
    write_parts,
    write_rows,
)
from roost.synopsis.spec import SynopsisSpec, locate
from roost.synopsis.synopsis import merge
from roost.synopsis.tree import PrefixTree

PREFIXES = "prefixes"  # name of the routing
TREES = "prefix trees"  # table with its epochs
GONE = "gone"  # key of the files that were folded


@dataclass(frozen=True)
class PrefixRouting:
    """Routes points to the machine that owns their prefix."""

    epoch: int
    tree: PrefixTree
    spec: SynopsisSpec
    local: ClassVar[bool] = False

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.tree.machines

    def owners(self, block: PointBlock) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the owner of each point."""
        if self.machines == 1:
            return np.zeros(block.size, np.int64)
        places = locate(block.x, block.y, self.spec)
        return self.tree.owners_of(places, self.spec.place_bits)

    def split(
        self, port: str, block: PointBlock, cache: WorkerCache
    ) -> Iterator[tuple[int, Packed]]:
        """Pack the points of each machine into one block."""
        owners = self.owners(block)
        order = np.argsort(owners.astype(np.int16), kind="stable")
        sorted_block = take_rows(block, order)
        packed = pack_columns(sorted_block, np.zeros(order.size, np.int32))
        borders = np.searchsorted(owners[order], np.arange(self.machines + 1)).tolist()
        for number, (start, stop) in enumerate(pairwise(borders)):
            if start < stop:
                yield number, Packed(stop - start, pack_rows(packed, start, stop))


class PrefixTable:
    """The prefix trees of a state directory; ``epoch`` is that of the batches to come."""

    name = PREFIXES

    def __init__(self, view: View, spec: SynopsisSpec, epoch: int) -> None:
        self._view = view
        self._spec = spec
        self.epoch = epoch

    def at(self, epoch: int) -> PrefixRouting:
        """Return the routing of an epoch."""
        body = self._view.get(TREES, epoch)
        if body is None:
            raise StateError(f"the state has no prefix tree of epoch {epoch}")
        return PrefixRouting(epoch, PrefixTree.from_json(body), self._spec)


@dataclass(frozen=True)
class SynopsisTask(Task):
    """How the machines of a batch build their deltas."""

    prefix: str
    spec: SynopsisSpec
    bins: Bins | None  # None until there are enough rows to choose them
    routing: PrefixRouting
    schema: pa.Schema  # of a packed block
    files: Files

    def build(self, machine: int, cache: WorkerCache) -> SynopsisWork:
        """Build one machine's work."""
        return SynopsisWork(self, machine)


class SynopsisWork(Work):
    """Gathers the points of a machine, and writes its delta at the end of the batch."""

    def __init__(self, task: SynopsisTask, machine: int) -> None:
        self._task = task
        self._machine = machine
        self._blocks: list[PointBlock] = []

    def process(self, port: str, block: Gathered | Packed) -> tuple[()]:
        """Add points."""
        if isinstance(block, Packed):
            self._blocks.append(unpack_blocks([block.data], self._task.schema)[0])
        else:
            self._blocks.append(block.block)
        return ()

    def report(self) -> Report:
        """Write the file, if there was any point, and report it."""
        task, label = self._task, f"{self._machine:05d}"
        if not self._blocks:
            return Report(None)
        rows = pa.concat_tables([table_of(block, task.spec) for block in self._blocks])
        if task.bins is None:
            name = task.files.name(task.prefix, label, ".parquet")
            return Report(write_rows(task.files, name, rows, task.spec))
        owners = np.concatenate([task.routing.owners(block) for block in self._blocks])
        parts = build_parts(rows, owners, task.spec, task.bins)
        name = task.files.name(task.prefix, label, ".delta")
        return Report(write_parts(task.files, name, FileKind.DELTA, parts))


def table_of(block: PointBlock, spec: SynopsisSpec) -> pa.Table:
    """Return the columns of points that the synopsis describes."""
    names = [feature.name for feature in spec.features]
    features = {name: block.attributes[name] for name in names}
    own = {
        spec.x: as_arrow(block.x),
        spec.y: as_arrow(block.y),
        spec.time: as_arrow(block.time).cast(TIMESTAMP),
    }
    return pa.table(own | features)


@dataclass(frozen=True)
class Quantise:
    """Turns a file of rows into a delta, as soon as bins are known."""

    prefix: str
    spec: SynopsisSpec
    bins: Bins
    routing: PrefixRouting
    files: Files

    def __call__(self, name: str, cache: WorkerCache) -> SketchFile:
        """Build and write the delta."""
        rows, spec = read_rows(self.files, [name], self.spec), self.spec
        places = locate(rows[spec.x].to_numpy(), rows[spec.y].to_numpy(), spec)
        owners = self.routing.tree.owners_of(places, spec.place_bits)
        parts = build_parts(rows, owners, spec, self.bins)
        delta = self.files.name(self.prefix, "quantised", ".delta")
        return write_parts(self.files, delta, FileKind.DELTA, parts)


@dataclass(frozen=True)
class Fold:
    """The background job: merges the parts of one owner into its base."""

    files: Files

    def __call__(
        self, item: tuple[int, Sequence[PartName]], cache: WorkerCache, prefix: str
    ) -> SketchFile:
        """Write the new base of an owner."""
        owner, parts = item
        merged = merge([open_part(self.files, part) for part in parts])
        name = self.files.name(prefix, f"{owner:05d}", ".base")
        return write_parts(self.files, name, FileKind.BASE, [(owner, merged)])


@dataclass
class SynopsisStage(Stage):
    """Builds the synopsis of all points of a run."""

    name = "synopsis"

    spec: SynopsisSpec
    points: PointSchema
    table: PrefixTable
    files: Files
    leases: Leases  # of readers, on the files of old batches
    exchange: bool  # send points to the owners of their prefixes
    learn_rows: int  # with which bins are chosen
    fold_files: int  # deltas that are folded together
    clock: Callable[[], float] = time.time  # seconds since 1970, for leases
    sketch: Sketch = field(init=False)
    gone: Mapping[str, int] = field(init=False)  # files that were removed, by batch

    def __post_init__(self) -> None:
        """Choose where the deltas are built."""
        self.inputs = (POINTS,) if self.exchange else (GATHERED,)
        self.routing = PREFIXES if self.exchange else None

    def open(self, view: View) -> None:
        """Read the files of the newest batch."""
        self.sketch, self.gone = read_sketch(view), view.get(TABLE, GONE) or {}

    def attributes(self, queries: Any) -> Iterable[str]:
        """Return the features."""
        return [feature.name for feature in self.spec.features]

    def routing_table(self) -> PrefixTable:
        """Return the trees."""
        return self.table

    def prepare(self, batch: Batch) -> SynopsisTask:
        """Return the task of a batch."""
        schema = block_schema(self.points, batch.attributes)
        routing = _prefixes(batch)
        bins = self.sketch.bins
        return SynopsisTask(batch.prefix, self.spec, bins, routing, schema, self.files)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """List the files of the batch; choose the bins as soon as there are enough rows."""
        added = [report.value for report in reports[self.name] if report.value is not None]
        sketch, facts, removed = self.sketch, list[Fact](), list[str]()
        rows = [*sketch.of_kind(FileKind.ROWS), *added]
        if sketch.bins is None and sum(file.rows for file in rows) >= self.learn_rows:
            names = [file.name for file in rows]
            bins = learn_bins(read_rows(self.files, names, self.spec), self.spec)
            quantise = Quantise(batch.prefix, self.spec, bins, _prefixes(batch), self.files)
            added = executor.map(quantise, names)
            removed = [file.name for file in sketch.of_kind(FileKind.ROWS)]
            sketch = replace(sketch, bins=bins)
            facts.append(Fact(TABLE, BINS, bins.to_json()))
        listed, after = changes(sketch, batch.number, added, removed)
        gone = self._gone(batch.number, removed)
        facts += [*listed, Fact(TABLE, GONE, gone)]
        return Outcome(facts=facts, result=(after, gone))

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue from the files of the batch."""
        self.sketch, self.gone = outcome.result

    def _gone(self, batch_id: int | None, removed: Iterable[str]) -> dict[str, int]:
        """Return the removed files that readers may still need, by the batch that removed them."""
        held = self.leases.oldest(self.clock())
        kept = {name: n for name, n in self.gone.items() if held is not None and n >= held}
        return kept | dict.fromkeys(removed, batch_id or 0)

    def cleanup(self) -> None:
        """Delete files that no reader can request, except those of a job that may be running."""
        listed = {file.name for file in self.sketch.files}
        held = self.leases.oldest(self.clock())
        listed |= {name for name, n in self.gone.items() if held is not None and n >= held}
        self.files.delete("batch-", keep=listed)
        newest = max((name for name in listed if name.startswith("job-")), default="")
        for name in self.files.names("job-"):
            if name < newest and name not in listed:
                self.files.delete(name)

    def job(self) -> Job | None:
        """Fold the deltas, if there are enough."""
        if len(self.sketch.of_kind(FileKind.DELTA)) < self.fold_files:
            return None
        items = fold_items(self.sketch)
        inputs = sorted({name for _, parts in items for name, _ in parts})
        return Job(Fold(self.files), items, partial(self._folded, inputs))

    def _folded(self, inputs: Sequence[str], results: Sequence[SketchFile]) -> Outcome:
        batch_id = self.sketch.batch_id
        facts, _ = changes(self.sketch, batch_id, results, inputs)
        return Outcome(facts=[*facts, Fact(TABLE, GONE, self._gone(batch_id, inputs))])

    def discard(self, prefix: str) -> None:
        """Delete the files of a job that was abandoned."""
        self.files.delete(prefix)

    def state(self) -> Any:
        """Return the listed files, the bins as JSON, and the removed files."""
        sketch = self.sketch
        bins = None if sketch.bins is None else sketch.bins.to_json()
        return replace(sketch, bins=None), bins, dict(self.gone)


def _prefixes(batch: Batch) -> PrefixRouting:
    routing = batch.routings[PREFIXES]
    assert isinstance(routing, PrefixRouting)
    return routing


def fold_items(sketch: Sketch) -> list[tuple[int, tuple[PartName, ...]]]:
    """Return the parts of each owner that has a delta."""
    found: dict[int, list[PartName]] = {}
    changed = set()
    for file in sketch.files:
        for number, part in enumerate(file.parts):
            found.setdefault(part.owner, []).append((file.name, number))
            if file.kind is FileKind.DELTA:
                changed.add(part.owner)
    return [(owner, tuple(parts)) for owner, parts in sorted(found.items()) if owner in changed]
