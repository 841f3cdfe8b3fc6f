"""Files of arrays in one folder, by name.

Names, never paths, go into tasks, reports and facts. A file is written once and never changed, so
each attempt of a task uses a name of its own, and only names that a report or a fact lists count.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from roost.storage.arrays import PARTIAL, map_arrays, write_arrays


@dataclass(frozen=True)
class Files:
    """The files of one folder; small, so that tasks can carry it.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> files = Files(tempfile.mkdtemp())
    >>> size = files.write("a-1.seg", {"x": np.arange(3)})
    >>> files.names("a-"), files.map("a-1.seg")["x"].tolist()
    (['a-1.seg'], [0, 1, 2])
    >>> files.delete("a-")
    >>> files.names()
    []
    """

    folder: str

    def path(self, name: str) -> Path:
        """Return where a file is on this host."""
        return Path(self.folder, name)

    def name(self, prefix: str, label: str, suffix: str) -> str:
        """Make a name that no other attempt uses."""
        return f"{prefix}{label}-{uuid.uuid4().hex}{suffix}"

    def write(self, name: str, arrays: Mapping[str, NDArray[Any]], *, durable: bool = True) -> int:
        """Write arrays to a new file; returns its size in bytes."""
        return write_arrays(self.path(name), arrays, durable=durable)

    def map(self, name: str) -> dict[str, NDArray[Any]]:
        """Map the arrays of a file, read-only."""
        return map_arrays(self.path(name))

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of complete files that begin with a prefix, sorted."""
        return sorted(name for name in self._found(prefix) if not name.endswith(PARTIAL))

    def delete(self, prefix: str, keep: Collection[str] = ()) -> None:
        """Delete every file whose name begins with a prefix, except those to keep."""
        for name in self._found(prefix):
            if name not in keep:
                self.path(name).unlink(missing_ok=True)

    def _found(self, prefix: str) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith(prefix)]
