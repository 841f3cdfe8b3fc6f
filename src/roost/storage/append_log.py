"""An append-only log of binary entries in one SQLite file, safe for several writing processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from roost.storage.database import Database


class AppendLog:
    """Entries with an integer kind each; position ``p`` means "the first ``p`` entries"."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        with self.database.writing() as db:
            db.execute(
                "create table if not exists log (position integer primary key autoincrement,"
                " entry blob not null, kind integer not null default 0)"
            )
            if "kind" not in {row[1] for row in db.execute("pragma table_info(log)")}:
                # Written before entries had kinds.
                db.execute("alter table log add column kind integer not null default 0")
            db.execute("create table if not exists tags (tag text primary key)")

    def append(self, entries: Iterable[tuple[bytes, int]], tag: str | None = None) -> int:
        """Add entries and their kinds in one transaction, unless the tag was used before.

        Returns the position after the last entry of the log.
        """
        with self.database.writing() as db:
            insert = "insert or ignore into tags values (?)"
            if tag is None or db.execute(insert, (tag,)).rowcount:
                db.executemany("insert into log (entry, kind) values (?, ?)", entries)
        return self.end()

    def end(self) -> int:
        """Return the position after the last committed entry."""
        return int(self.database.rows("select max(position) from log")[0][0] or 0)

    def read(self, after: int, upto: int) -> Iterator[tuple[bytes, int]]:
        """Yield the entries ``after + 1 .. upto`` in order, with their kinds."""
        statement = (
            "select position, entry, kind from log where position > ? and position <= ?"
            " order by position limit 1"
        )
        while rows := self.database.rows(statement, after, upto):
            after, entry, kind = rows[0]
            yield entry, kind

    def close(self) -> None:
        """Close the file."""
        self.database.close()
