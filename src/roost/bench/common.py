"""The frame of all benchmarks: result file, environment, plots and console table.

A benchmark measures and returns :class:`Measured`; :func:`write` does the rest. Every result
contains the processor, cores, memory and versions, and nothing that names a person, a host or a
folder. The JSON file is written before the plots, which need matplotlib.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from roost.errors import RoostError

CORES = 2  # of each measured system
PACKAGES = ("roost", "pyspark", "numpy", "numba", "pyarrow", "shapely", "duckdb")

Row = dict[str, Any]
Line = Sequence[tuple[float, float]]
Bars = Mapping[str, float]


@dataclass(frozen=True)
class Plot:
    """Panels of named lines of ``(x, y)`` pairs, or of named bars of ``{group: value}``."""

    title: str
    panels: Mapping[str, Mapping[str, Line | Bars]]
    columns: int = 1
    log: bool = False

    def save(self, path: Path) -> None:
        """Draw the plot as PNG."""
        from matplotlib.figure import Figure

        rows = -(-len(self.panels) // self.columns)
        size = (8 if self.columns == 1 else 6 * self.columns, 4.5 if rows == 1 else 3.2 * rows)
        # A bare Figure draws with Agg and needs no display; pyplot would look for one.
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(self.title)
        names = list(dict.fromkeys(name for panel in self.panels.values() for name in panel))
        for number, (title, panel) in enumerate(self.panels.items(), start=1):
            axes = figure.add_subplot(rows, self.columns, number)
            bars = [values for values in panel.values() if isinstance(values, Mapping)]
            groups = list(dict.fromkeys(group for values in bars for group in values))
            width = 0.8 / len(names)
            for name, values in panel.items():
                k = names.index(name)  # the same colour in every panel
                style: Any = {"label": name, "color": f"C{k}"}
                if isinstance(values, Mapping):
                    at = [groups.index(group) + k * width for group in values]
                    axes.bar(at, list(values.values()), width, **style)
                else:
                    axes.plot(*zip(*values, strict=True), **style)
            if groups:
                middle = width * (len(names) - 1) / 2
                axes.set_xticks([k + middle for k in range(len(groups))], groups)
            if self.log:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set_title(title)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        figure.savefig(path, dpi=120)


class UnequalResults(RoostError):
    """Two systems returned different results for the same query."""


@dataclass(frozen=True)
class Measured:
    """What a benchmark returns.

    ``table`` has the columns of the console table: heading, then key of the rows and format.
    """

    rows: list[Row]  # metrics of each case
    summary: Row  # of the benchmark; ``failed`` lists reasons
    plots: Mapping[str, Plot]  # by the suffix that their file names add to the result's
    table: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    table_rows: Sequence[Row] | None = None  # if not ``rows``
    more: Row = field(default_factory=dict)  # further keys of the result
    environment: Row = field(default_factory=dict)  # further keys of its environment


def write(
    name: str,
    quick: bool,
    path: Path,
    described: Row,
    measured: Measured,
    *,
    extend: bool = False,
) -> None:
    """Write the result of a benchmark as JSON, its plots beside it, and print its table.

    With ``extend``, what the file has from other experiments remains.
    """
    result = {
        "bench": name,
        "quick": quick,
        "rows": measured.rows,
        "environment": {**described, **measured.environment},
        "summary": measured.summary,
        **measured.more,
    }
    if extend and path.is_file():
        result = _extended(json.loads(path.read_text()), result)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    for suffix, plot in measured.plots.items():
        plot.save(path.with_name(f"{path.stem}{suffix}.png"))
    if measured.table:
        table = Table(*measured.table)
        for row in measured.rows if measured.table_rows is None else measured.table_rows:
            table.add_row(*(_cell(row.get(key), form) for key, form in measured.table.values()))
        Console(stderr=True).print(table)


def _extended(known: Row, new: Row) -> Row:
    """Return both results; the new one has priority, except where it has nothing."""
    both = {key: known[key] | new[key] for key in ("summary", "seconds") if key in known}
    return known | {key: value for key, value in new.items() if value != []} | both


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def environment() -> Row:
    """Describe the machine and the versions that a result is measured with."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": java_version(),
        "packages": {d.name: d.version for d in metadata.distributions() if d.name in PACKAGES},
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def processor() -> str:
    """Return the processor's name, or the architecture if the system does not name it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def java_version() -> str | None:
    """Return the version of the Java that Spark would start, None if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    quoted = re.search(r'"([^"]+)"', done.stderr)
    return quoted.group(1) if quoted else None
