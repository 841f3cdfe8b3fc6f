"""``roost compile`` compiles every loop, so that no batch waits for the compiler."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import roost
from roost.cli import main
from roost.commands import compile

SOURCE = Path(roost.__file__).parent


def loops() -> dict[tuple[Path, str], str]:
    """Decorators of the functions that numba compiles, by file and name."""
    return {
        (path, node.name): ast.unparse(decorator)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if "njit" in ast.unparse(decorator)
    }


def test_every_loop_is_cached_and_releases_the_interpreter_lock() -> None:
    found = loops()
    assert len(found) > 100
    for where, decorator in found.items():
        assert decorator.startswith("njit(cache=True, nogil=True"), where


class InlinePool:
    """Stands for the pool of processes: calls the function here."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    map = staticmethod(map)


def test_the_command_compiles_each_package_with_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replace the compiler: the real one takes a minute, and its cache is in use by other tests."""
    stale, compiled = tmp_path / "loops.merge-1.py311.nbi", []
    stale.touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(compile, "compile_package", lambda name: compiled.append(name) or 1.5)
    packages = {path.relative_to(SOURCE).parts[0] for path, _ in loops()}
    packages.remove("workload")  # balance compiles its loops
    assert main(["compile"]) == 0
    assert compiled == sorted(packages)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name} compiled in 1.5 s" for name in compiled]
    assert not stale.exists()


@pytest.mark.full
def test_no_loop_is_left_to_the_first_batch(tmp_path: Path) -> None:
    """Compile into an empty cache, and look for the index file of each function."""
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "roost", "compile"], env=env, check=True)
    # The cache of a directory is named DIRECTORY_DIGEST, the index of a function MODULE.NAME-LINE.
    cached = {
        (index.parent.name.rsplit("_", 1)[0], index.name.split("-")[0])
        for index in tmp_path.rglob("*.nbi")
    }
    missing = {
        f"{path.relative_to(SOURCE)}: {name}"
        for (path, name), decorator in loops().items()
        if "inline" not in decorator and (path.parent.name, f"{path.stem}.{name}") not in cached
    }
    assert missing == set()
