"""Hosts of a cluster on one machine: each has a memory limit, and a copy of the storage.

A host is a memory cgroup (version 1), which root can create, and a mount namespace. Page cache is
charged to the cgroup that reads a page first, so hosts that shared files would share memory: the
namespace puts a copy in the place of a folder.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup/memory")
_ENTER = 'echo $$ > "$1/cgroup.procs" && mount --bind "$2" "$3" && shift 3 && exec "$@"'


def reason_against() -> str | None:
    """Return why hosts with a memory limit cannot be made here, None if they can."""
    if os.geteuid() != 0:
        return "memory cgroups and mount namespaces need root"
    if not (GROUPS / "memory.limit_in_bytes").is_file():
        return "the system has no memory cgroups of version 1"
    if shutil.which("unshare") is None:
        return "unshare, of util-linux, is not installed"
    return None


@dataclass(frozen=True)
class LimitedHost:
    """A host with a memory limit, in whose place of ``shared`` there is a copy of its own."""

    group: Path
    shared: Path
    copy: Path

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words that start a command on this host."""
        places = (str(self.group), str(self.copy), str(self.shared))
        return ("unshare", "--mount", "sh", "-c", _ENTER, "sh", *places)

    def statistics(self) -> dict[str, int]:
        """Return what the cgroup counts: ``rss``, ``cache``, ``pgmajfault`` and more."""
        lines = (self.group / "memory.stat").read_text().splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}

    def resident_bytes(self) -> int:
        """Return the resident bytes of files in the copy, of the process that maps most of them."""
        found = [0]
        for pid in (self.group / "cgroup.procs").read_text().split():
            with suppress(psutil.Error):
                maps = psutil.Process(int(pid)).memory_maps()
                found.append(sum(m.rss for m in maps if m.path.startswith(f"{self.shared}/")))
        return max(found)


@contextmanager
def limited_hosts(
    count: int, limit_bytes: int, shared: Path, folder: Path
) -> Iterator[list[LimitedHost]]:
    """Make hosts, and remove them with all that still runs on them."""
    name = f"roost-{uuid.uuid4().hex[:8]}"
    hosts = []
    try:
        for number in range(count):
            group = GROUPS / f"{name}-{number}"
            group.mkdir()
            hosts.append(LimitedHost(group, shared, folder / f"host-{number}"))
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            (group / "memory.swappiness").write_text("0")
            shutil.copytree(shared, hosts[-1].copy, copy_function=_copy_uncached)
        yield hosts
    finally:
        for host in hosts:
            _remove(host.group)
            shutil.rmtree(host.copy, ignore_errors=True)


def _copy_uncached(source: str, target: str) -> str:
    """Copy a file so that none of its pages is charged to the cgroup of this process."""
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return target


def _remove(group: Path) -> None:
    for _ in range(100):
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
