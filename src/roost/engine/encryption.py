"""What Spark must be told so that nothing it moves or spills can be read or changed on the way.

Problem: out of the box, Spark's processes trust whoever reaches their ports, talk in the clear and
spill in the clear. Idea: one switch for the few settings that change this, checked against what
the user set and against sessions made elsewhere, so that it is on or the run does not start.

Between processes it is AES in GCM, which notices changes; in shuffle and spill files it is AES in
CTR, all that Spark has, which does not. Nothing here encrypts what stays: the state directory and
the output are plain files. Nor what goes to and from Kafka: that is its clients' own TLS.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

from roost.errors import ConfigError

SECRET = "spark.authenticate.secret"
SECRET_BYTES = 32

REQUIRED = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    # The first version of the handshake derives its keys without binding them to the handshake.
    "spark.network.crypto.authEngineVersion": "2",
    # Who fails the handshake must not be asked again in a way that does not encrypt.
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
}

# As Spark's own rule for what it hides in its pages and logs.
_CONFIDENTIAL = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


def confidential(key: str) -> bool:
    """Whether a setting's value is not for the eyes of other users of the host."""
    return _CONFIDENTIAL.search(key) is not None


def draw_secret() -> str:
    """Draw a new secret."""
    return secrets.token_hex(SECRET_BYTES)


def encryption_settings(
    master: str, given: Mapping[str, str], draw: Callable[[], str] = draw_secret
) -> dict[str, str]:
    """List the settings of an encrypted session.

    Parameters
    ----------
    master
        Spark master. Alone on a host, on YARN and on Kubernetes, Spark draws its own secret; a
        standalone cluster has one, which only its owner can give.
    given
        The user's Spark settings.
    draw
        Where a secret comes from.

    Raises
    ------
    ConfigError
        If the user's settings say otherwise.
    """
    for key, value in REQUIRED.items():
        if key in given and not _same(given[key], value):
            takes = f"{value} where engine.encrypt is true"
            raise ConfigError(f"engine.spark.{key}", given[key], takes)
    settings = dict(REQUIRED)
    if master.startswith("local-cluster") and SECRET not in given:
        settings[SECRET] = draw()
    return settings


def check_encrypted(settings: Mapping[str, str]) -> None:
    """Refuse a session that does not encrypt; ``settings`` are those it was started with.

    Raises
    ------
    ConfigError
        With the settings that it lacks.
    """
    lacking = [
        f"{key}={value}"
        for key, value in REQUIRED.items()
        if not _same(settings.get(key, ""), value)
    ]
    if lacking:
        takes = f"a Spark session that was started with {', '.join(lacking)}"
        raise ConfigError("engine.encrypt", True, takes)


def _same(found: str, wanted: str) -> bool:
    return str(found).strip().lower() == wanted.lower()
