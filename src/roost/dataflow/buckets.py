"""Buckets of keys, and which machine owns each: the routing of a keyed subquery.

A row's bucket is a 64-bit hash of its key, the same in every process, modulo the number of buckets.
The *bucket map* assigns buckets to machines. It changes only between batches, so state moves by
changing the map: the new owner reads the bucket's slices of the state files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.order import whole_numbers
from roost.kernel.ids import hash_ids
from roost.model.columns import one_array
from roost.model.schemas import is_text

BUCKETS = 256
GRID = (16, 16)  # left by right buckets of a Product
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread 64-bit values evenly (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_rows(columns: Iterable[pa.Array | pa.ChunkedArray], rows: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each row; integers of any width hash alike."""
    hashes = np.zeros(rows, np.uint64)
    for given in columns:
        column = one_array(given)
        text = is_text(column.type) or pa.types.is_binary(column.type)
        own = hash_ids(column) if text else whole_numbers(column).view(np.uint64)
        hashes = _mixed((hashes + _GOLDEN) ^ _mixed(own + _GOLDEN))
    return hashes


def bucket_of(
    columns: Iterable[pa.Array | pa.ChunkedArray], rows: int, buckets: int
) -> NDArray[np.int32]:
    """Return the bucket of each row; without columns, all rows are in one."""
    return (hash_rows(columns, rows) % np.uint64(buckets)).astype(np.int32)


@dataclass(frozen=True)
class BucketMap:
    """Which machine owns each bucket."""

    epoch: int
    machines: int
    owners: tuple[int, ...]

    @classmethod
    def even(cls, machines: int, buckets: int = BUCKETS, epoch: int = 0) -> BucketMap:
        """Deal buckets to machines in turn."""
        return cls(epoch, machines, tuple(bucket % machines for bucket in range(buckets)))

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.owners)

    def owned(self, machine: int) -> NDArray[np.int64]:
        """Return the buckets of a machine, ascending."""
        return np.flatnonzero(np.asarray(self.owners) == machine)

    def check_invariants(self) -> None:
        """Check that every bucket has an owner."""
        assert self.machines > 0 and self.owners
        assert all(0 <= owner < self.machines for owner in self.owners)

    def to_json(self) -> Any:
        """Return the map as JSON."""
        return {"machines": self.machines, "owners": list(self.owners)}

    @classmethod
    def from_json(cls, epoch: int, data: Any) -> BucketMap:
        """Invert :meth:`to_json`."""
        return cls(epoch, int(data["machines"]), tuple(data["owners"]))
