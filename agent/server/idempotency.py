"""This module remembers the replies to commands. A repeated request id gets the first reply, and no second effect."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import structlog
from google.protobuf.message import Message

from agent.state.live import LiveLines

KEPT = 1024
"""The number of replies that are remembered; the oldest are forgotten first."""

logger = structlog.get_logger()


class Numbered(Protocol):
    """A request that is carried out once for each id."""

    request_id: str
    job: str


class Command(Numbered, Protocol):
    """The fields of every command."""

    run: str


Reply = TypeVar("Reply", bound=Message)
_Key = tuple[str, str, str]


class RequestMemory:
    """First replies by (job, command, request id), in a file that survives the agent."""

    def __init__(self, file: LiveLines) -> None:
        self._file = file
        self._replies: OrderedDict[_Key, bytes] = OrderedDict()
        self._running: dict[_Key, asyncio.Task[Message]] = {}
        self._lines = 0
        for number, line in enumerate(file.read(), 1):  # an incomplete last line belongs to a request without a reply
            try:
                row = json.loads(line)
                self._replies[row["job"], row["command"], row["id"]] = base64.b64decode(row["reply"])
            except (ValueError, KeyError, TypeError) as error:
                # A repeated command is then carried out again; the fork server and fences make this harmless.
                logger.warning("skipped a damaged line", path=str(file.path), line=number, reason=str(error))
        self._rewrite()

    async def once(
        self, command: str, request: Numbered, reply_type: type[Reply], carry_out: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        """Carry a command out unless its id was answered already.

        A caller that disconnects does not stop the command half-way. Failures are not remembered: the same id may be
        tried again. A command without an id is not remembered.
        """
        if not request.request_id:
            return await carry_out()
        key = (request.job, command, request.request_id)
        if known := self._replies.get(key):
            return reply_type.FromString(known)
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._remember(key, carry_out))
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        reply = await asyncio.shield(running)
        assert isinstance(reply, reply_type)
        return reply

    def forget(self, job: str) -> None:
        """Forget a job, because a later job of the same name may use the same ids."""
        kept = [(key, reply) for key, reply in self._replies.items() if key[0] != job]
        if len(kept) < len(self._replies):
            self._replies = OrderedDict(kept)
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    async def _remember(self, key: _Key, carry_out: Callable[[], Awaitable[Message]]) -> Message:
        reply = await carry_out()
        self._replies[key] = reply.SerializeToString()
        while len(self._replies) > KEPT:
            self._replies.popitem(last=False)
        self._lines += 1
        if not self._file.append(_line(key, self._replies[key])) or self._lines > 2 * KEPT:
            self._rewrite()
        return reply

    def _rewrite(self) -> None:
        self._file.rewrite(_line(key, reply) for key, reply in self._replies.items())
        self._lines = len(self._replies)


def _line(key: _Key, reply: bytes) -> bytes:
    job, command, request = key
    row = {"job": job, "command": command, "id": request, "reply": base64.b64encode(reply).decode()}
    return json.dumps(row).encode() + b"\n"
