"""A Spark session with the settings that Roost's benchmarks use.

``engine.spark`` in the configuration overrides each of them; ``docs/design`` has the measurements.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

from roost.engine.encryption import SECRET, check_encrypted, confidential, encryption_settings
from roost.engine.kafka_jars import kafka_settings
from roost.errors import ConfigError, RoostError

JAVA_MIN = 17
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
# To send bytes to Python, a thread of the JVM copies them to a buffer outside the heap. It keeps
# the buffer, unless that is larger than this: a dozen threads with blocks of 40 MB each fill the
# memory that the JVM has for such buffers.
BUFFERS = f"-Djdk.nio.maxCachedBufferSize={1 << 20}"

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": (
        f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()} {BUFFERS}"
    ),
    "spark.executor.extraJavaOptions": BUFFERS,
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # Exactly Int.MaxValue skips a per-row size computation on the way into Python.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.python.unix.domain.socket.enabled": "true",
    # Loads numpy, numba and the kernels once, before it forks workers.
    "spark.python.daemon.module": "roost.engine.daemon",
    # Blocks are dense binary columns: compression costs more than it saves on one host.
    "spark.shuffle.compress": "false",
    # Leaves memory to Python: matches never pass through the JVM.
    "spark.driver.memory": "512m",
    # A task whose home is busy soon runs elsewhere: Spark's 3 seconds are many batches.
    "spark.locality.wait": "300ms",
    # Tasks are idempotent: retry those of a lost executor.
    "spark.task.maxFailures": "4",
    "spark.driver.host": "127.0.0.1",
}


def java_home() -> str | None:
    """Return ``JAVA_HOME`` from the environment or from ``script/bootstrap``, if either set it."""
    if os.environ.get("JAVA_HOME"):
        return os.environ["JAVA_HOME"]
    environment = Path(sys.prefix) / "roost-env.sh"
    if environment.exists():
        for line in environment.read_text(encoding="utf-8").splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            if name == "JAVA_HOME":
                return value.strip("'\"")
    return None


def check_java() -> str:
    """Return the command that runs Java; raise :class:`RoostError` if it is missing or too old."""
    home = java_home()
    if home is not None:
        os.environ["JAVA_HOME"] = home
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise RoostError(f"Java {JAVA_MIN} or newer is needed: run script/bootstrap, or install it")
    done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    words = (done.stderr or done.stdout).split('"')
    found = words[1] if len(words) > 1 else "0"
    if int(found.split(".")[0] or 0) < JAVA_MIN:
        raise RoostError(f"Java {JAVA_MIN} or newer is needed, found {found} at {java}")
    return java


def make_session(
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    kafka: bool = False,
    encrypt: bool = False,
) -> SparkSession:
    """Return the active Spark session, or start one.

    ``settings`` override Roost's own. ``kafka`` adds the Kafka connector, fetched from Maven
    Central on first use unless the settings name jars. ``encrypt`` authenticates processes and
    encrypts network traffic and spilled data; raises :class:`ConfigError` if the settings, the
    cluster or an active session prevent it.
    """
    master, settings = master or "local[*]", settings or {}
    encryption = encryption_settings(master, settings) if encrypt else {}
    java = check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # By default, each of the JVM's many threads may hold a malloc arena of its own.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    connector = kafka_settings(settings, java) if kafka else {}
    chosen: dict[str, Any] = {**SETTINGS, **connector, **settings, **encryption}
    _start_java(master, chosen)
    builder = SparkSession.builder.appName("roost").master(master).config(map=chosen)
    try:
        session = builder.getOrCreate()
    except (Py4JJavaError, IllegalArgumentException) as error:
        if encrypt and SECRET in str(error):
            accepted = f"the cluster's own {SECRET}, in engine.spark or in spark-defaults.conf"
            raise ConfigError("engine.encrypt", True, accepted) from None
        raise
    if encrypt:
        check_session(session)
    return session


def check_session(session: SparkSession) -> None:
    """Raise :class:`ConfigError` unless the session encrypts."""
    check_encrypted(dict(session.sparkContext.getConf().getAll()))


def _start_java(master: str, settings: Mapping[str, str]) -> None:
    """Start the JVM without the settings that hold secrets.

    PySpark puts all settings on the JVM's command line, which every user of the host can read.
    Settings made once the JVM runs pass through its authenticated connection.
    """
    shown = {key: value for key, value in settings.items() if not confidential(key)}
    if len(shown) < len(settings):
        conf = SparkConf(loadDefaults=False).setMaster(master).setAll(list(shown.items()))
        SparkContext._ensure_initialized(conf=conf)  # does nothing if the JVM runs already
