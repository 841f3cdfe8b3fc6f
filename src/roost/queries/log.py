"""The query log: every request, durable and in order.

An entry is a block of requests as an Arrow table, so one request and a million cost one entry
each. A position counts entries: position ``p`` means "the first ``p`` entries". The log does not
validate requests; see :mod:`roost.queries.admission`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from roost.storage.append_log import AppendLog

ENTRY_ROWS_MAX = 1 << 17
_KIND = b"roost.kind"


class Kind(IntEnum):
    """What an entry is: requests, requests that Spark has counted, or those counts."""

    REQUESTS = 0
    COUNTED = 1
    TALLY = 2


def kind_of(block: pa.Table) -> Kind:
    """Return the kind of an entry, by the mark that only a log sets."""
    mark = (block.schema.metadata or {}).get(_KIND)
    return Kind.REQUESTS if mark is None else Kind(int(mark))


def marked(block: pa.Table, kind: Kind = Kind.REQUESTS) -> pa.Table:
    """Mark an entry; an earlier mark is removed."""
    return block.replace_schema_metadata({_KIND: b"%d" % kind} if kind else None)


class QueryLog(Protocol):
    """A query log, in SQLite or Kafka.

    ``private`` says that only Roost writes to it, so that it can hold tallies.
    """

    private: bool

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Add requests at the end; returns the position after them.

        A log that stores tags adds a block whose tag it has seen before only once. With a tally,
        the requests have been counted by user already.
        """

    def close(self) -> None:
        """Close files and connections."""

    def end(self) -> int:
        """Position after the last entry."""

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the entries ``after + 1 .. upto`` in order.

        A message that is no table of requests comes as a table with the text column
        ``malformed``. :func:`kind_of` returns the kind of an entry.
        """


def encode_block(block: pa.Table) -> bytes:
    """Arrow stream of a block of requests, compressed."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, block.schema, options=options) as writer:
        writer.write_table(block)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_block(data: bytes) -> pa.Table:
    """Inverse of :func:`encode_block`."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


class SqliteQueryLog:
    """The embedded log: one SQLite file, safe for several writing processes.

    Examples
    --------
    >>> import tempfile
    >>> log = SqliteQueryLog(Path(tempfile.mkdtemp()) / "queries.db")
    >>> log.append(pa.table({"op": ["register"], "query_id": ["a"]}))
    1
    >>> [block.num_rows for block in log.read(0, log.end())]
    [1]
    >>> log.close()
    """

    private = True

    def __init__(self, path: Path) -> None:
        self.entries = AppendLog(path)

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Add requests at the end, unless the tag was used before; returns the end."""
        tables = [(block, Kind.REQUESTS)]
        if tally is not None:
            tables = [(block, Kind.COUNTED), (tally, Kind.TALLY)]
        entries = (
            (encode_block(marked(table).slice(start, ENTRY_ROWS_MAX)), int(kind))
            for table, kind in tables
            for start in range(0, table.num_rows, ENTRY_ROWS_MAX)
        )
        return self.entries.append(entries, tag)

    def end(self) -> int:
        """Return the position after the last entry."""
        return self.entries.end()

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the entries ``after + 1 .. upto`` in order."""
        for data, kind in self.entries.read(after, upto):
            yield marked(decode_block(data), Kind(kind))

    def close(self) -> None:
        """Close the file."""
        self.entries.close()
