"""Which version of the code the next launch is of."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.rollback import Rollback, made_by, rollback, target_of
from everstep.model.incident import Failure
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion, VersionStatus


@dataclass(frozen=True, slots=True)
class VersionChange:
    """Another version comes into the job."""

    number: int
    why: str
    """For people: in which words the decision is told."""
    suspect: str = ""
    """Why the one that ran is suspect; empty: it is not."""
    asked: bool = False
    """Somebody asked for it, who may withdraw it until it is launched."""


def next_version(
    book: VersionBook,
    failure: Failure,
    policy: RecoveryPolicy,
    *,
    explained: bool,
    by_operator: bool,
    rolls_back: str | None = None,
) -> VersionChange | None:
    """What waits for a restart comes with it, the newest of it; else a version that broke the job is taken back.

    Args:
        book: The versions of the job, the failure counted.
        failure: At hand.
        policy: The limits.
        explained: A machine is to blame.
        by_operator: An operator says that it is to be tried again as it is.
        rolls_back: Why the version that runs is taken back, as the ladder says; empty: it is not. None: nobody has
            asked the ladder, and a young version is taken back for what it may have caused.
    """
    if pending := book.pending():
        newest = pending[-1]
        wanted = newest.wanted
        running = book.versions.get(book.running)
        suspect = f"taken back by {wanted.operator}" + (f": {wanted.reason}" if wanted.reason else "")
        if not (wanted.rollback and running):
            return VersionChange(newest.number, _update(newest), asked=True)
        why = f"{_update(newest)} (v{running.number}, {made_by(running)})"
        return VersionChange(newest.number, why, suspect, asked=True)
    if by_operator or rolls_back == "":
        return None
    versions = list(book.versions.values())
    taken_back = rollback(versions, book.running, failure, explained=explained, policy=policy)
    if taken_back is None and rolls_back and (target := target_of(versions, book.running)):
        taken_back = Rollback(book.running, target.number, rolls_back)
    if taken_back is None:
        return None
    why = f"{made_by(book.versions[taken_back.suspect])}: {taken_back.why}"
    return VersionChange(taken_back.target, f"back to v{taken_back.target}: v{taken_back.suspect}, {why}", why)


def is_withdrawn(change: VersionChange, book: VersionBook) -> bool:
    """Whether somebody has withdrawn what was to come since that was decided."""
    return change.asked and book.versions[change.number].status is not VersionStatus.PENDING


def _update(version: JobVersion) -> str:
    wanted = version.wanted
    verb = f"back to v{version.number}" if wanted.rollback else f"update to v{version.number}"
    return f"{verb} by {wanted.operator}" + (f": {wanted.reason}" if wanted.reason else "")
