"""The run lock: one run at a time uses a state directory. The lock ends with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from roost.errors import StateError
from roost.storage.private import private_opener


class RunLock:
    """Exclusive lock of the run that writes to a state directory; readers do not need it.

    Raises :class:`StateError` if another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = private_opener(str(folder / "run.lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise StateError(f"another run is using the state in {folder}") from None

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)
