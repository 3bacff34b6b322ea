"""Chooses the code version for the next launch."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.rollback import Rollback, made_by, rollback, target_of
from everstep.model.incident import Failure
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import VersionStatus


@dataclass(frozen=True, slots=True)
class VersionChange:
    """The change to another version of the code."""

    number: int
    why: str
    """The decision and its reason, for people."""
    suspect: str = ""
    """Why the running version is suspect; empty: it is not suspect."""
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
    """Return the newest pending version, or else the version to which the running version is rolled back.

    Args:
        book: The versions of the job, in which the current failure is counted already.
        failure: The current failure.
        policy: The limits.
        explained: A machine is to blame.
        by_operator: An operator wants the job restarted without a rollback.
        rolls_back: Why the ladder rolls back the running version; empty: it does not roll back. None: the ladder was
            not asked, and a young version is rolled back for a failure that it may have caused.

    Returns:
        None if the version does not change.
    """
    if pending := book.pending():
        newest = pending[-1]
        wanted = newest.wanted
        running = book.versions.get(book.running)
        by = wanted.operator + (f": {wanted.reason}" if wanted.reason else "")
        if not wanted.rollback:
            return VersionChange(newest.number, f"update to v{newest.number} by {by}", asked=True)
        if running is None:
            return VersionChange(newest.number, f"back to v{newest.number} by {by}", asked=True)
        why = f"back to v{newest.number} by {by} (v{running.number}, {made_by(running)})"
        return VersionChange(newest.number, why, f"rolled back by {by}", asked=True)
    if by_operator or rolls_back == "":
        return None
    versions = list(book.versions.values())
    back = rollback(versions, book.running, failure, explained=explained, policy=policy)
    if back is None and rolls_back and (target := target_of(versions, book.running)):
        back = Rollback(book.running, target.number, rolls_back)
    if back is None:
        return None
    why = f"{made_by(book.versions[back.suspect])}: {back.why}"
    return VersionChange(back.target, f"back to v{back.target}: v{back.suspect}, {why}", why)


def is_withdrawn(change: VersionChange, book: VersionBook) -> bool:
    """Return whether the requested version was withdrawn since the decision."""
    return change.asked and book.versions[change.number].status is not VersionStatus.PENDING
