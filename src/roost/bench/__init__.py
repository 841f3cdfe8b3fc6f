"""Benchmarks, one module each, in the frame of :mod:`roost.bench.common`.

A module's ``run(quick)`` measures and returns :class:`roost.bench.common.Measured`.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from roost.errors import ConfigError, RoostError

NAMES = (
    "peers",
    "latency",
    "load",
    "trio",
    "swarm",
    "hotspots",
    "scale",
    "snapshot",
    "guard",
    "reconfigure",
    "strategies",
    "operators",
    "synopsis",
    "elastic",
    "memory",
    "dodo",
    "recommend",
)

# All draw plots.
PACKAGES: dict[str, tuple[str, ...]] = {name: ("matplotlib",) for name in NAMES}
PACKAGES |= {name: ("duckdb", "matplotlib") for name in ("peers", "snapshot", "synopsis")}


def run_bench(name: str, *, quick: bool, json_path: Path | None) -> int:
    """Run a benchmark by name; returns the exit code, 1 if a part of it failed."""
    if name not in NAMES:
        raise ConfigError("bench", name, ", ".join(NAMES))
    path = json_path or Path("bench-results") / f"{name}.json"
    check_packages(name)
    check_writable(path.parent, "results", "--json names another place")
    from roost.bench.common import environment, write

    described = environment()
    measured = import_module(f"roost.bench.{name}").run(quick)
    write(name, quick, path, described, measured)
    failed = measured.summary.get("failed", [])
    for reason in failed:
        print(f"roost bench {name}: failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


def check_packages(name: str) -> None:
    """Refuse a benchmark whose packages are missing, before it has measured anything."""
    missing = [package for package in PACKAGES[name] if find_spec(package) is None]
    if missing:
        raise RoostError(
            f"roost bench {name} needs {' and '.join(missing)}: "
            "run script/bootstrap --bench, or install roost[bench]"
        )


def check_writable(folder: Path, what: str, remedy: str) -> None:
    """Refuse a folder that cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RoostError(
            f"{what} cannot be written to {folder}: {error.strerror}; {remedy}"
        ) from error
