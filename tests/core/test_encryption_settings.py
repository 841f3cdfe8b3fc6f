"""The setting for encryption: what Spark receives, and what is refused."""

from __future__ import annotations

import pytest

from roost.engine.encryption import (
    REQUIRED,
    SECRET,
    check_encrypted,
    confidential,
    encryption_settings,
)
from roost.errors import ConfigError

MASTERS = (
    "local",
    "local[*]",
    "local[2, 3]",
    "yarn",
    "k8s://https://host:443",
    "spark://host:7077",
)


@pytest.mark.parametrize("master", MASTERS)
def test_no_secret_where_spark_or_the_cluster_has_one(master: str) -> None:
    assert encryption_settings(master, {}) == REQUIRED


def test_every_session_of_its_own_cluster_has_another_secret() -> None:
    drawn = [encryption_settings("local-cluster[2,1,1024]", {})[SECRET] for _ in range(5)]
    assert len(set(drawn)) == 5
    assert all(len(bytes.fromhex(secret)) == 32 for secret in drawn)


def test_the_users_secret_is_left_to_the_user() -> None:
    assert SECRET not in encryption_settings("local-cluster[2,1,1024]", {SECRET: "ours"})


@pytest.mark.parametrize("key", REQUIRED)
def test_settings_that_say_otherwise_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.spark.{key}: got 'other', expected .*encrypt"):
        encryption_settings("local", {key: "other"})
    assert encryption_settings("local", {key: f" {REQUIRED[key].upper()}"}) == REQUIRED


@pytest.mark.parametrize("key", REQUIRED)
def test_a_session_that_lacks_a_setting_is_refused(key: str) -> None:
    check_encrypted(REQUIRED)
    lacking = {name: value for name, value in REQUIRED.items() if name != key}
    with pytest.raises(ConfigError) as caught:
        check_encrypted(lacking)
    assert f"{key}={REQUIRED[key]}" in str(caught.value)
    assert not any(f"{name}=" in str(caught.value) for name in lacking)


def test_what_no_command_line_may_show() -> None:
    hidden = (
        SECRET,
        "spark.ssl.keyStorePassword",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.s3a.secret.key",
    )
    assert all(map(confidential, hidden))
    assert not any(map(confidential, ("spark.master", "spark.driver.memory", *REQUIRED)))
