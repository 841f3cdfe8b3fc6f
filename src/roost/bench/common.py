"""What all benchmarks share: where they ran, their JSON, and their plots.

A figure without its machine says little, so every result carries the processor, cores, memory
and versions. Nothing that names a person, a host or a folder is recorded. Plots need matplotlib,
which comes with the ``bench`` extra; the JSON is written first and does not.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from roost.errors import RoostError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("roost", "pyspark", "numpy", "numba", "pyarrow", "shapely", "duckdb")


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that a result was measured with."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": java_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def java_version() -> str | None:
    """Return the version of the Java that Spark would start, None where there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    quoted = re.search(r'"([^"]+)"', done.stderr)
    return quoted.group(1) if quoted else None


def package_version(name: str) -> str | None:
    """Return an installed package's version, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a benchmark's result, readable and with a newline at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RoostError("plots need matplotlib: install roost[bench]") from error
    # A bare Figure draws with Agg and needs no display; pyplot would look for one.
    return Figure(figsize=(width, height), layout="constrained")


Lines = Mapping[str, Sequence[tuple[float, float]]]


def save_lines_plot(path: Path, title: str, lines: Lines) -> None:
    """Draw named lines of ``(x, y)`` pairs as PNG."""
    save_panels_plot(path, "", {title: lines})


def save_panels_plot(
    path: Path, title: str, panels: Mapping[str, Lines], *, columns: int = 1, log: bool = False
) -> None:
    """Draw several panels of named lines of ``(x, y)`` pairs as PNG."""
    rows = -(-len(panels) // columns)
    figure = _figure(8 * columns if columns == 1 else 6 * columns, 4.5 if rows == 1 else 3.2 * rows)
    figure.suptitle(title)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    all_axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes, (panel, lines) in zip(all_axes, panels.items(), strict=False):
        for name, points in lines.items():
            colour = f"C{names.index(name)}"  # the same for a line in every panel
            axes.plot([x for x, _ in points], [y for _, y in points], label=name, color=colour)
        axes.set_title(panel)
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=120)


def save_bars_plot(
    path: Path, title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> None:
    """Draw grouped bars on a logarithmic scale as PNG.

    Parameters
    ----------
    path
        The PNG.
    title
        What the bars measure.
    panels
        Panel, then group, then bar, then value.
    """
    figure = _figure(6 * max(len(panels), 1), 5)
    figure.suptitle(title)
    bars = list(dict.fromkeys(b for groups in panels.values() for g in groups.values() for b in g))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0] if panels else []
    for axes, (panel, groups) in zip(all_axes, panels.items(), strict=True):
        width = 0.8 / max(len(bars), 1)
        for k, bar in enumerate(bars):
            at = [g + k * width for g, values in enumerate(groups.values()) if bar in values]
            heights = [values[bar] for values in groups.values() if bar in values]
            if at:
                # The same colour for a bar in every panel, also where others are missing.
                axes.bar(at, heights, width, label=bar, color=f"C{k}")
        middle = width * (len(bars) - 1) / 2
        axes.set_xticks([g + middle for g in range(len(groups))], list(groups))
        axes.set_yscale("log")
        axes.set_title(panel)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
