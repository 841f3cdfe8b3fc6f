"""Compile all numba loops; numba caches the machine code on disk.

Without this step the first batch of a fresh installation waits for the compiler in every worker.
A package with loops has a module ``compilation``; its ``compile_loops`` calls each of them with the
argument types of the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def compile_all() -> Iterator[tuple[str, float]]:
    """Compile the loops of each package; yield its name and the seconds taken."""
    # numba cannot load an index that names a class of another version.
    for path in Path(os.environ.get("NUMBA_CACHE_DIR") or PACKAGE).rglob("*.nb[ci]"):
        path.unlink(missing_ok=True)
    packages = sorted(module.parent.name for module in PACKAGE.glob("*/compilation.py"))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield from zip(packages, pool.map(compile_package, packages), strict=True)


def compile_package(name: str) -> float:
    """Compile the loops of one package; return the seconds taken."""
    started = time.perf_counter()
    import_module(f"roost.{name}.compilation").compile_loops()
    return time.perf_counter() - started
