"""Encryption of all payloads in Temporal: AES-GCM, with keys from a file; histories cannot be read without the keys.

The key file has a line ``ID HEX`` for each key; ``HEX`` has 64 hexadecimal digits. The first key encrypts, and all keys
decrypt. To replace a key, add the new key as the first line and copy the file to all workers and commands. Remove the
old key when no job needs it any more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from temporalio.api.common.v1 import Payload

from everstep.errors import ConfigError
from everstep.rank.environment import PAYLOAD_KEY_FILE

ENCODING = b"binary/encrypted"
KEY_ID = "encryption-key-id"
KEY_BYTES, NONCE_BYTES = 32, 12
IN_THREAD_FROM = 64 * 1024
"""Payloads of at least this size are encrypted and decrypted in a thread, so the event loop is not blocked; bytes."""


class Keys:
    """The keys of a key file.

    Args:
        keys: The keys by id, 32 bytes each; the first key encrypts.

    Raises:
        ConfigError: there is no key, a key has a wrong length, or the library for encryption is not installed.
    """

    def __init__(self, keys: dict[str, bytes]) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{PAYLOAD_KEY_FILE} needs the library cryptography: pip install 'everstep[encryption]'"
            ) from error
        if not keys or any(len(key) != KEY_BYTES for key in keys.values()):
            raise ConfigError(f"keys for payloads have {KEY_BYTES} bytes, and there must be at least one key")
        self.current = next(iter(keys))
        """The id of the key that encrypts."""
        self._ciphers: dict[str, Any] = {name: AESGCM(key) for name, key in keys.items()}

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a key file.

        Raises:
            ConfigError: the file cannot be read, or a line is not ``ID HEX``; the message does not show the line.
        """
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {path} of {PAYLOAD_KEY_FILE} cannot be read: {error}") from error
        keys: dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                name, text = line.split()
                key = bytes.fromhex(text)
            except ValueError:
                name, key = "", b""
            if len(key) != KEY_BYTES or name in keys:
                raise ConfigError(
                    f"line {number} of the key file {path} is not a new id and {2 * KEY_BYTES} hexadecimal "
                    "digits: make such a line with 'echo \"k1 $(openssl rand -hex 32)\"'"
                )
            keys[name] = key
        if not keys:
            raise ConfigError(f"the key file {path} has no key")
        return cls(keys)

    def encrypted(self, payload: Payload) -> Payload:
        """Return an encrypted payload, which includes the original's metadata."""
        nonce, name = os.urandom(NONCE_BYTES), self.current.encode()
        data: bytes = self._ciphers[self.current].encrypt(nonce, payload.SerializeToString(), name)
        return Payload(metadata={"encoding": ENCODING, KEY_ID: name}, data=nonce + data)

    def decrypted(self, payload: Payload) -> Payload:
        """Return the original payload.

        Raises:
            ConfigError: the key is not in the file, or the payload was changed.
        """
        from cryptography.exceptions import InvalidTag

        name = payload.metadata.get(KEY_ID, b"")
        cipher = self._ciphers.get(name.decode(errors="replace"))
        if cipher is None:
            raise ConfigError(f"{_needs(payload)}, which is not in the key file of {PAYLOAD_KEY_FILE}: add it there")
        nonce, data = payload.data[:NONCE_BYTES], payload.data[NONCE_BYTES:]
        try:
            return Payload.FromString(cipher.decrypt(nonce, data, name))
        except InvalidTag as error:
            raise ConfigError(
                f"{_needs(payload)}, but it was changed, or that id names another key in the file of {PAYLOAD_KEY_FILE}"
            ) from error


def _needs(payload: Payload) -> str:
    name = payload.metadata.get(KEY_ID, b"").decode(errors="replace")
    return f"a payload in Temporal is encrypted with key {name!r}"


async def encrypted(keys: Keys | None, payloads: Sequence[Payload]) -> list[Payload]:
    """Return the payloads encrypted; without keys they are unchanged."""
    if keys is None:
        return list(payloads)
    return [
        await asyncio.to_thread(keys.encrypted, payload)
        if len(payload.data) >= IN_THREAD_FROM
        else keys.encrypted(payload)
        for payload in payloads
    ]


async def decrypted(keys: Keys | None, payloads: Sequence[Payload]) -> list[Payload]:
    """Return the original payloads. Payloads from before there were keys are not encrypted, and returned unchanged.

    Raises:
        ConfigError: a payload is encrypted, and its key is missing.
    """
    originals = []
    for payload in payloads:
        if payload.metadata.get("encoding") != ENCODING:
            originals.append(payload)
        elif keys is None:
            raise ConfigError(f"{_needs(payload)}: set {PAYLOAD_KEY_FILE} to the file that has it")
        elif len(payload.data) >= IN_THREAD_FROM:
            originals.append(await asyncio.to_thread(keys.decrypted, payload))
        else:
            originals.append(keys.decrypted(payload))
    return originals
