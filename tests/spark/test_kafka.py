"""The query log on Kafka, against a real broker."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import KafkaBroker, produce

from roost.errors import SourceError, StateError
from roost.model.columns import stream_bytes
from roost.queries import kafka_log
from roost.queries.kafka_log import KafkaQueryLog
from roost.queries.log import open_log

pytestmark = pytest.mark.spark
kafka = pytest.importorskip("confluent_kafka", reason="needs the extra roost[kafka]")
admin = pytest.importorskip("confluent_kafka.admin", reason="needs the extra roost[kafka]")


def block(*names: str) -> pa.Table:
    rows = [{"op": "register", "query_id": name, "x0": float(len(name))} for name in names]
    return pa.Table.from_pylist(rows)


def names_of(blocks: Iterator[pa.Table]) -> list[list[str]]:
    return [table["query_id"].to_pylist() for table in blocks]


def test_reads_any_range_of_what_was_appended(broker: KafkaBroker, topic: str) -> None:
    chance = random.Random(11)
    expected = [[f"q{i}-{j}" for j in range(chance.randint(1, 5))] for i in range(6)]
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        assert log.end() == 0
        for place, names in enumerate(expected):
            assert log.append(block(*names)) == place + 1
        assert log.end() == len(expected)
        for after in range(len(expected) + 1):
            for upto in range(len(expected) + 1):
                assert names_of(log.read(after, upto)) == expected[after:upto]


def test_preserves_values_and_types(broker: KafkaBroker, topic: str) -> None:
    table = pa.table(
        {
            "query_id": pa.array([1, -(1 << 62)], pa.int64()),
            "wkt": pa.array([None, "POINT (ü 0)"], pa.string()),
            "x0": pa.array([0.1 + 0.2, float("-inf")], pa.float64()),
            "at": pa.array([0, 1], pa.timestamp("us", "UTC")),
        }
    )
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        [got] = log.read(0, log.append(table))
    assert got.equals(table)


def test_an_empty_block_is_no_entry(broker: KafkaBroker, topic: str) -> None:
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        log.append(block("a"))
        assert log.append(block("a").slice(1)) == 1
        assert log.end() == 1


def test_a_large_block_is_split_into_messages(broker: KafkaBroker, topic: str) -> None:
    chance = random.Random(5)
    # One long text among short ones: a division by rows would exceed the limit of a message.
    texts = [chance.randbytes(chance.choice([8, 8, 8, 20_000])).hex() for _ in range(400)]
    table = pa.table({"query_id": texts})
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        end = log.append(table)
        assert 1 < end < 100
        assert pa.concat_tables(log.read(0, end)).equals(table)


def test_a_request_larger_than_a_message_is_rejected(broker: KafkaBroker, topic: str) -> None:
    text = random.Random(6).randbytes(1_000_000).hex()
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        with pytest.raises(StateError, match="a message takes 900000"):
            log.append(pa.table({"query_id": [text]}))
        assert log.end() == 0


def test_survives_a_crash_of_the_broker(broker: KafkaBroker, topic: str) -> None:
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        log.append(block("a"))
        broker.kill()
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(lambda: names_of(log.read(0, 1)))
            writing = pool.submit(log.append, block("b"))
            broker.start()
            assert reading.result() == [["a"]]
            assert writing.result() == 2
        with closing(KafkaQueryLog(broker.bootstrap, topic)) as again:
            assert again.append(block("c")) == 3
            assert names_of(again.read(0, again.end())) == [["a"], ["b"], ["c"]]


def test_many_writers_agree_on_one_order(broker: KafkaBroker, topic: str) -> None:
    def write(writer: int) -> list[tuple[int, str]]:
        with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
            names = [f"{writer}-{i}" for i in range(20)]
            return [(log.append(block(name)), name) for name in names]

    with ThreadPoolExecutor(4) as pool:
        appended = sorted(entry for entries in pool.map(write, range(4)) for entry in entries)
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        got = names_of(log.read(0, log.end()))
    assert [(place + 1, names[0]) for place, names in enumerate(got)] == appended


@pytest.mark.parametrize("method", ["describe_topics", "describe_configs", "list_offsets"])
def test_waits_until_brokers_know_a_new_topic(
    broker: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient

    original = getattr(AdminClient, method)
    requested = []

    def unknown_at_first(self: Any, places: Any, **timeout: Any) -> Any:
        requested.append(places)
        if len(requested) > 2:
            return original(self, places, **timeout)
        refused: Future[Any] = Future()
        refused.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return defaultdict(lambda: refused)

    monkeypatch.setattr(AdminClient, method, unknown_at_first)
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        assert log.end() == 0
    assert len(requested) == 3


def test_accepts_handwritten_json_requests(broker: KafkaBroker, topic: str) -> None:
    requests: list[dict[str, Any]] = [
        {"op": "register", "query_id": "a", "user_id": "u", "cx": 1, "cy": 2.5, "radius": 3},
        {"op": "terminate", "query_id": 7, "at": "2014-04-01T00:00:00Z", "wkt": None},
    ]
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        produce(broker, topic, *(json.dumps(request).encode() for request in requests))
        log.append(block("c"))
        tables = list(log.read(0, log.end()))
    assert [table.to_pylist() for table in tables[:2]] == [[request] for request in requests]
    assert tables[2].equals(block("c"))


DOUBLED = stream_bytes(pa.table([pa.array([1]), pa.array([2])], ["op", "op"]))
MALFORMED = {
    "broken JSON": b'{"op": ',
    "JSON, but a list": b'[{"op": "register"}]',
    "JSON, but a number": b"12",
    "JSON without fields": b"{}",
    "JSON with a number too large": b'{"query_id": 123456789012345678901234567890}',
    "JSON with a mixed list": b'{"query_id": [1, "a", {}]}',
    "JSON without an end": b"[" * 100_000,
    "half a character": b'{"op": "\xc3"}',
    "other bytes": bytes(range(256)),
    "nothing": b"",
    "null": None,
    "cut Arrow": stream_bytes(block("a", "b"))[:100],
    "Arrow with one name twice": DOUBLED,
}


def test_malformed_messages_retain_their_position(broker: KafkaBroker, topic: str) -> None:
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        for number, value in enumerate(MALFORMED.values()):
            produce(broker, topic, value)
            log.append(block(f"q{number}"))
        tables = list(log.read(0, log.end()))
    assert names_of(iter(tables[1::2])) == [[f"q{n}"] for n in range(len(MALFORMED))]
    for table, (kind, value) in zip(tables[::2], MALFORMED.items(), strict=True):
        assert table.schema == pa.schema([("malformed", pa.string())]), kind
        [text] = table["malformed"].to_pylist()
        assert text == (value or b"")[:4096].decode(errors="backslashreplace"), kind


def test_no_bytes_break_the_reader() -> None:
    chance = random.Random(3)
    good = stream_bytes(block(*(f"q{i}" for i in range(50))))
    refused = 0
    for _ in range(2_000):
        raw = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.choice([0, 127, 128, 255])
        table = kafka_log._block(bytes(raw[: chance.randrange(len(raw)) or None]))
        table.validate(full=True)
        refused += table.column_names == ["malformed"]
    assert refused > 1_000


def test_transactions_of_other_programs(broker: KafkaBroker, topic: str) -> None:
    settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": topic}
    producer = kafka.Producer(settings)
    producer.init_transactions(30)
    with closing(KafkaQueryLog(broker.bootstrap, topic)) as log:
        log.append(block("a"))
        producer.begin_transaction()
        producer.produce(topic, b'{"query_id": "gone"}', partition=0)
        assert producer.flush(30) == 0
        assert log.end() == 1
        producer.abort_transaction(30)
        producer.begin_transaction()
        producer.produce(topic, b'{"query_id": "b"}', partition=0)
        producer.commit_transaction(30)
        # a, the aborted request and its marker, b and its marker; a commit returns before the
        # broker has written the marker, which is when the log goes on.
        deadline = time.monotonic() + 30
        while log.end() < 5 and time.monotonic() < deadline:
            pass
        assert log.end() == 5
        assert names_of(log.read(0, 5)) == [["a"], ["b"]]
        assert names_of(log.read(0, 3)) == [["a"]]
        assert names_of(log.read(4, 5)) == []
        assert log.append(block("c")) == 6
        assert names_of(log.read(1, 6)) == [["b"], ["c"]]


def test_deleted_entries_are_an_error(broker: KafkaBroker, topic: str) -> None:
    with closing(KafkaQueryLog(broker.bootstrap, topic, timeout_s=5)) as log:
        log.append(block("a"))
        log.append(block("b"))
        client = admin.AdminClient({"bootstrap.servers": broker.bootstrap})
        place = kafka.TopicPartition(topic, 0, 1)
        client.delete_records([place])[place].result()
        assert names_of(log.read(1, 2)) == [["b"]]
        with pytest.raises(StateError):
            list(log.read(0, 2))
        with pytest.raises(StateError):
            list(log.read(3, 4))
        with pytest.raises(StateError, match="no entry up to position 3"):
            list(log.read(1, 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partitions": 2}, "a log must have 1 partition, it has 2"),
        ({"retention_ms": "60000"}, "retention.ms must be -1, it is 60000"),
        ({"cleanup_policy": "compact", "retention_ms": "-1"}, "cleanup.policy must be delete"),
    ],
)
def test_a_topic_that_is_no_log_is_rejected(
    broker: KafkaBroker, topic: str, settings: dict[str, Any], message: str
) -> None:
    broker.create_topic(topic, **settings)
    with pytest.raises(StateError, match=message):
        KafkaQueryLog(broker.bootstrap, topic)


def test_no_broker_is_an_error() -> None:
    with pytest.raises(SourceError, match="topic requests"):
        KafkaQueryLog("127.0.0.1:1", "requests", timeout_s=1)


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "roost.queries.kafka_log")
    monkeypatch.setitem(sys.modules, "confluent_kafka.admin", None)
    with pytest.raises(SourceError, match=r"install roost\[kafka\]"):
        open_log("kafka://127.0.0.1:1/requests", tmp_path)
