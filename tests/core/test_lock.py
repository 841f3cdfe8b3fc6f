"""The run lock: one holder at a time, in any process, until it is released or its process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roost.errors import StateError
from roost.storage.lock import RunLock

HOLDER = (
    "import sys, time; from pathlib import Path; from roost.storage.lock import RunLock;"
    "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_lock_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    for _ in range(2):
        with pytest.raises(StateError, match=f"another run is using the state in {tmp_path}"):
            RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


def test_the_lock_ends_with_its_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(StateError, match="another run"):
        RunLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=60)
    RunLock(tmp_path).release()
