"""Tally: counts of requests by user.

The gate counts blocks of the query log with a compiled loop; for requests from a stream, Spark
counts. Both give a row per user: registrations, terminations and refusals. Tallies are small, so
the state directory stores them for the requests since the guard's state was last written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.errors import StateError
from roost.guard.loops import KINDS, tally_rows
from roost.guard.users import Keys

COLUMNS = ("registers", "terminates", "refused")


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts by user.

    Parameters
    ----------
    names
        Distinct users, in order of first occurrence.
    counts
        Registrations, terminations and refusals of each, ``(users, 3)``.
    """

    names: pa.Array
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, names: pa.Array, keys: Keys, kinds: NDArray[np.int8]) -> tuple[Tally, Keys]:
        """Count requests by user and kind (see ``loops.py``); return the users' keys, too."""
        index = np.zeros(1 << (2 * len(keys)).bit_length(), np.int32)
        firsts = np.empty(len(keys), np.int64)
        counts = np.zeros((len(keys), KINDS), np.int64)
        users = tally_rows(keys, kinds, index, firsts, counts)
        found = names.take(pa.array(firsts[:users]))
        if pa.types.is_dictionary(found.type):
            found = found.dictionary_decode()
        return cls(found, counts[:users]), keys[firsts[:users]]

    @classmethod
    def none(cls) -> Tally:
        """Return an empty tally."""
        return cls(pa.array([], pa.string()), np.empty((0, KINDS), np.int64))

    @classmethod
    def summed(cls, tallies: Sequence[Tally]) -> Tally:
        """Sum tallies, with users in order of first occurrence."""
        if len(tallies) <= 1:
            return tallies[0] if tallies else cls.none()
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
        names = table["user_id"].cast(pa.string()).combine_chunks()
        if isinstance(names, pa.ChunkedArray):  # a table without rows
            names = pa.array([], pa.string())
        return cls(names, np.column_stack(counts).reshape(-1, KINDS))

    def to_bytes(self) -> bytes:
        """Return a compressed Arrow stream."""
        table = self.table()
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Tally:
        """Invert :meth:`to_bytes`.

        Raises
        ------
        StateError
            If it was not written by :meth:`to_bytes`.
        """
        try:
            return cls.from_table(pa.ipc.open_stream(data).read_all())
        except (pa.ArrowInvalid, KeyError) as error:
            raise StateError("the guard's request counts cannot be read") from error
