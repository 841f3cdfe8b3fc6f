"""One run at a time: a lock on a state directory that dies with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from roost.errors import StateError
from roost.state.private import private_opener


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
        self._file = private_opener(str(folder / "run.lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise StateError(f"another run is using the state in {folder}") from None

    def release(self) -> None:
        """Let the next run in."""
        os.close(self._file)
