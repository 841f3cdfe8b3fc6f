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

from roost.errors import ConfigError
from roost.model.columns import stream_bytes
from roost.storage.entries import EntryLog
from roost.storage.private import state_folder

ENTRY_ROWS_MAX = 1 << 17
_KIND = b"roost.kind"


class EntryKind(IntEnum):
    """The kind of an entry: requests, requests that Spark has counted, or these counts."""

    REQUESTS = 0
    COUNTED = 1
    TALLY = 2


def kind_of(block: pa.Table) -> EntryKind:
    """Return the kind of an entry, by the mark that only a log sets."""
    mark = (block.schema.metadata or {}).get(_KIND)
    return EntryKind.REQUESTS if mark is None else EntryKind(int(mark))


def marked(block: pa.Table, kind: EntryKind = EntryKind.REQUESTS) -> pa.Table:
    """Mark an entry; an earlier mark is removed."""
    return block.replace_schema_metadata({_KIND: b"%d" % kind} if kind else None)


class QueryLog(Protocol):
    """A query log, in SQLite or Kafka.

    Only Roost writes to a ``private`` log, so it can store tallies.
    """

    private: bool

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Append requests; returns the position after them.

        A log that stores tags appends a block of the same tag once. With a tally, the requests are
        already counted by user.
        """

    def close(self) -> None:
        """Close files and connections."""

    def end(self) -> int:
        """Return the position after the last entry."""

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the entries ``after + 1 .. upto`` in order.

        A message that is not a request is a table with the text column ``malformed``.
        """


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
        self.entries = EntryLog(path)

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Append requests, unless the tag was used before; returns the end."""
        tables = [(block, EntryKind.REQUESTS)]
        if tally is not None:
            tables = [(block, EntryKind.COUNTED), (tally, EntryKind.TALLY)]
        entries = (
            (stream_bytes(marked(table).slice(start, ENTRY_ROWS_MAX)), int(kind))
            for table, kind in tables
            for start in range(0, table.num_rows, ENTRY_ROWS_MAX)
        )
        self.entries.append(entries, tag)
        return self.end()

    def end(self) -> int:
        """Return the position after the last entry."""
        return self.entries.end()

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the entries ``after + 1 .. upto`` in order."""
        for entry, kind in self.entries.read(after, upto):
            yield marked(pa.ipc.open_stream(entry).read_all(), EntryKind(kind))

    def close(self) -> None:
        """Close the file."""
        self.entries.close()


def kafka_address(text: str, key: str) -> tuple[str, str]:
    """Return brokers and topic of ``kafka://HOST:PORT[,HOST:PORT]/TOPIC``."""
    brokers, _, topic = text.removeprefix("kafka://").partition("/")
    ports = (broker.rpartition(":")[2] for broker in brokers.split(","))
    if not text.startswith("kafka://") or not topic or not all(map(str.isdecimal, ports)):
        raise ConfigError(key, text, "kafka://HOST:PORT[,HOST:PORT]/TOPIC")
    return brokers, topic


def open_log(address: str | None, folder: Path) -> QueryLog:
    """Open a Kafka topic or, without an address, the SQLite log of a state directory."""
    if address is None:
        return SqliteQueryLog(state_folder(folder) / "queries.db")
    from roost.queries.kafka_log import KafkaQueryLog  # needs an optional package

    return KafkaQueryLog(*kafka_address(address, "queries.log"))
