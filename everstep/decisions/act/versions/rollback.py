"""Which version a job goes back to when the one that runs breaks it.

ByteRobust rolls the code back where a restart did not help (section 4.1); that a version which fails in its first steps
is taken back at once, and what counts as its fault, is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from everstep.model.finding import Owner
from everstep.model.incident import GOES_ON, Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion, VersionStatus

OF_CODE = frozenset({"SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGBUS", "SIGTRAP", "SIGSYS"})
"""Signals by which a process ends for what it does itself, if no machine is to blame."""
NOT_OF_CODE = frozenset({Owner.MACHINE, Owner.NETWORK, Owner.STORAGE, Owner.SCHEDULER})
TWICE = 2
"""What code may have caused is held against a version once it came so often."""
MESSAGE_CHARACTERS = 120
"""A commit's message is cut after so many characters."""
CHANGED_CHARACTERS = 200
"""What a version changed is cut after so many characters."""


class Blame(Enum):
    """Whether code can have caused a failure."""

    CODE = "code"
    UNCLEAR = "unclear"
    """It may have: what comes twice in a new version is held against it."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rollback:
    """What is taken back, what for, and why."""

    suspect: int
    target: int
    why: str


def blame(failure: Failure, *, explained: bool) -> Blame:
    """Whether a failure can come from the code.

    Args:
        failure: At hand.
        explained: A machine is to blame: it is lost, an inspection names it, or it left the job.
    """
    found = failure.classification
    if explained or failure.symptom in {Symptom.UPDATE, Symptom.MACHINE_SILENT} | GOES_ON:
        return Blame.OTHER
    if found is not None and found.owner in NOT_OF_CODE:
        return Blame.OTHER
    if failure.symptom in {Symptom.CONNECTION_LOST, Symptom.UNSAVED} or not failure.symptom.known:
        return Blame.UNCLEAR
    if failure.symptom is Symptom.CRASH:
        by_itself = failure.cause in OF_CODE or failure.cause.startswith("exit code ")
        return Blame.CODE if by_itself else Blame.UNCLEAR
    return Blame.CODE


def steps_of(version: JobVersion, step: int) -> int:
    """How far a version came since it came into the job last: up to a step; -1: its steps are not numbered."""
    if not version.ranges or step < 0 or version.ranges[-1][1] < 0:
        return -1
    return max(step - version.ranges[-1][1], 0)


def is_young(version: JobVersion, step: int, now_ns: int, policy: RecoveryPolicy) -> bool:
    """Whether what fails now is held against a version.

    Args:
        version: That runs.
        step: Completed steps of the job; -1: not known.
        now_ns: Now.
        policy: The limits.
    """
    if version.steady or version.proven or not version.began_ns:
        return False
    steps = steps_of(version, step)
    return 0 <= steps < policy.rollback.steps or now_ns - version.began_ns < policy.rollback.within_s * 1e9


def came_within(version: JobVersion, now_ns: int, seconds: float) -> bool:
    """Whether a version came into the job not longer ago than that, by an update: what a job began with did not."""
    return version.number > 1 and version.began_ns > 0 and now_ns - version.began_ns < seconds * 1e9


def target_of(versions: Iterable[JobVersion], suspect: int) -> JobVersion | None:
    """What a version is taken back to: the last one before it that was steady, else the last one that ran."""
    ran = [
        version
        for version in versions
        if version.number != suspect and version.runs and version.ranges and version.status is not VersionStatus.SUSPECT
    ]
    return max(ran, key=lambda one: (one.steady, one.ranges[-1]), default=None)


def made_by(version: JobVersion) -> str:
    """Who made a version, and what it changed: ``asked for by bob, commit 1f3870b of Bob <…> ('…'), 1 file changed:
    train.py +1 -1``."""
    origin = version.runs.origin if version.runs else None
    text = f"asked for by {version.wanted.operator}"
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
    """Whether the version that runs is taken back.

    Args:
        versions: Of the job; the failure at hand is counted.
        running: Number of the one that failed.
        failure: At hand.
        explained: As of :func:`blame`.
        policy: The limits.
    """
    version = next((one for one in versions if one.number == running), None)
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
    """The newest step that a version can go on from, where it could not restore what it was given.

    Args:
        versions: Of the job.
        running: Number of the one that could not.
        resume_step: Completed steps of the state that it was given.

    Returns:
        The step at which the version had begun that saved that state, if it was taken back; None: another one did.
    """
    saved = [(came, begin, one) for one in versions for came, begin, _ in one.ranges if 0 <= begin < resume_step]
    _, begin, version = max(saved, key=lambda period: period[:2], default=(0, 0, None))
    if version is None or version.number == running or version.status is not VersionStatus.SUSPECT:
        return None
    return begin
