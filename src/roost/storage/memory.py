"""How much of its files a host can hold in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def file_memory(cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Return how many bytes of files fit into memory beside the processes of the host.

    The host is the memory cgroup of this process, if that is smaller than the machine, as in a
    container. None where the system has no cgroups, so that limits are unknown.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has them
        return None
    rooms = [int(psutil.virtual_memory().available)]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            rooms += _rooms(cgroups, path, "memory.max", "anon")
        elif "memory" in controllers.split(","):  # version 1
            rooms += _rooms(cgroups / "memory", path, "memory.limit_in_bytes", "total_rss")
    return max(min(rooms), 0)


def _rooms(root: Path, path: str, limit: str, private: str) -> Iterator[int]:
    """Yield limit minus private memory of a group and of those above it.

    In a container the group's own folder may be missing: then the root is that of the container.
    """
    inner = PurePosixPath(path.lstrip("/"))
    for folder in (inner, *inner.parents):
        # A group without a limit says "max" or has no file for it.
        with suppress(OSError, ValueError):
            total = int((root / folder / limit).read_text())
            words = (root / folder / "memory.stat").read_text().split()
            yield total - int(words[words.index(private) + 1])
