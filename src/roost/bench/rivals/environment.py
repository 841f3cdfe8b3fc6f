"""Python environments for systems that cannot live in ours.

Apache Sedona needs an older Spark, DuckDB's spatial extension an older DuckDB. Each gets a virtual
environment below the user's cache folder, created once by pip and reused; a marker file says that
it is complete, so an interrupted installation is repeated. DuckDB's environment also sees the
packages of ours, after its own, because its code imports Roost. Where something is unavailable (no
network, no such jar), :class:`Unavailable` carries one sentence of reason; the benchmark continues
without it and fails at its end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roost.engine import baselines

INSTALL_SECONDS_MAX = 900.0
PROBE_SECONDS_MAX = 300.0
DUCKDB_SPATIAL = "1.5.5"


class Unavailable(Exception):
    """A system that cannot be had here, with the reason."""


@dataclass(frozen=True, slots=True)
class SedonaRelease:
    """A release of Sedona, and the Spark it is for."""

    sedona: str
    spark: str
    geotools: str

    @property
    def packages(self) -> str:
        """Maven coordinates of its jars."""
        series = ".".join(self.spark.split(".")[:2])
        shaded = f"org.apache.sedona:sedona-spark-shaded-{series}_2.13:{self.sedona}"
        return f"{shaded},org.datasyslab:geotools-wrapper:{self.geotools}"


# The newest first; the first whose jars can be had and that starts is used.
SEDONA_RELEASES = (
    SedonaRelease("1.9.0", "4.1.1", "1.9.0-33.5"),
    SedonaRelease("1.8.1", "4.0.5", "1.8.1-33.1"),
    SedonaRelease("1.8.0", "4.0.5", "1.8.0-33.1"),
)


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for environments: ``$XDG_CACHE_HOME/roost`` or ``~/.cache/roost``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "roost"


def make(folder: Path, requirements: tuple[str, ...], *, inherit: bool = False) -> Path:
    """Make a virtual environment, or find it made; return its Python.

    Parameters
    ----------
    folder
        Where it is, or goes.
    requirements
        What pip installs.
    inherit
        Whether packages that it does not have itself are those of our environment.
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
        raise Unavailable(f"no virtual environment could be made: {error}") from error
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    run(command, INSTALL_SECONDS_MAX, f"pip could not install {' '.join(requirements)}")
    if inherit:
        (own_packages(folder) / "roost.pth").write_text("\n".join(inherited))
    marker.write_text(contents)
    return python


def own_packages(folder: Path) -> Path:
    """Return the folder where a virtual environment has its packages."""
    places = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", vars=places))


def run(command: list[str], seconds_max: float, what_failed: str) -> None:
    """Run a command; turn any failure into :class:`Unavailable` with its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds_max, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{what_failed}: not done in {seconds_max:.0f} s") from error
    if done.returncode != 0:
        raise Unavailable(f"{what_failed}: {telling_line(done.stderr or done.stdout)}")


def telling_line(text: str) -> str:
    """Return the line that tells most: a missing jar, else the last error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = [line.strip(": ") for line in lines if "unresolved dependency" in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    best = missing[:1] or errors[-1:] or lines[-1:] or ["no message"]
    return best[0][:300]


def sedona_command() -> list[str]:
    """Return the start of Sedona's command line, in the newest environment that works.

    The choice is kept in the cache; delete the file ``sedona-choice`` there to choose again.
    """
    chosen = cache_dir() / "sedona-choice"
    newest = SEDONA_RELEASES[0]
    if chosen.is_file():
        seen, _, used = chosen.read_text().partition(" ")
        known = {release.sedona: release for release in SEDONA_RELEASES}
        if seen == newest.sedona and used in known:
            return _sedona_of(known[used])
    reasons = []
    for release in SEDONA_RELEASES:
        try:
            command = _sedona_proven(release)
        except Unavailable as error:
            reasons.append(f"{release.sedona} on Spark {release.spark}: {error}")
        else:
            chosen.write_text(f"{newest.sedona} {release.sedona}")
            return command
    raise Unavailable("; ".join(reasons))


def _sedona_proven(release: SedonaRelease) -> list[str]:
    # Our own Spark resolves the jars first: cheap, and without them an environment is no use.
    fetch = [sys.executable, *_sedona_arguments(release), "--fetch"]
    run(fetch, PROBE_SECONDS_MAX, "its jars cannot be had from Maven Central")
    command = _sedona_of(release)
    run([*command, "--probe"], PROBE_SECONDS_MAX, "it did not start")
    return command


def _sedona_arguments(release: SedonaRelease) -> list[str]:
    script = Path(baselines.__file__).parent / "sedona.py"
    ivy = cache_dir() / "ivy"
    return [str(script), "--packages", release.packages, "--ivy", str(ivy)]


def _sedona_of(release: SedonaRelease) -> list[str]:
    requirements = (f"pyspark=={release.spark}", "setuptools<81")
    python = make(cache_dir() / f"sedona-{release.sedona}", requirements)
    return [str(python), *_sedona_arguments(release)]


def duckdb_spatial_command() -> list[str]:
    """Return the start of DuckDB's command line with its spatial extension."""
    requirements = (
        f"duckdb=={DUCKDB_SPATIAL}",
        f"duckdb-extension-spatial=={DUCKDB_SPATIAL}",
    )
    folder = cache_dir() / f"duckdb-spatial-{DUCKDB_SPATIAL}"
    python = make(folder, requirements, inherit=True)
    return [str(python), "-m", "roost.bench.rivals.duckdb_rival"]


def own_command(module: str) -> list[str]:
    """Return the start of a command line in our own environment."""
    return [sys.executable, "-m", module]
