"""Opens the query log that a run is configured with."""

from __future__ import annotations

from pathlib import Path

from roost.errors import ConfigError
from roost.queries.log import QueryLog, SqliteQueryLog
from roost.storage.private import state_folder


def kafka_address(text: str, key: str) -> tuple[str, str]:
    """Return brokers and topic of ``kafka://HOST:PORT[,HOST:PORT]/TOPIC``."""
    brokers, _, topic = text.removeprefix("kafka://").partition("/")
    ports = (broker.rpartition(":")[2] for broker in brokers.split(","))
    if not text.startswith("kafka://") or not topic or not all(map(str.isdecimal, ports)):
        raise ConfigError(key, text, "kafka://HOST:PORT[,HOST:PORT]/TOPIC")
    return brokers, topic


def open_log(address: str | None, folder: Path) -> QueryLog:
    """Open a Kafka topic or, without an address, the SQLite log of a state directory."""
    if address is None:
        return SqliteQueryLog(state_folder(folder) / "queries.db")
    from roost.queries.kafka_log import KafkaQueryLog  # needs an optional package

    return KafkaQueryLog(*kafka_address(address, "queries.log"))
