"""The window in a state directory: the files of its batches.

Every batch writes one segment file per machine. The transaction that commits the batch lists its
files, deletes the rows of expired batches, and writes the lineage and totals. So every reader, in
any process, sees the window of one committed batch. Readers hold a lease on the oldest batch of
their view, so that its files are not deleted.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from roost.balance import Plan
from roost.errors import StateError
from roost.model.records import TIME_MIN
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.storage.store import Fact, Store, View
from roost.window.evaluate import Live, live_parts
from roost.window.lineage import Lineage
from roost.window.panes import Pane
from roost.window.segment import WindowSegment
from roost.window.spec import BatchFacts, Extent, Past, WindowSpec, expired, extent

LEASE_S = 600.0
BATCHES, STATE = "windows", "window"


@dataclass(frozen=True, slots=True)
class WindowFile:
    """A segment file of one machine and batch, with statistics that let readers skip it.

    ``bounds`` are the ``x0, y0, x1, y1`` of its points, ``partitions`` those that they were routed
    to.
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
        """The facts that windows use."""
        return BatchFacts(
            self.batch_id,
            sum(file.points for file in self.files),
            sum(file.nbytes for file in self.files),
            max((file.time_max for file in self.files), default=TIME_MIN),
        )


@dataclass(frozen=True)
class WindowView:
    """The window as of one committed batch.

    ``batches`` are those that have not expired, the newest last, and ``past`` the totals of the
    others.
    """

    spec: WindowSpec
    batches: tuple[WindowBatch, ...]
    past: Past
    lineage: Lineage
    attributes: pa.Schema

    @property
    def batch_id(self) -> int | None:
        """The newest batch; None before the first."""
        return self.batches[-1].batch_id if self.batches else None

    @property
    def batch_ids(self) -> frozenset[int]:
        """Batches that have not expired."""
        return frozenset(batch.batch_id for batch in self.batches)

    @cached_property
    def extent(self) -> Extent:
        """Live part of the window."""
        return extent(self.spec, [batch.facts for batch in self.batches], self.past)

    def live(self) -> list[WindowBatch]:
        """Return the batches that may have live points."""
        held = self.extent
        return [batch for batch in self.batches if held.holds(batch.batch_id)]

    def lives(self, batch: WindowBatch, files: WindowFiles) -> list[Live]:
        """Return the live rows of each file of a live batch."""
        held = self.extent
        if held.cut is None or held.cut.batch_id != batch.batch_id:
            return [Live(held.time_after)] * len(batch.files)
        # To cut a batch by a count, all its points are read; every query on the batch needs it.
        return files.cache.get(
            "cut",
            (files.files, held, batch),
            lambda: live_parts(held, batch.batch_id, [files.segment(f.file) for f in batch.files]),
        )

    def live_partitions(self) -> set[int]:
        """Return the partitions that have points in a live batch."""
        return _partitions(self.live())

    @classmethod
    def empty(cls, spec: WindowSpec, attributes: pa.Schema) -> WindowView:
        """Return the window before the first batch."""
        return cls(spec, (), Past(), Lineage(), attributes)

    def with_batch(self, number: int, plan: Plan, files: Sequence[WindowFile]) -> WindowView:
        """Return the window with one more batch, without the batches that expire then."""
        batches = (*self.batches, WindowBatch(number, tuple(files)))
        gone = set(expired(self.spec, [batch.facts for batch in batches], self.past))
        kept = tuple(batch for batch in batches if batch.batch_id not in gone)
        lineage = self.lineage.with_plan(plan).expire(_partitions(kept))
        past = self.past.with_batches(b.facts for b in batches if b.batch_id in gone)
        return WindowView(self.spec, kept, past, lineage, self.attributes)

    def left_by(self, after: WindowView) -> tuple[str, ...]:
        """Return the files of this window that a later one no longer has."""
        kept = after.batch_ids
        gone = (batch for batch in self.batches if batch.batch_id not in kept)
        return tuple(file.file for batch in gone for file in batch.files)


def _partitions(batches: Sequence[WindowBatch]) -> set[int]:
    return {number for batch in batches for file in batch.files for number in file.partitions}


def window_files(store: Store) -> Files:
    """Return the segment files of the window."""
    return store.files("window")


def find_view(view: View) -> WindowView | None:
    """Read the window of the newest committed batch; None before the first."""
    state = view.get(STATE, "state")
    if state is None:
        return None
    return WindowView(
        WindowSpec.from_json(state["spec"]),
        tuple(_batch(row) for _, row in view.items(BATCHES)),
        Past(**state["past"]),
        Lineage.from_json(state["lineage"]),
        pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state["attributes"]))),
    )


def _batch(row: dict[str, Any]) -> WindowBatch:
    def file(data: dict[str, Any]) -> WindowFile:
        lists = {name: tuple(data[name]) for name in ("bounds", "partitions")}
        return WindowFile(**data | lists)

    return WindowBatch(row["batch_id"], tuple(map(file, row["files"])))


def read_view(store: Store) -> WindowView:
    """Read the window of the newest committed batch; raise :class:`StateError` without one."""
    with store.view() as view:
        found = find_view(view)
    if found is None:
        raise StateError(
            f"state in {store.folder} has no window yet: set window.kind, and wait for a batch"
        )
    return found


def lease_view(store: Store, clock: Callable[[], float] = time.time) -> tuple[int, WindowView]:
    """Read the window and protect its files until the lease is released.

    A reader that dies protects them for ``LEASE_S`` seconds at most.
    """
    # The oldest batch only grows, so a lease taken before the view is read protects all its files.
    oldest = next((batch_id for batch_id, _ in store.items(BATCHES)), 0)
    lease = store.leases.take(oldest, clock() + LEASE_S)
    try:
        return lease, read_view(store)
    except StateError:
        store.leases.release(lease)
        raise


def read_window(view: View, empty: WindowView) -> tuple[WindowView, tuple[str, ...]]:
    """Return the window of the newest batch, and the files that left it with that batch."""
    state = view.get(STATE, "state")
    return find_view(view) or empty, tuple((state or {}).get("gone", ()))


def window_facts(before: WindowView, after: WindowView) -> list[Fact]:
    """Return the facts to record with the commit of the newest batch."""
    newest = after.batches[-1]
    row = {"batch_id": newest.batch_id, "files": [asdict(file) for file in newest.files]}
    state = {
        "spec": after.spec.to_json(),
        "past": asdict(after.past),
        "lineage": after.lineage.to_json(),
        "attributes": base64.b64encode(after.attributes.serialize()).decode(),
        "gone": before.left_by(after),
    }
    return [
        Fact(BATCHES, newest.batch_id, row),
        *(Fact(BATCHES, number, None) for number in sorted(before.batch_ids - after.batch_ids)),
        Fact(STATE, "state", state),
    ]


@dataclass(frozen=True)
class WindowFiles:
    """The window's files, and those of them that this process has mapped.

    A deleted file takes up disk space as long as it is mapped, so processes drop the files of
    expired batches. Batches need not expire in order: event times may be late.
    """

    files: Files
    cache: WorkerCache

    def open(self, name: str) -> tuple[WindowSegment, Pane | None]:
        """Map a file: its points, and their pane of standing queries."""

        def build() -> tuple[WindowSegment, Pane | None]:
            arrays = self.files.map(name)
            return WindowSegment.open(arrays), Pane.open(arrays)

        return self.cache.get("window", (self.files, name), build)

    def segment(self, name: str) -> WindowSegment:
        """Map the points of a file."""
        return self.open(name)[0]

    def retain(self, batch_ids: Collection[int]) -> None:
        """Drop the mapped files of all other batches."""
        self.cache.drop(
            "window", lambda key: key[0] == self.files and batch_of(key[1]) not in batch_ids
        )


def file_name(number: int, machine: int) -> str:
    """Return a unique name for a segment file; names sort by batch."""
    return f"{number:010d}-{machine:05d}-{uuid.uuid4().hex}.win"


def batch_of(name: str) -> int:
    """Return the batch that a file was written in."""
    return int(name.split("-", 1)[0])
