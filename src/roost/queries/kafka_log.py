"""Query log on a Kafka topic, for clusters where many programs send requests.

Requests must be durable and in one order that every process agrees on. A topic with a single
partition is such a log. A position is the end offset of the partition. A message is either a block
of requests as an Arrow IPC stream (written by `append`) or one request as a JSON object (written by
other programs). Any other message becomes a block with the single column ``malformed``, and so a
dead-letter record.

The log does not validate requests and does not expire them (the topic must retain everything). A
large `append` is not atomic: it is several messages, and a writer that dies leaves the first of
them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from roost.errors import SourceError, StateError
from roost.queries.log import decode_block, encode_block, marked

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer
    from confluent_kafka.admin import AdminClient

_LOG = logging.getLogger(__name__)
# Default limits: 1 MiB for brokers, 1,000,000 bytes for the client.
_MESSAGE_BYTES_MAX = 900_000
_MALFORMED_BYTES_MAX = 4_096  # of a message that is not a request
_PARTITION = 0
_RETRY_S = 0.05
_ARROW_STREAM = b"\xff\xff\xff\xff"
_RETAIN_ALL = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}


class KafkaQueryLog:
    """Ordered, durable requests in a topic with one partition.

    Parameters
    ----------
    bootstrap
        Bootstrap servers, ``host:port`` separated by commas.
    topic
        Created if missing; otherwise it must have one partition and unlimited retention.
    timeout_s
        How long the cluster may be unreachable before a call fails.
    client
        Further client settings, for example for TLS and SASL.

    Raises
    ------
    SourceError
        If the client library is missing or the topic cannot be reached.
    StateError
        If the topic cannot serve as a log.
    """

    private = False

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        timeout_s: float = 30.0,
        client: Mapping[str, str] | None = None,
    ) -> None:
        self._topic = topic
        self._timeout_s = timeout_s
        self._client: dict[str, Any] = {**(client or {}), "bootstrap.servers": bootstrap}
        self._admin = self._open_admin()
        self._producer: Producer | None = None
        self._create_topic()
        self._check_topic()

    def append(self, block: pa.Table, tag: str | None = None, tally: pa.Table | None = None) -> int:
        """Write a block of requests and return the log's position after it.

        Parameters
        ----------
        block
            The requests.
        tag
            Ignored: a topic stores no tags. A block that is appended twice is in the log twice,
            and its second registrations are refused as duplicates.
        tally
            Must be None: other programs could write one, too.

        Raises
        ------
        StateError
            If the cluster did not confirm it; some of the block may be in the log nevertheless.
        """
        assert tally is None, "a topic that others write to holds no tallies"
        end = None
        for payload in _payloads(block):
            end = self._send(payload)
        return self.end() if end is None else end

    def end(self) -> int:
        """Return the position after the last committed entry."""
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        place = TopicPartition(self._topic, _PARTITION)
        latest = self._once_known(
            lambda: self._admin.list_offsets(
                {place: OffsetSpec.latest()},
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=self._timeout_s,
            )[place]
        )
        return int(latest.offset)

    def read(self, after: int, upto: int) -> Iterator[pa.Table]:
        """Yield the blocks from position `after` to position `upto`, in order.

        Raises
        ------
        StateError
            If the log no longer, or not yet, holds them.
        """
        if after >= upto:
            return
        consumer = self._open_consumer(after)
        try:
            yield from self._blocks(consumer, upto)
        finally:
            consumer.close()

    def close(self) -> None:
        """Close the connections; every confirmed block is in the log already."""
        self._producer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _blocks(self, consumer: Consumer, upto: int) -> Iterator[pa.Table]:
        from confluent_kafka import KafkaError

        while True:
            message = consumer.poll(self._timeout_s)
            if message is None:
                raise StateError(f"topic {self._topic}: nothing up to position {upto}")
            error = message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise StateError(f"topic {self._topic}: {error.str()}")
            place = _offset(message)
            if error is None and place < upto:
                yield marked(_block(message.value()))
                place += 1
            # Offsets have holes where transactions of other programs ended, so the last position
            # may be passed by a later message or by the end of the topic as well as reached.
            if place >= upto:
                return

    def _send(self, payload: bytes) -> int:
        """Write one message and wait, so that what is in the log is always a prefix."""
        if self._producer is None:
            self._producer = self._open_producer()
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

    def _open_admin(self) -> AdminClient:
        try:
            from confluent_kafka.admin import AdminClient
        except ImportError as missing:
            raise SourceError(
                "a query log on Kafka needs confluent-kafka: install roost[kafka]"
            ) from missing
        return AdminClient(self._client, logger=_LOG)

    def _open_producer(self) -> Producer:
        from confluent_kafka import Producer

        settings = {
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            "message.timeout.ms": int(self._timeout_s * 1000),
        }
        return Producer({**self._client, **settings}, logger=_LOG)

    def _open_consumer(self, after: int) -> Consumer:
        from confluent_kafka import Consumer, TopicPartition

        settings = {
            "group.id": "roost",  # required by the client; no offset is ever committed
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
        }
        consumer = Consumer({**self._client, **settings}, logger=_LOG)
        consumer.assign([TopicPartition(self._topic, _PARTITION, after)])
        return consumer

    def _create_topic(self) -> None:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        topic = NewTopic(self._topic, num_partitions=1, config=_RETAIN_ALL)
        timeouts = {"operation_timeout": self._timeout_s, "request_timeout": self._timeout_s}
        try:
            self._admin.create_topics([topic], **timeouts)[self._topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise SourceError(f"topic {self._topic}: {error.args[0].str()}") from error

    def _check_topic(self) -> None:
        from confluent_kafka import TopicCollection
        from confluent_kafka.admin import ConfigResource

        names = TopicCollection([self._topic])
        timeout = {"request_timeout": self._timeout_s}
        described = self._once_known(
            lambda: self._admin.describe_topics(names, **timeout)[self._topic]
        )
        partitions = len(described.partitions)
        if partitions != 1:
            raise StateError(f"topic {self._topic}: a log takes 1 partition, it has {partitions}")
        resource = ConfigResource(ConfigResource.Type.TOPIC, self._topic)
        settings = self._once_known(
            lambda: self._admin.describe_configs([resource], **timeout)[resource]
        )
        for name, value in _RETAIN_ALL.items():
            if settings[name].value != value:
                raise StateError(
                    f"topic {self._topic} would forget requests: {name} takes {value}, "
                    f"it is {settings[name].value}"
                )

    def _once_known(self, request: Callable[[], Any]) -> Any:
        """Repeat a request until the brokers know the topic, which is after its creation."""
        from confluent_kafka import KafkaError, KafkaException

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
        payload = encode_block(part)
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
    table = decode_block(raw)
    # Untrusted bytes may contain offsets outside their buffers.
    table.validate(full=True)
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError("two columns of one name")
    return table


def _read_json(raw: bytes) -> pa.Table:
    record = json.loads(raw)
    if not isinstance(record, dict) or not record:
        raise ValueError("not a JSON object with fields")
    return pa.Table.from_pylist([record])
