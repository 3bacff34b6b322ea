"""The fork server is a process with torch imported and one thread, from which ranks are forked.

The agent runs it as a program of its own, ``python -P …/agent/launcher/fork_server.py``, with the interpreter of the
job. It imports the standard library, torch and small modules of everstep (``PRELOADED``, ``PRELOADED_IF_THERE``), and
no module whose name a training script could use for a module of its own.

It is the parent of the ranks and of the rendezvous stores, and it outlives the agent: a new agent connects and reads
the server's table of all processes that were forked. The server never starts a rank twice, and never starts a rank of a
fenced generation. It is a subreaper: processes that a dead rank leaves behind, such as data loaders, become its
children, and it kills and reaps them.

Agent and server exchange JSON objects, one per line, over a unix socket. A request has an ``id`` and an ``op``; these
are the operations, with their arguments and the fields of their replies::

    subscribe                                      the table; from then on, ends of ranks are sent as they happen
    assign  job                                    the table
    fork    generation, fenced, script, args,      ranks: one row of the table for each
            cwd, env, ranks: [{rank, env,
            report, stdout, stderr}]
    store   generation, fenced, host, ports        the store's row of the table, with its port
    try     script, folder, args, cwd, env,        pid, exit, slow (it was killed at the limit); sent when it has ended
            output, limit_s
    kill    generation, grace_s                    the table and left (pids that still exist); sent when all are reaped
    reset                                          the table, which is empty: the server is free for another job
    end                                            as for kill, of all generations; then the server exits

The end of a rank is sent as ``{"event": "exit"}`` with the fields of the rank's row.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if importlib.util.find_spec("everstep") is None:  # the job's interpreter may not have everstep
    sys.path.append(str(Path(__file__).resolve().parents[2]))
from everstep.base.addresses import Ports
from everstep.system import procfs
from everstep.system.listening import address_of, listen

Message = dict[str, Any]

PR_SET_CHILD_SUBREAPER = 36
ABANDONED_CHECK_S = 2.0
"""Time between two checks whether the socket still has a name."""
KILL_PATIENCE_S = 10.0
"""A kill is answered after this time at the latest, even if a process cannot be reaped, seconds."""
KEPT_GENERATIONS = 8
"""Ranks that have exited are kept in the table for this many of the newest generations."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""numpy and OpenMP read these variables when they are imported; a second thread would make forks unsafe."""

PRELOADED = (
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "numpy.random",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.control_plane",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torch.utils.serialization.config",
    "everstep.rank.environment",
    "everstep.rank.drill_faults",
    "everstep.rank.step_reports",
)
PRELOADED_IF_THERE = (
    "everstep.training.run",
    "everstep.training.checkpoint",
    "everstep.slots.file",
    "xxhash",
    "fsspec",
)

PEER = struct.Struct("3i")
"""``struct ucred``: process, user, group."""

_libc = ctypes.CDLL(None, use_errno=True)


class _RecordingEnviron(type(os.environ)):  # type: ignore[misc]
    """An environment that records which variables are read by name."""

    names: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> str:
        self.names.add(key)
        value: str = super().__getitem__(key)
        return value


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that decide what ranks compute, by name."""
    python = {"python": ".".join(map(str, sys.version_info[:3]))}
    return python | {name: str(sys.modules[name].__version__) for name in ("numpy", "torch") if name in sys.modules}


@dataclass(frozen=True, slots=True)
class Imported:
    """The effects of the server's imports that its ranks must know."""

    read: dict[str, str | None]
    """Variables that the imports read, with their values. Another value in a rank has no effect."""
    files: frozenset[int]
    """Descriptors that the imports opened, such as torch's logs; a rank keeps them."""
    joins: tuple[types.ModuleType, ...]
    """Modules that have torch's ``init_process_group`` under this name. The server searches for them, because a child
    that searched all modules would copy their pages."""


def preload() -> Imported:
    """Import the modules that a training script will import; a rank then needs milliseconds instead of seconds.

    Nothing here may start a thread, run a parallel operation or touch CUDA: a child would hang in OpenMP or fail in
    CUDA. So this takes no optimizer step, and does not call ``torch.cuda.is_available()``.
    """
    os.environ.update(ONE_THREAD)
    gc.disable()  # imports produce little garbage, and collecting it would take a quarter of the time
    before, kind, files = dict(os.environ), type(os.environ), procfs.own_descriptors()
    os.environ.__class__ = _RecordingEnviron
    try:
        for name in PRELOADED:
            importlib.import_module(name)
    finally:
        os.environ.__class__ = kind
    for name in PRELOADED_IF_THERE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError("an import initialised CUDA: ranks forked from here could not use it")
    threads = len(procfs.threads_of(os.getpid()))
    if threads != 1:
        raise RuntimeError(f"the fork server has {threads} threads after its imports; forking would not be safe")
    gc.collect()
    gc.freeze()
    gc.enable()
    read = {name: before.get(name) for name in _RecordingEnviron.names}
    return Imported(read, frozenset(procfs.own_descriptors() - files), tuple(_modules_that_join()))


def _modules_that_join() -> list[types.ModuleType]:
    name = "init_process_group"
    begin, modules = getattr(sys.modules["torch.distributed"], name), list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is begin]


def _load_beside(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"_everstep_{name}", Path(__file__).resolve().with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from agent.launcher import rank_process, trial_process
else:
    rank_process = _load_beside("rank_process")
    trial_process = _load_beside("trial_process")


@dataclass(slots=True)
class Child:
    """A process that was forked here: a rank, or a store (rank -1)."""

    pid: int
    generation: int
    rank: int
    forked_ns: int
    start_ticks: int
    report: str = ""
    port: int = 0
    exit: Message | None = None
    stopped: bool = False
    """Whether the process lived until a ``kill`` request ended it."""

    def entry(self) -> Message:
        """Return the child as a row of the table."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class Connection:
    """A client connection of the socket."""

    socket: socket.socket
    inbox: bytes = b""
    outbox: bytes = b""
    subscribed: bool = False


@dataclass(slots=True)
class Kill:
    """A kill that is in progress."""

    connection: Connection
    request: Message
    kill_at: float
    give_up_at: float
    killed: bool = False


@dataclass(slots=True, eq=False)
class Trial:
    """The trial of a script."""

    pid: int
    connection: Connection
    request: Message
    kill_at: float
    slow: bool = False


class Scripts:
    """Compiles the newest script once for all ranks, which saves each rank 5 ms before its first step."""

    def __init__(self) -> None:
        self._newest: tuple[str, bytes, types.CodeType] | None = None

    def compiled(self, path: str) -> types.CodeType | None:
        """Return the compiled script; None: it does not compile, so the rank compiles it and prints the error."""
        try:
            source = Path(path).read_bytes()
            if self._newest is None or self._newest[:2] != (path, source):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # then the rank compiles the script, and has the warning in its log
                    self._newest = path, source, compile(source, path, "exec", dont_inherit=True)
        except Exception:
            return None
        return self._newest[2]


class RequestRefused(Exception):
    """Raised if a request is not carried out; ``kind`` is the code in the reply."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ForkServer:
    """The server's single-threaded loop: it serves requests, forks processes and reports their ends."""

    def __init__(self, listener: socket.socket, path: Path, label: str, imported: Imported) -> None:
        self.imported = imported
        self.listener = listener
        self.path = path
        self.label = label
        self.job = ""
        self.fenced = 0
        self.newest = 0
        self.ranks: dict[tuple[int, int], Child] = {}
        self.stores: dict[int, Child] = {}
        self.connections: dict[int, Connection] = {}
        self.kills: list[Kill] = []
        self.trials: dict[int, Trial] = {}
        self.ending = False
        self.scripts = Scripts()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # The loop.

    def run(self) -> None:
        """Serve until an ``end`` request, or until the name of the socket is removed."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.abandon())
        self.listener.setblocking(False)
        if not self.path.exists():
            self.abandon()
        self.path.with_suffix(".ready").touch(0o600)
        checked_at = time.monotonic()
        while not (self.ending and not self.kills):
            poll = select.poll()
            poll.register(self.listener, select.POLLIN)
            poll.register(self.wake_read, select.POLLIN)
            for number, connection in self.connections.items():
                poll.register(number, select.POLLIN | (select.POLLOUT if connection.outbox else 0))
            for number, _ in poll.poll(self._timeout_ms()):
                self._ready(number)
            self._reap()
            self._continue_kills()
            self._end_slow_trials()
            if time.monotonic() - checked_at > ABANDONED_CHECK_S:
                checked_at = time.monotonic()
                if not self.path.exists():
                    self.abandon()

    def abandon(self) -> None:
        """Kill all children and end: no agent can reach this server again."""
        self.fenced = max(self.fenced, self.newest)
        self._signal_all(self.newest, signal.SIGKILL)
        self._kill_trials()
        self._kill_orphans()
        for suffix in (".ready", ".log"):
            self.path.with_suffix(suffix).unlink(missing_ok=True)
        os._exit(0)

    def _timeout_ms(self) -> int:
        times = [kill.give_up_at if kill.killed else kill.kill_at for kill in self.kills]
        times += [trial.kill_at for trial in self.trials.values() if not trial.slow]
        wait = min([ABANDONED_CHECK_S, *(at - time.monotonic() for at in times)])
        return max(1, int(wait * 1000) + 1)

    def _ready(self, number: int) -> None:
        if number == self.wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
        elif number == self.listener.fileno():
            with contextlib.suppress(BlockingIOError):
                accepted, _ = self.listener.accept()
                if user_of(accepted) not in {0, os.geteuid()}:
                    print(f"refused a connection of user {user_of(accepted)}", file=sys.stderr, flush=True)
                    accepted.close()
                    return
                accepted.setblocking(False)
                self.connections[accepted.fileno()] = Connection(accepted)
        elif connection := self.connections.get(number):
            self._flush(connection)
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        *lines, connection.inbox = (connection.inbox + data).split(b"\n")
        for line in lines:
            self._serve(connection, json.loads(line))

    def _drop(self, connection: Connection) -> None:
        self.connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
        self._kill_trials(connection)  # no agent waits for the trials any more

    def _send(self, connection: Connection, message: Message) -> None:
        connection.outbox += json.dumps(message).encode() + b"\n"
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.outbox:
                connection.outbox = connection.outbox[connection.socket.send(connection.outbox) :]
        except BlockingIOError:
            pass
        except OSError:
            connection.outbox = b""  # the client has disconnected; the next read drops the connection

    # Requests.

    def _serve(self, connection: Connection, request: Message) -> None:
        try:
            reply = self._handle(connection, request)
        except RequestRefused as refused:
            reply = {"ok": False, "error": refused.kind, "message": str(refused)}
        if reply is not None:
            self._send(connection, {"ok": True, "id": request["id"], **reply})

    def _handle(self, connection: Connection, request: Message) -> Message | None:
        match request["op"]:
            case "subscribe":
                connection.subscribed = True
                return self._table()
            case "assign":
                self.job = request["job"]
                return self._table()
            case "reset":
                return self._reset()
            case "fork":
                return {"ranks": self._fork_ranks(request)}
            case "store":
                return self._fork_store(request)
            case "try" | "kill" | "end" as op:
                (self._start_trial if op == "try" else self._start_kill)(connection, request)
                return None
            case other:
                raise RequestRefused("unknown", f"the fork server knows no operation {other!r}")

    def _table(self) -> Message:
        return {
            "pid": os.getpid(),
            "job": self.job,
            "label": self.label,
            "libraries": libraries(),
            "fenced": self.fenced,
            "newest": self.newest,
            "ranks": [child.entry() for child in self.ranks.values()],
            "stores": [child.entry() for child in self.stores.values()],
        }

    def _reset(self) -> Message:
        """Forget a job that is over, and its fence, so that another job can use the server."""
        living = [child.pid for child in (*self.ranks.values(), *self.stores.values()) if not child.exit]
        if living or self.kills:
            raise RequestRefused("alive", f"processes {living} of {self.job} still live")
        self.ranks.clear()
        self.stores.clear()
        self.job, self.fenced, self.newest = "", 0, 0
        return self._table()

    def _admit(self, request: Message) -> int:
        generation: int = request["generation"]
        self.fenced = max(self.fenced, request["fenced"])
        if generation <= self.fenced:
            raise RequestRefused(
                "fenced", f"generation {generation} was stopped: everything up to {self.fenced} is fenced"
            )
        if generation < self.newest:
            raise RequestRefused(
                "fenced", f"generation {generation} is older than {self.newest}, which was launched already"
            )
        if self.ending:
            raise RequestRefused("ending", "the fork server is ending")
        return generation

    def _fork_ranks(self, request: Message) -> list[Message]:
        generation = self._admit(request)
        wanted = {row["rank"]: row for row in request["ranks"]}
        for child in self.ranks.values():
            if child.rank in wanted and child.generation != generation and child.exit is None:
                raise RequestRefused(
                    "alive", f"rank {child.rank} of generation {child.generation} still lives (pid {child.pid})"
                )
        self.newest = generation
        for key in [k for k, child in self.ranks.items() if child.exit and k[0] <= generation - KEPT_GENERATIONS]:
            del self.ranks[key]
        code = self.scripts.compiled(request["script"])
        for rank, row in wanted.items():
            if (generation, rank) not in self.ranks:
                self.ranks[generation, rank] = self._fork_rank(generation, rank, row, request, code)
        return [self.ranks[generation, rank].entry() for rank in wanted]

    def _fork_rank(
        self, generation: int, rank: int, row: Message, request: Message, code: types.CodeType | None
    ) -> Child:
        sys.stdout.flush()
        sys.stderr.flush()
        server, forked_ns = os.getpid(), time.time_ns()
        pid = fork()
        if pid == 0:
            self._become_child()
            rank_process.run_rank(server, rank, generation, row, request, code=code, read=self.imported.read)
        return Child(pid, generation, rank, forked_ns, procfs.start_ticks(pid), report=row["report"])

    def _fork_store(self, request: Message) -> Message:
        generation = self._admit(request)
        store = self.stores.get(generation)
        if store is None or store.exit:
            try:
                listener = listen(request["host"], Ports(*request["ports"]))
            except OSError as error:
                raise RequestRefused("store", f"the rendezvous store cannot listen: {error.strerror}") from error
            port = address_of(listener).port
            pid = fork()
            if pid == 0:
                self._become_child(keep=listener.fileno())
                rank_process.run_store(listener, request["host"], port, generation)
            listener.close()
            store = Child(pid, generation, -1, time.time_ns(), procfs.start_ticks(pid), port=port)
            self.stores[generation] = store
        return store.entry()

    # Trials.

    def _start_trial(self, connection: Connection, request: Message) -> None:
        if self.ending:
            raise RequestRefused("ending", "the fork server is ending")
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = fork()
        if pid == 0:
            self._become_child()
            trial_process.run_trial(server, request, read=self.imported.read, joins=self.imported.joins)
        self.trials[pid] = Trial(pid, connection, request, time.monotonic() + request["limit_s"])

    def _end_slow_trials(self) -> None:
        for trial in self.trials.values():
            if not trial.slow and time.monotonic() >= trial.kill_at:
                trial.slow = True
                self._kill_trial(trial)

    def _kill_trials(self, connection: Connection | None = None) -> None:
        for trial in self.trials.values():
            if connection in (None, trial.connection):
                self._kill_trial(trial)

    def _kill_trial(self, trial: Trial) -> None:
        os.kill(trial.pid, signal.SIGKILL)  # the child was not collected, so no other process has its pid
        kill_session(trial.pid)

    def _trial_ended(self, trial: Trial, end: Message) -> None:
        if self._has_orphans():
            kill_session(trial.pid)  # the processes that the trial started end with it
        reply = {"ok": True, "id": trial.request["id"], "pid": trial.pid, "exit": end, "slow": trial.slow}
        self._send(trial.connection, reply)

    def _become_child(self, keep: int = -1) -> None:
        """Close the server's files in a new child.

        The socket objects are detached, so that they do not close reused descriptors later.
        """
        signal.set_wakeup_fd(-1)
        self.listener.detach()
        for connection in self.connections.values():
            connection.socket.detach()
        for number in procfs.own_descriptors() - self.imported.files:
            if number > 2 and number != keep:
                with contextlib.suppress(OSError):
                    os.close(number)

    # Exits.

    def _reap(self) -> None:
        """Collect the children that ended, report their ends to the subscribers, and kill their orphans."""
        running = {child.pid: child for child in (*self.ranks.values(), *self.stores.values()) if not child.exit}
        reaped = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            reaped = True
            code = os.waitstatus_to_exitcode(status)
            end = {"kind": "signal" if code < 0 else "code", "value": abs(code), "time_ns": time.time_ns()}
            if trial := self.trials.pop(pid, None):
                self._trial_ended(trial, end)
            elif child := running.get(pid):
                child.exit = end
                if child.rank >= 0:
                    self._push({"event": "exit", **child.entry()})
        if reaped and self._has_orphans():
            self._kill_orphans()

    def _push(self, message: Message) -> None:
        for connection in list(self.connections.values()):
            if connection.subscribed:
                self._send(connection, message)

    def _mine(self) -> set[int]:
        """Return the processes that were forked here and live."""
        mine = {child.pid for child in (*self.ranks.values(), *self.stores.values()) if not child.exit}
        return mine | self.trials.keys()

    def _has_orphans(self) -> bool:
        """Return whether dead ranks or trials may have left processes behind, without reading all processes.

        A process may be missed while another child ends; when that child is collected, this check runs again.
        """
        children = procfs.children(os.getpid())
        return children is None or bool(children - self._mine())

    def _kill_orphans(self) -> list[int]:
        """Kill every process that a dead rank or trial left behind; returns the processes that still exist."""
        mine, living = self._mine(), [child for child in self.ranks.values() if not child.exit]
        sessions = {child.pid for child in living} | self.trials.keys()
        killed = []
        for process in procfs.processes():
            pid = process.pid
            if process.parent != os.getpid() or pid in mine or process.session in sessions:
                continue
            # A process with its own session is recognised by the environment with which it was started. If it is not
            # recognised, it is killed only when no rank and no trial is left.
            if sessions and not self._was_left_behind(pid, process.session):
                continue
            killed.append(pid)  # a zombie too: it is collected next, unless one of its threads lives
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return killed

    def _was_left_behind(self, pid: int, session: int) -> bool:
        """Return whether a process was started by a rank or a trial that has ended."""
        dead = [child for child in self.ranks.values() if child.exit]
        if any(child.pid == session for child in dead):
            return True
        environment = procfs.environment(pid)
        tried = [entry.partition(b"=")[2].decode() for entry in environment if entry.startswith(b"EVERSTEP_TRIAL=")]
        if tried:
            return tried[0] not in {trial.request["env"]["EVERSTEP_TRIAL"] for trial in self.trials.values()}
        return any(f"EVERSTEP_REPORT_FILE={child.report}".encode() in environment for child in dead)

    # Kills.

    def _start_kill(self, connection: Connection, request: Message) -> None:
        if request["op"] == "end":
            self.ending = True
            self._kill_trials()
            request |= {"generation": max(self.newest, *self.stores, 0), "grace_s": 0.0}
        self.fenced = max(self.fenced, request["generation"])
        grace = request["grace_s"]
        now = time.monotonic()
        self.kills.append(Kill(connection, request, now + grace, now + grace + KILL_PATIENCE_S))
        for child in self._targets(request["generation"]):
            child.stopped = child.stopped or not _is_ending(child.pid)
        if grace > 0:
            for child in self._targets(request["generation"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    def _targets(self, generation: int) -> list[Child]:
        return [child for child in self.ranks.values() if child.generation <= generation and not child.exit]

    def _signal_all(self, generation: int, number: int) -> None:
        stores = [child for child in self.stores.values() if child.generation <= generation and not child.exit]
        for child in (*self._targets(generation), *stores):
            for kill in (os.killpg, os.kill):  # the group may not exist yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child.pid, number)

    def _continue_kills(self) -> None:
        for kill in list(self.kills):
            generation = kill.request["generation"]
            now = time.monotonic()
            if not kill.killed and (now >= kill.kill_at or not self._targets(generation)):
                kill.killed = True
                self._signal_all(generation, signal.SIGKILL)
            if not kill.killed:
                continue
            left = [child.pid for child in self._targets(generation)]
            left += [s.pid for s in self.stores.values() if s.generation <= generation and not s.exit]
            left += self.trials if self.ending else []
            if not left:
                left = self._kill_orphans()
            if not left or now >= kill.give_up_at:
                self.kills.remove(kill)
                for old in [g for g, store in self.stores.items() if g <= generation and store.exit]:
                    del self.stores[old]
                self._send(kill.connection, {"ok": True, "id": kill.request["id"], "left": left, **self._table()})


# The system.


def fork() -> int:
    """Call ``os.fork``, and try up to five times if memory or pids are short.

    Raises:
        RequestRefused: all attempts failed.
    """
    for attempt in range(5):
        try:
            return os.fork()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM) or attempt == 4:
                raise RequestRefused(
                    "fork", f"fork failed: {error}; is the process or memory limit reached?"
                ) from error
            time.sleep(0.01 * 2**attempt)
    raise AssertionError


def user_of(connection: socket.socket) -> int:
    """Return the user at the other end of a unix socket, as the kernel reports it."""
    _, uid, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return int(uid)


def _is_ending(pid: int) -> bool:
    """Return whether a child is ending already: the kernel may need minutes to free its memory."""
    process = procfs.process_of(pid)
    return process is not None and process.is_ending


def kill_session(leader: int) -> None:
    """SIGKILL all processes of a session."""
    for process in procfs.processes():
        if process.session == leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def serve(arguments: Sequence[str], import_all: Callable[[], Imported]) -> NoReturn:
    """Run the fork server: parse its arguments, import, and serve on the inherited socket."""
    parser = argparse.ArgumentParser(description="Fork server of an everstep agent; started by the agent.")
    parser.add_argument("--socket-fd", type=int, required=True, help="inherited listening unix socket")
    parser.add_argument(
        "--socket-path", type=Path, required=True, help="name of the socket; the server ends when this name is removed"
    )
    parser.add_argument("--label", default="", help="what the server was started for")
    options = parser.parse_args(arguments)
    try:
        procfs.give_up_oom_protection()  # it is for the agent: the kernel should rather kill a rank
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        imported = import_all()
        listener = socket.socket(fileno=options.socket_fd)
        ForkServer(listener, options.socket_path, options.label, imported).run()
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:], preload)
