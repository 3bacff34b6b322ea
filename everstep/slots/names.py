"""Names of the files of ranks' slots in a job's shared memory."""

from __future__ import annotations

from pathlib import Path

OWN, BACKUP = "checkpoint-", "backup-"
"""What such names begin with; a rank follows."""


def own_slots(shm: Path, rank: int) -> Path:
    """The file of a rank's own slots; ``shm`` is the job's folder of the rank's machine."""
    return shm / f"{OWN}{rank}"


def backup_slots(shm: Path, rank: int) -> Path:
    """The file of the backups of a rank that another machine runs."""
    return shm / f"{BACKUP}{rank}"
