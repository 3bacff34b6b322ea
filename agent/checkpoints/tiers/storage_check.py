"""This module checks, before a job starts, whether this machine can write to the locations of the job's checkpoints.

Only a permanent fault is a problem: a missing path or driver, a missing permission, no room. Storage that does not
answer now may answer when the first step is due, so a check that has no result is not a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from agent.checkpoints.tiers.remote_folder import RemoteFolder
from everstep.errors import ConfigError

logger = structlog.get_logger()

PATIENCE_S = 10.0
"""Storage that does not answer within this time is not judged, seconds."""
_BLOCK = 4096
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EHOSTDOWN, errno.EHOSTUNREACH}
"""Errors of a network share whose server does not answer for a moment."""


def checks(job: str, disk_path: str, remote_url: str) -> list[Callable[[], str]]:
    """Return one check for each configured location, separate because each check may hang."""
    checks: list[Callable[[], str]] = []
    if disk_path:
        checks.append(lambda: disk_problem(Path(disk_path), job))
    if remote_url:
        checks.append(lambda: remote_problem(remote_url, job))
    return checks


async def problems(checks: Sequence[Callable[[], str]]) -> list[str]:
    """Run the checks and return their problems; checks that hang are not waited for.

    Each check has its own thread, and the agent can end without waiting for it. In the event loop's thread pool, a few
    checks that hang would block every Stop.
    """
    loop = asyncio.get_running_loop()

    def run(check: Callable[[], str], result: asyncio.Future[str]) -> None:
        try:
            problem = check()
        except Exception as error:  # any error means that the check has no answer
            logger.warning("storage cannot be checked", reason=str(error))
            problem = ""
        with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
            loop.call_soon_threadsafe(result.set_result, problem)

    results = [loop.create_future() for _ in checks]
    for check, result in zip(checks, results, strict=True):
        threading.Thread(target=run, args=(check, result), name="check storage", daemon=True).start()
    if results:
        await asyncio.wait(results, timeout=PATIENCE_S)
    return [problem for result in results if result.done() and (problem := result.result())]


def disk_problem(root: Path, job: str) -> str:
    """Explain why no checkpoint of a job can be written below a folder; empty: it can."""
    if not root.is_dir():
        return f"disk_path {root} {'is not a folder' if root.exists() else 'does not exist: make it, or mount it'}"
    folder = root / job if (root / job).is_dir() else root
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in _PASSING:
            return ""
        return f"disk_path {root} cannot be written to: {error.strerror or error}"
    return ""


def remote_problem(url: str, job: str) -> str:
    """Explain why no checkpoint can be copied to remote storage; empty: it can, or this is not known now."""
    name = f"probe-{uuid.uuid4().hex}"
    try:
        RemoteFolder(url, job).probe(name)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # a driver may raise anything
        reason = str(error).replace(name, "probe") or type(error).__name__  # equal on every machine
        # Drivers have no common error for missing credentials; all known drivers name them in the class.
        if isinstance(error, FileNotFoundError):
            return f"remote_url {url} does not exist: make the folder or bucket first, or mount it ({reason})"
        if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            return f"remote_url {url} cannot be written to: {reason}. The agents need credentials for it"
    return ""
