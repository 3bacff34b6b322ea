"""The choice of the code version for the next launch."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.rollback import Rollback, made_by, rollback, target_of
from everstep.model.incident import Failure
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion, VersionStatus


@dataclass(frozen=True, slots=True)
class VersionChange:
    """The change to another version of the code."""

    number: int
    why: str
    """The words in which people are notified of the decision."""
    suspect: str = ""
    """Why the version that ran is suspect; empty: it is not."""
    asked: bool = False
    """The version was requested, and the request can be withdrawn until the launch."""


def next_version(
    book: VersionBook,
    failure: Failure,
    policy: RecoveryPolicy,
    *,
    explained: bool,
    by_operator: bool,
    rolls_back: str | None = None,
) -> VersionChange | None:
    """Choose the newest version that waits for a restart; else roll back a version that broke the job.

    Args:
        book: The versions of the job, with the failure counted.
        failure: The current failure.
        policy: The limits.
        explained: A machine is to blame.
        by_operator: An operator wants the job restarted without a change.
        rolls_back: The ladder's reason to roll back the running version; empty: it has none. None: the ladder was not
            asked, and a young version is rolled back for a failure that it may have caused.
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
    """Return whether the requested version was withdrawn since the decision."""
    return change.asked and book.versions[change.number].status is not VersionStatus.PENDING


def _update(version: JobVersion) -> str:
    wanted = version.wanted
    verb = f"back to v{version.number}" if wanted.rollback else f"update to v{version.number}"
    return f"{verb} by {wanted.operator}" + (f": {wanted.reason}" if wanted.reason else "")
