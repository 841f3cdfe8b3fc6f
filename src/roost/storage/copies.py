"""Local copies of the parts of shared files that a host uses.

A shared file is mapped as a whole. The blocks that are requested are copied to a sparse file on a
disk of the host, and that file is mapped over the same addresses. So every address has the bytes of
the shared file at any time, and a part that was not requested, or for which there is no room, is
read from the shared file.

A copy is one file: the blocks, then a byte for each block that says whether it is there, which is
written after the block. The workers of a host share it. Only whole files are deleted, and what is
mapped of them stays until it is unmapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roost.storage.private import FILE

BLOCK = 1 << 18
BOOT = Path("/proc/sys/kernel/random/boot_id")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class Copies(NamedTuple):
    """Where a host has its copies, and how many bytes they may take."""

    folder: str
    budget: int

    def path(self, shared: os.stat_result) -> Path:
        """Return the copy of a file, which has another name if the file was written again."""
        identity = shared.st_dev, shared.st_ino, shared.st_size, shared.st_mtime_ns
        return _folder(self.folder) / hashlib.sha256(repr(identity).encode()).hexdigest()[:32]

    def used(self) -> dict[Path, os.stat_result]:
        """Return the copies, the least recently used first."""
        found = {}
        for path in _folder(self.folder).iterdir():
            with contextlib.suppress(OSError):  # another worker has just deleted it
                found[path] = path.stat()
        return dict(sorted(found.items(), key=lambda item: item[1].st_mtime_ns))

    def make_room(self, size: int, own: Path) -> bool:
        """Delete other copies until there is room for more bytes; returns whether there is."""
        used = self.used()
        room = self.budget - sum(512 * stat.st_blocks for stat in used.values())
        for path in (path for path in used if path != own):
            if room >= size:
                break
            path.unlink(missing_ok=True)
            room += 512 * used[path].st_blocks
        return room >= size


def _folder(name: str) -> Path:
    """Return the folder of the copies made since the host started; older ones may be torn."""
    folder = Path(name, f"roost-{_boot()}")
    if not folder.exists():
        for old in Path(name).glob("roost-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return "unknown"


class CopiedMap(mmap.mmap):
    """A mapped file whose blocks are copied when they are requested."""

    _shared: Path
    _copies: Copies
    _present: NDArray[np.bool_]  # blocks that this process has mapped from the copy

    @classmethod
    def open(cls, path: Path, copies: Copies) -> CopiedMap:
        """Map a file."""
        with path.open("rb") as file:
            found = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        found._shared, found._copies = path, copies
        found._present = np.zeros(-(-len(found) // BLOCK), np.bool_)
        return found

    def request(self, begin: int, end: int) -> None:
        """Copy the blocks of a range of addresses, as far as there is room."""
        start = np.frombuffer(self, np.uint8).ctypes.data
        end = min(end, start + len(self))
        first, last = (begin - start) // BLOCK, -(-(end - start) // BLOCK)
        if self._present[first:last].all():
            return
        with contextlib.suppress(OSError):  # the disk is full, or something deleted the folder
            self._copy(start, first, last)

    def _copy(self, start: int, first: int, last: int) -> None:
        shared = os.open(self._shared, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(shared, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is copied
            path = self._copies.path(os.fstat(shared))
            copy = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
            try:
                marks = self._present.size * BLOCK
                if os.fstat(copy).st_size == 0:
                    os.ftruncate(copy, marks + self._present.size)
                os.utime(copy)
                there = np.frombuffer(os.pread(copy, last - first, marks + first), np.bool_).copy()
                size = int(np.count_nonzero(~there)) * BLOCK
                if size and self._copies.make_room(size, path):
                    for block in first + np.flatnonzero(~there):
                        place = int(block) * BLOCK
                        os.pwrite(copy, os.pread(shared, BLOCK, place), place)
                        os.pwrite(copy, b"\x01", marks + int(block))
                        os.posix_fadvise(shared, place, BLOCK, os.POSIX_FADV_DONTNEED)
                    there[:] = True
                edges = np.flatnonzero(np.diff(there, prepend=False, append=False)).tolist()
                for low, high in zip(edges[::2], edges[1::2], strict=True):
                    self._overlay(start, copy, first + low, first + high)
            finally:
                os.close(copy)
        finally:
            os.close(shared)

    def _overlay(self, start: int, copy: int, first: int, last: int) -> None:
        """Map blocks of the copy in the place of those of the shared file."""
        place = first * BLOCK
        size = min(last * BLOCK, len(self)) - place
        address = ctypes.c_void_p(start + place)
        flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        mapped = _libc.mmap(
            address, ctypes.c_size_t(size), mmap.PROT_READ, flags, copy, ctypes.c_long(place)
        )
        if mapped != start + place:
            raise OSError(ctypes.get_errno(), "a copy cannot be mapped")
        self._present[first:last] = True
