"""The agent's side of the template: ask it for a fork server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

BEGIN_LIMIT_S = 5.0
"""A template that does not listen this long after it was asked for first is not waited for (ours)."""
IMPORT_LIMIT_S = 120.0
"""One that listens may still import, which takes 1-4 s; it is given up after this long (ours)."""
LOOK_S = 0.05

logger = structlog.get_logger()


async def fork_from(template: Path, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> int:
    """Let the template fork a fork server.

    Args:
        template: its socket.
        arguments: of the fork server, all but the descriptor of its socket.
        env: its whole environment.
        files: its listening socket and its log.

    Returns:
        The pid; 0 when the agent has to start this one itself.
    """
    try:
        reply = await _ask(template, json.dumps({"arguments": list(arguments), "env": dict(env)}).encode(), files)
    except (OSError, ValueError) as error:  # a time-out is an OSError
        reply = {"ok": False, "message": f"{template}: {error or type(error).__name__}"}
    if reply["ok"]:
        return int(str(reply["pid"]))
    logger.info("a fork server is started without the template", reason=reply["message"])
    return 0


async def _ask(template: Path, request: bytes, files: Sequence[int]) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    with await _connected(template) as connection:
        async with asyncio.timeout(IMPORT_LIMIT_S):
            socket.send_fds(connection, [request[:1]], list(files))
            await loop.sock_sendall(connection, request[1:] + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                more = await loop.sock_recv(connection, 1 << 16)
                if not more:
                    raise ConnectionResetError("it ended before it answered")
                data += more
    reply: dict[str, object] = json.loads(data)
    return reply


async def _connected(template: Path) -> socket.socket:
    """A connection; the template may have been started in the moment before."""
    loop, connection = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(BEGIN_LIMIT_S):
            while True:
                try:
                    await loop.sock_connect(connection, str(template))
                except (FileNotFoundError, ConnectionRefusedError):
                    await asyncio.sleep(LOOK_S)
                else:
                    return connection
    except BaseException:
        connection.close()
        raise
