"""The schema of ``state.db``, and the migration of a state directory that version 0.1 wrote."""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from roost.errors import StateError
from roost.storage.database import Database
from roost.storage.files import Files
from roost.storage.lock import RunLock
from roost.storage.private import private_folder
from roost.storage.totals import BATCHES, ROUNDS, TOTALS, add_batch, add_round

FORMAT = 2
LOCK_WAIT_S = 5.0
_TABLES = (
    "create table facts (tbl text, key, value text not null, primary key (tbl, key)) without rowid",
    "create table commands (number integer primary key autoincrement, body text not null)",
    "create table leases (lease integer primary key autoincrement, value integer, until real)",
)
# Version 0.1 had a table for each kind of fact; these need no conversion of their values.
_COPIES = {
    "versions": "insert into facts select 'versions', position, body from versions",
    "plans": "insert into facts select 'plans', epoch, body from plans",
    "rounds": "insert into facts select 'rounds', number, body from rounds",
    "windows": "insert into facts select 'windows', batch_id, body from windows",
    "files": "insert into facts select 'files', number,"
    " json_object('path', path, 'rows', rows, 'first', first) from files",
    "seen": "insert into facts select 'seen', path, 'true' from seen",
    "guard_log": "insert into facts select 'guard_log', number, body from guard_log",
    "guard_orders": "insert into commands select number, body from guard_orders",
    "pins": "insert into leases (value, until) select batch_id, until from pins",
}
_NO_TOTALS: dict[str, Any] = {}
Row = tuple[str, int | str, Any]


def prepare(database: Database, folder: Path, *, locked: bool) -> None:
    """Create the tables of a new state directory, or migrate an old one in one transaction.

    Raises :class:`StateError` if a newer version wrote the state, or a run of an older one uses it.
    """
    found = _format(database)
    if found > FORMAT:
        raise StateError(f"state in {folder} was written by a newer version of Roost")
    if found == FORMAT:
        return
    exclusive = contextlib.nullcontext() if locked or found == 0 else _run_lock(database, folder)
    with exclusive, database.writing() as db:
        if _format(database) == FORMAT:  # another process was faster
            return
        for statement in _TABLES:
            db.execute(statement)
        _convert(db, folder)
        db.execute(f"pragma user_version = {FORMAT}")


def _format(database: Database) -> int:
    """Return the format of a state directory; 0 for a new one."""
    with database.reading() as db:
        version = int(db.execute("pragma user_version").fetchone()[0])
        return version or int("batches" in _tables(db))


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}


@contextlib.contextmanager
def _run_lock(database: Database, folder: Path) -> Iterator[None]:
    """Exclude runs of version 0.1; another process that migrates is finished in a moment."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            lock = RunLock(folder)
            break
        except StateError:
            if time.monotonic() > deadline and _format(database) != FORMAT:
                raise StateError(
                    f"a run of an older version is using the state in {folder}: stop it first"
                ) from None
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def _convert(db: sqlite3.Connection, folder: Path) -> None:
    """Copy the tables of version 0.1 into facts, commands and leases, and drop them."""
    old = _tables(db) & {*_COPIES, *_CONVERSIONS}
    for table in sorted(old & set(_COPIES)):
        db.execute(_COPIES[table])
    facts = [
        row for name, rows_of in _CONVERSIONS.items() if name in old for row in rows_of(db, folder)
    ]
    rows = ((table, key, json.dumps(value)) for table, key, value in facts)
    db.executemany("insert into facts values (?, ?, ?)", rows)
    for table in old:
        db.execute(f"drop table {table}")


def _meta(db: sqlite3.Connection, folder: Path) -> Iterator[Row]:
    for key, text in db.execute("select key, value from meta").fetchall():
        value = json.loads(text)
        if key == "meta":
            value.pop("format", None)
        yield key, "meta" if key == "meta" else "state", value


def _batches(db: sqlite3.Connection, folder: Path) -> Iterator[Row]:
    figures = []
    for number, intent, done in db.execute("select batch_id, intent, done from batches").fetchall():
        body = json.loads(intent)
        epochs = {"space": body.pop("epoch")}
        yield "intents", number, {**body, "epochs": epochs, "choices": {}}
        if done is not None:
            commit = json.loads(done)
            figures.append(commit["figures"])
            yield "commits", number, commit
    if figures:
        yield TOTALS, BATCHES, reduce(add_batch, figures, _NO_TOTALS)


def _rounds(db: sqlite3.Connection, folder: Path) -> Iterator[Row]:
    bodies = db.execute("select body from rounds order by number").fetchall()
    rows = [json.loads(body) for (body,) in bodies]
    if rows:
        yield TOTALS, ROUNDS, reduce(add_round, rows, _NO_TOTALS)


def _tallies(db: sqlite3.Connection, folder: Path) -> Iterator[Row]:
    for number, counted, body in db.execute("select number, counted, body from guard_tallies"):
        data = base64.b64encode(body).decode()
        yield "guard_tallies", number, {"counted": counted, "bytes": data}


def _guard_state(db: sqlite3.Connection, folder: Path) -> Iterator[Row]:
    for body, applied in db.execute("select body, obeyed from guard_state").fetchall():
        files = Files(str(private_folder(folder / "guard")))
        name = files.name("", "state", ".guard")
        files.write(name, {"bytes": np.frombuffer(body, np.uint8)})
        db.execute("delete from commands where number <= ?", (applied,))
        yield "guard", "state", {"file": name, "applied": applied}


_CONVERSIONS: dict[str, Callable[[sqlite3.Connection, Path], Iterator[Row]]] = {
    "meta": _meta,
    "batches": _batches,
    "rounds": _rounds,
    "guard_tallies": _tallies,
    "guard_state": _guard_state,
}
