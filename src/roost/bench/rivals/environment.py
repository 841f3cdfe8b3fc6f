"""Python environments for systems that cannot run in ours.

Apache Sedona needs an older Spark, DuckDB's spatial extension an older DuckDB. Each has a virtual
environment in the user's cache folder, which pip creates once; a marker file is written last, so
an interrupted installation is repeated. DuckDB's environment also sees the packages of ours, after
its own, because its code imports Roost. If something is unavailable (no network, no such jar),
:class:`Unavailable` carries the reason in one sentence.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.engine import baselines
from roost.engine.kafka_jars import cache_dir

INSTALL_SECONDS_MAX = 900.0
PROBE_SECONDS_MAX = 300.0
DUCKDB_SPATIAL = "1.5.5"


class Unavailable(Exception):
    """A system cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class SedonaRelease:
    """A release of Sedona, with the versions of Spark and GeoTools that it requires."""

    sedona: str
    spark: str
    geotools: str

    @property
    def packages(self) -> str:
        """Maven coordinates of its jars."""
        series = ".".join(self.spark.split(".")[:2])
        shaded = f"org.apache.sedona:sedona-spark-shaded-{series}_2.13:{self.sedona}"
        return f"{shaded},org.datasyslab:geotools-wrapper:{self.geotools}"


# Newest first; the first whose jars can be downloaded and that starts is used.
SEDONA_RELEASES = (
    SedonaRelease("1.9.0", "4.1.1", "1.9.0-33.5"),
    SedonaRelease("1.8.1", "4.0.5", "1.8.1-33.1"),
    SedonaRelease("1.8.0", "4.0.5", "1.8.0-33.1"),
)


def make(folder: Path, requirements: tuple[str, ...], *, inherit: bool = False) -> Path:
    """Create a virtual environment unless it exists; return its Python.

    With ``inherit``, it also sees the packages of our environment, after its own.
    """
    python = folder / "bin" / "python"
    marker = folder / "complete"
    paths = sysconfig.get_paths()
    inherited = [paths["purelib"], paths["platlib"]] if inherit else []
    contents = "\n".join([*requirements, *inherited])
    if marker.is_file() and marker.read_text() == contents:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"no virtual environment could be created: {error}") from error
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    run(command, INSTALL_SECONDS_MAX, f"pip could not install {' '.join(requirements)}: ")
    if inherit:
        (own_packages(folder) / "roost.pth").write_text("\n".join(inherited))
    marker.write_text(contents)
    return python


def own_packages(folder: Path) -> Path:
    """Return the folder of a virtual environment's packages."""
    places = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", vars=places))


def run(command: list[str], seconds_max: float, prefix: str = "", **options: Any) -> None:
    """Run a command; a failure becomes :class:`Unavailable` with its most specific line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds_max, check=False, **options
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{prefix}not done in {seconds_max:.0f} s") from error
    if done.returncode != 0:
        raise Unavailable(prefix + error_line(done.stderr or done.stdout))


def error_line(text: str) -> str:
    """Return the most specific line: a missing jar, else the last error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = [line.strip(": ") for line in lines if "unresolved dependency" in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    best = missing[:1] or errors[-1:] or lines[-1:] or ["no message"]
    return best[0][:300]


def sedona_command() -> list[str]:
    """Return the start of Sedona's command line, in the newest environment that works.

    The file ``sedona-choice`` in the cache stores the choice; delete it to choose again.
    """
    chosen = cache_dir() / "sedona-choice"
    newest, known = SEDONA_RELEASES[0], {release.sedona: release for release in SEDONA_RELEASES}
    if chosen.is_file():
        seen, _, used = chosen.read_text().partition(" ")
        if seen == newest.sedona and used in known:
            return _sedona(known[used])
    reasons = []
    for release in SEDONA_RELEASES:
        try:
            command = _probe_sedona(release)
        except Unavailable as error:
            reasons.append(f"{release.sedona} on Spark {release.spark}: {error}")
        else:
            chosen.write_text(f"{newest.sedona} {release.sedona}")
            return command
    raise Unavailable("; ".join(reasons))


def _probe_sedona(release: SedonaRelease) -> list[str]:
    # Our own Spark downloads the jars first: an environment is useless without them.
    fetch = [sys.executable, *_sedona_arguments(release), "--fetch"]
    run(fetch, PROBE_SECONDS_MAX, "its jars cannot be downloaded from Maven Central: ")
    command = _sedona(release)
    run([*command, "--probe"], PROBE_SECONDS_MAX, "it did not start: ")
    return command


def _sedona_arguments(release: SedonaRelease) -> list[str]:
    script = Path(baselines.__file__).parent / "sedona.py"
    return [str(script), "--packages", release.packages, "--ivy", str(cache_dir() / "ivy")]


def _sedona(release: SedonaRelease) -> list[str]:
    requirements = (f"pyspark=={release.spark}", "setuptools<81")
    python = make(cache_dir() / f"sedona-{release.sedona}", requirements)
    return [str(python), *_sedona_arguments(release)]


def duckdb_spatial_command() -> list[str]:
    """Return the start of DuckDB's command line with its spatial extension."""
    packages = ("duckdb", "duckdb-extension-spatial")
    requirements = tuple(f"{name}=={DUCKDB_SPATIAL}" for name in packages)
    python = make(cache_dir() / f"duckdb-spatial-{DUCKDB_SPATIAL}", requirements, inherit=True)
    return [str(python), "-m", "roost.bench.rivals.duckdb_rival"]
