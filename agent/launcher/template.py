"""The template is a process that has imported the modules of fork servers, and from which fork servers are forked.

If several agents share a computer, as in a local cluster, each agent needs a fork server, and importing torch costs
each server seconds of CPU time. The template imports once. A fork server from the template starts in milliseconds. It
equals a server that an agent started itself: it leads its own session, and it has its own command line, log, and the
environment that its agent requested. An agent that is alone on its machine needs no template.

The supervisor runs the template as a program of its own, ``python -P …/agent/launcher/template.py``. If the template
dies, its fork servers continue to run, and agents start new fork servers themselves.

Each connection to the template's unix socket carries one request. A request for a fork server is a line of JSON with
``arguments`` and ``env``, and two descriptors: the fork server's listening socket and its log. The reply is a line of
JSON with ``ok`` and either the ``pid`` or a ``message`` that explains why the agent must start this server itself. The
other kind of request is a line of JSON with ``ended``, a pid, and ``start_ticks``: it asks how a child of the template
ended. The children are the processes that the template forked, and ranks whose fork server died.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

ABANDONED_CHECK_MS = 2000
"""Time between two checks whether the socket's name still exists, milliseconds."""
ASKING_LIMIT_S = 5.0
"""A connection that has not sent a complete request within this time is closed, seconds."""
REMEMBERED_ENDS = 1024
_OWN_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


def _load_fork_server() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(
        "_everstep_fork_server", Path(__file__).resolve().with_name("fork_server.py")
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from agent.launcher import fork_server
else:
    fork_server = _load_fork_server()  # finds everstep if it is not installed
from everstep.system import procfs  # noqa: E402


class Template:
    """Forks fork servers until its socket is removed, or until SIGTERM."""

    def __init__(self, listener: socket.socket, path: Path, imported: fork_server.Imported) -> None:
        self.listener = listener
        self.path = path
        self.imported = imported
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}
        """Pid and start of a process → its wait status, and the time at which it was collected."""
        self._inode = path.stat().st_ino
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve requests in sequence."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        self.listener.setblocking(False)
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while self._has_its_name():
            poll.poll(ABANDONED_CHECK_MS)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._reap()
            with contextlib.suppress(BlockingIOError):
                connection, _ = self.listener.accept()
                with connection:
                    self._serve(connection)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                process = ended.si_pid, procfs.start_ticks(ended.si_pid)
                self._ends[process] = (os.waitpid(ended.si_pid, 0)[1], time.time_ns())
        while len(self._ends) > REMEMBERED_ENDS:
            del self._ends[next(iter(self._ends))]

    def _has_its_name(self) -> bool:
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self._inode
        return False

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(ASKING_LIMIT_S)
        descriptors: list[int] = []
        try:
            if fork_server.user_of(connection) not in {0, os.geteuid()}:
                return
            request = _receive(connection, descriptors)
            reply = self._ended(request) if "ended" in request else self._forked(request, descriptors)
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError, fork_server.RequestRefused) as error:
            print(f"a request for a fork server failed: {error}", file=sys.stderr, flush=True)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _ended(self, request: dict[str, Any]) -> dict[str, Any]:
        self._reap()
        status, time_ns = self._ends.get((request["ended"], request["start_ticks"]), (None, 0))
        return {"ok": status is not None, "status": status, "time_ns": time_ns}

    def _forked(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if why := self._refuse(request):
            return {"ok": False, "message": why}
        listener, log = descriptors
        return {"ok": True, "pid": self._fork(request, listener, log)}

    def _refuse(self, request: dict[str, Any]) -> str:
        """Explain why a fork server cannot be forked from here; empty: it can."""
        env = _single_threaded(request["env"])
        if late := sorted(name for name, value in self.imported.read.items() if env.get(name) != value):
            return f"{', '.join(late)} differ from what was read when torch was imported"
        begin, end = procfs.own_arguments()
        if len(_joined(_command(request["arguments"]))) > end - begin:
            return "its command line is too long"
        return ""

    def _fork(self, request: dict[str, Any], listener: int, log: int) -> int:
        if pid := fork_server.fork():
            return int(pid)
        try:
            _become(_command(request["arguments"]), request["env"], log)
            for number in procfs.own_descriptors() - self.imported.files - {0, 1, 2, listener}:
                os.close(number)
            fork_server.serve([*request["arguments"], "--socket-fd", str(listener)], lambda: self.imported)
        except BaseException as error:  # no code of the template may run in the child
            sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def _become(command: list[str], env: dict[str, str], log: int) -> None:
    """Make this process equal to one that was started with this command and this environment."""
    sys.argv = command[2:]
    _show(command)
    os.setsid()
    os.chdir("/")
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.set_wakeup_fd(-1)
    for number in _OWN_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # A process that a script started in the background ignores SIGINT; an agent's children do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(_single_threaded(env))


def _single_threaded(env: dict[str, str]) -> dict[str, str]:
    return env | fork_server.ONE_THREAD


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-P", str(Path(fork_server.__file__).resolve()), *arguments]


def _show(command: list[str]) -> None:
    """Set this process's command line, which identifies the processes of a machine."""
    begin, end = procfs.own_arguments()
    text = _joined(command)
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _joined(command: list[str]) -> bytes:
    return b"".join(os.fsencode(part) + b"\0" for part in command)


def _receive(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more, received, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        descriptors += received
        if not more:
            raise ValueError("the connection ended before the request did")
        data += more
    request: dict[str, Any] = json.loads(data)
    return request


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1024)
    return listener


def main() -> NoReturn:
    """Run the template."""
    parser = argparse.ArgumentParser(description="Template of the fork servers of a local cluster.")
    parser.add_argument("--listen", type=Path, required=True, help="socket on which agents request fork servers")
    parser.add_argument(
        "--room", default="", help="a long blank argument: fork servers write their command lines over it"
    )
    options = parser.parse_args()
    try:
        ctypes.CDLL(None).prctl(fork_server.PR_SET_CHILD_SUBREAPER, 1)
        listener = _listen(options.listen)  # before the imports, because agents wait for the socket
        Template(listener, options.listen, fork_server.preload()).run()
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
