"""The answer to a request for another version of the code."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.act.versions.book import WAITS, VersionBook
from everstep.decisions.act.versions.rollback import target_of
from everstep.model.version import JobVersion, UpdateRequest, Urgency, VersionStatus

MOST_WAIT = 10
"""Versions of a job that are tried or wait for a restart at the same time."""


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """The result of a request."""

    text: str
    """The result as text for people."""
    refused: str = ""
    """Why nothing was done, and what to do instead; empty: it was."""
    to_make: int = 0
    """Number of a version that has to be made and tried; 0: none."""
    tells: bool = True
    """An incident that is open has to know."""


def answer_to(request: UpdateRequest, book: VersionBook, now_ns: int) -> RequestAnswer:
    """Apply a request to the book.

    Args:
        request: A person's request that is valid by itself.
        book: The versions of the job; changed in place.
        now_ns: The current time.
    """
    if request.cancel:
        return _withdrawn(request, book)
    if request.rollback or request.version:
        return back_already(request, book) or _back(request, book, now_ns)
    for one in book.versions.values():
        if one.status in WAITS | {VersionStatus.RUNNING} and _is_again(request, one):
            return RequestAnswer(f"asked for already: {one.name} is {one.status}", tells=False)
    waiting = [version for version in book.versions.values() if version.status in WAITS]
    if len(waiting) >= MOST_WAIT:
        names = ", ".join(f"v{one.number}" for one in waiting)
        return RequestAnswer("", refused=f"{names} wait already: withdraw some, or wait for the next restart")
    if request.made is not None and request.made.id == _running_id(book) and not waiting:
        return RequestAnswer("", refused=f"nothing changes: v{book.running} is the same, and runs")
    made = book.ask(request, now_ns)
    return RequestAnswer(f"v{made.number} is made and tried; {when_text(request)}", to_make=made.number, tells=False)


def back_already(request: UpdateRequest, book: VersionBook) -> RequestAnswer | None:
    """Return the answer to a rollback request if the job has just rolled back to the running version: the request meant
    the version before.

    None: the request names a version, or the running version is not the result of a rollback.
    """
    running, before = book.versions.get(book.running), book.before()
    if not request.rollback or request.version or running is None:
        return None
    further = "to go back further name a version as well"
    if running.again == request:
        return RequestAnswer(f"asked for already: {running.name} runs; {further}", tells=False)
    if before is not None and before.status is VersionStatus.SUSPECT:
        refused = f"v{before.number} was taken back already, and v{running.number} runs: {further}"
        return RequestAnswer("", refused=refused)
    return None


def same_as(book: VersionBook, number: int) -> str:
    """Return why a new version is not added: another version is identical; empty: none is.

    A version that was rolled back is not tried again, unless it is requested by its number.
    """
    made = book.versions[number]
    if made.runs is None:
        return ""
    for other in book.versions.values():
        if other.number == number or other.runs is None or other.runs.id != made.runs.id:
            continue
        if other.status is VersionStatus.SUSPECT:
            return (
                f"it is the same as v{other.number}, which was taken back: {other.why}. "
                f"To run it all the same ask for version {other.number}"
            )
        newest = book.pending()[-1].number if book.pending() else book.running
        if other.number == newest:
            return f"nothing changes: it is the same as v{other.number}, which {_is_what(other)}"
    return ""


def when_text(request: UpdateRequest) -> str:
    """Return when an update is applied, as text for people."""
    if request.urgency is Urgency.URGENT:
        return "it is applied as soon as it was tried"
    return f"it is applied with the next recovery, or in {request.window_h:g} h"


def _is_again(request: UpdateRequest, one: JobVersion) -> bool:
    """Return whether this is exactly the request that made a version."""
    before = one.again or one.request
    return request.model_dump(exclude={"made"}) == before.model_dump(exclude={"made"}) and _id(request) == _id(before)


def _id(request: UpdateRequest) -> str:
    return request.made.id if request.made else ""


def _is_what(version: JobVersion) -> str:
    return "runs" if version.status is VersionStatus.RUNNING else "waits for a restart"


def _running_id(book: VersionBook) -> str:
    running = book.versions.get(book.running)
    return running.runs.id if running and running.runs else ""


def _withdrawn(request: UpdateRequest, book: VersionBook) -> RequestAnswer:
    number = request.cancel
    who = request.operator + (f": {request.reason}" if request.reason else "")
    if book.withdraw(number, f"withdrawn by {who}"):
        return RequestAnswer(f"v{number} is withdrawn")
    version = book.versions.get(number)
    if version is None:
        return RequestAnswer("", refused=f"there is no v{number}; {_known(book)}")
    return RequestAnswer("", refused=f"v{number} does not wait any more: it is {version.status}")


def _back(request: UpdateRequest, book: VersionBook, now_ns: int) -> RequestAnswer:
    """Answer a request to go back to a version that the job has."""
    target = book.versions.get(request.version) if request.version else target_of(book.versions.values(), book.running)
    if target is None:
        if request.version:
            return RequestAnswer("", refused=f"there is no v{request.version}; {_known(book)}")
        return RequestAnswer("", refused=f"there is nothing to go back to: no version ran before v{book.running}")
    if target.number == book.running:
        return RequestAnswer("", refused=f"v{target.number} runs already")
    if not target.is_known:
        return RequestAnswer("", refused=f"v{target.number} cannot run: it is {target.status} ({target.why[:200]})")
    if target.status is VersionStatus.PENDING and target.again == request:
        return RequestAnswer(f"asked for already: {target.name} waits for a restart", tells=False)
    book.wait_for_restart(target.number, now_ns, request)
    back = "the job goes back to" if request.rollback else "next is"
    return RequestAnswer(f"{back} v{target.number}; {when_text(request)}")


def _known(book: VersionBook) -> str:
    names = [f"v{one.number} ({one.status})" for one in sorted(book.versions.values(), key=lambda one: one.number)]
    return f"there are {', '.join(names[-10:])}" if names else "none is known"
