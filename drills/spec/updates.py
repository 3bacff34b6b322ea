"""What an update of a job's code deserves: how many incidents, how many launches, and what becomes of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from drills.spec.catalogue import UPDATES
from drills.spec.request import DrillRequest
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import VersionStatus

PARKED, AGAIN = "parked", "update"
"""What a job may be in the middle of when it is asked for, beside faults: it is parked, or another update is under
way."""
DURING = ("", "kill-rank", PARKED, AGAIN, "kill-workers", "kill-temporal", "kill-agent")
"""In the middle of what an update may be asked for."""
THEN = ("", "kill-rank", "kill-machine", "kill-forkserver")
"""What a lazy update may ride on."""
RATE, OTHER_RATE = 1e-3, 4e-3
"""Learning rates of the example that updates bring: the steps under them give other losses."""
LR_FROM = "--lr-from"
"""The example's option for them."""


@dataclass(frozen=True, slots=True)
class ExpectedUpdate:
    """What comes of it."""

    incidents: int
    generations: int
    resolution: str
    """Of the last incident."""
    versions: tuple[VersionStatus, ...]
    """Of the job's versions in the end, in order."""


def expected_update(request: DrillRequest) -> ExpectedUpdate | None:
    """What a drill's update deserves; None: it has none."""
    running, replaced = VersionStatus.RUNNING, VersionStatus.REPLACED
    if request.base not in UPDATES:
        return None
    if request.at_start:
        return ExpectedUpdate(0, 1, "", (running, VersionStatus.REFUSED))
    if request.base == "bad-version":
        # What fails before its first step is taken back by the incident that brought it.
        incidents = 1 if request.changes_state or request.fails_after == 0 else 2
        return ExpectedUpdate(incidents, 3, "rollback", (running, VersionStatus.SUSPECT))
    if request.asked_during == PARKED:
        tries = RecoveryPolicy().retry.max_failures_at_step
        return ExpectedUpdate(1, tries + 1, "update", (replaced, running))
    if request.asked_during == AGAIN:
        return ExpectedUpdate(1, 2, "update", (replaced, VersionStatus.SUPERSEDED, running))
    return ExpectedUpdate(1, 2, "eviction" if request.gone else "update", (replaced, running))
