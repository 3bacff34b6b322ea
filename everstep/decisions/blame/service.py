"""Decides whether a failure was caused by a service that all machines share: storage, name resolution, another server.

No machine and no code is to blame for such a failure. It ends by itself, or when somebody repairs the service. Until
then the job is launched again.
"""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.evidence import Classification, Evidence
from everstep.model.finding import Owner

SERVICES = frozenset({FaultClass.REMOTE_STORAGE, FaultClass.MOUNT, FaultClass.EXTERNAL_SERVICE, FaultClass.DNS})
"""Classes of faults of services."""
SHARED = SERVICES | {
    FaultClass.DISK_FAULT,
    FaultClass.DISK_FULL,
    FaultClass.INFINIBAND,
    FaultClass.NCCL_ERROR,
    FaultClass.NETWORK,
}
"""Classes of faults that a shared service causes if all ranks report the same fault: a single machine does not cause a
fault on all ranks."""


def failed_service(fault: Classification | None, *, everywhere: bool) -> str:
    """Return the class of the service that failed; empty: no service is known to have failed.

    Args:
        fault: The class of the first rank's end; None: no rank ended by itself.
        everywhere: All ranks report the same fault.
    """
    if fault is None or fault.owner in {Owner.CODE, Owner.DATA}:
        return ""
    if fault.consequence:  # no rank ended first, so the connection between the ranks failed
        return fault.fault if everywhere else ""
    if fault.owner == Owner.STORAGE or fault.fault in SERVICES or (everywhere and fault.fault in SHARED):
        return fault.fault
    return ""


def is_everywhere(evidence: Evidence, world_size: int) -> bool:
    """Return whether every rank ended by itself with a fault of the same class."""
    own = [end for end in evidence.exits if not end.stopped_by_us and end.classification is not None]
    reasons = {end.classification.reason for end in own if end.classification is not None}
    return len(reasons) == 1 and sum(len(end.ranks) for end in own) == world_size
