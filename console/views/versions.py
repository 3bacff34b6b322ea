"""The versions of a job's code, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.table import Table

from controlplane import text
from controlplane.shown import clean
from everstep.base.text import error_line
from everstep.model.version import NAME_CHARACTERS, JobVersion, Urgency, VersionStatus

RANGES_SHOWN = 3


def outcome_line(version: JobVersion) -> str:
    """The status of a version, for the operator who requested it."""
    name = version.name
    match version.status:
        case VersionStatus.CHECKING:
            return f"{name}: {version.why or 'it is made'}"
        case VersionStatus.PENDING if version.wanted.urgency is Urgency.URGENT:
            return f"{name}: fit, and about to be applied{_told(version)}"
        case VersionStatus.PENDING:
            return f"{name}: fit, and waits for the next recovery, until {_moment(version.due_ns)}{_told(version)}"
        case VersionStatus.RUNNING:
            return f"{name}: runs{_from(version)}"
        case _:
            return f"{name}: {version.status}{': ' if version.why else ''}{clean(version.why)}"


def versions_table(versions: Sequence[JobVersion]) -> Table:
    """A table with one line for each version."""
    table = Table(box=None, pad_edge=False)
    for column in ("Version", "Status", "Steps", "Asked", "By", "Why", "What changed"):
        table.add_column(column, no_wrap=column in {"Version", "Status", "Asked"})
    for one in versions:
        table.add_row(
            one.name,
            status_word(one),
            steps_text(one),
            _moment(one.asked_ns),
            clean(one.wanted.operator) if one.number > 1 else "",
            clean(one.wanted.reason or (error_line(one.why) if one.status in FAILED else "")),
            clean(_first_line(one.changed)),
        )
    return table


FAILED = frozenset({VersionStatus.REFUSED, VersionStatus.SUSPECT})


def status_word(version: JobVersion) -> str:
    """The status in one word; after its job has ended, no version counts as running."""
    return "ended" if version.status is VersionStatus.RUNNING and version.ended else str(version.status)


def run_line(started_ns: int, outcome: str) -> str:
    """Title of a run's versions."""
    return f"run of {_moment(started_ns)}{f', {clean(outcome)}' if outcome else ''}"


def detail_lines(version: JobVersion) -> list[str]:
    """All details of one version."""
    runs, origin = version.runs, version.runs.origin if version.runs else None
    commit = f"{origin.commit[:NAME_CHARACTERS]} of {origin.author}: {origin.subject}" if origin else ""
    facts = [
        ("status", f"{status_word(version)}{': ' if version.why else ''}{version.why}"),
        ("asked", f"{_moment(version.asked_ns)} by {version.wanted.operator}"),
        ("why", version.wanted.reason),
        ("steps", steps_text(version)),
        ("ended", version.ended),
        ("code", (runs.code[:NAME_CHARACTERS] or f"in place: {runs.script}") if runs else ""),
        ("folder", origin.folder if origin else ""),
        ("commit", commit + (", with changes" if origin and origin.dirty else "") if origin and origin.commit else ""),
        ("script", " ".join([runs.script, *runs.args]) if runs else ""),
        ("changed", version.changed),
    ]
    shown = [(name, clean(value)) for name, value in facts if value]
    return [version.name, *(f"    {name:8}  {value.replace(chr(10), chr(10) + ' ' * 14)}" for name, value in shown)]


def steps_text(version: JobVersion) -> str:
    """The steps that ran under a version, such as ``0 to 120, from 180``."""
    texts = []
    for _, begin, end in version.ranges[-RANGES_SHOWN:]:
        if begin < 0:
            return "not numbered"
        runs = version.status is VersionStatus.RUNNING  # otherwise its last step is not known
        texts.append(f"{begin} to {end}" if end >= 0 else f"from {begin}" if runs else f"{begin} to ?")
    more = len(version.ranges) - RANGES_SHOWN
    return ", ".join(texts) + (f" (+{more} more)" if more > 0 else "")


def _moment(time_ns: int) -> str:
    return text.moment(datetime.fromtimestamp(time_ns / 1e9, UTC) if time_ns else None)


def _told(version: JobVersion) -> str:
    return f" ({clean(version.why)})" if version.why else ""


def _from(version: JobVersion) -> str:
    begin = version.ranges[-1][1] if version.ranges else -1
    return f" from step {begin}" if begin >= 0 else ""


def _first_line(value: str) -> str:
    return value.strip().splitlines()[0] if value.strip() else ""
