"""One run at a time: a lock on a state directory that dies with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from roost.errors import StateError


class RunLock:
    """Held by the run that owns a state directory; onlookers do not need it.

    Parameters
    ----------
    folder
        The state directory.

    Raises
    ------
    StateError
        If another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise StateError(f"another run is using the state in {folder}") from None

    def release(self) -> None:
        """Let the next run in."""
        os.close(self._file)
