"""Benchmarks, one module each; every result has ``rows``, ``environment`` and ``summary``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from roost.errors import ConfigError

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
)


def run_bench(name: str, *, quick: bool, json_path: Path | None) -> int:
    """Run a benchmark by name; returns the exit code."""
    if name not in NAMES:
        raise ConfigError("bench", name, ", ".join(NAMES))
    path = json_path or Path("bench-results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    import_module(f"roost.bench.{name}").run(quick, path)
    return 0
