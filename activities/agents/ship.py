"""Brings a snapshot of code to machines that lack it, to several at the same time; the store is read only once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from activities.heartbeat import Say
from activities.versions.store import StoredCode, VersionStore
from agent.client import AgentClient
from everstep.base.text import size_text
from everstep.errors import CodeMissing, VersionStoreError
from everstep.model.version import NAME_CHARACTERS

AT_ONCE = 16
"""The largest number of machines that receive a snapshot at the same time, since they share the worker's network."""
ANSWER_S = 60.0
"""The time that a machine has in addition to the transfer, e.g. to unpack the snapshot, seconds."""
SLOWEST_BYTES = 1_000_000
"""A transfer to one machine is expected to be at least this fast, bytes per second."""

T = TypeVar("T")


class Shipment:
    """The transfer of one snapshot to machines; an async context manager.

    Args:
        store: The store that has the snapshot; None: there is no store.
        digest: The snapshot's digest; empty: there is no snapshot, and no machine lacks it.
        say: Shows the progress.
    """

    def __init__(self, store: VersionStore | None, digest: str, say: Say) -> None:
        self._store, self._digest, self._say = store, digest, say
        self._reading, self._places = asyncio.Lock(), asyncio.Semaphore(AT_ONCE)
        self._stored: StoredCode | None = None
        self.brought = 0
        """The number of machines that received the snapshot."""
        self.wanted = 0
        """The number of machines that lacked the snapshot."""

    async def __aenter__(self) -> Shipment:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stored is not None:
            self._stored.__exit__()

    async def supply(self, client: AgentClient) -> None:
        """Bring the snapshot to a machine that lacks it.

        Raises:
            AgentUnreachable: the machine does not answer.
            AgentError: the machine cannot accept the snapshot, e.g. because its disk is full.
            VersionStoreError: the snapshot cannot be read from the store.
        """
        if self._digest and not await client.has_code([self._digest]):
            await self._bring(client)

    async def supplied(self, client: AgentClient, call: Callable[[], Awaitable[T]]) -> T:
        """Call an agent. If it lacks the snapshot, bring the snapshot there and call again.

        An agent may lack the snapshot because it is new, or because it has removed an unused snapshot.

        Raises:
            All errors of :meth:`supply` and of the call.
        """
        try:
            return await call()
        except CodeMissing:
            await self._bring(client)
            return await call()

    async def _bring(self, client: AgentClient) -> None:
        self.wanted += 1
        try:
            stored = await self._read()
            async with self._places:
                timeout_s = ANSWER_S + stored.size / SLOWEST_BYTES
                await client.put_code(stored.digest, stored.size, _pieces(stored), timeout_s=timeout_s)
        except BaseException:
            self.wanted -= 1
            raise
        self.brought += 1
        self._show_progress()

    async def _read(self) -> StoredCode:
        """Return the archive, which is read once for all machines."""
        async with self._reading:
            if self._stored is None:
                if self._store is None:
                    raise VersionStoreError(
                        f"this worker has no store of versions, and a machine lacks the code "
                        f"{self._digest[:NAME_CHARACTERS]}: start all workers with the same --versions URL"
                    )
                self._stored = await self._store.code(self._digest)
            return self._stored

    def _show_progress(self) -> None:
        assert self._stored is not None
        size = size_text(self._stored.size)
        done = self.brought == self.wanted
        self._say("" if done else f"{self.brought} of {self.wanted} machines have received the code, {size}")


async def _pieces(stored: StoredCode) -> AsyncIterator[bytes]:
    for piece in stored.pieces():
        yield piece
