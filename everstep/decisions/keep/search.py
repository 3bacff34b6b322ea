"""The evidence after a search for copies that the answers to a stop do not list.

A stop is answered at once, with the copies in memory and on the disks that an agent knows of. Remote storage is slow,
and the agent of a machine that returned empty knows no folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.model.evidence import Evidence, Unlisted
from everstep.model.state_copy import Tier


def merged(evidence: Evidence, found: Evidence) -> Evidence:
    """Merge the evidence with the copies that the search added. A location that was listed in either of
    them is known."""
    held = [copy for copy in evidence.held if not copy.unlisted]
    known = {copy.key for copy in held}
    new = [copy for copy in found.held if copy.key not in known]
    return evidence.model_copy(
        update={
            "held": [*held, *new],
            "disk_shared": evidence.disk_shared or found.disk_shared,
            "held_cut": evidence.held_cut or found.held_cut,
            "unlisted": _still_unlisted(evidence, found.unlisted),
            "searched": True,
        }
    )


def unanswered(evidence: Evidence, machines: Sequence[str], reason: str) -> Evidence:
    """The evidence when no machine could be asked for further copies, with the reason."""
    places = [Unlisted(tier=Tier.DISK, machines=list(machines), reason=reason)]
    places.append(Unlisted(tier=Tier.REMOTE, reason=reason))
    return evidence.model_copy(update={"unlisted": _still_unlisted(evidence, places), "searched": True})


def _still_unlisted(evidence: Evidence, now: Sequence[Unlisted]) -> list[Unlisted]:
    """Return the locations that could be listed neither now nor before.

    The job is stopped, so a copy that was listed once is still there. The agent of a machine that returned empty did
    not know which folder to list.
    """
    before = {machine for place in evidence.unlisted if place.tier is Tier.DISK for machine in place.machines}
    if not evidence.searched:
        before |= set(evidence.emptied)
    remote = not evidence.searched or any(place.tier is Tier.REMOTE for place in evidence.unlisted)
    found = []
    for place in now:
        machines = [machine for machine in place.machines if machine in before]
        if machines or (place.tier is Tier.REMOTE and remote):
            found.append(place.model_copy(update={"machines": machines}))
    return found
