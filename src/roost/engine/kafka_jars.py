"""Spark's Kafka connector, fetched when it is first needed.

Problem: the connector is not part of the Python package of Spark, and Maven Central may have none
of the running Spark's revision. Idea: Spark ships Ivy, which fetches jars and all that they need
into a cache, once; where there is no connector of the right revision, the newest older one that
was seen to work with this Spark takes its place, for as long as it is in the cache.

It does not know other repositories than Maven Central: ``spark.jars``, or ``spark.jars.packages``
with ``spark.jars.ivySettings``, among the session's settings replaces all that is done here.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyspark

from roost.errors import SourceError

CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
OLDER = "4.2.0"
# The release of the older connector's helper module that is to be had.
OLDER_OVERRIDES = ("org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",)
# Spark has it already, and it is the larger half of what the connector asks for.
EXCLUDED = ("org.apache.hadoop",)
SETTINGS = ("spark.jars", "spark.jars.packages")


class _NotThereError(SourceError):
    """Maven Central has no such jar, or cannot be reached."""


def kafka_settings(given: Mapping[str, str], java: str) -> dict[str, str]:
    """Find the settings that bring the connector into a session.

    Parameters
    ----------
    given
        Settings of the user; one that names jars itself is left alone.
    java
        Command that runs Java.

    Raises
    ------
    SourceError
        If there is no connector to be had.
    """
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
    return _not_in_spark(jars)


def _own_or_older(java: str) -> list[Path]:
    version = pyspark.__version__
    older = f"spark-{version}-kafka-{OLDER}"
    if not (_cache() / older).is_dir():
        try:
            own = [f"{CONNECTOR}:{version}"]
            return fetch_jars(f"spark-kafka-{version}", own, java, excluded=EXCLUDED)
        except _NotThereError:
            pass
    return fetch_jars(
        older,
        [f"{CONNECTOR}:{OLDER}"],
        java,
        overrides=OLDER_OVERRIDES,
        excluded=EXCLUDED,
    )


def fetch_jars(
    name: str,
    coordinates: Iterable[str],
    java: str,
    *,
    overrides: Iterable[str] = (),
    excluded: Iterable[str] = (),
    timeout_s: float = 300.0,
) -> list[Path]:
    """Fetch jars and all that they need from Maven Central, once.

    Parameters
    ----------
    name
        Folder in the cache, such as ``kafka-4.3.1``: change it when the coordinates change.
    coordinates
        ``organisation:module:revision`` each.
    java
        Command that runs Java.
    overrides
        Coordinates too: revisions to take whatever else asks for those modules.
    excluded
        Organisations whose modules are left out.
    timeout_s
        How long the whole fetch may take.

    Returns
    -------
    list of pathlib.Path
        The jars, sorted by name.

    Raises
    ------
    SourceError
        If some jar is not to be had; nothing is left in the cache.
    """
    home = _cache()
    target = home / name
    if not target.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=f".{name}-") as scratch:
            module = _ivy_module(coordinates, overrides, excluded)
            _run_ivy(Path(scratch), module, java, timeout_s)
            _publish(Path(scratch) / "jars", target)
    return sorted(target.glob("*.jar"))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roost"


def _spark_jars() -> Path:
    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    return Path(home) / "jars"


def _not_in_spark(jars: list[Path]) -> list[Path]:
    """Leave out what Spark brings itself, in its own revision."""

    def module(jar: Path) -> str:
        return re.split(r"-\d", jar.name)[0]

    own = {module(jar) for jar in _spark_jars().glob("*.jar")}
    return [jar for jar in jars if module(jar) not in own]


def _publish(jars: Path, target: Path) -> None:
    """Rename into place, so that a folder in the cache is always complete."""
    try:
        jars.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _ivy_module(
    coordinates: Iterable[str], overrides: Iterable[str], excluded: Iterable[str]
) -> str:
    lines = ['<ivy-module version="2.0"><info organisation="roost" module="jars"/><dependencies>']
    for org, module, revision in (coordinate.split(":") for coordinate in coordinates):
        lines.append(
            f'<dependency org="{org}" name="{module}" rev="{revision}" conf="*->default"/>'
        )
    lines += [f'<exclude org="{org}"/>' for org in excluded]
    for org, module, revision in (override.split(":") for override in overrides):
        lines.append(f'<override org="{org}" module="{module}" rev="{revision}"/>')
    return "\n".join([*lines, "</dependencies></ivy-module>"])


def _run_ivy(scratch: Path, module: str, java: str, timeout_s: float) -> None:
    ivy = sorted(_spark_jars().glob("ivy-*.jar"))
    if not ivy:
        raise SourceError(f"no Ivy among the jars of Spark in {_spark_jars()}")
    (scratch / "ivy.xml").write_text(module, encoding="utf-8")
    command = [java, f"-Duser.home={scratch}", "-jar", str(ivy[-1])]
    command += ["-cache", str(scratch / "cache"), "-ivy", str(scratch / "ivy.xml")]
    command += ["-retrieve", f"{scratch}/jars/[artifact]-[revision](-[classifier]).[ext]"]
    command += ["-types", "jar", "bundle", "-warn"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as slow:
        raise SourceError(f"Maven Central took more than {timeout_s:.0f} s") from slow
    if done.returncode != 0:
        raise _NotThereError(f"Maven Central did not give {_first_problem(done.stdout)}")


def _first_problem(output: str) -> str:
    lines = [line.strip(": \t") for line in output.splitlines()]
    told = [line for line in lines if "not found" in line.lower() or "exception" in line.lower()]
    return told[0].removeprefix("module not found: ") if told else " ".join(lines)[-300:]
