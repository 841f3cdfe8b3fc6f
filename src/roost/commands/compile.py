"""Compile all numba loops; numba caches the machine code beside the sources.

Without this step the first batch of a fresh installation waits for the compiler in every worker.
A package with loops has a module ``compilation``; its ``compile_loops`` calls each of them with the
argument types of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path


def compile_all() -> Iterator[tuple[str, float]]:
    """Compile the loops of each package; yield its name and the seconds taken."""
    package = Path(__file__).parents[1]
    # numba cannot load an index that names a class of another version.
    for path in package.rglob("*.nb[ci]"):
        path.unlink(missing_ok=True)
    for module in sorted(package.glob("*/compilation.py")):
        started = time.perf_counter()
        import_module(f"roost.{module.parent.name}.compilation").compile_loops()
        yield module.parent.name, time.perf_counter() - started
