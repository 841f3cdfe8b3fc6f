"""What a worker process retains between tasks; task code receives it as an argument."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

Value = TypeVar("Value")


class WorkerCache:
    """Immutable entries by kind and key; the least recently used of a kind is dropped first."""

    LIMITS: ClassVar[Mapping[str, int]] = {
        "index": 2,
        "open segment": 1 << 20,  # dropped with the versions that have them
        "query segment": 16,
        "query part": 1 << 12,
        "router": 2,
        "parquet": 8,
        "row groups": 2,
        "prefetched": 1 << 12,
        "resident": 1 << 10,
        "window": 1 << 20,  # dropped by age
    }

    def __init__(
        self,
        root: Callable[[], Path | None] = lambda: None,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._root = root
        # Bytes of files that fit into the memory of the worker's host; None if that is unknown.
        self.room = room
        self._entries: dict[str, OrderedDict[Any, Any]] = {}
        self._lock = threading.Lock()  # snapshot queries may run beside a batch

    def get(self, kind: str, key: Any, build: Callable[[], Value]) -> Value:
        """Return the entry of a key, built if the cache does not have it."""
        with self._lock:
            entries = self._entries.setdefault(kind, OrderedDict())
            if key in entries:
                entries.move_to_end(key)
                found: Value = entries[key]
                return found
        value = build()
        with self._lock:
            entries[key] = value
            while len(entries) > self.LIMITS.get(kind, 8):
                entries.popitem(last=False)
        return value

    def folder(self, name: str) -> Path | None:
        """Return a folder on the executor's host, which its workers share and which ends with it.

        There is none where the state directory is as near: in the driver's process or on its host.
        """
        root = self._root()
        if root is None:
            return None
        path = root / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def drop(self, kind: str, stale: Callable[[Any], bool]) -> None:
        """Drop the entries whose keys are stale."""
        with self._lock:
            entries = self._entries.get(kind, OrderedDict())
            for key in [key for key in entries if stale(key)]:
                del entries[key]
