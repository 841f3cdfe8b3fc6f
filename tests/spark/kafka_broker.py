"""A real Kafka broker for tests, from nothing but Java and Maven Central.

Problem: a test against a mock proves nothing about Kafka, and a broker that somebody must install
first is a broker that is never there. Idea: PySpark ships Ivy, which fetches the server's jars and
everything they need, once, into a cache; one JVM then is broker and controller (KRaft) on loopback.

It does not do replication, security or more than one node.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

KAFKA_VERSION = "4.3.1"
_SERVER = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    # The server logs through slf4j 1.7 and brings no backend; without one it fails in silence.
    "org.slf4j:slf4j-simple:1.7.36",
)
_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_TOKENS = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
_CLUSTER = "cm9vc3QtdGVzdC1ub2RlMQ"
_READY = "Kafka Server started"
# The short session timeout is for restarts: until it has passed, the controller takes a broker that
# comes back for a second one with the same id, and turns it away.
_SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
group.initial.rebalance.delay.ms=0
num.network.threads=2
num.io.threads=2
background.threads=2
log.cleaner.dedupe.buffer.size=4194304
"""
_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")


class BrokerUnavailable(Exception):
    """Java, Maven Central or the broker itself cannot be had here; the message says which."""


def find_java() -> str:
    """Return the ``java`` command: that of ``JAVA_HOME``, else the one on the path."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    found = found or shutil.which("java")
    if found is None:
        raise BrokerUnavailable("no java on the path and no JAVA_HOME")
    return found


def fetch_jars(
    name: str, coordinates: Iterable[str], *, overrides: Iterable[str] = (), timeout_s: float = 300
) -> list[Path]:
    """Fetch jars and all that they need from Maven Central, once.

    Parameters
    ----------
    name
        Folder in the cache, such as ``kafka-4.3.1``: change it when the coordinates change.
    coordinates
        ``organisation:module:revision`` each.
    overrides
        Coordinates too: revisions to take whatever else asks for those modules.
    timeout_s
        How long the whole fetch may take.

    Returns
    -------
    list of pathlib.Path
        The jars, sorted by name.
    """
    home = _cache()
    target = home / name
    if not target.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=f".{name}-") as scratch:
            _run_ivy(Path(scratch), coordinates, overrides, timeout_s)
            _publish(Path(scratch) / "jars", target)
    return sorted(target.glob("*.jar"))


def connector_jars() -> list[Path]:
    """Fetch Spark's Kafka connector, for ``spark.jars``.

    The revision of the installed Spark where Maven Central has it; otherwise the newest older one
    that was seen to work with Spark 4.3, with the only release of its helper module to be had.
    """
    spark = importlib.metadata.version("pyspark")
    older = "spark-kafka-4.2.0"
    if not (_cache() / older).is_dir():
        try:
            return _not_in_spark(fetch_jars(f"spark-kafka-{spark}", [f"{_CONNECTOR}:{spark}"]))
        except BrokerUnavailable:
            pass
    overrides = [f"{_TOKENS}:4.0.0"]
    return _not_in_spark(fetch_jars(older, [f"{_CONNECTOR}:4.2.0"], overrides=overrides))


def _not_in_spark(jars: list[Path]) -> list[Path]:
    """Leave out what Spark brings itself, in its own revision."""

    def module(jar: Path) -> str:
        return re.split(r"-\d", jar.name)[0]

    own = {module(jar) for jar in _ivy_jar().parent.glob("*.jar")}
    return [jar for jar in jars if module(jar) not in own]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roost"


def _publish(jars: Path, target: Path) -> None:
    """Rename into place, so that a folder in the cache is always complete."""
    try:
        jars.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _run_ivy(
    scratch: Path, coordinates: Iterable[str], overrides: Iterable[str], timeout_s: float
) -> None:
    (scratch / "ivy.xml").write_text(_ivy_module(coordinates, overrides))
    command = [find_java(), f"-Duser.home={scratch}", "-jar", str(_ivy_jar())]
    command += ["-cache", str(scratch / "cache"), "-ivy", str(scratch / "ivy.xml")]
    command += ["-retrieve", f"{scratch}/jars/[artifact]-[revision](-[classifier]).[ext]"]
    command += ["-types", "jar", "bundle", "-warn"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as slow:
        raise BrokerUnavailable(f"Maven Central took more than {timeout_s:.0f} s") from slow
    if done.returncode != 0:
        raise BrokerUnavailable(f"Maven Central did not give {_first_problem(done.stdout)}")


def _ivy_module(coordinates: Iterable[str], overrides: Iterable[str]) -> str:
    lines = ['<ivy-module version="2.0"><info organisation="roost" module="tests"/><dependencies>']
    for org, module, revision in (coordinate.split(":") for coordinate in coordinates):
        lines.append(
            f'<dependency org="{org}" name="{module}" rev="{revision}" conf="*->default"/>'
        )
    for org, module, revision in (override.split(":") for override in overrides):
        lines.append(f'<override org="{org}" module="{module}" rev="{revision}"/>')
    return "\n".join([*lines, "</dependencies></ivy-module>"])


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    found = sorted(Path(spec.origin).parent.glob("jars/ivy-*.jar")) if spec and spec.origin else []
    if not found:
        raise BrokerUnavailable("this PySpark has no Ivy jar")
    return found[-1]


def _first_problem(output: str) -> str:
    lines = [line.strip(": \t") for line in output.splitlines()]
    told = [line for line in lines if "not found" in line.lower() or "exception" in line.lower()]
    return told[0].removeprefix("module not found: ") if told else " ".join(lines)[-300:]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


class KafkaBroker:
    """One Kafka node on loopback, with its data in a temporary folder.

    Parameters
    ----------
    timeout_s
        How long a start may take before the broker counts as unavailable.

    Examples
    --------
    >>> with KafkaBroker() as broker:  # doctest: +SKIP
    ...     broker.create_topic("points", partitions=2)
    ...     print(broker.bootstrap)
    """

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._port = 0
        self._java = ""
        self._classpath = ""

    @property
    def bootstrap(self) -> str:
        """Address for clients: the same before and after a restart."""
        return f"127.0.0.1:{self._port}"

    @property
    def folder(self) -> Path:
        """Where the broker keeps its data and its logs, until it is closed."""
        if self._folder is None:
            raise RuntimeError("the broker is not open")
        return self._folder

    def __enter__(self) -> Self:
        self._java = find_java()
        jars = fetch_jars(f"kafka-{KAFKA_VERSION}", _SERVER)
        self._classpath = os.pathsep.join(map(str, jars))
        self._folder = Path(tempfile.mkdtemp(prefix="roost-kafka-"))
        try:
            self._format()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def create_topic(self, name: str, *, partitions: int = 1, **settings: str) -> None:
        """Create a topic; dots in the names of its settings are written as underscores."""
        from confluent_kafka.admin import AdminClient, NewTopic

        config = {key.replace("_", "."): value for key, value in settings.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_topics([topic])[name].result(timeout=self._timeout_s)

    def start(self) -> None:
        """Start, or start again after `kill`, on the same ports and data."""
        folder = self.folder
        log = folder / f"server-{uuid.uuid4().hex[:8]}.log"
        command = [self._java, *_JVM, "-cp", self._classpath]
        command += ["kafka.Kafka", str(folder / "server.properties")]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder
            )
        self._wait_until_ready(log)

    def kill(self) -> None:
        """End the broker as a crash would: SIGKILL, nothing flushed, nothing said."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the broker and delete its data."""
        self._end(signal.SIGKILL)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def _format(self) -> None:
        folder = self.folder
        self._port, controller = _free_ports(2)
        properties = folder / "server.properties"
        properties.write_text(
            _SETTINGS.format(port=self._port, controller=controller, data=folder / "data")
        )
        command = [self._java, *_JVM, "-cp", self._classpath, "kafka.tools.StorageTool"]
        command += ["format", "--cluster-id", _CLUSTER, "--config", str(properties)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise BrokerUnavailable(f"Kafka cannot format its folder: {done.stderr[-500:]}")

    def _wait_until_ready(self, log: Path) -> None:
        """Wait for the broker's own word; polling only decides how soon we notice."""
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_s
        while _READY not in (said := log.read_text(errors="replace")):
            if self._process.poll() is not None:
                raise BrokerUnavailable(f"Kafka ended at start: {said[-1000:]}")
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"Kafka not ready in {self._timeout_s:.0f} s: {said[-500:]}"
                )
            time.sleep(0.05)
