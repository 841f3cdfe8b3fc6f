"""Local copies of shared files: the same bytes, in any case."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_balancer import Scene

from balance_checks import Truth, jumping
from roost.model.choices import Strategy
from roost.storage.copies import BLOCK, CopiedMap, Copies
from roost.storage.files import map_arrays, read_ahead, write_arrays

SIZE = 40 * BLOCK // 8
ROOMY = 1 << 30


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    write_arrays(path, {"values": np.random.default_rng(1).integers(0, 1 << 62, SIZE)})
    return path


def copies_in(folder: Path, budget: int = ROOMY) -> Copies:
    return Copies(str(folder / "cache"), budget)


def used(copies: Copies) -> int:
    return sum(512 * stat.st_blocks for stat in copies.used().values())


def request(values: np.ndarray, begin: int, end: int) -> None:
    read_ahead(values, np.array([begin]), np.array([end]))


def present(values: np.ndarray) -> np.ndarray:
    assert isinstance(values.base, CopiedMap)
    return values.base._present


@pytest.mark.parametrize("seed", range(5))
def test_every_part_has_the_bytes_of_the_shared_file(
    tmp_path: Path, shared: Path, seed: int
) -> None:
    chance, copies = random.Random(seed), copies_in(tmp_path)
    expected = np.array(map_arrays(shared)["values"])
    workers = [map_arrays(shared, sparse=True, copies=copies)["values"] for _ in range(3)]
    for _ in range(30):
        begin = chance.randrange(SIZE)
        request(chance.choice(workers), begin, min(SIZE, begin + chance.randrange(1, SIZE // 4)))
        at = np.random.default_rng(seed).integers(0, SIZE, 500)
        for values in workers:
            assert np.array_equal(values[at], expected[at])
    for values in workers:
        assert np.array_equal(values, expected)
    assert any(present(values).any() for values in workers)


def test_a_request_copies_its_blocks_and_reads_them_from_the_copy(
    tmp_path: Path, shared: Path
) -> None:
    copies = copies_in(tmp_path)
    values = map_arrays(shared, sparse=True, copies=copies)["values"]
    request(values, SIZE // 2, SIZE // 2 + 8 * BLOCK // 8)
    assert 8 <= present(values).sum() <= 10
    assert used(copies) <= 11 * BLOCK
    # The mapping shows the copy: it changes if the copy does.
    [path] = copies.used()
    place = int(np.flatnonzero(present(values))[2]) * BLOCK
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes(BLOCK))
    assert np.count_nonzero(values == 0) == BLOCK // 8
    # Another worker finds them copied.
    again = map_arrays(shared, sparse=True, copies=copies)["values"]
    request(again, SIZE // 2, SIZE // 2 + 8 * BLOCK // 8)
    assert np.count_nonzero(again == 0) == BLOCK // 8


def test_a_file_that_was_written_again_has_another_copy(tmp_path: Path, shared: Path) -> None:
    copies = copies_in(tmp_path)
    request(map_arrays(shared, sparse=True, copies=copies)["values"], 0, SIZE)
    write_arrays(shared, {"values": np.arange(SIZE)})
    values = map_arrays(shared, sparse=True, copies=copies)["values"]
    request(values, 0, SIZE)
    assert present(values).all() and np.array_equal(values, np.arange(SIZE))


@pytest.mark.parametrize("budget", [BLOCK, 12 * BLOCK])
def test_a_budget_that_is_too_small(tmp_path: Path, shared: Path, budget: int) -> None:
    copies = copies_in(tmp_path, budget)
    other = tmp_path / "other"
    write_arrays(other, {"values": np.arange(SIZE)})
    opened = {
        path: map_arrays(path, sparse=True, copies=copies)["values"] for path in (shared, other)
    }
    for begin in range(0, SIZE, 4 * BLOCK // 8):
        for path, values in opened.items():
            request(values, begin, begin + BLOCK // 8)
            assert used(copies) <= budget
            assert np.array_equal(values, map_arrays(path)["values"])
    assert any(present(values).any() for values in opened.values()) == (budget > BLOCK)


def test_a_folder_that_is_deleted_meanwhile(tmp_path: Path, shared: Path) -> None:
    copies = copies_in(tmp_path)
    values = map_arrays(shared, sparse=True, copies=copies)["values"]
    request(values, 0, SIZE // 2)
    shutil.rmtree(copies.folder)
    assert np.array_equal(values, map_arrays(shared)["values"])
    request(values, SIZE // 4, SIZE)
    assert present(values).all()
    assert np.array_equal(values, map_arrays(shared)["values"])


def test_a_folder_that_cannot_be_made(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    values = map_arrays(shared, sparse=True, copies=copies_in(tmp_path))["values"]
    request(values, 0, SIZE)
    assert not present(values).any()
    assert np.array_equal(values, map_arrays(shared)["values"])


COPYING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from roost.storage.copies import Copies
from roost.storage.files import map_arrays, read_ahead
shared, folder, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
write = os.pwrite
def torn(file, data, place):
    global left
    left -= 1
    if left < 0:
        write(file, data[: len(data) // 2], place)
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, data, place)
os.pwrite = torn
values = map_arrays(Path(shared), sparse=True, copies=Copies(folder, 1 << 30))["values"]
read_ahead(values, np.array([0]), np.array([values.size]))
"""


@pytest.mark.parametrize("writes", [0, 1, 4, 5])
def test_a_worker_that_is_killed_while_it_copies(tmp_path: Path, shared: Path, writes: int) -> None:
    """It has written half of what it was about to write."""
    copies = copies_in(tmp_path)
    command = [sys.executable, "-c", COPYING, str(shared), copies.folder, str(writes)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert copies.used()
    values = map_arrays(shared, sparse=True, copies=copies)["values"]
    request(values, 0, SIZE)
    assert present(values).all()
    assert np.array_equal(values, map_arrays(shared)["values"])


@pytest.mark.parametrize("strategy", [Strategy.SWARM, Strategy.GLOBAL, Strategy.UNIFORM])
def test_a_run_with_copies_finds_the_matches_of_brute_force(
    tmp_path: Path, strategy: Strategy
) -> None:
    scenario = jumping(5, batches=8, rows=250, stay=2, standing=90)
    cache = tmp_path / "cache"
    settings = {"cache": cache, "cache_bytes": 4 * BLOCK}
    scene = Scene(tmp_path, scenario, strategy, watched=False, engine=settings)

    def on_step(step: str, number: int) -> None:
        if (step, number) == ("run", 4):
            assert list(cache.rglob("*"))
            shutil.rmtree(cache)

    scene.run_driver(on_step)
    scene.check(Truth(scenario))
    assert list(cache.rglob("*"))
