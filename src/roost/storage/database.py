"""SQLite files with one way to read and one way to write.

Writers do not block readers (write-ahead log). Threads of a process share a connection and take
turns; processes wait for each other.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roost.storage.private import JOURNALS, close_to_others, private_file

BUSY_S = 60.0


def connect(path: Path) -> sqlite3.Connection:
    """Open an SQLite file that only its owner may read; its journals inherit its mode."""
    private_file(path)
    for suffix in JOURNALS:
        with contextlib.suppress(FileNotFoundError):
            close_to_others(path.with_name(path.name + suffix))  # left by a process that died
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    # SQLite itself does not wait while another process changes the journal mode.
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return db
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                db.close()
                raise
            time.sleep(0.01)


class Database:
    """One SQLite file, created if missing.

    With ``durable``, a transaction waits for the disk. Without, a host failure may lose the last
    ones, a process failure none.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._db = connect(path)
        self._lock = threading.RLock()
        self.synchronous("full" if durable else "normal")

    def synchronous(self, level: str) -> None:
        """Set how long a transaction waits for the disk: ``full``, ``normal`` or ``off``."""
        self._db.execute(f"pragma synchronous = {level}")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read at one point in time, without the uncommitted writes of other threads."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("begin")
            try:
                yield self._db
            finally:
                self._db.rollback()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Write one transaction; an exception leaves nothing of it."""
        with self._lock:
            assert not self._db.in_transaction, "a transaction of this thread is open"
            self._db.execute("begin immediate")
            with self._db:
                yield self._db

    def rows(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a query."""
        with self.reading() as db:
            return db.execute(statement, values).fetchall()

    def version(self) -> int:
        """Return a number that changes when another connection has written."""
        with self._lock:
            return int(self._db.execute("pragma data_version").fetchone()[0])

    def write(self, statement: str, *values: Any) -> int:
        """Run one statement as a transaction; returns the number of the row that it inserted."""
        with self.writing() as db:
            return db.execute(statement, values).lastrowid or 0

    def close(self) -> None:
        """Close the file."""
        self._db.close()
