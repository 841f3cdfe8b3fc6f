"""The embedded query log: durable, in order, safe for several writers."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.model.columns import stream_bytes
from roost.queries import log as querylog
from roost.queries.log import EntryKind, SqliteQueryLog, kind_of


def block(*names: str) -> pa.Table:
    return pa.table({"op": ["register"] * len(names), "query_id": list(names)})


def names_of(log: SqliteQueryLog, after: int, upto: int) -> list[str]:
    return [name for table in log.read(after, upto) for name in table["query_id"].to_pylist()]


@pytest.fixture
def log(tmp_path: Path):
    log = SqliteQueryLog(tmp_path / "queries.db")
    yield log
    log.close()


def test_an_empty_log_ends_at_zero(log: SqliteQueryLog) -> None:
    assert log.end() == 0
    assert list(log.read(0, 0)) == []
    assert list(log.read(0, 99)) == []


def test_entries_are_read_between_positions_in_order(log: SqliteQueryLog) -> None:
    ends = [log.append(block(f"a{n}", f"b{n}")) for n in range(4)]
    assert ends == [1, 2, 3, 4]
    assert log.end() == 4
    assert names_of(log, 0, 4) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert names_of(log, 1, 3) == ["a1", "b1", "a2", "b2"]
    assert names_of(log, 3, 3) == []


def test_entries_survive_the_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; import pyarrow as pa\n"
        "from roost.queries.log import SqliteQueryLog\n"
        "log = SqliteQueryLog(Path(sys.argv[1]))\n"
        "for name in 'xyz': log.append(pa.table({'op': ['register'], 'query_id': [name]}))\n"
        "os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "queries.db"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=False)
    assert killed.returncode == -9
    log = SqliteQueryLog(path)
    assert names_of(log, 0, log.end()) == ["x", "y", "z"]
    log.close()


def test_two_writers_append_in_one_order(tmp_path: Path) -> None:
    first = SqliteQueryLog(tmp_path / "queries.db")
    second = SqliteQueryLog(tmp_path / "queries.db")
    ends = [(first, second)[n % 2].append(block(str(n))) for n in range(6)]
    assert ends == [1, 2, 3, 4, 5, 6]
    assert names_of(first, 0, 6) == names_of(second, 0, 6) == [str(n) for n in range(6)]
    first.close()
    second.close()


def test_a_tag_is_appended_once(log: SqliteQueryLog) -> None:
    assert log.append(block("a"), tag="file-1") == 1
    assert log.append(block("a"), tag="file-1") == 1
    assert log.append(block("b"), tag="file-2") == 2
    assert log.append(block("c")) == log.append(block("c")) - 1
    assert names_of(log, 0, log.end()) == ["a", "b", "c", "c"]


def test_tags_are_durable(tmp_path: Path) -> None:
    for _ in range(2):
        log = SqliteQueryLog(tmp_path / "queries.db")
        log.append(block("a"), tag="file-1")
        assert log.end() == 1
        log.close()


def test_a_block_that_fails_leaves_neither_entry_nor_tag(
    log: SqliteQueryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(querylog, "ENTRY_ROWS_MAX", 2)
    calls = []

    def fails_later(part: pa.Table) -> bytes:
        calls.append(part.num_rows)
        if len(calls) == 2:
            raise MemoryError
        return stream_bytes(part)

    with monkeypatch.context() as patch:
        patch.setattr(querylog, "stream_bytes", fails_later)
        with pytest.raises(MemoryError):
            log.append(block("a", "b", "c"), tag="file-1")
    assert log.end() == 0
    log.append(block("a", "b", "c"), tag="file-1")
    assert names_of(log, 0, log.end()) == ["a", "b", "c"]


def test_large_blocks_are_divided_without_loss(
    log: SqliteQueryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(querylog, "ENTRY_ROWS_MAX", 10)
    names = [f"q{n}" for n in range(35)]
    assert log.append(block(*names)) == 4
    assert [table.num_rows for table in log.read(0, 4)] == [10, 10, 10, 5]
    assert names_of(log, 0, 4) == names


@given(st.lists(st.tuples(st.none() | st.floats(), st.none() | st.text(max_size=5)), max_size=20))
@examples(60)
def test_a_block_is_read_as_it_was_written(rows) -> None:
    table = pa.table(
        {
            "x0": pa.array([x for x, _ in rows], pa.float64()),
            "wkt": pa.array([text for _, text in rows], pa.string()),
            "at": pa.array(range(len(rows)), pa.timestamp("us", "UTC")),
        }
    )
    again = pa.ipc.open_stream(stream_bytes(table)).read_all()
    assert again.schema == table.schema
    assert repr(again.to_pylist()) == repr(table.to_pylist())


def test_a_log_without_kinds_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "queries.db"
    with closing(sqlite3.connect(path)) as old, old:
        old.execute(
            "create table log (position integer primary key autoincrement, entry blob not null)"
        )
        old.execute("insert into log (entry) values (?)", (stream_bytes(pa.table({"op": ["a"]})),))
    with closing(SqliteQueryLog(path)) as log:
        assert log.append(pa.table({"op": ["b"]}), tally=pa.table({"user_id": ["ann"]})) == 3
        kinds = [kind_of(block) for block in log.read(0, log.end())]
        assert kinds == [EntryKind.REQUESTS, EntryKind.COUNTED, EntryKind.TALLY]
