"""The query log: every request ever made, durable and in order.

An entry is a block of requests as an Arrow table, so one request and a million cost one entry
each. A position counts entries: position ``p`` means "the first ``p`` entries". The log does not
judge; see :mod:`roost.state.admission`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from roost.state.private import connect

ENTRY_ROWS_MAX = 1 << 17
_KIND = b"roost.kind"


class Kind(IntEnum):
    """What an entry is: requests, requests that Spark has counted, or those counts."""

    REQUESTS = 0
    COUNTED = 1
    TALLY = 2


def kind_of(block: pa.Table) -> Kind:
    """Tell what an entry is, by the mark that only a log sets."""
    mark = (block.schema.metadata or {}).get(_KIND)
    return Kind.REQUESTS if mark is None else Kind(int(mark))


def marked(block: pa.Table, kind: Kind = Kind.REQUESTS) -> pa.Table:
    """Mark an entry; whatever mark it came with is taken off."""
    return block.replace_schema_metadata({_KIND: b"%d" % kind} if kind else None)


class QueryLog(Protocol):
    """What the engine needs of a log, wherever it is kept.

    ``private`` says that nobody but Roost writes to it, so that it can hold tallies.
    """

    private: bool

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Add requests at the end; returns the position after them.

        A log that can keep tags adds a block with a tag that it has seen before only once. With a
        tally, the requests have been counted by user already.
        """

    def close(self) -> None:
        """Release what the log holds open."""

    def end(self) -> int:
        """Position after the last entry."""

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the entries ``after + 1 .. upto`` in order.

        A message that is no table of requests comes as a table with the text column
        ``malformed``. :func:`kind_of` tells what an entry is.
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
    """

    private = True

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = connect(path)
        self._db.execute("pragma synchronous = full")
        self._db.execute("begin immediate")  # others may be about to do the same
        with self._db:
            self._db.execute(
                "create table if not exists log (position integer primary key autoincrement,"
                " entry blob not null, kind integer not null default 0)"
            )
            if "kind" not in {row[1] for row in self._db.execute("pragma table_info(log)")}:
                # Made before entries were of several kinds.
                self._db.execute("alter table log add column kind integer not null default 0")
            self._db.execute("create table if not exists tags (tag text primary key)")

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Add requests at the end, unless the tag was used before; returns the end."""
        entries = [(block, Kind.REQUESTS)]
        if tally is not None:
            entries = [(block, Kind.COUNTED), (tally, Kind.TALLY)]
        with self._lock, self._db:
            if tag is not None:
                insert = "insert or ignore into tags values (?)"
                if self._db.execute(insert, (tag,)).rowcount == 0:
                    return self.end()
            for table, kind in entries:
                for start in range(0, table.num_rows, ENTRY_ROWS_MAX):
                    data = encode_block(marked(table).slice(start, ENTRY_ROWS_MAX))
                    statement = "insert into log (entry, kind) values (?, ?)"
                    self._db.execute(statement, (data, int(kind)))
        return self.end()

    def end(self) -> int:
        """Position after the last entry."""
        # On one connection, an entry is seen before it is committed; a batch must not count on it.
        with self._lock:
            row = self._db.execute("select max(position) from log").fetchone()
        return int(row[0] or 0)

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the entries ``after + 1 .. upto`` in order."""
        rows = self._db.execute(
            "select entry, kind from log where position > ? and position <= ? order by position",
            (after, upto),
        )
        for data, kind in rows:
            yield marked(decode_block(data), Kind(kind))

    def close(self) -> None:
        """Release the file."""
        self._db.close()
