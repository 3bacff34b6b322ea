"""This module turns a forked child of the fork server into a rank, or into a rendezvous store.

A rank gets torchrun's environment, its own session, and log files for its output. It runs the user's script as
``__main__``. At its end it runs the ``atexit`` functions and flushes its output, but skips the interpreter's
finalisation. The fork server loads this file under a private name, so that it cannot collide with a module of a
training script.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import importlib
import importlib.machinery
import io
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from everstep.base.addresses import Address
from everstep.system import procfs

Message = dict[str, Any]

PR_SET_PDEATHSIG = 1
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}
"""Errors of a disk that accepts no more data."""
BESIDE = "beside another copy of it, pid"
"""If another process of the same rank runs, which must never happen, the first line of a generation contains this."""
REACH_STORE_S = 20.0
"""A rank that cannot reach its rendezvous store within this time ends, seconds. Otherwise torch, and all other ranks,
would wait for it for 5 to 30 minutes."""
REACH_AGAIN_S = 0.5
UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EINVAL}
"""Errors of the kernel if no packet reaches the other machine. A route that drops all packets causes EINVAL."""
LONGEST_SOCKET = 107
"""The largest number of bytes in the name of a unix socket."""
_APPLIED = {"TORCH_CUDA_SANITIZER"}
"""Variables that torch reads at import, and that ``fit_torch`` applies later."""

_libc = ctypes.CDLL(None, use_errno=True)
_servers: list[Any] = []
"""Torch's control servers in this process, referenced here so that they live as long as the process."""


def run_rank(
    server: int,
    rank: int,
    generation: int,
    row: Message,
    request: Message,
    *,
    code: types.CodeType | None = None,
    read: Mapping[str, str | None],
) -> NoReturn:
    """Become a rank: prepare this process, run the user's script, and end the process.

    Args:
        server: Pid of the fork server.
        rank: Number of the rank.
        generation: Generation of the rank.
        row: The rank's own part of the ``fork`` request: its environment and its files.
        request: The ``fork`` request, with the part that all ranks share.
        code: The compiled script; None: this rank compiles it, and prints the error.
        read: Variables that the server's imports read, with their values.
    """
    status = 1
    report = None
    try:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)  # the server died before this rank could request to die with it
        os.setsid()
        reset_signals()
        procfs.set_own_name(f"everstep r{rank}")
        redirect(row["stdout"], row["stderr"])
        os.environ.clear()
        os.environ.update(request["env"] | row["env"])
        report = _open_report(row["report"])
        # From here on, an agent can identify the rank by its report file, even if the server died. Before this line,
        # the rank must not outlive the server, because no agent would know of it.
        _libc.prctl(PR_SET_PDEATHSIG, 0)
        os.chdir(request["cwd"])
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        other = _other_copy(Path(row["report"]).with_name(f"rank-{rank}.lock"))
        print(
            generation_marker(rank, generation),
            f"pid {os.getpid()}, {stamp}" + (f", {BESIDE} {other}" if other else ""),
            file=sys.stderr,
        )
        warn_of_ignored(read)
        fit_torch()
        _start_control_server()
        _watch_optimizer(rank, report)
        fit_path(request["script"])
        reach_store(os.environ)
        report.mark("script_entered")
        become_main(request["script"], request["args"], code)
        status = 0
    except SystemExit as error:
        status = exit_code(error)
        _failed(report, status)
    except BaseException as error:
        _failed(report, status)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        leave(status)


def _other_copy(lock: Path) -> str:
    """Return the pid of another living process of this rank; empty: there is none, which is normal.

    This process holds the lock until it ends; its children do not inherit it.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # no room for the file: another copy cannot be detected
        return ""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return os.read(descriptor, 20).decode(errors="replace") or "unknown"
    with contextlib.suppress(OSError):  # no room: another copy could not report this pid
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    return ""


def generation_marker(rank: int, generation: int) -> str:
    """Return the constant beginning of the line in a rank's stderr that marks the start of a generation."""
    return f"--- everstep: rank {rank}, generation {generation},"


def reach_store(env: Mapping[str, str], within_s: float = REACH_STORE_S) -> None:
    """Connect to the rendezvous store once before the script does. The store listens before any rank is forked.

    Only the first rank of each machine does this, for all ranks there, which saves the store thousands of connections.

    Raises:
        ConnectionError: the store's machine cannot be reached in time. Torch reports all other errors itself.
    """
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if env.get("WORLD_SIZE", "1") == "1" or env.get("LOCAL_RANK", "0") != "0" or not (host and port):
        return
    address = Address(host, int(port))
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(address, deadline - time.monotonic()).close()
            return
        except TimeoutError:
            why = os.strerror(errno.ETIMEDOUT)
        except OSError as error:
            if error.errno not in UNREACHABLE:
                return
            why = os.strerror(error.errno)
        if time.monotonic() + REACH_AGAIN_S >= deadline:
            raise ConnectionError(f"the TCPStore at {address}, where all ranks meet, is not reached: {why}") from None
        time.sleep(REACH_AGAIN_S)


def become_main(script: str, args: list[str], code: types.CodeType | None = None) -> None:
    """Run a script as ``__main__`` and keep that module. (``runpy`` would remove it when the script returns.)"""
    code = code or compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__.update(__builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv[:] = [script, *args]
    exec(code, main.__dict__)


def run_store(listener: socket.socket, host: str, port: int, generation: int) -> NoReturn:
    """Become the rendezvous store of a generation; runs until killed."""
    try:
        os.setsid()
        reset_signals()
        procfs.set_own_name(f"everstep s{generation}")
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, None, True, master_listen_fd=listener.detach(), wait_for_workers=False)
        while store:
            signal.pause()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def _failed(report: Any, status: int) -> None:
    """Remove the mark that the training loop was left, if the script failed.

    An error in the loop sets this mark too. With it, the rank would count as finished until its process ends, which
    may take long.
    """
    if report is not None and status:
        report.unmark("loop_left")


def reset_signals() -> None:
    """Reset signals to the state of a newly started program."""
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def redirect(stdout: str, stderr: str) -> None:
    """Redirect this process's output to files."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, stdout, append), (2, stderr, append)):
        try:
            opened = os.open(path, flags, 0o600)
        except OSError:  # no room for a new file: the rank runs without its output
            opened = os.open(os.devnull, flags & os.O_ACCMODE)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        buffer = io.BufferedWriter(_Output(number, "w", closefd=False))
        stream = io.TextIOWrapper(buffer, errors=errors, line_buffering=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Output(io.FileIO):
    """A log file that drops output if the disk has no room, so that the script continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return memoryview(data).nbytes


def _open_report(path: str) -> Any:
    from everstep.rank.step_reports import ReportFile

    report = ReportFile.open(Path(path))
    report.mark("forked")
    report.set_pid(os.getpid())
    report.arm_end_notice()
    return report


def warn_of_ignored(read: Mapping[str, str | None]) -> None:
    """Print which variables of this rank have no effect, because its fork server imported torch without them."""
    late = sorted(name for name, value in read.items() if os.environ.get(name) != value and name not in _APPLIED)
    if late:
        print(
            f"everstep: {', '.join(late)}: torch was imported before this rank was forked, and reads such "
            "variables only at its import. Set them in the environment of the agents",
            file=sys.stderr,
        )


def fit_torch() -> None:
    """Apply this rank's environment to settings that torch and numpy read at import, and seed the generators again."""
    import numpy.random
    import torch
    import torch.distributed

    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    if os.environ.get("TORCH_LOGS"):
        torch._logging._internal._init_logs()
    if "TORCH_CUDA_SANITIZER" in os.environ:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    # Unlike Python's own generator, these two do not detect a fork, so all ranks would draw the same numbers.
    torch.default_generator.seed()
    numpy.random.seed()


def _start_control_server() -> None:
    """Start torch's control server in this process. Its threads send the flight record to the agent, even in a hang.

    If it cannot be started, a hang is diagnosed without the record.
    """
    path = os.environ.get("EVERSTEP_CONTROL_SOCKET", "")
    if not path or len(os.fsencode(path)) > LONGEST_SOCKET:
        return
    kept = os.dup(2)
    quiet = os.open(os.devnull, os.O_WRONLY)
    mask = os.umask(0o077)  # only this user may connect
    try:
        from torch._C._distributed_c10d import _WorkerServer

        os.dup2(quiet, 2)  # the server would print its address into the rank's output
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        _servers.append(_WorkerServer(path))
    except Exception as error:
        os.dup2(kept, 2)
        print(f"everstep: torch's server for flight records does not start: {error}", file=sys.stderr)
    finally:
        os.umask(mask)
        os.dup2(kept, 2)
        os.close(kept)
        os.close(quiet)


def fit_path(script: str) -> None:
    """Add the script's folder and the folders of ``PYTHONPATH`` to the import path."""
    extra = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:0] = [os.path.dirname(script), *(entry for entry in extra if entry not in sys.path)]  # noqa: PTH120
    # The server's caches of folders may be older than the script's files.
    importlib.invalidate_caches()


def _watch_optimizer(rank: int, report: Any) -> None:
    """Count optimizer steps, so that a script without everstep reports progress too."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from everstep.rank.drill_faults import RankFaults

    def after(*_: object) -> None:
        if report.count_optimizer_step() == 1 and not report.snapshot().attached:
            report.mark("first_step")

    register_optimizer_step_post_hook(after)
    faults = RankFaults.from_environment(rank)
    if faults is None:
        return

    def before(*_: object) -> None:
        now = report.snapshot()
        if not now.attached:  # if it is attached, the training library injects the faults
            faults.meet("step", now.optimizer_steps)

    register_optimizer_step_pre_hook(before)


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a ``sys.exit``; prints its message if it has one."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def leave(code: int) -> NoReturn:
    """End this process as Python does, but skip the finalisation, which takes 0.4 s and prints false leak reports."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        _libc.fflush(None)
    finally:
        os._exit(code & 0xFF)
