"""Fetching of Spark's Kafka connector from Maven Central.

The connector is not part of the ``pyspark`` package, and Maven Central may not have one of the
running Spark's version. Spark ships Ivy, which downloads jars with their dependencies into a cache
once. If no connector of the right version exists, the newest older one that was tested with this
Spark is used, as long as it is in the cache.

For other repositories, set ``spark.jars``, or ``spark.jars.packages`` with
``spark.jars.ivySettings``, in ``engine.spark``; nothing is fetched here then.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark

from roost.errors import SourceError

CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
OLDER = "4.2.0"
# The only published version of the older connector's helper module.
OLDER_OVERRIDES = ("org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",)
# Part of Spark already, and the larger half of the connector's dependencies.
EXCLUDED = ("org.apache.hadoop",)
SETTINGS = ("spark.jars", "spark.jars.packages")
TIMEOUT_S = 300.0


class _NotFoundError(SourceError):
    """Maven Central has no such jar, or cannot be reached."""


def kafka_settings(given: Mapping[str, str], java: str) -> dict[str, str]:
    """Return the settings that add the connector, none if the user's, ``given``, name jars."""
    if any(name in given for name in SETTINGS):
        return {}
    return {"spark.jars": ",".join(map(str, connector_jars(java)))}


def connector_jars(java: str) -> list[Path]:
    """Fetch the connector of the running Spark, or the newest older one that works with it."""
    try:
        jars = _own_or_older(java)
    except SourceError as error:
        raise SourceError(
            f"no Kafka connector for Spark {pyspark.__version__}: {error}; make Maven Central "
            'reachable, or name the jars with engine.spark = {"spark.jars" = "…"}'
        ) from error
    # Jars that Spark ships stay in Spark's own version.
    own = {_module(jar) for jar in _spark_jars().glob("*.jar")}
    return [jar for jar in jars if _module(jar) not in own]


def _own_or_older(java: str) -> list[Path]:
    version = pyspark.__version__
    older = f"spark-{version}-kafka-{OLDER}"
    if not (cache_dir() / older).is_dir():
        try:
            return fetch_jars(f"spark-kafka-{version}", [f"{CONNECTOR}:{version}"], java)
        except _NotFoundError:
            pass
    return fetch_jars(older, [f"{CONNECTOR}:{OLDER}"], java, OLDER_OVERRIDES)


def fetch_jars(
    name: str, coordinates: Sequence[str], java: str, overrides: Sequence[str] = ()
) -> list[Path]:
    """Fetch jars with their dependencies from Maven Central, once; return them sorted by name.

    Coordinates are ``organisation:module:revision``; ``overrides`` replace the revisions of
    dependencies. ``name`` is the folder in the cache: change it when the coordinates change.
    Raises :class:`SourceError`, and leaves the cache unchanged, if a jar cannot be fetched.
    """
    home = cache_dir()
    target = home / name
    if not target.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=f".{name}-") as scratch:
            _run_ivy(Path(scratch), _ivy_module(coordinates, overrides), java)
            try:
                (Path(scratch) / "jars").rename(target)  # folders in the cache are complete
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    return sorted(target.glob("*.jar"))


def cache_dir() -> Path:
    """Return the user's folder of downloads: ``$XDG_CACHE_HOME/roost`` or ``~/.cache/roost``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roost"


def _spark_jars() -> Path:
    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    return Path(home) / "jars"


def _module(jar: Path) -> str:
    return re.split(r"-\d", jar.name)[0]


def _ivy_module(coordinates: Sequence[str], overrides: Sequence[str]) -> str:
    dependency = '<dependency org="{}" name="{}" rev="{}" conf="*->default"/>'
    override = '<override org="{}" module="{}" rev="{}"/>'
    lines = [
        '<ivy-module version="2.0"><info organisation="roost" module="jars"/><dependencies>',
        *(dependency.format(*each.split(":")) for each in coordinates),
        *(f'<exclude org="{org}"/>' for org in EXCLUDED),
        *(override.format(*each.split(":")) for each in overrides),
        "</dependencies></ivy-module>",
    ]
    return "\n".join(lines)


def _run_ivy(scratch: Path, module: str, java: str) -> None:
    ivy = sorted(_spark_jars().glob("ivy-*.jar"))
    if not ivy:
        raise SourceError(f"no Ivy jar in {_spark_jars()}")
    (scratch / "ivy.xml").write_text(module, encoding="utf-8")
    command = [java, f"-Duser.home={scratch}", "-jar", str(ivy[-1])]
    command += ["-cache", str(scratch / "cache"), "-ivy", str(scratch / "ivy.xml")]
    command += ["-retrieve", f"{scratch}/jars/[artifact]-[revision](-[classifier]).[ext]"]
    command += ["-types", "jar", "bundle", "-warn"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            f"Maven Central did not complete the download within {TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode != 0:
        raise _NotFoundError(f"Maven Central did not provide {_first_problem(done.stdout)}")


def _first_problem(output: str) -> str:
    lines = [line.strip(": \t") for line in output.splitlines()]
    problems = [line for line in lines if re.search("not found|exception", line, re.IGNORECASE)]
    return problems[0].removeprefix("module not found: ") if problems else " ".join(lines)[-300:]
