"""Files and folders that only their owner may read, whatever the umask says.

Problem: the state directory holds everybody's queries and the points of the window, and a usual
umask lets every user of the host read them. Idea: folders are made with mode 0700 and files with
0600 from the first moment, so there is no moment at which they are open, and processes that make
the same one at once agree. The umask itself is left alone: it belongs to the whole process, and
to the output, which is the user's to share.

It does not encrypt, and does not keep out the superuser or whoever runs as the same user.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
import warnings
from pathlib import Path

BUSY_S = 60.0
FOLDER = 0o700
FILE = 0o600
OTHERS = 0o077
STATE_NAMES = frozenset(
    ("segments", "window", "answers", "trio", "staged", "checkpoint", "run.lock")
)
"""What is in a state directory beside its databases."""
CHECKPOINTS = "checkpoint-"
"""How the folder begins that Spark keeps of a stream of requests."""
DATABASES = ("state.db", "queries.db")
_SUFFIXES = ("", "-wal", "-shm", "-journal")

_creating = threading.Lock()


def private_folder(folder: Path) -> Path:
    """Make a folder for its owner alone, or close one that is open to others.

    Missing folders above it are made as the umask says.
    """
    folder.mkdir(FOLDER, parents=True, exist_ok=True)
    _close(folder, FOLDER)
    return folder


def state_folder(folder: Path) -> Path:
    """Make the state directory, or close one that is open to others.

    A folder that holds other things as well is left as it is, with a warning: somebody may have
    pointed at a folder that others need.
    """
    folder.mkdir(FOLDER, parents=True, exist_ok=True)
    shared = folder.stat().st_mode & OTHERS
    if shared and not all(_is_state(name) for name in os.listdir(folder)):
        _warn(folder, "it holds more than a state directory")
    else:
        _close(folder, FOLDER)
    return folder


def private_file(path: Path) -> Path:
    """Make an empty file for its owner alone, unless it is there; then close it to others.

    Whoever opens it by name to write, as Arrow and SQLite do, keeps its mode.
    """
    # A process that closes any handle of an SQLite file loses all its locks on it. So a file that
    # is there is never opened here, and nobody in this process connects to it before it is closed.
    with _creating:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE))
        _close(path, FILE)
    return path


def private_opener(path: str, flags: int) -> int:
    """Open as :func:`open` does, where a new file is for its owner alone."""
    file = os.open(path, flags | os.O_CLOEXEC, FILE)
    if os.fstat(file).st_mode & 0o777 != FILE:
        # A leftover, or a umask that takes from the owner.
        with contextlib.suppress(OSError):  # a filesystem without modes
            os.fchmod(file, FILE)
    return file


def connect(path: Path) -> sqlite3.Connection:
    """Open an SQLite database for its owner alone; its journals take over its mode."""
    private_file(path)
    for suffix in _SUFFIXES[1:]:
        journal = path.with_name(path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            _close(journal, FILE)  # left by a process that died
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    _keep_journal_ahead(db)
    return db


def _keep_journal_ahead(db: sqlite3.Connection) -> None:
    """Have writers not keep out readers; SQLite itself does not wait when others do the same."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _is_state(name: str) -> bool:
    journals = (database + suffix for database in DATABASES for suffix in _SUFFIXES)
    return name in STATE_NAMES or name in journals or name.startswith(CHECKPOINTS)


def _close(path: Path, mode: int) -> None:
    """Give a file or folder this mode, where others have rights or the owner lacks some."""
    found = path.stat().st_mode
    if found & 0o777 == mode:
        return
    try:
        path.chmod(stat.S_IMODE(found) & ~0o777 | mode)
    except FileNotFoundError:
        raise
    except OSError as error:  # somebody else's, or a filesystem without modes
        if found & OTHERS:
            _warn(path, f"its mode cannot be changed ({error.strerror})")


def _warn(path: Path, why: str) -> None:
    warnings.warn(f"{path} stays open to other users: {why}", RuntimeWarning, stacklevel=4)
