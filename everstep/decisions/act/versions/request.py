"""Answers a request for another version of the code."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.act.versions.book import WAITS, VersionBook
from everstep.decisions.act.versions.rollback import target_of
from everstep.model.version import JobVersion, UpdateRequest, Urgency, VersionStatus

MOST_WAIT = 10
"""The largest number of versions of a job that are checked or pending at the same time."""


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """The result of a request."""

    text: str
    """The result as text for people."""
    refused: str = ""
    """Why the request was refused, and what to do instead; empty: it was not refused."""
    to_make: int = 0
    """The number of a version that has to be made and checked; 0: none."""
    changed: bool = True
    """The book changed so that an open incident has to be notified."""


def answer_to(request: UpdateRequest, book: VersionBook, now_ns: int) -> RequestAnswer:
    """Apply a request to the book.

    Args:
        request: A person's request, with valid fields.
        book: The versions of the job; changed in place.
        now_ns: The current time.
    """
    if request.cancel:
        return _withdrawn(request, book)
    if request.rollback or request.version:
        return back_already(request, book) or _back(request, book, now_ns)
    for version in book.versions.values():
        if version.status in WAITS | {VersionStatus.RUNNING} and _is_repeated(request, version):
            return RequestAnswer(f"requested before: {version.name} is {version.status}", changed=False)
    waiting = [version for version in book.versions.values() if version.status in WAITS]
    if len(waiting) >= MOST_WAIT:
        names = ", ".join(f"v{version.number}" for version in waiting)
        refused = f"{names} are already waiting: withdraw some of them, or wait for the next restart"
        return RequestAnswer("", refused=refused)
    if request.made is not None and request.made.id == _running_id(book) and not waiting:
        return RequestAnswer("", refused=f"nothing would change: v{book.running} runs, and is the same")
    made = book.ask(request, now_ns)
    text = f"v{made.number} is made and checked; {when_text(request)}"
    return RequestAnswer(text, to_make=made.number, changed=False)


def back_already(request: UpdateRequest, book: VersionBook) -> RequestAnswer | None:
    """Return the answer to a rollback request if the job has just been rolled back to the running version.

    Such a request was meant for the version that ran before the rollback. None: the request names a version, or the job
    was not rolled back to the running version.
    """
    running, before = book.versions.get(book.running), book.before()
    if not request.rollback or request.version or running is None:
        return None
    further = "to go back further, name a version as well"
    if running.again == request:
        return RequestAnswer(f"requested before: {running.name} runs; {further}", changed=False)
    if before is not None and before.status is VersionStatus.SUSPECT:
        refused = f"v{before.number} was already rolled back, and v{running.number} runs: {further}"
        return RequestAnswer("", refused=refused)
    return None


def same_as(book: VersionBook, number: int) -> str:
    """Return why a new version is refused because another version is identical; empty: it is not refused.

    A version that was rolled back runs again only if it is requested by its number.
    """
    made = book.versions[number]
    if made.runs is None:
        return ""
    for other in book.versions.values():
        if other.number == number or other.runs is None or other.runs.id != made.runs.id:
            continue
        if other.status is VersionStatus.SUSPECT:
            return (
                f"it is the same as v{other.number}, which was rolled back: {other.why}. "
                f"To run it again, request version {other.number}"
            )
        newest = book.pending()[-1].number if book.pending() else book.running
        if other.number == newest:
            state = "runs" if other.status is VersionStatus.RUNNING else "waits for a restart"
            return f"nothing would change: it is the same as v{other.number}, which {state}"
    return ""


def when_text(request: UpdateRequest) -> str:
    """Return when an update is applied, as text for people."""
    if request.urgency is Urgency.URGENT:
        return "it is applied as soon as it passed its checks"
    return f"it is applied with the next recovery, or in {request.window_h:g} h"


def _is_repeated(request: UpdateRequest, version: JobVersion) -> bool:
    """Return whether the request equals the request that led to a version."""
    before = version.again or version.request
    return request.model_dump(exclude={"made"}) == before.model_dump(exclude={"made"}) and _id(request) == _id(before)


def _id(request: UpdateRequest) -> str:
    return request.made.id if request.made else ""


def _running_id(book: VersionBook) -> str:
    running = book.versions.get(book.running)
    return running.runs.id if running and running.runs else ""


def _withdrawn(request: UpdateRequest, book: VersionBook) -> RequestAnswer:
    number = request.cancel
    by = request.operator + (f": {request.reason}" if request.reason else "")
    if book.withdraw(number, f"withdrawn by {by}"):
        return RequestAnswer(f"v{number} is withdrawn")
    version = book.versions.get(number)
    if version is None:
        return RequestAnswer("", refused=f"there is no v{number}; {_known(book)}")
    return RequestAnswer("", refused=f"v{number} is not waiting: it is {version.status}")


def _back(request: UpdateRequest, book: VersionBook, now_ns: int) -> RequestAnswer:
    """Answer a request for a version that the job has."""
    target = book.versions.get(request.version) if request.version else target_of(book.versions.values(), book.running)
    if target is None:
        if request.version:
            return RequestAnswer("", refused=f"there is no v{request.version}; {_known(book)}")
        return RequestAnswer("", refused=f"there is nothing to go back to: no version ran before v{book.running}")
    if target.number == book.running:
        return RequestAnswer("", refused=f"v{target.number} is already running")
    if not target.is_known:
        return RequestAnswer("", refused=f"v{target.number} cannot run: it is {target.status} ({target.why[:200]})")
    if target.status is VersionStatus.PENDING and target.again == request:
        return RequestAnswer(f"requested before: {target.name} waits for a restart", changed=False)
    book.wait_for_restart(target.number, now_ns, request)
    next_version = "the job goes back to" if request.rollback else "the next version is"
    return RequestAnswer(f"{next_version} v{target.number}; {when_text(request)}")


def _known(book: VersionBook) -> str:
    names = [f"v{number} ({version.status})" for number, version in sorted(book.versions.items())]
    return f"there are {', '.join(names[-10:])}" if names else "none is known"
