"""The window's points in a state directory: which files hold them, and when they are deleted.

Every batch leaves one segment file a machine. The transaction that commits the batch also lists
its files, strikes out the batches that have left the window, and writes the lineage and totals
that go with the rest. So at every moment one row or another is true as a whole, and whoever reads
them, in whatever process, sees the window of one committed batch.

Files that are listed no more are deleted one batch later (TrioStat still has to hear of them),
unless somebody has pinned an older view. Whatever else lies in the folder was left by an attempt
that failed.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from roost.balance import Plan
from roost.errors import StateError
from roost.state.private import private_folder
from roost.state.segments import map_arrays
from roost.state.store import Store, WindowChange
from roost.window import (
    Alias,
    BatchFacts,
    Extent,
    Lineage,
    Live,
    Pane,
    Past,
    WindowSegment,
    WindowSpec,
    expired,
    extent,
    live_parts,
)

PIN_S = 600.0


@dataclass(frozen=True, slots=True)
class WindowFile:
    """A segment file of one machine and batch, with what tells whether it is worth opening.

    Parameters
    ----------
    file
        Name in the folder of windows.
    points, nbytes
        Its size.
    bounds
        ``x0, y0, x1, y1`` of its points.
    time_min, time_max
        Their event times.
    partitions
        Partitions that they were routed to.
    """

    file: str
    points: int
    nbytes: int
    bounds: tuple[float, float, float, float]
    time_min: int
    time_max: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """The files of a batch, in the order of their machines."""

    batch_id: int
    files: tuple[WindowFile, ...]

    @property
    def facts(self) -> BatchFacts:
        """What decides whether the batch is in the window."""
        return BatchFacts(
            self.batch_id,
            sum(file.points for file in self.files),
            sum(file.nbytes for file in self.files),
            min((file.time_min for file in self.files), default=None),
            max((file.time_max for file in self.files), default=None),
        )


@dataclass(frozen=True)
class WindowView:
    """The window as of one committed batch.

    Parameters
    ----------
    spec
        What the window is.
    batches
        Batches that have not left it, the newest last.
    past
        Totals of those that have.
    lineage
        Which partitions lead to which.
    attributes
        What it keeps of a point beside place, time and identifier.
    """

    spec: WindowSpec
    batches: tuple[WindowBatch, ...]
    past: Past
    lineage: Lineage
    attributes: pa.Schema

    @property
    def batch_id(self) -> int | None:
        """Batch of which this is the window; None before the first."""
        return self.batches[-1].batch_id if self.batches else None

    @property
    def oldest(self) -> int:
        """Oldest batch that has not left it; 0 without any."""
        return self.batches[0].batch_id if self.batches else 0

    @cached_property
    def extent(self) -> Extent:
        """What of it is live."""
        return extent(self.spec, [batch.facts for batch in self.batches], self.past)

    def live(self) -> list[WindowBatch]:
        """Batches that may have live points."""
        held = self.extent
        return [batch for batch in self.batches if held.holds(batch.batch_id)]

    def lives(self, batch: WindowBatch, folder: Path) -> list[Live]:
        """Tell what of each file of a live batch is live; folder is where the files are."""
        held = self.extent
        if held.cut is None or held.cut.batch_id != batch.batch_id:
            return [Live(held.time_after)] * len(batch.files)
        return _lives_of_cut(str(folder), held, batch)

    def live_partitions(self) -> set[int]:
        """Partitions that have points in a live batch."""
        return _partitions(self.live())


def _partitions(batches: Sequence[WindowBatch]) -> set[int]:
    return {number for batch in batches for file in batch.files for number in file.partitions}


@lru_cache(maxsize=4)
def _lives_of_cut(folder: str, held: Extent, batch: WindowBatch) -> list[Live]:
    """Look at all points of a batch that a count cuts; every question of the batch needs it."""
    segments = [open_window_file(Path(folder), file.file) for file in batch.files]
    return live_parts(held, batch.batch_id, segments)


def read_view(store: Store) -> WindowView:
    """Read the window of the newest committed batch.

    Raises
    ------
    StateError
        If the state directory keeps no window.
    """
    rows, state = store.window()
    if state is None:
        raise StateError(
            f"state in {store.folder} has no window yet: set window.kind, and wait for a batch"
        )
    return WindowView(
        WindowSpec.from_json(state["spec"]),
        tuple(_batch(row) for row in rows),
        Past(**state["past"]),
        Lineage.from_json(state["lineage"]),
        pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state["attributes"]))),
    )


def _batch(row: dict[str, Any]) -> WindowBatch:
    files = tuple(
        WindowFile(
            **{**file, "bounds": tuple(file["bounds"]), "partitions": tuple(file["partitions"])}
        )
        for file in row["files"]
    )
    return WindowBatch(row["batch_id"], files)


def pin_view(store: Store, clock: Callable[[], float] = time.time) -> tuple[int, WindowView]:
    """Read the window and keep its files from being deleted until the pin is taken out.

    A reader that dies holds them for ``PIN_S`` seconds at most.
    """
    pin = store.pin_window(clock() + PIN_S)
    try:
        return pin, read_view(store)
    except StateError:
        store.unpin_window(pin)
        raise


def open_window_file(folder: Path, name: str) -> WindowSegment:
    """Map a segment of the window."""
    return WindowSegment.open(map_arrays(folder / name))


class WindowKeeper:
    """The window of a running pipeline.

    Parameters
    ----------
    store
        Where it is recorded.
    spec
        What it is.
    attributes
        Attributes of the points that it keeps.
    aliases
        Those of them that are other names of coordinates, times or identifiers.
    clock
        Seconds since 1970, for pins.
    """

    def __init__(
        self,
        store: Store,
        spec: WindowSpec,
        attributes: pa.Schema,
        aliases: Mapping[str, Alias],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.spec = spec
        self.attributes = attributes
        self.aliases = dict(aliases)
        self.stored = tuple(name for name in attributes.names if name not in aliases)
        self.folder = private_folder(store.window_folder)
        self._store = store
        self._clock = clock
        _, state = store.window()
        empty = WindowView(spec, (), Past(), Lineage(), attributes)
        self.view = empty if state is None else read_view(store)
        self.gone: tuple[WindowFile, ...] = ()
        self.sweep()

    def preview(self, batch_id: int, plan: Plan, files: Sequence[WindowFile]) -> WindowView:
        """Return the window as it will be when a batch is committed."""
        old = self.view
        batches = (*old.batches, WindowBatch(batch_id, tuple(files)))
        gone = set(expired(self.spec, [batch.facts for batch in batches], old.past))
        kept = tuple(batch for batch in batches if batch.batch_id not in gone)
        left = [batch for batch in batches if batch.batch_id in gone]
        lineage = Lineage.from_json(old.lineage.to_json())
        lineage.add(plan)
        lineage.expire(_partitions(kept))
        past = old.past.with_batches([batch.facts for batch in left])
        return WindowView(self.spec, kept, past, lineage, self.attributes)

    def change(self, after: WindowView) -> WindowChange:
        """Put into rows what the commit of the newest batch changes."""
        kept = {batch.batch_id for batch in after.batches}
        newest = after.batches[-1]
        return WindowChange(
            newest.batch_id,
            {"batch_id": newest.batch_id, "files": [asdict(file) for file in newest.files]},
            tuple(b.batch_id for b in self.view.batches if b.batch_id not in kept),
            {
                "spec": self.spec.to_json(),
                "past": asdict(after.past),
                "lineage": after.lineage.to_json(),
                "attributes": base64.b64encode(self.attributes.serialize()).decode(),
            },
        )

    def committed(self, after: WindowView) -> None:
        """Go on from the window of a batch that has been committed."""
        kept = {batch.batch_id for batch in after.batches}
        self.gone = tuple(
            file for b in self.view.batches if b.batch_id not in kept for file in b.files
        )
        self.view = after

    def sweep(self) -> None:
        """Delete files that nobody can ask for; no batch may be running."""
        listed = {file.file for batch in self.view.batches for file in batch.files}
        listed.update(file.file for file in self.gone)
        pinned = self._store.pinned_batch(self._clock())
        SEGMENTS.forget_before(str(self.folder), self.view.oldest)
        for path in self.folder.glob("*.win*"):
            if path.name in listed:
                continue
            if pinned is not None and batch_of(path.name) >= pinned:
                continue
            path.unlink(missing_ok=True)


class SegmentCache:
    """Segments that a process keeps mapped from batch to batch and question to question.

    A file that is deleted while it is mapped still takes up its room on the disk. So whoever opens
    segments says which batch is the oldest that anybody may still ask for.
    """

    def __init__(self) -> None:
        self._opened: dict[str, tuple[WindowSegment, Pane | None]] = {}
        self._lock = threading.Lock()  # threads may ask while a batch is answered

    def forget_before(self, folder: str, oldest: int) -> None:
        """Let go of the files in a folder that are older than a batch."""
        prefix = f"{folder}{os.sep}"
        first = f"{prefix}{batch_prefix(oldest)}"  # names sort by batch
        with self._lock:
            for path in [p for p in self._opened if p.startswith(prefix) and p < first]:
                del self._opened[path]

    def open(self, path: str) -> tuple[WindowSegment, Pane | None]:
        """Map a file: its points, and what they add to standing queries."""
        with self._lock:
            opened = self._opened.get(path)
        if opened is None:
            arrays = map_arrays(Path(path))
            opened = WindowSegment.open(arrays), Pane.open(arrays)
            with self._lock:
                self._opened[path] = opened
        return opened

    def segment(self, path: str) -> WindowSegment:
        """Map the points of a file."""
        return self.open(path)[0]

    def __len__(self) -> int:
        return len(self._opened)


SEGMENTS = SegmentCache()  # of this process


def file_name(batch_id: int, machine: int, attempt: str) -> str:
    """Name of a segment file; attempts of one task have different names."""
    return f"{batch_prefix(batch_id)}{machine:05d}-{attempt}.win"


def batch_prefix(batch_id: int) -> str:
    """How the names of a batch's files begin; names sort by batch."""
    return f"{batch_id:010d}-"


def batch_of(name: str) -> int:
    """Batch that a file was written in."""
    return int(name.split("-", 1)[0])
