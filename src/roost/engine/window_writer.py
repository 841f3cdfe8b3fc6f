"""The points of one machine and batch into one segment file of the window.

With them goes the batch's pane: what it adds to each standing query that wants aggregates or
nearest points of the window instead of single matches.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.balance import Plan, Router
from roost.engine.messages import BatchTask, WindowTask
from roost.kernel import Pairs
from roost.kernel.cells import locate_cells
from roost.model import PointBlock
from roost.state.segments import write_arrays
from roost.state.windows import SEGMENTS, WindowFile, file_name
from roost.window import WindowSegment, build, build_pane, row_order
from roost.window.segment import Arrays


class WindowWriter:
    """Gathers the points of a machine, and writes them when all have come."""

    def __init__(self, task: BatchTask, window: WindowTask, machine: int, router: Router) -> None:
        self._task = task
        self._window = window
        SEGMENTS.forget_before(window.folder, window.oldest)  # this process may have answered
        self._machine = machine
        self._router = router
        self._blocks: list[PointBlock] = []
        self._cells: list[NDArray[np.int32]] = []
        self._points = 0
        self._born: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[np.int64]] = []
        self._wants: dict[int, tuple[str, float, float]] = {}

    def add(self, block: PointBlock, cells: NDArray[np.int32] | None) -> None:
        """Take a block; its cells are found where nobody has found them before."""
        if cells is None:
            grid = self._task.space.grid
            cells = locate_cells(block.x, block.y, grid.edges_x, grid.edges_y)
        self._blocks.append(block)
        self._cells.append(cells)
        self._points += block.size

    def take_standing(self, pairs: Pairs) -> Pairs:
        """Keep the pairs of queries that want something of the window; returns the others.

        Parameters
        ----------
        pairs
            Pairs of the block that was added last.
        """
        segment = pairs.segment
        assert segment.wants is not None and segment.born is not None
        standing = segment.wants[pairs.slots] >= 0
        slots = pairs.slots[standing]
        if not slots.size:
            return pairs
        before = self._points - self._blocks[-1].size
        self._born.append(segment.born[slots])
        self._rows.append(pairs.rows[standing].astype(np.int64) + before)
        for slot in np.unique(slots).tolist():
            number = int(segment.born[slot])
            if number not in self._wants:
                text = segment.wants_texts[int(segment.wants[slot])]
                cx, cy = segment.boxes[slot, :2].tolist()
                self._wants[number] = (text, cx, cy)
        return replace(pairs, slots=pairs.slots[~standing], rows=pairs.rows[~standing])

    def _pane(self, arrays: Arrays, order: NDArray[np.int32]) -> Arrays:
        if not self._born:
            return {}
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        born, rows = np.concatenate(self._born), place[np.concatenate(self._rows)]
        return build_pane(WindowSegment.open(arrays), born, rows, self._wants)

    def close(self) -> WindowFile | None:
        """Write the file; None where there was no point."""
        if not self._blocks:
            return None
        task = self._task
        block = _joined(self._blocks, self._window.attributes)
        cells = np.concatenate(self._cells)
        places = self._router.places_of(cells)
        numbers = _partition_ids(task.plan)
        order = row_order(block, places, numbers.size, task.space)
        arrays = build(block, cells, places, numbers, task.space, order, self._window.aliases)
        arrays |= self._pane(arrays, order)
        name = file_name(task.batch_id, self._machine, uuid.uuid4().hex)
        nbytes = write_arrays(Path(self._window.folder) / name, arrays)
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


def _partition_ids(plan: Plan) -> NDArray[np.int64]:
    return np.array([p.partition_id for p in plan.partitions], np.int64)


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
