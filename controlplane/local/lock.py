"""A lock: at most one change of a local cluster runs at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.system import private_files as private


@contextmanager
def lock(home: Path) -> Iterator[None]:
    """Hold the lock of a cluster. Its file lies beside the folder, which may be removed meanwhile."""
    with open(private.make_folder(home.parent) / f".{home.name}.lock", "w", opener=private.open_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
