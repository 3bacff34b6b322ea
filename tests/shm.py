"""Folders in shared memory for tests of checkpoint files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shm_folder() -> Iterator[Path]:
    """Make a folder in shared memory, which is removed at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="everstep-test-") as folder:
        yield Path(folder)
