"""Runs synopsis queries on a state directory, beside the stream or after it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.errors import StateError
from roost.storage.agreement import agreed
from roost.storage.files import Files
from roost.storage.store import Store
from roost.synopsis.ageing import Band, add
from roost.synopsis.bands import Bands, Sketch
from roost.synopsis.bins import learn_bins
from roost.synopsis.catalogue import (
    SPEC,
    STATE,
    TABLE,
    Catalogue,
    FileKind,
    PartName,
    open_part,
    read_catalogue,
    read_rows,
    sketch_files,
)
from roost.synopsis.queries import run_query, scopes_of
from roost.synopsis.scope import Scope
from roost.synopsis.sets import SetSketches
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import Synopsis, build

LEASE_S = 600.0
LOADED = 16  # sets of files that queries of the newest batch have read
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


class Loader:
    """Opens the files that queries need, and merges those that are not folded yet.

    The caller makes sure that no file is deleted meanwhile.
    """

    def __init__(self, files: Files, spec: SynopsisSpec) -> None:
        self._files = files
        self._spec = spec
        self._catalogue: Catalogue | None = None
        self._bases: dict[PartName, Synopsis] = {}
        self._pending: tuple[frozenset[str], list[Band]] = frozenset(), []  # deltas, merged
        self._pending_sets: list[SetSketches] = []
        self._loaded: OrderedDict[tuple[PartName, ...], Sketch] = OrderedDict()

    def load(self, catalogue: Catalogue, scopes: Sequence[Scope]) -> Sketch:
        """Return the bases that the scopes need, with all that is not folded yet."""
        if catalogue is not self._catalogue:
            listed = {file.name for file in catalogue.files}
            self._bases = {part: s for part, s in self._bases.items() if part[0] in listed}
            self._loaded.clear()
            self._catalogue = catalogue
        needed = catalogue.needed(scopes, self._spec)
        if needed not in self._loaded:
            self._loaded[needed] = self._open(catalogue, needed)
            while len(self._loaded) > LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(needed)
        return self._loaded[needed]

    def _open(self, catalogue: Catalogue, needed: Sequence[PartName]) -> Sketch:
        bins, bases = catalogue.bins, {file.name for file in catalogue.of_kind(FileKind.BASE)}
        if bins is None or not needed:
            return self._build(catalogue)
        opened = []
        for part in needed:
            if part[0] in bases:
                if part not in self._bases:
                    self._bases[part] = open_part(self._files, part)
                opened.append(self._bases[part])
        sets = [own for part in opened for own in part.set_sketches]
        # Set sketches of bases are parts of their own, without rows.
        parts = [part for part in opened if not part.spec.sets]
        if len(opened) < len(needed):
            parts += [band.synopsis for band in self._merge_deltas(catalogue)]
            sets += self._pending_sets
        if not parts:
            parts = [self._build(catalogue).without_sets()]
        return parts[0] if len(parts) == 1 and not sets else Bands(tuple(parts), tuple(sets))

    def _build(self, catalogue: Catalogue) -> Synopsis:
        """Build from the rows at full resolution, if there are any."""
        names = [file.name for file in catalogue.of_kind(FileKind.ROWS)]
        rows = read_rows(self._files, names, self._spec)
        return build(rows, self._spec, catalogue.bins or learn_bins(rows, self._spec))

    def _merge_deltas(self, catalogue: Catalogue) -> list[Band]:
        """Merge the deltas with those of the batches before."""
        deltas = {file.name: file for file in catalogue.of_kind(FileKind.DELTA)}
        known, bands = self._pending
        if not known <= deltas.keys():
            known, bands, self._pending_sets = frozenset(), [], []
        for name in deltas.keys() - known:
            for number in range(len(deltas[name].parts)):
                part = open_part(self._files, (name, number))
                self._pending_sets += part.set_sketches
                bands = add(bands, Band(0, part.without_sets()))
        self._pending = frozenset(deltas), bands
        return bands


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
        self._catalogue: Catalogue | None = None
        self._version = -1  # of the store when the catalogue was read
        spec = (agreed(self._store) or {}).get(SPEC)
        if spec is None:
            self._store.close()
            raise StateError(f"the state in {folder} has no synopsis; set synopsis.features")
        self.spec = SynopsisSpec.from_json(spec)
        self.files = sketch_files(self._store)
        self._loader = Loader(self.files, self.spec)

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

    def synopsis(self, *scopes: Scope) -> Sketch:
        """Return the synopsis of the newest batch, without files that no scope can need."""
        with self._lock:
            return self._read(scopes or (Scope(),))[1]

    def explain(self, *scopes: Scope) -> Explained:
        """Return which files a query with these scopes reads."""
        with self._lock:
            catalogue = self._refresh()
        needed = {name for name, _ in catalogue.needed(scopes or (Scope(),), self.spec)}
        pruned = (file.name for file in catalogue.files if file.name not in needed)
        return Explained(catalogue.batch_id, tuple(sorted(needed)), tuple(pruned))

    def pin(self, *scopes: Scope) -> tuple[Catalogue, tuple[PartName, ...]]:
        """Return the files of the newest batch, and the parts that the scopes need.

        The caller may open them until the lease expires, also after :meth:`close`.
        """
        with self._lock:
            catalogue = self._refresh()
            self._lease = None  # it expires
            return catalogue, catalogue.needed(scopes or (Scope(),), self.spec)

    def _read(self, scopes: Sequence[Scope]) -> tuple[int | None, Sketch]:
        for _ in range(ATTEMPTS):
            catalogue = self._refresh()
            # A file may be folded and deleted if the lease has ended meanwhile.
            with suppress(FileNotFoundError, StateError):
                return catalogue.batch_id, self._loader.load(catalogue, scopes)
            self._release()
        raise StateError(f"files of the synopsis in {self._store.folder} are missing")

    def _refresh(self) -> Catalogue:
        """Return the files of the newest batch; pins them, if it is another one than before."""
        now, version, known = self._clock(), self._store.version(), self._catalogue
        held = self._lease is not None and self._lease[1] > now + LEASE_S / 2
        if known is not None and held and version == self._version:
            return known
        self._version = version  # read first: what is written meanwhile is noticed next time
        row = self._store.get(TABLE, STATE) or {}
        if known is not None and held and known.version == row.get("version", 0):
            return known
        # Files that leave after this batch are kept as long as the lease.
        lease = self._store.leases.take(row.get("batch") or 0, now + LEASE_S)
        self._release()
        self._lease = lease, now + LEASE_S
        with self._store.view() as view:
            self._catalogue = read_catalogue(view)
        return self._catalogue

    def _release(self) -> None:
        if self._lease is not None:
            self._store.leases.release(self._lease[0])
            self._lease = None
