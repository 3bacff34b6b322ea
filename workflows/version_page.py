"""The versions of a job's code on its page in the Web UI: running, pending and refused ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from everstep.base.text import error_line
from everstep.model.job_state import JobState
from everstep.model.version import JobVersion, Urgency, VersionStatus

SHOWN = 6


def version_rows(state: JobState) -> list[list[str]]:
    """Return a row for each of the last versions: its number, its state, its steps, the author and the reason."""
    return [[f"v{one.number}", _status(one), _steps(one), _who(one)] for one in state.versions[-SHOWN:]]


def pending_text(versions: Sequence[JobVersion]) -> str:
    """Return the pending versions, e.g. ``v3 lazy until 14:05, v4 urgent``; empty: there are none."""
    return ", ".join(f"v{one.number} {_until(one)}" for one in versions if one.status is VersionStatus.PENDING)


def _status(one: JobVersion) -> str:
    match one.status:
        case VersionStatus.PENDING:
            return f"waits, {_until(one)}"
        case VersionStatus.REFUSED | VersionStatus.SUSPECT | VersionStatus.CHECKING | VersionStatus.WITHDRAWN:
            return f"{one.status}: {_cell(one.why)}"
        case _:
            return str(one.status)


def _until(one: JobVersion) -> str:
    if one.wanted.urgency is Urgency.URGENT:
        return "urgent"
    return f"lazy until {datetime.fromtimestamp(one.due_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"


def _steps(one: JobVersion) -> str:
    texts = []
    for _, begin, end in one.ranges[-3:]:
        if begin < 0:
            return "not numbered"
        runs = one.status is VersionStatus.RUNNING  # other versions ran to a step that is not known
        texts.append(f"{begin} to {end}" if end >= 0 else f"from {begin}" if runs else f"{begin} to ?")
    return ", ".join(texts)


def _who(one: JobVersion) -> str:
    if one.number == 1 and not one.request.reason:
        return "as it was started"
    return _cell(": ".join(filter(None, [one.wanted.operator, one.wanted.reason])))


def _cell(text: str) -> str:
    return error_line(text).replace("|", "/")
