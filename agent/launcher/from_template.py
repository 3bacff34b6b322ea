"""This module is the agent's client of the template: it requests fork servers, and asks how children of it ended."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from agent.launcher.processes import End

BEGIN_LIMIT_S = 5.0
"""The template has this long until it listens, seconds; otherwise the agent starts the fork server itself."""
IMPORT_LIMIT_S = 120.0
"""A template that listens may still import, which takes 1-4 s; the agent waits this long for it, seconds."""
ANSWER_LIMIT_S = 0.2
"""A template has this long to answer how a process ended, seconds."""
LOOK_S = 0.05

logger = structlog.get_logger()


async def fork_from(template: Path, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> int:
    """Request that the template forks a fork server.

    Args:
        template: Socket of the template.
        arguments: Arguments of the fork server, without the descriptor of its socket.
        env: Complete environment of the fork server.
        files: Listening socket and log of the fork server.

    Returns:
        The pid; 0 if the agent must start this fork server itself.
    """
    try:
        reply = await _ask(template, json.dumps({"arguments": list(arguments), "env": dict(env)}).encode(), files)
    except (OSError, ValueError) as error:  # a time-out is an OSError
        reply = {"ok": False, "message": f"{template}: {error or type(error).__name__}"}
    if reply["ok"]:
        return int(str(reply["pid"]))
    logger.info("a fork server is started without the template", reason=reply["message"])
    return 0


async def end_of(template: Path, pid: int, ticks: int) -> End | None:
    """Ask the template how one of its children ended: a fork server, or a rank whose fork server died before it.

    Args:
        template: Socket of the template.
        pid: Pid of the process.
        ticks: Start time of the process in clock ticks, because pids are reused.

    Returns:
        None if the template does not know, or does not answer.
    """
    request = json.dumps({"ended": pid, "start_ticks": ticks}).encode()
    try:
        reply = await _ask(template, request, [], limit_s=ANSWER_LIMIT_S)
    except (OSError, ValueError):
        return None
    return End.of(int(str(reply["status"])), int(str(reply["time_ns"]))) if reply["ok"] else None


async def _ask(
    template: Path, request: bytes, files: Sequence[int], limit_s: float = IMPORT_LIMIT_S
) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    with await _connected(template, min(limit_s, BEGIN_LIMIT_S)) as connection:
        async with asyncio.timeout(limit_s):
            if files:
                socket.send_fds(connection, [request[:1]], list(files))
                request = request[1:]
            await loop.sock_sendall(connection, request + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                more = await loop.sock_recv(connection, 1 << 16)
                if not more:
                    raise ConnectionResetError("it ended before it answered")
                data += more
    reply: dict[str, object] = json.loads(data)
    return reply


async def _connected(template: Path, limit_s: float) -> socket.socket:
    """Connect to the template, which may have been started a moment ago."""
    loop, connection = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(limit_s):
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
