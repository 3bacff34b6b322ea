"""What inspections have to find when a drill breaks a device of a machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from drills.spec.catalogue import DEVICES, SLOWED
from drills.spec.request import DrillRequest
from drills.spec.sure_faults import FAKE_GPUS, reason_of
from everstep.model.finding import Health, Owner
from everstep.model.xid import xid_of


@dataclass(frozen=True, slots=True)
class Expected:
    """A finding."""

    reason: str
    """Reason code."""
    owner: Owner
    verdict: Health = Health.FAULTY
    sure: bool = False
    """It names the machine for sure: where there is another, the machine leaves the job."""

    @property
    def opens_incident(self) -> bool:
        """Whether an incident tells it; what is unknown is noted in the ledger only."""
        return self.verdict is Health.FAULTY


EXPECTED = {
    "gpu-lost": Expected("gpu-lost", Owner.MACHINE, sure=True),
    "gpu-hot": Expected("gpu-hot", Owner.MACHINE),
    "nic-down": Expected("nic-down", Owner.NETWORK),
    "nic-flap": Expected("nic-flap", Owner.NETWORK, Health.UNKNOWN),
    "switch-down": Expected("nic-down", Owner.NETWORK),
    "disk-full": Expected("disk-full", Owner.MACHINE),
    "fs-readonly": Expected("fs-readonly", Owner.MACHINE, sure=True),
    "oom": Expected("oom-kill-limit", Owner.CODE, Health.UNKNOWN),
}


def expected_of(request: DrillRequest) -> Expected | None:
    """What a drill has inspections find; None: nothing."""
    if request.base == "xid":
        reason = xid_of(request.xid_code)
        return Expected(reason.code, reason.owner, reason.verdict, reason.sure)
    if request.base == "machine-fault":
        known = reason_of(request.reason)
        owner = Owner.MACHINE if request.reason in FAKE_GPUS or known is None else known.owner
        return Expected(request.reason, owner, sure=True)
    return EXPECTED.get(request.base)


def goes_on(request: DrillRequest) -> bool:
    """Whether the job goes on with the fault, which is only told."""
    return request.base in (*DEVICES, *SLOWED) and not request.then and not request.replaces


def with_spare(request: DrillRequest, spare: int) -> DrillRequest:
    """The same, on a cluster that has so many machines beside those of the job."""
    expected = expected_of(request)
    replaces = expected is not None and expected.sure and spare > 0 and not request.then and not request.everywhere
    replaces = replaces or (request.base == "slow-machine" and spare > 0)
    return request.model_copy(update={"spare": spare, "replaces": replaces})
