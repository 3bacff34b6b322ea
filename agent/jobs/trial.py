"""This module tries a script: the script runs until it joins the job, in a process that is independent of the job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import structlog

from agent.jobs.fork_request import check_paths, folder_to_work_in
from agent.jobs.host import Host
from agent.launcher.fork_client import Message, inherited_environment
from agent.launcher.processes import NO_SESSION, kill_session
from agent.state.live import FOLDER as LIVE
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError, ForkServerLost
from everstep.rank import environment
from everstep.system import private_files as private
from everstep.system.listening import address_of, bound

FOLDER = "trials"
"""Name of the folder for all trials, in the agent's folder in shared memory."""
OUTCOME = "outcome"
"""File in the trial's folder with the pid of the process that called the function to join the job, and its note."""
MOST_TEXT = 8192
"""The number of bytes at the end of a trial's output that are kept."""
ANSWER_S = 30.0
"""The time that a fork server has, beyond the limit of a trial, to report how the trial ended, seconds."""
LONGEST_S = 3600.0
KEPT_NAMES = (environment.TOPOLOGY,)
"""The variables of everstep that a trial gets from a job. It gets no variable that names files of the job's ranks."""

logger = structlog.get_logger()


def forget_earlier(host: Host) -> None:
    """Remove the folders of an earlier agent's trials, which ended with that agent."""
    shutil.rmtree(host.shm_dir / LIVE / FOLDER, ignore_errors=True)


async def try_script(host: Host, request: pb.TryCodeRequest, values: Mapping[str, str]) -> pb.TryCodeReply:
    """Try a script.

    Args:
        host: The machine.
        request: The script, its code and its settings.
        values: Variables that ``env_from`` names, with their values.

    Raises:
        CodeMissing: this machine does not have its code.
        ConfigError: the script or its folder does not exist.
        AgentError: no fork server can be started, or the fork server died during the trial.
    """
    began = time.monotonic()
    if not 0 < request.timeout_s <= LONGEST_S:
        raise ConfigError(f"timeout_s is {request.timeout_s:g}; a trial takes more than 0 and at most {LONGEST_S:g} s")
    program = request.program
    with host.code.kept(program.code):
        script, folder = Path(program.script), ""
        if program.code:
            script = await host.code.script(program.code, program.script, verified=True)
            folder = str(host.code.folder / program.code)
        cwd = folder_to_work_in(program, script)
        check_paths(str(script), cwd)
        with _own_folder(host) as own:
            outcome_file = own / OUTCOME
            arguments = {
                "script": str(script),
                "folder": folder,
                "args": list(program.args),
                "cwd": cwd,
                "env": _environment(host, request, values) | {environment.TRIAL: str(outcome_file)},
            }
            end, output = await _run(host, request, own, arguments)
            joined = _joined(outcome_file)
    reply = _outcome(end, output.replace(f"{folder}/", "") if folder else output, *joined)
    reply.seconds = time.monotonic() - began
    logger.info(
        "tried code",
        job=request.job,
        code=program.code,
        outcome=pb.TryCodeReply.Outcome.Name(reply.outcome),
        seconds=round(reply.seconds, 2),
    )
    return reply


async def _run(host: Host, request: pb.TryCodeRequest, own: Path, arguments: Message) -> tuple[Message, str]:
    """Run the trial, a second time if the fork server dies; returns the server's report of its end, and its output."""
    imports = request.program.imports
    for last in (False, True):
        fifo = own / f"output-{last}"
        async with (
            host.fork_servers.borrowed(request.job, imports.python, dict(imports.env)) as server,
            _Tail.of(fifo) as output,
        ):
            try:
                limit_s = request.timeout_s
                end = await server.request(
                    "try", timeout_s=limit_s + ANSWER_S, limit_s=limit_s, output=str(fifo), **arguments
                )
                return end, output.text()
            except ForkServerLost as error:
                logger.warning("the fork server of a trial died", job=request.job, reason=str(error))
                mark = f"{environment.TRIAL}={own / OUTCOME}"
                await asyncio.to_thread(kill_session, NO_SESSION, mark)  # the trial's children still live
                if last:
                    raise
    raise AssertionError


def _joined(outcome: Path) -> tuple[int, str]:
    """Return the pid of the process that joined the job (0: none), and its note on parts that it could not try."""
    with contextlib.suppress(OSError, ValueError):
        pid, _, note = outcome.read_text().partition(" ")
        return int(pid), note
    return 0, ""


def _outcome(end: Message, output: str, joined: int, note: str) -> pb.TryCodeReply:
    """Return the outcome of a trial.

    Args:
        end: End of the trial's process, as the fork server reports it.
        output: The last part of the trial's output.
        joined: Pid of the process that reached the call that joins the job; 0: none did.
        note: Note of that process on parts that it could not try.
    """
    kind, value = end["exit"]["kind"], end["exit"]["value"]
    if joined and (joined == end["pid"] or (kind, value) == ("code", 0)):
        return pb.TryCodeReply(outcome=pb.TryCodeReply.JOINED, text=note)
    if end["slow"]:
        return pb.TryCodeReply(outcome=pb.TryCodeReply.SLOW, text=_last(output))
    if (kind, value) == ("code", 0):
        return pb.TryCodeReply(outcome=pb.TryCodeReply.ENDED, text=_last(output))
    how = f"exit code {value}" if kind == "code" else f"ended by {_signal(value)}"
    return pb.TryCodeReply(outcome=pb.TryCodeReply.FAILED, text=_last(f"{output.rstrip()}\n({how})".lstrip()))


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last(text: str) -> str:
    """Return the end of a text, in complete characters."""
    return text.encode()[-MOST_TEXT:].decode(errors="ignore")


def _environment(host: Host, request: pb.TryCodeRequest, values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the tried rank, without the variables of the running job."""
    env = {
        "OMP_NUM_THREADS": "1",
        **host.sockets,
        **inherited_environment(),
        **dict(request.program.imports.env),
        **values,
        **dict(request.program.env),
    }
    cluster = {environment.CLUSTER}
    kept = {name: value for name, value in env.items() if not name.startswith("EVERSTEP_") or name in cluster}
    kept |= {name: env[name] for name in KEPT_NAMES if name in env}
    # No process listens at this port, so a script that makes its own store does not connect to the job's store.
    with bound(host.address, 0) as probe:
        kept |= {"MASTER_ADDR": host.address, "MASTER_PORT": str(address_of(probe).port)}
    return kept | {environment.JOB: request.job, environment.MACHINE: host.machine}


@contextlib.contextmanager
def _own_folder(host: Host) -> Iterator[Path]:
    folder = private.make_folder(host.shm_dir / LIVE / FOLDER / uuid.uuid4().hex)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Tail:
    """Keeps the last part of the output that a trial writes to a FIFO, at most twice the reported length.

    The output goes to a FIFO and not to a file, so that no process waits for a disk.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tail = bytearray()

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, path: Path) -> AsyncIterator[_Tail]:
        """Make the FIFO and read from it during the context."""
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Without this writer, reading would find the end of the FIFO again and again until the trial opens it.
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        loop, output = asyncio.get_running_loop(), cls(descriptor)
        loop.add_reader(descriptor, output.read)
        try:
            yield output
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            os.close(writer)

    def read(self) -> bool:
        """Read the bytes that are available; returns whether there were any."""
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return False
        self._tail = (self._tail + data)[-2 * MOST_TEXT :]
        return bool(data)

    def text(self) -> str:
        """Return the kept text, after reading all bytes that are available."""
        while self.read():
            pass
        return self._tail.decode(errors="replace")
