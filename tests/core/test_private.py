"""Only its owner may read the state, whatever the umask and the modes of existing files."""

from __future__ import annotations

import multiprocessing
import os
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from roost.queries.log import SqliteQueryLog
from roost.queries.versions import segment_files
from roost.stages.point_files import arrange
from roost.storage.agreement import agree
from roost.storage.database import connect
from roost.storage.files import map_arrays, write_arrays
from roost.storage.lock import RunLock
from roost.storage.private import (
    FOLDERS,
    private_file,
    private_folder,
    private_opener,
    state_folder,
)
from roost.storage.store import Store

SOURCES = Path(__file__).parents[2] / "src" / "roost"
UMASKS = (0o000, 0o022, 0o077, 0o277)


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): mode(path) for path in folder.rglob("*")}


def check_private(folder: Path) -> None:
    """Check the folder and everything below it."""
    assert mode(folder) == 0o700
    for path in folder.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_state_directory_is_private_with_its_journals(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "state"
    store = Store(folder)
    log = SqliteQueryLog(folder / "queries.db")
    lock = RunLock(folder)
    log.append(pa.table({"query_id": ["a"]}))
    agree(store, {"space": "here"})
    write_arrays(Path(segment_files(store).folder) / "1.seg", {"x": np.arange(3)})
    write_arrays(Path(store.files("window").folder) / "1.win", {"x": np.arange(3)}, durable=False)
    assert {"state.db-wal", "state.db-shm", "queries.db-wal", "run.lock"} <= set(modes(folder))
    check_private(folder)
    for item in (store, log):
        item.close()
    lock.release()


def test_points_that_are_sorted_first_are_private(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "points.csv"
    with open(path, "w", opener=private_opener) as file:
        file.write("event_time,x\n2,1.5\n1,2.5\n")
    staged = tmp_path / "staged" / "points.parquet"
    arrange([path], "auto", "event_time", 0, staged)
    assert staged.exists()
    check_private(staged.parent)


def test_folders_above_the_state_are_as_the_umask_says(tmp_path: Path, open_umask: None) -> None:
    Store(tmp_path / "out" / "state").close()
    assert mode(tmp_path / "out") == 0o777
    assert mode(tmp_path / "out" / "state") == 0o700


def test_state_that_was_open_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for part in ("segments", "window", "checkpoint"):
        (folder / part).mkdir(parents=True)
    old = connect(folder / "state.db")
    old.execute("create table old (one)")
    old.commit()
    old.close()
    for path in (folder, folder / "state.db", folder / "segments"):
        path.chmod(0o777)
    Store(folder).close()
    assert mode(folder) == mode(folder / "segments") == 0o700
    assert mode(folder / "state.db") == 0o600


def test_no_folder_of_the_state_is_foreign(tmp_path: Path) -> None:
    """Every kind of files that a run writes, in the folders that the code names."""
    folder = tmp_path / "state"
    with closing(Store(folder)) as store:
        for kind in FOLDERS:
            store.files(kind)
        store.files("flow/003")
    named = {
        name.split("/")[0]
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r'[sS]tore\.files\(f?"([^"]+)"', path.read_text())
    }
    assert named <= set(FOLDERS) and {"flow", "window"} <= named
    folder.chmod(0o777)
    (folder / "flow").chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store(folder).close()
    assert mode(folder) == mode(folder / "flow") == 0o700


def test_journals_of_a_killed_process_are_closed(tmp_path: Path) -> None:
    program = (
        "import os, sqlite3; os.umask(0)\n"
        "db = sqlite3.connect('old.db'); db.execute('pragma journal_mode = wal')\n"
        "db.execute('create table t (one)'); db.execute('insert into t values (7)'); db.commit()\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert mode(tmp_path / "old.db-wal") == 0o644
    db = connect(tmp_path / "old.db")
    assert db.execute("select one from t").fetchall() == [(7,)]
    assert set(modes(tmp_path).values()) == {0o600}
    db.close()


def test_a_folder_with_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "thesis.txt").write_text("not Roost's")
    (folder / "segments").mkdir()
    (folder / "segments").chmod(0o755)
    with pytest.warns(RuntimeWarning, match="shared stays open to other users: it holds more"):
        Store(folder).close()
    assert mode(folder) == 0o755
    assert mode(folder / "segments") == 0o700
    assert mode(folder / "state.db") == 0o600


def test_a_mode_that_cannot_be_changed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o750)
    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be changed .Operation not permitted"):
        state_folder(folder)
    folder.rmdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state_folder(folder)  # made by us: nothing to change


def test_other_bits_of_a_folder_stay(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o2775)
    private_folder(folder)
    assert mode(folder) == 0o2700


def test_a_leftover_that_was_open_is_closed_before_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "1.seg"
    leftover = tmp_path / f"1.seg.{os.getpid()}.partial"
    leftover.write_bytes(b"half")
    leftover.chmod(0o666)
    write_arrays(path, {"x": np.arange(5)})
    assert mode(path) == 0o600
    assert map_arrays(path)["x"].tolist() == list(range(5))


def test_a_file_that_is_there_keeps_its_content_and_its_locks(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    first = connect(path)
    first.execute("create table t (one)")
    first.commit()
    first.execute("begin immediate")
    private_file(path)  # opening and closing it would drop the lock of this process
    steal = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], timeout=0)\n"
        "try: db.execute('begin immediate')\n"
        "except sqlite3.OperationalError: sys.exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", steal, str(path)], check=False).returncode == 3
    first.close()


def _open_at_once(folder: str, number: int) -> set[int]:
    """Open the state as one of several processes, and watch the modes meanwhile."""
    os.umask(0)
    seen: set[int] = set()
    for turn in range(10):
        state = Path(folder) / str(turn)
        log = SqliteQueryLog(state_folder(state) / "queries.db")
        store = Store(state)
        log.append(pa.table({"query_id": [f"{number}-{turn}"]}))
        for path in (state, *state.rglob("*")):
            try:
                seen.add(mode(path))
            except FileNotFoundError:
                continue
        store.close()
        log.close()
    return seen


def test_processes_that_make_the_same_state_at_once_agree(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        seen = pool.starmap(_open_at_once, [(str(tmp_path), number) for number in range(4)])
    assert set().union(*seen) == {0o700, 0o600}
    for turn in range(10):
        log = SqliteQueryLog(tmp_path / str(turn) / "queries.db")
        assert log.end() == 4
        log.close()
