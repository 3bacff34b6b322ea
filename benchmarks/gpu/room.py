"""Room in shared memory."""

from __future__ import annotations

import shutil

SHM = "/dev/shm"
SPARE_GB = 1.0
"""What is left free, GB."""


def free_gb() -> float:
    """Return the free room of ``/dev/shm``, GB."""
    return shutil.disk_usage(SHM).free / 1e9


def missing_shm(gigabytes: float) -> str:
    """Return why there is no room for some GB in shared memory; empty: there is."""
    free = free_gb() - SPARE_GB
    return "" if gigabytes <= free else f"needs {gigabytes:.0f} GB of {SHM}, of which {max(free, 0.0):.0f} GB are free"
