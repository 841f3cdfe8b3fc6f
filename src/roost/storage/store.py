"""Facts of one state directory: what happened, and what must be repeated after a crash.

A fact is one row: table, key, JSON value. :meth:`Store.record` writes facts in one transaction, so
either all of them exist or none. The sequence of recorded transactions alone rebuilds the facts.
Only the driver records facts. Other processes read, append to the command log, or hold a lease.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.storage.database import Database
from roost.storage.files import Files
from roost.storage.migrate import prepare
from roost.storage.private import private_folder, state_folder

Key = int | str
_INTEGER_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Fact:
    """One row; the value is JSON, and None deletes the row."""

    table: str
    key: Key
    value: Any


class View:
    """Reads facts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, table: str, key: Key) -> Any:
        """Return the value of a row; None if there is no such row."""
        rows = self._read("select null, value from facts where tbl = ? and key = ?", table, key)
        return rows[0][1] if rows else None

    def last(self, table: str, upto: int | None = None) -> tuple[int, Any] | None:
        """Return the row with the largest integer key that is not beyond ``upto``."""
        # Text sorts after every number.
        rows = self._read(
            "select key, value from facts where tbl = ? and key <= ? order by key desc limit 1",
            table,
            _INTEGER_MAX if upto is None else upto,
        )
        return rows[0] if rows else None

    def items(
        self, table: str, after: int | None = None, upto: int | None = None
    ) -> list[tuple[Any, Any]]:
        """Return the rows with ``after < key <= upto`` in key order; integers sort as numbers."""
        statement = "select key, value from facts where tbl = ?"
        bounds = [bound for bound in (after, upto) if bound is not None]
        statement += "" if after is None else " and key > ?"
        statement += "" if upto is None else " and key <= ?"
        return self._read(f"{statement} order by key", table, *bounds)

    def _read(self, statement: str, *values: Any) -> list[tuple[Any, Any]]:
        return [(key, json.loads(text)) for key, text in self._database.rows(statement, *values)]


class Store(View):
    """Facts, command log and leases of one state directory, which is created if missing.

    Reads outside :meth:`view` see the last committed transaction, each its own. With
    ``durable``, a transaction waits for the disk; a process that only reads need not. ``locked``
    says that the caller holds the run lock, which migrating an older state requires. ``on_record``
    is called with the facts of each committed transaction.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        locked: bool = False,
        on_record: Callable[[tuple[Fact, ...]], None] | None = None,
    ) -> None:
        self.folder = folder.absolute()  # workers may have another working directory
        state_folder(folder)
        super().__init__(Database(folder / "state.db", durable=durable))
        try:
            prepare(self._database, self.folder, locked=locked)
        except BaseException:
            self._database.close()
            raise
        self._on_record = on_record
        self.commands = CommandLog(self._database)
        self.leases = Leases(self._database)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def version(self) -> int:
        """Return a number that changes when another process or store has written."""
        return self._database.version()

    def files(self, kind: str) -> Files:
        """Return the files of one kind: a folder in the state directory, created if missing."""
        return Files(str(private_folder(self.folder / kind)))

    def record(self, *facts: Fact) -> None:
        """Write facts in one transaction, in order."""
        rows = [(f.table, f.key, None if f.value is None else json.dumps(f.value)) for f in facts]
        if not rows:
            return
        with self._database.writing() as db:
            for table, key, value in rows:
                if value is None:
                    db.execute("delete from facts where tbl = ? and key = ?", (table, key))
                else:
                    db.execute("insert or replace into facts values (?, ?, ?)", (table, key, value))
        if self._on_record is not None:
            self._on_record(facts)

    @contextmanager
    def view(self) -> Iterator[View]:
        """Read several facts at one point in time; :meth:`record` is refused meanwhile."""
        with self._database.reading():
            yield self


@dataclass(frozen=True)
class CommandLog:
    """Commands of other processes to the driver, in order, until it has applied them."""

    _database: Database

    def append(self, body: Any) -> int:
        """Add a command, as JSON; returns its number."""
        return self._database.write("insert into commands (body) values (?)", json.dumps(body))

    def after(self, number: int) -> list[tuple[int, Any]]:
        """Return the commands after a number, in order, each with its number."""
        statement = "select number, body from commands where number > ? order by number"
        return [(n, json.loads(body)) for n, body in self._database.rows(statement, number)]

    def trim(self, upto: int) -> None:
        """Delete the commands up to a number; numbers are not used again."""
        self._database.write("delete from commands where number <= ?", upto)


@dataclass(frozen=True)
class Leases:
    """Numbers that other processes hold until they release them or their time is over.

    A reader of the window holds the oldest batch whose files it may still open.
    """

    _database: Database

    def take(self, value: int, until: float) -> int:
        """Hold a value until a time; returns the lease."""
        insert = "insert into leases (value, until) values (?, ?)"
        return self._database.write(insert, value, until)

    def release(self, lease: int) -> None:
        """Give up a lease; one that has expired is ignored."""
        self._database.write("delete from leases where lease = ?", lease)

    def oldest(self, now: float) -> int | None:
        """Return the smallest value that is held, and delete leases that have expired."""
        rows = self._database.rows("select value, until from leases")
        if any(until < now for _, until in rows):
            self._database.write("delete from leases where until < ?", now)
        return min((value for value, until in rows if until >= now), default=None)
