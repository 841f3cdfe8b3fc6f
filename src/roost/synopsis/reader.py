"""Runs synopsis queries on a state directory, beside the stream or after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.errors import StateError
from roost.storage.agreement import agreed
from roost.storage.store import Store
from roost.synopsis.bands import Sketch
from roost.synopsis.catalogue import (
    SPEC,
    STATE,
    TABLE,
    Catalogue,
    PartName,
    read_catalogue,
    sketch_files,
)
from roost.synopsis.loading import Loader
from roost.synopsis.queries import run_query, scopes_of
from roost.synopsis.scope import Scope
from roost.synopsis.spec import SynopsisSpec

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
