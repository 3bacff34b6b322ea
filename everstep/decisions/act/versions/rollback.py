"""Decides when a job's code is rolled back to an earlier version because the running version breaks the job.

ByteRobust rolls the code back if a restart did not help (section 4.1). In everstep a version that fails in its first
steps is also rolled back at once. This module decides which failures count against a version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from everstep.decisions.blame.classify.rule import MAYBE_HARDWARE
from everstep.model.finding import Owner
from everstep.model.incident import STILL_RUNNING, Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion, VersionStatus

OF_CODE = frozenset({"SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGBUS", "SIGTRAP", "SIGSYS"})
"""Signals that end a process for an error of its own, if no machine is to blame."""
NOT_OF_CODE = frozenset({Owner.MACHINE, Owner.NETWORK, Owner.STORAGE, Owner.EXTERNAL, Owner.SCHEDULER})
TWICE = 2
"""A version is to blame after this many failures that its code may have caused."""
MESSAGE_CHARACTERS = 120
"""The number of characters after which a commit's message is cut."""
CHANGED_CHARACTERS = 200
"""The number of characters after which the changes of a version are cut."""


class Blame(Enum):
    """Whether code can have caused a failure."""

    CODE = "code"
    UNCLEAR = "unclear"
    """The code may be the cause: a young version is to blame if it fails twice."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The rollback of a version: the version, its replacement, and the reason."""

    suspect: int
    target: int
    why: str


def blame(failure: Failure, *, explained: bool) -> Blame:
    """Return whether the code can have caused a failure.

    Args:
        failure: The current failure.
        explained: A machine is to blame: it was lost, it left the job, or a finding names it.
    """
    fault = failure.classification
    if explained or failure.symptom in {Symptom.UPDATE, Symptom.MACHINE_SILENT} | STILL_RUNNING:
        return Blame.OTHER
    if fault is not None and fault.owner in NOT_OF_CODE:
        return Blame.OTHER
    if failure.symptom in {Symptom.CONNECTION_LOST, Symptom.UNSAVED} or not failure.symptom.known:
        return Blame.UNCLEAR
    if fault is not None and fault.owner != Owner.CODE and fault.fault in MAYBE_HARDWARE:
        return Blame.UNCLEAR
    if failure.symptom is Symptom.CRASH:
        by_itself = failure.cause in OF_CODE or failure.cause.startswith("exit code ")
        return Blame.CODE if by_itself else Blame.UNCLEAR
    return Blame.CODE


def steps_of(version: JobVersion, step: int) -> int:
    """Return how many steps a version made since it began, up to a step of the job; -1: not known."""
    if not version.ranges or step < 0 or version.ranges[-1][1] < 0:
        return -1
    return max(step - version.ranges[-1][1], 0)


def is_young(version: JobVersion, step: int, now_ns: int, policy: RecoveryPolicy) -> bool:
    """Return whether a version is in its first steps or minutes, so that a failure may count against it.

    Args:
        version: The running version.
        step: Completed steps of the job; -1: not known.
        now_ns: The current time.
        policy: The limits.
    """
    if version.steady or version.proven or not version.began_ns:
        return False
    steps = steps_of(version, step)
    return 0 <= steps < policy.rollback.steps or now_ns - version.began_ns < policy.rollback.within_s * 1e9


def is_recent(version: JobVersion, now_ns: int, seconds: float) -> bool:
    """Return whether an update launched a version within this time; False for the first version of a job."""
    return version.number > 1 and version.began_ns > 0 and now_ns - version.began_ns < seconds * 1e9


def target_of(versions: Iterable[JobVersion], suspect: int) -> JobVersion | None:
    """Return the version to roll back to: the last steady version before this one, else the last one that ran."""
    ran = [
        version
        for version in versions
        if version.number != suspect and version.runs and version.ranges and version.status is not VersionStatus.SUSPECT
    ]
    return max(ran, key=lambda version: (version.steady, version.ranges[-1]), default=None)


def made_by(version: JobVersion) -> str:
    """Describe the origin of a version, e.g. ``requested by bob, commit 1f3870b of Bob <…> ('…'), 1 file changed:
    train.py +1 -1``."""
    origin = version.runs.origin if version.runs else None
    text = f"requested by {version.wanted.operator}"
    if origin and origin.commit:
        subject = origin.subject[:MESSAGE_CHARACTERS]
        text += f", commit {origin.commit[:9]} of {origin.author} ({subject!r})"
    if version.changed:
        text += f", {version.changed.splitlines()[0][:CHANGED_CHARACTERS]}"
    return text


def rollback(
    versions: Collection[JobVersion],
    running: int,
    failure: Failure,
    *,
    explained: bool,
    policy: RecoveryPolicy,
) -> Rollback | None:
    """Return the rollback of the running version if it is young and to blame for the failure; None: no rollback.

    Args:
        versions: The versions of the job, with the current failure counted.
        running: The number of the failed version.
        failure: The current failure.
        explained: A machine is to blame, as for :func:`blame`.
        policy: The limits.
    """
    version = next((version for version in versions if version.number == running), None)
    if version is None or not is_young(version, failure.step, failure.time_ns, policy):
        return None
    blamed = blame(failure, explained=explained)
    if blamed is Blame.OTHER or (blamed is Blame.UNCLEAR and version.failed < TWICE):
        return None
    target = target_of(versions, running)
    if target is None:
        return None
    steps = steps_of(version, failure.step)
    where = f"after {steps} steps" if steps > 0 else "before its first step" if steps == 0 else "soon after its start"
    again = "" if version.failed < TWICE else f", {version.failed} times"
    return Rollback(running, target.number, f"it failed {where}{again}: {failure.cause}")


def older_state(versions: Collection[JobVersion], running: int, resume_step: int) -> int | None:
    """Return the newest step from which a version can resume after it could not restore a newer step.

    Args:
        versions: The versions of the job.
        running: The number of the version that could not restore.
        resume_step: The step that it could not restore.

    Returns:
        The step at which the version that saved ``resume_step`` began, if that version was rolled back; None otherwise.
    """
    saved = [
        (generation, begin, version)
        for version in versions
        for generation, begin, _ in version.ranges
        if 0 <= begin < resume_step
    ]
    _, begin, version = max(saved, key=lambda period: period[:2], default=(0, 0, None))
    if version is None or version.number == running or version.status is not VersionStatus.SUSPECT:
        return None
    return begin
