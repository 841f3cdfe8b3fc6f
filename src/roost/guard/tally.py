"""Tally: counts of requests by user.

A compiled loop counts blocks of the query log; Spark counts the requests of a stream. Tallies are
small, so the state directory stores those since the guard's state was last written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import StateError
from roost.guard.loops import KINDS, Keys, tally_rows
from roost.model.columns import one_array, stream_bytes

COLUMNS = ("registers", "terminates", "refused")


@dataclass(frozen=True, eq=False)
class Tally:
    """Registrations, terminations and refusals ``(users, 3)`` of distinct users.

    Users are in order of first occurrence.
    """

    names: pa.Array
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, names: pa.Array, keys: Keys, kinds: NDArray[np.int8]) -> tuple[Tally, Keys]:
        """Count requests by user and kind (see ``loops.py``); return the users' keys, too."""
        firsts, counts = tally_rows(keys, kinds)
        found = names.take(pa.array(firsts))
        if pa.types.is_dictionary(found.type):
            found = found.dictionary_decode()
        return cls(found, counts), keys[firsts]

    @classmethod
    def summed(cls, tallies: Sequence[Tally]) -> Tally:
        """Sum tallies, with users in order of first occurrence."""
        if not tallies:
            return cls(pa.array([], pa.string()), np.empty((0, KINDS), np.int64))
        if len(tallies) == 1:
            return tallies[0]
        rows = pa.concat_tables([tally.table() for tally in tallies])
        groups = rows.group_by("user_id", use_threads=False)
        sums = groups.aggregate([(name, "sum") for name in COLUMNS])
        return cls.from_table(sums.rename_columns(["user_id", *COLUMNS]))

    def negated(self) -> Tally:
        """Return the tally that cancels this one."""
        return Tally(self.names, -self.counts)

    def __len__(self) -> int:
        return len(self.names)

    def table(self) -> pa.Table:
        """Return the columns ``user_id, registers, terminates, refused``."""
        columns = {name: self.counts[:, k] for k, name in enumerate(COLUMNS)}
        return pa.table({"user_id": self.names.cast(pa.string()), **columns})

    @classmethod
    def from_table(cls, table: pa.Table) -> Tally:
        """Invert :meth:`table`."""
        counts = [table[name].cast(pa.int64()).to_numpy() for name in COLUMNS]
        return cls(one_array(table["user_id"].cast(pa.string())), np.column_stack(counts))

    def to_bytes(self) -> bytes:
        """Return a compressed Arrow stream."""
        return stream_bytes(self.table())

    @classmethod
    def from_bytes(cls, data: bytes) -> Tally:
        """Invert :meth:`to_bytes`; raises :class:`StateError` for other data."""
        try:
            return cls.from_table(pa.ipc.open_stream(data).read_all())
        except (pa.ArrowInvalid, KeyError) as error:
            raise StateError("the guard's request counts cannot be read") from error
