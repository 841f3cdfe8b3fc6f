"""Numbers of a machine in a mapped file of its executor, for its next task.

Any worker of the executor finds them without a copy on a disk being written. A file has two slots.
A batch writes to one of them, and its successor reads it by a key and writes to the other. So a
task that runs again finds what its first attempt found. What a failed or belated task leaves does
not have the key that was reported, or the checksum is wrong.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from roost.storage.cache import WorkerCache
from roost.storage.private import FILE

HEADER = 4  # two words of the key, the number of values, their checksum
Words = NDArray[np.uint64]


class Key(NamedTuple):
    """Names the numbers of one attempt of one task."""

    machine: int
    batch: int
    capacity: int  # values for which the file has room
    attempt: str  # 32 hexadecimal digits

    @property
    def words(self) -> tuple[int, int]:
        """The attempt as two numbers."""
        return int(self.attempt[:16], 16), int(self.attempt[16:], 16)


def capacity_for(values: int) -> int:
    """Return the room of a file: a power of two, because partitions are split and merged."""
    return 1 << max(values - 1, 1).bit_length()


class Resident(NamedTuple):
    """The files in a folder."""

    folder: str
    cache: WorkerCache

    def write(self, key: Key, values: NDArray[np.float64]) -> None:
        """Write the numbers of a batch, over those of two batches before."""
        slot = self._slots(key)[key.batch % 2]
        words = values.view(np.uint64)
        slot[:HEADER] = 0  # of no key while the values change
        slot[HEADER : HEADER + words.size] = words
        slot[2:HEADER] = words.size, np.bitwise_xor.reduce(words)
        slot[:2] = key.words

    def read(self, key: Key) -> NDArray[np.float64] | None:
        """Return a copy of numbers, None if they are not there."""
        try:
            slot = self._slots(key)[key.batch % 2]
        except OSError:
            return None
        first, second, size, checksum = slot[:HEADER].tolist()
        if (first, second) != key.words or size > key.capacity:
            return None
        words = slot[HEADER : HEADER + size].copy()
        if int(np.bitwise_xor.reduce(words)) != checksum:
            return None
        found: NDArray[np.float64] = words.view(np.float64)
        return found

    def _slots(self, key: Key) -> Words:
        def build() -> Words:
            path = f"{self.folder}/resident-{key.machine:05d}-{key.capacity}"
            words = HEADER + key.capacity
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE)
            try:
                # A full disk fails here, not later at a page of the mapping.
                os.posix_fallocate(file, 0, 2 * 8 * words)
                mapped = mmap.mmap(file, 2 * 8 * words)
            finally:
                os.close(file)
            return np.ndarray((2, words), np.uint64, mapped)

        return self.cache.get("resident", (self.folder, key.machine, key.capacity), build)
