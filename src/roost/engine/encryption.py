"""Spark settings that authenticate and encrypt all network traffic and spilled data.

By default, Spark's processes accept any connection to their ports and send and spill plain text.
``engine.encrypt`` sets the few options that change this, and refuses to run with user settings or
an existing session that contradict them.

Network traffic is encrypted with AES-GCM, which detects modification; shuffle and spill files with
AES-CTR, the only mode Spark has, which does not. The state directory and the output stay plain
files, and Kafka connections use the TLS settings of their own clients.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from roost.errors import ConfigError

SECRET = "spark.authenticate.secret"
SECRET_BYTES = 32

REQUIRED = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    # The first version of the handshake derives its keys without binding them to the handshake.
    "spark.network.crypto.authEngineVersion": "2",
    # A peer that fails the handshake must not fall back to an unencrypted connection.
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
}

# The pattern by which Spark redacts values in its pages and logs.
_CONFIDENTIAL = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


def confidential(key: str) -> bool:
    """Return whether the setting holds a secret."""
    return _CONFIDENTIAL.search(key) is not None


def encryption_settings(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of an encrypted session; rejects contradicting user settings, ``given``.

    In local mode, on YARN and on Kubernetes, Spark creates its own secret. A standalone cluster
    has one that only its owner can provide.
    """
    for key, value in REQUIRED.items():
        if key in given and not _equal(given[key], value):
            accepted = f"{value} where engine.encrypt is true"
            raise ConfigError(f"engine.spark.{key}", given[key], accepted)
    settings = dict(REQUIRED)
    if master.startswith("local-cluster") and SECRET not in given:
        settings[SECRET] = secrets.token_hex(SECRET_BYTES)
    return settings


def check_encrypted(settings: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` unless a session started with these settings encrypts."""
    missing = [
        f"{key}={value}"
        for key, value in REQUIRED.items()
        if not _equal(settings.get(key, ""), value)
    ]
    if missing:
        accepted = f"a Spark session that was started with {', '.join(missing)}"
        raise ConfigError("engine.encrypt", True, accepted)


def _equal(found: str, required: str) -> bool:
    return str(found).strip().lower() == required.lower()
