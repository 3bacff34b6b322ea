"""The payload format in Temporal: JSON, compressed if it is large, and encrypted if there is a key.

A payload of Temporal may have 2 MB, and each stays in a history. With thousands of machines a payload has mostly names,
addresses and numbers that repeat, which xz makes about twenty times smaller. All clients and workers of a namespace
need this converter. Small payloads stay readable in the Web UI, unless ``EVERSTEP_PAYLOAD_KEY_FILE`` names keys: in
that case all payloads are encrypted, including errors (:mod:`activities.payload_keys`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import lzma
import os
from collections.abc import Sequence
from pathlib import Path

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes, PayloadCodec

from activities.payload_keys import Keys, decrypted, encrypted
from everstep.rank.environment import PAYLOAD_KEY_FILE

COMPRESSED_FROM = 16 * 1024
"""Payloads of at least this size are compressed, bytes. The list of two hundred machines is that large."""
PRESET = 0
"""The quickest preset of xz; with it, 300 kB are compressed in a hundredth of a second. Unlike zlib, it also finds what
repeats after more than 32 kB."""
ENCODING = b"binary/xz"


class Codec(PayloadCodec):
    """Compresses large payloads, then encrypts all payloads; decodes every kind of payload.

    Payloads are compressed in a thread, so that the event loop is not blocked.

    Args:
        keys: The keys; None: nothing is encrypted, and encrypted payloads cannot be read.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._keys = keys

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Compress large payloads, and encrypt all if there is a key."""
        compressed = [
            await asyncio.to_thread(_compressed, payload) if len(payload.data) >= COMPRESSED_FROM else payload
            for payload in payloads
        ]
        return await encrypted(self._keys, compressed)

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return the original payloads.

        Raises:
            ConfigError: a payload is encrypted, and its key is missing.
        """
        return [
            await asyncio.to_thread(_plain, payload) if payload.metadata.get("encoding") == ENCODING else payload
            for payload in await decrypted(self._keys, payloads)
        ]


def _plain(payload: Payload) -> Payload:
    return Payload.FromString(lzma.decompress(payload.data))


def _compressed(payload: Payload) -> Payload:
    return Payload(metadata={"encoding": ENCODING}, data=lzma.compress(payload.SerializeToString(), preset=PRESET))


def packed_bytes(text: str) -> int:
    """Return the size of a text in Temporal, bytes."""
    return len(text) if len(text) < COMPRESSED_FROM else len(lzma.compress(text.encode(), preset=PRESET))


DATA_CONVERTER = dataclasses.replace(pydantic_data_converter, payload_codec=Codec())
"""The converter of clients and workers without a key."""


def key_file() -> Path | None:
    """Return the key file that the user configured; None: there is none."""
    path = os.environ.get(PAYLOAD_KEY_FILE)
    return Path(path) if path else None


def data_converter() -> DataConverter:
    """Return the converter of every client and worker, with the keys that the user configured.

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
