"""One change of a local cluster at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.system import private_files as private


@contextmanager
def lock(home: Path) -> Iterator[None]:
    """One change of a cluster at a time; beside the folder, which may be removed while somebody waits."""
    with open(private.make_folder(home.parent) / f".{home.name}.lock", "w", opener=private.open_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
