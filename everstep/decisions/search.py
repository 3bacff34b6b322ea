"""Whether it is worth asking for copies that a stop does not tell of, and what is known then.

A stop is answered at once: with what lies in memory, and on the disks that an
agent knows of. Remote storage takes its time, and the agent of a machine that
came back empty knows no folder.
"""

from __future__ import annotations

from everstep.checkpoint_policy import CheckpointPolicy
from everstep.decisions.restore import MEMORY, Restore, copy_of
from everstep.incident import Evidence


def look_further(restore: Restore, evidence: Evidence, policy: CheckpointPolicy) -> bool:
    """Whether disks and remote storage could have more: memory does not do, and somebody was not asked for it all."""
    if evidence.unreachable or evidence.problem:
        return False
    if restore.step == 0:
        return True  # what the job had is gone
    in_memory = restore.step > 0 and all(copy.tier in MEMORY for copy in restore.copies)
    return not in_memory and bool(evidence.emptied or policy.remote_url)


def merged(evidence: Evidence, found: Evidence) -> Evidence:
    """The evidence with the copies that were found besides."""
    known = {copy_of(one) for one in evidence.held}
    new = [one for one in found.held if copy_of(one) not in known]
    return evidence.model_copy(
        update={"held": [*evidence.held, *new], "disk_shared": evidence.disk_shared or found.disk_shared}
    )
