"""The id of a run: one submission of a job's name.

A name may be used again while a machine still has what an earlier run of it left:
its agent was down when the run ended. Generations alone do not tell the two
apart, since they count on only as long as the ledger answers. So every command
to an agent and every file on disk says of which run it is, and ids of later runs
sort after those of earlier ones: what a newer run finds of an older one it throws
away, and what an older one still asks for is refused.
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
    """Whether a run began before another; one without an id is from before there were ids."""
    return run < than
