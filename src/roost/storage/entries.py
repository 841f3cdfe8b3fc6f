"""A log of entries: bytes with the number of their kind, in one SQLite file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from roost.storage.database import Database


class EntryLog:
    """Entries in the order in which processes append them; position ``p`` follows ``p`` entries."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path)
        with self._database.writing() as db:
            db.execute(
                "create table if not exists log (position integer primary key autoincrement,"
                " entry blob not null, kind integer not null default 0)"
            )
            if "kind" not in {row[1] for row in db.execute("pragma table_info(log)")}:
                # Written before entries had kinds.
                db.execute("alter table log add column kind integer not null default 0")
            db.execute("create table if not exists tags (tag text primary key)")

    def append(self, entries: Iterable[tuple[bytes, int]], tag: str | None = None) -> None:
        """Append entries with their kinds in one transaction, unless the tag was used before."""
        with self._database.writing() as db:
            insert = "insert or ignore into tags values (?)"
            if tag is None or db.execute(insert, (tag,)).rowcount:
                db.executemany("insert into log (entry, kind) values (?, ?)", entries)

    def end(self) -> int:
        """Return the position after the last entry."""
        return int(self._database.rows("select max(position) from log")[0][0] or 0)

    def read(self, after: int, upto: int) -> Iterator[tuple[bytes, int]]:
        """Yield the entries ``after + 1 .. upto`` in order, with their kinds."""
        statement = (
            "select position, entry, kind from log where position > ? and position <= ?"
            " order by position limit 1"
        )
        while rows := self._database.rows(statement, after, upto):
            after, entry, kind = rows[0]
            yield entry, kind

    def close(self) -> None:
        """Close the file."""
        self._database.close()
