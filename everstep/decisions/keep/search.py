"""Adds the result of a search for further copies to the evidence of a stop.

Agents answer a stop at once, with the copies in memory and on the disks that they know of. They do not list remote
storage then, since it is slow, and the agent of an emptied machine does not know the folder on its disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.decisions.keep.lineage import split
from everstep.model.evidence import Evidence, Unlisted
from everstep.model.state_copy import StateCopies, Tier


def merged(evidence: Evidence, result: Evidence) -> Evidence:
    """Return the evidence with the result of a search. A location is known if the evidence or the search lists it."""
    held = [copies for copies in evidence.held if not copies.unlisted]
    new = [left for copies in result.held if (left := _unknown(copies, held)).places]
    return evidence.model_copy(
        update={
            "held": [*held, *new],
            "disk_shared": evidence.disk_shared or result.disk_shared,
            "unlisted": _still_unlisted(evidence, result.unlisted),
            "searched": True,
        }
    )


def _unknown(copies: StateCopies, known: Sequence[StateCopies]) -> StateCopies:
    """Return those of the copies that are not among the known ones."""
    for other in known:
        _, copies = split(copies, other)
    return copies


def unanswered(evidence: Evidence, machines: Sequence[str], reason: str) -> Evidence:
    """Return the evidence after a search in which no machine could be asked, for a reason."""
    locations = [
        Unlisted(tier=Tier.DISK, machines=list(machines), reason=reason),
        Unlisted(tier=Tier.REMOTE, reason=reason),
    ]
    return evidence.model_copy(update={"unlisted": _still_unlisted(evidence, locations), "searched": True})


def _still_unlisted(evidence: Evidence, now: Sequence[Unlisted]) -> list[Unlisted]:
    """Return the locations that were listed neither now nor before.

    A location that was listed once is known, since the job is stopped and its copies do not change. Before the first
    search, remote storage and the disks of emptied machines were not listed.
    """
    before = {machine for unlisted in evidence.unlisted if unlisted.tier is Tier.DISK for machine in unlisted.machines}
    if not evidence.searched:
        before |= set(evidence.emptied)
    remote = not evidence.searched or any(unlisted.tier is Tier.REMOTE for unlisted in evidence.unlisted)
    still = []
    for unlisted in now:
        machines = [machine for machine in unlisted.machines if machine in before]
        if machines or (unlisted.tier is Tier.REMOTE and remote):
            still.append(unlisted.model_copy(update={"machines": machines}))
    return still
