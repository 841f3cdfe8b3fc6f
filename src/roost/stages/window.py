"""The window: the points of each machine and batch in one segment file.

The file also has the batch's pane: what it adds to the result of each standing query. The
transaction that commits a batch lists its files and removes the batches that have left the window,
so every reader sees the window of one committed batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan
from roost.kernel import Pairs
from roost.model.schemas import PointBlock
from roost.model.space import Space
from roost.stages.contract import Batch, MapExecutor, Outcome, Report, Reports, Stage, Task, Work
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
class WindowTask(Task):
    """How the machines of a batch store its points."""

    number: int
    plan: Plan
    space: Space
    files: Files
    attributes: tuple[str, ...]  # that the window stores
    aliases: Mapping[str, Alias]  # attributes that are other names of its own columns
    retained: frozenset[int]  # batches of the window, whose mapped files stay in the cache

    def build(self, machine: int, cache: WorkerCache) -> WindowWork:
        """Build one machine's work."""
        return WindowWork(self, machine, cache)


class WindowWork(Work):
    """Gathers the points of a machine, and writes them at the end of the batch."""

    def __init__(self, task: WindowTask, machine: int, cache: WorkerCache) -> None:
        self._task = task
        self._machine = machine
        self._router = router_of(task.plan, cache)
        WindowFiles(task.files, cache).retain(task.retained)
        self._blocks: list[PointBlock] = []
        self._cells: list[NDArray[np.int32]] = []
        self._points = 0
        # Pairs of standing queries and points; a query is identified by its position in the log.
        self._positions: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[np.int64]] = []
        self._requested: dict[int, tuple[str, float, float]] = {}

    def process(self, port: str, block: Gathered | PairChunk) -> tuple[()]:
        """Add points, or the pairs of standing queries with the points added last."""
        if isinstance(block, Gathered):
            self._blocks.append(block.block)
            self._cells.append(block.cells_in(self._task.space.grid))
            self._points += block.num_rows
        elif block.pairs.segment.outputs is not None:
            self._add_standing(block.pairs)
        return ()

    def _add_standing(self, pairs: Pairs) -> None:
        segment = pairs.segment
        assert segment.outputs is not None and segment.created_position is not None
        standing = segment.outputs[pairs.slots] >= 0
        slots = pairs.slots[standing]
        if not slots.size:
            return
        before = self._points - self._blocks[-1].size
        self._positions.append(segment.created_position[slots])
        self._rows.append(pairs.rows[standing].astype(np.int64) + before)
        for slot in np.unique(slots).tolist():
            position = int(segment.created_position[slot])
            if position not in self._requested:
                text = segment.output_texts[int(segment.outputs[slot])]
                cx, cy = segment.boxes[slot, :2].tolist()
                self._requested[position] = (text, cx, cy)

    def report(self) -> Report:
        """Write the file, if there was any point, and report it."""
        return Report(self._write() if self._blocks else None)

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
        x, y = block.x, block.y
        return WindowFile(
            name,
            block.size,
            nbytes,
            (float(x.min()), float(y.min()), float(x.max()), float(y.max())),
            int(block.time.min()),
            int(block.time.max()),
            tuple(arrays["partition_ids"].tolist()),
        )

    def _pane(self, arrays: Arrays, order: NDArray[np.int32]) -> Arrays:
        if not self._positions:
            return {}
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        positions, rows = np.concatenate(self._positions), place[np.concatenate(self._rows)]
        return build_pane(WindowSegment.open(arrays), positions, rows, self._requested)


def _joined(blocks: list[PointBlock], names: Iterable[str]) -> PointBlock:
    return PointBlock(
        np.concatenate([block.x for block in blocks]),
        np.concatenate([block.y for block in blocks]),
        np.concatenate([block.time for block in blocks]),
        pa.concat_arrays([block.ids for block in blocks]),
        {name: pa.concat_arrays([block.attributes[name] for block in blocks]) for name in names},
    )


@dataclass
class WindowStage(Stage):
    """Stores the points of the window.

    Its result is the :class:`~roost.window.view.WindowView` of the batch, from which later stages
    compute window results.
    """

    name = "window"
    inputs = (GATHERED, PAIRS)

    spec: WindowSpec
    schema: pa.Schema  # attributes of the window
    aliases: Mapping[str, Alias]  # those that are other names of coordinates, times, identifiers
    space: Space
    files: Files
    leases: Leases  # of readers, on the files of old batches
    cache: WorkerCache  # segments that the driver has open
    clock: Callable[[], float] = time.time  # seconds since 1970, for leases
    view: WindowView = field(init=False)
    gone: tuple[str, ...] = field(init=False, default=())

    def open(self, view: View) -> None:
        """Read the window of the newest batch."""
        self.view, self.gone = read_window(view, WindowView.empty(self.spec, self.schema))

    @property
    def stored(self) -> tuple[str, ...]:
        """Attributes that have columns of their own."""
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
        for name in self.files.names(partial=True):
            if name not in listed and (held is None or batch_of(name) < held):
                self.files.delete(name)

    def state(self) -> Any:
        """Return the window and the files that left it last."""
        view = self.view
        return view.batches, view.past, view.lineage.to_json(), self.gone
