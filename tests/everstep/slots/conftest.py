"""The fixture for tests of slots: a folder in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shm import shm_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory."""
    with shm_folder() as path:
        yield path
