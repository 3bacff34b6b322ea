"""How inputs and results cross Temporal: as JSON, compressed where they are large, encrypted where there is a key.

A payload of Temporal may have 2 MB. What the machines of 10,240 ranks answer to
a stop is 9 MB of JSON, mostly the same words again and again, and 1 MB of
zlib. All clients and workers of a namespace need this converter; what is small
stays readable in the Web UI, unless ``EVERSTEP_PAYLOAD_KEY_FILE`` names keys:
then all is encrypted, errors too (:mod:`activities.payload_keys`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes, PayloadCodec

from activities.payload_keys import Keys, decrypted, encrypted
from everstep.rank.environment import PAYLOAD_KEY_FILE

COMPRESSED_FROM = 512 * 1024
"""Bytes from which a payload is compressed: evidence of several hundred ranks."""
LEVEL = 1
"""Of zlib: 9 MB take a tenth of a second."""
ENCODING = b"binary/zlib"


class Codec(PayloadCodec):
    """Compresses large payloads, in a thread, so that nothing waits for it, then encrypts; takes all kinds.

    Args:
        keys: None: nothing is encrypted, and what is encrypted cannot be read.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._keys = keys

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Compress what is large, encrypt all if there is a key."""
        compressed = [
            await asyncio.to_thread(_compressed, payload) if len(payload.data) >= COMPRESSED_FROM else payload
            for payload in payloads
        ]
        return await encrypted(self._keys, compressed)

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Give back what was encrypted and compressed.

        Raises:
            ConfigError: something is encrypted, and its key is not here.
        """
        return [
            await asyncio.to_thread(_plain, payload) if payload.metadata.get("encoding") == ENCODING else payload
            for payload in await decrypted(self._keys, payloads)
        ]


def _plain(payload: Payload) -> Payload:
    return Payload.FromString(zlib.decompress(payload.data))


def _compressed(payload: Payload) -> Payload:
    return Payload(metadata={"encoding": ENCODING}, data=zlib.compress(payload.SerializeToString(), LEVEL))


def packed_bytes(text: str) -> int:
    """Bytes of a text as it crosses Temporal."""
    return len(text) if len(text) < COMPRESSED_FROM else len(zlib.compress(text.encode(), LEVEL))


DATA_CONVERTER = dataclasses.replace(pydantic_data_converter, payload_codec=Codec())
"""For clients and workers without a key."""


def key_file() -> Path | None:
    """The key file that the user configured."""
    path = os.environ.get(PAYLOAD_KEY_FILE)
    return Path(path) if path else None


def data_converter() -> DataConverter:
    """For every client and worker, with the keys that the user configured.

    Raises:
        ConfigError: the key file is wrong.
    """
    path = key_file()
    if path is None:
        return DATA_CONVERTER
    return dataclasses.replace(
        DATA_CONVERTER,
        payload_codec=Codec(Keys.load(path)),
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
