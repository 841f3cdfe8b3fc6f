"""State of a keyed operator: immutable files, whose rows are sorted by bucket.

A machine writes one file per subquery and batch. Any machine can read the buckets that it owns from
the files of all machines, so moving a bucket copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.blocks import BUCKET
from roost.model.arrays import as_arrow, as_numpy, sort_small
from roost.storage.cache import WorkerCache
from roost.storage.files import Files
from roost.window.segment import pack_columns, unpack_columns


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of state, as the store lists it."""

    name: str
    rows: int
    nbytes: int
    needed_until: int  # watermark from which no row of it is needed
    buckets: str = ""  # those with rows, as a hexadecimal bit mask; empty if not known

    def to_json(self) -> list[str | int]:
        """Return the file as JSON."""
        return [self.name, self.rows, self.nbytes, self.needed_until, self.buckets]

    def has(self, owned: int) -> bool:
        """Return whether the file may have rows of some buckets, given as a bit mask."""
        return not self.buckets or bool(int(self.buckets, 16) & owned)


def bucket_mask(buckets: NDArray[np.int64] | NDArray[np.int32]) -> int:
    """Return buckets as a bit mask."""
    bits = np.zeros(int(buckets.max(initial=-1)) + 1, np.uint8)
    bits[buckets] = 1
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def write_state(
    files: Files, name: str, tables: Mapping[str, pa.Table], buckets: int, needed_until: int
) -> StateFile | None:
    """Write tables with a column ``BUCKET``; returns None if they have no rows."""
    rows = sum(table.num_rows for table in tables.values())
    if not rows:
        return None
    mask = 0
    arrays: dict[str, NDArray[np.int64] | NDArray[np.uint8]] = {}
    for label, table in tables.items():
        bucket = as_numpy(table[BUCKET].combine_chunks())
        mask |= bucket_mask(bucket)
        order = sort_small(bucket, buckets)
        starts = np.searchsorted(bucket[order], np.arange(buckets + 1))
        table = table.take(as_arrow(order)).combine_chunks()
        columns = {
            field.name: table[field.name].chunk(0) if table.num_rows else pa.nulls(0, field.type)
            for field in table.schema
        }
        metadata = {
            key.decode(): text.decode() for key, text in (table.schema.metadata or {}).items()
        }
        arrays[f"{label}.starts"] = starts.astype(np.int64)
        arrays[f"{label}.rows"] = pack_columns(columns, metadata)
    nbytes = files.write(name, arrays)
    return StateFile(name, rows, nbytes, needed_until, f"{mask:x}")


def read_state(
    files: Files, name: str, owned: Mapping[str, NDArray[np.int64]], cache: WorkerCache
) -> dict[str, pa.Table]:
    """Read the rows of some buckets, given in ascending order for each table.

    Returns no tables if the file has no row of these buckets: most files are of other machines.
    """
    arrays = cache.get("flow", (files.folder, name), lambda: files.map(name))
    labels = [key.removesuffix(".rows") for key in arrays if key.endswith(".rows")]
    ranges = {label: _ranges(arrays[f"{label}.starts"], owned[label]) for label in labels}
    if not any(ranges.values()):
        return {}
    found = {}
    for label in labels:
        table = pa.Table.from_batches([unpack_columns(arrays[f"{label}.rows"])])
        pieces = [table.slice(start, stop - start) for start, stop in ranges[label]]
        found[label] = pa.concat_tables(pieces) if pieces else table.slice(0, 0)
    return found


def _ranges(starts: NDArray[np.int64], owned: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the rows of some buckets as few ranges: those of a machine's own file are one."""
    low, high = starts[owned], starts[owned + 1]
    low, high = low[low < high], high[low < high]
    first = np.ones(low.size, bool)
    first[1:] = low[1:] != high[:-1]
    last = np.roll(first, -1)
    return list(zip(low[first].tolist(), high[last].tolist(), strict=True))
