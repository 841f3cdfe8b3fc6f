"""The window: the points of one machine and batch in one segment file, and which files count.

With the points goes the batch's pane: what it adds to each standing query that requests aggregates
or nearest points of the window instead of single matches. The transaction that commits a batch
also lists its files, removes the batches that have left the window, and writes the lineage and
totals that go with the rest, so every reader sees the window of one committed batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan
from roost.kernel import Pairs
from roost.kernel.cells import locate_cells
from roost.model.schemas import PointBlock
from roost.model.space import Space
from roost.stages.contract import (
    Batch,
    MapExecutor,
    Outcome,
    Output,
    Report,
    Reports,
    Stage,
)
from roost.stages.matching import GATHERED, PAIRS, Gathered, PairChunk
from roost.stages.routing import router_of, spatial
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Leases, View
from roost.window import Alias, WindowSegment, WindowSpec, build, build_pane, row_order
from roost.window.segment import Arrays
from roost.window.view import (
    WindowFile,
    WindowFiles,
    WindowView,
    batch_of,
    file_name,
    read_window,
    window_facts,
)


@dataclass(frozen=True)
class WindowTask:
    """How the machines of a batch store its points.

    Parameters
    ----------
    number
        Number of the batch.
    plan, space
        Which partition a cell belongs to, and where it is.
    files
        Where segments go.
    attributes, aliases
        Attributes that the window stores, and those that are other names of its own columns.
    retained
        Batches of the window, whose mapped files stay in the cache.
    """

    number: int
    plan: Plan
    space: Space
    files: Files
    attributes: tuple[str, ...]
    aliases: Mapping[str, Alias]
    retained: frozenset[int]

    def build(self, machine: int, cache: WorkerCache) -> WindowWork:
        """Build one machine's work."""
        return WindowWork(self, machine, cache)

    def merge(self, marks: Mapping[str, Sequence[Any]]) -> None:
        """Ignore marks."""


class WindowWork:
    """Gathers the points of a machine, and writes them at the end of the batch."""

    def __init__(self, task: WindowTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._machine = machine
        self._router = router_of(task.plan, cache)
        WindowFiles(task.files, cache).retain(task.retained)
        self._blocks: list[PointBlock] = []
        self._cells: list[NDArray[np.int32]] = []
        self._points = 0
        self._born: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[np.int64]] = []
        self._wants: dict[int, tuple[str, float, float]] = {}
        self._file: WindowFile | None = None

    def process(self, port: str, block: Gathered | PairChunk) -> Iterable[Output]:
        """Add points, or the pairs of standing queries with the points added last."""
        if isinstance(block, Gathered):
            self._add(block)
        elif block.pairs.segment.outputs is not None:
            self._add_standing(block.pairs)
        return ()

    def _add(self, gathered: Gathered) -> None:
        block, cells = gathered
        if cells is None:
            grid = self._task.space.grid
            cells = locate_cells(block.x, block.y, grid.edges_x, grid.edges_y)
        self._blocks.append(block)
        self._cells.append(cells)
        self._points += block.size

    def _add_standing(self, pairs: Pairs) -> None:
        segment = pairs.segment
        assert segment.outputs is not None and segment.created_position is not None
        standing = segment.outputs[pairs.slots] >= 0
        slots = pairs.slots[standing]
        if not slots.size:
            return
        before = self._points - self._blocks[-1].size
        self._born.append(segment.created_position[slots])
        self._rows.append(pairs.rows[standing].astype(np.int64) + before)
        for slot in np.unique(slots).tolist():
            number = int(segment.created_position[slot])
            if number not in self._wants:
                text = segment.output_texts[int(segment.outputs[slot])]
                cx, cy = segment.boxes[slot, :2].tolist()
                self._wants[number] = (text, cx, cy)

    def finish(self, marks: None) -> Iterable[Output]:
        """Write the file, if there was any point."""
        if self._blocks:
            self._file = self._write()
        return ()

    def _write(self) -> WindowFile:
        task = self._task
        block = _joined(self._blocks, task.attributes)
        cells = np.concatenate(self._cells)
        places = self._router.places_of(cells)
        numbers = np.array([p.partition_id for p in task.plan.partitions], np.int64)
        order = row_order(block, places, numbers.size, task.space)
        arrays = build(block, cells, places, numbers, task.space, order, task.aliases)
        arrays |= self._pane(arrays, order)
        name = file_name(task.number, self._machine)
        nbytes = task.files.write(name, arrays)
        return WindowFile(
            name,
            block.size,
            nbytes,
            (
                float(block.x.min()),
                float(block.y.min()),
                float(block.x.max()),
                float(block.y.max()),
            ),
            int(block.time.min()),
            int(block.time.max()),
            tuple(arrays["partition_ids"].tolist()),
        )

    def _pane(self, arrays: Arrays, order: NDArray[np.int32]) -> Arrays:
        if not self._born:
            return {}
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        born, rows = np.concatenate(self._born), place[np.concatenate(self._rows)]
        return build_pane(WindowSegment.open(arrays), born, rows, self._wants)

    def report(self) -> Report:
        """Report the file."""
        return Report(self._file)


def _joined(blocks: Sequence[PointBlock], names: Sequence[str]) -> PointBlock:
    attributes = {
        name: pa.concat_arrays([block.attributes[name] for block in blocks]) for name in names
    }
    return PointBlock(
        np.concatenate([block.x for block in blocks]),
        np.concatenate([block.y for block in blocks]),
        np.concatenate([block.time for block in blocks]),
        pa.concat_arrays([block.ids for block in blocks]),
        attributes,
    )


@dataclass
class WindowStage(Stage):
    """Stores the points of the window.

    Its result is the :class:`~roost.window.view.WindowView` of the batch, from which later stages
    compute window results.

    Parameters
    ----------
    spec
        What the window is.
    schema
        Attributes of the points that it stores.
    aliases
        Those of them that are other names of coordinates, times or identifiers.
    space
        Where points are.
    files
        Where segments are.
    leases
        Readers' claims on the files of old batches.
    cache
        Segments that the driver has open.
    clock
        Seconds since 1970, for leases.
    """

    name = "window"
    inputs = (GATHERED, PAIRS)

    spec: WindowSpec
    schema: pa.Schema
    aliases: Mapping[str, Alias]
    space: Space
    files: Files
    leases: Leases
    cache: WorkerCache
    clock: Callable[[], float] = time.time
    view: WindowView = field(init=False)
    gone: tuple[str, ...] = field(init=False, default=())

    def open(self, view: View) -> None:
        """Read the window of the newest batch."""
        self.view, self.gone = read_window(view, WindowView.empty(self.spec, self.schema))

    @property
    def stored(self) -> tuple[str, ...]:
        """Attributes that need columns of their own."""
        return tuple(name for name in self.schema.names if name not in self.aliases)

    def attributes(self, queries: Any) -> Iterable[str]:
        """Return the attributes that the window stores."""
        return self.stored

    def prepare(self, batch: Batch) -> WindowTask:
        """Return the task of a batch."""
        return WindowTask(
            batch.number,
            spatial(batch.routings).plan,
            self.space,
            self.files,
            self.stored,
            self.aliases,
            self.view.batch_ids,
        )

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Compute the window as it will be when the batch is committed."""
        files = [report.value for report in reports[self.name] if report.value is not None]
        after = self.view.with_batch(batch.number, spatial(batch.routings).plan, files)
        return Outcome(facts=window_facts(self.view, after), result=after)

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue from the window of the batch."""
        after: WindowView = outcome.result
        self.gone = self.view.left_by(after)
        self.view = after

    def cleanup(self) -> None:
        """Delete files that no reader can request.

        Files that left the window are deleted a batch later, because statistics still have to
        subtract their points, and not before every lease on them has ended.
        """
        WindowFiles(self.files, self.cache).retain(self.view.batch_ids)
        listed = {file.file for batch in self.view.batches for file in batch.files}
        listed.update(self.gone)
        held = self.leases.oldest(self.clock())
        for name in self.files.names():
            if name not in listed and (held is None or batch_of(name) < held):
                self.files.delete(name)

    def state(self) -> Any:
        """Return the window and the files that left it last."""
        view = self.view
        return view.batches, view.past, view.lineage.to_json(), self.gone
