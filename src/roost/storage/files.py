"""Files of named arrays, which any process can map and only their owner may read.

Layout: an 8-byte magic, the length of a JSON directory, the directory (name, type, shape and offset
of each array), then the arrays, each at a multiple of 64 bytes. A file is written under another
name, flushed and renamed, so a file with its final name is complete. It never changes.

Names, never paths, go into tasks, reports and facts. Each attempt of a task uses a name of its own,
and only names that a report or a fact lists count.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roost.errors import StateError
from roost.storage.copies import CopiedMap, Copies
from roost.storage.private import private_opener

MAGIC = b"ROOSTSG1"
ALIGN = 64
PARTIAL = ".partial"
WRITE_BUFFER = 1 << 20
READ_AHEAD = 1 << 17
"""Bytes that one request may name: of more, the system reads only the first part."""
_madvise = ctypes.CDLL(None).madvise


def _aligned(place: int) -> int:
    return (place + ALIGN - 1) // ALIGN * ALIGN


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], *, durable: bool = True) -> int:
    """Write arrays to a new file; returns its size in bytes.

    A file that can be computed again need not be ``durable``: it survives the failure of a
    process, but perhaps not that of the host.
    """
    directory: list[dict[str, Any]] = []
    place = 0
    for name, array in arrays.items():
        place = _aligned(place)
        dtype, shape = array.dtype.str, array.shape
        directory.append({"name": name, "dtype": dtype, "shape": shape, "place": place})
        place += array.nbytes
    head = json.dumps(directory).encode()
    start = _aligned(len(MAGIC) + 8 + len(head))
    partial = f"{path}.{os.getpid()}{PARTIAL}"
    with open(partial, "wb", WRITE_BUFFER, opener=private_opener) as file:
        at = file.write(MAGIC + len(head).to_bytes(8, "little") + head)
        for entry, array in zip(directory, arrays.values(), strict=True):
            at += file.write(bytes(start + entry["place"] - at))  # a seek would flush the buffer
            at += file.write(np.ascontiguousarray(array).data)
        file.write(bytes(start + place - at))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.rename(partial, path)
    return start + place


def map_arrays(
    path: Path, *, sparse: bool = False, copies: Copies | None = None
) -> dict[str, NDArray[Any]]:
    """Map the arrays of a file, read-only; pages are read when first used.

    The system reads megabytes ahead, unless a ``sparse`` part of the file is used: then it reads
    nothing but what is used, or requested with :func:`read_ahead`. With ``copies`` a host has local
    copies of what is requested.
    """
    mapped: mmap.mmap
    try:
        if sparse and copies is not None:
            mapped = CopiedMap.open(path, copies)
        else:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StateError(f"segment {path} cannot be mapped: {error}") from error
    if sparse:
        mapped.madvise(mmap.MADV_RANDOM)
    if mapped[: len(MAGIC)] != MAGIC:
        raise StateError(f"{path} is not a segment file")
    length = int.from_bytes(mapped[len(MAGIC) : len(MAGIC) + 8], "little")
    directory = json.loads(mapped[len(MAGIC) + 8 : len(MAGIC) + 8 + length])
    start = _aligned(len(MAGIC) + 8 + length)
    return {
        entry["name"]: np.ndarray(
            entry["shape"], np.dtype(entry["dtype"]), mapped, start + entry["place"]
        )
        for entry in directory
    }


def _mapping(values: NDArray[Any]) -> Any:
    """Return what the memory of an array belongs to."""
    base: Any = values
    while isinstance(base, np.ndarray):
        base = base.base
    return base


def copied(values: NDArray[Any]) -> CopiedMap | None:
    """Return the mapping of an array, if what is requested of it is copied."""
    mapping = _mapping(values)
    return mapping if isinstance(mapping, CopiedMap) else None


def release(values: NDArray[Any]) -> None:
    """Give the pages of the file that an array is mapped from back to the system.

    What is used again is mapped again, without reading it as long as it stays in memory.
    """
    mapping = _mapping(values)
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)


def read_ahead(values: NDArray[Any], begins: NDArray[Any], ends: NDArray[Any]) -> None:
    """Have the system read ranges of a mapped array, without waiting for it, or copy them."""
    places = values.ctypes.data + values.strides[0] * np.stack([begins, ends])
    mapping = copied(values)
    if mapping is not None:
        for start, stop in places.T.tolist():
            mapping.request(start, stop)
        return
    starts = places[0] // mmap.PAGESIZE * mmap.PAGESIZE  # the system accepts only whole pages
    for start, stop in zip(starts.tolist(), places[1].tolist(), strict=True):
        for place in range(start, stop, READ_AHEAD):
            size = ctypes.c_size_t(min(READ_AHEAD, stop - place))
            _madvise(ctypes.c_void_p(place), size, mmap.MADV_WILLNEED)


@dataclass(frozen=True)
class Files:
    """The files of one folder; small, so that tasks can carry it."""

    folder: str
    copies: Copies | None = None  # of the parts that a host uses

    def path(self, name: str) -> Path:
        """Return where a file is on this host."""
        return Path(self.folder, name)

    def name(self, prefix: str, label: str, suffix: str) -> str:
        """Return a name that no other attempt uses."""
        return f"{prefix}{label}-{uuid.uuid4().hex}{suffix}"

    def write(self, name: str, arrays: Mapping[str, NDArray[Any]], *, durable: bool = True) -> int:
        """Write arrays to a new file; see :func:`write_arrays`."""
        return write_arrays(self.path(name), arrays, durable=durable)

    def map(self, name: str, *, sparse: bool = False) -> dict[str, NDArray[Any]]:
        """Map the arrays of a file, read-only; see :func:`map_arrays`."""
        return map_arrays(self.path(name), sparse=sparse, copies=self.copies)

    def names(self, prefix: str = "", *, partial: bool = False) -> list[str]:
        """Return the names of files that begin with a prefix, sorted; also of ``partial`` ones.

        A process that is killed leaves a partial file.
        """
        return sorted(n for n in self._found(prefix) if partial or not n.endswith(PARTIAL))

    def delete(self, prefix: str, keep: Collection[str] = ()) -> None:
        """Delete every file whose name begins with a prefix, except those to keep."""
        for name in self._found(prefix):
            if name not in keep:
                self.path(name).unlink(missing_ok=True)

    def _found(self, prefix: str) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith(prefix)]
