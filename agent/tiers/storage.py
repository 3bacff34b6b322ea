"""Whether this machine can write where a job's checkpoints are to go, looked at before the job starts.

Only what will not get better by itself is a problem: a path or driver that is
not there, no permission, no room. Storage that does not answer now may answer
when the first step is due: not being able to test is not a fault.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from agent.tiers.remote_folder import RemoteFolder
from everstep.errors import ConfigError

PATIENCE_S = 10.0
"""Storage that does not answer within this time is not judged (ours)."""
_BLOCK = 4096


def checks(job: str, disk_path: str, remote_url: str) -> list[Callable[[], str]]:
    """What is to be looked at, each on its own, since each may hang; empty settings are not looked at."""
    found: list[Callable[[], str]] = []
    if disk_path:
        found.append(lambda: disk_problem(Path(disk_path), job))
    if remote_url:
        found.append(lambda: remote_problem(remote_url, job))
    return found


def disk_problem(root: Path, job: str) -> str:
    """Why no checkpoint of a job can be written below a folder; empty: it can."""
    said = f"disk_path {root}"
    if not root.is_dir():
        return f"{said} {'is no folder' if root.exists() else 'does not exist: make it, or mount it'}"
    folder = root / job if (root / job).is_dir() else root
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{said} cannot be written to: {error.strerror or error}"
    return ""


def remote_problem(url: str, job: str) -> str:
    """Why no checkpoint can be copied to remote storage; empty: it can, or nobody knows now."""
    try:
        RemoteFolder(url, job).probe(f"probe-{uuid.uuid4().hex}")
    except ConfigError as error:
        return str(error)
    except Exception as error:  # whatever a driver raises
        # Drivers have no common error for missing credentials; all that we know name them in the class.
        if isinstance(error, FileNotFoundError):
            return f"remote_url {url} does not exist: make the folder or bucket first, or mount it ({error})"
        if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            said = str(error) or type(error).__name__
            return f"remote_url {url} cannot be written to: {said}. The agents need credentials for it"
    return ""
