"""What is wrong with a certificate, told before a connection fails without a word."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from everstep.errors import ConfigError

DAY_S = 86_400.0


def check_pair(cert: Path, key: Path) -> float:
    """Look whether a certificate and its key can be used today.

    Returns:
        Days until the certificate ends.

    Raises:
        ConfigError: one is no PEM, they do not belong together, or the certificate is not valid now.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # never asks a terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {cert}: give the pair") from error
        raise ConfigError(f"{cert} and {key} are no certificate and unencrypted key in PEM: {error}") from error
    begins, ends = _validity(cert)
    now = time.time()
    if now > ends:
        raise ConfigError(f"the certificate {cert} expired {(now - ends) / DAY_S:.0f} days ago: issue another one")
    if now < begins:
        raise ConfigError(
            f"the certificate {cert} is valid in {(begins - now) / DAY_S:.1f} days only: correct it, or this clock"
        )
    return (ends - now) / DAY_S


def _validity(cert: Path) -> tuple[float, float]:
    """When a certificate begins and ends, seconds since 1970."""
    # Python's own reader of certificates has no public name for those that are no authority's.
    found = ssl._ssl._test_decode_cert(str(cert))  # type: ignore[attr-defined]
    return ssl.cert_time_to_seconds(found["notBefore"]), ssl.cert_time_to_seconds(found["notAfter"])
