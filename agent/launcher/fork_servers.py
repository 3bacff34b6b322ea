"""This module manages the fork servers of this machine: each job has its own, and a warm one waits for the next job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import structlog

from agent.launcher.fork_client import START_TIMEOUT_S, ForkServerClient, label_of
from agent.launcher.processes import kill_family
from everstep.base.backoff import Backoff
from everstep.errors import AgentError, ForkServerLost
from everstep.system import procfs

ADOPT_PATIENCE_S = 2.0
"""A starting agent waits this long for the answers of fork servers, seconds; then it waits in the background."""
CHECK_S = 30.0
"""Time between two checks whether the warm fork server answers, seconds."""
CHECK_LIMIT_S = 10.0
"""A warm fork server that does not answer within this time is replaced, seconds."""
AGAIN_S = (1.0, 60.0)
"""The shortest and the longest wait before a warm fork server that died is started again, seconds."""

logger = structlog.get_logger()


class ForkServers:
    """All fork servers of this machine: each job has its own, and a warm server waits for the next job."""

    def __init__(self, folder: Path, *, prewarm: bool, template: Path | None = None) -> None:
        self.folder = folder
        self.template = template
        """Socket of the template from which fork servers are forked; None: there is none."""
        self.prewarm = prewarm
        self.problem = ""
        """Why no warm fork server can be started; empty: it is ready, or still imports, or a job uses it."""
        self._warm: asyncio.Task[ForkServerClient] | None = None
        self._wanted = False
        """Whether a warm fork server is wanted, because no job uses it."""
        self._died = asyncio.Event()
        """Set when the warm fork server died, or could not be started."""
        self._warm_label = label_of("", {})
        self._tried: dict[str, ForkServerClient] = {}
        """Job → the fork server in which its script was tried, if the warm server has other imports."""
        self._trying: dict[str, asyncio.Lock] = {}
        self._silent: dict[asyncio.Task[None], ForkServerClient] = {}
        """Connection that was not answered yet → its fork server."""

    async def adopt(self, late: Callable[[ForkServerClient], None]) -> dict[str, ForkServerClient]:
        """Connect to the fork servers of an earlier agent, and return them by job; servers without a job end.

        A server that is forgotten ends, with all its ranks. So a server is forgotten only if it is certainly dead, or
        certainly has no ranks. For a server that does not answer (its process was stopped, or the machine is
        overloaded) the agent waits without a limit.

        Args:
            late: Called with a server that answers later; it may belong to a job or to none.
        """
        adopted: dict[str, ForkServerClient] = {}
        silent = {self._greet(server): server for server in map(ForkServerClient, sorted(self.folder.glob("*.sock")))}
        if patiently := [greeting for greeting, server in silent.items() if not _imports(server.path)]:
            await asyncio.wait(patiently, timeout=ADOPT_PATIENCE_S)
        for greeting, server in silent.items():
            if not greeting.done():
                self._wait_for(server, greeting, late)
            elif greeting.exception():
                server.forget()  # no process listens at its socket: the server is dead
            elif server.job and server.living() > (adopted[server.job].living() if server.job in adopted else -1):
                if other := adopted.get(server.job):
                    await other.end()
                adopted[server.job] = server
            else:
                await self.keep_or_end(server)
        return adopted

    @staticmethod
    def _greet(server: ForkServerClient) -> asyncio.Task[None]:
        """Connect without a time limit; fails only if the server is dead."""

        async def greet() -> None:
            while True:
                try:
                    return await server.connect(None)
                except (ConnectionRefusedError, FileNotFoundError):
                    raise
                except OSError as error:  # e.g. its backlog is full, which shows that a process listens
                    logger.warning("no connection to a fork server yet", socket=str(server.path), reason=str(error))
                    await asyncio.sleep(ADOPT_PATIENCE_S)

        return asyncio.create_task(greet())

    def _wait_for(
        self, server: ForkServerClient, greeting: asyncio.Task[None], late: Callable[[ForkServerClient], None]
    ) -> None:
        """Wait for a server that did not answer yet; a server that still imports becomes the warm server."""
        if _imports(server.path):
            if self.prewarm and self._warm is None:
                self._await_warm(self._late(server, greeting))
            else:
                greeting.cancel()
                server.forget()  # the server has forked nothing, and ends by itself
            return
        logger.warning("a fork server does not answer; its ranks are kept", socket=str(server.path))

        def answered(greeting: asyncio.Task[None]) -> None:
            self._silent.pop(greeting, None)
            if greeting.cancelled():
                return
            if greeting.exception():
                server.forget()
            else:
                logger.info("a silent fork server answers again", pid=server.pid, job=server.job or None)
                late(server)

        self._silent[greeting] = server
        greeting.add_done_callback(answered)

    async def _start(self, python: str, env: Mapping[str, str]) -> ForkServerClient:
        return await ForkServerClient.start(self.folder, python, env, self.template)

    async def keep_or_end(self, server: ForkServerClient) -> None:
        """Keep a server without a job as the warm server, or end it."""
        if not server.job and self.prewarm and self._warm is None and server.label == self._warm_label:
            self._keep(server)
        else:
            await server.end()

    async def _late(self, server: ForkServerClient, greeting: asyncio.Task[None]) -> ForkServerClient:
        """Wait for a server that was still importing when its agent died; returns a new one if it does not fit."""
        with contextlib.suppress(OSError, AgentError, TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await greeting
            if server.label == self._warm_label and not server.job:
                return server
        server.forget()
        return await self._start("", {})

    @property
    def warm(self) -> ForkServerClient | None:
        """The fork server that waits for the next job; None: no server is ready."""
        task = self._warm
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return None if task.result().lost else task.result()

    def warm_up(self) -> None:
        """Start the fork server for the next job, in the background."""
        if self.prewarm and self._warm is None:
            self._await_warm(self._start("", {}))

    def _await_warm(self, coming: Coroutine[Any, Any, ForkServerClient]) -> None:
        self._wanted = True
        self._warm = asyncio.create_task(coming)
        self._warm.add_done_callback(self._warmed)

    def _keep(self, server: ForkServerClient) -> None:
        self._await_warm(_done(server))

    def _warmed(self, task: asyncio.Task[ForkServerClient]) -> None:
        if task.cancelled():
            return
        if error := task.exception():
            logger.error("no warm fork server", reason=str(error))
            if self._warm is task:
                self._warm, self.problem = None, str(error)
                self._died.set()
        else:
            self.problem = ""
            task.result().on_lost = self._died.set

    async def keep_warm(self) -> None:
        """Replace a warm fork server that died, hangs, or did not start; runs until cancelled."""
        backoff, began_s = Backoff(*AGAIN_S), time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._died.wait(), CHECK_S)
            self._died.clear()
            await self._check()
            if self._wanted and self._warm is None:
                await asyncio.sleep(backoff.next_s(lasted_s=time.monotonic() - began_s))
                began_s = time.monotonic()
                if self._wanted:
                    self.warm_up()

    async def _check(self) -> None:
        """Check that the warm fork server answers; a server that does not answer is killed."""
        task = self._warm
        if task is None or not task.done() or task.cancelled() or task.exception():
            return
        server = task.result()
        try:
            server.table = await server.request("subscribe", timeout_s=CHECK_LIMIT_S)
        except AgentError as error:
            if self._warm is not task:
                return  # a job uses the server now
            logger.error("the warm fork server does not answer", pid=server.pid, reason=str(error))
            self._warm, self.problem = None, f"the warm fork server does not answer: {error}"
            kill_family(server.pid, server.start_ticks)  # it may hang; a trial in it dies too
            await server.end()

    async def assign(self, job: str, python: str, env: Mapping[str, str]) -> ForkServerClient:
        """Assign a fork server to a job: the server that tried its code, or the warm server, or a new server."""
        server = self._fitting(job, python, env, leaves=True)
        if server is None and self._warm and label_of(python, env) == self._warm_label:
            task, self._warm, self._wanted = self._warm, None, False
            with contextlib.suppress(AgentError):
                server = await asyncio.shield(task)
                server.on_lost = lambda: None
            if server and server.lost:
                server.forget()
                server = None
        if server is None:
            server = await self._start(python, env)
        server.table = await server.request("assign", job=job)
        server.job = job
        return server

    @contextlib.asynccontextmanager
    async def borrowed(self, job: str, python: str, env: Mapping[str, str]) -> AsyncIterator[ForkServerClient]:
        """Provide a fork server for the trial of a job's code: the warm server if its imports fit, else a new server.

        The warm server may be assigned to a job during the trial; the trial then continues. A new server is kept for
        the launch of the same code, until it is assigned to the job, or the job needs another server or is over.

        Raises:
            AgentError: no server starts.
        """
        if self.prewarm and label_of(python, env) == self._warm_label:
            yield await self._warmed_up()
            return
        async with self._trying.setdefault(job, asyncio.Lock()):
            server = self._fitting(job, python, env, leaves=False)
            if server is None:
                await self.forget(job)
                server = self._tried[job] = await self._start(python, env)
            yield server

    def _fitting(self, job: str, python: str, env: Mapping[str, str], *, leaves: bool) -> ForkServerClient | None:
        """Return the fork server that tried a job's code, if its imports fit; ``leaves``: the server is no longer kept
        for the job."""
        server = self._tried.get(job)
        if server is None or server.lost or server.label != label_of(python, env):
            return None
        if leaves:
            del self._tried[job]
        return server

    async def forget(self, job: str) -> None:
        """End the fork server that is kept for a job."""
        if server := self._tried.pop(job, None):
            await server.end()

    async def _warmed_up(self) -> ForkServerClient:
        for _ in range(2):
            self.warm_up()
            assert self._warm
            task = self._warm
            server = await asyncio.shield(task)
            if not server.lost:
                return server
            if self._warm is task:
                self._warm = None
                server.forget()
        raise ForkServerLost("the warm fork server died repeatedly; see the agent's log")

    async def give_back(self, server: ForkServerClient) -> None:
        """Keep the server of a job that is over as the warm server if it fits, else end it."""
        if self.prewarm and self._warm is None and server.label == self._warm_label and not server.lost:
            try:
                server.table = await server.request("reset")
            except AgentError as error:
                logger.warning("a fork server could not be reset", pid=server.pid, reason=str(error))
            else:
                server.job, server.seconds = "", 0.0
                server.on_exit, server.on_lost = lambda _: None, lambda: None
                self._keep(server)
                return
        await server.end()

    async def close(self, *, end_warm: bool) -> None:
        """Disconnect from the warm server, or end it; all other kept servers end."""
        for greeting, server in list(self._silent.items()):
            greeting.cancel()
            await server.disconnect()
        for job in list(self._tried):
            await self.forget(job)
        task, self._warm, self._wanted = self._warm, None, False
        if task is None:
            return
        if end_warm and task.done() and not task.cancelled() and not task.exception():
            await task.result().end()
            return
        if task.done() and not task.cancelled() and not task.exception():
            await task.result().disconnect()
        else:
            task.cancel()


def _imports(path: Path) -> bool:
    """Return whether a fork server still imports, and so has forked no process.

    When a server has forked ranks, several processes have the name of its socket in their command lines.
    """
    if path.with_suffix(".ready").exists():
        return False
    return sum(os.fsencode(path) in procfs.arguments(pid) for pid in procfs.pids()) == 1


async def _done(server: ForkServerClient) -> ForkServerClient:
    return server
