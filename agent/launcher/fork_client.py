"""This module is the agent's client of a fork server: it starts the server, connects to it, and sends it requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from agent.launcher.processes import kill_family
from everstep.errors import AgentError, Fenced, ForkServerLost
from everstep.rank import environment
from everstep.system import private_files as private
from everstep.system.procfs import is_alive, of_descriptor, start_ticks

Message = dict[str, Any]
PROGRAM = Path(__file__).resolve().with_name("fork_server.py")
START_TIMEOUT_S = 120.0
"""A fork server that cannot fork within this time has failed, seconds; its imports take 1-4 s."""
REQUEST_TIMEOUT_S = 30.0
LINE_LIMIT = 1 << 26

logger = structlog.get_logger()


def inherited_environment() -> dict[str, str]:
    """Return the agent's environment without the variables that are meant for the agent alone.

    The cluster's name stays: ``everstep down`` identifies a cluster's processes by it.
    """
    kept = environment.CLUSTER
    return {name: value for name, value in os.environ.items() if name == kept or not name.startswith("EVERSTEP_")}


def label_of(python: str, env: Mapping[str, str]) -> str:
    """Return a text that is equal for fork servers with the same interpreter, variables and code.

    The modules that a server has imported must match the files that its ranks import later.
    """
    text = json.dumps([python or sys.executable, sorted(env.items()), _code()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _code() -> list[list[str | int]]:
    """Return the files of everstep that ranks and fork servers import, as they were when this agent started."""
    root = PROGRAM.parents[2]
    paths = [*sorted((root / "everstep").rglob("*.py")), *sorted(PROGRAM.parent.glob("*.py"))]
    files: list[list[str | int]] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # an upgrade is in progress; it will restart this agent
            about = path.stat()
            files.append([str(path), about.st_size, about.st_mtime_ns])
    return files


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
    process.returncode = 0  # the reaper collects the process, so Popen must not wait for it
    return process.pid


class ForkServerClient:
    """A fork server process and the connection to it."""

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
            folder: Folder for its socket and its log.
            python: Interpreter of the job; empty: the agent's own.
            env: Variables of the job that are set before anything is imported.
            template: Socket of a template; the server is forked from it if the template has the same imports.

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
            reason = _last_line(log) or str(error)
            server.forget()
            interpreter = python or sys.executable
            raise AgentError(f"the fork server with {interpreter} did not start: {reason}") from error
        server.seconds = time.monotonic() - began
        return server

    @classmethod
    async def _spawn(cls, folder: Path, python: str, env: Mapping[str, str], template: Path | None) -> ForkServerClient:
        server = cls(private.make_folder(folder) / f"{uuid.uuid4().hex[:12]}.sock")
        arguments = ["--socket-path", str(server.path), "--label", label_of(python, env)]
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
            server.forget()  # a server without its socket's name ends, even if it is forked after this
            raise
        if not server.pid:
            # If the template forked a server and died before it answered, that server ends when its name is removed.
            server.forget()
            return await cls._spawn(folder, python, env, None)
        server.start_ticks = start_ticks(server.pid)
        return server

    @contextlib.contextmanager
    def files(self) -> Iterator[tuple[int, int]]:
        """Open the files that a new server inherits: its listening socket, and the file for its output."""
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
        """Connect and read the table; exits are reported from then on."""
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
            Fenced: the generation was stopped, or a newer generation was launched.
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
        """End the server and all processes that it forked."""
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
        """Disconnect; the server continues to run without this agent."""
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

    @property
    def libraries(self) -> dict[str, str]:
        """Return the versions of the libraries that the server has imported, by name."""
        return dict(self.table.get("libraries", {}))

    def living(self) -> int:
        """Return the number of running ranks in its table."""
        return sum(1 for row in self.table["ranks"] if not row["exit"])

    def forget(self) -> None:
        """Remove the socket's name and the log; a server that still lives then ends by itself."""
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


def _last_line(log: Path) -> str:
    """Return the last line of a fork server's log; empty: the log has no line, or cannot be read."""
    with contextlib.suppress(OSError):
        return next(iter(log.read_text(errors="replace").strip().splitlines()[-1:]), "")
    return ""


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """Provide a name for a unix socket that fits into the kernel's 108 bytes, even in a deep folder."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield str(of_descriptor(folder) / path.name)
    finally:
        os.close(folder)
