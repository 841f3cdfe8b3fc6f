"""Query log on a Kafka topic, for clusters where many programs send requests.

A topic with a single partition is a durable log in one order; a position is an offset. A message is
a block of requests as an Arrow stream (written by ``append``) or one request as a JSON object
(written by other programs). Any other message becomes a block with the single column ``malformed``,
and so a dead-letter record.

A large ``append`` is not atomic: it is several messages, and a writer that dies leaves the first of
them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from roost.errors import SourceError, StateError
from roost.model.columns import stream_bytes
from roost.queries.log import marked

try:
    from confluent_kafka import (
        Consumer,
        IsolationLevel,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicCollection,
        TopicPartition,
    )
    from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec
except ImportError as missing:
    raise SourceError(
        "a query log on Kafka needs confluent-kafka: install roost[kafka]"
    ) from missing

_LOG = logging.getLogger(__name__)
# Default limits: 1 MiB for brokers, 1,000,000 bytes for the client.
_MESSAGE_BYTES_MAX = 900_000
_MALFORMED_BYTES_MAX = 4_096  # of a message that is not a request
_PARTITION = 0
_RETRY_S = 0.05
_ARROW_STREAM = b"\xff\xff\xff\xff"
_PRODUCER = {"acks": "all", "enable.idempotence": True, "linger.ms": 0}
_CONSUMER = {
    "group.id": "roost",  # required by the client; no offset is ever committed
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
}
_RETAIN_ALL = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}


class KafkaQueryLog:
    """Requests in a topic with one partition and unlimited retention, created if missing.

    Raises :class:`SourceError` if the topic cannot be reached, and :class:`StateError` if it cannot
    serve as a log.
    """

    private = False

    def __init__(self, bootstrap: str, topic: str, *, timeout_s: float = 30.0) -> None:
        self._topic = topic
        self._timeout_s = timeout_s
        self._client: dict[str, Any] = {"bootstrap.servers": bootstrap}
        self._admin = AdminClient(self._client, logger=_LOG)
        self._producer: Producer | None = None
        self._create_topic()
        self._check_topic()

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Write a block of requests; returns the position after it.

        A topic stores no tags: a block that is appended twice is in the log twice, and its second
        registrations are refused as duplicates. Raises :class:`StateError` if the cluster did not
        confirm the block; a part of it may be in the log nevertheless.
        """
        assert tally is None, "a topic that others write to holds no tallies"
        end = None
        for payload in _payloads(block):
            end = self._send(payload)
        return self.end() if end is None else end

    def end(self) -> int:
        """Return the position after the last committed entry."""
        partition = TopicPartition(self._topic, _PARTITION)
        latest = self._once_known(
            lambda: self._admin.list_offsets(
                {partition: OffsetSpec.latest()},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=self._timeout_s,
            )[partition]
        )
        return int(latest.offset)

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the blocks from position ``after`` to ``upto``, in order.

        Raises :class:`StateError` if the log does not have them any more, or not yet.
        """
        if after >= upto:
            return
        consumer = Consumer({**self._client, **_CONSUMER}, logger=_LOG)
        consumer.assign([TopicPartition(self._topic, _PARTITION, after)])
        with closing(consumer):
            yield from self._blocks(consumer, upto)

    def close(self) -> None:
        """Close the connections; every confirmed block is in the log already."""
        self._producer = None

    def _blocks(self, consumer: Consumer, upto: int) -> Iterator[pa.Table]:
        while True:
            message = consumer.poll(self._timeout_s)
            if message is None:
                raise StateError(f"topic {self._topic}: no entry up to position {upto}")
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise StateError(f"topic {self._topic}: {error.str()}")
            offset = _offset(message)
            if error is None and offset < upto:
                yield marked(_block(message.value()))
                offset += 1
            # Offsets have holes where transactions of other programs ended, so the last position
            # may be passed by a later message or by the end of the topic as well as reached.
            if offset >= upto:
                return

    def _send(self, payload: bytes) -> int:
        """Write one message and wait, so that the log always has a prefix of a block."""
        if self._producer is None:
            timeout = {"message.timeout.ms": int(self._timeout_s * 1000)}
            self._producer = Producer({**self._client, **_PRODUCER, **timeout}, logger=_LOG)
        outcome: list[tuple[str | None, int]] = []

        def delivered(error: Any, message: Message) -> None:
            outcome.append((error.str(), -1) if error else (None, _offset(message)))

        self._producer.produce(self._topic, payload, partition=_PARTITION, on_delivery=delivered)
        while not outcome:
            self._producer.poll(1.0)
        fault, offset = outcome[0]
        if fault is not None:
            raise StateError(f"topic {self._topic} did not confirm a block of requests: {fault}")
        return offset + 1

    def _create_topic(self) -> None:
        topic = NewTopic(self._topic, num_partitions=1, config=_RETAIN_ALL)
        timeouts = {"operation_timeout": self._timeout_s, "request_timeout": self._timeout_s}
        try:
            self._admin.create_topics([topic], **timeouts)[self._topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise SourceError(f"topic {self._topic}: {error.args[0].str()}") from error

    def _check_topic(self) -> None:
        names = TopicCollection([self._topic])
        timeout = {"request_timeout": self._timeout_s}
        described = self._once_known(
            lambda: self._admin.describe_topics(names, **timeout)[self._topic]
        )
        partitions = len(described.partitions)
        if partitions != 1:
            raise StateError(
                f"topic {self._topic}: a log must have 1 partition, it has {partitions}"
            )
        resource = ConfigResource(ConfigResource.Type.TOPIC, self._topic)
        settings = self._once_known(
            lambda: self._admin.describe_configs([resource], **timeout)[resource]
        )
        for name, value in _RETAIN_ALL.items():
            if settings[name].value != value:
                raise StateError(
                    f"topic {self._topic} would delete requests: {name} must be {value}, "
                    f"it is {settings[name].value}"
                )

    def _once_known(self, request: Callable[[], Any]) -> Any:
        """Repeat a request until the brokers know a topic that was just created."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return request().result()
            except KafkaException as error:
                fault = error.args[0]
                unknown = fault.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
                if not unknown or time.monotonic() >= deadline:
                    raise StateError(f"topic {self._topic}: {fault.str()}") from error
            time.sleep(_RETRY_S)


def _offset(message: Message) -> int:
    offset = message.offset()
    return -1 if offset is None else int(offset)


def _payloads(block: pa.Table) -> Iterator[bytes]:
    """Split a block into messages, each an Arrow stream."""
    rows = block.num_rows
    # Aim below the limit: a stream is a little larger than its columns.
    step = max(1, rows * _MESSAGE_BYTES_MAX * 3 // (4 * max(1, block.nbytes)))
    for start in range(0, rows, step):
        part = block.slice(start, step)
        payload = stream_bytes(part)
        if len(payload) <= _MESSAGE_BYTES_MAX:
            yield payload
        elif part.num_rows == 1:
            raise StateError(
                f"a request of {len(payload)} bytes; a message takes {_MESSAGE_BYTES_MAX}"
            )
        else:
            half = part.num_rows // 2
            yield from _payloads(part.slice(0, half))
            yield from _payloads(part.slice(half))


def _block(value: bytes | None) -> pa.Table:
    """Decode a message; one that is not a request becomes a malformed record."""
    raw = value or b""
    try:
        return _read_arrow(raw) if raw.startswith(_ARROW_STREAM) else _read_json(raw)
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, RecursionError):
        text = raw[:_MALFORMED_BYTES_MAX].decode(errors="backslashreplace")
        return pa.table({"malformed": [text]})


def _read_arrow(raw: bytes) -> pa.Table:
    table = pa.ipc.open_stream(raw).read_all()
    # Untrusted bytes may contain offsets outside their buffers.
    table.validate(full=True)
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError("two columns have the same name")
    return table


def _read_json(raw: bytes) -> pa.Table:
    record = json.loads(raw)
    if not isinstance(record, dict) or not record:
        raise ValueError("not a JSON object with fields")
    return pa.Table.from_pylist([record])
