"""Answers of standing queries: aggregates and nearest points of the window, after every batch.

The machines of a batch leave panes beside the points: what the batch adds to each standing query.
A query's answer is its panes of all live batches, merged. A pane is bound to the points that it was
made from, wherever their partition goes, so a plan change can neither lose nor double a point.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from roost.engine.writers import flush_file
from roost.kernel import Segment, unpack
from roost.model import TIME_MAX, TIME_MIN
from roost.state.queries import load_ended
from roost.state.segments import map_arrays
from roost.state.store import SegmentRef
from roost.state.windows import SEGMENTS, WindowView
from roost.window import Live, Pane, WindowSegment, answers


@dataclass(frozen=True, slots=True)
class _Known:
    """Queries of one segment file that want something, by slot."""

    slots: NDArray[np.int64]
    born: NDArray[np.int64]
    wants: NDArray[np.int32]
    texts: tuple[str, ...]
    ids: pa.Array
    live_from: NDArray[np.int64]
    live_until: NDArray[np.int64]


def _known(segment: Segment) -> _Known | None:
    if segment.wants is None or segment.born is None:
        return None
    slots = np.flatnonzero(segment.wants >= 0)

    def times(values: NDArray[np.int64] | None, default: int) -> NDArray[np.int64]:
        return np.full(slots.size, default) if values is None else np.asarray(values[slots])

    return _Known(
        slots,
        np.asarray(segment.born[slots]),
        np.asarray(segment.wants[slots]),
        segment.wants_texts,
        segment.ids.take(pa.array(slots)),
        times(segment.live_from, TIME_MIN),
        times(segment.live_until, TIME_MAX),
    )


@dataclass
class StandingAnswers:
    """Answers the standing queries of a state directory.

    Parameters
    ----------
    segment_folder, window_folder
        Where queries and points are.
    staging
        Folder for each kind of answer.
    query_id_type, point_id_type, time_type
        Types of the answers' columns.
    """

    kinds: ClassVar[tuple[str, ...]] = ("aggregates", "nearest")

    segment_folder: Path
    window_folder: Path
    staging: Mapping[str, Path]
    query_id_type: pa.DataType
    point_id_type: pa.DataType
    time_type: pa.DataType
    _segments: dict[str, _Known | None] = field(default_factory=dict)

    def write(
        self, batch_id: int, refs: Sequence[SegmentRef], view: WindowView, now: int | None
    ) -> dict[str, list[str]]:
        """Answer the queries of some segments from a window; returns the files by kind.

        Parameters
        ----------
        batch_id
            The batch whose window it is.
        refs
            Segments of the queries.
        view
            The window.
        now
            Event time that the stream has reached; queries that are over are not answered.
        """
        names, wants = self._live(refs, now)
        if not wants:
            return {}
        parts = list(self._parts(view))
        aggregates, nearest = answers(parts, wants, self.point_id_type)
        numbers = np.fromiter(wants, np.int64, len(wants))
        files: dict[str, list[str]] = {}
        for kind, table in zip(self.kinds, (aggregates, nearest), strict=True):
            if table.num_rows:
                done = self._named(batch_id, table, numbers, names)
                files[kind] = [self._leave(batch_id, kind, done)]
        return files

    def _live(self, refs: Sequence[SegmentRef], now: int | None) -> tuple[pa.Array, dict[int, str]]:
        """Names of the queries, and what they want by their number, both in the same order."""
        for ref in refs:
            if ref.file not in self._segments:
                segment = unpack(map_arrays(self.segment_folder / ref.file))
                self._segments[ref.file] = _known(segment)
        live = {ref.file for ref in refs}
        self._segments = {name: known for name, known in self._segments.items() if name in live}
        names = [pa.array([], self.query_id_type)]
        wants: dict[int, str] = {}
        for ref in refs:
            known = self._segments[ref.file]
            if known is None:
                continue
            until = np.array(known.live_until)
            slots, ends = load_ended(self.segment_folder, ref)
            if slots.size:
                by_slot = np.full(max(int(slots.max()), int(known.slots.max())) + 1, TIME_MAX)
                by_slot[slots] = ends
                until = np.minimum(until, by_slot[known.slots])
            over = until <= (TIME_MIN if now is None else now)
            mine = np.flatnonzero(~over & (known.live_from < until))
            names.append(known.ids.take(pa.array(mine)))
            texts = (known.texts[code] for code in known.wants[mine].tolist())
            wants.update(zip(known.born[mine].tolist(), texts, strict=True))
        return pa.concat_arrays(names), wants

    def _parts(self, view: WindowView) -> Iterable[tuple[WindowSegment, Pane, Live]]:
        folder = self.window_folder
        for batch in view.live():
            lives = view.lives(batch, folder)
            for file, live in zip(batch.files, lives, strict=True):
                segment, pane = SEGMENTS.open(str(folder / file.file))
                if pane is not None:
                    yield segment, pane, live

    def _named(
        self, batch_id: int, table: pa.Table, numbers: NDArray[np.int64], names: pa.Array
    ) -> pa.Table:
        """Put the batch and the queries' names where their numbers were."""
        order = np.argsort(numbers)
        places = order[np.searchsorted(numbers[order], table["born"].to_numpy())]
        columns = {
            "batch_id": pa.array(np.full(table.num_rows, batch_id, np.int64)),
            "query_id": names.take(pa.array(places)),
        }
        for name in table.column_names[1:]:
            column = table[name]
            columns[name] = column.cast(self.time_type) if name == "event_time" else column
        return pa.table(columns)

    def _leave(self, batch_id: int, kind: str, table: pa.Table) -> str:
        path = self.staging[kind] / f"batch-{batch_id:010d}-{uuid.uuid4().hex}.parquet"
        pq.write_table(table, path, compression="zstd")
        flush_file(path)
        return str(path)
