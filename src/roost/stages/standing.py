"""Standing queries: aggregates and nearest points of the window, after each batch.

The machines of a batch write panes beside the points: what the batch adds to each standing query.
A query's result is its panes of all live batches, merged. A pane belongs to the points that it was
computed from, whichever machine owns their partition, so a plan change can neither lose nor double
a point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.kernel import Segment, unpack
from roost.model.records import TIME_MAX, TIME_MIN
from roost.queries.live import load_ended
from roost.queries.versions import SegmentRef
from roost.stages.contract import Batch, MapExecutor, Outcome, Reports, Stage, Staged
from roost.stages.reading import ReadTimes
from roost.stages.writers import write_table
from roost.storage.files import Files
from roost.window import Live, Pane, WindowSegment, standing_results
from roost.window.view import WindowFiles, WindowView


@dataclass(frozen=True, slots=True)
class _Standing:
    """Standing queries of one segment file."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]  # in the query log, where they were created
    outputs: NDArray[np.int32]  # index of the requested output in ``texts``
    texts: tuple[str, ...]
    ids: pa.Array
    live_from: NDArray[np.int64]
    live_until: NDArray[np.int64]


def _standing(segment: Segment) -> _Standing | None:
    if segment.outputs is None or segment.created_position is None:
        return None
    slots = np.flatnonzero(segment.outputs >= 0)

    def times(values: NDArray[np.int64] | None, default: int) -> NDArray[np.int64]:
        return np.full(slots.size, default) if values is None else np.asarray(values[slots])

    return _Standing(
        slots,
        np.asarray(segment.created_position[slots]),
        np.asarray(segment.outputs[slots]),
        segment.output_texts,
        segment.ids_at(slots),
        times(segment.live_from, TIME_MIN),
        times(segment.live_until, TIME_MAX),
    )


@dataclass
class StandingStage(Stage):
    """Computes the results of standing queries on the driver."""

    name = "standing"
    kinds = ("aggregates", "nearest")

    folder: Files  # of the queries
    window: WindowFiles
    staging: Mapping[str, Files]  # by kind of result
    query_id_type: pa.DataType
    point_id_type: pa.DataType
    time_type: pa.DataType
    _segments: dict[str, _Standing | None] = field(default_factory=dict)

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Compute the results of the live queries from the window of the batch.

        Queries that ended before the newest event time have none.
        """
        view: WindowView = batch.outcomes["window"].result
        times: ReadTimes = batch.outcomes["reading"].result
        known = [time for time in (batch.reached, times.newest) if time is not None]
        ids, requested = self._live(batch.queries.segments, max(known, default=None))
        if not requested:
            return Outcome()
        parts = list(self._parts(view))
        aggregates, nearest = standing_results(parts, requested, self.point_id_type)
        positions = np.fromiter(requested, np.int64, len(requested))
        files: dict[str, list[Staged]] = {}
        for kind, table in zip(self.kinds, (aggregates, nearest), strict=True):
            if table.num_rows:
                done = self._identified(batch.number, table, positions, ids)
                name = write_table(self.staging[kind], batch.prefix, kind, done)
                files[kind] = [Staged(name)]
        return Outcome(files)

    def _live(self, refs: Sequence[SegmentRef], now: int | None) -> tuple[pa.Array, dict[int, str]]:
        """Return the identifiers of the live queries, and their outputs by log position."""
        for ref in refs:
            if ref.file not in self._segments:
                self._segments[ref.file] = _standing(unpack(self.folder.map(ref.file)))
        self._segments = {ref.file: self._segments[ref.file] for ref in refs}
        ids = [pa.array([], self.query_id_type)]
        requested: dict[int, str] = {}
        for ref in refs:
            known = self._segments[ref.file]
            if known is None:
                continue
            until = np.array(known.live_until)
            slots, ends = load_ended(self.folder, ref)
            if slots.size:
                by_slot = np.full(max(int(slots.max()), int(known.slots.max())) + 1, TIME_MAX)
                by_slot[slots] = ends
                until = np.minimum(until, by_slot[known.slots])
            over = until <= (TIME_MIN if now is None else now)
            live = np.flatnonzero(~over & (known.live_from < until))
            ids.append(known.ids.take(pa.array(live)))
            texts = (known.texts[code] for code in known.outputs[live].tolist())
            requested.update(zip(known.positions[live].tolist(), texts, strict=True))
        return pa.concat_arrays(ids), requested

    def _parts(self, view: WindowView) -> Iterable[tuple[WindowSegment, Pane, Live]]:
        for batch in view.live():
            lives = view.lives(batch, self.window)
            for file, live in zip(batch.files, lives, strict=True):
                segment, pane = self.window.open(file.file)
                if pane is not None:
                    yield segment, pane, live

    def _identified(
        self, number: int, table: pa.Table, positions: NDArray[np.int64], ids: pa.Array
    ) -> pa.Table:
        """Replace log positions by the batch and the queries' identifiers."""
        order = np.argsort(positions)
        places = order[np.searchsorted(positions[order], table["created_position"].to_numpy())]
        columns = {
            "batch_id": pa.array(np.full(table.num_rows, number, np.int64)),
            "query_id": ids.take(pa.array(places)),
        }
        for name in table.column_names[1:]:
            column = table[name]
            columns[name] = column.cast(self.time_type) if name == "event_time" else column
        return pa.table(columns)
