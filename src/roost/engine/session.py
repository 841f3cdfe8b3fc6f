"""A Spark session with the settings that Roost was measured with.

Every setting can be overridden by ``engine.spark`` in the configuration. See ``docs/design`` for
what each one buys.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession

from roost.engine.encryption import (
    SECRET,
    check_encrypted,
    confidential,
    encryption_settings,
)
from roost.engine.kafka_jars import kafka_settings
from roost.errors import ConfigError, RoostError

JAVA_MIN = 17

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # Exactly Int.MaxValue skips a per-row size computation on the way into Python.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.python.unix.domain.socket.enabled": "true",
    # Loads numpy, numba and the kernel once, before workers are forked from it.
    "spark.python.daemon.module": "roost.engine.daemon",
    # Blocks are dense binary columns: compressing them costs more than it saves on one host.
    "spark.shuffle.compress": "false",
    # A driver heap that leaves memory to Python; matches never pass through the JVM.
    "spark.driver.memory": "512m",
    # Any executor may die in a batch; the batch is repeated from its intent.
    "spark.task.maxFailures": "4",
    "spark.driver.host": "127.0.0.1",
}


def java_home() -> str | None:
    """Java that bootstrap found, or the one on the path; None leaves it to Spark."""
    if os.environ.get("JAVA_HOME"):
        return os.environ["JAVA_HOME"]
    noted = Path(sys.prefix) / "roost-env.sh"
    if noted.exists():
        for line in noted.read_text(encoding="utf-8").splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            if name == "JAVA_HOME":
                return value.strip("'\"")
    return None


def check_java() -> str:
    """Find the command that runs Java.

    Raises
    ------
    RoostError
        If there is none, or one too old: in one sentence, before Spark says it in fifty lines.
    """
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
    """Start, or find, the Spark session.

    Parameters
    ----------
    master
        Spark master; all local cores unless told otherwise.
    settings
        Settings that replace Roost's own.
    kafka
        Whether the Kafka connector is needed: fetched from Maven Central on first use, unless
        the settings name jars.
    encrypt
        Whether processes authenticate each other and encrypt what they send and spill.

    Raises
    ------
    ConfigError
        If it is to encrypt and the settings, the cluster or a session that is already there
        do not let it.
    """
    master = master or "local[*]"
    encryption = encryption_settings(master, settings or {}) if encrypt else {}
    java = check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # One pool of memory for each of the JVM's many threads would hold on to too much of it.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    chosen = dict(SETTINGS)
    if kafka:
        chosen.update(kafka_settings(settings or {}, java))
    chosen.update(settings or {})
    chosen.update(encryption)
    _start_java(master, chosen)
    builder = SparkSession.builder.appName("roost").master(master)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except (Py4JJavaError, IllegalArgumentException) as error:
        if encrypt and SECRET in str(error):
            takes = f"the cluster's own {SECRET}, in engine.spark or in spark-defaults.conf"
            raise ConfigError("engine.encrypt", True, takes) from None
        raise
    if encrypt:
        check_session(session)
    return session


def check_session(session: SparkSession) -> None:
    """Refuse a session that does not encrypt."""
    check_encrypted(dict(session.sparkContext.getConf().getAll()))


def _start_java(master: str, settings: Mapping[str, str]) -> None:
    """Start Java before it is told any secret.

    Spark's Python side starts it with all settings on its command line, which every user of the
    host can read. What is set once it runs goes through its own, authenticated connection.
    """
    shown = {key: value for key, value in settings.items() if not confidential(key)}
    if len(shown) < len(settings):
        conf = SparkConf(loadDefaults=False).setMaster(master).setAll(list(shown.items()))
        SparkContext._ensure_initialized(conf=conf)  # does nothing where Java runs already
