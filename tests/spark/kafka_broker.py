"""A real Kafka broker for tests, which needs only Java and Maven Central.

A mock proves nothing about Kafka, and tests that need an installed broker are rarely run. The
server's jars are fetched once into a cache, as the connector's are. One JVM on loopback is broker
and controller (KRaft); there is no replication and no security.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from roost.engine.kafka_jars import fetch_jars
from roost.engine.session import check_java
from roost.errors import RoostError

KAFKA_VERSION = "4.3.1"
_SERVER = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    # The server logs through slf4j 1.7 without a backend; without one it fails silently.
    "org.slf4j:slf4j-simple:1.7.36",
)
_CLUSTER = "cm9vc3QtdGVzdC1ub2RlMQ"
_READY = "Kafka Server started"
# A short session timeout, for restarts: until it expires, the controller treats a restarted broker
# as a second one with the same id and rejects it.
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
    """Java or the broker's jars are not available; the message says which."""


class BrokerFailed(Exception):
    """The broker is installed and does not run: tests must fail, not skip."""


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
        Time limit of a start.

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
        """Folder of the broker's data and logs, deleted when it is closed."""
        if self._folder is None:
            raise RuntimeError("the broker is not open")
        return self._folder

    def __enter__(self) -> Self:
        try:
            self._java = check_java()
            jars = fetch_jars(f"kafka-{KAFKA_VERSION}", _SERVER, self._java)
        except RoostError as reason:
            raise BrokerUnavailable(str(reason)) from reason
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
        """Kill the broker by SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop the broker and delete its data."""
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
            raise BrokerFailed(f"Kafka cannot format its folder: {done.stderr[-500:]}")

    def _wait_until_ready(self, log: Path) -> None:
        """Wait until the broker logs that it is ready."""
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_s
        while _READY not in (said := log.read_text(errors="replace")):
            if self._process.poll() is not None:
                raise BrokerFailed(f"Kafka ended at start: {said[-1000:]}")
            if time.monotonic() > deadline:
                raise BrokerFailed(f"Kafka not ready in {self._timeout_s:.0f} s: {said[-500:]}")
            time.sleep(0.05)


@contextmanager
def open_broker() -> Iterator[KafkaBroker]:
    """Start a broker; skip the test with the reason if none is available."""
    with ExitStack() as stack:
        try:
            broker = stack.enter_context(KafkaBroker())
        except BrokerUnavailable as reason:
            pytest.skip(str(reason))
        yield broker


def produce(broker: KafkaBroker, topic: str, *values: bytes | None, partition: int = 0) -> None:
    """Write messages to one partition of a topic, and wait until they are stored."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


@contextmanager
def reading(broker: KafkaBroker, topic: str) -> Iterator[Callable[[], bytes]]:
    """Read a topic from its start; each call waits for one more message."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "test"}
    consumer = Consumer(settings)

    def get() -> bytes:
        message = consumer.poll(120)
        assert message is not None, "no more messages"
        assert message.error() is None, message.error()
        return message.value()

    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        yield get
    finally:
        consumer.close()


def read_all(broker: KafkaBroker, topic: str) -> list[tuple[bytes, bytes]]:
    """Read the current messages of a topic of one partition: keys and values."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "test"}
    consumer = Consumer({**settings, "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = []
        while (message := consumer.poll(30)) is not None and message.error() is None:
            found.append((message.key(), message.value()))
        return found
    finally:
        consumer.close()
