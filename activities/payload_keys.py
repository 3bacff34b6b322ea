"""Encryption of what crosses Temporal: AES-GCM, with keys from a file; without them histories cannot be read.

The key file has a line ``ID HEX`` for each key, 64 hexadecimal digits. The first
key encrypts, all of them decrypt: for a new key put it first, hand the file to
all workers and commands, and remove the old one when no job needs it any more.
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
"""Bytes from which a payload is encrypted in a thread, so that nothing waits for it."""


class Keys:
    """The keys of a key file.

    Args:
        keys: 32 bytes by id; the first one encrypts.

    Raises:
        ConfigError: there is none, one has another length, or the library for it is not installed.
    """

    def __init__(self, keys: dict[str, bytes]) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{PAYLOAD_KEY_FILE} needs the library cryptography: pip install 'everstep[encryption]'"
            ) from error
        if not keys or any(len(key) != KEY_BYTES for key in keys.values()):
            raise ConfigError(f"keys for payloads have {KEY_BYTES} bytes, and there must be one at least")
        self.current = next(iter(keys))
        """Id of the key that encrypts."""
        self._ciphers: dict[str, Any] = {name: AESGCM(key) for name, key in keys.items()}

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a key file.

        Raises:
            ConfigError: it cannot be read, or a line is not ``ID HEX``; no line is shown.
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
                    f"line {number} of the key file {path} is not an id of its own and {2 * KEY_BYTES} hexadecimal "
                    "digits: make one with 'echo \"k1 $(openssl rand -hex 32)\"'"
                )
            keys[name] = key
        if not keys:
            raise ConfigError(f"the key file {path} has no key")
        return cls(keys)

    def encrypted(self, payload: Payload) -> Payload:
        """One payload, with its metadata, encrypted."""
        nonce, name = os.urandom(NONCE_BYTES), self.current.encode()
        data: bytes = self._ciphers[self.current].encrypt(nonce, payload.SerializeToString(), name)
        return Payload(metadata={"encoding": ENCODING, KEY_ID: name}, data=nonce + data)

    def decrypted(self, payload: Payload) -> Payload:
        """The payload that was encrypted.

        Raises:
            ConfigError: it was with a key that is not in the file, or is not what was encrypted.
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
                f"{_needs(payload)}, but was changed since, or the key file of {PAYLOAD_KEY_FILE} has another key "
                "of that id"
            ) from error


def _needs(payload: Payload) -> str:
    name = payload.metadata.get(KEY_ID, b"").decode(errors="replace")
    return f"what Temporal keeps is encrypted with key {name!r}"


async def encrypted(keys: Keys | None, payloads: Sequence[Payload]) -> list[Payload]:
    """Payloads as Temporal shall keep them; without keys as they are."""
    if keys is None:
        return list(payloads)
    return [
        await asyncio.to_thread(keys.encrypted, payload)
        if len(payload.data) >= IN_THREAD_FROM
        else keys.encrypted(payload)
        for payload in payloads
    ]


async def decrypted(keys: Keys | None, payloads: Sequence[Payload]) -> list[Payload]:
    """Payloads as they were; what is in clear, from before there were keys, is left as it is.

    Raises:
        ConfigError: one is encrypted, and its key is not here.
    """
    found = []
    for payload in payloads:
        if payload.metadata.get("encoding") != ENCODING:
            found.append(payload)
        elif keys is None:
            raise ConfigError(f"{_needs(payload)}: name the file that has it in {PAYLOAD_KEY_FILE}")
        elif len(payload.data) >= IN_THREAD_FROM:
            found.append(await asyncio.to_thread(keys.decrypted, payload))
        else:
            found.append(keys.decrypted(payload))
    return found
