"""The agent's side of the fork server: start it, find it again, talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from agent.launcher.from_template import fork_from
from agent.launcher.processes import is_alive, kill_family, start_ticks
from everstep import environment, private
from everstep.errors import AgentError, Fenced

Message = dict[str, Any]
PROGRAM = Path(__file__).resolve().with_name("fork_server.py")
START_TIMEOUT_S = 120.0
"""A fork server that cannot fork after this long is given up (ours; imports take 1-4 s)."""
REQUEST_TIMEOUT_S = 30.0
ADOPT_PATIENCE_S = 2.0
"""A fork server that says nothing for this long is waited for in the background (ours)."""
LINE_LIMIT = 1 << 26

logger = structlog.get_logger()


class ForkServerLost(AgentError):
    """The fork server died while it was needed."""


def inherited_environment() -> dict[str, str]:
    """The agent's environment without what is meant for the agent alone.

    The cluster's name stays: ``everstep down`` finds by it what belongs to a cluster.
    """
    kept = environment.CLUSTER
    return {name: value for name, value in os.environ.items() if name == kept or not name.startswith("EVERSTEP_")}


def label_of(python: str, env: Mapping[str, str]) -> str:
    """Equal for fork servers that can stand in for one another."""
    text = json.dumps([python or sys.executable, sorted(env.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _start_process(python: str, arguments: list[str], env: Mapping[str, str], listener: int, output: int) -> int:
    process = subprocess.Popen(
        [python, "-P", str(PROGRAM), *arguments, "--socket-fd", str(listener)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[listener],
        start_new_session=True,
        cwd="/",
    )
    process.returncode = 0  # the reaper collects it; Popen need not ask again
    return process.pid


class ForkServerClient:
    """One fork server process and the connection to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = 0
        self.start_ticks = 0
        self.job = ""
        self.label = ""
        self.seconds = 0.0
        self.table: Message = {}
        self.lost = False
        self.on_exit: Callable[[Message], None] = lambda _: None
        self.on_lost: Callable[[], None] = lambda: None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, folder: Path, python: str, env: Mapping[str, str], template: Path | None = None
    ) -> ForkServerClient:
        """Start a fork server and wait until it can fork.

        Args:
            folder: for its socket and its log.
            python: interpreter of the job; empty: the agent's own.
            env: variables of the job that are set before anything is imported.
            template: socket of a template to fork it from, where that has imported the same.

        Raises:
            AgentError: the interpreter does not start, or its imports fail.
        """
        began = time.monotonic()
        server = await cls._spawn(folder, python or sys.executable, env, template)
        log = server.path.with_suffix(".log")
        try:
            await server.connect(START_TIMEOUT_S)
        except asyncio.CancelledError:
            kill_family(server.pid, server.start_ticks)
            server.forget()
            raise
        except (OSError, AgentError) as error:
            kill_family(server.pid, server.start_ticks)
            said = _last_line(log) or str(error)
            server.forget()
            interpreter = python or sys.executable
            raise AgentError(f"the fork server with {interpreter} did not start: {said}") from error
        server.seconds = time.monotonic() - began
        return server

    @classmethod
    async def _spawn(cls, folder: Path, python: str, env: Mapping[str, str], template: Path | None) -> ForkServerClient:
        server = cls(private.make_folder(folder) / f"{uuid.uuid4().hex[:12]}.sock")
        arguments = [
            *("--socket-path", str(server.path), "--label", label_of(python, env)),
            *("--everstep", str(PROGRAM.parent.parent)),
        ]
        environment = inherited_environment() | dict(env)
        try:
            with server.files() as files:
                if template and python == sys.executable:
                    server.pid = await fork_from(template, arguments, environment, files)
                else:
                    server.pid = _start_process(python, arguments, environment, *files)
        except OSError as error:
            server.forget()
            raise AgentError(f"the interpreter {python} cannot be started: {error}") from error
        except asyncio.CancelledError:
            server.forget()  # by that it ends, should it be forked yet
            raise
        if not server.pid:
            # It may have forked one and died before it said so: that one ends with its socket, which is no other one's.
            server.forget()
            return await cls._spawn(folder, python, env, None)
        server.start_ticks = start_ticks(server.pid)
        return server

    @contextlib.contextmanager
    def files(self) -> Iterator[tuple[int, int]]:
        """What a new server inherits: its listening socket, and the file for what it prints."""
        with (
            socket.socket(socket.AF_UNIX) as listener,
            open(self.path.with_suffix(".log"), "ab", opener=private.open_file) as log,
        ):
            with _short_name(self.path) as name:
                listener.bind(name)
                Path(name).chmod(0o600)  # before it listens
            listener.listen(16)
            yield listener.fileno(), log.fileno()

    async def connect(self, timeout_s: float | None = REQUEST_TIMEOUT_S) -> None:
        """Connect and learn the table; exits are told from then on."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            with _short_name(self.path) as name:
                connection.connect(name)
        except OSError:
            connection.close()
            raise
        reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_LIMIT)
        self._reading = asyncio.create_task(self._read(reader))
        self.table = await self.request("subscribe", timeout_s=timeout_s)
        self.pid, self.job, self.label = self.table["pid"], self.table["job"], self.table["label"]
        self.start_ticks = start_ticks(self.pid)

    async def request(self, op: str, *, timeout_s: float | None = REQUEST_TIMEOUT_S, **arguments: Any) -> Message:
        """Send a request and wait for its reply.

        Raises:
            Fenced: the generation was stopped, or a newer one was launched.
            ForkServerLost: the fork server died before it answered.
            AgentError: it refused for another reason, or did not answer in time.
        """
        if self.lost or self._writer is None:
            raise ForkServerLost(f"the fork server {self.pid} is dead")
        number = next(self._numbers)
        waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._writer.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
            async with asyncio.timeout(timeout_s):
                reply = await waiting
        except TimeoutError as error:
            raise AgentError(f"the fork server {self.pid} did not answer {op!r} within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(number, None)
        if reply["ok"]:
            return reply
        kind = Fenced if reply["error"] == "fenced" else AgentError
        raise kind(reply["message"])

    async def end(self) -> None:
        """End the server and all that it forked."""
        self.on_lost = lambda: None
        with contextlib.suppress(AgentError):
            await self.request("end", timeout_s=15.0)
        if is_alive(self.pid, self.start_ticks):
            await asyncio.sleep(0.05)
        if is_alive(self.pid, self.start_ticks):
            kill_family(self.pid, self.start_ticks)
        await self.disconnect()
        self.forget()

    async def disconnect(self) -> None:
        """Leave the server running, without us."""
        self.on_lost = lambda: None
        self.lost = True
        if self._reading:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def living(self) -> int:
        """How many ranks of its table run."""
        return sum(1 for row in self.table["ranks"] if not row["exit"])

    def forget(self) -> None:
        """Remove the socket's name and the log: a server that lives ends by itself."""
        self.path.unlink(missing_ok=True)
        for suffix in (".log", ".ready"):
            self.path.with_suffix(suffix).unlink(missing_ok=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except OSError:
            pass
        self.lost = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ForkServerLost(f"the fork server {self.pid} died"))
        self.on_lost()

    def _receive(self, message: Message) -> None:
        if message.get("event") == "exit":
            self.on_exit(message)
        elif (waiting := self._waiting.get(message["id"])) and not waiting.done():
            waiting.set_result(message)


class ForkServers:
    """All fork servers of this machine: one per job, and a warm one for the next job."""

    def __init__(
        self, folder: Path, *, prewarm: bool, earlier: Path | None = None, template: Path | None = None
    ) -> None:
        self.folder = folder
        self.template = template
        """Socket of the process from which fork servers are forked, where there is one."""
        self.earlier = earlier
        """Where agents of earlier releases had the sockets."""
        self.prewarm = prewarm
        self._warm: asyncio.Task[ForkServerClient] | None = None
        self._warm_label = label_of("", {})
        self._silent: dict[asyncio.Task[None], ForkServerClient] = {}
        """Greetings that were not answered yet."""

    async def adopt(self, late: Callable[[ForkServerClient], None]) -> dict[str, ForkServerClient]:
        """Find the fork servers that an earlier agent left, by job; end those that belong to nobody.

        To forget a server is to end it with all its ranks. Only one that is surely
        dead or surely has no ranks is forgotten; one that says nothing (it was
        stopped, the machine is overloaded) is waited for as long as it takes.

        Args:
            late: takes a server that answered later; it may be one of a job or of none.
        """
        found: dict[str, ForkServerClient] = {}
        folders = [self.folder, *([self.earlier] if self.earlier else [])]
        sockets = [path for folder in folders for path in sorted(folder.glob("*.sock"))]
        silent = {self._greet(server): server for server in map(ForkServerClient, sockets)}
        if patiently := [greeting for greeting, server in silent.items() if not _imports(server.path)]:
            await asyncio.wait(patiently, timeout=ADOPT_PATIENCE_S)
        for greeting, server in silent.items():
            if not greeting.done():
                self._wait_for(server, greeting, late)
            elif greeting.exception():
                server.forget()  # nobody listens any more: it is dead
            elif server.job and server.living() > (found[server.job].living() if server.job in found else -1):
                if other := found.get(server.job):
                    await other.end()
                found[server.job] = server
            else:
                await self.keep_or_end(server)
        return found

    @staticmethod
    def _greet(server: ForkServerClient) -> asyncio.Task[None]:
        """Connect, however long the server takes; fails only when it is dead."""

        async def greet() -> None:
            while True:
                try:
                    return await server.connect(None)
                except (ConnectionRefusedError, FileNotFoundError):
                    raise
                except OSError as error:  # e.g. its backlog is full: somebody listens
                    logger.warning("no connection to a fork server yet", socket=str(server.path), reason=str(error))
                    await asyncio.sleep(ADOPT_PATIENCE_S)

        return asyncio.create_task(greet())

    def _wait_for(
        self, server: ForkServerClient, greeting: asyncio.Task[None], late: Callable[[ForkServerClient], None]
    ) -> None:
        """Wait for a server that did not answer yet; one that still imports serves as the warm one."""
        if _imports(server.path):
            if self.prewarm and self._warm is None:
                self._warm = asyncio.create_task(self._late(server, greeting))
            else:
                greeting.cancel()
                server.forget()  # it has forked nothing, and ends by itself
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
        """A server that serves no job: keep it as the warm one, or end it."""
        if not server.job and self.prewarm and self._warm is None and server.label == self._warm_label:
            self._warm = asyncio.create_task(_done(server))
        else:
            await server.end()

    async def _late(self, server: ForkServerClient, greeting: asyncio.Task[None]) -> ForkServerClient:
        """A fork server that was still importing when its agent died, if it serves as the warm one."""
        with contextlib.suppress(OSError, AgentError, TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await greeting
            if server.label == self._warm_label and not server.job:
                return server
        server.forget()
        return await self._start("", {})

    def warm_up(self) -> None:
        """Start the fork server that the next job takes over, in the background."""
        if self.prewarm and self._warm is None:
            self._warm = asyncio.create_task(self._start("", {}))
            self._warm.add_done_callback(self._warmed)

    def _warmed(self, task: asyncio.Task[ForkServerClient]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("no warm fork server", reason=str(error))
            self._warm = None

    async def take(self, job: str, python: str, env: Mapping[str, str]) -> ForkServerClient:
        """A fork server for a job: the warm one where it fits, else a new one."""
        server: ForkServerClient | None = None
        if self._warm and label_of(python, env) == self._warm_label:
            task, self._warm = self._warm, None
            with contextlib.suppress(AgentError):
                server = await asyncio.shield(task)
            if server and server.lost:
                server.forget()
                server = None
        if server is None:
            server = await self._start(python, env)
        server.table = await server.request("assign", job=job)
        server.job = job
        return server

    async def give_back(self, server: ForkServerClient) -> None:
        """The job of a server is over: keep it as the warm one where it fits, else end it."""
        if self.prewarm and self._warm is None and server.label == self._warm_label and not server.lost:
            try:
                server.table = await server.request("reset")
            except AgentError as error:
                logger.warning("a fork server could not be reset", pid=server.pid, reason=str(error))
            else:
                server.job, server.seconds = "", 0.0
                server.on_exit, server.on_lost = lambda _: None, lambda: None
                self._warm = asyncio.create_task(_done(server))
                return
        await server.end()

    async def close(self, *, end_warm: bool) -> None:
        """Let go of the warm server, or end it."""
        for greeting, server in list(self._silent.items()):
            greeting.cancel()
            await server.disconnect()
        task, self._warm = self._warm, None
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
    """Whether a fork server still imports, and so has forked nothing.

    What it forks was started with the socket's name too.
    """
    if path.with_suffix(".ready").exists():
        return False
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                found += str(path).encode() in (entry / "cmdline").read_bytes().split(b"\0")
    return found == 1


async def _done(server: ForkServerClient) -> ForkServerClient:
    return server


def _last_line(log: Path) -> str:
    """What a fork server wrote last; empty: nothing, or its folder is gone."""
    with contextlib.suppress(OSError):
        return next(iter(log.read_text(errors="replace").strip().splitlines()[-1:]), "")
    return ""


@contextlib.contextmanager
def _short_name(path: Path) -> Any:
    """A name for a unix socket that fits into the kernel's 108 bytes, however deep its folder is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
