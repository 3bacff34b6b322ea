"""How inputs and results cross Temporal: as JSON, and squeezed where they are large.

A payload of Temporal may have 2 MB. What the machines of 10,240 ranks answer to
a stop is 9 MB of JSON, mostly the same words again and again, and 1 MB of
zlib. All clients and workers of a namespace need this converter; what is small
stays readable in the Web UI.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Sequence

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import PayloadCodec

SQUEEZED_FROM = 512 * 1024
"""Bytes from which a payload is squeezed (ours): evidence of several hundred ranks."""
LEVEL = 1
"""Of zlib: 9 MB take a tenth of a second."""
ENCODING = b"binary/zlib"


class Squeezing(PayloadCodec):
    """Squeezes large payloads, in a thread, so that nothing waits for it; takes both kinds."""

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Squeeze what is large."""
        return [await asyncio.to_thread(_squeezed, one) if len(one.data) >= SQUEEZED_FROM else one for one in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Give back what was squeezed."""
        return [
            await asyncio.to_thread(_plain, one) if one.metadata.get("encoding") == ENCODING else one
            for one in payloads
        ]


def _plain(payload: Payload) -> Payload:
    return Payload.FromString(zlib.decompress(payload.data))


def _squeezed(payload: Payload) -> Payload:
    return Payload(metadata={"encoding": ENCODING}, data=zlib.compress(payload.SerializeToString(), LEVEL))


def packed_bytes(text: str) -> int:
    """Bytes of a text as it crosses Temporal."""
    return len(text) if len(text) < SQUEEZED_FROM else len(zlib.compress(text.encode(), LEVEL))


DATA_CONVERTER = dataclasses.replace(pydantic_data_converter, payload_codec=Squeezing())
"""For every client and worker."""
