"""The Kafka broker that all Kafka tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kafka_broker import KafkaBroker, open_broker


@pytest.fixture(scope="session")
def broker(child_environment: None) -> Iterator[KafkaBroker]:
    with open_broker() as running:
        yield running
        folder = running.folder
        assert folder.is_dir()
    assert not folder.exists()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Name a topic after the test and its file."""
    name = f"{request.node.path.stem}-{request.node.name}"
    return "".join(c if c.isalnum() else "-" for c in name)
