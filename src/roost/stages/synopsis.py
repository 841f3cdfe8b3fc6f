"""The synopsis: what each machine received in a batch as a delta, folded in background jobs.

Without an exchange, deltas are built in the matching tasks, where the points already are; with one,
each point goes to the machine that owns its prefix. Either way a delta has one part for each owner.
The transaction that commits a batch lists its deltas, so a batch that runs twice counts once.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from roost.errors import StateError
from roost.model.arrays import Ints, as_arrow
from roost.model.records import TIME_MIN
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
from roost.stages.reading import POINTS, ReadingStage
from roost.stages.routing import Packed
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, Leases, View
from roost.synopsis.ageing import Band, add_all, fit_budget, gather_sets
from roost.synopsis.bins import BinLearner, Bins, learn_bins
from roost.synopsis.budget import Budget
from roost.synopsis.catalogue import (
    TABLE,
    Catalogue,
    FileKind,
    PartName,
    SketchFile,
    build_parts,
    open_part,
    read_catalogue,
    read_rows,
    read_sample,
    write_parts,
    write_rows,
)
from roost.synopsis.drift import VALUES_MIN, requantise
from roost.synopsis.handover import divide
from roost.synopsis.prefix_loads import CellRows, cell_bits, count_cells, passed_on
from roost.synopsis.spec import SynopsisSpec, locate
from roost.synopsis.synopsis import Synopsis
from roost.synopsis.tree import PrefixTree

PREFIXES = "prefixes"  # name of the routing
TREES = "prefix trees"  # table with its epochs
GONE = "gone"  # key of the files that were folded
EARLY_GROWTH = 1.1  # since the last early fold, before another one
HEAD_BYTES = 1 << 16  # of a file: names of arrays, and settings

LevelPart = tuple[PartName, int]


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
        return self.tree.owners_of(self.places(block), self.spec.place_bits)

    def places(self, block: PointBlock) -> Ints:
        """Return the place of each point."""
        return locate(block.x, block.y, self.spec)

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
    records = TREES

    def __init__(self, view: View, spec: SynopsisSpec, epoch: int) -> None:
        self._view = view
        self._spec = spec
        self.epoch = epoch

    def size_of(self, machines: int) -> int:
        """Return the machines of the tree in a layout of so many."""
        return machines

    def at(self, epoch: int) -> PrefixRouting:
        """Return the routing of an epoch."""
        body = self._view.get(TREES, epoch)
        if body is None:
            raise StateError(f"the state has no prefix tree of epoch {epoch}")
        return PrefixRouting(epoch, PrefixTree.from_json(body), self._spec)


@dataclass(frozen=True)
class Added:
    """What a machine adds in a batch: its file, and its rows by prefix if they are counted."""

    file: SketchFile
    cells: CellRows | None


@dataclass(frozen=True)
class SynopsisTask(Task):
    """How the machines of a batch build their deltas."""

    prefix: str
    spec: SynopsisSpec
    bins: Bins | None  # None until there are enough rows to choose them
    routing: PrefixRouting
    schema: pa.Schema  # of a packed block
    files: Files
    cell_bits: int | None  # of the prefixes for which rows are counted, if the tree may change

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
        cells = None
        if task.cell_bits is not None:
            places = np.concatenate([task.routing.places(block) for block in self._blocks])
            cells = count_cells(places, task.spec.place_bits, task.cell_bits)
        if task.bins is None:
            name = task.files.name(task.prefix, label, ".parquet")
            return Report(Added(write_rows(task.files, name, rows, task.spec), cells))
        parts = build_parts(rows, task.routing.tree, task.spec, task.bins)
        name = task.files.name(task.prefix, label, ".delta")
        delta = write_parts(task.files, name, FileKind.DELTA, parts, rows)
        return Report(Added(delta, cells))


def table_of(block: PointBlock, spec: SynopsisSpec) -> pa.Table:
    """Return the columns of points that the synopsis describes."""
    names = (column.name for column in spec.columns)
    features = {name: block.attributes[name] for name in names if name in block.attributes}
    own = {
        spec.x: as_arrow(block.x),
        spec.y: as_arrow(block.y),
        spec.time: as_arrow(block.time).cast(TIMESTAMP),
    }
    return pa.table(features | own)


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
        parts = build_parts(rows, self.routing.tree, spec, self.bins)
        delta = self.files.name(self.prefix, "quantised", ".delta")
        return write_parts(self.files, delta, FileKind.DELTA, parts, rows)


@dataclass(frozen=True)
class Fold:
    """The background job: merges the parts of one owner into its base, within the budget."""

    files: Files
    budget: Budget
    now: int  # event time from which ages are counted
    tree: PrefixTree | None  # if it may change
    early: Budget | None = None  # to which only rows older than the study are coarsened

    def __call__(
        self, item: tuple[int, Sequence[LevelPart]], cache: WorkerCache, prefix: str
    ) -> list[SketchFile]:
        """Write the new base of an owner, and what it passes on to others."""
        owner, parts = item
        opened = [(level, open_part(self.files, part)) for part, level in parts]
        bands: Sequence[Band] = add_all(
            (), [Band(level, part.without_sets()) for level, part in opened if part.count]
        )
        sets = gather_sets([part for _, part in opened], self.budget, self.now)
        if self.tree is None:
            return [self._write(prefix, owner, bands, sets)]
        found: dict[int, list[Band]] = {owner: []} if sets else {}
        for target, band in divide(bands, owner, self.tree):
            found.setdefault(target, []).append(band)
        return [
            self._write(prefix, target, own, sets if target == owner else ())
            for target, own in sorted(found.items())
        ]

    def _write(
        self, prefix: str, owner: int, bands: Sequence[Band], sets: Sequence[Synopsis]
    ) -> SketchFile:
        # Set sketches are stored apart from the rows, which become coarser.
        taken = sum(own.nbytes for own in sets)
        if self.early is not None:
            bands, _ = fit_budget(bands, self.early, self.now, taken, young=False)
        bands, _ = fit_budget(bands, self.budget, self.now, taken)
        name = self.files.name(prefix, f"{owner:05d}", ".base")
        parts = [(owner, band) for band in (*bands, *(Band(0, own) for own in sets))]
        counted = self.tree is not None
        return write_parts(self.files, name, FileKind.BASE, parts, count_prefixes=counted)


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
    budget: Budget  # of each machine
    scaling: bool = False  # whether the prefix tree may change
    clock: Callable[[], float] = time.time  # seconds since 1970, for leases
    _early: Budget | None = None  # of the next fold
    _tried: float = 0.0  # bytes of the largest machine that the last early fold left
    catalogue: Catalogue = field(init=False)
    gone: Mapping[str, int] = field(init=False)  # files that were removed, by batch

    def __post_init__(self) -> None:
        """Choose where the deltas are built."""
        self.inputs = (POINTS,) if self.exchange else (GATHERED,)
        self.routing = PREFIXES if self.exchange else None

    def open(self, view: View) -> None:
        """Read the files of the newest batch."""
        self.catalogue, self.gone = read_catalogue(view), view.get(TABLE, GONE) or {}

    def attributes(self, queries: Any) -> Iterable[str]:
        """Return the features, and the columns of sets that are not positions or times."""
        own = {self.spec.x, self.spec.y, self.spec.time}
        return [column.name for column in self.spec.columns if column.name not in own]

    def routing_table(self) -> PrefixTable:
        """Return the trees."""
        return self.table

    def prepare(self, batch: Batch) -> SynopsisTask:
        """Return the task of a batch."""
        schema = block_schema(self.points, batch.attributes)
        routing = _prefixes(batch)
        bins = self.catalogue.bins and self.catalogue.bins.prepared()  # once, not in every task
        cells = cell_bits(routing.tree, self.spec.place_bits) if self.scaling else None
        return SynopsisTask(batch.prefix, self.spec, bins, routing, schema, self.files, cells)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """List the files of the batch; choose the bins as soon as there are enough rows."""
        values = [report.value for report in reports[self.name] if report.value is not None]
        added = [value.file for value in values]
        now, removed = self.catalogue, list[str]()
        after = replace(now, batch_id=batch.number, now=max(now.now, median_time(reports)))
        rows = [*now.of_kind(FileKind.ROWS), *added]
        if now.bins is None and sum(file.rows for file in rows) >= self.learn_rows:
            removed, names = [file.name for file in now.files], [file.name for file in rows]
            bins = learn_bins(read_rows(self.files, names, self.spec), self.spec)
            quantise = Quantise(batch.prefix, self.spec, bins, _prefixes(batch), self.files)
            added, after = executor.map(quantise, names), replace(after, bins=bins)
        after, gone = after.changed(added, removed), self._gone(batch.number, removed)
        facts, cells = [*after.facts(now), Fact(TABLE, GONE, gone)], [v.cells for v in values]
        return Outcome(facts=facts, result=(after, gone), observed=cells)

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue from the files of the batch."""
        self.catalogue, self.gone = outcome.result

    def _gone(self, batch_id: int | None, removed: Iterable[str]) -> dict[str, int]:
        """Return the removed files that readers may still need, by the batch that removed them."""
        held = self.leases.oldest(self.clock())
        kept = {name: n for name, n in self.gone.items() if held is not None and n >= held}
        return kept | dict.fromkeys(removed, batch_id or 0)

    def cleanup(self) -> None:
        """Delete files that no reader can request, except those of a job that may be running."""
        listed = {file.name for file in self.catalogue.files}
        held = self.leases.oldest(self.clock())
        listed |= {name for name, n in self.gone.items() if held is not None and n >= held}
        self.files.delete("batch-", keep=listed)
        # A job whose files are listed has ended; what else it wrote is of repeated tasks.
        ended = max((_job_number(name) for name in listed if name.startswith("job-")), default=-1)
        for name in self.files.names("job-", partial=True):
            if _job_number(name) <= ended and name not in listed:
                self.files.delete(name)

    def job(self) -> Job | None:
        """Fold the deltas, if there are enough, or if they exceed the budget of a machine."""
        deltas = self.catalogue.of_kind(FileKind.DELTA)
        full = len(deltas) >= self.fold_files
        early, self._early = self._early, None
        limit = (early or self.budget).memory
        if not full and self._largest(self.catalogue) <= limit:
            return None
        tree = self.table.at(self.table.epoch).tree if self.scaling else None
        items = fold_items(self.catalogue, tree, None if early is None else limit)
        if not items:
            return None
        inputs = sorted({part[0] for _, parts in items for part, _ in parts})
        fold = Fold(self.files, self.budget, self.catalogue.now, tree, early)
        return Job(fold, items, partial(self._folded, inputs, early is not None))

    @staticmethod
    def _largest(catalogue: Catalogue) -> int:
        return max(owner_bytes(catalogue).values(), default=0)

    def coarsen_early(self, nbytes: float) -> None:
        """Have the next fold coarsen old rows until machines have so few bytes, if they can."""
        if self._largest(self.catalogue) > EARLY_GROWTH * self._tried:
            self._early = replace(self.budget, memory=max(int(nbytes), 1))

    def _folded(
        self, inputs: Sequence[str], early: bool, results: Sequence[Sequence[SketchFile]]
    ) -> Outcome:
        bases = [file for files in results for file in files]
        for file in bases:
            if file.nbytes > self.budget.memory + HEAD_BYTES:
                warnings.warn(
                    f"the synopsis of machine {file.parts[0].owner} takes {file.nbytes:,} bytes "
                    f"and cannot be made coarser; synopsis.memory is {self.budget.memory:,}",
                    stacklevel=2,
                )
        now = self.catalogue
        gone = self._gone(now.batch_id, inputs)
        after = replace(now.changed(bases, inputs), bins=self._suitable_bins(inputs))
        facts = after.facts(now)
        if early:
            self._tried = self._largest(after)
        return Outcome(facts=[*facts, Fact(TABLE, GONE, gone)])

    def _suitable_bins(self, folded: Iterable[str]) -> Bins:
        """Return the bins of the next batches: other ones if those in use suit the rows badly."""
        assert self.catalogue.bins is not None
        if any(own.binned for own in self.spec.sets):
            return self.catalogue.bins  # sets of bins are merged under equal bins only
        recent = BinLearner(self.spec)
        for file in self.catalogue.of_kind(FileKind.DELTA):
            if file.name in folded:
                recent.update(read_sample(self.files, file.name))
        found = requantise(recent, self.catalogue.bins, min(self.learn_rows, VALUES_MIN))
        return self.catalogue.bins if found is None else found.bins

    def discard(self, prefix: str) -> None:
        """Delete the files of a job that was abandoned."""
        self.files.delete(prefix)

    def state(self) -> Any:
        """Return the listed files, the bins as JSON, and the removed files."""
        bins = self.catalogue.bins
        known = None if bins is None else bins.to_json()
        return replace(self.catalogue, bins=None), known, dict(self.gone)


def _job_number(name: str) -> int:
    """Return the number of the job that wrote a file."""
    return int(name.split("-")[1])


def _prefixes(batch: Batch) -> PrefixRouting:
    routing = batch.routings[PREFIXES]
    assert isinstance(routing, PrefixRouting)
    return routing


def median_time(reports: Reports) -> int:
    """Return the event time that the median reader has reached in a batch, by its own median."""
    times = [report.value.times.median for report in reports[ReadingStage.name]]
    known = sorted(time for time in times if time is not None)
    return known[(len(known) - 1) // 2] if known else TIME_MIN


def fold_items(
    catalogue: Catalogue, tree: PrefixTree | None = None, limit: int | None = None
) -> list[tuple[int, tuple[LevelPart, ...]]]:
    """Return the parts of each owner that has a delta, or rows of others, with their levels.

    Owners with more bytes than a ``limit`` are among them.
    """
    found: dict[int, list[LevelPart]] = {}
    changed = {o for o, n in owner_bytes(catalogue).items() if limit is not None and n > limit}
    for file in catalogue.files:
        for number, part in enumerate(file.parts):
            found.setdefault(part.owner, []).append(((file.name, number), part.level))
            if file.kind is FileKind.DELTA or (tree is not None and passed_on(part, tree)):
                changed.add(part.owner)
    return [(owner, tuple(parts)) for owner, parts in sorted(found.items()) if owner in changed]


def owner_bytes(catalogue: Catalogue) -> Counter[int]:
    """Return the bytes of each owner; a file with several owners counts by their rows."""
    nbytes = Counter[int]()
    for file in catalogue.files:
        for part in file.parts if file.kind is not FileKind.ROWS else ():
            nbytes[part.owner] += file.nbytes * part.rows // max(file.rows, 1)
    return nbytes
