"""Buckets of keys, and which machine owns each: the routing of a keyed subquery.

A row's bucket is a 64-bit hash of its key, the same in every process, modulo the number of buckets.
The *bucket map* assigns buckets to machines. It changes only between batches. While a bucket moves
by window recreation (see :mod:`roost.dataflow.moves`) it has two owners: a tuple, pane, window or
pair belongs to the old one if its event time, or that of its beginning, is before the ``switch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.dataflow.moves import BucketMove, Recreation
from roost.dataflow.order import whole_numbers
from roost.kernel.ids import hash_ids
from roost.model.columns import one_array
from roost.model.records import TIME_MAX, TIME_MIN
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
    """Which machine owns each bucket, or is to own it alone when its move is complete.

    ``moves`` are those that begin with this map, and those by window recreation that are not
    complete. ``configured`` is the number of machines in the settings: a policy may have changed
    that of the map.
    """

    epoch: int
    machines: int
    owners: tuple[int, ...]
    moves: tuple[BucketMove, ...] = ()
    configured: int = 0

    @classmethod
    def even(cls, machines: int, buckets: int = BUCKETS, epoch: int = 0) -> BucketMap:
        """Deal buckets to machines in turn."""
        owners = tuple(bucket % machines for bucket in range(buckets))
        return cls(epoch, machines, owners, configured=machines)

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.owners)

    @cached_property
    def under_way(self) -> tuple[BucketMove, ...]:
        """The moves whose buckets have two owners."""
        return tuple(move for move in self.moves if move.protocol is Recreation.WINDOW)

    def owned(self, machine: int) -> NDArray[np.int64]:
        """Return the buckets of a machine, ascending, with those that it still has a share of."""
        since, until = self.received(machine)
        return np.flatnonzero((since < TIME_MAX) | (until > TIME_MIN))

    @cached_property
    def owner_array(self) -> NDArray[np.int64]:
        """The owners as an array: converting many takes longer than most uses of it."""
        return np.asarray(self.owners, np.int64)

    # ------------------------------------------------------------------ two owners

    @cached_property
    def shares(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Event times at which owners change, and the owner of each bucket between them."""
        switches = sorted({move.times[0] for move in self.under_way})
        owners = np.tile(self.owner_array, (len(switches) + 1, 1))
        for move in self.under_way:
            owners[: switches.index(move.times[0]) + 1, move.bucket] = move.old
        return np.asarray(switches, np.int64), owners

    def owners_of(
        self, buckets: NDArray[np.integer[Any]], times: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the machine that a tuple, pane, window or pair belongs to.

        The time of a window is its start, that of a pair the earlier of its tuples.
        """
        switches, owners = self.shares
        found: NDArray[np.int64] = owners[np.searchsorted(switches, times, "right"), buckets]
        return found

    @cached_property
    def _moving(self) -> NDArray[np.int64]:
        """Switch, end and old owner of each bucket that moves; in others no time is between."""
        columns = np.full((3, self.buckets), TIME_MIN)
        for move in self.under_way:
            columns[:, move.bucket] = (*move.times, move.old)
        return columns

    def received(self, machine: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which tuples of each bucket a machine gets: from a time on, and before another."""
        switch, end, old = self._moving
        since = np.where(self.owner_array == machine, switch, TIME_MAX)
        return since, np.where(old == machine, end, TIME_MIN)

    def also_received(
        self, buckets: NDArray[np.int32], times: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tuples that an old owner gets beside the new one: rows and machines."""
        switch, end, old = self._moving
        rows = np.flatnonzero((times >= switch[buckets]) & (times < end[buckets]))
        return rows, old[buckets[rows]]

    # ------------------------------------------------------------------ the next map

    def moved(self, moves: Sequence[BucketMove], machines: int | None = None) -> BucketMap:
        """Return the next map, on ``machines`` machines.

        Raises
        ------
        ValueError
            If there is no such bucket or machine, a bucket is still moving, or one would remain on
            a machine that the next map does not have.
        """
        count = self.machines if machines is None else machines
        if count < 1:
            raise ValueError(f"a subquery needs a machine, not {count}")
        moving = {move.bucket: move for move in self.under_way}
        owners = dict(enumerate(self.owners))
        for move in moves:
            if move.bucket not in owners:
                raise ValueError(f"there is no bucket {move.bucket} of {self.buckets}")
            if move.bucket in moving:
                other = moving[move.bucket]
                where = f"from machine {other.old} to {other.new}, until event time {other.end}"
                raise ValueError(f"bucket {move.bucket} is still moving {where}")
            if not 0 <= move.new < count:
                raise ValueError(f"there is no machine {move.new} of {count}")
            owners[move.bucket] = move.new
        used = [*owners.items(), *((move.bucket, move.old) for move in self.under_way)]
        for bucket, owner in used:
            if owner >= count:
                raise ValueError(f"bucket {bucket} is on machine {owner}, but {count} remain")
        found = tuple(owners[bucket] for bucket in range(self.buckets))
        under_way = (*self.under_way, *moves)
        return BucketMap(self.epoch + 1, count, found, under_way, self.configured)

    def completed(self, watermark: int) -> BucketMap | None:
        """Return the map without old owners that the watermark has passed; None if none."""
        rest = tuple(move for move in self.under_way if move.times[1] > watermark)
        if len(rest) == len(self.under_way):
            return None
        return BucketMap(self.epoch + 1, self.machines, self.owners, rest, self.configured)

    def resettled(self, even: BucketMap, reason: str) -> BucketMap:
        """Return the next map, with the machines and owners of another one.

        A tuple is stored once, by the owner that it belongs to, so the state of both owners of a
        moving bucket is that of the bucket: the next owner reads it, and the move is complete.
        """
        moving = {move.bucket for move in self.under_way}
        moves = tuple(
            BucketMove(bucket, old, new, Recreation.STATE, reason)
            for bucket, (old, new) in enumerate(zip(self.owners, even.owners, strict=True))
            if old != new or bucket in moving
        )
        return replace(even, epoch=self.epoch + 1, moves=moves)

    def check_invariants(self) -> None:
        """Check that every bucket has an owner, and that a moving one has two."""
        assert self.machines > 0 and self.owners
        assert all(0 <= owner < self.machines for owner in self.owners)
        moving = [move.bucket for move in self.under_way]
        assert len(set(moving)) == len(moving)
        for move in self.under_way:
            assert self.owners[move.bucket] == move.new and 0 <= move.old < self.machines
            assert move.start is not None and move.start < move.times[0] <= move.times[1]

    def to_json(self) -> Any:
        """Return the map as JSON."""
        return {
            "machines": self.machines,
            "owners": list(self.owners),
            "moves": [move.to_json() for move in self.moves],
            "configured": self.configured,
        }

    @classmethod
    def from_json(cls, epoch: int, data: Any) -> BucketMap:
        """Invert :meth:`to_json`; maps of earlier versions have no moves."""
        machines = int(data["machines"])
        moves = tuple(map(BucketMove.from_json, data.get("moves", ())))
        return cls(
            epoch, machines, tuple(data["owners"]), moves, int(data.get("configured", machines))
        )
