"""Runs synopsis queries on a state directory, beside the stream or after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from roost.errors import StateError
from roost.storage.agreement import agreed
from roost.storage.store import Store
from roost.synopsis.bins import Bins, learn_bins
from roost.synopsis.catalogue import (
    SPEC,
    STATE,
    TABLE,
    FileKind,
    PartName,
    Sketch,
    open_part,
    read_rows,
    read_sketch,
    sketch_files,
)
from roost.synopsis.queries import run_query, scopes_of
from roost.synopsis.scope import Scope
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import Synopsis, build, merge

LEASE_S = 600.0
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a query, and the newest batch that it includes; None before the first."""

    batch_id: int | None
    result: Any


@dataclass(frozen=True, slots=True)
class Explained:
    """Which files a query reads, and which it does not open."""

    batch_id: int | None
    read: tuple[str, ...]
    pruned: tuple[str, ...]


class SynopsisReader:
    """Queries the synopsis of a state directory; threads may share it.

    The stream may run in another process: every query sees the newest committed batch. Files that
    cannot have rows of the query are not opened. A lease protects the files of the newest batch;
    the parts that a query read last stay mapped until the next batch.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        if not (folder / "state.db").exists():
            raise StateError(f"{folder} is not a state directory: it has no state.db")
        self._store = Store(folder, durable=False)
        self._clock = clock
        self._lock = threading.Lock()
        self._lease: tuple[int, float] | None = None  # number, and when it ends
        self._sketch: Sketch | None = None
        self._bases: dict[PartName, Synopsis] = {}
        self._pending: tuple[frozenset[str], Synopsis] | None = None  # deltas, merged
        spec = (agreed(self._store) or {}).get(SPEC)
        if spec is None:
            self._store.close()
            raise StateError(f"the state in {folder} has no synopsis; set synopsis.features")
        self.spec = SynopsisSpec.from_json(spec)
        self._files = sketch_files(self._store)

    def close(self) -> None:
        """Release the lease and close the state directory."""
        with self._lock:
            self._release()
            self._store.close()

    def query(self, query: str, **arguments: Any) -> BatchResult:
        """Run a query by the name of its function in :mod:`roost.synopsis`.

        Examples
        --------
        ``reader.query("mean", feature="temp_c", scope=Scope(hours=(14, 16))).result.value``
        """
        with self._lock:
            batch_id, synopsis = self._read(scopes_of(arguments))
        return BatchResult(batch_id, run_query(synopsis, query, arguments))

    def synopsis(self, *scopes: Scope) -> Synopsis:
        """Return the synopsis of the newest batch, without files that no scope can need."""
        with self._lock:
            return self._read(scopes or (Scope(),))[1]

    def explain(self, *scopes: Scope) -> Explained:
        """Return which files a query with these scopes reads."""
        with self._lock:
            sketch = self._refresh()
        needed = {name for name, _ in self._needed(sketch, scopes or (Scope(),))}
        pruned = (file.name for file in sketch.files if file.name not in needed)
        return Explained(sketch.batch_id, tuple(sorted(needed)), tuple(pruned))

    def _read(self, scopes: Iterable[Scope]) -> tuple[int | None, Synopsis]:
        for _ in range(ATTEMPTS):
            sketch = self._refresh()
            # A file may be folded and deleted if the lease has ended meanwhile.
            with suppress(FileNotFoundError):
                return sketch.batch_id, self._load(sketch, self._needed(sketch, tuple(scopes)))
            self._release()
        raise StateError(f"files of the synopsis in {self._store.folder} are missing")

    def _refresh(self) -> Sketch:
        """Return the sketch of the newest batch; pins it, if it is another one than before."""
        now, row = self._clock(), self._store.get(TABLE, STATE) or {}
        known = self._sketch
        held = self._lease is not None and self._lease[1] > now + LEASE_S / 2
        if known is not None and held and known.version == row.get("version", 0):
            return known
        # Files that leave after this batch are kept as long as the lease.
        lease = self._store.leases.take(row.get("batch") or 0, now + LEASE_S)
        self._release()
        self._lease = lease, now + LEASE_S
        with self._store.view() as view:
            self._sketch = read_sketch(view)
        listed = {file.name for file in self._sketch.files}
        self._bases = {part: s for part, s in self._bases.items() if part[0] in listed}
        return self._sketch

    def _release(self) -> None:
        if self._lease is not None:
            self._store.leases.release(self._lease[0])
            self._lease = None

    def _needed(self, sketch: Sketch, scopes: Sequence[Scope]) -> tuple[PartName, ...]:
        found = [
            (file.name, number)
            for file in sketch.files
            for number, part in enumerate(file.parts)
            if any(part.overlaps(scope, self.spec) for scope in scopes)
        ]
        return tuple(found)

    def _load(self, sketch: Sketch, needed: Sequence[PartName]) -> Synopsis:
        """Return the bases that a query needs, with all that is not folded yet."""
        bins = sketch.bins
        if bins is None:
            return self._build(sketch, learn_bins)
        bases = {file.name for file in sketch.of_kind(FileKind.BASE)}
        parts = []
        for part in needed:
            if part[0] in bases:
                if part not in self._bases:
                    self._bases[part] = open_part(self._files, part)
                parts.append(self._bases[part])
        if len(parts) < len(needed):
            parts.append(self._merge_deltas(sketch))
        return merge(parts) if parts else self._build(sketch, lambda *_: bins)

    def _build(self, sketch: Sketch, learn: Callable[[pa.Table, SynopsisSpec], Bins]) -> Synopsis:
        """Build from rows at full resolution."""
        names = [file.name for file in sketch.of_kind(FileKind.ROWS)]
        if self._pending is None or self._pending[0] != frozenset(names):
            rows = read_rows(self._files, names, self.spec)
            self._pending = frozenset(names), build(rows, self.spec, learn(rows, self.spec))
        return self._pending[1]

    def _merge_deltas(self, sketch: Sketch) -> Synopsis:
        deltas = {file.name: file for file in sketch.of_kind(FileKind.DELTA)}
        known, parts = frozenset[str](), []
        if self._pending is not None and self._pending[0] <= deltas.keys():
            known, parts = self._pending[0], [self._pending[1]]
        for name in deltas.keys() - known:
            numbers = range(len(deltas[name].parts))
            parts += [open_part(self._files, (name, number)) for number in numbers]
        if len(parts) > 1 or not known:
            self._pending = frozenset(deltas), merge(parts)
        assert self._pending is not None
        return self._pending[1]
