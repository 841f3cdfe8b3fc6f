"""Files and folders that only their owner may read, whatever the umask.

The state directory holds the queries of all users and the points of the window, and the usual umask
lets every user of the host read them. So folders are created with mode 0700 and files with 0600,
also if several processes create the same one at once. The umask does not change: it belongs to the
whole process and to the output files, which users may share.

Nothing is encrypted. The superuser and processes of the same user can read everything.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import warnings
from pathlib import Path

FOLDER = 0o700
FILE = 0o600
OTHERS = 0o077
FOLDERS = (
    "segments", "window", "guard", "answers", "trio", "synopsis", "flow", "staged", "checkpoint"
)  # fmt: skip
"""Folders in a state directory."""
CHECKPOINTS = "checkpoint-"
"""Prefix of the folders with Spark's checkpoints of request streams."""
DATABASES = ("state.db", "queries.db")
JOURNALS = ("-wal", "-shm", "-journal")

_creating = threading.Lock()


def private_folder(folder: Path) -> Path:
    """Create a folder that only its owner may read, or revoke the rights of others.

    Missing parents are created according to the umask.
    """
    folder.mkdir(FOLDER, parents=True, exist_ok=True)
    close_to_others(folder, FOLDER)
    return folder


def state_folder(folder: Path) -> Path:
    """Create the state directory, or revoke the rights of other users.

    A folder that holds other files as well stays as it is, with a warning: other users may need it.
    """
    folder.mkdir(FOLDER, parents=True, exist_ok=True)
    shared = folder.stat().st_mode & OTHERS
    if shared and not all(_is_state(name) for name in os.listdir(folder)):
        _warn(folder, "it holds more than a state directory")
    else:
        close_to_others(folder, FOLDER)
    for name in FOLDERS:
        if (folder / name).is_dir():
            close_to_others(folder / name, FOLDER)
    return folder


def private_file(path: Path) -> Path:
    """Create an empty file that only its owner may read; revoke others' rights to an old one.

    Libraries that then open it by name, such as Arrow and SQLite, retain its mode.
    """
    # A process that closes any handle of an SQLite file loses all its locks on it. So an existing
    # file is never opened here, and a new one is closed before this process connects to it.
    with _creating:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE))
        close_to_others(path)
    return path


def private_opener(path: str, flags: int) -> int:
    """Open a file for :func:`open`; only its owner may read a new one."""
    file = os.open(path, flags | os.O_CLOEXEC, FILE)
    if os.fstat(file).st_mode & 0o777 != FILE:
        # An older file, or a umask that restricts the owner.
        with contextlib.suppress(OSError):  # a filesystem without modes
            os.fchmod(file, FILE)
    return file


def _is_state(name: str) -> bool:
    files = (database + suffix for database in DATABASES for suffix in ("", *JOURNALS))
    return name in (*FOLDERS, *files, "run.lock") or name.startswith(CHECKPOINTS)


def close_to_others(path: Path, mode: int = FILE) -> None:
    """Set the mode where other users have rights or the owner lacks some."""
    found = path.stat().st_mode
    if found & 0o777 == mode:
        return
    try:
        path.chmod(stat.S_IMODE(found) & ~0o777 | mode)
    except FileNotFoundError:
        raise
    except OSError as error:  # owned by another user, or a filesystem without modes
        if found & OTHERS:
            _warn(path, f"its mode cannot be changed ({error.strerror})")


def _warn(path: Path, why: str) -> None:
    warnings.warn(f"{path} stays open to other users: {why}", RuntimeWarning, stacklevel=4)
