"""Rules of this test suite: skips that fail, and seeds that can be repeated."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
PROBE = """
import gc, sqlite3
import pytest

@pytest.fixture(scope="session", autouse=True)
def no_waiting(): "Load no module of Roost."

@pytest.fixture(scope="session", autouse=True)
def short_measurements(): "Load no module of Roost."

@pytest.mark.sweep([1, 2], 3, 5)
def test_sweep(seed):
    print(f"seed<{seed}>")

@pytest.mark.full
def test_long():
    pytest.skip("not installed")

def test_skips():
    pytest.skip("no broker")

@pytest.fixture
def broker():
    pytest.skip("no network")

def test_of_a_fixture_that_skips(broker):
    pass

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    raise AssertionError

@pytest.mark.filterwarnings("error")
def test_leaves_a_database_open(tmp_path):
    sqlite3.connect(tmp_path / "left.db")
    gc.collect()
"""


MODULE = "import pytest\npytest.importorskip('no_such_module')\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_probe.py").write_text(PROBE)
    (folder / "test_module.py").write_text(MODULE)
    return folder


def run(folder: Path, *arguments: str) -> str:
    """Run the probes under the rules of the suite; return what pytest prints."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))
    }
    environ.pop("ROOST_ALLOW_SKIPS", None)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:cov"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return done.stdout


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """Return what pytest prints without options; errors of a module do not stop it."""
    return run(folder, "--continue-on-collection-errors")


@pytest.fixture(scope="module")
def seed(printed: str) -> str:
    (number,) = re.findall(r"fresh seeds: --seed (\d+)", printed)
    return str(number)


def seeds(printed: str) -> list[int]:
    return sorted(int(seed) for seed in re.findall(r"seed<(\d+)>", printed))


def test_a_skip_fails_unless_it_is_marked_full(printed: str) -> None:
    assert "FAILED test_probe.py::test_skips - Skipped, but not marked full" in printed
    assert "ERROR test_probe.py::test_of_a_fixture_that_skips - Skipped, but not" in printed
    assert "ERROR test_module.py - Skipped, but not marked full" in printed
    assert "SKIPPED [1] test_probe.py:15: only with --full" in printed
    assert "XFAIL test_probe.py::test_known" in printed


def test_a_database_that_is_left_open_fails(printed: str) -> None:
    assert "FAILED test_probe.py::test_leaves_a_database_open" in printed
    assert "unclosed database" in printed


def test_two_processes_repeat_the_seeds_and_skips_can_be_allowed(
    folder: Path, printed: str, seed: str
) -> None:
    assert len(seeds(printed)) == 5 and {1, 2} < set(seeds(printed))
    again = run(folder, "-n", "2", "--seed", seed, "--allow-skips")
    assert seeds(again) == seeds(printed)
    for reason in ("no broker", "no network", "could not import 'no_such_module'"):
        assert re.search(f"SKIPPED .* {reason}", again), reason


def test_more_seeds_and_long_tests_with_full(folder: Path, printed: str, seed: str) -> None:
    other = str(int(seed) + 1)
    full = run(folder, "--full", "--seed", other, "test_probe.py", "-k", "long or sweep")
    assert len(seeds(full)) == 7
    assert set(seeds(full)) & set(seeds(printed)) == {1, 2}, "another number draws other seeds"
    assert re.search(r"SKIPPED .* not installed", full)
    assert re.search(r"7 passed, 1 skipped.* in ", full)
