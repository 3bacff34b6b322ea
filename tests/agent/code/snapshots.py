"""Makes snapshots of code and sends them to an agent."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from everstep.system.code_archive import Packer, digest_of
from tests.agent.agents import RunningAgent

PIECE = 1000


def packed(files: Mapping[str, str]) -> tuple[bytes, str]:
    """Return an archive of files, and their digest."""
    output = io.BytesIO()
    with Packer(output) as packer:
        held = [packer.add(path, "f", text.encode()) for path, text in sorted(files.items())]
    return output.getvalue(), digest_of(held)


async def pieces(archive: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(archive), PIECE):
        yield archive[at : at + PIECE]


async def put(agent: RunningAgent, files: Mapping[str, str]) -> str:
    """Send files to an agent; returns their digest."""
    archive, digest = packed(files)
    await agent.client.put_code(digest, len(archive), pieces(archive), timeout_s=30)
    return digest


def folder(agent: RunningAgent) -> Path:
    return agent.state / "code"
