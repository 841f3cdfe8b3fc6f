"""Speed at which files of a folder are read that no page of memory holds."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable

from roost.storage.files import PARTIAL, Files
from roost.storage.private import private_opener

PROBE_BYTES = 4 << 20


def cold_read_speed(files: Files, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure bytes per second: write a file, drop it from the page cache, and read it again.

    Where the system cannot drop pages, the speed is that of the page cache.
    """
    path = files.path(f"probe-{uuid.uuid4().hex}{PARTIAL}")
    try:
        with open(path, "wb", opener=private_opener) as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = clock()
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        return PROBE_BYTES / max(clock() - started, 1e-9)
    finally:
        path.unlink(missing_ok=True)
