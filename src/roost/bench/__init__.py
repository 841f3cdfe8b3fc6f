"""Benchmarks, one module each, in the frame of :mod:`roost.bench.common`.

A module's ``run(quick)`` measures and returns :class:`roost.bench.common.Measured`. A module with
``EXPERIMENTS`` can run some of them: ``run(quick, only)``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
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


def run_bench(name: str, *, quick: bool, json_path: Path | None, only: Sequence[str] = ()) -> int:
    """Run a benchmark by name; returns the exit code, 1 if a part of it failed.

    With ``only``, these experiments alone are measured, and added to the result file.
    """
    if name not in NAMES:
        raise ConfigError("bench", name, ", ".join(NAMES))
    path = json_path or Path("bench-results") / f"{name}.json"
    check_packages(name)
    check_writable(path.parent, "results", "--json names another place")
    from roost.bench.common import environment, write

    module, described = import_module(f"roost.bench.{name}"), environment()
    known = getattr(module, "EXPERIMENTS", ())
    for own in only:
        if own not in known:
            raise ConfigError("--only", own, ", ".join(known) or f"nothing: {name} has no parts")
    measured = module.run(quick, only) if only else module.run(quick)
    write(name, quick, path, described, measured, extend=bool(only))
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
