"""Makes the id of a run. A run is one submission of a job under its name.

A job's name may be used again while a machine whose agent was down still has files of an earlier run. The numbers of
generations do not always distinguish the two runs, since a new run continues the count only if the ledger answers. So
every command to an agent and every file on disk names its run. Ids of later runs sort after ids of earlier runs, so
that a newer run deletes the files of an older run, and commands of an older run are refused.
"""

from __future__ import annotations

from datetime import UTC, datetime


def run_id(started_ns: int, unique: str) -> str:
    """The id, e.g. ``20261121-193158.042-0197f3a2``.

    Args:
        started_ns: When the run began, nanoseconds of the wall clock of Temporal's server.
        unique: Anything that no other run has; its first 8 letters and digits are used.
    """
    began = datetime.fromtimestamp(started_ns // 1_000_000_000, UTC).strftime("%Y%m%d-%H%M%S")
    return f"{began}.{started_ns // 1_000_000 % 1000:03d}-{''.join(filter(str.isalnum, unique))[:8]}"


def is_older(run: str, than: str) -> bool:
    """Whether a run began before another run, by their ids."""
    return run < than
